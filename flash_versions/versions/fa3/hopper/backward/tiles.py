"""What FA3's backward for Hopper does with tiles: their loads, products, and gradients on their way
to memory.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma, warpgroup_mma

from flash_versions.versions.fa3.hopper.panels import (
    Boxes,
    PanelPipeline,
    make_panel_pipeline,
    make_panel_pipeline_beside,
    multiply_pv,
    multiply_qk,
)
from flash_versions.versions.tiles.pipeline import (
    FIRST_FREE_BARRIER,
    Pipeline,
    as_matrix,
    make_handover,
    make_slots,
)
from flash_versions.versions.tiles.triton_compat import add_tile, aggregate, reinterpret, store_tile
from flash_versions.versions.tiles.wgmma import (
    WARPGROUP_ROWS,
    accumulator_layout,
    operand_layout,
    unknown_zero,
)

# Named barriers behind the two of the consumers' turns, and the threads that meet there.
DS_FULL = gl.constexpr(FIRST_FREE_BARRIER + 2)  # two slots
DS_THREADS = gl.constexpr(384)  # both consumers and the warpgroup of dQ
ALL_READ = gl.constexpr(FIRST_FREE_BARRIER + 4)
CONSUMER_THREADS = gl.constexpr(256)
Q_EMPTY = gl.constexpr(FIRST_FREE_BARRIER + 5)  # slots of Q, `config.MOST_SLOTS` at most
Q_THREADS = gl.constexpr(288)  # both consumers and the producer


@aggregate
class Inputs:
    """The tensors that a program loads from."""

    q: Boxes
    k: Boxes
    v: Boxes
    do: Boxes
    values: tma.tensor_descriptor  # rows of LSE and of delta, see `rows.Workspace`


@gluon.jit
def load_q(buffers, q, values, stage, where):
    """Start to load a block of Q, and with it its LSE, into an empty slot; where: see
    `KeyProblem.block_at`.
    """
    box, sequence, head, column = where
    buffers.q.load_with(stage, q, box, buffers.lse, values, [sequence, head, 0, column])


@gluon.jit
def load_do(buffers, do, values, stage, where):
    """`load_q` of dO and delta."""
    box, sequence, head, column = where
    buffers.do.load_with(stage, do, box, buffers.delta, values, [sequence, head, 1, column])


@aggregate
class Buffers:
    """What the partitions share."""

    k: PanelPipeline  # with two slots, the next tile's comes during this one
    v: PanelPipeline
    q: PanelPipeline
    do: PanelPipeline
    lse: gl.shared_memory_descriptor  # a row for each slot of q
    delta: gl.shared_memory_descriptor  # of do
    ds: Pipeline  # (keys, queries), from the consumers to the warpgroups that compute dQ


@gluon.jit
def make_buffers(inputs, KIND: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr):
    """Allocate them. Slots of Q and dO are given back together: of the narrow kind at Q_EMPTY, so
    they have no `empty` barriers. Only a pair has a slot of dO for itself, and one of dS, which
    both read.
    """
    BLOCK_Q: gl.constexpr = inputs.q.first.block_type.shape[-2]
    KEYS: gl.constexpr = inputs.k.first.block_type.shape[-2]
    PAIR: gl.constexpr = KIND == "pair"
    DO_STAGES: gl.constexpr = 1 if PAIR else STAGES
    if KIND == "halves":  # Q is the first in shared memory, as it was measured
        q = make_panel_pipeline(inputs.q, STAGES, 2)
    k = make_panel_pipeline(inputs.k, KV_STAGES, 2)
    v = make_panel_pipeline(inputs.v, KV_STAGES, 2)
    if KIND == "narrow":
        q = make_panel_pipeline_beside(inputs.q, STAGES, k)
    elif PAIR:
        q = make_panel_pipeline(inputs.q, STAGES, 2)
    if PAIR:
        do = make_panel_pipeline(inputs.do, DO_STAGES, 2)
    else:
        do = make_panel_pipeline_beside(inputs.do, DO_STAGES, q)
    lse, delta = make_slots(inputs.values, STAGES), make_slots(inputs.values, DO_STAGES)
    ds = make_handover(
        inputs.q.first.dtype, KEYS, BLOCK_Q, 2, 1 if PAIR else 2, 2 if PAIR else 1, KIND == "narrow"
    )
    return Buffers(k, v, q, do, lse, delta, ds)


@aggregate
class Held:
    """V and K of a consumer as left operands in registers; if not HELD, a 0 each, and they are read
    from their slot in shared memory.
    """

    v: gl.tensor
    k: gl.tensor
    slot: gl.tensor
    HELD: gl.constexpr


@gluon.jit
def consumer_half(pipeline, slot, CONSUMER: gl.constexpr):
    """A consumer's 64 rows of a tile of K or V."""
    tile = pipeline.tile(pipeline.at(slot + unknown_zero(), 0))
    return tile.rows(CONSUMER * WARPGROUP_ROWS, WARPGROUP_ROWS)


@gluon.jit
def hold(buffers, slot, BLOCK_Q: gl.constexpr, HELD: gl.constexpr, CONSUMER: gl.constexpr):
    """A consumer's rows of V and K in a slot, for products with blocks of so many queries."""
    if HELD:
        operand: gl.constexpr = operand_layout(accumulator_layout(BLOCK_Q))
        v = consumer_half(buffers.v, slot, CONSUMER).first.load(operand)
        k = consumer_half(buffers.k, slot, CONSUMER).first.load(operand)
        return Held(v, k, slot, HELD)
    else:
        return Held(gl.to_tensor(0), gl.to_tensor(0), slot, HELD)


@gluon.jit
def multiply(a, b):
    """Issue the product of a tile, in shared memory or as a left operand in registers, and one in
    shared memory: a token to wait for.
    """
    ROWS: gl.constexpr = a.shape[0]
    COLUMNS: gl.constexpr = b.shape[1]
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, accumulator_layout(COLUMNS))
    return warpgroup_mma(a, b, zero, use_acc=False, is_async=True)


@gluon.jit
def multiply_rows(rows, tile, HELD: gl.constexpr):
    """Issue the product of a consumer's rows of K or V, in registers if HELD, and a transposed tile
    of Q or dO: a token to wait for.
    """
    if HELD:
        return multiply(rows, tile.first.permute((1, 0)))
    else:
        return multiply_qk(rows.pair(), tile)


@gluon.jit
def multiply_into(acc, a, tile):
    """Issue acc + a b of each panel, a of 16 bits in the registers of an accumulator: what
    `Output.wait` waits for.
    """
    operand: gl.constexpr = operand_layout(acc.first.type.layout)
    return multiply_pv(gl.convert_layout(a, operand, assert_trivial=True), tile, acc)


@gluon.jit
def row_values(values, stage, like):
    """A number for each query of a slot, as columns of a tile are held."""
    row = values.index(stage.slot)
    columns: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    return row.reshape([row.shape[3]]).load(columns)


@gluon.jit
def half_of_values(values, slot, like, HALF: gl.constexpr):
    """`row_values` of half of a block's queries."""
    row = values.index(slot)
    QUERIES: gl.constexpr = row.shape[3] // 2
    columns: gl.constexpr = gl.SliceLayout(0, like.type.layout)
    return row.reshape([row.shape[3]]).slice(HALF * QUERIES, QUERIES).load(columns)


@gluon.jit
def part_of_dims(tile, PART: gl.constexpr, WIDTH: gl.constexpr):
    """So many columns of a tile, which no panel ends within."""
    FIRST: gl.constexpr = tile.first.shape[1]
    DIM: gl.constexpr = PART * WIDTH
    if DIM < FIRST:
        return tile.first.slice(DIM, WIDTH, dim=1)
    else:
        return tile.second.slice(DIM - FIRST, WIDTH, dim=1)


@gluon.jit
def multiply_dq(ds_tile, k_part):
    """Issue a part of the dims of dQ = dS K, of a dS (keys, queries): a token to wait for."""
    return multiply(ds_tile.permute((1, 0)), k_part)


@gluon.constexpr_function
def conversion_ptx(dtype):
    """PTX that rounds two numbers to one register, and PTX that takes it apart."""
    if dtype == gl.bfloat16:
        return ("cvt.rn.bf16x2.f32 $0, $2, $1;", "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;")
    return (
        "cvt.rn.f16x2.f32 $0, $2, $1;",
        "{ .reg .b16 low, high; mov.b32 {low, high}, $2; "
        "cvt.f32.f16 $0, low; cvt.f32.f16 $1, high; }",
    )


@gluon.jit
def narrowed(x, like):
    """x in the 16 bits of another tile, with nothing left of its fp32 values.

    In PTX, since the compiler would see through `to`: what is computed from x later it computes
    from the fp32 values, and keeps their registers until then.
    """
    PTX: gl.constexpr = conversion_ptx(like.dtype)[0]
    return gl.inline_asm_elementwise(PTX, "=r,f,f", [x], dtype=like.dtype, is_pure=False, pack=2)


@gluon.jit
def widened(x):
    """What was `narrowed`, in fp32 again, here and not earlier."""
    PTX: gl.constexpr = conversion_ptx(x.dtype)[1]
    return gl.inline_asm_elementwise(PTX, "=r,=r,r", [x], dtype=gl.float32, is_pure=False, pack=2)


@gluon.jit
def exchanged(x):
    """The columns of every 32, or of 16 if there are no more, in another order, as `rows.in_order`
    says: those that a thread has in an accumulator, two of every eight, become neighbours.

    It then stores 16 bytes at a time, where 8 would meet each bank of shared memory twice.
    """
    ROWS: gl.constexpr = x.shape[0]
    COLUMNS: gl.constexpr = x.shape[1]
    EIGHTS: gl.constexpr = 4 if COLUMNS >= 32 else COLUMNS // 8
    parts = x.reshape([ROWS, COLUMNS // (8 * EIGHTS), EIGHTS, 4, 2])
    return parts.permute((0, 1, 3, 2, 4)).reshape([ROWS, COLUMNS])


@gluon.jit
def add_dq(dq, tile, dq_sum, corner):
    """Add a part of a block's dQ to what other tiles of keys have added. Two tiles take turns: one
    is free when only the addition of the other is on its way.
    """
    dq = exchanged(dq)
    tma.store_wait(1)
    as_matrix(tile).store(dq)
    fence_async_shared()
    add_tile(dq_sum, corner, tile)


@gluon.jit
def store_gradient(x, slots, slot, desc, coordinates):
    """Store a part of dK or dV as a box, through a slot of a pipeline, which no other warp fills
    or reads; slots are counted as if each had the size of a box.
    """
    box: gl.constexpr = desc.block_type.shape
    WHOLE: gl.constexpr = slots.shape[0] * slots.shape[-2] * slots.shape[-1]
    shape: gl.constexpr = [WHOLE // (box[-2] * box[-1])] + box
    tile = reinterpret(slots, shape, desc.layout).index(slot)
    as_matrix(tile).store(x.to(desc.dtype))
    fence_async_shared()
    store_tile(desc, coordinates, tile)


@gluon.jit
def store_panels(x, pipeline, slot, boxes, coordinates):
    """`store_gradient` of each panel."""
    slots = pipeline.slots(boxes.PANELS)
    store_gradient(x.first, slots.first, slot, boxes.first, coordinates)
    if boxes.PANELS == 2:
        store_gradient(x.second, slots.second, slot, boxes.second, boxes.beside(coordinates))
