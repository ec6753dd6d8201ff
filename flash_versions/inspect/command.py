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
from typing import Any

import torch
import triton
from triton.errors import TritonError

from flash_versions.dispatch.request import Request, make_request
from flash_versions.files import write
from flash_versions.inspect.compiled import (
    ARCHES,
    Compiled,
    compile_call,
    compiling,
    find_forward,
    find_version,
)
from flash_versions.inspect.sass import Event

__all__ = ["Compiled", "compile_call", "compiling", "main"]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
READABLE = 24  # events of a loop
SHOWN = ("summary", "ttgir", "ptx", "sass")
LABELS = {
    "wgmma": "wgmma",
    "tcgen05": "tcgen05.mma",
    "mma_sync": "mma.sync",
    "tma_loads": "TMA loads",
    "tma_stores": "TMA stores",
    "cp_async": "cp.async",
    "mbarriers": "mbarrier",
    "ex2": "ex2.approx",
    "barriers": "barriers",
}


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """The options of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.inspect",
        description="what the compiler makes of a version's kernels; needs no GPU",
    )
    parser.add_argument("version", help="such as fa2")
    known = ", ".join(f"{name} ({arch.example})" for name, arch in ARCHES.items())
    parser.add_argument("--arch", default="sm_90", help=known)
    parser.add_argument("--show", choices=SHOWN, default="summary")
    parser.add_argument("--variant", metavar="NAME", help="the forward with one thing changed")
    parser.add_argument("--backward", action="store_true", help="the backward's kernels, too")
    parser.add_argument("--kernel", metavar="NAME", help="only this one, such as forward_kernel")
    parser.add_argument("--json", action="store_true", help="JSON in the place of text")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write in the place of printing")
    call = parser.add_argument_group("the call that is compiled")
    call.add_argument("--batch", type=count, default=1)
    call.add_argument("--length", type=count, default=4096, help="queries, and keys (4096)")
    call.add_argument("--keys", type=count, help="keys, if not as many as queries")
    call.add_argument("--heads", type=count, default=16, help="query heads (16)")
    call.add_argument("--kv-heads", type=count, help="key heads, if not as many")
    call.add_argument("--head-dim", type=count, default=128, help="(128)")
    call.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    call.add_argument(
        "--precision", metavar="FP8", help="such as fp8, or fp8:head: quantised first"
    )
    call.add_argument("--causal", action="store_true")
    call.add_argument(
        "--window", type=bound, nargs=2, metavar=("LEFT", "RIGHT"), help="keys seen; none: no bound"
    )
    call.add_argument("--softcap", type=float)
    call.add_argument("--num-splits", type=count, help="ranges into which the keys are split")
    return parser.parse_args(arguments)


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
    keys, kv_heads = options.keys or options.length, options.kv_heads or options.heads
    dtype = DTYPES[options.dtype]
    q = torch.empty(options.batch, options.length, options.heads, options.head_dim, dtype=dtype)
    k = torch.empty(options.batch, keys, kv_heads, options.head_dim, dtype=dtype)
    return make_request(
        q,
        k,
        k,
        causal=options.causal,
        window=options.window and tuple(options.window),
        softcap=options.softcap,
        num_splits=options.num_splits,
        precision=options.precision,
    )


def described(options: argparse.Namespace) -> str:
    """The call in words."""
    keys, kv_heads = options.keys or options.length, options.kv_heads or options.heads
    words = [
        f"batch {options.batch}",
        f"{options.length} queries, {keys} keys",
        f"{options.heads} heads" + (f" on {kv_heads}" if kv_heads != options.heads else ""),
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
    rows: list[tuple[str, list[Any]]] = [
        ("warps", [kernel.num_warps for kernel in kernels]),
        ("registers per thread", [kernel.registers for kernel in kernels]),
        ("spill stores, bytes", [kernel.assembly.spill_stores for kernel in kernels]),
        ("spill loads, bytes", [kernel.assembly.spill_loads for kernel in kernels]),
        ("shared memory, bytes", [kernel.shared for kernel in kernels]),
        ("serialised wgmma", [len(kernel.serialised) for kernel in kernels]),
    ]
    for name, label in LABELS.items():
        if any(kernel.counts[name] for kernel in kernels):
            rows.append((label, [kernel.counts[name] for kernel in kernels]))
    rows.append(("SASS instructions", [kernel.opcodes.total() for kernel in kernels]))
    texts = [
        ("", [kernel.kernel for kernel in kernels]),
        ("from", [kernel.module.removeprefix("flash_versions.versions.") for kernel in kernels]),
    ]
    texts += [(label, [f"{value:,}" for value in values]) for label, values in rows]
    widths = [max(len(values[i]) for _, values in texts) for i in range(len(kernels))]
    left = max(len(label) for label, _ in texts)
    return "".join(
        f"{label:<{left}}"
        + "".join(f"  {value:>{width}}" for value, width in zip(values, widths))
        + "\n"
        for label, values in texts
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
    name = options.version + (f", variant {options.variant}" if options.variant else "")
    title = f"{name} for {options.arch}, Triton {triton.__version__}: {described(options)}"
    if options.json:
        call = {
            "version": options.version,
            "variant": options.variant,
            "arch": options.arch,
            "triton": triton.__version__,
            "call": described(options),
        }
        if options.show == "summary":
            rows = [kernel.summary() for kernel in kernels]
        else:
            rows = [
                {"kernel": kernel.kernel, options.show: getattr(kernel, options.show)}
                for kernel in kernels
            ]
        return json.dumps(call | {"kernels": rows}, indent=1) + "\n"
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


def write_out(path: Path, text: str) -> None:
    """Write a file, or leave the one that is there as it was."""
    try:
        write(path, text)
    except OSError as error:
        raise OSError(f"{path} cannot be written: {error.strerror}.") from None
    sys.stderr.write(f"wrote {path}\n")


def main(arguments: list[str] | None = None) -> int:
    """Compile and print; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse_arguments(arguments)
    try:
        find_forward(find_version(options.version), options.variant, options.precision)
        if options.arch not in ARCHES:
            raise ValueError(f"arch={options.arch!r} is unknown; there are {', '.join(ARCHES)}.")
        request = request_of(options)
        kernels = compile_call(
            options.version,
            request,
            options.arch,
            variant=options.variant,
            backward=options.backward,
        )
        text = report(options, selected(kernels, options.kernel))
        if options.out is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            write_out(options.out, text)
    except BrokenPipeError:  # the reader has seen enough
        sys.stderr.close()
        return 1
    except TritonError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = lines[-1] if lines else type(error).__name__
        sys.stderr.write(f"error: {options.version} does not compile for {options.arch}: {said}\n")
        return 1
    except (ValueError, RuntimeError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0
