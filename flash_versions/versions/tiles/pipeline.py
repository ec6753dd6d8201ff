"""Pipelines of tiles in shared memory, and the barriers by which partitions of a kernel meet.

A Gluon kernel is several programs in one: partitions of a block's warps, each with code and
registers of its own, that meet at barriers in shared memory. An mbarrier counts arrivals. When the
expected number has arrived, its phase flips, and every warp that waits for that phase goes on. A
new barrier counts as "previous phase done", so a wait for that phase returns at once: this is why
producers start at phase 1 and consumers at 0.

A named barrier is one of 16 counters of the hardware that each program has. `bar.sync` arrives and
waits until so many threads have arrived; `bar.arrive` only arrives.

Sources: the CUDA programming guide on mbarriers, the PTX manual on `bar`; FlashAttention-3's code
for turns at named barriers.
"""

import math

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flash_versions.versions.tiles.triton_compat import aggregate, load_tile

FIRST_FREE_BARRIER = 8  # named barriers: Triton uses the ones below
TURNS = gl.constexpr(FIRST_FREE_BARRIER)  # of consumer 0; those of the others follow


@aggregate
class Stage:
    """A stage of a pipeline: the slot of its tile, and the phase in which its barriers are."""

    slot: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def next(self):
        """The stage after this one."""
        last = self.slot == self.STAGES - 1
        slot = gl.where(last, 0, self.slot + 1)
        return Stage(slot, gl.where(last, self.phase ^ 1, self.phase), self.STAGES)


@gluon.constexpr_function
def rows_of(shape):
    """The rows of a box: all but the last dimension."""
    return math.prod(shape[:-1])


@gluon.jit
def as_matrix(tile):
    """A tile in shared memory, or a box of any rank, as its rows and dims."""
    return tile.reshape([rows_of(tile.shape), tile.shape[-1]])


@aggregate
class Pipeline:
    """STAGES slots for tiles in shared memory, which a producer fills and consumers read in turn.

    Each slot has a barrier that says `full` (the data has landed) and one that says `empty` (every
    consumer has read it).
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def at(self, slot, phase):
        """A stage."""
        return Stage(gl.to_tensor(slot), gl.to_tensor(phase), self.STAGES)

    @gluon.jit
    def fill(self, stage, desc, coordinates):
        """Producer: when the slot is empty, start to load the box at these coordinates."""
        mbarrier.wait(self.empty.index(stage.slot), stage.phase ^ 1)
        full = self.full.index(stage.slot)
        mbarrier.expect(full, desc.block_type.nbytes)
        load_tile(desc, coordinates, full, self.tiles.index(stage.slot))

    @gluon.jit
    def load_with(self, stage, desc, coordinates, values, values_desc, values_coordinates):
        """Producer: start to load the box, and the slot's row of `values`, which comes by a box of
        its own; that the slot is empty is known.
        """
        full = self.full.index(stage.slot)
        mbarrier.expect(full, desc.block_type.nbytes + values_desc.block_type.nbytes)
        load_tile(desc, coordinates, full, self.tiles.index(stage.slot))
        load_tile(values_desc, values_coordinates, full, values.index(stage.slot))

    @gluon.jit
    def wait_empty(self, stage):
        """Wait until every consumer has read what was in the slot."""
        mbarrier.wait(self.empty.index(stage.slot), stage.phase ^ 1)

    @gluon.jit
    def wait(self, stage, pred=True):
        """Consumer: wait until the slot is full."""
        mbarrier.wait(self.full.index(stage.slot), stage.phase, pred=pred)

    @gluon.jit
    def tile(self, stage):
        """The slot as a matrix of rows and dims."""
        return as_matrix(self.tiles.index(stage.slot))

    @gluon.jit
    def publish(self, stage):
        """Producer that is not TMA: its part of this slot is written."""
        fence_async_shared()
        mbarrier.arrive(self.full.index(stage.slot), count=1)

    @gluon.jit
    def release(self, stage):
        """Consumer: this slot has been read."""
        mbarrier.arrive(self.empty.index(stage.slot), count=1)

    @gluon.jit
    def release_loaded(self, stage):
        """Consumer: this slot has been read, to registers, too: TMA, which fills it next, could be
        earlier than loads that no fence is behind.
        """
        fence_async_shared()
        self.release(stage)


@gluon.jit
def make_barriers(NUMBER: gl.constexpr, COUNT: gl.constexpr):
    """Allocate mbarriers of which a phase ends after COUNT arrivals."""
    barriers = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUMBER):
        mbarrier.init(barriers.index(i), count=COUNT)
    return barriers


@gluon.jit
def make_slots(desc, SLOTS: gl.constexpr):
    """Allocate shared memory for so many boxes of a descriptor."""
    return gl.allocate_shared_memory(desc.dtype, [SLOTS] + desc.block_type.shape, desc.layout)


@gluon.jit
def make_pipeline(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate a pipeline of tiles for the boxes of a descriptor."""
    return make_pipeline_beside(desc, STAGES, make_barriers(STAGES, CONSUMERS))


@gluon.jit
def make_pipeline_beside(desc, STAGES: gl.constexpr, empty):
    """Allocate a pipeline that shares the `empty` barriers of another one.

    It has no `empty` barriers of its own: a barrier that no warp waits on must not be initialised,
    because the compiler may give its memory to something else.
    """
    return Pipeline(make_slots(desc, STAGES), make_barriers(STAGES, 1), empty, STAGES)


@gluon.jit
def make_companion(desc, pipeline, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate a pipeline whose tiles come with those of another one (`load_with`), and so are full
    when those are, but which consumers may still read when they have released those.
    """
    tiles = make_slots(desc, STAGES)
    return Pipeline(tiles, pipeline.full, make_barriers(STAGES, CONSUMERS), STAGES)


@gluon.jit
def make_unguarded(desc, STAGES: gl.constexpr):
    """Allocate tiles for a descriptor's boxes, as a pipeline whose barriers no warp waits on."""
    tiles = make_slots(desc, STAGES)
    unused = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Pipeline(tiles, unused, unused, STAGES)


@gluon.jit
def make_handover(
    dtype: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    WRITERS: gl.constexpr,
    STAGES: gl.constexpr = 2,
    READERS: gl.constexpr = 1,
    ANNOUNCED: gl.constexpr = False,
):
    """Allocate a pipeline of tiles for the tensor cores: several partitions write a part each, and
    one or more read the tile. If ANNOUNCED, writers say at named barriers that a part is written.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, ROWS, COLUMNS], layout)
    if ANNOUNCED:
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    else:
        full = make_barriers(STAGES, WRITERS)
    return Pipeline(tiles, full, make_barriers(STAGES, READERS), STAGES)


@gluon.jit
def make_shared_tiles(dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Allocate two tiles that consumers write together, each a part, and that the tensor cores read
    when every part is there. One can be read while the other is written: when a consumer has met
    the others at a tile, all of them are done with the tile before.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    return gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], layout)


@gluon.constexpr_function
def named_barrier_ptx(action, threads):
    """PTX that lets so many threads meet at the named barrier whose number is the operand."""
    return f"bar.{action} $1, {threads}; mov.u32 $0, 0;"


@gluon.jit
def meet(number, THREADS: gl.constexpr):
    """Arrive at a named barrier, and wait until so many threads have arrived."""
    ASM: gl.constexpr = named_barrier_ptx("sync", THREADS)
    number = gl.to_tensor(number)
    gl.inline_asm_elementwise(ASM, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def announce(number, THREADS: gl.constexpr):
    """Arrive at a named barrier without waiting, each warp for itself. At an mbarrier, Gluon makes
    the warps of a partition wait for each other before and behind an arrival.
    """
    ASM: gl.constexpr = named_barrier_ptx("arrive", THREADS)
    number = gl.to_tensor(number)
    gl.inline_asm_elementwise(ASM, "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def hear_rest(stage, steps, BARRIER: gl.constexpr, THREADS: gl.constexpr):
    """Producer, at the end: meet the announcements that the loop left: one for each of the last
    slots, the oldest first. steps: how many were filled.
    """
    slot = gl.where(steps < stage.STAGES, 0, stage.slot)
    for _ in range(gl.minimum(steps, stage.STAGES)):
        meet(BARRIER + slot, THREADS)
        slot = gl.where(slot == stage.STAGES - 1, 0, slot + 1)


@gluon.jit
def named_barrier_sync(CONSUMER: gl.constexpr):
    """Wait for this consumer's turn."""
    meet(TURNS + CONSUMER, 256)


@gluon.jit
def named_barrier_arrive(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Give the turn to the next consumer."""
    announce(TURNS + (CONSUMER + 1) % CONSUMERS, 256)
