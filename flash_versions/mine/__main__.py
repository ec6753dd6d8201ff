"""`python -m flash_versions.mine`: an attention of your own, from an empty folder to a ranking.

new [FOLDER]      writes FOLDER/mine.py, the lesson fa2, to be changed
check [FILE]      is it right? The equivalence suite's cases, and why a result is wrong
inspect [FILE]    instructions per score, registers and spills next to FA1 to FA4; needs no GPU
bench [FILE]      times it next to FA1 to FA4, on a GPU
"""

import argparse
import sys
from pathlib import Path

import torch

from flash_versions.bench.measure import ROUNDS, measure
from flash_versions.bench.suites import SUITES
from flash_versions.checker import command
from flash_versions.checker.command import say, write_new
from flash_versions.dispatch.extras import triton_missing
from flash_versions.dispatch.version import VERSIONS, Version
from flash_versions.lessons import LESSONS
from flash_versions.mine.check import START, Outcome, check, common_property, last_word
from flash_versions.versions.from_file import load_version

FILE = Path("mine.py")
EXPLAINED = 3  # wrong cases that are told in full
RANKED = ("sm_80", "sm_90", "sm_120")
RANKS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_120")  # rank.py says why not sm_100


def run_new(options: argparse.Namespace) -> int:
    """Write the file; one that is there stays."""
    file = options.folder / FILE
    write_new(file, START, "give another folder, or move it away")
    say(
        f"wrote {file}. Next:\n  python -m flash_versions.mine check {file}\n"
        f"  python -m flash_versions.mine inspect {file}\n"
        f'  python -m transformer.generate --attention {file} -p "sort 5 2 9 1"'
    )
    return 0


def named(file: Path) -> Version:
    """The version in a file, or a lesson by its name, such as "lesson-fa2"."""
    return LESSONS.get(str(file)) or load_version(file)


def run_check(options: argparse.Namespace) -> int:
    """Try all cases; 1 if a result is wrong."""
    right: list[Outcome] = []
    wrong: list[Outcome] = []
    version, refused = named(options.file), 0
    for outcome in check(version):
        if outcome.faults is None:
            refused += 1
            continue
        (wrong if outcome.faults else right).append(outcome)
        dtype = str(outcome.dtype).removeprefix("torch.")
        say(f"{'WRONG' if outcome.faults else 'right'}  {outcome.case.name} ({dtype})")
        for fault in outcome.faults if len(wrong) <= EXPLAINED else ():
            say(f"       {fault}")
    tried = len(right) + len(wrong)
    say(f"{len(right)} of {tried} cases are right; {refused} were not taken.")
    if said := common_property(wrong, right) if wrong else last_word(version):
        say(said)
    return int(bool(wrong or said) or not tried)


def run_inspect(options: argparse.Namespace) -> int:
    """Print a ranking for each architecture."""
    if missing := triton_missing():
        raise ValueError(missing)
    from flash_versions.mine import rank  # which needs Triton's compiler

    load_version(options.file)  # what is wrong with the file is told here
    for line in rank.lines(options.file, list(options.arch), options.head_dim):
        say(line)
    return 0


def run_bench(options: argparse.Namespace) -> int:
    """Time the version next to the package's, and print a table for each shape of the quick suite,
    the fastest first.

    The version is added to those of this process, so it takes its turn with them, on the same
    inputs; it is timed only if its output is within its error budget.
    """
    version = named(options.file)
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU was found, and bench measures times; inspect ranks kernels without one."
        )
    VERSIONS[version.name] = version
    for shape in SUITES["quick"]:
        say(f"{shape}, {shape.dtype}")
        rows = measure("quick", shape, ROUNDS)
        times = {row["version"]: row["ms_p50"] for row in rows if "ms_p50" in row}
        for row in rows:
            if "reason" in row:
                say(f"  {row['version']:<12} not timed: {row['reason']}")
        for name, ms in sorted(times.items(), key=lambda pair: pair[1]):
            line = f"  {name:<12} {ms:8.3f} ms  {shape.flops() / ms / 1e9:6.1f} TFLOP/s"
            own = times.get(version.name)
            say(line if own is None else f"{line}  {own / ms:5.2f} x as fast as {version.name}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 for a wrong result, 2 for what cannot be done."""
    runs = (run_new, run_check, run_inspect, run_bench)
    parser, commands = command.make_parser("python -m flash_versions.mine", __doc__, runs, True)
    commands["new"].add_argument("folder", nargs="?", type=Path, default=Path(), help="(here)")
    for name in ("check", "inspect", "bench"):
        commands[name].add_argument("file", nargs="?", type=Path, default=FILE, help="(mine.py)")
    add = commands["inspect"].add_argument
    add("--arch", nargs="+", default=RANKED, choices=RANKS, help="(sm_80, sm_90 and sm_120)")
    add("--head-dim", type=int, default=128, choices=(64, 128, 256))
    return command.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
