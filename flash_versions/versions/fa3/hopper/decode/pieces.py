"""Pieces of a sequence that several programs attend to, and how the last of them combines them.

What a kernel of its own for that wastes. It begins when the last of all programs has ended, and is
one launch more: 6 microseconds of a step that takes 80 (docs/understand/log.md).

What changes. A program leaves the state of its piece (acc, m, l) in memory and counts. The program
that counts last of a sequence combines the pieces. It does so in their order, so the bits are the
same in every run, whichever program it is. Meanwhile other programs still read keys.

    of a program with a piece of a sequence     acc, m, l -> the piece's own place in memory
                                                barrier of the warpgroup; counter += 1
    of the one that counted last                counter = 0, for the next launch
                                                o, LSE = combination of all pieces

Counters. Of the sequences that begin in a share, only the last one can be cut. So a sequence that
is cut has the counter of the share in which it begins, and of the key head. Lengths must not change
while the kernel runs: programs would count other numbers of pieces, and leave a counter that is
not 0.

Why the last one sees what the others wrote. The warpgroup counts behind a barrier of its threads,
with release and acquire. Its threads read behind another barrier, and read from L2.

Cost. For each query, a piece writes and reads head_dim + 2 numbers, mostly in the L2 cache. Loads
of AT_ONCE pieces are under way together. One program combines all pieces of a sequence: with many
of them FA2's kernels are faster (`host.pays`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.totals import merge, merge_rows
from flash_versions.versions.tiles.algebra import finalize
from flash_versions.versions.tiles.triton_compat import aggregate, thread_barrier
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout

PANEL = gl.constexpr(64)  # dims of a box: with 16 bits, the 128 bytes that are swizzled together
ROWS = gl.constexpr(4)  # that are combined at once, one for each warp
AT_ONCE = gl.constexpr(8)  # pieces whose loads are under way together


@aggregate
class Output:
    """What programs write: results, the states of pieces in a workspace, and counters."""

    o: gl.tensor
    lse: gl.tensor
    acc: gl.tensor
    row_max: gl.tensor
    row_sum: gl.tensor
    arrivals: gl.tensor  # int32, 0 at the launch and after it
    DIM: gl.constexpr

    @gluon.jit
    def slot(self, share, begins):
        """The place of a piece in the workspace. A share has two pieces of sequences that are cut
        at most: of the one that was begun before, and of the one that `begins` in it.
        """
        return 2 * share + begins.to(gl.int32)


@gluon.jit
def store_vectors(problem, target, batch, acc, DIM: gl.constexpr):
    """Write the rows of panels that are queries."""
    for panel in gl.static_range(len(acc)):
        x = acc[panel]
        row = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, x.type.layout))
        dim = gl.arange(0, PANEL, layout=gl.SliceLayout(0, x.type.layout)) + panel * PANEL
        mask = problem.exist(row)[:, None] & (dim < DIM)[None, :]
        at = (problem.vectors(batch, row) * DIM)[:, None] + dim[None, :]
        gl.store(target + at, x, mask=mask)


@gluon.jit
def store_values(problem, target, batch, x):
    """Write a number for each row that is a query."""
    row = gl.arange(0, WARPGROUP_ROWS, layout=x.type.layout)
    gl.store(target + problem.values(batch, row), x, mask=problem.exist(row))


@gluon.jit
def store_piece(problem, share, piece, out, sequence, start, acc, row_max, row_sum):
    """Write O and the LSE of a sequence, blocks [start, stop) in the line of all blocks, if the
    share has all of it; else leave the state of its piece, and the last one combines all pieces.
    """
    panel_rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(PANEL))
    row_max = gl.convert_layout(row_max, panel_rows, assert_trivial=True)
    row_sum = gl.convert_layout(row_sum, panel_rows, assert_trivial=True)
    begins = start >= share.begin
    if problem.SPLIT > 0:
        whole = share.blocks == share.longer
        slot = sequence * problem.shares + share.number
        counter = sequence
        first, pieces = share.longer, share.longer - share.blocks + 1
    else:
        whole = begins & (piece.stop <= share.end)
        slot = out.slot(share.number, begins)
        first = share.with_block(start)
        counter = first
        pieces = share.with_block(piece.stop - 1) - first + 1
    if whole:
        row = gl.arange(0, WARPGROUP_ROWS, layout=panel_rows)
        row_max, row_sum, alpha = with_sink(problem, row, row_max, row_sum)
        results = ()
        for panel in gl.static_range(len(acc)):
            x = acc[panel] * alpha[:, None] if problem.SINK_LAST else acc[panel]
            x, lse = finalize(x, row_max, row_sum)
            results = results + (x,)
        store_vectors(problem, out.o, sequence, results, out.DIM)
        store_values(problem, out.lse, sequence, lse)
    else:
        store_vectors(problem, out.acc, slot, acc, out.DIM)
        store_values(problem, out.row_max, slot, row_max)
        store_values(problem, out.row_sum, slot, row_sum)
        arrived = out.arrivals + (counter * problem.kv_heads + problem.kv_head)
        thread_barrier()
        before = gl.atomic_add(arrived, 1, sem="acq_rel")
        thread_barrier()
        if before == pieces - 1:
            gl.store(arrived, 0)
            combine_pieces(problem, out, sequence, first, pieces, len(acc) * PANEL)


@gluon.jit
def with_sink(problem, row, row_max, row_sum):
    """(row_max, row_sum, what acc then counts) of rows with the sink that splits leave out."""
    if problem.SINK_LAST:
        sink = problem.sinks(row, problem.exist(row))
        row_max, row_sum, alpha, _ = merge_rows(row_max, row_sum, sink, 1.0)
        return row_max, row_sum, alpha
    else:
        return row_max, row_sum, row_sum


@gluon.jit
def combine_pieces(problem, out, sequence, first, pieces, DIMS):
    """O and the LSE of a sequence from its pieces, whose first one is in this share; or from its
    splits, the last one first.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, DIMS // 32], [1, 32], [4, 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    dim = gl.arange(0, DIMS, layout=gl.SliceLayout(0, layout))
    for top in range(0, problem.q_length * problem.GROUP, ROWS):
        row = gl.arange(0, ROWS, layout=rows) + top
        exist = problem.exist(row)
        acc = gl.zeros([ROWS, DIMS], gl.float32, layout)
        row_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
        row_sum = gl.zeros([ROWS], gl.float32, rows)
        for number in range(0, pieces, AT_ONCE):
            found = ()
            for i in gl.static_range(AT_ONCE):
                there = exist & (number + i < pieces)
                if problem.SPLIT > 0:
                    slot = sequence * problem.shares + first - (number + i)
                else:
                    slot = out.slot(first + number + i, number + i == 0)
                state = load_piece(problem, out, slot, row, there, dim)
                found = found + (state,)
            for i in gl.static_range(AT_ONCE):
                acc, row_max, row_sum = merge(acc, row_max, row_sum, *found[i])
        row_max, row_sum, alpha = with_sink(problem, row, row_max, row_sum)
        if problem.SINK_LAST:
            acc = acc * alpha[:, None]
        x, lse = finalize(acc, row_max, row_sum)
        at = (problem.vectors(sequence, row) * out.DIM)[:, None] + dim[None, :]
        gl.store(out.o + at, x, mask=exist[:, None] & (dim < out.DIM)[None, :])
        gl.store(out.lse + problem.values(sequence, row), lse, mask=exist)


@gluon.jit
def load_piece(problem, out, slot, row, exist, dim):
    """The state of the rows that exist after a piece's keys: (acc, row_max, row_sum)."""
    at = (problem.vectors(slot, row) * out.DIM)[:, None] + dim[None, :]
    values = problem.values(slot, row)
    return (
        load_left(out.acc + at, exist[:, None] & (dim < out.DIM)[None, :], 0.0),
        load_left(out.row_max + values, exist, float("-inf")),
        load_left(out.row_sum + values, exist, 0.0),
    )


@gluon.jit
def load_left(pointers, mask, other: gl.constexpr):
    """What programs have left in memory: from L2, as L1 may hold what was there before."""
    return gl.load(pointers, mask=mask, other=other, cache_modifier=".cg")
