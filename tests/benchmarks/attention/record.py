"""A launch of FA4's kernel for Hopper with tracing on: the states of every role; writes JSON.

    python -m tests.benchmarks.attention.record --out docs/results/forward/h200-trace.json

The states of every program are checked against the table in `roles.py`. The document keeps those of
the first programs; `python -m flash_versions.plot` draws it.
"""

import torch

from flash_versions.bench.document import new_document, save
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.hopper.host import num_programs, num_tiles
from flash_versions.versions.fa4.hopper import host
from flash_versions.versions.fa4.hopper.config import default_config
from flash_versions.versions.fa4.hopper.roles import ROLES, STATES, check
from flash_versions.versions.fp8.quantize import prepare
from flash_versions.versions.tiles.rows import cdiv
from tests.benchmarks.harness import parser

SHAPE = (4, 2048, 16, 128)  # batch, length, heads, head_dim
WARM = 20  # launches before the one that is recorded
PROGRAMS = 2  # that the document has
TILES = 4  # of each of them
MOST_PARTS = 4  # in which O is stored


def new_stamps(request, config):
    """Room for the time stamps of a launch: zeros, int64 (programs, roles, tiles, blocks, states).

    A dynamic scheduler may give a program three times its share of tiles; what is beyond is lost.
    """
    programs = num_programs(request, config)
    share = cdiv(num_tiles(request, config), programs)
    blocks = max(cdiv(request.k.shape[1], config.block_kv), MOST_PARTS * config.consumers + 1)
    shape = programs, len(ROLES) - 1 + config.consumers, 3 * share + 1, blocks, len(STATES)
    return torch.zeros(shape, dtype=torch.int64, device=request.q.device)


def events(stamps):
    """The states that each role of a program entered, in their order, from its part of the stamps
    (roles, tiles, blocks, states): (state, tile of the program, block of keys, cycle).
    """
    consumers = stamps.shape[0] - (len(ROLES) - 1)
    names = ["loader", "storer", *(f"consumer {c}" for c in range(consumers))]
    found = {name: [] for name in names}
    entered = stamps.nonzero().tolist()
    for (role, tile, block, state), cycle in zip(entered, stamps[stamps != 0].tolist()):
        found[names[role]].append((STATES[state][1], tile, block, cycle))
    return {name: sorted(role, key=lambda event: event[3]) for name, role in found.items()}


def record(request, config):
    """The states that each role of each program went through, as the table of roles allows.

    Raises:
        ValueError: a role took a step that the table does not have.
    """
    quantized = () if request.precision is None else (prepare(request),)
    forward = host.forward_quantized if quantized else host.forward
    stamps = new_stamps(request, config)
    for turn in range(WARM + 1):
        recorded = stamps if turn == WARM else torch.zeros_like(stamps)
        forward(request, *quantized, config, recorded)
    found = [events(program) for program in stamps.cpu()]
    for program in found:
        for role, entered in program.items():
            check(role.split()[0], [state for state, _, _, _ in entered])
    return found


def intervals(entered):
    """A role's first tiles as (state, first cycle, last cycle)."""
    ends = [event[3] for event in entered[1:]]
    return [(x[0], x[3], end) for x, end in zip(entered, ends) if x[1] < TILES]


def main():
    """Record one launch."""
    options = parser(__doc__, device=False).parse_args()
    request = make_request(*torch.randn(3, *SHAPE, device="cuda", dtype=torch.bfloat16))
    programs = [
        {"program": number, "roles": {role: intervals(x) for role, x in program.items()}}
        for number, program in enumerate(record(request, default_config(request))[:PROGRAMS])
    ]
    batch, length, heads, head_dim = SHAPE
    what = {"B": batch, "H": heads, "S": length, "D": head_dim, "causal": False}
    what["precision"] = "bf16"
    document = new_document(what=what, programs=programs)
    del document["rows"]
    save(document, options.out)


if __name__ == "__main__":
    main()
