"""`python -m flash_versions.verify`: are the kernels right on this GPU, and how fast are they?

Every version computes random calls, forward and backward. A result has to be within its error
budget (versions/oracle/budget.py) and the same in two runs. The report can be sent to the authors.
"""

import argparse
import sys
from pathlib import Path

import torch

from flash_versions.bench.document import new_document, save
from flash_versions.dispatch import verified
from flash_versions.dispatch.extras import progress_bar
from flash_versions.dispatch.version import EXPLICIT, VERSIONS
from flash_versions.verify.supervise import Verdict, try_version

CASES, QUICK, SIMULATED = 200, 40, 3
LIMIT = 180.0  # seconds without a word; a kernel's first compilation takes some


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
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for one call (180)")
    parser.add_argument("--quiet", action="store_true", help="say nothing but what fails")
    parser.add_argument(
        "--out", type=Path, default=Path("verified.json"), help="the report (verified.json)"
    )
    return parser.parse_args(arguments)


def refusal(options: argparse.Namespace) -> str | None:
    """Why nothing can be verified, as a sentence, or None."""
    known = VERSIONS | EXPLICIT
    if unknown := [name for name in options.versions or () if name not in known]:
        return f"version {unknown[0]!r} is unknown; there are {', '.join(known)}."
    if options.limit <= 0:
        return f"--limit {options.limit:g} is not possible; it is a number of seconds."
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
    own = EXPLICIT if not options.simulate and torch.cuda.get_device_capability() == (10, 0) else {}
    return [*VERSIONS, *own]


def summary(verdicts: list[Verdict]) -> str:
    """A line for each version."""
    lines = []
    for verdict in verdicts:
        counts = verdict.outcomes
        speeds = [
            f"{row['sdpa_ms'] / row['ms']:.2f} x SDPA at head_dim {row['shape'][3]}"
            for row in verdict.timing
        ]
        lines.append(
            f"{verdict.version:<14} {'passed' if verdict.passed else 'FAILED':<7} "
            f"{counts['passed']} right, {counts['failed']} wrong, {counts['refused']} not taken"
            + "".join(f"; {speed}" for speed in speeds)
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
    """Verify; returns the exit code: 0 if all passed, 1 if not, 2 if nothing could be tried."""
    options = parse(arguments)
    if why := refusal(options):
        sys.stderr.write(f"error: {why}\n")
        return 2
    small = options.simulate
    cases = SIMULATED if small else QUICK if options.quick else CASES
    verdicts, names = [], chosen(options)
    verified.sources()  # what the trials are of
    bar = progress_bar(cases * len(names), "call", options.quiet)

    def tell(line: str) -> None:
        if bar is None:
            sys.stderr.write(f"{line}\n")
        else:
            bar.write(line, file=sys.stderr)

    for name in names:
        if not options.quiet:
            tell(f"{name}: {cases} calls")
        step = (lambda: None) if bar is None else bar.update
        given = name, cases, small, not small, options.limit, tell
        verdicts.append(try_version(*given, step=step))
    if bar is not None:
        bar.close()
    document = new_document("cpu" if small else "cuda")
    document["rows"] = [verdict._asdict() for verdict in verdicts]
    save(document, options.out)
    sys.stdout.write(f"{summary(verdicts)}\nThe report is in {options.out}.\n")
    if not small and not options.quick:
        remember([verdict.version for verdict in verdicts if verdict.passed])
    return int(not all(verdict.passed for verdict in verdicts))


if __name__ == "__main__":
    sys.exit(main())
