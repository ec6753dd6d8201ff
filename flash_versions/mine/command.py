"""`python -m flash_versions.mine`: an attention of your own, from an empty folder to a ranking.

new [FOLDER]      writes FOLDER/mine.py, attention in one kernel, to be changed
check [FILE]      is it right? The equivalence suite's cases, and why a result is wrong
inspect [FILE]    instructions per score, registers and spills next to FA1 to FA4; needs no GPU
bench [FILE]      times it next to FA1 to FA4, on a GPU
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from flash_versions.bench.files import write
from flash_versions.dispatch.extras import triton_missing
from flash_versions.mine import start, times
from flash_versions.mine.check import Outcome, check, last_word
from flash_versions.mine.summary import common_property
from flash_versions.versions.from_file import load_version

FILE = Path("mine.py")
EXPLAINED = 3  # wrong cases that are told in full
RANKED = ("sm_80", "sm_90", "sm_100")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.mine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str, **options):
        one = commands.add_parser(name, help=about, description=about)
        one.set_defaults(run=run)
        if name != "new":
            one.add_argument("file", nargs="?", type=Path, default=FILE, help="(mine.py)")
        return one

    new = add("new", run_new, "write mine.py, attention in one kernel")
    new.add_argument("folder", nargs="?", type=Path, default=Path(), help="where (here)")
    add("check", run_check, "is it right? Simulated, and on a GPU if there is one")
    one = add("inspect", run_inspect, "rank it by what the compiler makes of it; needs no GPU")
    one.add_argument("--arch", nargs="+", default=RANKED, help="(80, 90 and 100)")
    one.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256))
    add("bench", run_bench, "time it next to FA1 to FA4, on a GPU")
    return parser.parse_args(arguments)


def run_new(options: argparse.Namespace) -> int:
    """Write the file; one that is there stays."""
    file = options.folder / FILE
    if file.exists():
        raise FileExistsError(f"{file} is there already; give another folder, or move it away.")
    options.folder.mkdir(parents=True, exist_ok=True)
    write(file, Path(start.__file__).read_text())
    sys.stdout.write(
        f"wrote {file}. Next:\n  python -m flash_versions.mine check {file}\n"
        f"  python -m flash_versions.mine inspect {file}\n"
        f'  python -m transformer.generate --attention {file} -p "sort 5 2 9 1"\n'
    )
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Try all cases; 1 if a result is wrong."""
    outcomes: list[Outcome] = []
    version = load_version(options.file)
    for outcome in check(version):
        outcomes.append(outcome)
        if outcome.refused:
            continue
        name = f"{outcome.case.name} ({str(outcome.dtype).removeprefix('torch.')})"
        sys.stdout.write(f"{'WRONG' if outcome.faults else 'right'}  {name}\n")
        if sum(bool(x.faults) for x in outcomes) <= EXPLAINED:
            for fault in outcome.faults:
                sys.stdout.write(f"       {fault}\n")
        sys.stdout.flush()
    tried = [x for x in outcomes if not x.refused]
    wrong = [x for x in tried if x.faults]
    others = len(outcomes) - len(tried)
    sys.stdout.write(
        f"{len(tried) - len(wrong)} of {len(tried)} cases are right; "
        f"{others} need what is not in FEATURES.\n"
    )
    if shared := common_property(wrong, [x for x in tried if not x.faults]):
        sys.stdout.write(f"{shared}\n")
    if not wrong and (said := last_word(version)):
        sys.stdout.write(f"{said}\n")
        return 1
    return int(bool(wrong) or not tried)


def run_inspect(options: argparse.Namespace) -> int:
    """Print a ranking for each architecture."""
    if missing := triton_missing():
        raise ValueError(missing)
    from flash_versions.mine import rank  # which needs Triton's compiler

    load_version(options.file)  # what is wrong with the file is told here
    for line in rank.lines(options.file, list(options.arch), options.head_dim):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 0


def run_bench(options: argparse.Namespace) -> int:
    """Print times next to the versions'."""
    version = load_version(options.file)
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU was found, and bench measures times; inspect ranks kernels without one."
        )
    for line in times.lines(version):
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 for a wrong result, 2 for what cannot be done."""
    options = parse(arguments)
    try:
        return options.run(options)
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
        sys.stderr.write(f"error: {said}\n")
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
    return 2
