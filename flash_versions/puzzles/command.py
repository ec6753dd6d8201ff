"""`python -m flash_versions.puzzles`: kernels to write, up to a small FlashAttention 3.

status            what is solved, and what to do next (so does no command at all)
start [NAME]      writes puzzles/NAME.py: the task, and a kernel with lines to fill in
check [NAME]      is it right? In seconds, without a GPU
hint [NAME]       one more hint
solution [NAME]   a solution

NAME is a puzzle's name or number; without it, the first one that is not solved.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flash_versions
from flash_versions.bench.files import write
from flash_versions.puzzles import progress
from flash_versions.puzzles.puzzle import PUZZLES, Puzzle, find_puzzle

PROGRAM = "python -m flash_versions.puzzles"
SECONDS = 60  # of a check; a right file takes two
RIGHT, WRONG, UNTOUCHED = 0, 1, 3  # exit codes of check.py


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.set_defaults(run=run_status, name=None, folder=Path("puzzles"))
    commands = parser.add_subparsers(metavar="COMMAND")

    def add(name: str, run: Callable[[argparse.Namespace], int], about: str) -> None:
        one = commands.add_parser(name, help=about, description=about)
        one.set_defaults(run=run)
        if name != "status":
            one.add_argument("name", nargs="?", help="a puzzle (the first that is not solved)")
        if name in ("start", "check"):
            one.add_argument(
                "--folder", type=Path, default=Path("puzzles"), help="of your files (puzzles)"
            )

    add("status", run_status, "what is solved, and what to do next")
    add("start", run_start, "write the file to fill in")
    add("check", run_check, "is it right?")
    add("hint", run_hint, "show one more hint")
    add("solution", run_solution, "show a solution")
    return parser.parse_args(arguments)


def chosen(options: argparse.Namespace) -> Puzzle:
    """The puzzle that is named, or the first that is not solved; ValueError."""
    if options.name is not None:
        return find_puzzle(options.name)
    solved = progress.load().solved
    for puzzle in PUZZLES.values():
        if puzzle.name not in solved:
            return puzzle
    raise ValueError(f"all {len(PUZZLES)} are solved; name one: {', '.join(PUZZLES)}.")


def say(text: str) -> None:
    """Print."""
    sys.stdout.write(f"{text}\n")


def run_status(options: argparse.Namespace) -> int:
    """List the puzzles with what is solved."""
    found = progress.load()
    group = ""
    for puzzle in PUZZLES.values():
        if puzzle.group != group:
            group = puzzle.group
            say(f"{group}")
        mark = "x" if puzzle.name in found.solved else " "
        say(f"  [{mark}] {puzzle.number:2} {puzzle.name:16} {puzzle.title}")
    solved = [x for x in PUZZLES if x in found.solved]
    say(f"{len(solved)} of {len(PUZZLES)} are solved.")
    if len(solved) < len(PUZZLES):
        name = next(x for x in PUZZLES if x not in found.solved)
        start = (options.folder / f"{name}.py").exists()
        say(f"Next: {PROGRAM} {'check' if start else 'start'} {name}")
    return 0


def run_start(options: argparse.Namespace) -> int:
    """Write the file of a puzzle; one that is there stays."""
    puzzle = chosen(options)
    file = options.folder / f"{puzzle.name}.py"
    if file.exists():
        raise FileExistsError(
            f"{file} is there already; check it with {PROGRAM} check {puzzle.name}, move it away, "
            "or give another --folder."
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    write(file, puzzle.stub)
    say(f"{puzzle.number}. {puzzle.task}\n\nwrote {file}. Fill it in; then:")
    say(f"  {PROGRAM} check {puzzle.name}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Check a learner's file in a process of its own, and keep that it is right."""
    puzzle = chosen(options)
    file = options.folder / f"{puzzle.name}.py"
    if not file.exists():
        raise FileNotFoundError(f"there is no {file}; write it with {PROGRAM} start {puzzle.name}.")
    if check_and_keep(puzzle, file):
        return 0
    if progress.load().hints.get(puzzle.name, 0) < len(puzzle.hints):
        say(f"A hint: {PROGRAM} hint {puzzle.name}")
    return 1


def check_and_keep(puzzle: Puzzle, file: Path) -> bool:
    """Say what the check of a file says; whether it is right, which is kept."""
    code, said = check_elsewhere(puzzle, file)
    say(said)
    if code != RIGHT:
        return False
    found = progress.load()
    if puzzle.name not in found.solved:
        found = found._replace(solved=[*found.solved, puzzle.name])
        progress.save(found)
    say(f"{len(set(PUZZLES) & set(found.solved))} of {len(PUZZLES)} are solved.")
    return True


def check_elsewhere(puzzle: Puzzle, file: Path) -> tuple[int, str]:
    """Run check.py in a process of its own; its exit code and what it says. An endless loop is
    stopped.
    """
    if file.read_text().strip() == puzzle.stub.strip():
        return UNTOUCHED, f"{puzzle.name}: not written yet."
    # A copy of this process has imported everything already; of one thread a copy is safe.
    copies = sys.platform == "linux" and threading.active_count() == 1
    try:
        code, said = (in_copy if copies else in_new_process)(puzzle.name, str(file))
    except TimeoutError:
        said = f"{puzzle.name}: not yet. It takes more than {SECONDS} s: does every loop end?"
        return WRONG, said
    if code not in (RIGHT, WRONG, UNTOUCHED):
        return WRONG, f"{puzzle.name}: the check itself failed.\n{said}"
    return code, said


def in_copy(*arguments: str) -> tuple[int | None, str]:
    """What check.py gives in a copy of this process."""
    from flash_versions.puzzles import check

    context: Any = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    sys.stdout.flush()
    process = context.Process(target=check.send, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        if not ours.poll(SECONDS):
            raise TimeoutError
        return ours.recv()
    except EOFError:
        process.join()
        return None, f"it ended with {process.exitcode}."
    finally:
        process.kill()
        process.join()


def in_new_process(*arguments: str) -> tuple[int | None, str]:
    """What check.py gives in a new process, which looks for no module in the current folder: a
    puzzle's copy.py there would hide Python's.
    """
    command = [sys.executable, "-P", "-m", "flash_versions.puzzles.check", *arguments]
    found = os.pathsep.join((str(Path(flash_versions.__file__).parents[1]), *sys.path[1:]))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": found}
    try:
        done = subprocess.run(
            command, env=environment, timeout=SECONDS, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError from None
    if not done.stdout:
        return None, done.stderr.strip()
    return done.returncode, done.stdout.strip()


def run_hint(options: argparse.Namespace) -> int:
    """Show the hints so far and one more."""
    puzzle = chosen(options)
    found = progress.load()
    shown = min(found.hints.get(puzzle.name, 0) + 1, len(puzzle.hints))
    progress.save(found._replace(hints=found.hints | {puzzle.name: shown}))
    for number, hint in enumerate(puzzle.hints[:shown], 1):
        say(f"{number} of {len(puzzle.hints)}: {hint}")
    if shown == len(puzzle.hints):
        say(f"There are no more. A solution: {PROGRAM} solution {puzzle.name}")
    return 0


def run_solution(options: argparse.Namespace) -> int:
    """Print a solution."""
    say(chosen(options).solution.strip())
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code: 1 for a wrong solution, 2 for what cannot be done."""
    options = parse(arguments)
    try:
        return options.run(options)
    except OSError as error:
        said = f"{error.filename}: {error.strerror}" if error.strerror else str(error)
        sys.stderr.write(f"error: {said}\n")
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
    return 2
