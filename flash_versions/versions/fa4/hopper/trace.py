"""When each role of FA4's kernel is in which state: time stamps from an instrumented launch.

`tests/benchmarks/attention/record.py` makes a document of them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa4.hopper.roles import NUMBERS, ROLES, STATES
from flash_versions.versions.tiles.triton_compat import aggregate

NUM_STATES = gl.constexpr(len(STATES))
FIXED_ROLES = gl.constexpr(len(ROLES) - 1)  # the others are consumers
LOADER = gl.constexpr(0)
STORER = gl.constexpr(1)


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
    def enter(self, role, round, block, KIND: gl.constexpr, STATE: gl.constexpr):
        """A role of a kind enters a state: in its tile number `round`, for the `block`-th block of
        keys.
        """
        if self.ON:
            NUMBER: gl.constexpr = number_of(KIND, STATE)
            offset = gl.program_id(0) * (FIXED_ROLES + self.CONSUMERS) + role
            offset = (offset * self.ROUNDS + round) * self.BLOCKS + block
            inside = (round < self.ROUNDS) & (block < self.BLOCKS)
            offset = gl.to_tensor(offset).to(gl.int64) * NUM_STATES + NUMBER
            gl.store(self.stamps + offset, clock(), mask=inside)
