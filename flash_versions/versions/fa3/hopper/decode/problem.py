"""What the decoding kernel for Hopper computes, and which part of it a program does."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.head_mods import in_log2
from flash_versions.versions.tiles.algebra import LOG2E, first_visible, last_visible, seen_blocks
from flash_versions.versions.tiles.score_mods import tanh
from flash_versions.versions.tiles.triton_compat import aggregate
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, no_sums


@gluon.jit
def add(a, b):
    """What a scan sums up."""
    return a + b


@aggregate
class KeyRows:
    """Where the keys of the sequences lie: `tiles.sequences.Sequences` in Gluon."""

    lengths: gl.tensor  # pointer to kv_lengths; anything if there are none, as all that follows
    starts: gl.tensor
    cuts: gl.tensor  # pointer to cu_seqlens_k, of which only the differences count
    table: gl.tensor
    table_stride: gl.tensor
    apart: gl.tensor  # rows of k from one sequence, or one page, to the next
    most: gl.tensor  # no sequence has more keys
    LENGTHS: gl.constexpr
    STARTS: gl.constexpr
    CUTS: gl.constexpr
    PAGE_SIZE: gl.constexpr  # 0: no pages

    @gluon.jit
    def span(self, sequence):
        """The first key of a sequence in its rows, and how many it has; both are clamped."""
        end = sequence * 0 + self.most
        if self.CUTS:
            cut = gl.load(self.cuts + sequence + 1) - gl.load(self.cuts + sequence)
            end = gl.minimum(cut.to(gl.int32), end)
        if self.LENGTHS:
            given = gl.load(self.lengths + sequence)
            end = gl.minimum(gl.maximum(given, 0), end).to(gl.int32)
        first = sequence * 0
        if self.STARTS:
            given = gl.load(self.starts + sequence)
            first = gl.minimum(gl.maximum(given, 0), end).to(gl.int32)
        return first, end - first

    @gluon.jit
    def page(self, sequence, number, exists):
        """A page of a sequence; 0 if it does not exist."""
        line = self.table + sequence.to(gl.int64) * self.table_stride
        return gl.load(line + number, mask=exists, other=0).to(gl.int32)

    @gluon.jit
    def box(self, sequence, first, length, key, BOX: gl.constexpr):
        """Coordinates of the box at `key`: (first row of its sequence or page, valid rows there,
        the box's first row counted from that row).
        """
        if self.PAGE_SIZE == 0:
            return sequence * self.apart + first, length, key
        else:
            number = key // self.PAGE_SIZE
            before = number * self.PAGE_SIZE
            page = self.page(sequence, number, key < length)
            inside = gl.minimum(gl.maximum(length - before, 0), self.PAGE_SIZE)
            return page * self.apart, inside, key - before


@aggregate
class Share:
    """A part of the line of all blocks, see `fa2.stream_k`, and how long all shares are."""

    number: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    sequence: gl.tensor  # the first one
    start: gl.tensor  # the block with which that begins
    blocks: gl.tensor  # of a share; of a split, the first one of its sequence
    longer: gl.tensor  # the first so many shares have one block more; of a split, the last one

    @gluon.jit
    def with_block(self, block):
        """The share that has a block."""
        after = (block - self.longer) // gl.maximum(self.blocks, 1)
        return gl.maximum(block // (self.blocks + 1), after)


@aggregate
class Piece:
    """The part of a sequence that is in a share."""

    first: gl.tensor  # the sequence's first key in its rows
    length: gl.tensor  # the sequence's keys
    begin: gl.tensor  # blocks of the sequence
    end: gl.tensor
    full_begin: gl.tensor  # blocks outside [full_begin, full_end) are masked
    full_end: gl.tensor
    stop: gl.tensor  # where the next sequence starts in the line


@aggregate
class ScoreChanges:
    """What happens to scores; `ScoreMods` in Gluon."""

    slopes: gl.tensor  # pointer to ALiBi slopes (batch, heads); else anything, as all that follows
    sinks: gl.tensor
    slopes_batch_stride: gl.tensor
    slopes_head_stride: gl.tensor
    scale_log2: gl.tensor
    cap_scale: gl.tensor
    CAP: gl.constexpr
    ALIBI: gl.constexpr
    SINK: gl.constexpr


@aggregate
class Queries:
    """The rows of a warpgroup's tile: row r is query r // GROUP in head r % GROUP of the group."""

    place: gl.tensor  # a query's own place among the keys
    first_key: gl.tensor
    last_key: gl.tensor
    slope: gl.tensor


@aggregate
class DecodeProblem:
    """What is computed, for one key head, and in which blocks."""

    keys: KeyRows
    mods: ScoreChanges
    kv_head: gl.tensor
    q_length: gl.tensor
    kv_heads: gl.tensor
    window_left: gl.tensor
    window_right: gl.tensor
    shares: gl.tensor  # of a key head; with SPLIT, the most splits that a sequence has
    GROUP: gl.constexpr
    LEFT: gl.constexpr  # the window has a left bound
    RIGHT: gl.constexpr
    BLOCK_KV: gl.constexpr
    BOX: gl.constexpr  # keys of a box, some of which make a block
    SPLIT: gl.constexpr  # blocks of a split; 0: shares are as long as fill the GPU
    SINK_LAST: gl.constexpr  # a sink is merged behind all splits

    @gluon.jit
    def blocks(self, length):
        """The blocks that the queries see of so many keys, as `algebra.block_range` gives them."""
        left = self.window_left if self.LEFT else None
        right = self.window_right if self.RIGHT else None
        offset = length - self.q_length
        first, last = offset * 0, offset * 0 + (self.q_length - 1)
        return seen_blocks(first, last, offset, left, right, length, self.BLOCK_KV)

    @gluon.jit
    def find_split(self, number):
        """A split as a share with one piece; with none if its sequence does not reach so far."""
        sequence, split = number // self.shares, number % self.shares
        _, length = self.keys.span(sequence)
        begin, _, _, end = self.blocks(length)
        first, last = begin // self.SPLIT, gl.maximum(end - 1, begin) // self.SPLIT
        exists = ((split >= first) & (split <= last)).to(gl.int32)
        return Share(split, begin * 0, exists, sequence, begin * 0, first, last)

    @gluon.jit
    def find_share(self, number, batch, BATCH: gl.constexpr):
        """A share of the line of all blocks; see `fa2.stream_k.find_share`."""
        shares = self.shares
        SIZE: gl.constexpr = BATCH // 128
        layout: gl.constexpr = gl.BlockedLayout([SIZE], [32], [4], [0])
        i = gl.arange(0, BATCH, layout=layout)
        _, length = self.keys.span(gl.minimum(i, batch - 1))
        first, _, _, end = self.blocks(length)
        own = gl.where(i < batch, gl.maximum(end - first, 1), 0)
        ends = gl.associative_scan(own, 0, add)
        total = gl.sum(own, 0)
        blocks, longer = total // shares, total % shares
        begin = number * blocks + gl.minimum(number, longer)
        stop = begin + blocks + (number < longer).to(gl.int32)
        before = (ends <= begin) & (i < batch)
        sequence = gl.sum(before.to(gl.int32), 0)
        start = gl.sum(gl.where(before, own, 0), 0)
        return Share(number, begin, stop, sequence, start, blocks, longer)

    @gluon.jit
    def piece(self, share, sequence, start):
        """The part of a sequence that is in a share; the sequence starts there in the line."""
        first, length = self.keys.span(sequence)
        begin, full_begin, full_end, end = self.blocks(length)
        if self.SPLIT > 0:
            piece_begin = gl.maximum(begin, share.number * self.SPLIT)
            piece_end = gl.minimum(end, (share.number + 1) * self.SPLIT)
            return Piece(first, length, piece_begin, piece_end, full_begin, full_end, start + 1)
        stop = start + gl.maximum(end - begin, 1)
        piece_begin = begin + gl.maximum(share.begin - start, 0)
        piece_end = gl.minimum(begin + share.end - start, end)
        return Piece(first, length, piece_begin, piece_end, full_begin, full_end, stop)

    @gluon.jit
    def heads_of(self, row):
        """The query heads of rows."""
        return self.kv_head * self.GROUP + row % self.GROUP

    @gluon.jit
    def queries(self, sequence, length):
        """The rows of a tile, of a sequence of so many keys."""
        left = self.window_left if self.LEFT else None
        right = self.window_right if self.RIGHT else None
        row = gl.arange(0, WARPGROUP_ROWS, layout=score_rows(self.BLOCK_KV))
        place = row // self.GROUP + (length - self.q_length)
        slope = row.to(gl.float32)
        if self.mods.ALIBI:
            at = sequence.to(gl.int64) * self.mods.slopes_batch_stride
            at += self.heads_of(row) * self.mods.slopes_head_stride
            slope = gl.load(self.mods.slopes + at, mask=self.exist(row), other=0.0)
            slope = slope.to(gl.float32) * (LOG2E / self.mods.scale_log2)
        return Queries(
            place, first_visible(place, 0, left), last_visible(place, 0, right, length), slope
        )

    @gluon.jit
    def exist(self, row):
        """Which rows of a tile are queries."""
        return row < self.q_length * self.GROUP

    @gluon.jit
    def first_state(self, is_first):
        """(row_max, row_sum) before the first key; a sink counts in a sequence's first piece, and
        of splits when all are merged.
        """
        layout: gl.constexpr = score_rows(self.BLOCK_KV)
        row_max = gl.full([WARPGROUP_ROWS], float("-inf"), gl.float32, layout)
        row_sum = no_sums(self.BLOCK_KV, accumulator_layout(self.BLOCK_KV))
        if self.mods.SINK and not self.SINK_LAST:
            row = gl.arange(0, WARPGROUP_ROWS, layout=layout)
            row_max = self.sinks(row, self.exist(row) & is_first)
            row_sum = row_sum.spread(gl.where(row_max == float("-inf"), 0.0, 1.0))
        return row_max, row_sum

    @gluon.jit
    def sinks(self, row, exist):
        """The sinks of the rows that exist, in log2 units."""
        at = self.mods.sinks + self.heads_of(row)
        return in_log2(gl.load(at, mask=exist, other=float("-inf")))

    @gluon.jit
    def scored(self, s, queries, block):
        """Products with a block of keys as scores: softcap, then ALiBi."""
        if self.mods.CAP:
            s = tanh(s * self.mods.cap_scale)
        if self.mods.ALIBI:
            distance = queries.place[:, None] - self.keys_of(s, block)[None, :]
            s = s - queries.slope[:, None] * gl.abs(distance).to(gl.float32)
        return s

    @gluon.jit
    def masked(self, s, queries, block):
        """Scores, -inf where the key is not seen."""
        key = self.keys_of(s, block)
        visible = key[None, :] <= queries.last_key[:, None]
        if self.LEFT:
            visible = visible & (key[None, :] >= queries.first_key[:, None])
        return gl.where(visible, s, float("-inf"))

    @gluon.jit
    def keys_of(self, s, block):
        """The numbers of a block's keys."""
        key = gl.arange(0, self.BLOCK_KV, layout=gl.SliceLayout(0, s.type.layout))
        return key + block * self.BLOCK_KV

    @gluon.jit
    def vectors(self, batch, row):
        """Which rows of a contiguous (batch, M, heads, dim) tensor the rows of a tile are."""
        heads = self.kv_heads * self.GROUP
        query = batch.to(gl.int64) * self.q_length + row // self.GROUP
        return query * heads + self.heads_of(row)

    @gluon.jit
    def values(self, batch, row):
        """Where the numbers of rows are in a contiguous (batch, heads, M) tensor."""
        heads = self.kv_heads * self.GROUP
        head = batch.to(gl.int64) * heads + self.heads_of(row)
        return head * self.q_length + row // self.GROUP


@gluon.constexpr_function
def score_rows(block_kv):
    """The layout of one number for each row of the scores."""
    return gl.SliceLayout(1, accumulator_layout(block_kv))
