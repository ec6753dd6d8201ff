"""Time the competitors of one shape in turns, after checking their results.

All competitors of a shape run in one process on the same inputs and take turns, so that clock and
temperature are the same for all of them. Compare their ratios: TFLOP/s depend on the day's clocks.
A kernel is timed only if its output is within its error budget. Each call is a CUDA graph, replayed
between two events after the L2 cache was overwritten; the time is the median over the rounds.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from flash_versions.bench.suites import BACKWARD_FLOPS, Competitor, Shape, Tensors, competitors
from flash_versions.bench.workers import Answer, reason, tell, work
from flash_versions.versions.oracle.checks import check, check_fp8

ROUNDS = 30
WARM_UP = 3  # rounds that are not counted
# A competitor that has run this long has run often enough, after as many rounds as this.
ENOUGH_MS, FEWEST_ROUNDS = 500.0, 3
L2_FLUSH_BYTES = 256 * 2**20

Launch = Callable[[], object]
Note = Callable[[Any], object]  # told which competitor is about to run
Prepare = Callable[[], Callable[[], Tensors]]
Refuse = Callable[[Tensors], None]
Name = TypeVar("Name", bound=Hashable)


class DeviceLostError(RuntimeError):
    """A kernel left the GPU unusable for this process."""


def unnoted(version: str) -> None:
    """Do nothing: the `note` of a measurement that nobody watches."""


def captured(prepare: Prepare) -> tuple[Launch, Tensors, float]:
    """The replay of a call as a CUDA graph, which costs the host next to nothing, its results, and
    the MiB that the call took at its peak, results included.

    The call is prepared on the stream of the capture, as autograd runs a backward on the stream of
    its forward.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call = prepare()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = call()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    torch.cuda.current_stream().wait_stream(stream)

    def replay(keep_alive: object = call) -> None:  # with the tensors that the graph reads
        graph.replay()

    return replay, results, peak


def timed(
    calls: Mapping[Name, Launch], rounds: int, note: Note = unnoted
) -> dict[Name, list[float]]:
    """Milliseconds of every round of each call. The calls take turns and find a cold L2 cache.

    Another one begins each round. A slow call stops early: see ENOUGH_MS. While a round is waited
    for, the next is already queued, so that the GPU never idles; `note` says for whom.
    """
    flush = torch.empty(L2_FLUSH_BYTES, dtype=torch.int8, device="cuda")
    times: dict[Name, list[float]] = {name: [] for name in calls}
    queued: list[tuple[Name, torch.cuda.Event, torch.cuda.Event]] = []
    for number in range(rounds + WARM_UP + 1):
        names = [
            name
            for name, spent in times.items()
            if number < rounds + WARM_UP
            and (sum(spent) < ENOUGH_MS or len(spent) < FEWEST_ROUNDS + WARM_UP)
        ]
        before, queued = queued, []
        turn = number % max(len(names), 1)
        for name in names[turn:] + names[:turn]:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            calls[name]()
            end.record()
            queued.append((name, start, end))
        for name, start, end in before:
            if not end.query():
                note(name)
            end.synchronize()
            times[name].append(start.elapsed_time(end))
    return {name: spent[WARM_UP:] for name, spent in times.items()}


def in_graphs(
    calls: Sequence[tuple[dict[str, Any], Prepare, Refuse]], rounds: int, note: Note = unnoted
) -> list[dict[str, Any]]:
    """The rows of (row, what prepares the call, what refuses its results), with the times of the
    calls, in turns, each as a CUDA graph. What cannot run, or is wrong, has a `reason` and no time.

    Args:
        calls: a row has a `version`, and `flops` or `bytes` if its rate is wanted; one that has a
            `reason` already is not tried.
        rounds: how often each call is timed.
        note: told what is about to run, so that another process can end this one if it hangs.

    Raises:
        DeviceLostError: a call left the GPU unusable; `note` was told which.
    """
    rows, replays = [row for row, *_ in calls], dict[int, Launch]()
    for number, (row, prepare, refuse) in enumerate(calls):
        if "reason" in row:
            continue
        note(row["version"])
        try:
            replay, results, peak = captured(prepare)
            refuse(results)
            replays[number] = replay
            row["peak_mib"] = peak
            del results
        except Exception as error:  # whatever a library raises, the others are measured
            row["reason"] = reason(error)
            ensure_usable(row["version"], row["reason"])
    for number, times in timed(replays, rounds, lambda x: note(rows[x]["version"])).items():
        found = statistics.quantiles(times, n=10, method="inclusive")
        row, p50 = rows[number], found[4]
        row |= {"ms_p20": found[1], "ms_p50": p50, "ms_p80": found[7], "rounds": len(times)}
        for amount, rate in (("flops", "tflops"), ("bytes", "tb_per_s")):
            if amount in row:
                row[rate] = row[amount] / p50 / 1e9
    return rows


def measure(
    suite: str,
    shape: Shape,
    rounds: int,
    note: Note = unnoted,
    lost: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """Rows of one shape, one for each competitor; see `in_graphs`.

    Args:
        suite: a name in SUITES.
        shape: one of its shapes.
        rounds: how often each competitor is timed.
        note: told what is about to run.
        lost: competitors not to try again, with the reason.
    """
    torch.manual_seed(0)
    inputs = shape.inputs()
    is_backward = suite.endswith("backward")
    calls: list[tuple[dict[str, Any], Prepare, Refuse]] = []
    for one in competitors(suite, shape):
        row = one.row(suite, shape)
        if lost and one.name in lost:
            row["reason"] = lost[one.name]
        elif suite == "decode":
            row["bytes"] = shape.kv_bytes
        elif suite != "quantize":
            row["flops"] = shape.flops() * (BACKWARD_FLOPS if is_backward else 1)
        refuse = partial(verify, one, shape, inputs, row)
        calls.append((row, partial(one.backward if is_backward else one.forward, *inputs), refuse))
    return in_graphs(calls, rounds, note)


def verify(
    one: Competitor, shape: Shape, inputs: Tensors, row: dict[str, Any], results: Tensors
) -> None:
    """Raise an ArithmeticError if a competitor's results are wrong; count the bytes of one that
    only moves them.
    """
    q, k, v, _ = inputs
    if one.verify is not None:
        one.verify(results, q, k, v)
        row["bytes"] = nbytes(inputs[:3]) + nbytes(results)
    elif one.precision == "fp8":
        check_fp8(results[0], shape.causal, shape.D**-0.5, one.given(q, k, v))
    else:
        check(results, shape.M, shape.causal, *inputs)


def nbytes(tensors: Tensors) -> int:
    """Bytes of memory behind tensors; what several of them show, or show repeatedly, once."""
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def ensure_usable(name: str, why: str) -> None:
    """Raise DeviceLostError if the error that was just caught has taken the CUDA context along."""
    with suppress(RuntimeError):  # what is reported once only does no more harm
        torch.cuda.synchronize()
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(f"{name} left the GPU unusable: {why}") from error


def host_time(call: Callable[[], object], repeats: int = 50, wait: bool = False) -> float:
    """Mean microseconds of a call on the host, after one that is not counted; with `wait`, until
    the GPU has done all.
    """
    done = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    done()
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    if wait:
        done()
    elapsed = time.perf_counter() - start
    done()
    return elapsed / repeats * 1e6


def copy_bandwidth(rounds: int, device: str = "cuda") -> float:
    """TB/s of a large copy on a device, bytes read plus bytes written: decoding's ceiling."""
    source = torch.randn(2**29 if device == "cuda" else 2**26, device=device).bfloat16()
    copy = partial(torch.empty_like(source).copy_, source)
    if device == "cuda":
        times = timed({"copy": copy}, rounds)["copy"]
    else:
        times = [host_time(copy, rounds) / 1e3]
    return 2 * source.nbytes / statistics.median(times) / 1e9


def answer(
    rounds: int,
    suite: str | None = None,
    shape: Mapping[str, Any] | None = None,
    lost: Mapping[str, str] | None = None,
    note: Note = unnoted,
) -> Answer:
    """The rows of a shape, given by its fields; without one, the bandwidth of a copy."""
    if suite is None or shape is None:
        return {"copy_tb_per_s": copy_bandwidth(rounds)}
    return {"rows": measure(suite, Shape(**shape), rounds, note, lost)}


if __name__ == "__main__":
    work(partial(answer, note=lambda version: tell({"running": version})))
