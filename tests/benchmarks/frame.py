"""What the scripts that measure have in common: command line, processes, JSON and clock."""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flash_versions.bench.document import save
from flash_versions.bench.measure import captured, timed

BEGAN = time.monotonic()  # when the script was started


def parser(doc, seconds=None, device=True):
    """A command line: where the JSON goes, and if asked for, on which device and for how long."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    if device:
        made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    if seconds is not None:
        text = f"after which nothing more begins ({seconds:g})"
        made.add_argument("--seconds", type=float, default=seconds, help=text)
    return made


def keep(document, out, rows, hidden=()):
    """Add rows to a document, print them without the fields that are too long, and write it."""
    document["rows"] += rows
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k not in hidden}), flush=True)
    save(document, out)


def passed():
    """Seconds since the script was started."""
    return time.monotonic() - BEGAN


def now(device):
    """Seconds, once the device has done all that it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def forget_peak(device):
    """Begin to measure the peak of memory anew."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device):
    """The most memory in use since `forget_peak`; None on a CPU."""
    on_gpu = torch.device(device).type == "cuda"
    return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None


def reason(error):
    """Why a contestant has no time."""
    return f"{type(error).__name__}: {str(error)[:300]}"


def in_time(items, seconds):
    """The items, until the script has run for so many seconds."""
    for item in items:
        if passed() > seconds:
            print(f"the time is up before {item}", flush=True)
            return
        yield item


def is_right(module, *arguments, seconds=200):
    """Whether a script of tests.benchmarks ends well with these arguments, in a process of its own.
    It prints what the process said, and the end of its error.
    """
    what = " ".join(map(str, arguments))
    command = [sys.executable, "-m", f"tests.benchmarks.{module}", "--out", "none"]
    try:
        done = subprocess.run(
            [*command, *map(str, arguments)], capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        print(f"{what}: takes more than {seconds} s, or waits for ever", flush=True)
        return False
    failed = done.returncode != 0
    print(f"{what}: {(done.stdout + done.stderr[-1500:] * failed).strip()}", flush=True)
    return not failed


def wrong(module, jobs, processes, seconds=200, until=math.inf):
    """The jobs, each the arguments of a process, that do not end well; so many processes at once,
    none of which begins when `until` seconds of the script have passed: those count as wrong.
    """
    with ThreadPoolExecutor(processes) as pool:
        right = pool.map(lambda x: passed() < until and is_right(module, *x, seconds=seconds), jobs)
        return [job for job, ends_well in zip(jobs, right) if not ends_well]


def share(what, assessed):
    """The largest share of its error budget that a result takes.

    Raises:
        AssertionError: an error is beyond the budget.
    """
    for name, accuracy in assessed.items():
        assert accuracy.ok, f"{what}: {name}: {accuracy}"
    return max(accuracy.error / accuracy.budget for accuracy in assessed.values())


def call_all(contestants):
    """Call what each of (row, what prepares the call) prepares once, so that it is compiled."""
    for _, prepare in contestants:
        try:
            prepare()()
        except Exception as error:  # `time_all` tells it, too
            print(reason(error))


def prepared(function, q, k, v, do=None):
    """A call of a function of q, k and v; with a gradient of o, of its backward alone."""
    if do is None:
        return lambda: (function(q, k, v),)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = function(*leaves)
    return lambda: torch.autograd.grad(o, leaves, do, retain_graph=True)


def time_all(contestants, rounds=12):
    """The rows of (row, what prepares the call), with the times of what is prepared, in turns, each
    as a CUDA graph with a cold L2 cache.
    """
    replays = {}
    for number, (row, prepare) in enumerate(contestants):
        try:
            replays[number] = captured(prepare)[0]
        except Exception as error:  # whatever a library raises, the others are measured
            row["reason"] = reason(error)
    for number, times in timed(replays, rounds).items():
        row, _ = contestants[number]
        row["ms_p50"] = statistics.median(times)
        if "flops" in row:
            row["tflops"] = row["flops"] / row["ms_p50"] / 1e9
    return [row for row, _ in contestants]
