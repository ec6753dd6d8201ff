"""Decoding over caches of rows of different lengths and in pages: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.decode --out FILE [--seconds 80] [--only NAME ...]

First, processes side by side compile all kernels and check drawn cases: every contestant has to be
within the error budget and to give the same bits twice, with NaN in every slot that belongs to no
sequence. Then the contestants of each shape take turns, each as a CUDA graph with a cold L2 cache
(flash_versions/bench/measure.py): a device copy that moves as many bytes as the sequences have keys
and values, FA2's kernels ("fa2"), and on Hopper FA3's where it takes the request ("fa3").
"""

import os
import random
import sys
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.dispatch.request import Request, make_request  # noqa: E402
from flash_versions.versions.fa2 import forward as fa2  # noqa: E402
from flash_versions.versions.fa3.hopper.decode import host as decode  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from tests.benchmarks.frame import in_time, keep, parser, share, time_all, wrong  # noqa: E402

DEVICE = "cuda"
SUITE = "decode by TMA"
ROUNDS = 20
CHECKS = 10  # drawn cases
RANDOM_SHAPES = 6
AGAIN = 20  # times that a case is computed once more, for the same bits
PROCESSES = 14
SHAPES = {  # name: (batch, length, of rows, of pages by their size; and what of both: see Shape)
    "16x8k": (16, 8192, {None: ("full", "uniform", "equal"), 64: ("full", "uniform"),
                         16: ("full", "uniform")}),
    "64x4k": (64, 4096, {None: ("full", "uniform", "equal"), 64: ("full", "uniform"),
                         16: ("full",)}),
    "4x32k": (4, 32768, {None: ("uniform", "equal"), 64: ("uniform",)}),
    "128x1k": (128, 1024, {None: ("uniform", "equal"), 64: ("uniform",)}),
    "32x16k": (32, 16384, {None: ("one long",), 64: ("one long",)}),
    "1024x256": (1024, 256, {None: ("uniform",)}),
    "1x128k": (1, 131072, {None: ("uniform",)}),
}  # fmt: skip


class Shape(NamedTuple):
    """A decoding step. `lengths` is "full" (all rows are, and the call is not told so), "equal" (it
    is told so), "uniform" (in S/4 .. S), or "one long" (one row is full, the others have S/16).
    """

    name: str
    batch: int
    length: int
    lengths: str
    page: int | None
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8
    queries: int = 1
    dtype: torch.dtype = torch.bfloat16

    def drawn_lengths(self) -> list[int]:
        """The rows' lengths, from the name."""
        rng = random.Random(self.name)
        if self.lengths == "uniform":
            return [rng.randint(self.length // 4, self.length) for _ in range(self.batch)]
        if self.lengths == "one long":
            return [self.length] + [self.length // 16] * (self.batch - 1)
        return [self.length] * self.batch

    @property
    def bytes(self) -> int:
        """What has to be read of K and V."""
        return 2 * sum(self.drawn_lengths()) * self.kv_heads * self.head_dim * self.dtype.itemsize

    def request(self) -> Request:
        """The call, on the GPU."""
        torch.manual_seed(0)
        make = partial(torch.randn, device=DEVICE, dtype=self.dtype)
        q = make(self.batch, self.queries, self.heads, self.head_dim)
        k, v = (make(self.batch, self.length, self.kv_heads, self.head_dim) for _ in range(2))
        given = {"causal": True}
        if self.lengths != "full":
            given["kv_lengths"] = torch.tensor(self.drawn_lengths(), device=DEVICE).int()
        if self.page is not None:
            number = self.batch * self.length // self.page
            table = torch.randperm(number, device=DEVICE).int().view(self.batch, -1)
            k, v = (x.view(number, self.page, self.kv_heads, self.head_dim) for x in (k, v))
            given["block_table"] = table
        return make_request(q, k, v, **given)


def shapes() -> list[Shape]:
    """What is measured."""
    found = [
        Shape(f"{size} {f'pages of {page}' if page else 'rows'} {how}", batch, length, how, page)
        for size, (batch, length, layouts) in SHAPES.items()
        for page, lengths in layouts.items()
        for how in lengths
    ]
    found += [
        Shape("D=64 16x8k rows uniform", 16, 8192, "uniform", None, 64),
        Shape("D=64 16x8k pages of 64 full", 16, 8192, "full", 64, 64),
        Shape("D=64 64x4k rows uniform", 64, 4096, "uniform", None, 64),
        Shape("16x8k 32 key heads", 16, 8192, "uniform", None, kv_heads=32),
    ]
    return found + [random_shape(number) for number in range(RANDOM_SHAPES)]


def random_shape(number: int) -> Shape:
    """A shape of at least 128k tokens, drawn from its number."""
    rng = random.Random(number)
    batch = rng.choice((3, 7, 12, 24, 50, 100, 200))
    length = max(512, round(2 ** rng.uniform(17, 18.5) / batch / 256) * 256)
    kv_heads, group = rng.choice(((8, 4), (8, 1), (4, 8), (2, 4)))
    page = rng.choice((None, 16, 32, 64, 128, 256))
    name = f"random {number}: {batch}x{length}, heads {kv_heads * group}/{kv_heads}, page {page}"
    return Shape(name, batch, length, "uniform", page, rng.choice((64, 128)), kv_heads * group,
                 kv_heads, rng.choice((1, 1, 2)))  # fmt: skip


def contestants(request: Request) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
    """What computes a request, by name."""
    found = {"fa2": lambda: fa2.forward(request)[:2]}
    if decode.left_to_gathering(request) is None:
        found["fa3"] = lambda: decode.forward(request)[:2]
    return found


def checked_request(number: int) -> tuple[Request, Request]:
    """A drawn call with NaN wherever no sequence has a key, and the same without pages and NaN."""
    rng = random.Random(1000 + number)
    generator = torch.Generator(DEVICE).manual_seed(number)
    batch, length = rng.choice((1, 3, 8, 40)), rng.choice((70, 256, 1000, 3000))
    kv_heads, group = rng.choice(((8, 4), (2, 1), (2, 8), (1, 16)))
    queries, head_dim = rng.choice((1, 1, 2)), rng.choice((64, 128, 80))
    dtype = rng.choice((torch.bfloat16, torch.float16))
    make = partial(torch.randn, generator=generator, device=DEVICE, dtype=dtype)
    q = make(batch, queries, kv_heads * group, head_dim)
    k, v = (make(batch, length, kv_heads, head_dim) for _ in range(2))
    lengths = [rng.choice((0, 1, 63, 64, 65, length)) for _ in range(batch)]
    lengths = [rng.randint(0, length) if rng.random() < 0.5 else min(n, length) for n in lengths]
    given = {"causal": True, "kv_lengths": torch.tensor(lengths, device=DEVICE).int()}
    if rng.random() < 0.3:
        given["window"] = (rng.randint(0, length), None)
    if rng.random() < 0.3:
        given["sink"] = torch.randn(kv_heads * group, generator=generator, device=DEVICE)
    if rng.random() < 0.3:
        starts = [rng.randint(0, n) for n in lengths]
        given["kv_starts"] = torch.tensor(starts, device=DEVICE).int()
    page = rng.choice((None, 16, 32, 64, 128, 256))
    exact = make_request(q, k, v, **given)
    poisoned = []
    of_each = -(-length // (page or length))
    order = torch.randperm(batch * of_each + 2, generator=generator, device=DEVICE)
    table = order[: batch * of_each].view(batch, of_each)
    for x in (k, v):
        x = x.clone()
        for b, n in enumerate(lengths):
            x[b, n:] = float("nan")
        if page is not None:
            pages = x.new_full((len(order), page, kv_heads, head_dim), float("nan"))
            filled = x.new_full((batch, of_each * page, kv_heads, head_dim), float("nan"))
            filled[:, :length] = x
            pages[table.flatten()] = filled.unflatten(1, (of_each, page)).flatten(0, 1)
            x = pages
        poisoned.append(x)
    if page is not None:
        given["block_table"] = table.int()
    return make_request(q, *poisoned, **given), exact


def check(number: int) -> float:
    """The largest share of the budget that an error takes of a drawn case, by each contestant, and
    in splits.

    Raises:
        AssertionError: an error is beyond the budget, or bits differ.
    """
    request, exact = checked_request(number)
    worst = 0.0
    for name, call in contestants(request).items():
        o, lse = call()
        worst = max(worst, share(name, assess_request({"o": o, "lse": lse}, exact)))
        for _ in range(AGAIN):
            again = call()
            assert torch.equal(again[0], o) and torch.equal(again[1], lse), f"{name}: other bits"
    for splits in (1, 3):
        o, lse, _ = fa2.forward(request._replace(num_splits=splits))
        share(f"{splits} splits", assess_request({"o": o, "lse": lse}, exact))
    return worst


def copies(shape: Shape) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
    """Copies that read and write as many bytes together as the shape's keys and values have: the
    driver's, which is slow for some sizes, and that of a kernel. The faster one counts.
    """
    source = torch.randint(0, 100, (shape.bytes // 8,), device=DEVICE, dtype=torch.int32)
    target = torch.empty_like(source)
    return {
        "copy": lambda: (target.copy_(source),),
        "copy by a kernel": lambda: (torch.neg(source, out=target),),
    }


def measure(shape: Shape) -> list[dict]:
    """Rows of a shape's contestants."""
    about = {"suite": SUITE, **shape._asdict(), "dtype": str(shape.dtype), "bytes": shape.bytes}
    calls = {**copies(shape), **contestants(shape.request())}
    found = [
        (about | {"version": name}, lambda call=call: call) for name, call in calls.items()
    ]  # fmt: skip
    rows = time_all(found, ROUNDS)
    for row in rows:
        if "ms_p50" in row:
            row["tb_per_s"] = row["bytes"] / row["ms_p50"] / 1e9
    rate = max(row["tb_per_s"] for row in rows if "copy" in row["version"])
    return [
        row | ({"of_copy": row["tb_per_s"] / rate} if "tb_per_s" in row else {}) for row in rows
    ]


def warm(name: str) -> None:
    """Compile what a shape launches."""
    shape = next(shape for shape in shapes() if shape.name == name)
    for call in contestants(shape.request()).values():
        call()
    torch.cuda.synchronize()


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=80, device=False)
    command.add_argument("--check", type=int, help="check this case only, and do not measure")
    command.add_argument("--warm", help="compile the kernels of this shape only")
    command.add_argument("--only", nargs="+", help="shapes whose names contain one of these")
    arguments = command.parse_args()
    if arguments.check is not None:
        print(f"within the budget, {check(arguments.check):.2f} of it")
        return 0
    if arguments.warm is not None:
        warm(arguments.warm)
        return 0
    wanted = [
        shape
        for shape in shapes()
        if not arguments.only or any(part in shape.name for part in arguments.only)
    ]
    # A kernel depends on few things of a shape: one of each kind compiles it for the others.
    kinds = {
        (s.page, s.head_dim, s.heads, s.kv_heads, s.queries, s.lengths == "full", s.batch): s
        for s in wanted
    }
    jobs = [("--warm", shape.name) for shape in kinds.values()]
    jobs += [("--check", number) for number in range(CHECKS)]
    document = new_document(suite=SUITE, seed=0)
    document["failed"] = wrong("attention.decode", jobs, PROCESSES)
    for shape in in_time(wanted, arguments.seconds):
        keep(document, arguments.out, measure(shape), hidden=("suite", "dtype"))
        torch.cuda.empty_cache()
    return bool(document["failed"])


if __name__ == "__main__":
    sys.exit(main())
