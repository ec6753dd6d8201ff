"""Record kernels for the stepper: `python -m lessons.stepper`, in notebooks/.

Without an argument it records the calls that the site shows. With a name it records a call of your
own, which the page then shows at index.html#version=NAME:

    python -m lessons.stepper mine --kernel fa2 --queries 24 --keys 40 --block-q 8 --block-kv 8
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from flash_versions import VERSIONS
from flash_versions.bench.results import ROOT
from flash_versions.files import write
from lessons.stepper import hopper, portable

FOLDER = ROOT / "docs" / "extra" / "stepper" / "recordings"
DIGITS = 4
MAX_BYTES = 1_000_000


class Call(NamedTuple):
    """A call that is recorded: one sequence, one head, bf16.

    Attributes:
        kernel: "fa1", "fa2", "fa2-split", "fa3-hopper" or "fa4-hopper".
        queries: rows of q.
        keys: rows of k and v.
        head_dim: of q, k and v.
        block_q: rows of a query tile; those of a consumer on Hopper.
        block_kv: keys of a block.
        causal: whether a query sees only keys up to its own place.
    """

    kernel: str
    queries: int = 32
    keys: int = 32
    head_dim: int = 16
    block_q: int = 8
    block_kv: int = 8
    causal: bool = True


KERNELS = ("fa1", "fa2", "fa2-split", "fa3-hopper", "fa4-hopper")
HOPPER = Call("", queries=128, keys=256, head_dim=64, block_q=64, block_kv=64)
CALLS = {x: HOPPER._replace(kernel=x) if "hopper" in x else Call(x) for x in KERNELS}
CALLS["fa1-full"] = Call("fa1", 24, 24, 4, 4, 4, causal=False)  # of the README's animation


def inputs(call: Call) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random q, k and v of a call, the same every time: bf16, (1, rows, 1, head_dim)."""
    random = np.random.default_rng(5)
    rows = (call.queries, call.keys, call.keys)
    q, k, v = (random.normal(size=(1, x, 1, call.head_dim)) for x in rows)
    return tuple(torch.from_numpy(x).bfloat16() for x in (1.5 * q, k, v))  # type: ignore[return-value]


def record(call: Call) -> dict[str, Any]:
    """Run a call and write it down: what `pack` takes.

    Raises:
        ValueError: the call is not one that can be recorded.
    """
    check(call)
    version, _, kind = call.kernel.partition("-")
    tensors = inputs(call)
    if kind == "hopper":
        found = hopper.record(version, *tensors, call.causal)
    else:
        sizes = call.block_q, call.block_kv
        found = portable.record(call.kernel, *tensors, call.causal, *sizes)
    titles = {"split": ", keys split", "hopper": " on Hopper", "": ""}
    about = {"title": VERSIONS[version].title + titles[kind], "hopper": kind == "hopper"}
    return {
        **about,
        "call": call._asdict(),
        "cell": hopper.CELL if kind == "hopper" else 1,
        **found,
    }


def check(call: Call) -> None:
    """Refuse what cannot be recorded.

    Raises:
        ValueError: says what was given and what would work.
    """
    if call.kernel not in KERNELS:
        raise ValueError(f"kernel={call.kernel!r} is unknown; there are {', '.join(KERNELS)}.")
    for name in ("queries", "keys", "head_dim", "block_q", "block_kv"):
        if getattr(call, name) < 1:
            raise ValueError(f"{name}={getattr(call, name)} is not possible; use 1 or more.")
    if "hopper" in call.kernel:
        for name, step in (("queries", 128), ("keys", 64)):
            if getattr(call, name) % step:
                raise ValueError(f"{name}={getattr(call, name)}: use a multiple of {step}.")
        if (call.head_dim, call.block_q, call.block_kv) != (64, 64, 64):
            raise ValueError("kernels for Hopper are recorded with head_dim and tiles of 64.")


def plain(value: Any) -> Any:
    """A value as JSON has it: arrays as lists, 4 significant digits, -inf as null."""
    if isinstance(value, dict):
        return {x: plain(y) for x, y in value.items() if y is not None}
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, np.ndarray):
        return plain(value.tolist())
    if isinstance(value, float):
        short = float(f"{value:.{DIGITS}g}")
        return None if value == -np.inf else int(short) if short == int(short) else short
    return value


def pack(recording: dict[str, Any]) -> dict[str, Any]:
    """A recording as JSON; o and lse in full, so that a test can compare them."""
    results = {x: recording[x].float().tolist() for x in ("o", "lse")}
    steps = [{x: y for x, y in step.items() if y != {}} for step in plain(recording["steps"])]
    return {**recording, **results, "source": recording["source"].split("\n"), "steps": steps}


def text(name: str, recording: dict[str, Any]) -> str:
    """A recording as the script that the page loads, also where it may not fetch a file.

    Raises:
        ValueError: it is too large for a page.
    """
    found = json.dumps(pack(recording), separators=(",", ":"))
    if len(found) > MAX_BYTES:
        raise ValueError(f"the recording has {len(found):,} bytes; {MAX_BYTES:,} are possible.")
    return f'stepper.add("{name}", {found});\n'


def read(path: Path) -> dict[str, Any]:
    """The JSON of a recording's file."""
    return json.loads(path.read_text("utf-8").partition(", ")[2].rstrip().removesuffix(");"))


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m lessons.stepper",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("name", nargs="?", help="of your own recording: letters, digits and -")
    made.add_argument("--kernel", default="fa2", help=", ".join(KERNELS))
    for name in ("queries", "keys", "head-dim", "block-q", "block-kv"):
        made.add_argument(f"--{name}", type=int)
    made.add_argument("--full", action="store_true", help="every query sees every key")
    return made


def main(arguments: list[str] | None = None) -> int:
    """Record calls; returns the exit code."""
    options = parser().parse_args(arguments)
    calls = CALLS
    try:
        if options.name:
            if not re.fullmatch(r"[a-zA-Z0-9-]+", options.name):
                raise ValueError(
                    f"the name {options.name!r} is not possible; use letters, digits and -."
                )
            if options.name in CALLS:
                raise ValueError(f"{options.name} is a recording of the site; choose another name.")
            given = {x: y for x, y in vars(options).items() if x in Call._fields and y is not None}
            start = CALLS.get(options.kernel, Call(options.kernel))
            calls = {options.name: start._replace(**given, causal=not options.full)}
        FOLDER.mkdir(parents=True, exist_ok=True)
        for name, call in calls.items():
            path = FOLDER / f"{name}.js"
            write(path, text(name, record(call)))
            sys.stderr.write(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes\n")
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
