"""Parts of a group: query heads of a key head divided over programs, where tiles are too few.

What a program per tile and key head wastes. It walks over all query heads of the group. With few
key heads and few tokens there are fewer programs than SMs, and most of the GPU has no work.

What changes. PARTS programs share a tile of a key head. Each has a part of the group's query
heads. The kernel sees parts as key heads of smaller groups: head `k * PARTS + p` is part p of key
head k (`problem.KeyProblem`), so dQ and its turns stay as they are. dK and dV are sums over all
parts. Each program leaves its sums in memory, in fp32. The one that comes last adds them up, part
after part, whichever it is: the same bits in every run.

Programs that share the queries of a tile in a short last wave (`tail`) meet likewise.

    each consumer of a program      dK, dV of its keys -> its own place in memory
                                    barrier of the warpgroup; counter of tile and consumer += 1
    of the one that counted last    sums = 0 + part 0 + part 1 ...  -> dK, dV, rounded

Which tiles. A tile that few blocks of queries see is not worth dividing: what programs do besides
their steps would take longer than they gain. Below `LEAST_STEPS` steps the first part does the
work of all, and others go on. The host knows no interval and no length of a packed sequence, so a
program finds out by itself.

Who calls it. The consumers of all four kinds of kernel, `Parts.combine`, behind the last block.
A consumer waits for its own warps only, for no other program.

Why the last one sees what the others wrote. A warpgroup counts behind a barrier of its threads,
with release and acquire. Its threads read behind another barrier, and read from L2.

Cost. For each program and tile of 128 keys, 512 bytes for each dim of k and of v are written and
read once. A call takes so much memory, too: two rows of 8192 tokens with 8 key heads, 192 dims and
two parts 403 MB, with 4 query heads to a key head as much as the sum of dQ.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.panels import Output
from flash_versions.versions.tiles.triton_compat import aggregate, thread_barrier
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

CONSUMERS = gl.constexpr(2)  # of a tile of keys, each with a counter of its own
LEAST_STEPS = gl.constexpr(12)  # blocks of queries, of all heads of a group, that are divided


@aggregate
class Parts:
    """Where parts meet. If a group is not divided, the pointers are not used."""

    sums: gl.tensor  # fp32, for each program and consumer its dV and dK, see `by_thread`
    arrivals: gl.tensor  # int32, of each tile of a key head and consumer; 0 at the launch

    @gluon.jit
    def combine(self, problem, dk, dv, key, kv_head, divided, CONSUMER: gl.constexpr):
        """Add a divided tile's sums to those of other parts: (dK, dV, whether this program stores
        them), which the last part does. If the tile is not divided, the first part has all heads.
        """
        stores = True
        if problem.PARTS * problem.TAIL > 1:
            stores = kv_head % problem.PARTS == 0
            if divided:
                dk, dv, stores = self.add_up(problem, dk, dv, key, kv_head, CONSUMER)
        return dk, dv, stores

    @gluon.jit
    def add_up(self, problem, dk, dv, key, kv_head, CONSUMER: gl.constexpr):
        """Leave the sums of a consumer in memory. The last of all parts gets (dK, dV, True), the
        sums of all of them.
        """
        SIZE: gl.constexpr = WARPGROUP_ROWS * (dk.width() + dv.width())
        place = problem.place(key, kv_head)
        PARTS: gl.constexpr = problem.PARTS * problem.TAIL
        tile = place // PARTS
        mine = self.sums + (place * CONSUMERS + CONSUMER).to(gl.int64) * SIZE
        leave(mine, dv)
        leave(mine + WARPGROUP_ROWS * dv.width(), dk)
        thread_barrier()
        before = gl.atomic_add(self.arrivals + (tile * CONSUMERS + CONSUMER), 1, sem="acq_rel")
        thread_barrier()
        is_last = before == PARTS - 1
        if is_last:
            first = self.sums + (tile * (PARTS * CONSUMERS) + CONSUMER).to(gl.int64) * SIZE
            APART: gl.constexpr = CONSUMERS * SIZE
            dv = added(first, dv, APART, PARTS)
            dk = added(first + WARPGROUP_ROWS * dv.width(), dk, APART, PARTS)
        return dk, dv, is_last


@gluon.jit
def by_thread(x):
    """A tile of 64 rows as one row, in which four numbers that a thread has of an accumulator are
    neighbours, and so are threads: each warp stores, and loads, 512 bytes at once.
    """
    EIGHTS: gl.constexpr = x.shape[1] // 8
    parts = x.reshape([4, 2, 8, EIGHTS, 4, 2])
    return parts.permute((3, 0, 2, 4, 1, 5)).reshape([WARPGROUP_ROWS * x.shape[1]])


@gluon.jit
def leave(pointer, x):
    """Store the sums of all panels, one behind the other."""
    leave_panel(pointer, x.first)
    if x.PANELS == 2:
        leave_panel(pointer + WARPGROUP_ROWS * x.first.shape[1], x.second)


@gluon.jit
def leave_panel(pointer, x):
    """Store the sums of a panel."""
    x = by_thread(x)
    gl.store(pointer + gl.arange(0, x.shape[0], layout=x.type.layout), x)


@gluon.jit
def added(pointer, like, APART: gl.constexpr, PARTS: gl.constexpr):
    """The sum of the same sums of all parts, each so many numbers behind the part before."""
    first = added_panel(pointer, like.first, APART, PARTS)
    second = like.second
    if like.PANELS == 2:
        second = added_panel(pointer + WARPGROUP_ROWS * first.shape[1], second, APART, PARTS)
    return Output(first, second, like.PANELS)


@gluon.jit
def added_panel(pointer, like, APART: gl.constexpr, PARTS: gl.constexpr):
    """The sum of a panel, in the layout of another one."""
    COLUMNS: gl.constexpr = like.shape[1]
    flat = by_thread(like)
    pointers = pointer + gl.arange(0, flat.shape[0], layout=flat.type.layout)
    total = gl.load(pointers, cache_modifier=".cg")
    for _ in range(1, PARTS):
        pointers += APART
        total += gl.load(pointers, cache_modifier=".cg")
    parts = total.reshape([COLUMNS // 8, 4, 8, 4, 2, 2]).permute((1, 4, 2, 0, 3, 5))
    x = parts.reshape([WARPGROUP_ROWS, COLUMNS])
    return gl.convert_layout(x, like.type.layout, assert_trivial=True)
