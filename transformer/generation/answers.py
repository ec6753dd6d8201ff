"""A file of prompts, and its answers on their way to a file: each is safe at once, in place only
when all are there. Standard output, a pipe or a device gets each answer at once.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, TextIO

from flash_versions.files import regular_file
from transformer.generation.chat import Message
from transformer.generation.command import INTERRUPTED
from transformer.generation.messages import check_messages, tools_of
from transformer.generation.row import Completion
from transformer.generation.sampling import row_generators
from transformer.generation.session import Session
from transformer.generation.stats import Statistics
from transformer.model.files import only_writer_of, parse_jsonl, read_text, write_text, writing

STANDARD_INPUT = Path("-")
BATCHES = 256  # whose answers are in memory at a time
ADDED = ("text", "finish_reason", "prompt_tokens", "generated_tokens")  # fields of an answer


def partial_of(path: Path) -> Path:
    """Where the answers are kept until all of them are there."""
    return path.with_name(f".{path.name}.partial")


class Answers:
    """Answers in the order of their prompts, to a stream or into a file.

    A file takes its place when all are there. A run that is killed leaves what it has beside that
    place, and the same run goes on from there.

    Args:
        output: the path of the finished file, or a stream.
        lines: the objects of the prompts, which are given back with the answers added.
        run: whatever the answers depend on; another run's answers are not mixed with these.

    Attributes:
        given: how many were written, by an earlier attempt at the same run, too.

    Raises:
        ValueError: an unfinished file of another run is in the way.
    """

    def __init__(self, output: Path | TextIO, lines: Sequence[dict[str, Any]], run: object) -> None:
        self.output, self.lines, self.given = output, lines, 0
        self._waiting: dict[int, Completion] = {}
        if not isinstance(output, Path):
            return
        self.partial = partial_of(output)
        header = sha256(repr(run).encode()).hexdigest() + "\n"
        kept = (self.partial.exists() and self.partial.read_bytes()) or header.encode()
        # A line that a kill cut off, perhaps within a character, has no end and is answered again.
        whole = kept[: kept.rfind(b"\n") + 1].decode("utf-8", "replace")
        if not whole.startswith(header):
            raise ValueError(
                f"{self.partial} holds the answers of an unfinished run with other prompts or"
                " options; repeat its command, delete it, or use another --output"
            )
        self.given = whole.count("\n") - 1  # the first line names the run
        with writing(output):
            self.partial.write_text(whole, encoding="utf-8")

    def add(self, index: int, completion: Completion) -> None:
        """Take the answer to a prompt; it is written once those before it are."""
        self._waiting[index] = completion
        while self.given in self._waiting:
            answer = describe(self._waiting.pop(self.given))
            line = json.dumps({**self.lines[self.given], **answer}, ensure_ascii=False) + "\n"
            if isinstance(self.output, Path):
                with writing(self.output), open(self.partial, "a", encoding="utf-8") as file:
                    file.write(line)
            else:
                self.output.write(line)
                self.output.flush()
            self.given += 1

    def finish(self) -> None:
        """Put the complete file in its place."""
        if isinstance(self.output, Path):
            _, _, lines = self.partial.read_text(encoding="utf-8").partition("\n")
            write_text(self.output, lines)
            self.partial.unlink()


def answer_file(session: Session, arguments: argparse.Namespace) -> int:
    """Answer a file of prompts in batches; each line is given back with its answer added."""
    output = arguments.output
    if output is None:
        return _answer_file(session, arguments, sys.stdout)
    if output.is_dir():
        raise IsADirectoryError(f"--output {output} is a folder")
    file = regular_file(output)
    if file is None:
        with writing(output), open(output, "w", encoding="utf-8") as stream:
            return _answer_file(session, arguments, stream)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"the folder of --output {output} does not exist")
    with only_writer_of(partial_of(file)):
        if file.exists() and file.stat().st_size and not arguments.force:
            raise ValueError(
                f"--output {output} is not empty; --force replaces what it holds, another --output"
                " keeps it"
            )
        return _answer_file(session, arguments, file)


def _answer_file(session: Session, arguments: argparse.Namespace, output: Path | TextIO) -> int:
    lines, prompts = [], []
    for name, line in read_lines(arguments.input):
        try:
            messages = line_messages(line, session, arguments)
            text, tokens = session.encode(messages, tools=tools_of(line))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if arguments.show_prompt:
            sys.stderr.write(f"{text}\n{tokens}\n")
        lines.append(line)
        prompts.append(tokens)
    if not lines:
        raise ValueError(f"{input_name(arguments.input)} has no prompts")

    run = (session.settings(), arguments.seed, lines, prompts)
    answers = Answers(output, lines, run)
    if first := answers.given:
        sys.stderr.write(f"continuing after {first} of {len(lines)} answers\n")
    size, measured = BATCHES * arguments.batch_size, list[Statistics]()
    interrupted: dict[int, Completion] = {}
    for start in range(first, len(prompts), size):
        some = prompts[start : start + size]
        found, statistics = session.answer(
            some,
            row_generators(arguments.seed, len(some), first=start),
            on_end=lambda index, completion, start=start: answers.add(start + index, completion),
            at_once=arguments.batch_size,
        )
        measured.append(statistics)
        interrupted = {i: c for i, c in enumerate(found, start) if c.finish_reason == "interrupted"}
        if interrupted:
            break
    if not interrupted:
        answers.finish()
    elif isinstance(output, Path):
        kept = f"{answers.given} of {len(lines)} answers are kept in {answers.partial}"
        sys.stderr.write(f"note: interrupted; {kept}; the same command continues\n")
    else:  # with the beginnings of answers
        for index, completion in interrupted.items():
            if completion.tokens:
                answers.add(index, completion)
    if measured:
        sys.stderr.write(session.report(sum(measured[1:], measured[0])))
    return INTERRUPTED if interrupted else 0


def conversation(prompt: str | None, system_prompt: str | None) -> list[Message]:
    """The messages of a system prompt and a question, where there are such."""
    roles = {"system": system_prompt, "user": prompt}
    return [{"role": role, "content": text} for role, text in roles.items() if text is not None]


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The prompts of a JSONL file, each with the name of its line for messages."""
    content = checked_input(sys.stdin.read()) if path == STANDARD_INPUT else read_text(path)
    for name, line in parse_jsonl(content, input_name(path)):
        if not {"prompt", "messages"} & line.keys():
            raise ValueError(f'{name} must be an object with "prompt" or "messages"')
        if {"prompt", "messages"} <= line.keys():
            raise ValueError(f'{name} has both "prompt" and "messages"; leave one of them out')
        if taken := [key for key in ADDED if key in line]:
            raise ValueError(
                f'{name} has a field "{taken[0]}", which is the name of a field of the answer;'
                " rename it"
            )
        try:  # what cannot be written with the answer is better refused before it is computed
            json.dumps(line, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: the text is not valid UTF-8: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{name} is nested too deeply") from error
        yield name, line


def input_name(path: Path) -> str:
    """How messages call the file of --input."""
    return "standard input" if path == STANDARD_INPUT else str(path)


def checked_input(text: str) -> str:
    """The text without a byte order mark; ValueError if it has lone surrogates, which stand for
    bytes that are no UTF-8.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("standard input is not UTF-8 text")
    return text.removeprefix("\ufeff")


def line_messages(
    line: Mapping[str, Any], session: Session, arguments: argparse.Namespace
) -> list[Message]:
    """The conversation of a line of a JSONL file."""
    if "prompt" in line:
        if not isinstance(line["prompt"], str):
            raise ValueError('"prompt" must be a string')
        return conversation(line["prompt"], arguments.system_prompt)
    messages = line["messages"]
    check_messages(messages)
    if session.template is None:
        raise ValueError('"messages" need a chat template, and none is used')
    own = messages and messages[0]["role"] == "system"  # its own comes before that of the command
    return [*conversation(None, None if own else arguments.system_prompt), *messages]


def describe(completion: Completion) -> dict[str, Any]:
    """A completion as it is written to JSON."""
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": len(completion.tokens),
    }
