"""What the units of a multiprocessor do in the backward for Hopper, counted by Nsight Compute.

    python -m flash_versions.bench.profile_backward --out docs/results/h200-backward-profile.json

runs `ncu` on a process of its own that launches each of CALLS once, and writes what the hardware
counters say as JSON; `report_profile` makes the table of it. Needs a Hopper GPU, Nsight Compute
and the right to read counters. `--keep FILE` leaves what ncu printed, and `--csv FILE` reads that
again, without a GPU: of the JSON only the rows are replaced.

A kernel is replayed until all counters are read, each time from the memory that it found: its times
are not those of a benchmark. Stalls are of all warps, whatever their role: who waits for work, as a
producer does most of the time, is counted next to who holds it up.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flash_versions.bench.run import new_document
from flash_versions.bench.suites import prefill
from flash_versions.bench.watch import write
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.forward import forward
from flash_versions.versions.fa4.hopper import backward as backward_hopper

SUITE = "backward profile"
LENGTH = 8192
NCU = "/usr/local/cuda/bin/ncu"  # where it is, if not on PATH
SECTIONS = (
    "SpeedOfLight", "ComputeWorkloadAnalysis", "MemoryWorkloadAnalysis", "SchedulerStats",
    "WarpStateStats", "InstructionStats", "LaunchStats", "Occupancy",
)  # fmt: skip
# What a row says -> the counters that say so, the first that a GPU and this ncu have.
METRICS: dict[str, tuple[str, ...]] = {
    "microseconds": ("gpu__time_duration.sum",),
    "registers": ("launch__registers_per_thread",),
    "tensor_pct": (
        "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor_op_gmma.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active",
    ),
    "exp_pct": ("sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",),
    "fma_pct": (
        "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
    ),
    "alu_pct": (
        "sm__pipe_alu_cycles_active.avg.pct_of_peak_sustained_active",
        "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    ),
    "issue_pct": (
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "sm__inst_issued.avg.pct_of_peak_sustained_active",
        "smsp__issue_active.avg.per_cycle_active",  # of 1
    ),
    "shared_pct": (
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.avg.pct_of_peak_sustained_elapsed",
        "l1tex__data_pipe_lsu_wavefronts_mem_shared.sum.pct_of_peak_sustained_elapsed",
    ),
    "bank_read_pct": ("l1tex__data_bank_reads.avg.pct_of_peak_sustained_elapsed",),
    "bank_write_pct": ("l1tex__data_bank_writes.avg.pct_of_peak_sustained_elapsed",),
    "load_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum",
    ),
    "store_conflicts": (
        "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum",
    ),
    "l2_pct": ("lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
               "lts__throughput.avg.pct_of_peak_sustained_elapsed"),
    "dram_pct": (
        "dram__throughput.avg.pct_of_peak_sustained_elapsed",
        "gpu__dram_throughput.avg.pct_of_peak_sustained_elapsed",
    ),
}  # fmt: skip
PER_CYCLE = ".per_cycle_active"  # of 1, where other metrics are of 100
STALL = ("smsp__average_warps_issue_stalled_", "_per_issue_active.ratio")
STALLS_KEPT = 5
MICROSECONDS = {"ns": 1e-3, "nsecond": 1e-3, "us": 1.0, "usecond": 1.0, "ms": 1e3, "msecond": 1e3}


class Call(NamedTuple):
    """A backward of a shape of the benchmark's table, a share of its exponentials polynomials."""

    D: int
    causal: bool
    eighths: int


CALLS = [
    Call(128, False, 0),
    Call(128, True, 0),
    Call(128, False, 2),
    Call(64, False, 0),
    Call(64, True, 0),
    Call(64, False, 2),
]


def launch() -> None:
    """Launch each of CALLS once, in order."""
    for D, causal, eighths in CALLS:
        q, k, v, do = prefill(LENGTH, D, causal).inputs()
        request = make_request(q, k, v, causal=causal)
        o, lse, _ = forward(request)
        backward_hopper.backward(request, o, lse, None, do, None, eighths=eighths)
    torch.cuda.synchronize()


def find_ncu() -> str:
    """The path of Nsight Compute.

    Raises:
        FileNotFoundError: it is neither on PATH nor where CUDA puts it.
    """
    if found := shutil.which("ncu") or (NCU if Path(NCU).exists() else None):
        return found
    raise FileNotFoundError(f"ncu is neither on PATH nor {NCU}; it comes with CUDA.")


def known_metrics(ncu: str) -> set[str]:
    """The names, without what follows their first dot, of the counters that the GPU has."""
    done = subprocess.run(
        [ncu, "--query-metrics", "--chip", "gh100"], capture_output=True, text=True
    )
    return {line.split()[0] for line in done.stdout.splitlines() if "__" in line}


def run_ncu() -> str:
    """The CSV that ncu prints, a row for each of CALLS.

    Raises:
        RuntimeError: ncu fails, with what it said.
    """
    ncu = find_ncu()
    known = known_metrics(ncu)
    names = [name for group in METRICS.values() for name in group]
    asked = [name for name in names if name.partition(".")[0] in known]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            ncu, "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
            "--clock-control", "none", "-k", "regex:^backward_kernel$",
            *(part for section in SECTIONS for part in ("--section", section)),
            *(("--metrics", ",".join(asked)) if asked else ()),
            sys.executable, "-m", "flash_versions.bench.profile_backward", "--launch",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        said = log.read_text() if log.exists() else ""
    if done.returncode != 0:
        raise RuntimeError(f"ncu failed: {said[-1500:]}{done.stderr[-1500:]}")
    return said


def number(text: str) -> float:
    """A number as ncu prints it: 1,234.5."""
    return float(text.replace(",", ""))


def rows_of(text: str) -> list[dict[str, Any]]:
    """The rows of a profile from ncu's CSV: one for each of CALLS, in that order.

    Raises:
        ValueError: it holds another number of kernels.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    table = list(csv.DictReader(lines))
    kernels = [row for row in table if row.get("ID", "").isdigit()]  # not the row of units
    units = table[0] if table else {}
    if len(kernels) != len(CALLS):
        raise ValueError(
            f"the CSV holds {len(kernels)} kernels; it must hold the {len(CALLS)} of CALLS."
        )
    return [row_of(call, kernel, units) for call, kernel in zip(CALLS, kernels, strict=True)]


def row_of(call: Call, kernel: dict[str, str], units: dict[str, str]) -> dict[str, Any]:
    """What is kept of a kernel's counters: METRICS, and the largest of the stalls, in cycles that
    a warp waits for each instruction that is issued.
    """
    shape = prefill(LENGTH, call.D, call.causal)
    row: dict[str, Any] = {"suite": SUITE, "version": "fa4" if call.eighths else "fa3"}
    row |= {"B": shape.B, "H": shape.H, "N": LENGTH, **call._asdict()}
    for name, candidates in METRICS.items():
        if metric := next((x for x in candidates if kernel.get(x)), None):
            scale = 100.0 if metric.endswith(PER_CYCLE) else 1.0
            if name == "microseconds":
                scale = MICROSECONDS[units[metric]]
            row[name] = number(kernel[metric]) * scale
    stalls = {
        name.removeprefix(STALL[0]).removesuffix(STALL[1]): number(value)
        for name, value in kernel.items()
        if name.startswith(STALL[0]) and name.endswith(STALL[1]) and value
    }
    largest = sorted(stalls, key=lambda name: stalls[name], reverse=True)[:STALLS_KEPT]
    row["stalls"] = {name: stalls[name] for name in largest}
    return row


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile, and write what was found."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.bench.profile_backward", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="what ncu printed earlier")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="where to leave what ncu prints")
    parser.add_argument("--launch", action="store_true", help="be what ncu looks at")
    options = parser.parse_args(arguments)
    if options.launch:
        launch()
    elif options.out is None:
        parser.error("--out is missing")
    elif options.csv:
        document = json.loads(options.out.read_text()) | {"rows": rows_of(options.csv.read_text())}
        write(options.out, json.dumps(document, indent=1) + "\n")
    else:
        document = new_document(1) | {"protocol": {"method": "Nsight Compute, one launch each"}}
        write(options.out, json.dumps(document, indent=1) + "\n")
        text = run_ncu()
        if options.keep:
            write(options.keep, text)
        document["rows"] = rows_of(text)
        write(options.out, json.dumps(document, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
