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
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from transformer.generation.answers import (
    STANDARD_INPUT,
    answer_file,
    checked_input,
    conversation,
    describe,
)
from transformer.generation.batch import PREFILL_CHUNK, WORTH_A_GRAPH
from transformer.generation.command import (
    INTERRUPTED,
    Parser,
    attention_name,
    describe_error,
    flag,
    interruptible,
    out_of_memory,
    refuse_below,
)
from transformer.generation.engine import EngineOptions, Kept
from transformer.generation.prompt_lookup import check_prompt_lookup
from transformer.generation.row import Completion
from transformer.generation.sampling import Sampling, row_generators
from transformer.generation.session import DTYPES, Session
from transformer.generation.stats import Statistics
from transformer.model.decoder import KERNELS, choose_attention
from transformer.model.files import writing
from transformer.model.paged_cache import PAGE_SIZE

DESCRIPTION = "Ask a model a question, a file of questions, or chat with it."
ATTENTION_HELP = "a version of attention, or a file of yours, such as mine.py (auto)"
DEFAULT_QUESTION = "What is 357+486?"
# With fewer parameters, threads wait longer for each other than they work, above all on a busy CPU.
WORTH_THREADS = 10_000_000
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
# What a session is told by the same name.
AS_GIVEN = (
    "max_tokens", "attention", "device", "dtype", "precision", "kernels", "exact", "thinking",
)  # fmt: skip
# What changes nothing where nothing is drawn -> its default.
OF_DRAWS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0}
# Of the statistics, what --stats adds to --json.
DETAILS = (
    "first_token_seconds", "steps", "step_seconds", "attention_share", "tokens_per_forward", "rows",
    "cache_bytes",
)  # fmt: skip
INPUT_HELP = 'JSONL of {"prompt": ...} or {"messages": ...}; - reads standard input'
CHUNK_HELP = f"most tokens of prompts in a forward: less memory, slower ({PREFILL_CHUNK})"
CACHE_HELP = (
    "paged: memory as needed; the prompts of --input take places as they become free (static)"
)
LOOKUP_HELP = "also try N tokens that followed the newest ones before; greedy only, same answer (0)"
CHAT_HELP = """\
/help   show this list
/clear  forget the conversation
/stats  show the measurements of the last answer
/exit   leave, as Ctrl-D does; Ctrl-C stops an answer and keeps the conversation
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    arguments = session = None
    try:
        interruptible()
        arguments = parse(argv)
        check_streams(arguments)
        session = load_session(arguments)
        notes = (*session.notes, *without_effect(arguments))
        sys.stderr.writelines(f"note: {note}\n" for note in notes)
        with writing(Path("standard output")):
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
        what = (str(error) if isinstance(error, MemoryError) else "") or "the memory is full"
        sys.stderr.write(f"error: {what}; {less_memory(arguments, session)} needs less\n")
    return 2


def less_memory(arguments: argparse.Namespace | None, session: Session | None) -> str:
    """What needs less memory, of all that this model can use."""
    if arguments is None or session is None:
        return "a smaller model"
    config, device, precision = session.model.config, session.device, session.precision
    name, paged = arguments.attention, session.engine.page_size is not None

    def works(dtype: str, paged: bool) -> bool:
        try:
            return bool(choose_attention(name, config, device, DTYPES[dtype], precision, paged))
        except Exception:  # also: no memory is left to ask with
            return False

    found = ["--max-tokens", "--batch-size"] if arguments.input else ["--max-tokens"]
    found = [f"a smaller {' or '.join(found)}"]
    found += ["--cache paged"] * (not paged and works(session.dtype, True))
    found += ["--dtype bfloat16"] * (session.dtype == "float32" and works("bfloat16", paged))
    return " or ".join([", ".join(found[:-1]), found[-1]] if found[1:] else found)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line; ValueError for options that are wrong or contradict each other."""
    parser = Parser(prog="python -m transformer.generate", description=DESCRIPTION)
    add = parser.add_argument
    add(
        "--model",
        default="reinforced",
        help="a folder, owner/model on the Hugging Face hub, or a shipped model: reinforced, or"
        " sloppy, from which it was trained (reinforced)",
    )
    add("-p", "--prompt", help=f"the question; - reads standard input ({DEFAULT_QUESTION})")
    add("--system-prompt", help="a system prompt for conversations that have none")
    add("--input", type=Path, metavar="FILE", help=INPUT_HELP)
    add("--output", type=Path, metavar="FILE", help="where --input's answers go (stdout)")
    add("--force", action="store_true", help="replace an --output that is there already")
    add("--batch-size", type=int, default=16, help="prompts of --input answered at once (16)")
    add("-m", "--max-tokens", type=int, default=256, help="longest answer (256)")
    add("--temp", type=float, default=0.0, help="temperature; 0 is greedy (0)")
    add("--top-k", type=int, default=0, help="draw from the k likeliest tokens; 0 is all (0)")
    add("--top-p", type=float, default=1.0, help="draw from the likeliest tokens of mass p (1)")
    add("--min-p", type=float, default=0.0, help="drop tokens below p times the likeliest's (0)")
    add("--repetition-penalty", type=float, default=1.0, help="above 1: repeat less (1)")
    add("--seed", type=int, default=0, help="of the draws; row i of a file has its own stream (0)")
    add("--stop", action="append", default=[], metavar="TEXT", help="ends the answer; repeatable")
    add("--attention", type=attention_name, default="auto", help=ATTENTION_HELP)
    add("--kernels", choices=KERNELS, default="auto", help="of norms and products (auto)")
    add("--exact", action="store_true", help="an answer's bits depend on its prompt only")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (auto)")
    add("--dtype", choices=("auto", *DTYPES), default="auto", help="of weights and cache (auto)")
    add("--precision", help="of attention, such as fp8 or fp8:block:hadamard (that of --dtype)")
    add("--prefill-chunk", type=int, default=PREFILL_CHUNK, help=CHUNK_HELP)
    add("--cache", choices=("static", "paged"), default="static", help=CACHE_HELP)
    add("--page-size", type=int, help=f"tokens of a page ({PAGE_SIZE})")
    add("--lookup", type=int, default=0, metavar="N", help=LOOKUP_HELP)
    add("--stats", action="store_true", help="measure more, such as the share of attention")
    add("--chat", action="store_true", help="a conversation; /help lists its commands")
    add("--json", action="store_true", help="print the answer and the measurements as JSON")
    add("--no-stream", action="store_true", help="print the answer when it is complete")
    for name, value in (("--enable-thinking", True), ("--no-thinking", False)):
        how = f"tell the chat template enable_thinking={str(value).lower()}"
        add(name, dest="thinking", action="store_const", const=value, help=how)
    add("--ignore-chat-template", action="store_true", help="use the prompt as it is")
    add("--show-prompt", action="store_true", help="show what the model sees, on standard error")
    arguments = parser.parse_args(argv)
    for pair in EXCLUSIVE:
        if all(getattr(arguments, name) not in (None, False) for name in pair):
            raise ValueError(f"{flag(pair[0])} and {flag(pair[1])} exclude each other")
    if arguments.output and not arguments.input:
        raise ValueError("--output needs --input; redirect standard output otherwise")
    if arguments.output and os.path.realpath(arguments.output) == os.path.realpath(arguments.input):
        raise ValueError(f"--output {arguments.output} is --input; it would be overwritten")
    if arguments.force and not arguments.output:
        raise ValueError("--force needs --output")
    if arguments.page_size is not None and arguments.cache != "paged":
        raise ValueError("--page-size needs --cache paged")
    refuse_below(arguments, max_tokens=1, batch_size=1, prefill_chunk=1, page_size=1)
    for name in ("page_size", "lookup"):
        if (getattr(arguments, name) or 0) >= 2**31:
            raise ValueError(f"{flag(name)} must be below 2^31")
    if "" in arguments.stop:
        raise ValueError("--stop must not be empty")
    return arguments


def without_effect(arguments: argparse.Namespace) -> list[str]:
    """A sentence about options that change nothing, if there are such."""
    idle = [name for name, default in OF_DRAWS.items() if getattr(arguments, name) != default]
    if not idle or arguments.temp:
        return []
    names = ", ".join(map(flag, idle))
    verb = "changes" if len(idle) == 1 else "change"
    return [f"without --temp, {names} {verb} nothing: the likeliest token is always taken"]


def check_streams(arguments: argparse.Namespace) -> None:
    """Refuse closed standard streams, and let bytes that are no UTF-8 reach the check of a text."""
    if sys.stdout is None and not arguments.output:
        raise ValueError("standard output is closed; answers need a place to go")
    if arguments.chat or arguments.prompt == "-" or arguments.input == STANDARD_INPUT:
        if sys.stdin is None:
            raise ValueError("standard input is closed; questions were to come from it")
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="surrogateescape")


def load_session(arguments: argparse.Namespace) -> Session:
    """Load what the arguments name."""
    filters = ("top_k", "top_p", "min_p", "repetition_penalty")
    sampling = Sampling(arguments.temp, **{name: getattr(arguments, name) for name in filters})
    paged = arguments.cache == "paged"
    check_prompt_lookup(arguments.lookup, sampling)
    session = Session.load(
        arguments.model,
        **{name: getattr(arguments, name) for name in AS_GIVEN},
        sampling=sampling,
        stop_strings=arguments.stop,
        use_template=not arguments.ignore_chat_template,
        engine=EngineOptions(
            prefill_chunk=arguments.prefill_chunk,
            page_size=(arguments.page_size or PAGE_SIZE) if paged else None,
            prompt_lookup=arguments.lookup,
            measure_attention=arguments.stats,
        ),
    )
    if session.template is None and (arguments.chat or arguments.system_prompt is not None):
        raise ValueError(f"{arguments.model} has no chat template, so it takes plain prompts only")
    parameters = sum(parameter.numel() for parameter in session.model.parameters())
    if session.device.type == "cpu" and parameters < WORTH_THREADS:
        torch.set_num_threads(1)
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


def chat(session: Session, arguments: argparse.Namespace) -> int:
    """A conversation on the terminal, or line by line from standard input."""
    interactive = sys.stdin.isatty()
    if interactive:
        with suppress(ImportError):  # Windows has no readline
            import readline  # noqa: F401  (gives input() a history and line editing)
    sys.stderr.write(CHAT_HELP)
    history, kept = conversation(None, arguments.system_prompt), Kept()
    generators = row_generators(arguments.seed, 1)
    report = "nothing has been answered yet\n"
    if interactive and session.device.type == "cuda":
        warm_up(session)
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
            messages = [*history, {"role": "user", "content": line}]
            try:
                checked_input(line)
                left, text, tokens = session.encode_latest(messages)
            except ValueError as error:
                sys.stderr.write(f"error: {error}\n")
                continue
            if forgotten := (len(messages) - len(left)) // 2:
                turns = "oldest turn is" if forgotten == 1 else f"{forgotten} oldest turns are"
                sys.stderr.write(f"note: the context is full, so the {turns} forgotten\n")
            if arguments.show_prompt:
                sys.stderr.write(f"{text}\n{tokens}\n")
            streaming = not arguments.no_stream
            completion, statistics = answer(
                session, tokens, generators, streaming=streaming, kept=kept
            )
            sys.stdout.write((completion.text if arguments.no_stream else "") + "\n")
            sys.stdout.flush()
            sys.stderr.write(session.remark(completion))
            report = session.report(statistics)
            history = [*left, {"role": "assistant", "content": completion.text}]


def warm_up(session: Session) -> None:
    """Continue some tokens for nobody: the first question then finds the kernels loaded."""
    tokens = [0] * min(32, session.model.config.max_positions // 2)
    brief = replace(session, max_tokens=WORTH_A_GRAPH + 1)
    brief.answer([tokens], row_generators(0, 1), lambda row, text: None)


def answer(
    session: Session,
    tokens: list[int],
    generators: list[torch.Generator],
    *,
    streaming: bool,
    kept: Kept | None = None,
) -> tuple[Completion, Statistics]:
    """Answer one prompt; a terminal is not left dim, wherever and however the answer ends."""
    try:
        [completion], statistics = session.answer(
            [tokens], generators, stream if streaming else None, kept=kept
        )
    finally:
        if streaming and sys.stdout.isatty():
            sys.stdout.write(NOT_DIM)
            sys.stdout.flush()
    return completion, statistics


def stream(row: int, text: str) -> None:
    """Print a piece of an answer at once; on a terminal, what the model thinks is dimmed."""
    if sys.stdout.isatty():
        text = text.replace("<think>", f"{DIM}<think>").replace("</think>", f"</think>{NOT_DIM}")
    sys.stdout.write(text)
    sys.stdout.flush()


def measurements(session: Session, statistics: Statistics) -> dict[str, Any]:
    """The measurements as they are written to JSON; rates in tokens per second."""
    details = {name: getattr(statistics, name) for name in DETAILS}
    details["bytes_per_second"] = statistics.bandwidth
    return {
        "prompt_rate": statistics.prompt_rate,
        "generation_rate": statistics.generation_rate,
        "peak_memory_bytes": statistics.peak_memory,
        "attention": session.attention,
        "device": str(session.device),
        "dtype": session.dtype,
        "precision": session.precision,
        **(details if session.engine.measure_attention else {}),
    }


if __name__ == "__main__":
    sys.exit(main())
