"""Which tiles of S a version visits, in which order, and which of them it masks: as data.

One head, S of `q_length` queries by `kv_length` keys. A version's order is that of its kernel:

    paper   Algorithm 1 of FlashAttention 1: one program, KV blocks outside, query tiles inside
    fa1     a program for each query tile, first tile first; KV blocks from the first; all masked
    fa2     with a causal mask the last tile first; only blocks that are cut are masked
    fa3     the same (the portable kernel); its heads take turns, see `walk` in tiles.py
    fa3 hopper, fa4   KV blocks from the last
"""

from typing import NamedTuple

ORDERS = ("paper", "fa1", "fa2", "fa3", "fa3 hopper", "fa4")
BACKWARDS = ("fa3 hopper", "fa4")


class Visit(NamedTuple):
    """A block of keys folded into a tile of queries."""

    program: int  # by number: that is how programs are started
    tile: int
    block: int
    masked: bool


class Shape(NamedTuple):
    """One head and how it is cut into tiles."""

    q_length: int
    kv_length: int
    block_q: int
    block_kv: int
    causal: bool

    @property
    def tiles(self) -> int:
        """Query tiles."""
        return -(-self.q_length // self.block_q)

    def blocks(self, tile: int) -> tuple[int, int]:
        """What a query tile sees, as `tile.block_range` has it: (end, full_end); blocks before end
        are visited, those before full_end are seen in full by every query of the tile.
        """
        first = tile * self.block_q
        last = min(first + self.block_q, self.q_length) - 1
        offset = self.kv_length - self.q_length
        low, high = (
            min(pos + offset, self.kv_length - 1) if self.causal else self.kv_length - 1
            for pos in (first, last)
        )
        end = max(-(-(high + 1) // self.block_kv), 0)
        return end, min(max(low + 1, 0) // self.block_kv, end)


def square(blocks: int, causal: bool) -> Shape:
    """As many query tiles as KV blocks, of one size."""
    return Shape(2 * blocks, 2 * blocks, 2, 2, causal)


def visits(version: str, shape: Shape) -> list[Visit]:
    """Every visit, program after program (they run at the same time), each in its order.

    Raises:
        ValueError: there is no such order.
    """
    if version not in ORDERS:
        raise ValueError(f"version={version!r} has no order here; {', '.join(ORDERS)} have.")
    if version == "paper":
        blocks = -(-shape.kv_length // shape.block_kv)
        return [
            Visit(0, tile, block, True)
            for block in range(blocks)
            for tile in range(shape.tiles)
            if block < shape.blocks(tile)[0]
        ]
    found = []
    for program in range(shape.tiles):
        last_first = shape.causal and version != "fa1"
        tile = shape.tiles - 1 - program if last_first else program
        end, full_end = shape.blocks(tile)
        blocks_ = range(end - 1, -1, -1) if version in BACKWARDS else range(end)
        found += [Visit(program, tile, j, version == "fa1" or j >= full_end) for j in blocks_]
    return found


class Walked(NamedTuple):
    """A tile of a head that a program works on."""

    program: int
    head: int
    tile: int
    start: int  # in KV blocks, all of which take one unit of time
    end: int


SCHEDULERS = ("grid", "static", "dynamic")


def walk(scheduler: str, shape: Shape, heads: int, programs: int, section: int = 1) -> list[Walked]:
    """Which of `programs` SMs works on which tile, and when; see `tile_scheduler.Scheduler`.

    Args:
        scheduler: "grid", a program for each tile, started where one has ended; "static", rounds
            back and forth; "dynamic", who is free claims the next tile. A grid and a dynamic walk
            differ in what starting a program costs, which is not in this picture.
        shape: of a head.
        heads: that there are.
        programs: that run at the same time.
        section: heads whose tiles take turns where there is a mask, the heaviest tiles of all of
            them first; 1 is FA2's order, head by head.
    """
    if scheduler not in SCHEDULERS:
        raise ValueError(f"scheduler={scheduler!r} is unknown; {', '.join(SCHEDULERS)} are there.")
    free, found = [0] * programs, []
    for number in range(shape.tiles * heads):
        head, tile = located(number, shape, heads, section)
        if scheduler == "static":
            round_, place = divmod(number, programs)
            program = programs - 1 - place if round_ % 2 else place
        else:
            program = min(range(programs), key=lambda p: (free[p], p))
        start = free[program]
        free[program] += max(shape.blocks(tile)[0], 1)
        found.append(Walked(program, head, tile, start, free[program]))
    return found


def located(number: int, shape: Shape, heads: int, section: int) -> tuple[int, int]:
    """Number of a tile -> (its head, its place in it), as `QueryProblem.locate` has it."""
    if not shape.causal:
        return divmod(number, shape.tiles)
    first = number // (section * shape.tiles) * section
    place, turn = divmod(number - first * shape.tiles, min(section, heads - first))
    return first + turn, shape.tiles - 1 - place
