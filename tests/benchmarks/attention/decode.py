"""Decoding over caches of rows of different lengths and in pages: checked, then timed; writes JSON.

    python -m tests.benchmarks.attention.decode --out FILE [--seconds 80] [--only NAME ...]
        [--configs 64x1 128x2x4 ...] [--checks 10]

First, processes side by side compile all kernels and check drawn cases: every contestant has to be
within the error budget and to give the same bits twice, with NaN in every slot that belongs to no
sequence. Then the contestants of each shape take turns, each as a CUDA graph with a cold L2 cache
(flash_versions/bench/measure.py): a device copy that moves as many bytes as the sequences have keys
and values, FA2's kernels ("fa2"), and on Hopper FA3's where it takes the request ("fa3"), also with
the switches of --configs. Last, a table with the share of the copy's rate.
"""

import os
import random
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from subprocess import run
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.measure import captured, reason, timed  # noqa: E402
from flash_versions.dispatch.request import Request, make_request  # noqa: E402
from flash_versions.versions.fa2 import forward as fa2  # noqa: E402
from flash_versions.versions.fa3.hopper.decode import host as decode  # noqa: E402
from flash_versions.versions.oracle.budget import assess_request  # noqa: E402
from tests.benchmarks.frame import keep, parser, passed  # noqa: E402

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


def config_of(text: str) -> decode.DecodeConfig:
    """The switches that a text names: keys of a block x programs of a multiprocessor x slots, of
    which the last may be missing.
    """
    return decode.DecodeConfig(*map(int, text.split("x")))


def contestants(
    request: Request, configs: list[str]
) -> dict[str, Callable[[], tuple[torch.Tensor, ...]]]:
    """What computes a request, by name."""
    found = {"fa2": lambda: fa2.forward(request)[:2]}
    if decode.left_to_gathering(request) is None:
        found["fa3"] = lambda: decode.forward(request)[:2]
        for text in configs:
            found[f"fa3 {text}"] = lambda text=text: decode.forward(request, config_of(text))[:2]
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


def check(number: int, configs: list[str]) -> str:
    """Compute a drawn case by each contestant, and in splits.

    Raises:
        AssertionError: an error is beyond the budget, or bits differ.
    """
    request, exact = checked_request(number)
    worst = 0.0
    for name, call in contestants(request, configs).items():
        o, lse = call()
        for what, accuracy in assess_request({"o": o, "lse": lse}, exact).items():
            assert accuracy.ok, f"case {number}, {name}: {what}: {accuracy}"
            worst = max(worst, accuracy.error / accuracy.budget)
        for _ in range(AGAIN):
            again = call()
            assert torch.equal(again[0], o) and torch.equal(again[1], lse), (
                f"{number}, {name}: bits"
            )
    for splits in (1, 3):
        o, lse, _ = fa2.forward(request._replace(num_splits=splits))
        for what, accuracy in assess_request({"o": o, "lse": lse}, exact).items():
            assert accuracy.ok, f"case {number}, {splits} splits: {what}: {accuracy}"
    return f"case {number}: within the budget, {worst:.2f} of it"


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


def measure(shape: Shape, configs: list[str]) -> list[dict]:
    """Rows of a shape's contestants."""
    request = shape.request()
    calls = {**copies(shape), **contestants(request, configs)}
    rows, replays = {}, {}
    for name, call in calls.items():
        rows[name] = {
            "suite": SUITE, **shape._asdict(), "dtype": str(shape.dtype), "version": name,
            "bytes": shape.bytes,
        }  # fmt: skip
        try:
            replays[name] = captured(lambda call=call: call)[0]
        except Exception as error:  # the others are measured
            rows[name]["reason"] = reason(error)
    for name, times in timed(replays, ROUNDS).items():
        ms = statistics.median(times)
        rows[name] |= {"ms_p50": ms, "tb_per_s": shape.bytes / ms / 1e9}
    rate = max(rows[name]["tb_per_s"] for name in copies(shape))
    for row in rows.values():
        if "tb_per_s" in row:
            row["of_copy"] = row["tb_per_s"] / rate
    return list(rows.values())


def table(rows: list[dict]) -> str:
    """Shares of the copy's rate, a line for each shape."""
    columns = [x for x in dict.fromkeys(row["version"] for row in rows) if "copy" not in x]
    lines = [f"{'share of a copy':58} copy TB/s " + " | ".join(columns)]
    for name in dict.fromkeys(row["name"] for row in rows):
        of = {row["version"]: row for row in rows if row["name"] == name}
        shares_of_copy = " | ".join(
            f"{of.get(x, {}).get('of_copy', float('nan')):{max(5, len(x))}.3f}" for x in columns
        )
        rate = max(row["tb_per_s"] for x, row in of.items() if "copy" in x)
        lines.append(f"{name:58} {rate:9.2f} {shares_of_copy}")
    return "\n".join(lines)


def warm(name: str, configs: list[str]) -> None:
    """Compile what a shape launches."""
    shape = next(shape for shape in shapes() if shape.name == name)
    for call in contestants(shape.request(), configs).values():
        call()
    torch.cuda.synchronize()


def elsewhere(option: str, value: str, configs: list[str]) -> str | None:
    """Run one step in a process of its own; why it failed, or None."""
    command = [sys.executable, "-m", "tests.benchmarks.attention.decode"]
    command += [option, value, "--out", "none", "--configs", *configs]
    done = run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        print(f"{option} {value} failed:\n{done.stderr[-1500:]}", flush=True)
        return f"{option} {value} failed: {done.stderr.strip().splitlines()[-1]}"
    if done.stdout.strip():
        print(done.stdout.strip(), flush=True)
    return None


def main() -> int:
    """Check and measure; the exit code is 1 if a check failed."""
    command = parser(__doc__, seconds=80, device=False)
    command.add_argument("--check", type=int, help="check this case only, and do not measure")
    command.add_argument("--warm", help="compile the kernels of this shape only")
    command.add_argument("--only", nargs="+", help="shapes whose names contain one of these")
    text = "of FA3's kernel: keys of a block x programs of a multiprocessor [x slots], such as 64x2"
    command.add_argument("--configs", nargs="*", default=[], help=text)
    command.add_argument("--checks", type=int, default=CHECKS, help=f"drawn cases ({CHECKS})")
    arguments = command.parse_args()
    configs = arguments.configs
    if arguments.check is not None:
        print(check(arguments.check, configs))
        return 0
    if arguments.warm is not None:
        warm(arguments.warm, configs)
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
    jobs += [("--check", str(number)) for number in range(arguments.checks)]
    with ThreadPoolExecutor(PROCESSES) as pool:
        failed = [text for text in pool.map(lambda job: elsewhere(*job, configs), jobs) if text]
    print(f"compiled and checked after {passed():.0f} s; {len(failed)} failed", flush=True)
    document = new_document(suite=SUITE, seed=0)
    document["failed"] = failed
    for shape in wanted:
        if passed() > arguments.seconds:
            print(f"the time is up before {shape.name}", flush=True)
            break
        keep(document, arguments.out, measure(shape, configs), hidden=("suite", "dtype"))
        torch.cuda.empty_cache()
    print(table(document["rows"]), flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
