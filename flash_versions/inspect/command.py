"""What the compiler makes of a version's kernels: `python -m flash_versions.inspect fa2`.

Registers, spills, shared memory, instructions, the order of events in the hot loops; or the code
itself, as Triton's IR, PTX or SASS. For any architecture, on a machine with or without a GPU: the
kernels are compiled and not run.
"""

import argparse
import json
import sys
import textwrap
from collections import Counter
from pathlib import Path

import torch
import triton
from triton.errors import TritonError

from flash_versions.dispatch.request import Request, make_request
from flash_versions.files import write
from flash_versions.inspect.compiled import (
    ARCHES,
    COUNTED,
    Compiled,
    compile_call,
    compiling,
    last_line,
)
from flash_versions.inspect.sass import Event

__all__ = ["Compiled", "compile_call", "compiling", "main"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
READABLE = 24  # events of a loop
SHOWN = ("summary", "ttgir", "ptx", "sass")
ROWS = {
    "num_warps": "warps",
    "registers": "registers per thread",
    "spill_stores": "spill stores, bytes",
    "spill_loads": "spill loads, bytes",
    "shared": "shared memory, bytes",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.inspect",
        description="what the compiler makes of a version's kernels; needs no GPU",
    )
    add = parser.add_argument
    add("version", help="such as fa2")
    known = ", ".join(f"{name} ({arch.example})" for name, arch in ARCHES.items())
    add("--arch", default="sm_90", help=known)
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument("--show", choices=SHOWN, default="summary")
    shown.add_argument("--json", action="store_true", help="the summary as JSON")
    add("--variant", metavar="NAME", help="the forward with one thing changed")
    add("--backward", action="store_true", help="the backward's kernels, too")
    add("--kernel", metavar="NAME", help="only this one, such as forward_kernel")
    add("--out", type=Path, metavar="FILE", help="write in the place of printing")
    add = parser.add_argument_group("the call that is compiled").add_argument
    add("--batch", type=count, default=1)
    add("--length", type=count, default=4096, help="queries, and keys (4096)")
    add("--keys", type=count, help="keys, if not as many as queries")
    add("--heads", type=count, default=16, help="query heads (16)")
    add("--kv-heads", type=count, help="key heads, if not as many")
    add("--head-dim", type=count, default=128, help="(128)")
    add("--dtype", choices=DTYPES, default="bfloat16")
    add("--precision", metavar="FP8", help="such as fp8, or fp8:head: quantised first")
    add("--causal", action="store_true")
    window = "keys seen; none: no bound"
    add("--window", type=bound, nargs=2, metavar=("LEFT", "RIGHT"), help=window)
    add("--softcap", type=float)
    add("--num-splits", type=count, help="ranges into which the keys are split")
    options = parser.parse_args(arguments)
    options.keys = options.keys or options.length
    options.kv_heads = options.kv_heads or options.heads
    return options


def count(text: str) -> int:
    """A positive number."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def bound(text: str) -> int | None:
    """One side of a window."""
    if text == "none":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, or none") from None


def request_of(options: argparse.Namespace) -> Request:
    """The call that the options describe, on uninitialised tensors; ValueError if there is none."""
    q, k = (
        torch.empty(options.batch, n, heads, options.head_dim, dtype=DTYPES[options.dtype])
        for n, heads in ((options.length, options.heads), (options.keys, options.kv_heads))
    )
    return make_request(
        q, k, k, causal=options.causal, window=options.window and tuple(options.window),
        softcap=options.softcap, num_splits=options.num_splits, precision=options.precision,
    )  # fmt: skip


def described(options: argparse.Namespace) -> str:
    """The call in words."""
    on = f" on {options.kv_heads}" if options.kv_heads != options.heads else ""
    words = [
        f"batch {options.batch}",
        f"{options.length} queries, {options.keys} keys",
        f"{options.heads} heads{on}",
        f"head_dim {options.head_dim}",
        options.dtype,
        "causal" if options.causal else "full",
    ]
    for name in ("precision", "window", "softcap", "num_splits"):
        if (value := getattr(options, name)) is not None:
            words.append(f"{name} {value}")
    return ", ".join(words)


def table(kernels: list[Compiled]) -> str:
    """The summaries of kernels side by side."""
    lines: dict[str, list[str]] = {
        "": [kernel.kernel for kernel in kernels],
        "from": [kernel.module.removeprefix("flash_versions.versions.") for kernel in kernels],
    }
    found = [kernel.summary() for kernel in kernels]
    for name, label in ROWS.items():
        lines[label] = [f"{row[name]:,}" for row in found]
    lines["serialised wgmma"] = [str(len(row["serialised"])) for row in found]
    for name, (label, _) in COUNTED.items():
        if any(row["counts"][name] for row in found):
            lines[label] = [f"{row['counts'][name]:,}" for row in found]
    lines["SASS instructions"] = [f"{row['instructions']:,}" for row in found]
    widths = [max(map(len, column)) for column in zip(*lines.values())]
    left = max(map(len, lines))
    return "".join(
        f"{label:<{left}}"
        + "".join(f"  {value:>{width}}" for value, width in zip(values, widths))
        + "\n"
        for label, values in lines.items()
    )


def in_order(events: list[Event]) -> str:
    """A loop's events as lines; the sum of each kind where they alternate too often to be read."""
    if len(events) > READABLE:
        sums: Counter[str] = Counter()
        for event in events:
            sums[event.name] += event.times
        return ", ".join(str(Event(*pair)) for pair in sums.items()) + ", interleaved"
    words = [f"{event} |".replace(" ", "\xa0") for event in events]  # stay in one line each
    return textwrap.fill(" ".join(words).removesuffix("\xa0|"), 92).replace("\xa0", " ")


def remarks(kernel: Compiled) -> str:
    """What a table has no place for: the compiler's warnings and the hot loops."""
    lines = []
    limit = ARCHES[kernel.arch].shared_memory
    if kernel.shared > limit:
        lines.append(f"does not fit: a program may use {limit:,} bytes of shared memory")
    for role in kernel.roles:
        lines.append(
            f"role {role.function}: warps: {role.warps}, registers per thread: {role.registers}"
        )
    lines += [*kernel.serialised, *kernel.assembly.injected]
    for loop in kernel.hot_loops:
        local = f", {loop.local_memory} of them to or from spilled registers"
        lines.append(
            f"hot loop of {len(loop.instructions)} instructions{local if loop.local_memory else ''}"
        )
        lines.append(textwrap.indent(in_order(loop.events), "  "))
    if not lines:
        return ""
    return f"\n{kernel.kernel}\n" + textwrap.indent("\n".join(lines), "  ") + "\n"


def report(options: argparse.Namespace, kernels: list[Compiled]) -> str:
    """What the command prints."""
    call = described(options)
    if options.json:
        asked = {"version": options.version, "variant": options.variant, "arch": options.arch}
        asked |= {"triton": triton.__version__, "call": call}
        rows = [kernel.summary() for kernel in kernels]
        return json.dumps(asked | {"kernels": rows}, indent=1) + "\n"
    name = options.version + (f", variant {options.variant}" if options.variant else "")
    title = f"{name} for {options.arch}, Triton {triton.__version__}: {call}"
    if options.show == "summary":
        return f"{title}\n\n{table(kernels)}" + "".join(remarks(kernel) for kernel in kernels)
    return "\n".join(
        f"// {kernel.kernel}; {title}\n{getattr(kernel, options.show).rstrip()}\n"
        for kernel in kernels
    )


def selected(kernels: list[Compiled], name: str | None) -> list[Compiled]:
    """The kernels of that name, or all; ValueError if there is none."""
    chosen = [kernel for kernel in kernels if name in (None, kernel.kernel)]
    if not chosen:
        known = ", ".join(dict.fromkeys(kernel.kernel for kernel in kernels)) or "none"
        raise ValueError(f"kernel={name!r} is not launched by this call; it launches {known}.")
    return chosen


def main(arguments: list[str] | None = None) -> int:
    """Compile and print; returns the exit code."""
    options = parse_arguments(arguments)
    try:
        request = request_of(options)
        asked = {"variant": options.variant, "backward": options.backward}
        kernels = compile_call(options.version, request, options.arch, **asked)
        text = report(options, selected(kernels, options.kernel))
        if options.out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write(options.out, text)
            sys.stderr.write(f"wrote {options.out}\n")
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 1
    except TritonError as error:
        why = last_line(error)
        sys.stderr.write(f"error: {options.version} does not compile for {options.arch}: {why}\n")
        return 1
    except OSError as error:
        what = f"{options.out or error.filename}: {error.strerror}" if error.strerror else error
        sys.stderr.write(f"error: {what}\n")
        return 2
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0
