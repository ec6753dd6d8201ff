"""When each role of FA4's kernel is in which state: time stamps from an instrumented launch.

`tests/benchmarks/attention/record.py` makes a document of them.
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.host import num_programs, num_tiles
from flash_versions.versions.fa4.hopper.config import RolesConfig
from flash_versions.versions.fa4.hopper.roles import NUMBERS, ROLES, STATES
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.triton_compat import aggregate

Event = tuple[str, int, int, int]  # state, tile of the program, block of keys, cycle

NUM_STATES = gl.constexpr(len(STATES))
FIXED_ROLES = gl.constexpr(len(ROLES) - 1)  # the others are consumers
LOADER = gl.constexpr(0)
STORER = gl.constexpr(1)
MOST_PARTS = 4  # in which O is stored


@gluon.constexpr_function
def number_of(role, state):
    """A state's number among STATES."""
    return NUMBERS[role, state]


@gluon.jit
def clock():
    """The cycle counter of the SM."""
    return gl.inline_asm_elementwise(
        "mov.u64 $0, %clock64;", "=l", [], dtype=gl.int64, is_pure=False, pack=1
    )


@aggregate
class Trace:
    """Where time stamps go, int64: one for every program, role, tile, block and state, 0 if it
    was not entered. Without ON there is no instruction.
    """

    stamps: gl.tensor  # pointer
    CONSUMERS: gl.constexpr
    ROUNDS: gl.constexpr  # tiles of a program that are written down
    BLOCKS: gl.constexpr  # blocks of keys of a tile
    ON: gl.constexpr

    @gluon.jit
    def enter(self, role, round, block, STATE: gl.constexpr):
        """A role enters a state: in its tile number `round`, for the `block`-th block of keys."""
        if self.ON:
            offset = gl.program_id(0) * (FIXED_ROLES + self.CONSUMERS) + role
            offset = (offset * self.ROUNDS + round) * self.BLOCKS + block
            inside = (round < self.ROUNDS) & (block < self.BLOCKS)
            offset = gl.to_tensor(offset).to(gl.int64) * NUM_STATES + STATE
            gl.store(self.stamps + offset, clock(), mask=inside)


def new_stamps(request: Request, config: RolesConfig) -> torch.Tensor:
    """Room for the time stamps of a launch: zeros, int64 (programs, roles, tiles, blocks, states).

    A dynamic scheduler may give a program three times its share of tiles; what is beyond is lost.
    """
    programs = num_programs(request, config)
    share = cdiv(num_tiles(request, config), programs)
    blocks = max(cdiv(request.k.shape[1], config.block_kv), MOST_PARTS * config.consumers + 1)
    roles = len(ROLES) - 1 + config.consumers
    shape = (programs, roles, 3 * share + 1, blocks, len(STATES))
    return torch.zeros(shape, dtype=torch.int64, device=request.q.device)


def events(stamps: torch.Tensor) -> dict[str, list[Event]]:
    """The states that each role of a program entered, in their order, from its part of the stamps:
    (roles, tiles, blocks, states).
    """
    consumers = stamps.shape[0] - (len(ROLES) - 1)
    names = ["loader", "storer", *(f"consumer {c}" for c in range(consumers))]
    found: dict[str, list[Event]] = {name: [] for name in names}
    entered = stamps.nonzero().tolist()
    for (role, tile, block, state), cycle in zip(entered, stamps[stamps != 0].tolist()):
        found[names[role]].append((STATES[state][1], tile, block, cycle))
    return {name: sorted(role, key=lambda event: event[3]) for name, role in found.items()}
