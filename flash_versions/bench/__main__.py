"""Measure the versions against each other and against other libraries: `python -m
flash_versions.bench`.

`measure.py` says how something is measured, `suites.py` what; this module runs suites, keeps what
is measured in a JSON document after every shape, and goes on where it was stopped. A document is
continued if commit, sources, machine and protocol are the same. Nothing here draws.
"""

import argparse
import json
import signal
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from flash_versions import VERSIONS
from flash_versions.bench.document import Document, new_document, save
from flash_versions.bench.measure import ENOUGH_MS, L2_FLUSH_BYTES, ROUNDS, answer
from flash_versions.bench.peers import PEERS
from flash_versions.bench.suites import ABOUT, SUITES, Shape, competitors
from flash_versions.bench.workers import Answer, Worker
from flash_versions.dispatch.extras import progress_bar
from flash_versions.files import regular_file

IDENTITY = ("schema", "commit", "source", "machine", "protocol")
DEFAULT_SUITES = [name for name in SUITES if name != "quick"]
TIMEOUT = 90.0

Rows = list[dict[str, Any]]
Group = tuple[str, Shape]  # a suite and one of its shapes


def continued(path: Path, document: Document) -> Document:
    """The document at `path` if it is of the same measurement; else `document`, and what is at
    `path` is set aside.
    """
    if not path.is_file():
        return document
    try:
        found = json.loads(path.read_text("utf-8"))
        differing = [key for key in IDENTITY if found.get(key) != document[key]]
    except (ValueError, AttributeError):
        differing = ["form"]
    if not differing:
        return found
    set_aside(path, f"it has another {' and '.join(differing)}")
    return document


def set_aside(path: Path, why: str) -> None:
    """Keep an earlier document under another name."""
    file = regular_file(path)
    if file is not None and file.exists():
        kept = file.with_name(f"{file.stem}.previous.json")
        file.replace(kept)
        say(f"{path} starts anew ({why}); what was there is now {kept}")


def save_sorted(document: Document, path: Path) -> None:
    """Write the document, rows in the order of the suites."""
    order = {group: number for number, group in enumerate(groups(SUITES))}
    document["rows"].sort(key=lambda row: order[group_of(row)])
    save(document, path)


def groups(suites: Iterable[str]) -> list[Group]:
    """Every shape of every suite, in the order of measurement."""
    return [(suite, shape) for suite in suites for shape in SUITES[suite]]


def group_of(row: dict[str, Any]) -> Group:
    """The group of a row."""
    return row["suite"], Shape(**{key: row[key] for key in Shape.__dataclass_fields__})


class Bench:
    """Measures in a process of its own, and goes on without what hangs or crashes.

    Attributes:
        rounds: how often each competitor is timed.
        seconds: after which one that says nothing is left out; 0: measure in this process.
    """

    def __init__(self, rounds: int, seconds: float) -> None:
        self.rounds, self.seconds = rounds, seconds
        self.worker: Worker | None = None

    def ask(
        self,
        suite: str | None = None,
        shape: dict[str, Any] | None = None,
        lost: dict[str, str] | None = None,
    ) -> Answer:
        """What `measure.answer` says, without those that are lost, to whom may be added.

        Raises:
            RuntimeError: the process ended, and it is no competitor's fault.
        """
        lost = {} if lost is None else lost
        while self.seconds:
            self.worker = self.worker or Worker("flash_versions.bench.measure")
            found = self.worker.ask((self.rounds, suite, shape, lost), self.seconds)
            if "why" not in found:
                return found
            self.end()
            if "running" not in found:
                raise RuntimeError(found["why"])
            lost[found["running"]] = found["why"]
            say(f"{found['running']} is left out of this shape: {found['why']}")
        return answer(self.rounds, suite, shape, lost)

    def end(self) -> None:
        """End the process."""
        if self.worker is not None:
            self.worker.end()
        self.worker = None


def run(path: Path, suites: list[str], bench: Bench, quiet: bool = False) -> None:
    """Measure what `path` does not have yet of the suites, and write it there after every shape;
    say so unless `quiet`.
    """
    protocol = {
        "method": "interleaved CUDA graph replays between events, median",
        "rounds": bench.rounds,
        "enough_ms": ENOUGH_MS,
        "l2_flush_bytes": L2_FLUSH_BYTES,
    }
    document = continued(path, new_document(protocol=protocol))
    save_sorted(document, path)
    wanted = groups(suites)
    there: dict[Group, Rows] = {group: [] for group in groups(SUITES)}
    for row in document["rows"]:
        there[group_of(row)].append(row)
    competing = {group: {one.name for one in competitors(*group)} for group in wanted}
    todo = [x for x in wanted if competing[x] - {row["version"] for row in there[x]}]
    if not quiet:
        say(f"{len(wanted) - len(todo)} of {len(wanted)} are there already")
    if "copy_tb_per_s" not in document:
        document |= bench.ask()
    bar = progress_bar(len(todo), "shape", quiet)
    for number, group in enumerate(todo, 1):
        suite, shape = group
        before = there[group]
        lost = {row["version"]: row["reason"] for row in before if "reason" in row}
        rows = bench.ask(suite, asdict(shape), lost=lost)["rows"]
        document["rows"] = [row for row in document["rows"] if row not in before] + rows
        save_sorted(document, path)
        line = f"[{number}/{len(todo)}] {suite} {shape}: {summary(rows)}"
        if bar is not None:
            bar.write(line, file=sys.stderr)
            bar.update()
        elif not quiet:
            say(line)
    if bar is not None:
        bar.close()


def summary(rows: Rows) -> str:
    """One line about a group: the rates that it has."""
    found = []
    for row in rows:
        for unit, form in (("tflops", "{:.0f}"), ("tb_per_s", "{:.2f} TB/s")):
            if unit in row:
                found.append(f"{row['version']} {form.format(row[unit])}")
        if "reason" in row:
            found.append(f"{row['version']} - ({row['reason'][:60]})")
    return ", ".join(found)


def catalogue() -> str:
    """The list of suites, versions and peers."""
    lines = ["suites (--suite NAME ..., default: all but quick)"]
    for name, shapes in SUITES.items():
        lines.append(f"  {name:18} {len(shapes):3} shapes  {ABOUT[name]}")
    lines.append("versions")
    for name, version in VERSIONS.items():
        variants = ", ".join(dict.fromkeys([*version.variants, *version.fp8_variants])) or "none"
        lines.append(f"  {name:16} {version.title}; variants: {variants}")
    lines.append("peers")
    for name, peer in PEERS.items():
        lines.append(f"  {name:16} {peer.label}{'' if peer.installed() else ': not installed'}")
    return "\n".join(lines) + "\n"


def say(line: str) -> None:
    """Print progress to stderr."""
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
    hung = "seconds after which a competitor that hangs is left out; 0: measure in this process"
    add("--timeout", type=float, default=TIMEOUT, help=hung)
    add("--list", action="store_true", help="say what there is to measure, and stop")
    add("--quiet", action="store_true", help="say nothing but warnings and errors")
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
        say("error: no GPU found; the seconds of simulated kernels mean nothing")
        return 2
    if options.fresh:
        set_aside(options.out, "--fresh")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(options.rounds, options.timeout)
    try:
        run(options.out, suites, bench, options.quiet)
    except KeyboardInterrupt:
        say(f"stopped; the same command goes on from what {options.out} has")
        return 130
    except RuntimeError as error:
        say(f"error: {error}")
        return 1
    finally:
        bench.end()
    if not options.quiet:
        say(f"wrote {options.out}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends its worker
    sys.exit(main())
