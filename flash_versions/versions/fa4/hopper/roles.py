"""The roles of FA4's kernel for Hopper as one table: the states of each, and what comes next.

`forward.py` follows it, and FA3's `produce` and `attend`, which it runs: where a role enters a
state, they call `trace.enter(..., STATE)` or the schedule's `enter("state", ...)`. An instrumented
launch (`Trace`) notes when, and `check` compares these notes with the table.
"""

from collections.abc import Iterable
from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.tiles.triton_compat import aggregate


class Transition(NamedTuple):
    """A step that a role may take."""

    role: str
    state: str
    then: str
    when: str


START, DONE = "start", "done"
TABLE = (
    Transition("loader", START, "claim", "always"),
    Transition("loader", "claim", "load", "there is a tile"),
    Transition("loader", "load", "load", "the tile sees another block of keys"),
    Transition("loader", "load", "claim", "its K, Q and V have been asked for"),
    Transition("loader", "claim", DONE, "no tile is left"),
    Transition("consumer", START, "await", "always"),
    Transition("consumer", "await", "score", "Q and the first K are there"),
    Transition("consumer", "score", "softmax", "S is there"),
    Transition("consumer", "softmax", "correct", "P is computed"),
    Transition("consumer", "correct", "score", "another block: K and this block's V are there"),
    Transition("consumer", "correct", "drain", "it was the last block"),
    Transition("consumer", "drain", "hand over", "O is complete, and normalised"),
    Transition("consumer", "hand over", "await", "O is in its buffer, where it was taken from"),
    Transition("consumer", "await", DONE, "no tile is left"),
    Transition("storer", START, "idle", "always"),
    Transition("storer", "idle", "store", "a consumer has handed over"),
    Transition("storer", "store", "idle", "the copy has read the buffer"),
    Transition("storer", "idle", DONE, "no tile is left"),
)
MEANING = {
    ("loader", "claim"): "take the next tile from the scheduler",
    ("loader", "load"): "wait for empty slots, ask for a block of K and V, with the first for Q",
    ("consumer", "await"): "wait for Q and K, give blocks back that it does not see",
    (
        "consumer",
        "score",
    ): "issue S, rescale acc where a row was raised, issue P V of the block before",
    ("consumer", "softmax"): "raise references, exponentials, row sums",
    ("consumer", "correct"): "wait for P V, round P; always rescaling is here",
    ("consumer", "drain"): "the last P V, and the division by the row sum",
    ("consumer", "hand over"): "wait for the buffer, put O there, in parts if it is wider",
    ("storer", "idle"): "wait for an O",
    ("storer", "store"): "copy it to memory",
}
ROLES = ("loader", "storer", "consumer")
STATES = tuple(MEANING)  # of all roles, numbered
NUMBERS = {state: i for i, state in enumerate(STATES)}
NUM_STATES = gl.constexpr(len(STATES))
FIXED_ROLES = gl.constexpr(len(ROLES) - 1)  # the others are consumers
LOADER = gl.constexpr(0)
STORER = gl.constexpr(1)


def check(role: str, states: Iterable[str]) -> None:
    """Hold the states that a role went through against the table.

    Raises:
        ValueError: the table has no such step.
    """
    allowed = {(step.state, step.then) for step in TABLE if step.role == role}
    state = START
    for then in (*states, DONE):
        if (state, then) not in allowed:
            raise ValueError(f"{role}: the table has no step from {state!r} to {then!r}.")
        state = then


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
    """When each role is in which state: where time stamps go, int64, one for every program, role,
    tile, block and state, 0 if it was not entered. Without ON there is no instruction.

    `tests/benchmarks/attention/record.py` makes a document of them.
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
