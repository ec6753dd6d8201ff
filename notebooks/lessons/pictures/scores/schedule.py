"""Which tiles of S a version visits, in which order, and which of them it masks: as data.

One head, S of `q_length` queries by `kv_length` keys. A version's order is that of its kernel:

    paper   Algorithm 1 of FlashAttention 1: one program, KV blocks outside, query tiles inside
    fa1     a program for each query tile, first tile first; KV blocks from the first; all masked
    fa2     with a causal mask the last tile first; only blocks that are cut are masked
    fa3     the same (the portable kernel); its heads take turns, see `starting_orders`
    fa3 hopper, fa4   KV blocks from the last
"""

from collections.abc import Iterable
from typing import NamedTuple

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

    Args:
        version: "paper", "fa1", "fa2", "fa3", "fa3 hopper" or "fa4".
        shape: of the head.
    """
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


class Worked(NamedTuple):
    """A tile of a head, and when an SM (streaming multiprocessor) works on it."""

    sm: int
    head: int
    tile: int
    start: int  # in KV blocks, all of which take one unit of time
    end: int


def walk(order: Iterable[tuple[int, int]], sms: int) -> list[Worked]:
    """Which SM works on which tile, and when, if the SM that is free first takes the next tile.

    Args:
        order: (head, tile) in the order in which they begin. Tile t sees t + 1 KV blocks: the mask
            is causal.
        sms: that work at the same time.
    """
    free, found = [0] * sms, []
    for head, tile in order:
        sm = free.index(min(free))
        found.append(Worked(sm, head, tile, free[sm], free[sm] + tile + 1))
        free[sm] += tile + 1
    return found


def finish_time(order: Iterable[tuple[int, int]], sms: int) -> int:
    """When the last tile is done, in KV blocks."""
    return max(worked.end for worked in walk(order, sms))


def starting_orders(heads: int, tiles: int) -> dict[str, list[tuple[int, int]]]:
    """The orders in which (head, tile) may begin: FA1's, FA2's, and those of all heads together."""
    every, up, down = range(heads), range(tiles), range(tiles - 1, -1, -1)
    return {
        "FA1: head after head, fewest blocks first": [(head, t) for head in every for t in up],
        "FA2: head after head, most blocks first": [(head, t) for head in every for t in down],
        "all heads together, fewest blocks first": [(head, t) for t in up for head in every],
        "FA3: all heads together, most blocks first": [(head, t) for t in down for head in every],
    }
