"""What the compiler made of a version's kernels, counted without a GPU.

The counts are those of `python -m flash_versions.inspect`. Compiling takes seconds, so its answer
is kept in the user's cache folder for as long as the package's sources and Triton stay the same.
"""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import flash_versions
from flash_versions.dispatch.extras import triton_missing
from flash_versions.files import write

PACKAGE = Path(flash_versions.__file__).parent
SUMMARY = ("num_warps", "registers", "spill_stores", "spill_loads", "shared", "instructions")
Said = tuple[int, str, str]  # of a command: exit code, output, errors


def instructions(
    version: str,
    arch: str | tuple[str, ...] = "sm_90",
    *,
    kernel: str = "forward_kernel",
    **call: Any,
) -> dict[str, Any]:
    """Counts of one kernel, compiled for a GPU that need not be there.

    Args:
        version: such as "fa2".
        arch: such as "sm_80" (A100), "sm_90" (H100, H200), "sm_100" (B200).
        kernel: which of the launched ones.
        call: the call that is compiled: head_dim, length, heads, causal, dtype, variant,
            precision ... as the options of `python -m flash_versions.inspect`.

    Returns:
        Of one arch: num_warps, registers (per thread), spill_stores and spill_loads (bytes), shared
        (bytes), instructions (of the machine code); wgmma, mma_sync, tcgen05, tma_loads, cp_async,
        ex2, mbarriers ...: how many of each stand in the code; opcodes {name: number}; hot_loops,
        the same of each loop. Of several: {arch: this}.

    Raises:
        ValueError: there is no such version, kernel, architecture or call.
        ImportError: Triton's compiler is not installed.
    """
    if not isinstance(arch, str):
        return {name: instructions(version, name, kernel=kernel, **call) for name in arch}
    arguments = [version, "--arch", arch, "--json", *options_of(call)]
    return counts_of(answer(arguments, inspected), kernel)


def recompiled(
    file: str, line: str, changed: str, version: str, *, kernel: str = "forward_kernel", **call: Any
) -> dict[str, Any]:
    """What `instructions` says after a line of the package was changed, in a copy of it.

    Args:
        file: of the package, such as "versions/fa1/forward.py".
        line: that it has once, without the spaces in front.
        changed: what takes its place.
        version: as in `instructions`, and so are kernel and call; for "sm_90".

    Raises:
        ValueError: the file does not have this line just once, or it does not compile any more.
    """
    text = (PACKAGE / file).read_text()
    found = [x for x in text.splitlines() if x.strip() == line.strip()]
    if len(found) != 1:
        raise ValueError(f"{file} has the line {line.strip()!r} {len(found)} times, not once.")
    indent = found[0][: -len(found[0].lstrip())]

    def inspected_with_change(arguments: list[str]) -> Said:
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / PACKAGE.name
            shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
            (copy / file).write_text(text.replace(found[0], indent + changed.strip()))
            command = [sys.executable, "-P", "-m", "flash_versions.inspect", *arguments]
            paths = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
            environment = os.environ | {"PYTHONPATH": paths}
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    arguments = [version, "--arch", "sm_90", "--json", *options_of(call)]
    return counts_of(answer(arguments, inspected_with_change, file, line, changed), kernel)


def options_of(call: dict[str, Any]) -> list[str]:
    """A call as options of the command."""
    options = []
    for name, value in call.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            options.append(option)
        elif value is not False and value is not None:
            options += [option, *(map(str, value) if isinstance(value, tuple) else [str(value)])]
    return options


def counts_of(document: dict[str, Any], kernel: str) -> dict[str, Any]:
    """The counts of one kernel in what the command printed."""
    kernels = {found["kernel"]: found for found in document["kernels"]}
    if kernel not in kernels:
        raise ValueError(f"this call launches {', '.join(kernels)}, not {kernel!r}.")
    found = kernels[kernel]
    summary = {name: found[name] for name in SUMMARY}
    return summary | found["counts"] | {name: found[name] for name in ("opcodes", "hot_loops")}


def answer(arguments: list[str], inspect: Callable[..., Said], *change: str) -> dict[str, Any]:
    """The JSON that the command prints with these arguments after a change, from the cache if it is
    there.
    """
    if sentence := triton_missing():
        raise ImportError(sentence)
    key = hashlib.sha256(json.dumps([*arguments, *change, fingerprint()]).encode()).hexdigest()
    kept = cache_folder() / f"{key[:24]}.json"
    if not kept.exists():
        code, out, errors = inspect(arguments)
        if code:
            said = (errors.strip().splitlines() or ["no reason given"])[-1]
            command = "python -m flash_versions.inspect " + " ".join(arguments)
            raise ValueError(f"{command}: {said.removeprefix('error: ')}")
        write(kept, out)
    return json.loads(kept.read_text())


def inspected(arguments: list[str]) -> Said:
    """The command, run in this process."""
    from flash_versions.inspect.command import main

    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(arguments)
        except SystemExit as end:  # an option that does not exist
            code = int(end.code or 0)
    return code, out.getvalue(), errors.getvalue()


@cache
def fingerprint() -> str:
    """Of Triton's version and all sources of the package."""
    digest = hashlib.sha256(version_of("triton").encode())
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def cache_folder() -> Path:
    """Where answers are kept: the user's cache folder, or a temporary one."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    try:
        folder = root / "flash_versions" / "inspect"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    except (OSError, RuntimeError):
        return Path(tempfile.mkdtemp())
