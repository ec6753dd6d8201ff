"""What FA3's kernel for Hopper computes, and in which tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.fp8.pairs import are_pairs, hidden, paired
from flash_versions.versions.fa3.hopper.head_mods import HeadMods, in_log2
from flash_versions.versions.fa3.hopper.intervals import BlockLists
from flash_versions.versions.tiles.algebra import first_visible, last_visible, seen_blocks
from flash_versions.versions.tiles.ragged import box_in_sequence, planned_tile, planned_tiles
from flash_versions.versions.tiles.score_mods import tanh
from flash_versions.versions.tiles.tile_scheduler import blocks_of_piece, find_piece
from flash_versions.versions.tiles.triton_compat import aggregate, as_tensors, replaced
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

COUNTS = [
    "q_length", "kv_length", "heads", "batch", "section",
    "window_left", "window_right", "scale_log2", "cap_scale",
]  # fmt: skip
MORE_COUNTS = [
    "kv_apart", "slopes_batch_stride", "slopes_head_stride",
    "batch_lines", "head_lines", "listed_blocks", "listed_tiles",
]  # fmt: skip


@aggregate
class QueryProblem:
    """What is computed, and in which tiles. `locate` gives the problem of a tile's own sequence and
    head: code that has it does not ask how sequences lie in memory.
    """

    plan: gl.tensor  # of the tiles of ragged sequences, see `varlen_scheduler.Tiles`; else anything
    mods: HeadMods
    lists: BlockLists  # of interval masks
    rows: gl.tensor  # of q, all sequences together if they are packed
    kv_apart: gl.tensor  # rows of k from one sequence to the next; 0 if packed
    q_first: gl.tensor  # the row of q where the sequence begins; 0 if not packed
    kv_first: gl.tensor  # of k, the same, whether packed or not
    q_length: gl.tensor
    kv_length: gl.tensor
    heads: gl.tensor
    batch: gl.tensor
    section: gl.tensor  # heads, of all sequences, whose tiles are worked on together
    window_left: gl.tensor
    window_right: gl.tensor
    scale_log2: gl.tensor
    cap_scale: gl.tensor
    piece: gl.tensor  # of a tile that TAIL programs share, see `find_piece`
    TAIL: gl.constexpr
    GROUP: gl.constexpr
    HEADS: gl.constexpr  # of a group, whose queries are rows of one tile, head by head
    LEFT: gl.constexpr  # the window has a left bound
    RIGHT: gl.constexpr
    EDGE: gl.constexpr  # the keys end within a block
    CUT: gl.constexpr  # blocks after a consumer's first one may have to be masked, too
    UNEVEN: gl.constexpr  # consumers may see unlike parts of what their tile visits
    CAP: gl.constexpr
    RAGGED: gl.constexpr  # sequences have lengths of their own
    PACKED: gl.constexpr  # and their queries follow each other in memory
    BLOCK_Q: gl.constexpr  # rows of a tile
    BLOCK_KV: gl.constexpr

    @gluon.constexpr_function
    def queries(self, ROWS):
        """How many queries have so many rows of a tile, or of a consumer."""
        return ROWS // self.HEADS

    @gluon.jit
    def num_tiles(self):
        """Query tiles of all heads and sequences."""
        if self.RAGGED:
            return planned_tiles(self.plan) * (self.heads // self.HEADS)
        else:
            tiles = gl.cdiv(self.q_length, self.queries(self.BLOCK_Q))
            return tiles * (self.heads // self.HEADS) * self.batch

    @gluon.jit
    def num_pieces(self):
        """How many times a program takes a tile, or a piece of one that is in the last wave."""
        tiles = self.num_tiles()
        return tiles + tiles % gl.num_programs(0) * (self.TAIL - 1) if self.TAIL > 1 else tiles

    @gluon.jit
    def locate(self, tile):
        """Tile number -> (the problem of its sequence and head, first query, first head, sequence).

        Tiles of a head follow each other, as they read the same keys. Where later queries see more
        keys, the heads of a section take turns instead, and their tiles with the most keys come
        first: what takes longest begins first. The plan of ragged sequences has this order, too. In
        q and o all packed sequences are sequence 0.
        """
        heads, queries = self.heads // self.HEADS, self.queries(self.BLOCK_Q)
        if self.TAIL > 1:
            tiles = self.num_tiles()
            tile, piece = find_piece(tile, tiles - tiles % gl.num_programs(0), self.TAIL)
            self = replaced(self, piece=piece)
        if self.RAGGED:
            tiles, rows = planned_tiles(self.plan), heads
        else:
            tiles, rows = gl.cdiv(self.q_length, queries), heads * self.batch
        if self.RAGGED or self.RIGHT or self.lists.ON:
            section = self.section // self.HEADS
            first = tile // (section * tiles) * section
            width = gl.minimum(section, rows - first)
            position = tile - first * tiles
            row = first + position % width
            tile = position // width
            if not self.RAGGED:
                tile = tiles - 1 - tile
        else:
            row = tile // tiles
            tile = tile % tiles
        if self.RAGGED:
            sequence, tile, q_first, q_length, kv_first, kv_length = planned_tile(self.plan, tile)
            kv_first += sequence * self.kv_apart
            head = row * self.HEADS
            mine = self.of_tile(tile, sequence, head, q_first, q_length, kv_first, kv_length)
            return mine, tile * queries, head, sequence * 0 if self.PACKED else sequence
        else:
            head, sequence = row % heads * self.HEADS, row // heads
            mine = self.of_tile(
                tile, sequence, head, self.q_first, self.q_length, self.kv_first, self.kv_length
            )
            return mine, tile * queries, head, sequence

    @gluon.jit
    def of_tile(self, tile, sequence, head, q_first, q_length, kv_first, kv_length):
        """The problem of a tile of a sequence and a head."""
        mods = self.mods.of_head(sequence, head, self.scale_log2)
        lists = self.lists.of_tile(sequence, head // self.GROUP, tile)
        return replaced(
            self, mods=mods, lists=lists, q_first=q_first, q_length=q_length, kv_first=kv_first,
            kv_length=kv_length
        )  # fmt: skip

    @gluon.jit
    def q_box(self, sequence, head, query):
        """The coordinates of a box of Q, of O or of its gradient."""
        if self.PACKED:
            return box_in_sequence(self.q_first, self.q_length, head, query)
        else:
            return sequence, head, query, 0

    @gluon.jit
    def kv_box(self, sequence, kv_head, key):
        """The coordinates of a box of K or V."""
        if self.RAGGED:
            return box_in_sequence(self.kv_first, self.kv_length, kv_head, key)
        else:
            return sequence, kv_head, key, 0

    @gluon.jit
    def positions(self, query, ROWS: gl.constexpr, layout: gl.constexpr):
        """The queries of a consumer's rows: those of its first head, then those of the next."""
        rows = gl.arange(0, ROWS, layout=layout)
        if self.HEADS > 1:
            rows = rows % self.queries(ROWS)
        return query + rows

    @gluon.jit
    def store_lse(self, lse_out, lse, sequence, head, query):
        """Write the LSE of a consumer's rows to lse_out (batch, heads, rows)."""
        layout: gl.constexpr = lse.type.layout
        at = self.positions(query, lse.shape[0], layout)
        line = lse_out + (sequence * self.heads + head).to(gl.int64) * self.rows + self.q_first
        place = line + at
        if self.HEADS > 1:
            place += self.heads_of_rows(lse.shape[0], layout).to(gl.int64) * self.rows
        gl.store(place, lse, mask=at < self.q_length)

    @gluon.jit
    def heads_of_rows(self, ROWS: gl.constexpr, layout: gl.constexpr):
        """Which head of its tile each of a consumer's rows belongs to."""
        return gl.arange(0, ROWS, layout=layout) // self.queries(ROWS)

    @gluon.jit
    def sinks(self, ROWS: gl.constexpr, layout: gl.constexpr):
        """The sinks of a consumer's rows, in log2 units; one number if they have one head."""
        if self.HEADS > 1:
            return in_log2(gl.load(self.mods.sinks + self.heads_of_rows(ROWS, layout)))
        else:
            return self.mods.sink

    @gluon.jit
    def visited(self, query):
        """(begin, end): a tile visits what is at the places end - 1 .. begin, see `entry`."""
        if self.lists.ON:
            return 1 - self.lists.number, gl.to_tensor(1)
        else:
            begin, _, _, end = self.blocks(query, self.BLOCK_Q)
            if self.TAIL > 1:
                begin, end = blocks_of_piece(begin, end, self.piece, self.TAIL)
            return begin, end

    @gluon.jit
    def seen(self, query, begin, end):
        """(begin, end) of what a consumer's rows see of the places that their tile visits; at least
        one, and of ragged sequences one if there are no such rows.
        """
        if self.UNEVEN:
            own_begin, _, _, own_end = self.blocks(query, WARPGROUP_ROWS)
            begin = gl.minimum(gl.maximum(begin, own_begin), end - 1)
            end = gl.maximum(gl.minimum(end, own_end), begin + 1)
            if self.RAGGED:
                end = gl.where(query < self.q_length, end, begin + 1)
        return begin, end

    @gluon.jit
    def entry(self, place):
        """What a tile visits at a place: a block, which is the place itself; or a block and flags
        from its list.
        """
        return self.lists.entry(place) if self.lists.ON else place

    @gluon.jit
    def block_of(self, entry):
        """The number of a block that is visited."""
        return entry >> 2 * self.lists.PARTS if self.lists.ON else entry

    @gluon.jit
    def blocks(self, query, ROWS: gl.constexpr):
        """The KV blocks that the queries of ROWS rows see, as `algebra.block_range` gives them:
        (begin, full_begin, full_end, end); at least one, which then is masked in full.
        """
        left = self.window_left if self.LEFT else None
        right = self.window_right if self.RIGHT else None
        last = gl.minimum(query + self.queries(ROWS), self.q_length) - 1
        offset = self.kv_length - self.q_length
        begin, full_begin, full_end, end = seen_blocks(
            query, last, offset, left, right, self.kv_length, self.BLOCK_KV
        )
        return begin, full_begin, full_end, gl.maximum(end, begin + 1)

    @gluon.jit
    def masked(self, s, query, block):
        """Scores of a consumer's queries with a block of keys, or pairs of them, -inf where the key
        is not seen.
        """
        STEP: gl.constexpr = 2 if are_pairs(s) else 1
        left = self.window_left if self.LEFT else None
        right = self.window_right if self.RIGHT else None
        rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
        q_pos = self.positions(query, s.shape[0], rows)
        k_pos = STEP * gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
        k_pos = (k_pos + block * self.BLOCK_KV)[None, :]
        offset = self.kv_length - self.q_length
        first = first_visible(q_pos, offset, left)[:, None]
        last = last_visible(q_pos, offset, right, self.kv_length)[:, None]
        seen = k_pos <= last
        if self.LEFT:
            seen = seen & (k_pos >= first)
        if are_pairs(s):
            second_seen = k_pos < last
            if self.LEFT:
                second_seen = second_seen & (k_pos + 1 >= first)
            return hidden(s, seen, second_seen)
        else:
            return gl.where(seen, s, float("-inf"))

    @gluon.jit
    def capped(self, s):
        """Scores with softcap, see `score_mods.cap_scores`."""
        return tanh(s * self.cap_scale) if self.CAP else s

    @gluon.jit
    def scored(self, s, query, block):
        """Products of a consumer's queries with a block of keys as scores: softcap, then ALiBi; or,
        of products in fp16, as pairs of scores.
        """
        if s.dtype == gl.float16:
            gl.static_assert(not (self.CAP or self.mods.ALIBI or self.lists.ON), "fp32 scores only")
            s = paired(s)
        else:
            s = self.capped(s)
        if self.mods.ALIBI:
            rows: gl.constexpr = gl.SliceLayout(1, s.type.layout)
            q_pos = self.positions(query, s.shape[0], rows)
            k_pos = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
            own_place = q_pos + self.kv_length - self.q_length - block * self.BLOCK_KV
            s = self.mods.biased(s, own_place[:, None] - k_pos[None, :])
        return s


@gluon.jit
def make_query_problem(
    plan, slopes, sinks, lists, q_length, kv_length, heads, batch, section, window_left,
    window_right, scale_log2, cap_scale, kv_apart, slopes_batch_stride, slopes_head_stride,
    batch_lines, head_lines, listed_blocks, listed_tiles, HEADS: gl.constexpr, GROUP: gl.constexpr,
    LEFT: gl.constexpr, RIGHT: gl.constexpr, EDGE: gl.constexpr, CUT: gl.constexpr,
    UNEVEN: gl.constexpr, CAP: gl.constexpr, RAGGED: gl.constexpr, PACKED: gl.constexpr,
    ALIBI: gl.constexpr, SINK: gl.constexpr, LISTED: gl.constexpr, CONSUMERS: gl.constexpr,
    BLOCK_KV: gl.constexpr, TAIL: gl.constexpr = 1
):  # fmt: skip
    """The problem of a kernel's arguments, in their order."""
    strides = slopes_batch_stride, slopes_head_stride, 0.0, 0.0
    mods = HeadMods(slopes, sinks, *as_tensors(strides), ALIBI, SINK)  # type: ignore[call-arg]
    lines = as_tensors((0, 0, batch_lines, head_lines, listed_blocks, listed_tiles))
    numbers = as_tensors((
        q_length, kv_apart, 0, 0, q_length, kv_length, heads, batch, section, window_left,
        window_right, scale_log2, cap_scale, 0
    ))  # fmt: skip
    block_lists = BlockLists(lists, *lines, CONSUMERS, LISTED)  # type: ignore[call-arg]
    return QueryProblem(  # type: ignore[call-arg]
        plan, mods, block_lists, *numbers, TAIL, GROUP, HEADS, LEFT, RIGHT, EDGE, CUT, UNEVEN, CAP,
        RAGGED, PACKED, CONSUMERS * WARPGROUP_ROWS, BLOCK_KV
    )  # fmt: skip
