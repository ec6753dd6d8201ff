"""Measure the versions against each other and against torch's kernels: `python -m
flash_versions.bench`.

All competitors of a row run in one process on the same inputs, in turns, so that clocks and
temperature are the same for all: the ratio between them is the result, the TFLOP/s are its unit.
A kernel is timed only if its output is within its error budget. Each call is a CUDA graph, replayed
between two events after the L2 cache was overwritten; the time is the median over the rounds.

The results are JSON; nothing here draws. Source of the shapes and of the FLOP count: the benchmarks
of Dao-AILab/flash-attention (16k tokens, hidden size 2048, 4 B H M N D, halved if causal).
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.errors import TritonError

from flash_versions import VERSIONS, attention
from flash_versions.budget import assess

SCHEMA = 1
ROUNDS = 30
L2_FLUSH_BYTES = 256 * 2**20
CHECKED_QUERIES = 128  # the oracle needs the score matrix: check the last rows, which see most keys

Call = Callable[[], torch.Tensor]
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

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random normal q, k, v on the GPU."""
        make = partial(torch.randn, device="cuda", dtype=getattr(torch, self.dtype))
        q = make(self.B, self.M, self.H, self.D)
        k, v = (make(self.B, self.N, self.Hkv, self.D) for _ in range(2))
        return q, k, v

    @property
    def flops(self) -> float:
        """Multiplications and additions of the two matrix products that count."""
        return 4 * self.B * self.H * self.M * self.N * self.D * (0.5 if self.causal else 1.0)

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
SUITES = {"table": TABLE, "decode": DECODE}


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


def competitors(suite: str, shape: Shape, q, k, v) -> Iterator[tuple[str, Call]]:
    """(name, call) of everything that is measured on one shape."""
    for name in VERSIONS:
        yield name, partial(attention, q, k, v, causal=shape.causal, version=name)
    if suite == "decode":
        yield "fa2 unsplit", partial(attention, q, k, v, version="fa2", num_splits=1)
    yield "torch fa2", partial(torch_backend, SDPBackend.FLASH_ATTENTION, q, k, v, shape.causal)
    yield "cudnn", partial(torch_backend, SDPBackend.CUDNN_ATTENTION, q, k, v, shape.causal)


def check(o: torch.Tensor, shape: Shape, q, k, v) -> None:
    """Refuse to time a wrong kernel: the last queries of the first batch against the budget."""
    rows = min(CHECKED_QUERIES, shape.M)
    found = assess(o[:1, -rows:], None, q[:1, -rows:], k[:1], v[:1], causal=shape.causal)["o"]
    if not (found.ok and o.isfinite().all()):
        raise ArithmeticError(f"wrong output: {found}")


def captured(call: Call) -> Launch:
    """The replay of a call as a CUDA graph, which costs the host next to nothing."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


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
    q, k, v = shape.inputs()
    replays, rows = {}, {}
    for name, call in competitors(suite, shape, q, k, v):
        rows[name] = {"suite": suite, "version": name, "pass": "forward", **asdict(shape)}
        try:
            check(call(), shape, q, k, v)
            replays[name] = captured(call)
        except (RuntimeError, ValueError, ArithmeticError, TritonError) as error:
            rows[name]["reason"] = str(error).splitlines()[0]
    for name, times in timed(replays, rounds).items():
        p20, p50, p80 = (statistics.quantiles(times, n=10)[i] for i in (1, 4, 7))
        rows[name] |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80}
        if suite == "decode":
            rows[name]["tb_per_s"] = shape.kv_bytes / p50 / 1e9
        else:
            rows[name]["tflops"] = shape.flops / p50 / 1e9
    return list(rows.values())


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
