"""Backwards of head dims in two panels on a Hopper GPU, against padded ones: checked, then timed.

    python -m tests.benchmarks.attention.headdims_backward --out FILE [--defaults] [--dims 192 ...]
        [--only pair halves ...]

For each head dim the candidates are FA3's kernel with head dims padded to a power of two, as two
panels, and as two panels with each use of the shared memory and registers that they leave: more
slots of Q and dO, products that are issued early; above head_dim 128 padded, and with `halves` and
`pair` of `BackwardConfig`; with --only, the default and those that are named. One process for each
candidate and mask compiles it and checks it within the error budget on small calls: ragged ends,
two query heads to a key head, in any order and in turns. Each has a time limit, and one that fails
is not timed. Then the candidates of a shape take turns with cuDNN and flash-attn-4, each as a CUDA
graph with a cold L2 cache (flash_versions/bench/measure.py). A backward is all its kernels. The
last lines are a summary: for each shape the rates of peers, of padding, of the default and of the
fastest candidate.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from flash_versions.bench.document import new_document
from flash_versions.dispatch.autograd.compute import in_vectors, narrowed
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.fa3 import forward
from flash_versions.versions.fa3.hopper.backward import host, kernel
from flash_versions.versions.fa3.hopper.backward.config import (
    BackwardConfig,
    default_config,
)
from flash_versions.versions.oracle.budget import assess_request
from tests.benchmarks.attention.headdims import PEERS, SMALL, TOKENS, Shape, drawn, head_dims
from tests.benchmarks.attention.packed import time_all
from tests.benchmarks.frame import keep, parser, passed

SUITE = "head dims, backward"
# Of q and k, and of v; the most interesting first, as the time may be up before the last.
DIMS = [
    (192, 192), (64, 64), (128, 128), (96, 96), (192, 128), (256, 256), (80, 80), (160, 160),
    (128, 96),
]  # fmt: skip
LENGTHS = (512, 8192, 1024, 2048, 4096, 16384)
PROCESSES = min(40, os.cpu_count() or 1)
only_defaults = False  # --defaults
only: tuple[str, ...] = ()  # --only
CHECK_SECONDS = 100  # of a candidate's process at most
THE_PEERS = "the peers"  # --check: compile them, for their caches on disk
NARROW: dict[str, dict[str, Any]] = {  # up to head_dim 128
    "padded": {},
    "panels": {"panels": True},
    "panels, 3 slots": {"panels": True, "stages": 3},
    "panels, early": {"panels": True, "early": True},
    "panels, early, 3 slots": {"panels": True, "early": True, "stages": 3},
}
WIDE: dict[str, dict[str, Any]] = {
    "padded": {},
    "halves": {"block_kv": 128, "panels": True, "halves": True},
    "pair": {"block_kv": 128, "panels": True, "pair": True},
}


class Call(NamedTuple):
    """What a backward is given."""

    request: Request
    o: torch.Tensor
    lse: torch.Tensor
    do: torch.Tensor

    @classmethod
    def of(cls, q, k, v, **options) -> "Call":
        """Of tensors, with a random gradient."""
        request = in_vectors(make_request(q, k, v, **options))
        o, lse, _ = forward.forward(request)
        return cls(request, o, lse, torch.randn_like(o))

    def planned(self, config: BackwardConfig) -> Callable:
        """FA3's kernels for Hopper."""
        plan = host.make_plan(self.request, config)
        rest = self.o, self.lse, None, self.do, None
        return lambda: kernel.launch(plan, self.request, *rest)[:3]

    def peer(self, function: Any) -> Callable:
        """A peer's backward, through autograd."""
        leaves = [x.detach().requires_grad_() for x in self.request[:3]]
        o = function(*leaves, causal=self.request.window_right == 0)
        return lambda: torch.autograd.grad(o, leaves, self.do, retain_graph=True)


def kernel_of(request: Request, config: BackwardConfig) -> tuple:
    """What tells kernels apart: a configuration with panels may have none to divide."""
    widths = tuple(config.widths(x.shape[3]) for x in (request.q, request.v))
    return widths, *(asdict(config) | {"panels": None}).values()


def candidates(request: Request) -> dict[str, BackwardConfig]:
    """All that fit a request, by name, with two slots of K and V where these fit, and "other
    default" if the default is none of them; up to head_dim 128, where no head dim can be divided,
    padding alone.
    """
    dims = request.q.shape[3], request.v.shape[3]
    wide = max(dims) > 128
    plain = BackwardConfig(block_kv=64 if wide else 128)
    named = {name: replace(plain, **x) for name, x in (WIDE if wide else NARROW).items()}
    if not wide:
        deeper = {name: replace(config, kv_stages=2) for name, config in named.items()}
        named |= {name: config for name, config in deeper.items() if config.fits(*dims)}
    named = {name: config for name, config in named.items() if config.fits(*dims)}
    padded = named["padded"]
    if not wide and kernel_of(request, named["panels"])[0] == kernel_of(request, padded)[0]:
        named = {"padded": padded}
    if default_name(request, named) is None:
        named["other default"] = default_config(request)
    return named


def default_name(request: Request, named: dict[str, BackwardConfig]) -> str | None:
    """Which of the candidates the default is."""
    default = kernel_of(request, default_config(request))
    return next((x for x, config in named.items() if kernel_of(request, config) == default), None)


def check(dims: tuple[int, int], causal: bool, name: str) -> float:
    """The largest share of the budget that an error of a candidate takes on small calls.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    worst = 0.0
    sizes = ((1, SMALL, SMALL, 2, dims), False), ((2, 333, 700, 4, dims, 2), False)
    for size, ordered in (*sizes, (sizes[1][0], True)):
        call = Call.of(*drawn(*size), causal=causal, deterministic=ordered)
        found = call.planned(candidates(call.request)[name])()
        named = {
            x: narrowed(gradient, like)
            for x, gradient, like in zip(("dq", "dk", "dv"), found, call.request[:3])
        }
        for x, accuracy in assess_request(named, call.request, call.do).items():
            assert accuracy.ok, f"{name}: {x}: {accuracy}"
            worst = max(worst, accuracy.error / accuracy.budget)
    return worst


def compile_peers(dims: tuple[int, int], causal: bool) -> None:
    """Call the peers once."""
    call = Call.of(*drawn(1, SMALL, SMALL, 2, dims), causal=causal)
    for function in PEERS.values():
        with suppress(Exception):  # `measure` tells the reason
            call.peer(function)()


def warm_up(job: tuple[tuple[int, int], bool, str], seconds: float) -> bool:
    """Compile and check a candidate, in a process of its own that begins before so many seconds
    have passed; whether it is right.
    """
    dims, causal, name = job
    text = f"{dims[0]}x{dims[1]}"
    what = f"{text}, {'causal' if causal else 'full'}, {name}"
    if passed() > seconds:
        print(f"{what}: the time is up before it is checked", flush=True)
        return False
    command = [sys.executable, "-m", "tests.benchmarks.attention.headdims_backward"]
    command += ["--out", "none", "--dims", text, "--check", name] + ["--causal"] * causal
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=CHECK_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{what}: takes more than {CHECK_SECONDS} s, or waits for ever", flush=True)
        return False
    failed = done.returncode != 0
    print(f"{what}: {(done.stdout + done.stderr[-1500:] * failed).strip()}", flush=True)
    return not failed


def measure(shape: Shape, right: set[str]) -> list[dict]:
    """Rows of a shape's contestants, with their times or the reason why there is none."""
    call = Call.of(*shape.inputs(), causal=shape.causal)
    head_dim, head_dim_v = shape.dims
    flops = shape.flops * (3 * head_dim + 2 * head_dim_v) / (head_dim + head_dim_v)
    about = {"suite": SUITE, **shape._asdict(), "heads": shape.heads, "flops": flops}
    contestants: list[tuple[dict, Callable]] = [
        (about | {"version": name, "name": ""}, partial(call.peer, function))
        for name, function in PEERS.items()
    ]
    named = candidates(call.request)
    default = default_name(call.request, named)
    for name, config in named.items():
        if name in right:
            row = {"version": "fa3", "name": name, "default": name == default, **asdict(config)}
            contestants.append((about | row, partial(call.planned, config)))
    return time_all(contestants)


def summary(rows: list[dict]) -> str:
    """A line for each shape."""
    lines = ["TFLOP/s: cuDNN, flash-attn-4 | padded, default | the fastest"]
    for shape in dict.fromkeys((row["dims"], row["causal"], row["length"]) for row in rows):
        mine = [
            row
            for row in rows
            if (row["dims"], row["causal"], row["length"]) == shape and "tflops" in row
        ]
        speed = {row["name"] or row["version"]: row["tflops"] for row in mine}
        speed["default"] = next((row["tflops"] for row in mine if row.get("default")), 0)
        own = [row for row in mine if row["version"] == "fa3"]
        best = max(own, key=lambda row: row["tflops"])["name"] if own else "none"
        rates = [f"{speed.get(name, 0):4.0f}" for name in (*PEERS, "padded", "default", best)]
        (head_dim, head_dim_v), causal, length = shape
        what = f"{head_dim}x{head_dim_v} {'causal' if causal else 'full'} {length}"
        lines.append(f"{what:>22}: {' '.join(rates)} {best}")
    return "\n".join(lines)


def names(dims: tuple[int, int], causal: bool) -> list[str]:
    """The candidates for head dims that were asked for; the default is always one of them."""
    q, k, v = (torch.empty(1, 64, 1, d, dtype=torch.bfloat16) for d in (dims[0], *dims))
    request = make_request(q, k, v, causal=causal)
    named = candidates(request)
    wanted = ("padded",) if only_defaults else only
    default = default_name(request, named)
    return [x for x in named if not wanted or x in (*wanted, default)]


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=500, device=False)
    command.add_argument("--dims", type=head_dims, nargs="+", default=DIMS, help="such as 192x128")
    command.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    command.add_argument("--check", metavar="NAME", help="check a candidate, measure nothing")
    command.add_argument("--causal", action="store_true", help="what --check is about")
    command.add_argument("--defaults", action="store_true", help="beside padding and the peers")
    command.add_argument("--only", nargs="+", default=[], help="candidates beside the default")
    arguments = command.parse_args()
    global only_defaults, only
    only_defaults, only = arguments.defaults, tuple(arguments.only)
    if arguments.check == THE_PEERS:
        compile_peers(arguments.dims[0], arguments.causal)
        print("compiled", flush=True)
        return 0
    if arguments.check is not None:
        share = check(arguments.dims[0], arguments.causal, arguments.check)
        print(f"within the budget, {share:.2f} of it", flush=True)
        return 0
    kinds = list(product(arguments.dims, (True, False)))
    jobs = [(*kind, name) for kind in kinds for name in (THE_PEERS, *names(*kind))]
    with ThreadPoolExecutor(PROCESSES) as pool:
        right = list(pool.map(partial(warm_up, seconds=arguments.seconds * 0.6), jobs))
    failed = [job for job, is_right in zip(jobs, right) if not is_right and job[2] != THE_PEERS]
    document = new_document(suite=SUITE, tokens=TOKENS)
    document["failed"] = failed
    for length, dims, causal in product(arguments.lengths, arguments.dims, (True, False)):
        if passed() > arguments.seconds:
            print("the time is up", flush=True)
            break
        named = {job[2] for job in jobs if job[:2] == (dims, causal) and job not in failed}
        hidden = ["suite", "flops", "heads", *BackwardConfig.__dataclass_fields__]
        keep(document, arguments.out, measure(Shape(dims, causal, length), named), hidden)
    print(summary(document["rows"]), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
