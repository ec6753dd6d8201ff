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
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from flash_versions.bench.document import new_document, save
from flash_versions.dispatch import verified
from flash_versions.dispatch.extras import progress_bar
from flash_versions.dispatch.version import EXPLICIT, VERSIONS
from flash_versions.verify import pairs
from flash_versions.verify.cases import draw
from flash_versions.verify.pairs import PAIRS
from flash_versions.verify.supervise import Task, Verdict, answers
from flash_versions.versions.fa4 import BLACKWELL

CASES, QUICK, SIMULATED = 200, 40, 3
MINUTES, QUICK_MINUTES = 8.0, 1.0  # then no call is begun; those that run and the timing take more
PAIRS_TRIED, SIMULATED_PAIRS = 2000, 300
LIMIT = 180.0  # seconds without a word; a kernel's first compilation takes some
MOST_WORKERS, WORKER_BYTES = 16, 4 << 30  # processes, and the GPU's memory that each may need
LINE_SECONDS = 10.0  # between two lines where there is no bar


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(prog="python -m flash_versions.verify", description=__doc__)
    parser.add_argument(
        "--arch", help="the GPU that is meant, such as sm_100; else the one there is"
    )
    parser.add_argument(
        "--versions", nargs="+", metavar="NAME", help="else all that run on this GPU"
    )
    parser.add_argument("--quick", action="store_true", help=f"{QUICK} calls in place of {CASES}")
    parser.add_argument(
        "--simulate", action="store_true", help="a few small calls, simulated, without a GPU"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        help=f"then no more calls are begun ({MINUTES:g}; with --quick {QUICK_MINUTES:g})",
    )
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one call (180)")
    parser.add_argument(
        "--invariance",
        action="store_true",
        help="are bits of batch_invariant calls those of a sequence alone? simulated without a GPU",
    )
    parser.add_argument(
        "--trials",
        type=int,
        help=f"pairs of calls in all ({PAIRS_TRIED:,}; simulated {SIMULATED_PAIRS})",
    )
    parser.add_argument("--seed", type=int, default=0, help="of these pairs (0)")
    parser.add_argument("--quiet", action="store_true", help="say nothing but what fails")
    parser.add_argument(
        "--out", type=Path, default=Path("verified.json"), help="the report (verified.json)"
    )
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


def compare_all(names: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """Compare so many pairs, of one version after the other, bit by bit; what differs is named at
    once.
    """
    small, total, first = options.simulate, options.trials, options.seed * PAIRS
    tasks: list[Task] = [(names[n % len(names)], first + n) for n in range(total)]
    at_once = min(2, os.cpu_count() or 1) if small else workers(False)
    bar = progress_bar(total, "pair", options.quiet)
    say = partial(print if bar is None else bar.write, file=sys.stderr)
    found: dict[str, Any] = {"pairs": 0, "elements": 0, "differ": Counter(), "failed": []}
    told = time.monotonic()
    given = at_once, small, options.limit, options.minutes * 60, pairs.__name__
    for done, ((name, number), answer) in enumerate(answers(tasks, *given), 1):
        found["pairs"] += answer["outcome"] != "not tried"
        found["elements"] += answer.get("elements", 0)
        found["differ"].update(answer.get("differ", {}))
        if answer["outcome"] == "failed":
            row = {
                "version": name,
                "pair": str(pairs.draw(number or 0, small)),
                "why": answer["why"],
            }
            found["failed"].append(row)
            say(f"{name}, pair {row['pair']}: {row['why']}")
        if bar is not None:
            bar.update()
        elif time.monotonic() - told > LINE_SECONDS and not options.quiet:
            told = time.monotonic()
            say(f"{done} of {total} pairs")
    if bar is not None:
        bar.close()
    return found


def prove(options: argparse.Namespace) -> int:
    """Compare pairs and write the report; the exit code is 0 if no bit differs."""
    names = chosen(options)
    found = compare_all(names, options)
    document = new_document("cpu" if options.simulate else "cuda")
    document |= {"versions": names, "seed": options.seed, "rows": [found]}
    save(document, options.out)
    bits = sum(found["differ"].values())
    sys.stdout.write(
        f"{', '.join(names)}: {found['pairs']} pairs, {found['elements']} elements, {bits} differ, "
        f"{len(found['failed'])} pairs failed\nThe report is in {options.out}.\n"
    )
    return int(bool(found["failed"]) or not found["pairs"])


def try_all(names: list[str], cases: int, options: argparse.Namespace) -> list[Verdict]:
    """Try so many cases of each version, several at a time, then time each version that passed,
    alone. What failed comes first.
    """
    small, total = options.simulate, cases * len(names)
    verdicts = {name: Verdict(name, [], []) for name in names}
    at_once = workers(small)
    if not options.quiet:
        sys.stderr.write(f"{', '.join(names)}: {cases} calls each, {at_once} at a time\n")
    bar = progress_bar(total, "call", options.quiet)
    say = partial(print if bar is None else bar.write, file=sys.stderr)

    def add(task: Task, found: dict[str, Any]) -> None:
        name, number = task
        case = "timing" if number is None else str(draw(number, small))
        verdicts[name].cases.append({"case": case, "number": number, **found})
        if found["outcome"] == "failed":
            say(f"{name}, case {case}: {found['why']}")

    began = told = time.monotonic()
    tasks: list[Task] = [(name, number) for name in names for number in range(cases)]
    # If time does not suffice, no version is left out. And the processes meet different kernels.
    Random(0).shuffle(tasks)
    given = at_once, small, options.limit, options.minutes * 60
    for done, (task, found) in enumerate(answers(tasks, *given), 1):
        add(task, found)
        now = time.monotonic()
        if bar is not None:
            bar.update()
        elif now - told > LINE_SECONDS and not options.quiet:
            told, left = now, (now - began) / done * (total - done)
            say(f"{done} of {total} calls, about {left:.0f} s left")
    if bar is not None:
        bar.close()
    passed: list[Task] = [(name, None) for name in names if verdicts[name].passed and not small]
    for task, found in answers(passed, 1, small, options.limit, math.inf):
        if found["outcome"] == "passed":
            verdicts[task[0]].timing.extend(found["timing"])
        else:
            add(task, found)
    for verdict in verdicts.values():
        verdict.cases.sort(key=lambda row: (row["outcome"] != "failed", row["number"] or 0))
    return sorted(verdicts.values(), key=lambda verdict: verdict.passed)


def workers(small: bool) -> int:
    """How many processes try calls at the same time: most of their time goes into compiling."""
    if small:
        return 1
    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, min(MOST_WORKERS, os.cpu_count() or 1, memory // WORKER_BYTES))


def summary(verdicts: list[Verdict], minutes: float) -> str:
    """What failed, then a line for each version, with those that failed on top."""
    lines = [
        f"{verdict.version}, case {row['case']}: {row['why']}"
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
    if options.invariance:
        return prove(options)
    cases = SIMULATED if options.simulate else QUICK if options.quick else CASES
    names = chosen(options)
    verified.sources()  # what the trials are of
    try:
        verdicts = try_all(names, cases, options)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped; there is no report\n")
        return 130
    document = new_document("cpu" if options.simulate else "cuda")
    document["rows"] = [verdict._asdict() for verdict in verdicts]
    save(document, options.out)
    sys.stdout.write(f"{summary(verdicts, options.minutes)}\nThe report is in {options.out}.\n")
    if not options.simulate and not options.quick:
        whole = [verdict for verdict in verdicts if not verdict.outcomes["not tried"]]
        remember([verdict.version for verdict in whole if verdict.passed])
    return int(not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
