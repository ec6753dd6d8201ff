"""What FA3's backward for Hopper computes, and in which tiles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.backward.deterministic import Turns
from flash_versions.versions.fa3.hopper.backward.split_groups import LEAST_STEPS
from flash_versions.versions.fa3.hopper.head_mods import HeadMods
from flash_versions.versions.fa3.hopper.intervals import KeySpans
from flash_versions.versions.fa3.hopper.problem import QueryProblem
from flash_versions.versions.tiles.algebra import first_visible, last_visible, seen_blocks
from flash_versions.versions.tiles.ragged import box_in_sequence, planned_tile, planned_tiles
from flash_versions.versions.tiles.score_mods import tanh
from flash_versions.versions.tiles.tile_scheduler import blocks_of_piece, find_piece
from flash_versions.versions.tiles.triton_compat import aggregate, replaced


@aggregate
class KeyProblem:
    """The call and its tiling: a tile of keys, and the blocks of queries that see it. `locate`
    gives the problem of a tile's own sequence, as `QueryProblem` does, and `of_head` that of a
    head.

    Where groups are divided (`split_groups.py`), each part counts as a key head, and a group is its
    part.
    """

    plan: gl.tensor  # of the tiles of ragged sequences, see `varlen_scheduler.Tiles`; else anything
    mods: HeadMods
    spans: KeySpans  # of interval masks
    turns: Turns
    sequence: gl.tensor  # its number among all, packed or not
    kv_apart: gl.tensor  # rows of k from one sequence to the next; 0 if packed
    q_first: gl.tensor  # the row of q where the sequence begins; 0 if not packed
    kv_first: gl.tensor
    padded_first: gl.tensor  # where the sequence begins in the workspace, see `rows.Workspace`
    q_length: gl.tensor
    kv_length: gl.tensor
    kv_heads: gl.tensor
    batch: gl.tensor
    section: gl.tensor  # key heads, of all sequences, whose tiles are worked on together
    window_left: gl.tensor
    window_right: gl.tensor
    scale: gl.tensor
    scale_log2: gl.tensor
    cap_scale: gl.tensor
    piece: gl.tensor  # of a tile that TAIL programs share, see `find_piece`
    GROUP: gl.constexpr
    PARTS: gl.constexpr  # of a group
    TAIL: gl.constexpr
    LEFT: gl.constexpr  # the window has a left bound
    RIGHT: gl.constexpr
    EDGE: gl.constexpr  # the keys end within a tile
    CAP: gl.constexpr
    RAGGED: gl.constexpr  # sequences have lengths of their own
    PACKED: gl.constexpr  # and their queries lie one behind the other
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr

    q_box = QueryProblem.q_box

    @gluon.jit
    def own(self, tile):
        """What a tile of this number is: (the problem of its sequence, first key, key head,
        sequence, first block of queries, end of these blocks, number of query heads, whether it is
        divided). `share` divides tiles; TAIL, those behind the last full wave, as programs beside
        the tiles say.
        """
        piece = tile
        if self.TAIL > 1:
            tiles = self.num_tiles()
            shared = (gl.num_programs(0) - tiles) // (self.TAIL - 1)
            tile, piece = find_piece(tile, tiles - shared, self.TAIL)
        mine, key, kv_head, sequence = self.locate(tile)
        begin, _, _, end = mine.blocks(key, self.BLOCK_KV)
        heads, divided = self.GROUP, False
        if self.TAIL > 1:
            mine, divided = replaced(mine, piece=piece), piece >= 0
            begin, end = blocks_of_piece(begin, end, piece, self.TAIL)
        elif self.PARTS > 1:
            heads, end, divided = mine.share(kv_head, begin, end)
        return mine, key, kv_head, sequence, begin, end, heads, divided

    @gluon.jit
    def num_tiles(self):
        """How many tiles there are, of all key heads and sequences."""
        if self.RAGGED:
            return planned_tiles(self.plan) * self.kv_heads
        else:
            return gl.cdiv(self.kv_length, self.BLOCK_KV) * self.kv_heads * self.batch

    @gluon.jit
    def locate(self, tile):
        """Tile number -> (the problem of its sequence, first key, key head, sequence).

        Neighbours share a head, and the dQ that they add to. Where early keys are seen by more
        queries, the heaviest tiles of all heads of a section come first. So do those of ragged
        sequences; past the last one, a tile has no key and no query. All packed sequences are
        sequence 0 of q. With turns, a section's last tiles come first, which are the lightest.
        """
        exists = True
        if self.RAGGED:
            tiles, rows = planned_tiles(self.plan), self.kv_heads
            exists = tile < tiles * self.kv_heads
            tile = gl.where(exists, tile, 0)
            tiles = gl.maximum(tiles, 1)
        else:
            tiles, rows = gl.cdiv(self.kv_length, self.BLOCK_KV), self.kv_heads * self.batch
        if self.RAGGED or self.RIGHT or self.turns.ON:
            first = tile // (self.section * tiles) * self.section
            width = gl.minimum(self.section, rows - first)
            position = tile - first * tiles
            row = first + position % width
            tile = position // width
            if self.turns.ON:
                tile = tiles - 1 - tile
        else:
            row = tile // tiles
            tile = tile % tiles
        if self.RAGGED:
            mine, tile = self.of_tile(tile, exists)
            sequence = mine.sequence * 0 if self.PACKED else mine.sequence
            return mine, tile * self.BLOCK_KV, row, sequence
        else:
            sequence = row // self.kv_heads
            spans = self.spans.of_head(sequence, self.whole(row % self.kv_heads))
            mine = replaced(self, spans=spans, sequence=sequence)
            return mine, tile * self.BLOCK_KV, row % self.kv_heads, sequence

    @gluon.jit
    def of_tile(self, number, exists):
        """(the problem of a planned tile's sequence, the tile's number there)."""
        sequence, tile, q_first, q_length, kv_first, kv_length = planned_tile(self.plan, number)
        sequence = gl.where(exists, sequence, 0)  # of no tile at all there is no sequence
        padded_first = q_first
        if self.PACKED:
            padded_first = (q_first + sequence * self.BLOCK_Q) // self.BLOCK_Q * self.BLOCK_Q
        kv_first += sequence * self.kv_apart
        q_length = gl.where(exists, q_length, 0)
        kv_length = gl.where(exists, kv_length, 0)
        mine = replaced(
            self, sequence=sequence, q_first=q_first, kv_first=kv_first, padded_first=padded_first,
            q_length=q_length, kv_length=kv_length
        )  # fmt: skip
        return mine, tile

    @gluon.jit
    def of_head(self, head):
        """The problem of a query head."""
        mods = self.mods.of_head(self.sequence, head, self.scale_log2)
        return replaced(self, mods=mods)

    @gluon.jit
    def kv_box(self, sequence, kv_head, key, dim=0):
        """The coordinates of a box of K or V, or of their gradients."""
        kv_head = self.whole(kv_head)
        if self.RAGGED:
            return box_in_sequence(self.kv_first, self.kv_length, kv_head, key, dim)
        else:
            return sequence, kv_head, key, dim

    @gluon.jit
    def whole(self, kv_head):
        """The key head of a part of its group."""
        if self.PARTS > 1:
            return kv_head // self.PARTS
        else:
            return kv_head

    @gluon.jit
    def share(self, kv_head, begin, end):
        """(query heads that a program walks over, the end of its blocks, whether the tile with
        these blocks is divided): if it is not, the first part has all heads and the others none.
        """
        divided = (end - begin) * (self.GROUP * self.PARTS) >= LEAST_STEPS
        is_first = kv_head % self.PARTS == 0
        alone = gl.where(is_first, self.GROUP * self.PARTS, 0)
        return (
            gl.where(divided, self.GROUP, alone),
            gl.where(divided | is_first, end, begin),
            divided,
        )

    @gluon.jit
    def place(self, key, kv_head):
        """The number of a program among all: a tile's parts have neighbours. Tiles are counted
        through all sequences, those of ragged ones as rooms of `varlen_scheduler.plan_tiles`.
        """
        tile = key // self.BLOCK_KV
        if self.RAGGED:
            tile += self.kv_first // self.BLOCK_KV + self.sequence
        else:
            tile += self.sequence * gl.cdiv(self.kv_length, self.BLOCK_KV)
        return self.piece if self.TAIL > 1 else tile * self.kv_heads + kv_head

    @gluon.jit
    def blocks(self, key, KEYS: gl.constexpr):
        """The blocks of queries that see KEYS keys, as `algebra.block_range` gives them: (begin,
        full_begin, full_end, end). Keys past the last one are masked, so no block is full.
        """
        if self.spans.ON:
            return self.spans.query_blocks(key, KEYS, self.BLOCK_Q)
        else:
            left = self.window_left if self.LEFT else None
            right = self.window_right if self.RIGHT else None
            last = gl.minimum(key + KEYS, self.kv_length) - 1
            offset = self.q_length - self.kv_length
            begin, full_begin, full_end, end = seen_blocks(
                key, last, offset, right, left, self.q_length, self.BLOCK_Q
            )
            if self.EDGE:
                full_begin = gl.where(key + KEYS > self.kv_length, end, full_begin)
            if not self.LEFT:  # queries past the last one need no mask
                full_end = end
            return begin, full_begin, gl.maximum(full_begin, full_end), end

    @gluon.jit
    def tiles_behind(self, key, block):
        """How many tiles of keys behind that of a key are seen by a block that sees this one. All
        of them up to the last: a later tile's last query is no earlier.
        """
        right = self.window_right if self.RIGHT else None
        query = (block + 1) * self.BLOCK_Q - 1
        last = last_visible(query, self.kv_length - self.q_length, right, self.kv_length)
        return last // self.BLOCK_KV - key // self.BLOCK_KV

    @gluon.jit
    def counter(self, sequence, head, block):
        """The counter of a block's additions to its dQ."""
        block += self.padded_first // self.BLOCK_Q + sequence * gl.cdiv(self.q_length, self.BLOCK_Q)
        return self.turns.counter(block, self.kv_heads * self.GROUP, head)

    @gluon.jit
    def take_turn(self, counter, additions, sequence, head, key, block):
        """With turns, count the additions to the block before, by its counter, and wait for the
        turn of a tile's first key at this block: (this block's counter, additions to it).
        """
        if self.turns.ON:
            before, counter = counter, self.counter(sequence, head, block)
            turn = self.tiles_behind(key, block)
            self.turns.advance(before, additions, counter, turn)
            additions = gl.to_tensor(1)
        return counter, additions

    @gluon.jit
    def at_step(self, kv_head, step, begin, end):
        """(query head, block) of a step: each head of a group has all blocks of the tile."""
        blocks = end - begin
        return kv_head * self.GROUP + step // blocks, begin + step % blocks

    @gluon.jit
    def block_at(self, sequence, kv_head, step, begin, end):
        """Where the block of queries of a step is: (the coordinates of its box of Q or dO;
        sequence, head and column of its rows in `rows.Workspace.values`).
        """
        head, block = self.at_step(kv_head, step, begin, end)
        query = block * self.BLOCK_Q
        return self.q_box(sequence, head, query), sequence, head, self.padded_first + query

    @gluon.jit
    def after(self, head, block, begin, end):
        """(query head, block) of the step that follows."""
        block += 1
        last = block == end
        return gl.where(last, head + 1, head), gl.where(last, begin, block)

    @gluon.jit
    def masked(self, s, key, query):
        """Scores (keys, queries) from these first ones on, -inf where the key is not seen.

        Queries past the last one need no mask: their LSE is +inf. Columns are compared as eights
        and a rest, as what a thread has of the eights are constants: positions of all columns, if
        the compiler kept them from step to step, would take the registers of the sums.
        """
        KEYS: gl.constexpr = s.shape[0]
        QUERIES: gl.constexpr = s.shape[1]
        left = self.window_left if self.LEFT else None
        right = self.window_right if self.RIGHT else None
        parts = s.reshape([KEYS, QUERIES // 8, 8])
        eights: gl.constexpr = gl.SliceLayout(2, parts.type.layout)
        rests: gl.constexpr = gl.SliceLayout(1, parts.type.layout)
        k_pos = key + gl.arange(0, KEYS, layout=gl.SliceLayout(1, rests))
        eight = 8 * gl.arange(0, QUERIES // 8, layout=gl.SliceLayout(0, eights))[None, :, None]
        rest = query + gl.arange(0, 8, layout=gl.SliceLayout(0, rests))
        offset = self.q_length - self.kv_length
        if self.spans.ON:
            first, last = self.spans.of_keys(k_pos)
        else:
            first = first_visible(k_pos, offset, right)
            last = last_visible(k_pos, offset, left, self.q_length)
        if self.EDGE:
            first = gl.where(k_pos < self.kv_length, first, self.q_length + QUERIES)
        visible = eight >= (first[:, None] - rest[None, :])[:, None, :]
        if self.LEFT:
            visible = visible & (eight <= (last[:, None] - rest[None, :])[:, None, :])
        parts = gl.where(visible, parts, float("-inf"))
        return gl.convert_layout(parts.reshape([KEYS, QUERIES]), s.type.layout, assert_trivial=True)

    @gluon.jit
    def biased(self, s, key, query):
        """ALiBi on scores (keys, queries) from these first ones on."""
        if self.mods.ALIBI:
            k_pos = key + gl.arange(0, s.shape[0], layout=gl.SliceLayout(1, s.type.layout))
            q_pos = gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
            own_place = q_pos + (query + self.kv_length - self.q_length)
            s = self.mods.biased(s, own_place[None, :] - k_pos[:, None])
        return s

    @gluon.jit
    def probabilities(self, s, lse2, key, query, masked):
        """(P, slope) of scores: P = 2^(S - LSE), and slope = dS / (dP - delta), which is P but for
        softcap, whose derivative it has.
        """
        capped = tanh(s * self.cap_scale) if self.CAP else s
        s = self.biased(capped, key, query)
        if self.LEFT or self.RIGHT or self.EDGE:
            if masked:
                s = self.masked(s, key, query)
        p = gl.exp2(s * self.scale_log2 - lse2[None, :])
        return p, p * (1.0 - capped * capped) if self.CAP else p
