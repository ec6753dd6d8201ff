"""Interval masks in FA3's kernels for Hopper: what they read of `tiles.intervals.Intervals`.

In the forward, the list of a tile takes the place of the range of its blocks. The starts and ends
of a block's keys arrive in shared memory with the block, because each thread of a consumer needs
those of 16 or more keys. In the backward a thread has two keys, and reads theirs from memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.tiles.algebra import EVER, blocks_in_span
from flash_versions.versions.tiles.triton_compat import aggregate, replaced


@aggregate
class BlockLists:
    """The blocks of keys that tiles of queries see; `of_tile` gives the list of one tile. If not
    ON, a tile has no list, and the pointer is any.
    """

    lists: gl.tensor
    number: gl.tensor  # blocks of this list
    line: gl.tensor  # of `Intervals.bounds`, where the intervals of the tile's keys are
    batch_lines: gl.tensor
    head_lines: gl.tensor
    blocks: gl.tensor
    tiles: gl.tensor
    PARTS: gl.constexpr  # consumers, which have two flags each
    ON: gl.constexpr

    @gluon.jit
    def of_tile(self, sequence, kv_head, tile):
        """The list of a tile of queries."""
        if self.ON:
            line = sequence * self.batch_lines + kv_head * self.head_lines
            own = self.lists + (line.to(gl.int64) * self.tiles + tile) * (2 + self.blocks)
            return replaced(self, lists=own, number=gl.load(own), line=line)
        else:
            return self

    @gluon.jit
    def entry(self, place):
        """The entry at place 0, -1, ... of the list: the number of a block, and flags. The first
        one's address does not depend on how many there are: both are loaded at once.
        """
        return gl.load(self.lists + (1 - place))


@aggregate
class KeySpans:
    """Which queries see a tile of keys; if not ON, the pointers are any."""

    bounds: gl.tensor
    spans: gl.tensor
    line: gl.tensor  # of `Intervals`, of a sequence and a key head
    batch_lines: gl.tensor
    head_lines: gl.tensor
    blocks: gl.tensor
    BLOCK: gl.constexpr  # keys of a block
    ON: gl.constexpr

    @gluon.jit
    def of_head(self, sequence, kv_head):
        """Those of a sequence and a key head."""
        line = sequence * self.batch_lines + kv_head * self.head_lines
        return replaced(self, line=line)

    @gluon.jit
    def query_blocks(self, key, KEYS: gl.constexpr, BLOCK_Q: gl.constexpr):
        """The blocks of queries that see KEYS keys, as `algebra.block_range` gives them."""
        spans = self.spans + self.line.to(gl.int64) * self.blocks * 4
        first_start, last_start = gl.to_tensor(EVER), gl.to_tensor(0)
        first_end, last_end = gl.to_tensor(EVER), gl.to_tensor(0)
        for i in gl.static_range(KEYS // self.BLOCK):
            span = spans + (key // self.BLOCK + i) * 4
            exists = key // self.BLOCK + i < self.blocks
            first_start = gl.minimum(first_start, gl.load(span, mask=exists, other=EVER))
            last_start = gl.maximum(last_start, gl.load(span + 1, mask=exists, other=EVER))
            first_end = gl.minimum(first_end, gl.load(span + 2, mask=exists, other=0))
            last_end = gl.maximum(last_end, gl.load(span + 3, mask=exists, other=0))
        return blocks_in_span(first_start, last_start, first_end, last_end, 1, BLOCK_Q)

    @gluon.jit
    def of_keys(self, k_pos):
        """(first, last) query that sees each of these keys."""
        exists = k_pos < self.blocks * self.BLOCK
        place = self.bounds + (self.line.to(gl.int64) * self.blocks * 2) * self.BLOCK
        place += k_pos // self.BLOCK * 2 * self.BLOCK + k_pos % self.BLOCK
        first = gl.load(place, mask=exists, other=EVER)
        return first, gl.load(place + self.BLOCK, mask=exists, other=0) - 1


@gluon.jit
def fill_keys(problem, buffers, stage, k, bounds, sequence, kv_head, block):
    """Producer: load a block of keys, with their intervals if they have any."""
    box = problem.kv_box(sequence, kv_head, block * problem.BLOCK_KV)
    if problem.lists.ON:
        buffers.k.wait_empty(stage)
        buffers.bounds.wait_empty(stage)
        buffers.k.load_with(
            stage, k, box, buffers.bounds.tiles, bounds, [problem.lists.line, 0, block, 0]
        )
    else:
        buffers.k.fill(stage, k, box)


@gluon.jit
def mask_listed(s, problem, query, entry, bounds, stage, CONSUMER: gl.constexpr):
    """Scores of a consumer's queries with a listed block of keys, -inf where the key is not seen;
    `bounds` gives the slot of the keys' intervals back.
    """
    KEYS: gl.constexpr = s.shape[1]
    columns: gl.constexpr = gl.SliceLayout(0, s.type.layout)
    both = bounds.tiles.index(stage.slot).reshape([2 * KEYS])
    rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
    q_pos = problem.positions(query, s.shape[0], rows)
    if ((entry >> 2 * CONSUMER) & 1) != 0:
        starts = both.slice(0, KEYS).load(columns)
        s = gl.where(q_pos[:, None] >= starts[None, :], s, float("-inf"))
    if ((entry >> 2 * CONSUMER + 1) & 1) != 0:
        ends = both.slice(KEYS, KEYS).load(columns)
        s = gl.where(q_pos[:, None] < ends[None, :], s, float("-inf"))
    bounds.release_loaded(stage)
    return s
