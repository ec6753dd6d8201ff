"""`python -m flash_versions.puzzles`: kernels to write, up to a small FlashAttention 3.

status            what is solved, and what to do next (so does no command at all)
start [NAME]      writes puzzles/NAME.py: the task, and a kernel with lines to fill in
check [NAME]      is it right? In seconds, without a GPU
hint [NAME]       one more hint
solution [NAME]   a solution

NAME is a puzzle's name or number; without it, the first one that is not solved.
"""

import argparse
import ctypes
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from flash_versions.checker import command
from flash_versions.checker.command import say, write_new
from flash_versions.checker.observe import sentence_of
from flash_versions.puzzles import progress
from flash_versions.puzzles.check import check
from flash_versions.puzzles.puzzle import PUZZLES, Puzzle, find_puzzle

PROGRAM = "python -m flash_versions.puzzles"
FOLDER = Path("puzzles")  # of the learner's files
SECONDS = 60.0  # of a check; that of a right file takes one


def chosen(options: argparse.Namespace) -> Puzzle:
    """The puzzle that is named, or the first that is not solved; ValueError."""
    if options.name is not None:
        return find_puzzle(options.name)
    if left := unsolved():
        return left[0]
    raise ValueError(f"all {len(PUZZLES)} are solved; name one: {', '.join(PUZZLES)}.")


def unsolved() -> list[Puzzle]:
    """The puzzles that are still to be solved."""
    solved = progress.load().solved
    return [puzzle for puzzle in PUZZLES.values() if puzzle.name not in solved]


def run_status(options: argparse.Namespace) -> int:
    """List the puzzles with what is solved."""
    left, group = unsolved(), ""
    for puzzle in PUZZLES.values():
        if puzzle.group != group:
            group = puzzle.group
            say(group)
        mark = " " if puzzle in left else "x"
        say(f"  [{mark}] {puzzle.number:2} {puzzle.name:16} {puzzle.title}")
    say(f"{len(PUZZLES) - len(left)} of {len(PUZZLES)} are solved.")
    for puzzle in left[:1]:
        begun = (options.folder / f"{puzzle.name}.py").exists()
        say(f"Next: {PROGRAM} {'check' if begun else 'start'} {puzzle.name}")
    return 0


def run_start(options: argparse.Namespace) -> int:
    """Write the file of a puzzle; one that is there stays."""
    puzzle = chosen(options)
    file = options.folder / f"{puzzle.name}.py"
    again = f"check it with {PROGRAM} check {puzzle.name}, move it away, or give another --folder"
    write_new(file, puzzle.stub, again)
    say(f"{puzzle.number}. {puzzle.task}\n\nwrote {file}. Fill it in; then:")
    say(f"  {PROGRAM} check {puzzle.name}")
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Check a learner's file, and keep that it is right."""
    puzzle = chosen(options)
    file = options.folder / f"{puzzle.name}.py"
    if not file.exists():
        raise FileNotFoundError(f"there is no {file}; write it with {PROGRAM} start {puzzle.name}.")
    torch.set_num_threads(1)  # tensors are small, so more would only wait
    if check_and_keep(puzzle, file):
        return 0
    if progress.load().hints.get(puzzle.name, 0) < len(puzzle.hints):
        say(f"A hint: {PROGRAM} hint {puzzle.name}")
    return 1


def check_and_keep(puzzle: Puzzle, file: Path) -> bool:
    """Say what the check of a file says; whether it is right, which is kept."""
    try:
        with time_limit():
            fault = check(puzzle, file)
    except NotImplementedError:
        say(f"{puzzle.name}: not written yet.")
        return False
    except Endless as error:
        where = sentence_of(error, str(file)).partition(":")[0]
        fault = f"It takes more than {SECONDS:g} s, at {where}: does every loop end?"
    say(f"{puzzle.name}: {f'not yet. {fault}' if fault else 'right.'}")
    if fault:
        return False
    found = progress.load()
    if puzzle.name not in found.solved:
        progress.save(found._replace(solved=[*found.solved, puzzle.name]))
    say(f"{len(PUZZLES) - len(unsolved())} of {len(PUZZLES)} are solved.")
    return True


class Endless(BaseException):
    """A check takes too long."""


@contextmanager
def time_limit() -> Iterator[None]:
    """Inside, Endless is raised in this thread after SECONDS, wherever in Python's code it is."""
    thread, raised = ctypes.c_ulong(threading.get_ident()), ctypes.py_object(Endless)
    stop = ctypes.pythonapi.PyThreadState_SetAsyncExc
    timer = threading.Timer(SECONDS, stop, (thread, raised))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def run_hint(options: argparse.Namespace) -> int:
    """Show the hints so far and one more."""
    puzzle, found = chosen(options), progress.load()
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
    runs = (run_status, run_start, run_check, run_hint, run_solution)
    parser, commands = command.make_parser(PROGRAM, __doc__, runs, False)
    parser.set_defaults(run=run_status, name=None, folder=FOLDER)
    for name in ("start", "check", "hint", "solution"):
        commands[name].add_argument("name", nargs="?", help="(the first that is not solved)")
    for name in ("start", "check"):
        commands[name].add_argument("--folder", type=Path, default=FOLDER, help="(puzzles)")
    return command.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
