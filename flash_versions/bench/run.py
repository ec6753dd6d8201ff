"""Measure the versions against each other and against other libraries: `python -m
flash_versions.bench`.

`measure.py` says how something is measured, `suites.py` what; this module runs suites, keeps what
is measured in a JSON document after every shape, and goes on where it was stopped. A document is
continued if commit, sources, machine and protocol are the same. Nothing here draws.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton

from flash_versions import VERSIONS
from flash_versions.bench.measure import (
    ENOUGH_MS,
    L2_FLUSH_BYTES,
    ROUNDS,
    DeviceLostError,
    copy_bandwidth,
    host_times,
    measure,
)
from flash_versions.bench.peers import LIBRARIES, PEERS, installed_version
from flash_versions.bench.precompile import precompile
from flash_versions.bench.suites import ABOUT, SUITES, Shape, competitors
from flash_versions.bench.telemetry import Telemetry
from flash_versions.bench.watch import Loss, Marker, watched, write

SCHEMA = 1
IDENTITY = ("schema", "commit", "source", "machine", "protocol")
DEFAULT_SUITES = [name for name in SUITES if name != "quick"]
TIMEOUT = 90.0
PACKAGE = Path(__file__).parents[1]

Document = dict[str, Any]
Rows = list[dict[str, Any]]
Group = tuple[str, Shape | None]  # a suite and one of its shapes; None: the suite has none


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
        **{name: installed_version(*where) for name, where in LIBRARIES.items()},
        "python": platform.python_version(),
    }


def commit() -> str:
    """The commit that is measured: from git, or from GIT_COMMIT where there is no repository."""
    git = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, cwd=PACKAGE).stdout.strip()
    except OSError:
        found = ""
    return os.environ.get("GIT_COMMIT") or found or "unknown"


def source() -> str:
    """A digest of the package's code: two states of one dirty tree have the same commit."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def new_document(rounds: int) -> Document:
    """A document without rows."""
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "source": source(),
        "machine": machine(),
        "protocol": {
            "method": "interleaved CUDA graph replays between events, median",
            "rounds": rounds,
            "enough_ms": ENOUGH_MS,
            "l2_flush_bytes": L2_FLUSH_BYTES,
        },
        "rows": [],
    }


def continued(path: Path, document: Document) -> Document:
    """The document at `path` if it is of the same measurement; else `document`, and what is at
    `path` is set aside.
    """
    if not path.exists():
        return document
    try:
        found = json.loads(path.read_text())
        differing = [key for key in IDENTITY if found.get(key) != document[key]]
    except (ValueError, AttributeError):
        differing = ["form"]
    if not differing:
        return found
    set_aside(path, f"it has another {' and '.join(differing)}")
    return document


def set_aside(path: Path, why: str) -> None:
    """Keep an earlier document under another name."""
    if path.exists():
        kept = path.with_name(f"{path.stem}.previous.json")
        path.replace(kept)
        say(f"{path} starts anew ({why}); what was there is now {kept}")


def save(document: Document, path: Path) -> None:
    """Write the document, rows in the order of the suites."""
    order = {tuple(place(group).values()): i for i, group in enumerate(groups(SUITES))}
    document["rows"].sort(key=lambda row: order[tuple(place_of(row).values())])
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(document, indent=1) + "\n")


def groups(suites: Iterable[str]) -> list[Group]:
    """What is measured one after another: every shape of every suite."""
    nothing: list[Shape | None] = [None]
    return [(suite, shape) for suite in suites for shape in SUITES[suite] or nothing]


def place(group: Group) -> dict[str, Any]:
    """The fields that the rows of a group have in common."""
    suite, shape = group
    return {"suite": suite} if shape is None else {"suite": suite, **asdict(shape)}


def place_of(row: dict[str, Any]) -> dict[str, Any]:
    """The place of a row."""
    return {key: row[key] for key in ("suite", *Shape.__dataclass_fields__) if key in row}


def rows_at(document: Document, group: Group) -> Rows:
    """The rows of a group."""
    return [row for row in document["rows"] if place_of(row) == place(group)]


def expected(group: Group) -> list[str]:
    """Names that a complete group has rows of; an ablation without variants has none."""
    suite, shape = group
    if shape is None:
        return list(VERSIONS)
    names = [one.name for one in competitors(suite, shape)]
    return [] if set(names) <= set(PEERS) else names


def run(path: Path, suites: list[str], rounds: int, marker: Marker) -> None:
    """Measure what `path` does not have yet of the suites, and write it there after every shape."""
    marker("start")
    document = continued(path, new_document(rounds))
    save(document, path)
    todo = []
    for group in groups(suites):
        if set(expected(group)) - {row["version"] for row in rows_at(document, group)}:
            todo.append(group)
    say(f"{len(groups(suites)) - len(todo)} of {len(groups(suites))} are there already")
    if "copy_tb_per_s" not in document:
        document["copy_tb_per_s"] = copy_bandwidth(rounds)
    began = time.monotonic()
    with Telemetry() as telemetry:
        for number, group in enumerate(todo, 1):
            suite, shape = group
            marker.place = place(group)
            marker(None)  # nobody's fault yet
            there = rows_at(document, group)
            started = time.monotonic()
            if shape is None:
                missing = [name for name in VERSIONS if name not in {r["version"] for r in there}]
                rows = there + host_times(rounds, missing, marker)
            else:
                lost = {row["version"]: row["reason"] for row in there if "reason" in row}
                rows = measure(suite, shape, rounds, marker, lost, telemetry)
            document["rows"] = [row for row in document["rows"] if row not in there] + rows
            save(document, path)
            now = time.monotonic()
            left = (now - began) / number * (len(todo) - number)
            say(
                f"[{number}/{len(todo)}] {suite} {shape or ''}: {summary(rows)}  "
                f"({now - started:.1f} s; {now - began:.0f} s in all, about {left:.0f} s left)"
            )
    marker.clear()


def summary(rows: Rows) -> str:
    """One line on a group: rates where there are any."""
    found = []
    for row in rows:
        for unit, form in (
            ("tflops", "{:.0f}"),
            ("tb_per_s", "{:.2f} TB/s"),
            ("host_us", "{:.0f}"),
        ):
            if unit in row:
                found.append(f"{row['version']} {form.format(row[unit])}")
        if "reason" in row:
            found.append(f"{row['version']} - ({row['reason'][:60]})")
    return ", ".join(found)


def record(path: Path, loss: Loss) -> None:
    """Write a competitor's loss into the document, so that it is not tried again."""
    document = json.loads(path.read_text())
    row = {"suite": loss.place["suite"], "version": loss.version, **loss.place}
    others = [
        other
        for other in document["rows"]
        if place_of(other) != place_of(row) or other["version"] != loss.version
    ]
    document["rows"] = [*others, {**row, "reason": loss.reason}]
    save(document, path)


def supervise(command: list[str], path: Path, marker: Marker, timeout: float) -> int:
    """Run the measuring process again until all is measured or lost; returns the exit code."""
    while True:
        end = watched(command, marker, timeout)
        if isinstance(end, int):
            return end
        if not end.version or not end.place or not path.exists():
            say(
                f"error: the measuring process failed at {end.version or 'its start'}: {end.reason}"
            )
            return 1
        say(f"{end.version} is left out of this shape: {end.reason}")
        record(path, end)


def catalogue() -> str:
    """What there is to measure, and against what."""
    lines = ["suites (--suite NAME ..., default: all but quick)"]
    for name, shapes in SUITES.items():
        number = f"{len(shapes)} shapes" if shapes else ""
        lines.append(f"  {name:16} {number:10} {ABOUT[name]}")
    lines.append("versions")
    for name, version in VERSIONS.items():
        variants = ", ".join(dict.fromkeys([*version.variants, *version.fp8_variants])) or "none"
        lines.append(f"  {name:16} {version.title}; variants: {variants}")
    lines.append("peers")
    for name, peer in PEERS.items():
        lines.append(f"  {name:16} {peer.label}{'' if peer.installed() else ': not installed'}")
    return "\n".join(lines) + "\n"


def say(line: str) -> None:
    """Progress, on stderr."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m flash_versions.bench",
        description="time every version on this GPU, against every other library that is installed",
        epilog=catalogue(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--suite", nargs="+", action="extend", choices=SUITES, metavar="NAME", help="what to time")
    add("--out", type=Path, default=Path("results.json"), help="continued if it is of this state")
    add("--fresh", action="store_true", help="start anew; an earlier document is set aside")
    add("--rounds", type=int, default=ROUNDS, help=f"timings of each, {ROUNDS} unless told")
    add(
        "--timeout",
        type=float,
        default=TIMEOUT,
        help="seconds after which a competitor that hangs is left out; 0: measure in this process",
    )
    add("--precompile", type=int, default=0, metavar="N", help="compile in N processes before")
    add("--list", action="store_true", help="say what there is to measure, and stop")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    made = parser()
    options = made.parse_args(arguments)
    suites = list(dict.fromkeys(options.suite or DEFAULT_SUITES))
    if options.list:
        sys.stdout.write(catalogue())
        return 0
    if options.rounds < 2:
        made.error(f"--rounds {options.rounds}: a median needs 2 or more")
    if not torch.cuda.is_available():
        say("error: no GPU found; the seconds of interpreted kernels mean nothing")
        return 2
    marker = Marker(options.out.with_name(f"{options.out.name}.running"))
    try:
        if options.worker:
            run(options.out, suites, options.rounds, marker)
            return 0
        options.out.parent.mkdir(parents=True, exist_ok=True)
        if options.fresh:
            set_aside(options.out, "--fresh")
        if options.precompile:
            say(precompile(options.precompile, suites))
        if options.timeout == 0:
            run(options.out, suites, options.rounds, marker)
            code = 0
        else:
            worker = ["--worker", "--suite", *suites, "--out", str(options.out)]
            worker += ["--rounds", str(options.rounds)]
            command = [sys.executable, "-m", "flash_versions.bench", *worker]
            code = supervise(command, options.out, marker, options.timeout)
            marker.clear()
    except KeyboardInterrupt:
        marker.clear()
        if not options.worker:  # its parent says so
            say(f"stopped; the same command goes on from what {options.out} has")
        return 130
    except DeviceLostError as error:
        say(f"error: {error}")
        return 3
    if code == 0:
        say(f"wrote {options.out}")
    return code
