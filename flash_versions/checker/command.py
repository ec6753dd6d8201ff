"""What the commands of puzzles and of `mine` share."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from flash_versions.bench.files import write

Run = Callable[[argparse.Namespace], int]


def make_parser(
    program: str, about: str, commands: dict[str, tuple[Run, str]], needs_one: bool
) -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """A parser, and those of its commands by name; each is a function and what it does. With
    `needs_one`, one has to be given.
    """
    parser = argparse.ArgumentParser(
        prog=program, description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found, parsers = {}, parser.add_subparsers(metavar="COMMAND", required=needs_one)
    for name, (run, said) in commands.items():
        found[name] = parsers.add_parser(name, help=said, description=said)
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
