"""Launch FA4's kernel for Hopper with tracing on and record the states of every role:
`python -m flash_versions.bench.record --out docs/results/forward/h200-trace.json`.

The states of every program are checked against the table in `roles.py`. The document keeps those of
the first programs.
`python -m flash_versions.plot` draws it.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from flash_versions.bench.document import new_document
from flash_versions.bench.files import write
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.fa4.hopper import host as forward_hopper
from flash_versions.versions.fa4.hopper.config import RolesConfig, default_config
from flash_versions.versions.fa4.hopper.roles import check
from flash_versions.versions.fa4.hopper.trace import Event, events, new_stamps
from flash_versions.versions.fp8.quantize import prepare
from flash_versions.versions.tiles import wgmma

SHAPE = (4, 2048, 16, 128)  # batch, length, heads, head_dim
WARM = 20  # launches before the one that is recorded
PROGRAMS = 2  # that the document has
TILES = 4  # of each of them


def record(request: Request, config: RolesConfig) -> list[dict[str, list[Event]]]:
    """The states that each role of each program went through, as the table of roles allows.

    Raises:
        ValueError: a role took a step that the table does not have.
    """
    quantized = None if request.precision is None else prepare(request)
    stamps = new_stamps(request, config)
    for turn in range(WARM + 1):
        recorded = stamps if turn == WARM else torch.zeros_like(stamps)
        if quantized is None:
            forward_hopper.forward(request, config, recorded)
        else:
            forward_hopper.forward_quantized(request, quantized, config, recorded)
    found = [events(program) for program in stamps.cpu()]
    for program in found:
        for role, entered in program.items():
            check(role.split()[0], [state for state, _, _, _ in entered])
    return found


def intervals(entered: list[Event]) -> list[tuple[str, int, int]]:
    """A role's first tiles as (state, first cycle, last cycle)."""
    cycles = [event[3] for event in entered]
    return [
        (state, start, end)
        for (state, tile, _, start), end in zip(entered, cycles[1:])
        if tile < TILES
    ]


def document(request: Request, found: list[dict[str, Any]]) -> dict[str, Any]:
    """A recorded launch for docs/results."""
    batch, length, heads, head_dim = request.q.shape
    what: dict[str, Any] = {"B": batch, "H": heads, "S": length, "D": head_dim}
    what |= {"causal": request.window_right is not None, "precision": request.precision or "bf16"}
    programs = [
        {"program": number, "roles": {role: intervals(x) for role, x in program.items()}}
        for number, program in enumerate(found[:PROGRAMS])
    ]
    made = new_document(what=what, clock_mhz=None, programs=programs)
    del made["rows"]
    return made


def main(arguments: list[str] | None = None) -> int:
    """Record one launch."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.bench.record", description=__doc__
    )
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not wgmma.available(device):
        sys.stderr.write("a Hopper GPU (compute capability 9.0) is needed, and there is none.\n")
        return 1
    q, k, v = (torch.randn(SHAPE, device=device, dtype=torch.bfloat16) for _ in range(3))
    request = make_request(q, k, v)
    config = default_config(request)
    write(options.out, json.dumps(document(request, record(request, config))) + "\n")
    sys.stdout.write(f"wrote {options.out}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
