"""`python -m flash_versions.verify`: are the kernels right on this GPU, and how fast are they?

Every version computes random calls, forward and backward. A result has to be within its error
budget (versions/oracle/budget.py) and the same in two runs. The report can be sent to the authors.

With --invariance: are the bits of a sequence the same alone and among others (pairs.py)?
"""

import argparse
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch

from flash_versions.bench.document import new_document, save
from flash_versions.bench.workers import Answer, Task, answers
from flash_versions.dispatch import verified
from flash_versions.dispatch.extras import progress_bar
from flash_versions.dispatch.version import EXPLICIT, VERSIONS
from flash_versions.verify import cases, pairs
from flash_versions.verify.pairs import PAIRS
from flash_versions.versions.fa4 import BLACKWELL

CASES, QUICK, SIMULATED = 200, 24, 3
MINUTES, QUICK_MINUTES = 8.0, 0.6  # then no call is begun; those that run and the timing take more
PAIRS_TRIED, SIMULATED_PAIRS = 2000, 300
LIMIT = 180.0  # seconds without a word; a kernel's first compilation takes some
MOST_WORKERS, WORKER_BYTES = 16, 4 << 30  # processes, and the GPU's memory that each may need
LINE_SECONDS = 10.0  # between two lines where there is no bar


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m flash_versions.verify", description=__doc__)
    add = parser.add_argument
    add("--arch", help="the GPU that is meant, such as sm_100; else the one there is")
    add("--versions", nargs="+", metavar="NAME", help="else all that run on this GPU")
    add("--quick", action="store_true", help=f"{QUICK} calls in place of {CASES}")
    add("--simulate", action="store_true", help="a few small calls, simulated, without a GPU")
    minutes = f"then no more calls are begun ({MINUTES:g}; with --quick {QUICK_MINUTES:g})"
    add("--minutes", type=float, help=minutes)
    add("--limit", type=float, default=LIMIT, help="seconds for one call (180)")
    bits = "are bits of batch_invariant calls those of a sequence alone? simulated without a GPU"
    add("--invariance", action="store_true", help=bits)
    trials = f"pairs of calls in all ({PAIRS_TRIED:,}; simulated {SIMULATED_PAIRS})"
    add("--trials", type=int, help=trials)
    add("--seed", type=int, default=0, help="of these pairs (0)")
    add("--quiet", action="store_true", help="say nothing but what fails")
    add("--out", type=Path, default=Path("verified.json"), help="the report (verified.json)")
    options = parser.parse_args(arguments)
    if options.invariance and not torch.cuda.is_available():
        options.simulate = True
    if options.trials is None:
        options.trials = SIMULATED_PAIRS if options.simulate else PAIRS_TRIED
    if options.minutes is None:
        options.minutes = QUICK_MINUTES if options.quick else MINUTES
        options.minutes = math.inf if options.invariance else options.minutes
    return options


def refusal(options: argparse.Namespace) -> str | None:
    """Why nothing can be verified, as a sentence, or None."""
    known = VERSIONS | EXPLICIT
    if unknown := [name for name in options.versions or () if name not in known]:
        return f"version {unknown[0]!r} is unknown; there are {', '.join(known)}."
    inexact = [name for name in options.versions or () if known[name].inexact]
    if options.invariance and inexact:
        return f"version {inexact[0]!r} takes no batch_invariant: {known[inexact[0]].inexact}."
    if not 0 < options.trials < PAIRS or not 0 <= options.seed < PAIRS:
        return f"--trials {options.trials} and --seed {options.seed} must be below {PAIRS}."
    if not options.limit > 0:
        return f"--limit {options.limit:g} is not possible; it is a number of seconds."
    if not options.minutes > 0:
        return f"--minutes {options.minutes:g} is not possible; it is a positive number."
    if options.simulate:
        return None
    if not torch.cuda.is_available():
        return "no GPU was found; --simulate tries a few small calls without one."
    found = "sm_{}{}".format(*torch.cuda.get_device_capability())
    if options.arch not in (None, found):
        return (
            f"--arch {options.arch} was asked for, and {torch.cuda.get_device_name()} is {found}."
        )
    return None


def chosen(options: argparse.Namespace) -> list[str]:
    """The versions to try: those that were named, or all, with those for this GPU alone."""
    if options.versions:
        return list(options.versions)
    if options.invariance:
        return [name for name, version in VERSIONS.items() if not version.inexact]
    has_own = not options.simulate and torch.cuda.get_device_capability() == (10, 0)
    return [*VERSIONS, BLACKWELL] if has_own else [*VERSIONS]


def workers(options: argparse.Namespace) -> int:
    """How many processes try calls at the same time: most of their time goes into compiling."""
    if options.simulate:
        return min(2, os.cpu_count() or 1) if options.invariance else 1
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, min(MOST_WORKERS, os.cpu_count() or 1, memory // WORKER_BYTES))


def tried(
    kind: str, tasks: list[Task], at_once: int, options: argparse.Namespace
) -> Iterator[tuple[Task, Answer]]:
    """Each task with its answer. What fails is told at once, and how many are done.

    Args:
        kind: "calls" or "pairs", of `trial.py`.
        tasks: a version, and the number of a call or of a pair.
        at_once: how many processes there are.
        options: of the command.
    """
    what, draw = (kind[:-1], cases.draw if kind == "calls" else pairs.draw)
    bar = progress_bar(len(tasks), what, options.quiet)
    say = partial(print if bar is None else bar.write, file=sys.stderr)
    command = "flash_versions.verify.trial", kind, "simulated" if options.simulate else "gpu"
    began = told = time.monotonic()
    given = at_once, command, options.limit, options.minutes * 60
    for done, ((name, number), answer) in enumerate(answers(tasks, *given), 1):
        answer[what] = str(draw(number, options.simulate))
        if answer["outcome"] == "failed":
            say(f"{name}, {what} {answer[what]}: {answer['why']}")
        now = time.monotonic()
        if bar is not None:
            bar.update()
        elif now - told > LINE_SECONDS and not options.quiet:
            told, left = now, (now - began) / done * (len(tasks) - done)
            say(f"{done} of {len(tasks)} {kind}, about {left:.0f} s left")
        yield (name, number), answer
    if bar is not None:
        bar.close()


def compare_pairs(options: argparse.Namespace) -> int:
    """Compare pairs of calls, of one version after the other, bit by bit, and write the report, now
    and then and at the end; the exit code is 0 if no bit differs.
    """
    names, first = chosen(options), options.seed * PAIRS
    tasks: list[Task] = [(names[n % len(names)], first + n) for n in range(options.trials)]
    found: dict[str, Any] = {
        "suite": "simulated pairs" if options.simulate else "pairs",
        "pairs": 0,
        "elements": 0,
        "differ": Counter(),
        "failed": [],
    }
    report = partial(write_report, options, [found], versions=names, seed=options.seed)
    written = time.monotonic()
    for (name, _), answer in tried("pairs", tasks, workers(options), options):
        found["pairs"] += answer["outcome"] != "not tried"
        found["elements"] += answer.get("elements", 0)
        found["differ"].update(answer.get("differ", {}))
        if answer["outcome"] == "failed":
            row = {"version": name, "pair": answer["pair"], "why": answer["why"]}
            found["failed"].append(row)
        if time.monotonic() - written > LINE_SECONDS:
            report()
            written = time.monotonic()
    report()
    bits = sum(found["differ"].values())
    sys.stdout.write(
        f"{', '.join(names)}: {found['pairs']} pairs, {found['elements']} elements, {bits} differ, "
        f"{len(found['failed'])} pairs failed\nThe report is in {options.out}.\n"
    )
    return int(bool(found["failed"]) or not found["pairs"])


class Verdict(NamedTuple):
    """What became of a version.

    Attributes:
        version: its name.
        cases: a row for each call: number, call, outcome and what was found.
        timing: rows with shape, ms and sdpa_ms; none where nothing was timed.
    """

    version: str
    cases: list[dict[str, Any]]
    timing: list[dict[str, Any]]

    @property
    def outcomes(self) -> Counter[str]:
        """How many calls passed, were refused, failed, were not tried."""
        return Counter(row["outcome"] for row in self.cases)

    @property
    def passed(self) -> bool:
        """Whether no call failed and at least one passed."""
        return not self.outcomes["failed"] and bool(self.outcomes["passed"])


def try_calls(names: list[str], count: int, options: argparse.Namespace) -> list[Verdict]:
    """Try so many calls of each version, several at a time, then time each version that passed,
    alone. What failed comes first.
    """
    verdicts, at_once = {name: Verdict(name, [], []) for name in names}, workers(options)
    if not options.quiet:
        sys.stderr.write(f"{', '.join(names)}: {count} calls each, {at_once} at a time\n")
    tasks: list[Task] = [(name, number) for name in names for number in range(count)]
    # If time does not suffice, no version is left out. And the processes meet different kernels.
    Random(0).shuffle(tasks)
    for (name, number), answer in tried("calls", tasks, at_once, options):
        verdicts[name].cases.append({"number": number, **answer})
    if not options.simulate:
        time_versions([verdict for verdict in verdicts.values() if verdict.passed], options)
    for verdict in verdicts.values():
        verdict.cases.sort(key=lambda row: (row["outcome"] != "failed", row["number"] or 0))
    return sorted(verdicts.values(), key=lambda verdict: verdict.passed)


def time_versions(verdicts: list[Verdict], options: argparse.Namespace) -> None:
    """Add the timing of each version, or that it failed."""
    of, command = {x.version: x for x in verdicts}, ("flash_versions.verify.trial", "calls", "gpu")
    tasks: list[Task] = [(name, None) for name in of]
    for (name, _), answer in answers(tasks, 1, command, options.limit, math.inf):
        verdict = of[name]
        verdict.timing.extend(answer.get("timing", ()))
        if answer["outcome"] == "failed":
            verdict.cases.append({"number": None, "call": "timing", **answer})


def summary(verdicts: list[Verdict], minutes: float) -> str:
    """What failed, then a line for each version, with those that failed on top."""
    lines = [
        f"{verdict.version}, call {row['call']}: {row['why']}"
        for verdict in verdicts
        for row in verdict.cases
        if row["outcome"] == "failed"
    ]
    for verdict in verdicts:
        counts = verdict.outcomes
        speeds = [
            f"; {row['sdpa_ms'] / row['ms']:.2f} x SDPA at head_dim {row['shape'][3]}"
            for row in verdict.timing
        ]
        left = counts["not tried"]
        lines.append(
            f"{verdict.version:<14} {'passed' if verdict.passed else 'FAILED':<7} "
            f"{counts['passed']} right, {counts['failed']} wrong, {counts['refused']} not taken"
            + f", {left} not tried in {minutes:g} minutes" * bool(left)
            + "".join(speeds)
        )
    return "\n".join(lines)


def write_report(options: argparse.Namespace, rows: list[Any], **about: Any) -> None:
    """Write what was found."""
    document = new_document("cpu" if options.simulate else "cuda", **about)
    save(document | {"rows": rows}, options.out)


def remember(passed: list[str]) -> None:
    """Record what passed, unless other sources than those at the start may have been tried."""
    if verified.read_sources() != verified.sources():
        sys.stderr.write("note: the sources changed meanwhile, so nothing is remembered\n")
        return
    for name in passed:
        verified.record(name)


def main(arguments: list[str] | None = None) -> int:
    """Verify; the exit code is 0 if all passed, 1 if not, 2 for a wrong request, 130 if stopped."""
    options = parse(arguments)
    if why := refusal(options):
        sys.stderr.write(f"error: {why}\n")
        return 2
    verified.sources()  # what the trials are of
    try:
        if options.invariance:
            return compare_pairs(options)
        count = SIMULATED if options.simulate else QUICK if options.quick else CASES
        verdicts = try_calls(chosen(options), count, options)
        sys.stdout.write(f"{summary(verdicts, options.minutes)}\n")
        write_report(options, [verdict._asdict() for verdict in verdicts])
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; there is no report of the whole\n")
        return 130
    except OSError as error:
        sys.stderr.write(f"error: {options.out}: {error.strerror}\n")
        return 2
    sys.stdout.write(f"The report is in {options.out}.\n")
    if not options.simulate and not options.quick:
        whole = [verdict for verdict in verdicts if not verdict.outcomes["not tried"]]
        remember([verdict.version for verdict in whole if verdict.passed])
    return int(not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
