"""What the compiler made of a version's kernels, counted without a GPU.

Compiling and interpreting never share a process, so the counts are those of `python -m
flash_versions.inspect`, started here. That takes seconds, and its answer is kept in the user's
cache folder for as long as the package's sources and Triton stay the same.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import triton

import flash_versions
from flash_versions.bench.files import write

PACKAGE = Path(flash_versions.__file__).parent
SUMMARY = ("num_warps", "registers", "spill_stores", "spill_loads", "shared", "instructions")


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
        arch: such as "sm_80" (A100), "sm_90" (H100, H200), "sm_100" (B200). Several at once take
            little longer than one.
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
    """
    arches = (arch,) if isinstance(arch, str) else arch
    options = options_of(call)
    documents = inspected([[version, "--arch", name, "--json", *options] for name in arches])
    found = {name: counts_of(document, kernel) for name, document in zip(arches, documents)}
    return found[arch] if isinstance(arch, str) else found


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
    call_line = [version, "--arch", "sm_90", "--json", *options_of(call)]
    kept = cache_folder() / f"{name_of([*call_line, file, line, changed])}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / PACKAGE.name
            shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
            (copy / file).write_text(text.replace(found[0], indent + changed.strip()))
            [(code, out, errors)] = compiled([call_line], Path(folder))
        if code:
            said = (errors.strip().splitlines() or ["no reason given"])[-1]
            raise ValueError(f"with {changed.strip()!r} it does not compile: {said}")
        write(kept, out)
    return counts_of(json.loads(kept.read_text()), kernel)


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


def inspected(calls: list[list[str]]) -> list[dict[str, Any]]:
    """The JSON that the command prints for each call, from the cache if it is there."""
    kept = [cache_folder() / f"{name_of(arguments)}.json" for arguments in calls]
    missing = [place for place, path in enumerate(kept) if not path.exists()]
    if missing:
        answers = compiled([calls[place] for place in missing])
        for place, (code, out, errors) in zip(missing, answers):
            if code:
                said = (errors.strip().splitlines() or ["no reason given"])[-1]
                command = "python -m flash_versions.inspect " + " ".join(calls[place])
                raise ValueError(f"{command}: {said.removeprefix('error: ')}")
            write(kept[place], out)
    return [json.loads(path.read_text()) for path in kept]


def compiled(calls: list[list[str]], root: Path = PACKAGE.parent) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each call, in a process that does not interpret; `root` has
    the package.
    """
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("compile_all.py"))],
        input=json.dumps(calls),
        capture_output=True,
        text=True,
        env=compiling(root),
    )
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise RuntimeError(f"the compiling process ended: {said}")
    return json.loads(done.stdout)


def compiling(root: Path = PACKAGE.parent) -> dict[str, str]:
    """The environment of a process that compiles kernels and finds this package."""
    paths = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": paths}


def name_of(arguments: list[str]) -> str:
    """What the answer to a call is kept under."""
    text = json.dumps([*arguments, fingerprint()])
    return hashlib.sha256(text.encode()).hexdigest()[:24]


@cache
def fingerprint() -> str:
    """Of Triton's version and all sources of the package."""
    digest = hashlib.sha256(triton.__version__.encode())
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
