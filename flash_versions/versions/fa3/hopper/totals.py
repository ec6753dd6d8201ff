"""Splits of a fixed size: how a long row gets the same bits in one program and in many.

A step of decoding splits the keys over programs, and a prefill does not. With batch_invariant both
do the same arithmetic. Splits of the keys have a fixed size, are counted from a sequence's first
key, and visited from the last one to the first. Each split has an online softmax of its own, which
begins with nothing. Where it ends, its state (acc, m, l) is merged into the total of the splits
behind it, and the first key's split comes last. A split in which a row sees no key has m = -inf, so
it leaves that row's total as it is, bit by bit: it does not matter which rows share a tile. A sink
is merged last of all.

In decoding, a program has one split, and the last program of a sequence merges them
(`decode/pieces.py`). In prefill, a consumer has all splits of its rows, one after the other.
Registers hold one accumulator, so the total is in memory: 64 rows in fp32, which stay in the L2
cache and which only the consumer's own threads read and write. At head_dim 128 that is a load and
a store of 32 KiB for every 4096 keys, whose 32 blocks take the tensor cores 32,000 cycles.

Programs that share the keys of a tile in a short last wave merge likewise (`Totals.join`).

A merge multiplies and adds by an explicit `fma`: ptxas could contract either of the two products,
and need not choose alike in two kernels.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.panels import Output, parts_of, per_row
from flash_versions.versions.tiles.triton_compat import aggregate, thread_barrier
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

# Keys of a split, whole blocks, by the head dims up to which it serves. With fewer, more programs
# share a step of decoding, and a prefill merges more often.
SPLIT_KEYS = {64: 2688, 256: 4096}
MOST_BLOCKS = gl.constexpr(64)  # of a split
PART_COLUMNS = gl.constexpr(64)


def split_keys(head_dim: int) -> int:
    """Keys of a split for the larger of both head dims."""
    return next(keys for dims, keys in SPLIT_KEYS.items() if head_dim <= dims)


@gluon.jit
def merge_rows(row_max, row_sum, other_max, other_sum):
    """Two states of rows as one: (row_max, row_sum, what the first acc counts, the second); -inf is
    the maximum of no key.
    """
    maximum = gl.maximum(row_max, other_max)
    pivot = gl.where(maximum == float("-inf"), 0.0, maximum)
    alpha, weight = gl.exp2(row_max - pivot), gl.exp2(other_max - pivot)
    return maximum, gl.fma(row_sum, alpha, other_sum * weight), alpha, weight


@gluon.jit
def merge(acc, row_max, row_sum, other, other_max, other_sum):
    """The state of keys that two states have seen."""
    row_max, row_sum, alpha, weight = merge_rows(row_max, row_sum, other_max, other_sum)
    return gl.fma(acc, alpha[:, None], other * weight[:, None]), row_max, row_sum


@aggregate
class Totals:
    """Where a consumer keeps the total of its rows. If SPLIT is 0, nothing is split, and the
    pointer is any.
    """

    memory: gl.tensor  # fp32: for each program, or piece, and consumer 64 rows of O, m and l
    counters: gl.tensor  # int32, 0 at the launch: the scheduler's two, then those of `join`
    CONSUMERS: gl.constexpr
    SPLIT: gl.constexpr  # blocks of keys

    @gluon.jit
    def first_place(self, problem, begin, end):
        """The first place of the split that has the block at place end - 1."""
        gl.static_assert(self.SPLIT <= MOST_BLOCKS)
        split = problem.block_of(problem.entry(end - 1)) // self.SPLIT
        if problem.lists.ON:
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            place = end - 1 - gl.arange(0, MOST_BLOCKS, layout=layout)
            block = problem.block_of(problem.entry(gl.maximum(place, begin)))
            inside = (place >= begin) & (block // self.SPLIT == split)
            return end - gl.sum(inside.to(gl.int32), axis=0)
        else:
            return gl.maximum(begin, split * self.SPLIT)

    @gluon.jit
    def places(self, like, CONSUMER: gl.constexpr, COLUMN: gl.constexpr, WIDTH, piece=None):
        """Pointers to an accumulator's numbers, whose first one is in a column, and to m; l is 64
        numbers further. They are this program's, or those of a piece.
        """
        ROWS: gl.constexpr = WARPGROUP_ROWS
        number = gl.program_id(0) if piece is None else piece
        mine = number * self.CONSUMERS + CONSUMER
        own = self.memory + mine.to(gl.int64) * (ROWS * (WIDTH + 2))
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, like.type.layout))
        dim = gl.arange(0, like.shape[1], layout=gl.SliceLayout(0, like.type.layout)) + COLUMN
        return own + (row[:, None] * WIDTH + dim[None, :]), own + ROWS * WIDTH + row

    @gluon.jit
    def add(
        self, x, kept, alpha, weight, CONSUMER: gl.constexpr, COLUMN: gl.constexpr, WIDTH, piece
    ):
        """Keep an accumulator, whose first column this is, or add it to what is kept, a few columns
        at a time: registers may have no room for another accumulator.
        """
        PART: gl.constexpr = min(PART_COLUMNS, x.shape[1])
        parts = parts_of(x, PART)
        for i in gl.static_range(len(parts)):
            part = parts[i]
            places, _ = self.places(part, CONSUMER, COLUMN + i * PART, WIDTH, piece)
            if kept:
                part = part * per_row(weight, part)[:, None]
                part = gl.fma(gl.load(places), per_row(alpha, part)[:, None], part)
            gl.store(places, part)

    @gluon.jit
    def close(self, acc, row_max, row_sum, kept, CONSUMER: gl.constexpr, piece=None):
        """Merge the state of a split into the total that is kept; if none is, it is the total."""
        WIDTH: gl.constexpr = acc.width()
        _, values = self.places(acc.first, CONSUMER, 0, WIDTH, piece)
        alpha, weight = row_sum, row_sum
        if kept:
            kept_max, kept_sum = gl.load(values), gl.load(values + WARPGROUP_ROWS)
            row_max, row_sum, alpha, weight = merge_rows(kept_max, kept_sum, row_max, row_sum)
        gl.store(values, row_max)
        gl.store(values + WARPGROUP_ROWS, row_sum)
        self.add(acc.first, kept, alpha, weight, CONSUMER, 0, WIDTH, piece)
        if acc.PANELS == 2:
            COLUMN: gl.constexpr = acc.first.shape[1]
            self.add(acc.second, kept, alpha, weight, CONSUMER, COLUMN, WIDTH, piece)
        thread_barrier()  # of the four threads that share a row, one may store m and l for all

    @gluon.jit
    def merged(self, acc, row_max, row_sum, CONSUMER: gl.constexpr):
        """The total that is kept and another state, merged: (acc, row_max, row_sum)."""
        WIDTH: gl.constexpr = acc.width()
        places, values = self.places(acc.first, CONSUMER, 0, WIDTH)
        kept_max, kept_sum = gl.load(values), gl.load(values + WARPGROUP_ROWS)
        row_max, row_sum, alpha, weight = merge_rows(kept_max, kept_sum, row_max, row_sum)
        first = gl.fma(gl.load(places), alpha[:, None], acc.first * weight[:, None])
        second = acc.second
        if acc.PANELS == 2:
            places, _ = self.places(second, CONSUMER, acc.first.shape[1], WIDTH)
            alpha, weight = per_row(alpha, second), per_row(weight, second)
            second = gl.fma(gl.load(places), alpha[:, None], second * weight[:, None])
        return Output(first, second, acc.PANELS), row_max, row_sum

    @gluon.jit
    def join(self, problem, acc, row_max, row_sum, CONSUMER: gl.constexpr):
        """The state of a tile, and whether this program stores it: (acc, row_max, row_sum, stores).
        Of a tile that programs share, each leaves its state in memory. The last one gets the state
        of all keys, merged in their order, so that every run has the same bits.
        """
        row_max, row_sum = per_row(row_max, acc.first), per_row(row_sum, acc.first)
        total, stores = acc.first, problem.piece < 0
        if problem.piece >= 0:
            self.close(acc, row_max, row_sum, False, CONSUMER, problem.piece)
            tile = problem.piece // problem.TAIL
            arrived = self.counters + (2 + tile * self.CONSUMERS + CONSUMER)
            stores = gl.atomic_add(arrived, 1, sem="acq_rel") == problem.TAIL - 1
            thread_barrier()
            if stores:
                gl.store(arrived, 0)
                first = tile * problem.TAIL
                total, row_max, row_sum = self.left(total, first, CONSUMER)
                for piece in range(first + 1, first + problem.TAIL):
                    more = self.left(total, piece, CONSUMER)
                    total, row_max, row_sum = merge(total, row_max, row_sum, *more)
        return Output(total, acc.second, acc.PANELS), row_max, row_sum, stores

    @gluon.jit
    def left(self, like, piece, CONSUMER: gl.constexpr):
        """The state of a piece, of one panel, from L2: L1 may hold what was there before."""
        places, values = self.places(like, CONSUMER, 0, like.shape[1], piece)
        row_max = gl.load(values, cache_modifier=".cg")
        row_sum = gl.load(values + WARPGROUP_ROWS, cache_modifier=".cg")
        return gl.load(places, cache_modifier=".cg"), row_max, row_sum
