"""Measure the versions against each other and against torch's kernels: `python -m
flash_versions.bench`.

All competitors of a row run in one process on the same inputs, in turns, so that clocks and
temperature are the same for all: the ratio between them is the result, the TFLOP/s are its unit.
A kernel is timed only if its output is within its error budget. Each call is a CUDA graph, replayed
between two events after the L2 cache was overwritten; the time is the median over the rounds.

The results are JSON; nothing here draws. Source of the shapes and of the FLOP count: the benchmarks
of Dao-AILab/flash-attention (16k tokens, hidden size 2048, 4 B H M N D, halved if causal; 2.5 times
that for a backward pass, five products in the place of two).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.errors import TritonError

from flash_versions import VERSIONS, attention
from flash_versions.budget import Accuracy, assess, assess_request
from flash_versions.request import make_request

SCHEMA = 1
ROUNDS = 30
L2_FLUSH_BYTES = 256 * 2**20
BACKWARD_FLOPS = 2.5  # times a forward's: five products in the place of two
CHECKED_QUERIES = 128  # the oracle needs the score matrix: check the last rows, which see most keys

Tensors = tuple[torch.Tensor, ...]
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Launch = Callable[[], object]


@dataclass(frozen=True)
class Shape:
    """One call of attention: batch B, H query and Hkv key heads, M queries, N keys, head_dim D."""

    B: int
    H: int
    Hkv: int
    M: int
    N: int
    D: int
    causal: bool
    dtype: str = "bfloat16"

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Random normal q, k, v and gradient of o on the GPU."""
        make = partial(torch.randn, device="cuda", dtype=getattr(torch, self.dtype))
        q, do = (make(self.B, self.M, self.H, self.D) for _ in range(2))
        k, v = (make(self.B, self.N, self.Hkv, self.D) for _ in range(2))
        return q, k, v, do

    def flops(self, lengths: Sequence[int] | None = None) -> float:
        """Multiplications and additions of the two matrix products of a forward; `lengths` of
        packed sequences in the place of the shape's rows.
        """
        pairs = self.B * self.M * self.N if lengths is None else sum(n * n for n in lengths)
        return 4 * self.H * pairs * self.D * (0.5 if self.causal else 1.0)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V: what decoding has to read."""
        return 2 * self.B * self.N * self.Hkv * self.D * getattr(torch, self.dtype).itemsize


TABLE = [
    Shape(16384 // S, 2048 // D, 2048 // D, S, S, D, causal)
    for D in (128, 64)
    for causal in (False, True)
    for S in (1024, 2048, 4096, 8192, 16384)
] + [Shape(2, 8, 8, 8192, 8192, 256, causal) for causal in (False, True)]
DECODE = [Shape(1, 32, 8, 1, N, 128, False) for N in (8192, 32768, 131072)]
PACKED = [Shape(64, 16, 16, 1024, 1024, 128, causal) for causal in (False, True)]
SUITES = {
    "table": TABLE,
    "backward": TABLE,
    "decode": DECODE,
    "packed": PACKED,
    "packed backward": PACKED,
    "launch": [],
}


TORCH = {"torch fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def torch_backend(backend: SDPBackend, q, k, v, causal: bool) -> torch.Tensor:
    """torch's SDPA with one backend only."""
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return o.transpose(1, 2)


@dataclass(frozen=True)
class Competitor:
    """Something to measure: a function of q, k, v that returns o."""

    name: str
    function: Function
    lengths: tuple[int, ...] | None = None  # of packed sequences; None: rows of the shape

    def forward(self, q, k, v, do) -> Callable[[], Tensors]:
        """A call that returns (o,)."""
        return lambda: (self.function(q, k, v),)

    def backward(self, q, k, v, do) -> Callable[[], Tensors]:
        """A call that returns dq, dk, dv, with its forward behind it."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = self.function(*leaves)
        return partial(torch.autograd.grad, o, leaves, do, retain_graph=True)


def competitors(suite: str, shape: Shape) -> Iterator[Competitor]:
    """Everything that is measured on one shape."""
    causal = shape.causal
    is_packed = suite.startswith("packed")
    for name in ["fa2"] if is_packed else VERSIONS:
        yield Competitor(name, partial(attention, causal=causal, version=name))
    if is_packed:
        lengths = ragged_lengths(shape)
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device="cuda")
        yield Competitor("fa2 packed", partial(packed, bounds, causal), lengths)
    if suite == "decode":
        yield Competitor("fa2 unsplit", partial(attention, version="fa2", num_splits=1))
    for name, backend in TORCH.items():
        yield Competitor(name, partial(torch_backend, backend, causal=causal))


def ragged_lengths(shape: Shape) -> tuple[int, ...]:
    """As many sequences as the shape has rows, with the same total: lengths from an eighth of the
    mean to nearly twice it.
    """
    generator = torch.Generator().manual_seed(0)
    share = 0.125 + 1.75 * torch.rand(shape.B, generator=generator)
    ends = (share.cumsum(0) / share.sum() * shape.B * shape.N).round().long()
    return tuple(ends.diff(prepend=torch.tensor([0])).tolist())


def packed(bounds: torch.Tensor, causal: bool, q, k, v) -> torch.Tensor:
    """FA2 on the rows of q, k, v one after another, cut into other sequences."""
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return attention(*rows, causal=causal, cu_seqlens_q=bounds, version="fa2").view(q.shape)


def check(results: Tensors, length: int, causal: bool, q, k, v, do) -> None:
    """Refuse to time a wrong kernel: of the first sequence, the last queries of a forward, or the
    first key head of a backward, against the budget.
    """
    if not all(x.isfinite().all() for x in results):
        raise ArithmeticError("wrong output: not finite")

    def first(x, heads=None):
        return x.flatten(0, 1)[None, :length, :heads]

    found: dict[str, Accuracy]
    if len(results) == 1:
        last = slice(max(0, min(length, q.shape[1]) - CHECKED_QUERIES), None)
        if q.shape[1] == 1:  # decoding: one query on all keys
            last, length = slice(None), k.shape[1]
        o, q = first(results[0])[:, last], first(q)[:, last]
        found = assess(o, None, q, first(k), first(v), causal=causal)
    else:
        group = q.shape[2] // k.shape[2]
        request = make_request(first(q, group), first(k, 1), first(v, 1), causal=causal)
        names = {"dq": group, "dk": 1, "dv": 1}
        gradients = {name: first(x, names[name]) for name, x in zip(names, results)}
        found = assess_request(gradients, request, first(do, group))
    for name, accuracy in found.items():
        if not accuracy.ok:
            raise ArithmeticError(f"wrong output: {name}: {accuracy}")


def captured(prepare: Callable[[], Callable[[], Tensors]]) -> tuple[Launch, Tensors]:
    """The replay of a call as a CUDA graph, which costs the host next to nothing, and its results.

    The call is prepared on the stream of the capture, as autograd runs a backward on the stream of
    its forward.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = prepare()
        results = call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(keep_alive: object = call) -> None:  # with the tensors that the graph reads
        graph.replay()

    return replay, results


def timed(calls: dict[str, Launch], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each round of each call; the calls take turns and find a cold L2 cache."""
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {n: [] for n in calls}
    for _ in range(rounds + 3):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    torch.cuda.synchronize()
    return {n: [start.elapsed_time(end) for start, end in pairs[3:]] for n, pairs in events.items()}


def measure(suite: str, shape: Shape, rounds: int) -> list[dict[str, Any]]:
    """Rows of one shape, one for each competitor; one that cannot run has a `reason`, no time."""
    torch.manual_seed(0)
    inputs = shape.inputs()
    replays: dict[str, Launch] = {}
    rows: dict[str, dict[str, Any]] = {}
    flops = {}
    is_backward = suite.endswith("backward")
    for one in competitors(suite, shape):
        way = "backward" if is_backward else "forward"
        rows[one.name] = {"suite": suite, "version": one.name, "pass": way, **asdict(shape)}
        flops[one.name] = shape.flops(one.lengths) * (BACKWARD_FLOPS if is_backward else 1)
        prepare = partial(one.backward if is_backward else one.forward, *inputs)
        try:
            replays[one.name], results = captured(prepare)
            length = one.lengths[0] if one.lengths else shape.M
            check(results, length, shape.causal, *inputs)
        except (RuntimeError, ValueError, ArithmeticError, TritonError) as error:
            replays.pop(one.name, None)
            rows[one.name]["reason"] = str(error).splitlines()[0]
    for name, times in timed(replays, rounds).items():
        p20, p50, p80 = (statistics.quantiles(times, n=10)[i] for i in (1, 4, 7))
        rows[name] |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80}
        if suite == "decode":
            rows[name]["tb_per_s"] = shape.kv_bytes / p50 / 1e9
        else:
            rows[name] |= {"flops": flops[name], "tflops": flops[name] / p50 / 1e9}
    return list(rows.values())


def host_times(rounds: int) -> list[dict[str, Any]]:
    """Microseconds that the host spends on one call, the GPU far behind or done: a row for each
    path through the package, on inputs too small to matter.
    """
    make = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    q, k, v = (make(2, 64, 8, 64) for _ in range(3))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    bounds = torch.tensor([0, 50, 128], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([64, 30], dtype=torch.int32, device="cuda")
    rows = []
    for version in VERSIONS:
        run = partial(attention, causal=True, version=version)
        o = run(*leaves)
        calls: dict[str, Callable[[], object]] = {
            "forward": partial(run, q, k, v),
            "forward, to be differentiated": partial(run, *leaves),
            "backward": partial(torch.autograd.grad, o, leaves, q, retain_graph=True),
            "decode, split": partial(run, q[:, :1], k, v, kv_lengths=lengths, num_splits=2),
            "packed": partial(run, *(x.flatten(0, 1) for x in (q, k, v)), cu_seqlens_q=bounds),
        }
        for name, call in calls.items():
            row: dict[str, Any] = {"suite": "launch", "version": version, "call": name}
            try:
                row["host_us"] = statistics.median(host_time(call) for _ in range(rounds))
            except ValueError as error:
                row["reason"] = str(error)
            rows.append(row)
    return rows


def host_time(call: Callable[[], object], repeats: int = 50) -> float:
    """Mean microseconds of a call on the host."""
    call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    elapsed = time.perf_counter() - start
    torch.cuda.synchronize()
    return elapsed / repeats * 1e6


def copy_bandwidth(rounds: int) -> float:
    """TB/s of a large device-to-device copy, bytes read plus bytes written: decoding's ceiling."""
    source = torch.randn(2**29, device="cuda").bfloat16()
    target = torch.empty_like(source)
    # Not as a graph: there a copy becomes a memory transfer node, which is slower than the kernel.
    times = timed({"copy": lambda: target.copy_(source)}, rounds)["copy"]
    return 2 * source.nbytes / statistics.median(times) / 1e9


def machine() -> dict[str, str]:
    """What ran where: GPU, driver and versions."""
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        smi = "unknown, unknown"
    driver, clock = (field.strip() for field in smi.splitlines()[0].split(","))
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "max_sm_clock": clock,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is measured: from git, or from GIT_COMMIT where there is no repository."""
    git = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent)
    return os.environ.get("GIT_COMMIT") or found.stdout.strip() or "unknown"


def run(suites: list[str], rounds: int) -> dict[str, Any]:
    """Measure the suites; progress goes to stderr. Returns the document that `main` writes."""
    rows = []
    if "launch" in suites:
        rows += host_times(rounds)
    for suite in suites:
        for shape in SUITES[suite]:
            found = measure(suite, shape, rounds)
            rows += found
            line = "  ".join(f"{r['version']} {r.get('ms_p50', float('nan')):.3f}" for r in found)
            sys.stderr.write(f"{suite} {shape}: ms {line}\n")
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "machine": machine(),
        "protocol": {
            "method": "interleaved CUDA graph replays between events, median",
            "rounds": rounds,
            "l2_flush_bytes": L2_FLUSH_BYTES,
        },
        "copy_tb_per_s": copy_bandwidth(rounds),
        "rows": rows,
    }


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.bench", description="time every version on this GPU"
    )
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    parser.add_argument("--out", type=Path, default=Path("results.json"))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.stderr.write("error: no GPU found; the seconds of interpreted kernels mean nothing\n")
        return 2
    document = run(options.suite, options.rounds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial_file = options.out.with_suffix(".tmp")
    partial_file.write_text(json.dumps(document, indent=1) + "\n")
    partial_file.replace(options.out)
    sys.stderr.write(f"wrote {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
