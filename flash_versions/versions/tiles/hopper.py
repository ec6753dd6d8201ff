"""The Gluon world of FA3: rings of tiles that TMA fills, turns at the tensor cores, and
schedulers that hand out tiles. The only file that knows the differences between Triton versions.

A kernel here is several programs in one: partitions of a block's warps, each with code and
registers of its own, that meet at barriers in shared memory. An mbarrier counts arrivals; when the
expected number has arrived, its phase flips, and who waits for that phase goes on. Waiting for the
phase before the first is over at once, which is why producers start at phase 1 and consumers at 0.

Sources: the CUDA programming guide on mbarriers and TMA; named barriers as in CUTLASS's
OrderedSequenceBarrier.
"""

from typing import Any, dataclass_transform

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from flash_versions.dispatch import interpreter
from flash_versions.dispatch.device import devices
from flash_versions.versions.tiles.tma import described

WARPGROUP_ROWS = gl.constexpr(64)  # rows that the four warps of a warpgroup multiply
FIRST_FREE_BARRIER = 8  # named barriers: Triton uses the ones below, there are 16
GLUON_DTYPES = {
    torch.float32: gl.float32,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
}

# Triton 3.7 renamed these.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


def add_tile_by_builder(desc, coordinates, tile, _semantic=None):
    """TMA adds a tile to a box in memory; the operation has a name only from Triton 3.9 on."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coordinates, tile.handle)


add_tile = getattr(tma, "async_atomic_add", None) or builtin(add_tile_by_builder)


@builtin
def reinterpret(tile, shape, layout, _semantic=None):
    """The same bytes of shared memory as tiles of another shape."""
    shape, layout = [gl.constexpr(n).value for n in shape], gl.constexpr(layout).value
    return _semantic.memdesc_reinterpret(tile, tile.dtype, shape, layout)


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """A record of values that a kernel passes around as one; the constructor takes the annotated
    fields in order.
    """
    if hasattr(gluon, "aggregate"):
        return gluon.aggregate(cls)
    from triton.language.core import _aggregate

    fields = cls.__annotations__

    def __init__(self, *values):
        for (name, kind), value in zip(fields.items(), values, strict=True):
            is_constant = kind is gl.constexpr and not isinstance(value, gl.constexpr)
            setattr(self, name, gl.constexpr(value) if is_constant else value)

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return _aggregate(cls)


def available(device: torch.device) -> bool:
    """Whether kernels written for Hopper run on a device: Triton's interpreter knows no Gluon."""
    return not interpreter.enabled() and devices[device].capability == (9, 0)


def describe(x: torch.Tensor, rows: int, dims: int) -> TensorDescriptor:
    """A (batch, length, heads, dim) tensor for TMA, as boxes of `rows` rows and `dims` dims of one
    head. What lies outside of the tensor reads as 0 and is not written.
    """
    return described(make_descriptor, x, rows, dims)


def make_descriptor(
    x: torch.Tensor, shape: list[int], strides: list[int], box: list[int]
) -> TensorDescriptor:
    """Boxes that lie in shared memory swizzled, so that the tensor cores meet no bank twice."""
    layout = gl.NVMMASharedLayout.get_default_for(box, GLUON_DTYPES[x.dtype])
    return TensorDescriptor(x, shape, strides, box, layout)


@gluon.constexpr_function
def accumulator_layout(columns, fp8=False):
    """The registers in which a warpgroup multiplies 64 rows by tiles of `columns`."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 32 if fp8 else 16])


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


@gluon.jit
def unknown_zero():
    """0, unknown to the compiler: what is addressed with it is addressed anew in each step.

    The tensor cores are told of a tile by descriptors, eight of 64 bits for 128 rows. Of a tile
    that stays the same in a loop, ptxas computes them once and keeps them, in registers that it
    then has to spill; with an address that it does not know, it steps from one to the next.
    """
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


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


@aggregate
class Scheduler:
    """Hands out the tiles 0 .. number - 1 to programs, round after round.

    "grid": a program for each tile; the hardware starts one where another has ended.
    "static": of n persistent programs, p takes tiles p, 2n - 1 - p, 2n + p, ...: back and forth, so
        that where tiles get lighter, who has the heaviest of one round has the lightest of the
        next.
    "dynamic": the producer of a persistent program claims its next tile from a counter in memory,
        long before its consumers are done with this one, and leaves it for them in one of two
        slots.
    """

    number: gl.tensor
    counters: gl.tensor  # pointer to two int32, 0 at the launch: tiles claimed, programs retired
    claimed: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    KIND: gl.constexpr

    @gluon.jit
    def claim(self, round):
        """Producer: the tile of the round after this one; `number` or more if there is none."""
        if self.KIND == "dynamic":
            tile = gl.atomic_add(self.counters, 1) + gl.num_programs(0)
            slot = round & 1
            mbarrier.wait(self.empty.index(slot), ((round >> 1) & 1) ^ 1)
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            self.claimed.index(slot).store(gl.full([1], tile, gl.int32, layout))
            mbarrier.arrive(self.full.index(slot), count=1)
            return tile
        else:
            return self.following(round)

    @gluon.jit
    def receive(self, round):
        """Consumer: what the producer has claimed in this round."""
        if self.KIND == "dynamic":
            slot = round & 1
            mbarrier.wait(self.full.index(slot), (round >> 1) & 1)
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            tile = gl.max(self.claimed.index(slot).load(layout), axis=0)
            mbarrier.arrive(self.empty.index(slot), count=1)
            return tile
        else:
            return self.following(round)

    @gluon.jit
    def following(self, round):
        """The tile of the round after this one, where nobody needs to ask."""
        if self.KIND == "grid":
            return self.number
        else:
            programs, program = gl.num_programs(0), gl.program_id(0)
            backwards = (round & 1) == 0
            place = gl.where(backwards, programs - 1 - program, program)
            return (round + 1) * programs + place

    @gluon.jit
    def retire(self):
        """Producer, when there is no tile left: the last program leaves the counters at 0."""
        if self.KIND == "dynamic":
            if gl.atomic_add(self.counters + 1, 1) == gl.num_programs(0) - 1:
                gl.store(self.counters, 0)
                gl.store(self.counters + 1, 0)


@gluon.jit
def make_scheduler(number, counters, KIND: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate a scheduler for so many tiles."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    claimed = gl.allocate_shared_memory(gl.int32, [2, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if KIND == "dynamic":  # nobody asks the others
        for slot in gl.static_range(2):
            mbarrier.init(full.index(slot), count=1)
            mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Scheduler(gl.to_tensor(number), counters, claimed, full, empty, KIND)


class Counters:
    """Pairs of counters for dynamic schedulers, 0 before and after each launch.

    Launches of one stream come one after the other and share a pair. A launch that is captured in a
    graph gets a pair for itself, as the graph may be replayed in any stream; after PAIRS of them, a
    pair that the graph itself clears at every replay, which takes two microseconds.
    """

    PAIRS = 4096
    APART = 8  # int32 from one pair to the next: pairs share no sector of memory

    def __init__(self) -> None:
        self.free: dict[torch.device, list[torch.Tensor]] = {}
        self.of_stream: dict[tuple[torch.device, int], torch.Tensor] = {}

    def pair(self, device: torch.device) -> torch.Tensor:
        """Two int32 on the device, for the next launch in the current stream."""
        if device.type != "cuda":
            return torch.zeros(2, dtype=torch.int32)
        if torch.cuda.is_current_stream_capturing():
            free = self.free.get(device)
            return free.pop() if free else torch.zeros(2, dtype=torch.int32, device=device)
        key = (device, driver.active.get_current_stream(device.index))
        if key not in self.of_stream:
            if not self.free.get(device):
                pairs = torch.zeros((self.PAIRS, self.APART), dtype=torch.int32, device=device)
                torch.cuda.current_stream(device).synchronize()  # other streams may use them
                self.free[device] = list(pairs[:, :2])
            self.of_stream[key] = self.free[device].pop()
        return self.of_stream[key]
