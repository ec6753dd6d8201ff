"""Few tiles of keys and groups of query heads on a Hopper GPU, backward: checked, then timed.

    python -m tests.benchmarks.attention.parts --out FILE [--seconds 95] [--only prompt packed ...]
        [--dims 256 ...]

The query heads of a key head are divided over 1, 2 or 4 programs (`parts` of `BackwardConfig`): a
prompt of 2048 tokens with 16 answers of 256, against 16 rows with copies of it; causal and full
calls; packed sequences, 32768 tokens together. All have 4 or 8 key heads, each of 4 query heads.

First, a process for each kernel checks it within the error budget on a small call, dK and dV to the
bit in a second call. Then the contestants of a shape take turns, each as a CUDA graph with a cold
L2 cache (flash_versions/bench/measure.py). A backward is all its kernels.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from flash_versions import masks
from flash_versions.bench.document import new_document
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.fa3.hopper.backward.config import default_config, heads_in_cache
from flash_versions.versions.oracle.budget import assess_request
from tests.benchmarks.attention.headdims_backward import Call
from tests.benchmarks.attention.packed import Shape as Packed
from tests.benchmarks.frame import in_time, keep, parser, share, time_all, wrong

# By the largest head_dim: up to 128; above it with tiles of 128 keys; with tiles of 64 keys.
SUITES = {128: "divided groups", 192: "divided groups, 192", 256: "divided groups, wide"}
KINDS = ("prompt", "causal", "packed", "full", "in turns")
GROUP = 4
HEAD_DIMS = (128, 64)
PARTS = (1, 2, 4)
SIZES = {  # (rows, tokens, key heads)
    "causal": ((1, 512, 4), (1, 2048, 4), (1, 2048, 8), (1, 8192, 8), (4, 2048, 8), (2, 8192, 8)),
    "full": ((1, 512, 4), (1, 2048, 8), (4, 2048, 8)),
    "in turns": ((1, 2048, 4),),
}
PROMPT, ANSWERS = 2048, [256] * 16
NUMBERS = {256: 0, 512: 1, 1024: 2, 2048: 3, 4096: 4}  # of packed.py's draws, by mean length
PROCESSES = 15
CHECK_SECONDS = 80  # of a kernel's process at most
device = "cuda"


class Shape(NamedTuple):
    """A call of a kind."""

    kind: str
    head_dim: int
    kv_heads: int
    batch: int
    lengths: tuple[int, ...]  # of the only sequence, of packed ones, or of a prompt and answers

    def request(self, copies: bool = False) -> Request:
        """Random tensors of the call; of a prompt also a row for each answer, with a copy of it."""
        prompt, *answers = self.lengths
        tokens, batch, options = sum(self.lengths), self.batch, {"causal": self.kind != "full"}
        if copies:
            tokens, batch = prompt + answers[0], batch * len(answers)
        elif self.kind == "prompt":
            options = masks.shared_prompt(prompt, answers, device=device)
        elif self.kind == "packed":
            bounds = torch.tensor([0, *self.lengths], device=device).cumsum(0).int()
            options["cu_seqlens_q"] = bounds
        elif self.kind == "in turns":
            options["deterministic"] = True
        heads = self.kv_heads * GROUP, self.kv_heads, self.kv_heads
        given = {"device": device, "dtype": torch.bfloat16}
        q, k, v = (torch.randn(batch, tokens, n, self.head_dim, **given) for n in heads)
        if self.kind == "packed":
            q, k, v = q[0], k[0], v[0]
        return make_request(q, k, v, **options)

    @property
    def pairs(self) -> float:
        """Of a query and a key that it sees, in a head."""
        prompt, *answers = self.lengths
        if self.kind == "prompt":
            return prompt**2 / 2 + sum(prompt * n + n * n / 2 for n in answers)
        return sum(n * n for n in self.lengths) / (1 if self.kind == "full" else 2)


def shapes(kinds: list[str], dims: Sequence[int] = HEAD_DIMS) -> Iterator[Shape]:
    """All of these kinds and head dims, the most interesting first."""
    for kind in kinds:
        if kind == "prompt":
            for batch, head_dim in product((1, 2), dims):
                yield Shape(kind, head_dim, 4, batch, (PROMPT, *ANSWERS))
        elif kind == "packed":
            for mean, head_dim in product(NUMBERS, dims):
                yield Shape(kind, head_dim, 4, 1, Packed.drawn(NUMBERS[mean]).lengths)
        else:
            for (batch, length, kv_heads), head_dim in product(SIZES[kind], dims):
                yield Shape(kind, head_dim, kv_heads, batch, (length,))


def planned(call: Call, parts: int | None = None) -> Callable:
    """FA3's kernels for Hopper; None chooses."""
    request, config = call.request, default_config(call.request)
    if parts is not None:
        if request.window_right is not None and not request.is_deterministic:  # sections count
            heads = request.k.shape[0] * request.k.shape[2]
            config = replace(config, section=min(heads, heads_in_cache(request)))
        config = replace(config, parts=parts)
    return call.planned(config)


def check(kind: str, head_dim: int, parts: int) -> float:
    """The largest share of the budget that an error of a kernel takes on small calls.

    Raises:
        AssertionError: an error is beyond the budget, or dK or dV does not repeat.
    """
    worst = 0.0
    small = {"prompt": (500, 200, 77, 0, 150), "packed": (500, 0, 333, 64, 7, 1), "full": (700,)}
    for kv_heads, batch in ((2, 1), (4, 1), (2, 1 if kind == "packed" else 2)):
        call = Call.of(Shape(kind, head_dim, kv_heads, batch, small.get(kind, (900,))).request())
        compute = planned(call, parts)
        found = dict(zip(("dq", "dk", "dv"), compute()))
        worst = max(worst, share(kind, assess_request(found, call.request, call.do)))
        for _ in range(20):
            again = dict(zip(found, compute()))
            for name in found if kind == "in turns" else ("dk", "dv"):
                assert torch.equal(again[name], found[name]), f"{name} does not repeat"
    return worst


def suite_of(head_dim: int) -> str:
    """The suite of calls with this head_dim."""
    return next(suite for most, suite in SUITES.items() if head_dim <= most)


def contestants(shape: Shape, right: list[int]) -> Iterator[tuple[dict, Callable]]:
    """(row, what prepares the call) of each."""
    call = Call.of(shape.request())
    flops = 10 * shape.pairs * shape.head_dim * shape.kv_heads * GROUP * shape.batch
    suite = suite_of(shape.head_dim)
    about: dict[str, Any] = {"suite": suite, **shape._asdict(), "group": GROUP, "flops": flops}
    if shape.kind == "prompt":
        copies = partial(planned, Call.of(shape.request(copies=True)))
        yield about | {"name": "copies", "parts": 1, "default": False}, copies
    default = default_config(call.request)
    for parts in right:
        row = {"name": f"{parts}", "parts": parts, "default": parts == default.parts}
        yield about | row, partial(planned, call, None if row["default"] else parts)


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=95, device=False)
    command.add_argument("--only", choices=KINDS, nargs="+", default=list(KINDS))
    command.add_argument("--check", metavar="WHAT", help="check a kernel, measure nothing")
    command.add_argument("--dims", type=int, nargs="+", default=HEAD_DIMS, help="head dims")
    arguments = command.parse_args()
    if arguments.check is not None:
        *kind, head_dim, parts = arguments.check.split()
        worst = check(" ".join(kind), int(head_dim), int(parts))
        print(f"within the budget, {worst:.2f} of it", flush=True)
        return 0
    jobs = {
        ("--check", f"{kind} {head_dim} {parts}"): (kind, head_dim, parts)
        for kind, head_dim, parts in product(arguments.only, arguments.dims, PARTS)
    }
    document = new_document(suite=suite_of(max(arguments.dims)))
    document["failed"] = wrong("attention.parts", jobs, PROCESSES, CHECK_SECONDS)
    right = {job for name, job in jobs.items() if name not in document["failed"]}
    for shape in in_time(shapes(arguments.only, arguments.dims), arguments.seconds):
        parts = [x for x in PARTS if (shape.kind, shape.head_dim, x) in right]
        keep(document, arguments.out, time_all(list(contestants(shape, parts))), hidden=("suite",))
    return bool(document["failed"])


if __name__ == "__main__":
    sys.exit(main())
