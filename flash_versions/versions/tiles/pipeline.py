"""Pipelines of tiles in shared memory, and the barriers by which partitions of a kernel meet.

A Gluon kernel is several programs in one: partitions of a block's warps, each with code and
registers of its own, that meet at barriers in shared memory. An mbarrier counts arrivals. When the
expected number has arrived, its phase flips, and every warp that waits for that phase goes on. A
new barrier counts as "previous phase done", so a wait for that phase returns at once: this is why
producers start at phase 1 and consumers at 0.

Sources: the CUDA programming guide on mbarriers; named barriers as in CUTLASS's
OrderedSequenceBarrier.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from flash_versions.versions.tiles.triton_compat import aggregate, load_tile

FIRST_FREE_BARRIER = 8  # named barriers: Triton uses the ones below, there are 16


@aggregate
class Cursor:
    """A place in a ring: the slot, and the phase in which its barriers are."""

    slot: gl.tensor
    phase: gl.tensor
    STAGES: gl.constexpr

    @gluon.jit
    def next(self):
        """The place after this one."""
        last = self.slot == self.STAGES - 1
        slot = gl.where(last, 0, self.slot + 1)
        return Cursor(slot, gl.where(last, self.phase ^ 1, self.phase), self.STAGES)


@aggregate
class Ring:
    """STAGES tiles in shared memory that a producer fills and consumers read, round and round.

    Each has a barrier that says `full` (the data has landed) and one that says `empty` (every
    consumer has read it).
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def at(self, slot, phase):
        """A cursor."""
        return Cursor(gl.to_tensor(slot), gl.to_tensor(phase), self.STAGES)

    @gluon.jit
    def fill(self, cursor, desc, coordinates):
        """Producer: when the slot is empty, start to load the box at these coordinates."""
        mbarrier.wait(self.empty.index(cursor.slot), cursor.phase ^ 1)
        full = self.full.index(cursor.slot)
        mbarrier.expect(full, desc.block_type.nbytes)
        load_tile(desc, coordinates, full, self.tiles.index(cursor.slot))

    @gluon.jit
    def load_with(self, cursor, desc, coordinates, values, values_desc, values_coordinates):
        """Producer: start to load the box, and the slot's row of `values`, which comes by a box of
        its own; that the slot is empty is known.
        """
        full = self.full.index(cursor.slot)
        mbarrier.expect(full, desc.block_type.nbytes + values_desc.block_type.nbytes)
        load_tile(desc, coordinates, full, self.tiles.index(cursor.slot))
        load_tile(values_desc, values_coordinates, full, values.index(cursor.slot))

    @gluon.jit
    def wait_empty(self, cursor):
        """Wait until every consumer has read what was in the slot."""
        mbarrier.wait(self.empty.index(cursor.slot), cursor.phase ^ 1)

    @gluon.jit
    def wait(self, cursor, pred=True):
        """Consumer: wait until the slot is full."""
        mbarrier.wait(self.full.index(cursor.slot), cursor.phase, pred=pred)

    @gluon.jit
    def tile(self, cursor):
        """The slot as a matrix of rows and dims."""
        tile = self.tiles.index(cursor.slot)
        return tile.reshape([tile.shape[2], tile.shape[3]])

    @gluon.jit
    def publish(self, cursor):
        """Producer that is not TMA: its part of this slot is written."""
        fence_async_shared()
        mbarrier.arrive(self.full.index(cursor.slot), count=1)

    @gluon.jit
    def release(self, cursor):
        """Consumer: this slot has been read."""
        mbarrier.arrive(self.empty.index(cursor.slot), count=1)


@gluon.jit
def make_ring(desc, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate a ring of tiles for the boxes of a descriptor."""
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return make_ring_beside(desc, STAGES, empty)


@gluon.jit
def make_ring_beside(desc, STAGES: gl.constexpr, empty):
    """Allocate a ring whose slots are given back with those of the ring that `empty` belongs to.

    It gets no barriers of that kind of its own: to memory of which nobody makes use the compiler
    gives a second owner, and where a barrier was initialised nothing else may lie.
    """
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    return Ring(tiles, full, empty, STAGES)


@gluon.jit
def make_tiles(desc, STAGES: gl.constexpr):
    """Allocate tiles for the boxes of a descriptor as a ring on whose barriers nobody waits."""
    tiles = gl.allocate_shared_memory(desc.dtype, [STAGES] + desc.block_type.shape, desc.layout)
    unused = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return Ring(tiles, unused, unused, STAGES)


@gluon.jit
def make_handover(
    dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, WRITERS: gl.constexpr
):
    """Allocate a ring of two tiles for the tensor cores that several partitions write, each a part,
    and one reads.
    """
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([1, 1, ROWS, COLUMNS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [2, 1, 1, ROWS, COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=WRITERS)
        mbarrier.init(empty.index(slot), count=1)
    return Ring(tiles, full, empty, 2)


@aggregate
class Exchange:
    """Two tiles in shared memory that consumers write together, each a part, and read when every
    part is there. Two, so that one can be read while the other is written: who has read a tile and
    then takes part in the next knows that nobody reads the tile before the one it has read.
    """

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor

    @gluon.jit
    def at(self, slot, phase):
        """A cursor."""
        return Cursor(gl.to_tensor(slot), gl.to_tensor(phase), gl.constexpr(2))

    @gluon.jit
    def publish(self, cursor):
        """This consumer's part is written."""
        fence_async_shared()
        mbarrier.arrive(self.full.index(cursor.slot), count=1)

    @gluon.jit
    def receive(self, cursor):
        """The tile, when every part is written."""
        mbarrier.wait(self.full.index(cursor.slot), cursor.phase)
        return self.tiles.index(cursor.slot)


@gluon.jit
def make_exchange(
    dtype: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CONSUMERS: gl.constexpr
):
    """Allocate an exchange of tiles that the tensor cores read."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    tiles = gl.allocate_shared_memory(dtype, [2, ROWS, COLUMNS], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(2):
        mbarrier.init(full.index(slot), count=CONSUMERS)
    return Exchange(tiles, full)


@gluon.constexpr_function
def turn_barrier(action, consumer):
    """PTX for a consumer's turn: two warpgroups, 256 threads, meet at its named barrier."""
    return f"bar.{action} {FIRST_FREE_BARRIER + consumer}, 256; mov.u32 $0, 0;"


@gluon.jit
def take_turn(CONSUMER: gl.constexpr):
    """Wait until it is this consumer's turn to issue its products."""
    ASM: gl.constexpr = turn_barrier("sync", CONSUMER)
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pass_turn(CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Let the next consumer issue its products, while this one computes its softmax."""
    ASM: gl.constexpr = turn_barrier("arrive", (CONSUMER + 1) % CONSUMERS)
    gl.inline_asm_elementwise(ASM, "=r", [], dtype=gl.int32, is_pure=False, pack=1)
