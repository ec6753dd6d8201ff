"""Forwards of every head dim on a Hopper GPU, with every tile that fits: checked, then timed.

    python -m tests.benchmarks.attention.headdims --out FILE [--defaults] [--dims 192 192x128 ...]

For each head dim the candidates are FA3's and FA4's kernels as they choose their tiles; FA3's with
every other tile that fits in shared memory and registers, with as many slots of K and V as fit; and
both with one switch turned. Processes compile them side by side, and check each within the error
budget on a small call that needs the same compiled kernel. A head dim of which one fails is not
timed. Then the candidates of a shape take turns with cuDNN and flash-attn-4, each as a CUDA graph
with a cold L2 cache (flash_versions/bench/measure.py). Shapes have 16384 tokens and heads for 2048
dims or a little less. The last lines are a summary: for each shape the fastest candidate beside the
default.
"""

import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from torch.nn.attention import SDPBackend  # noqa: E402

from flash_versions.bench import peers  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.measure import captured, reason, timed  # noqa: E402
from flash_versions.dispatch.autograd.compute import in_vectors, narrowed  # noqa: E402
from flash_versions.dispatch.request import Request, make_request  # noqa: E402
from flash_versions.dispatch.sizes import panel_widths  # noqa: E402
from flash_versions.versions.fa3.hopper import config as fa3_config  # noqa: E402
from flash_versions.versions.fa3.hopper import host as fa3_forward  # noqa: E402
from flash_versions.versions.fa3.hopper.config import HopperConfig  # noqa: E402
from flash_versions.versions.fa4.hopper import config as fa4_config  # noqa: E402
from flash_versions.versions.fa4.hopper import host as fa4_forward  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from tests.benchmarks.frame import keep, parser, passed  # noqa: E402

SUITE = "head dims"
# Of q and k, and of v; the most interesting first, as the time may be up before the last.
DIMS = [
    (192, 192), (192, 128), (256, 256), (96, 96), (80, 80), (160, 160), (128, 128), (64, 64),
    (112, 112), (224, 224), (32, 32),
]  # fmt: skip
LENGTHS = (8192, 2048, 16384)
TOKENS, HIDDEN = 16384, 2048
SMALL = 512  # rows of the checks: whole tiles, as in the measurement
ROUNDS = 10
PROCESSES = 15
PARTS = 3  # processes for the candidates of a head dim and a mask
WARM_UP_SECONDS = 200  # of such a process at most
# Registers of a thread that a tile may take for O, S and P, by consumers; without the addresses.
REGISTERS = {2: 192, 3: 128}
SLOTS = (4, 3, 2, 1)  # of K and V, most first
only_defaults = False  # --defaults
PEERS = {
    "cudnn": partial(peers.torch_backend, SDPBackend.CUDNN_ATTENTION),
    "flash-attn-4": peers.flash_attn_4,
}


class Candidate(NamedTuple):
    """A configuration of a version's kernel for Hopper.

    Attributes:
        version: "fa3" or "fa4".
        name: "default", or what is other than there.
        config: the switches.
    """

    version: str
    name: str
    config: HopperConfig

    def forward(self, request: Request) -> tuple[torch.Tensor, torch.Tensor]:
        """(o, lse) of a request that is `in_vectors`."""
        kernel = {"fa3": fa3_forward, "fa4": fa4_forward}[self.version]
        o, lse, _ = kernel.forward(request, self.config)
        return o, lse


class Shape(NamedTuple):
    """What is measured: as many queries as keys and as many key heads as query heads."""

    dims: tuple[int, int]
    causal: bool
    length: int

    @property
    def heads(self) -> int:
        """Heads of a row of about HIDDEN dims."""
        return HIDDEN // max(self.dims)

    @property
    def flops(self) -> float:
        """Of a forward, by FlashAttention's formula."""
        batch = max(1, TOKENS // self.length)
        seen = self.length**2 / (2 if self.causal else 1)
        return 2 * batch * self.heads * seen * sum(self.dims)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v."""
        return drawn(max(1, TOKENS // self.length), self.length, self.length, self.heads, self.dims)


def drawn(batch: int, queries: int, keys: int, heads: int, dims: tuple[int, int], group: int = 1):
    """Random q, k and v on the GPU."""
    generator = torch.Generator("cuda").manual_seed(queries)
    given: dict[str, Any] = {"generator": generator, "device": "cuda", "dtype": torch.bfloat16}
    return (
        torch.randn(batch, queries, heads, dims[0], **given),
        torch.randn(batch, keys, heads // group, dims[0], **given),
        torch.randn(batch, keys, heads // group, dims[1], **given),
    )


def candidates(request: Request) -> list[Candidate]:
    """All that compete for a request; none twice."""
    found: dict[tuple[str, HopperConfig], Candidate] = {}
    others = () if only_defaults else (*other_tiles(request), *turned(request))
    for candidate in (*defaults(request), *others):
        found.setdefault((candidate.version, candidate.config), candidate)
    return list(found.values())


def defaults(request: Request) -> Iterator[Candidate]:
    """What the versions choose."""
    yield Candidate("fa3", "default", fa3_config.default_config(request))
    yield Candidate("fa4", "default", fa4_config.default_config(request))


def other_tiles(request: Request) -> Iterator[Candidate]:
    """FA3's kernel with every tile that fits, and the rest of shared memory divided between a
    second Q, a buffer for O and slots of K and V: with less of the first two only if there are more
    slots for it.
    """
    default = fa3_config.overlapping_config(request)
    widths, widths_v = panel_widths(request.q.shape[3]), panel_widths(request.v.shape[3])
    width, width_v = sum(widths), sum(widths_v)
    for consumers, block_kv in product((2, 3), (128, 64)):
        if width_v // 2 + block_kv // 2 + block_kv // 4 > REGISTERS[consumers]:
            continue
        most = 0 if block_kv == 128 else 1  # one slot of 64 keys is not worth a try
        for q_stages, o_columns in product((2, 1), (128, 64)):
            tile = replace(
                default, consumers=consumers, block_kv=block_kv, q_stages=q_stages,
                o_columns=o_columns,
            )  # fmt: skip
            config = filled(tile, width, width_v)
            if config and config.stages > most:
                yield Candidate("fa3", named(config), config)
                most = config.stages


def filled(tile: HopperConfig, width: int, width_v: int) -> HopperConfig | None:
    """A tile with as many slots of K and V as fit."""
    for stages in SLOTS:
        config = replace(tile, stages=stages, ping_pong=tile.ping_pong and stages > 1)
        if config.fits(width, width_v):
            return config
    return None


def named(config: HopperConfig) -> str:
    """A tile in few words."""
    q, o = f"{config.q_stages} Q", f"O by {config.o_columns}"
    return f"{config.block_q}x{config.block_kv}, {config.stages} K and V, {q}, {o}"


def turned(request: Request) -> Iterator[Candidate]:
    """The defaults with one switch turned, or two that belong together."""
    causal = request.window_right is not None
    switches: dict[str, dict[str, Any]] = {
        "ping-pong": {"ping_pong": True},
        "no ping-pong": {"ping_pong": False},
        "late wait": {"late_wait": True},
        **{scheduler: {"scheduler": scheduler} for scheduler in fa3_config.SCHEDULERS},
    }
    if causal:
        switches |= {f"section of {n}": {"section": n} for n in (1, 2, 4, 8)}
    fa3 = fa3_config.default_config(request)
    for name, values in switches.items():
        yield Candidate("fa3", name, replace(fa3, **values))
    if max(request.q.shape[3], request.v.shape[3]) > 128:  # S and P of 128 keys, one by one
        in_order = {"block_kv": 128, "stages": 1, "overlap": False}
        yield Candidate("fa3", "128 keys in order", replace(fa3, **in_order))
    fa4 = fa4_config.default_config(request)
    yield Candidate("fa4", "rescale always", replace(fa4, threshold=0.0))
    yield Candidate("fa4", "rescale if raised", replace(fa4, threshold=8.0))
    yield Candidate("fa4", "no ping-pong", replace(fa4, ping_pong=False))


def check(dims: tuple[int, int], causal: bool, part: int) -> float:
    """The largest share of the budget that an error takes, of a part of the candidates on a small
    call; of the defaults also on one with ragged ends and two query heads to a key head. The first
    part compiles the peers, too.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    q, k, v = drawn(1, SMALL, SMALL, 2, dims)
    small = in_vectors(make_request(q, k, v, causal=causal))
    for function in PEERS.values() if part == 0 else ():
        with suppress(Exception):  # `measure` tells the reason
            function(q, k, v, causal=causal)
    q, k, v = drawn(2, 333, 700, 4, dims, group=2)
    ragged = in_vectors(make_request(q, k, v, causal=causal))
    checks = [(candidate, small) for candidate in candidates(small)]
    checks += [(candidate, ragged) for candidate in defaults(ragged)]
    worst = 0.0
    for candidate, request in checks[part :: 1 if only_defaults else PARTS]:
        if reason_not := unfit(candidate.config, request):
            print(f"{candidate.version}, {candidate.name}: {reason_not}")
            continue
        o, lse = candidate.forward(request)
        found = {"o": narrowed(o, request.v), "lse": lse}
        for name, accuracy in assess_request(found, request).items():
            assert accuracy.ok, f"{candidate}: {name}: {accuracy}"
            worst = max(worst, accuracy.error / accuracy.budget)
    return worst


def unfit(config: HopperConfig, request: Request) -> str | None:
    """Why a configuration does not fit a request, or None."""
    widths, widths_v = panel_widths(request.q.shape[3]), panel_widths(request.v.shape[3])
    return None if config.fits(sum(widths), sum(widths_v)) else "does not fit in shared memory"


def contestants(shape: Shape) -> list[tuple[dict, Callable]]:
    """(row, what prepares the call) of candidates and peers."""
    q, k, v = shape.inputs()
    request = in_vectors(make_request(q, k, v, causal=shape.causal))
    about = {"suite": SUITE, **shape._asdict(), "heads": shape.heads, "flops": shape.flops}
    found: list[tuple[dict, Callable]] = []
    for name, function in PEERS.items():
        call = partial(function, q, k, v, causal=shape.causal)
        found.append((about | {"version": name, "name": ""}, partial(prepared, call)))
    for candidate in candidates(request):
        if unfit(candidate.config, request):
            continue
        row = {"version": candidate.version, "name": candidate.name, **vars(candidate.config)}
        call = partial(candidate.forward, request)
        found.append((about | row, partial(prepared, call)))
    return found


def prepared(call: Callable) -> Callable:
    """The call, which has nothing to prepare."""
    return lambda: (call(),)


def measure(shape: Shape) -> list[dict]:
    """Rows of a shape's contestants, with their times or the reason why there is none."""
    rows, replays = [], {}
    for row, prepare in contestants(shape):
        try:
            replays[str(len(rows))] = captured(prepare)[0]
        except Exception as error:  # whatever a library raises, the others are measured
            row["reason"] = reason(error)
        rows.append(row)
    for i, times in timed(replays, ROUNDS).items():
        ms = statistics.median(times)
        rows[int(i)] |= {"ms_p50": ms, "tflops": rows[int(i)]["flops"] / ms / 1e9}
    return rows


def summary(rows: list[dict]) -> str:
    """A line for each shape: peers, defaults, and the fastest candidates of FA3 and FA4."""
    lines = ["TFLOP/s: cuDNN, flash-attn-4 | fa3, fa4 by default | the fastest of each"]
    shapes = dict.fromkeys((row["dims"], row["causal"], row["length"]) for row in rows)
    for shape in shapes:
        mine = [
            row
            for row in rows
            if (row["dims"], row["causal"], row["length"]) == shape and "tflops" in row
        ]
        speed = {(row["version"], row["name"]): row["tflops"] for row in mine}
        parts = [f"{speed.get((name, ''), 0):4.0f}" for name in PEERS] + ["|"]
        parts += [f"{speed.get((name, 'default'), 0):4.0f}" for name in ("fa3", "fa4")] + ["|"]
        for version in ("fa3", "fa4"):
            own = [row for row in mine if row["version"] == version]
            if own:
                best = max(own, key=lambda row: row["tflops"])
                parts.append(f"{best['tflops']:4.0f} {version} {best['name']};")
        (head_dim, head_dim_v), causal, length = shape
        what = f"{head_dim}x{head_dim_v} {'causal' if causal else 'full'} {length}"
        lines.append(f"{what:>22}: {' '.join(parts)}")
    return "\n".join(lines)


def warm_up(job: tuple[tuple[int, int], bool, int], seconds: float) -> bool:
    """Compile and check a part of a head dim's candidates, in a process of its own that begins
    before so many seconds have passed; whether all are right.
    """
    dims, causal, part = job
    text = f"{dims[0]}x{dims[1]}"
    what = f"{text}, {'causal' if causal else 'full'}, part {part}"
    if passed() > seconds:
        print(f"{what}: the time is up before it is checked", flush=True)
        return False
    command = [sys.executable, "-m", "tests.benchmarks.attention.headdims", "--out", "none"]
    command += ["--dims", text, "--check", str(part)] + ["--causal"] * causal
    command += ["--defaults"] * only_defaults
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WARM_UP_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{what}: takes more than {WARM_UP_SECONDS} s, or waits for ever", flush=True)
        return False
    failed = done.returncode != 0
    print(f"{what}: {(done.stdout + done.stderr[-1500:] * failed).strip()}", flush=True)
    return not failed


def head_dims(text: str) -> tuple[int, int]:
    """(192, 128) of "192x128", (96, 96) of "96"."""
    head_dim, _, head_dim_v = text.partition("x")
    return int(head_dim), int(head_dim_v or head_dim)


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=500, device=False)
    command.add_argument("--dims", type=head_dims, nargs="+", default=DIMS, help="such as 192x128")
    command.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    command.add_argument("--check", type=int, metavar="PART", help="check a part, measure nothing")
    command.add_argument("--causal", action="store_true", help="what --check is about")
    command.add_argument("--defaults", action="store_true", help="and the peers: no other tiles")
    arguments = command.parse_args()
    global only_defaults
    only_defaults = arguments.defaults
    if arguments.check is not None:
        share = check(arguments.dims[0], arguments.causal, arguments.check)
        print(f"within the budget, {share:.2f} of it", flush=True)
        return 0
    parts = 1 if only_defaults else PARTS
    jobs = list(product(arguments.dims, (True, False), range(parts)))
    with ThreadPoolExecutor(PROCESSES) as pool:
        right = list(pool.map(partial(warm_up, seconds=arguments.seconds * 0.6), jobs))
    failed = {job[:2] for job, is_right in zip(jobs, right) if not is_right}
    document = new_document(suite=SUITE, tokens=TOKENS)
    document["failed"] = sorted(failed)
    for length, dims, causal in product(arguments.lengths, arguments.dims, (True, False)):
        if (dims, causal) in failed:
            continue
        if passed() > arguments.seconds:
            print("the time is up", flush=True)
            break
        shape = Shape(dims, causal, length)
        keep(document, arguments.out, measure(shape), hidden=hidden_fields())
    print(summary(document["rows"]), flush=True)
    return bool(failed)


def hidden_fields() -> list[str]:
    """Fields of a row that are not printed: the name says what is other than by default."""
    return ["suite", "flops", "heads", *HopperConfig.__dataclass_fields__, "threshold", "eighths"]


if __name__ == "__main__":
    sys.exit(main())
