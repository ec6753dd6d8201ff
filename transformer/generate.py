"""`python -m transformer.generate`: ask a model a question, a file of questions, or chat with it.

Without an argument the model that ships with the package answers a default question. The answer
goes to standard output while it is being written; measurements and notes go to standard error.
Exit codes: 0, 1 if whoever read the output closed it, 2 after a one-sentence error, 130 after
Ctrl-C.
"""

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from transformer.answers import AnswerFile
from transformer.chat import Message
from transformer.command import (
    ATTENTIONS,
    INTERRUPTED,
    Parser,
    describe_error,
    out_of_memory,
)
from transformer.engine import Completion, Statistics
from transformer.files import parse_json, read_text
from transformer.sampling import Sampling, row_generators
from transformer.session import DTYPES, Session

DESCRIPTION = "Ask a model a question, a file of questions, or chat with it."
DEFAULT_QUESTION = "What is 357+486?"
DIM, NOT_DIM = "\x1b[2m", "\x1b[22m"  # a terminal's codes
EXCLUSIVE = (
    ("chat", "prompt"),
    ("chat", "input"),
    ("chat", "json"),
    ("chat", "ignore_chat_template"),
    ("prompt", "input"),
    ("input", "json"),
    ("input", "no_stream"),
    ("system_prompt", "ignore_chat_template"),
)
CHAT_HELP = """\
/help   show this list
/clear  forget the conversation
/stats  show the measurements of the last answer
/exit   leave, as Ctrl-D does; Ctrl-C stops an answer and keeps the conversation
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        arguments = parse(argv)
        check_streams(arguments)
        session = load_session(arguments)
        sys.stderr.writelines(f"note: {note}\n" for note in session.notes)
        if arguments.chat:
            return chat(session, arguments)
        if arguments.input:
            return answer_file(session, arguments)
        return answer_question(session, arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`); without this, Python's exit would complain once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {describe_error(error)}\n")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        sys.stderr.write(
            "error: the memory is full; a smaller --max-tokens or --batch-size, or --dtype"
            " bfloat16, needs less\n"
        )
    return 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ValueError for options that are wrong or contradict each other."""
    parser = Parser(prog="python -m transformer.generate", description=DESCRIPTION)
    add = parser.add_argument
    add("--model", default="chat", help="checkpoint folder, or the name of a shipped one (chat)")
    add("-p", "--prompt", help=f"the question; - reads standard input ({DEFAULT_QUESTION})")
    add("--system-prompt", help="instructions that precede the conversation")
    add("--input", type=Path, metavar="FILE", help='JSONL of {"prompt": ...} or {"messages": ...}')
    add("--output", type=Path, metavar="FILE", help="where --input's answers go (stdout)")
    add("--batch-size", type=int, default=16, help="prompts of --input answered at once (16)")
    add("-m", "--max-tokens", type=int, default=256, help="longest answer (256)")
    add("--temp", type=float, default=0.0, help="temperature; 0 is greedy (0)")
    add("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0 is all (0)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of mass p (1)")
    add("--min-p", type=float, default=0.0, help="drop tokens below p times the likeliest's (0)")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less (1)")
    add("--seed", type=int, default=0, help="of the draws; row i of a file has its own stream (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable")
    add("--attention", choices=ATTENTIONS, default="auto", help="version of attention (auto)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of weights and cache (auto)")
    add("--precision", help="of attention, such as fp8 or fp8:block:hadamard (that of --dtype)")
    add("--chat", action="store_true", help="a conversation; /help lists its commands")
    add("--json", action="store_true", help="print the answer and the measurements as JSON")
    add("--no-stream", action="store_true", help="print the answer when it is complete")
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add("--show-prompt", action="store_true", help="show what the model sees, on standard error")
    arguments = parser.parse_args(argv)
    for pair in EXCLUSIVE:
        if all(getattr(arguments, name) not in (None, False) for name in pair):
            first, second = (f"--{name.replace('_', '-')}" for name in pair)
            raise ValueError(f"{first} and {second} exclude each other")
    if arguments.output and not arguments.input:
        raise ValueError("--output needs --input; redirect standard output otherwise")
    if arguments.output and arguments.output.resolve() == arguments.input.resolve():
        raise ValueError(f"--output {arguments.output} is --input; it would be overwritten")
    for name in ("max_tokens", "batch_size"):
        if getattr(arguments, name) < 1:
            option = name.replace("_", "-")
            raise ValueError(f"--{option} must be at least 1, got {getattr(arguments, name)}")
    if "" in arguments.stop:
        raise ValueError("--stop must not be empty")
    return arguments


def check_streams(arguments: argparse.Namespace) -> None:
    """Refuse closed standard streams, and let bytes that are no UTF-8 reach the check of a text."""
    if sys.stdout is None and not arguments.output:
        raise ValueError("standard output is closed; answers need a place to go")
    if arguments.chat or arguments.prompt == "-":
        if sys.stdin is None:
            raise ValueError("standard input is closed; questions were to come from it")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")


def load_session(arguments: argparse.Namespace) -> Session:
    """Load what the arguments name."""
    sampling = Sampling(
        temperature=arguments.temp,
        top_k=arguments.top_k,
        top_p=arguments.top_p,
        min_p=arguments.min_p,
        repetition_penalty=arguments.repetition_penalty,
    )
    session = Session.load(
        arguments.model,
        sampling=sampling,
        max_tokens=arguments.max_tokens,
        stop_strings=arguments.stop,
        attention=arguments.attention,
        device=arguments.device,
        dtype=arguments.dtype,
        precision=arguments.precision,
        use_template=not arguments.ignore_chat_template,
    )
    if session.template is None and (arguments.chat or arguments.system_prompt is not None):
        raise ValueError(f"{arguments.model} has no chat template, so it takes plain prompts only")
    return session


def answer_question(session: Session, arguments: argparse.Namespace) -> int:
    """Answer one prompt, while it is being written if nothing speaks against it."""
    prompt = DEFAULT_QUESTION if arguments.prompt is None else arguments.prompt
    if prompt == "-":
        prompt = checked_input(sys.stdin.read().rstrip("\n"))
    text, tokens = session.encode(conversation(prompt, arguments.system_prompt))
    if arguments.show_prompt:
        sys.stderr.write(f"{text}\n{tokens}\n")
    if arguments.prompt is None and not arguments.json:
        sys.stderr.write(f"> {prompt}\n")
    streaming = not (arguments.no_stream or arguments.json)
    completion, statistics = answer(
        session, tokens, row_generators(arguments.seed, 1), streaming=streaming
    )
    if arguments.json:
        result = {"prompt": prompt, **describe(completion), **measurements(session, statistics)}
        sys.stdout.write(json.dumps(result, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("\n" if streaming else completion.text + "\n")
        sys.stdout.flush()
        sys.stderr.write(session.remark(completion) + session.report(statistics))
    return INTERRUPTED if completion.finish_reason == "interrupted" else 0


def answer_file(session: Session, arguments: argparse.Namespace) -> int:
    """Answer a file of prompts in batches; each line is given back with its answer added."""
    if arguments.output and not arguments.output.parent.is_dir():
        raise FileNotFoundError(f"the folder of --output {arguments.output} does not exist")
    if arguments.output and arguments.output.is_dir():
        raise IsADirectoryError(f"--output {arguments.output} is a folder")
    lines, prompts = [], []
    for name, line in read_lines(arguments.input):
        try:
            text, tokens = session.encode(line_messages(line, session, arguments), "the prompt")
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if arguments.show_prompt:
            sys.stderr.write(f"{text}\n{tokens}\n")
        lines.append(line)
        prompts.append(tokens)
    if not lines:
        raise ValueError(f"{arguments.input} has no prompts")

    file = None
    if arguments.output:
        run = (session.settings(), arguments.seed, lines, prompts)
        file = AnswerFile(arguments.output, run)
    first = len(file.lines) if file else 0
    if first:
        sys.stderr.write(f"continuing after {first} of {len(lines)} answers\n")

    total: Statistics | None = None
    interrupted = False
    for start in range(first, len(prompts), arguments.batch_size):
        batch = prompts[start : start + arguments.batch_size]
        generators = row_generators(arguments.seed, len(batch), first=start)
        completions, statistics = session.answer(batch, generators)
        total = statistics if total is None else total + statistics
        answered = [
            json.dumps({**line, **describe(completion)}, ensure_ascii=False) + "\n"
            for line, completion in zip(lines[start:], completions)
        ]
        interrupted = any(c.finish_reason == "interrupted" for c in completions)
        if file is None:
            sys.stdout.writelines(answered)
            sys.stdout.flush()
        elif not interrupted:
            file.add(answered)
        if interrupted:
            break
    if file and interrupted:
        kept = f"{len(file.lines)} of {len(lines)} answers are kept in {file.partial}"
        sys.stderr.write(f"note: interrupted; {kept}; the same command continues\n")
    elif file:
        file.finish()
    if total is not None:
        sys.stderr.write(session.report(total))
    return INTERRUPTED if interrupted else 0


def chat(session: Session, arguments: argparse.Namespace) -> int:
    """A conversation on the terminal, or line by line from standard input."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (gives input() a history and line editing)
    sys.stderr.write(CHAT_HELP)
    history = conversation(None, arguments.system_prompt)
    generators = row_generators(arguments.seed, 1)
    report = "nothing has been answered yet\n"
    while True:
        try:
            line = input("> " if interactive else "").strip()
        except EOFError:
            return 0
        except KeyboardInterrupt:
            sys.stderr.write("\n/exit leaves the chat\n")
            continue
        if line == "/exit":
            return 0
        if line == "/clear":
            history = conversation(None, arguments.system_prompt)
        elif line == "/stats":
            sys.stderr.write(report)
        elif line.startswith("/"):
            unknown = "" if line == "/help" else f"there is no command {line}\n"
            sys.stderr.write(unknown + CHAT_HELP)
        elif line:
            try:
                messages = [*history, {"role": "user", "content": checked_input(line)}]
                text, tokens = session.encode(messages, "the conversation")
            except ValueError as error:
                sys.stderr.write(f"error: {error}; /clear starts a new one\n")
                continue
            if arguments.show_prompt:
                sys.stderr.write(f"{text}\n{tokens}\n")
            streaming = not arguments.no_stream
            completion, statistics = answer(session, tokens, generators, streaming=streaming)
            sys.stdout.write((completion.text if arguments.no_stream else "") + "\n")
            sys.stdout.flush()
            sys.stderr.write(session.remark(completion))
            report = session.report(statistics)
            history = [*messages, {"role": "assistant", "content": completion.text}]


def answer(
    session: Session, tokens: list[int], generators: list[torch.Generator], *, streaming: bool
) -> tuple[Completion, Statistics]:
    """Answer one prompt; a terminal is not left dim, wherever and however the answer ends."""
    try:
        [completion], statistics = session.answer(
            [tokens], generators, stream if streaming else None
        )
    finally:
        if streaming and sys.stdout.isatty():
            sys.stdout.write(NOT_DIM)
            sys.stdout.flush()
    return completion, statistics


def checked_input(text: str) -> str:
    """The text itself; ValueError if lone surrogates stand in it for bytes that are no UTF-8."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("standard input is not UTF-8 text")
    return text


def stream(row: int, text: str) -> None:
    """Print a piece of an answer at once; on a terminal, what the model thinks is dimmed."""
    if sys.stdout.isatty():
        text = text.replace("<think>", f"{DIM}<think>").replace("</think>", f"</think>{NOT_DIM}")
    sys.stdout.write(text)
    sys.stdout.flush()


def conversation(prompt: str | None, system_prompt: str | None) -> list[Message]:
    """The messages of a system prompt and a question, where there are such."""
    roles = {"system": system_prompt, "user": prompt}
    return [{"role": role, "content": text} for role, text in roles.items() if text is not None]


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The objects of a JSONL file, each with the name of its line for messages; no blank lines."""
    for number, text in enumerate(read_text(path).split("\n"), start=1):
        if not text.strip():
            continue
        name = f"{path}, line {number}"
        line = parse_json(text, name)
        if not isinstance(line, dict) or ("prompt" in line) == ("messages" in line):
            raise ValueError(f'{name} must be an object with "prompt" or "messages"')
        try:  # what cannot be written with the answer is better refused before it is computed
            json.dumps(line, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name}: the text is not valid UTF-8: {error}") from error
        except RecursionError as error:
            raise ValueError(f"{name} is nested too deeply") from error
        yield name, line


def line_messages(
    line: Mapping[str, Any], session: Session, arguments: argparse.Namespace
) -> list[Message]:
    """The conversation of a line of a JSONL file."""
    if "prompt" in line:
        if not isinstance(line["prompt"], str):
            raise ValueError('"prompt" must be a string')
        return conversation(line["prompt"], arguments.system_prompt)
    messages = line["messages"]
    if not isinstance(messages, list):
        raise ValueError('"messages" must be a list')
    if session.template is None:
        raise ValueError('"messages" need a chat template, and none is used')
    return [*conversation(None, arguments.system_prompt), *messages]


def describe(completion: Completion) -> dict[str, Any]:
    """A completion as it is written to JSON."""
    return {
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "prompt_tokens": completion.prompt_tokens,
        "generated_tokens": len(completion.tokens),
    }


def measurements(session: Session, statistics: Statistics) -> dict[str, Any]:
    """The measurements as they are written to JSON; rates in tokens per second."""
    return {
        "prompt_rate": statistics.prompt_rate,
        "generation_rate": statistics.generation_rate,
        "peak_memory_bytes": statistics.peak_memory,
        "attention": session.attention,
        "device": str(session.device),
        "dtype": session.dtype,
        "precision": session.precision,
    }


if __name__ == "__main__":
    sys.exit(main())
