"""What the commands of puzzles and of `mine` share."""

import argparse
import sys
from argparse import RawDescriptionHelpFormatter
from collections.abc import Callable, Sequence
from pathlib import Path

from flash_versions.files import write

Parser = argparse.ArgumentParser


def make_parser(
    program: str,
    about: str | None,
    runs: Sequence[Callable[[argparse.Namespace], int]],
    required: bool,
) -> tuple[Parser, dict[str, Parser]]:
    """A parser, and those of its commands by name: of a function run_NAME, which says what it does.
    A command is given if that is required.
    """
    parser = Parser(prog=program, description=about, formatter_class=RawDescriptionHelpFormatter)
    found, parsers = {}, parser.add_subparsers(metavar="COMMAND", required=required)
    for run in runs:
        name = run.__name__.removeprefix("run_")
        found[name] = parsers.add_parser(name, description=run.__doc__)
        found[name].set_defaults(run=run)
    return parser, found


def say(text: str) -> None:
    """Print."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def write_new(file: Path, text: str, instead: str) -> None:
    """Write a file that is not there yet; `instead` says what to do if it is."""
    if file.exists():
        raise FileExistsError(f"{file} is there already; {instead}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    write(file, text)


def run(options: argparse.Namespace) -> int:
    """Run a command; returns the exit code: its own, or 2 for what cannot be done."""
    try:
        return options.run(options)
    except (OSError, ValueError, RuntimeError) as error:
        said = str(error)
        if isinstance(error, OSError) and error.strerror:
            said = f"{error.filename}: {error.strerror}"
        sys.stderr.write(f"error: {said}\n")
    return 2
