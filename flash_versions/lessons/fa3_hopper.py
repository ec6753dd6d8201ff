"""FlashAttention 3 on Hopper: warps with different jobs keep the tensor cores busy.

What FA2 wastes. The same warps load tiles, multiply and compute exponentials, one after the other.
At head_dim 128 the exponentials take half as long as the products, and the tensor cores wait.

The ideas.
* Warp specialisation. One warp only loads, by TMA, into rings: slots in shared memory, each with a
  barrier `full` (the tile has landed) and a barrier `empty` (both consumers have read it). Two
  warpgroups, of four warps each, compute: 64 rows of Q each, with most of the registers.
* Asynchronous products (WGMMA). S of the next block is issued together with P V of this one, and
  the tensor cores work at both without a pause; a warpgroup waits for what it needs next.
* Ping-pong. The two consumers take turns at the tensor cores, by a named barrier: one issues its
  products while the other one computes exponentials.

    producer      K0 V0 K1 V1 K2 ...               TMA, as slots of the rings become empty
    consumer 0    [S1 PV0] softmax 1   [S2 PV1] softmax 2   [S3 PV2]   [ ]: the tensor cores
    consumer 1             [S1 PV0] softmax 1   [S2 PV1] softmax 2

Blocks are folded from the last to the first: with a causal mask, those that are cut come first.

Cost. FA2's products. Two stages of K and V, Q and O take 192 KB of shared memory at head_dim 128,
so one program runs on an SM (streaming multiprocessor).

Source: Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
Low-precision", arXiv:2407.08608, Algorithms 1 and 2. There programs are persistent: each works on
many tiles, and loads one while it stores the one before.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from flash_versions.versions.fa3.hopper.operands import multiply_pv, multiply_qk, rounded
from flash_versions.versions.tiles import pipeline
from flash_versions.versions.tiles.tma import describe_swizzled
from flash_versions.versions.tiles.triton_compat import aggregate, store_tile
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS as ROWS
from flash_versions.versions.tiles.wgmma import accumulator_layout

FEATURES = ("causal", "grouped_heads")
STAGES = {64: 3, 128: 2}  # slots of the rings of K and V, by head_dim
LOG2E = gl.constexpr(1.4426950408889634)
BLOCK_KV = gl.constexpr(128)


@aggregate
class Tile:
    """The queries that a program works on, and the blocks of keys that they see."""

    sequence: gl.tensor
    head: gl.tensor
    query: gl.tensor  # the first one
    offset: gl.tensor  # query i sees key i + offset and those before it
    kv_length: gl.tensor
    full_end: gl.tensor  # all queries see all keys of the blocks before this one
    end: gl.tensor


@aggregate
class Rings:
    """What is in shared memory: tiles that the producer loads and the consumers read, and O."""

    q: pipeline.Pipeline  # a slot for each consumer
    k: pipeline.Pipeline
    v: pipeline.Pipeline
    o: gl.shared_memory_descriptor  # a slot for each consumer


@gluon.jit
def heavy_first(number, tiles, section):
    """The place of the tile that this program works on, if the tiles of a head were neighbours, the
    heaviest first. The heads of a section take turns: all their heaviest tiles, all their second
    ones, ...
    """
    first = number // (section * tiles) * section
    width = gl.minimum(section, gl.num_programs(0) // tiles - first)
    turn = number - first * tiles
    return (first + turn % width) * tiles + turn // width


@gluon.jit
def locate(q_length, kv_length, heads, section, CAUSAL: gl.constexpr):
    """The program's tile. Its last block of keys is masked, and there is one, if all is masked."""
    tiles = gl.cdiv(q_length, 2 * ROWS)
    place = heavy_first(gl.program_id(0), tiles, section)
    query = (tiles - 1 - place % tiles) * 2 * ROWS  # the last queries see the most keys
    head, sequence = (place // tiles) % heads, place // tiles // heads
    offset = kv_length - q_length if CAUSAL else kv_length  # the last query sees the last key
    end = gl.maximum(gl.cdiv(gl.minimum(query + 2 * ROWS + offset, kv_length), BLOCK_KV), 1)
    full_end = gl.maximum(gl.minimum(query + offset + 1, kv_length), 0) // BLOCK_KV
    return Tile(sequence, head, query, offset, kv_length, gl.minimum(full_end, end - 1), end)


@gluon.jit
def produce(tile, rings, q, k, v, GROUP: gl.constexpr):
    """The producer: ask for Q of both consumers, and for the blocks of K and V, the last first."""
    for c in gl.static_range(2):
        rings.q.fill(rings.q.at(c, 0), q, [tile.sequence, tile.head, tile.query + c * ROWS, 0])
    stage = rings.k.at(0, 0)
    for block in range(tile.end - 1, -1, -1):
        rings.k.fill(stage, k, [tile.sequence, tile.head // GROUP, block * BLOCK_KV, 0])
        rings.v.fill(stage, v, [tile.sequence, tile.head // GROUP, block * BLOCK_KV, 0])
        stage = stage.next()


@gluon.jit
def masked(s, block, last_key):
    """Scores (queries, keys) of a block, with -inf at keys behind the last one of each query."""
    k_pos = block * BLOCK_KV + gl.arange(0, BLOCK_KV, layout=gl.SliceLayout(0, s.type.layout))
    return gl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))


@gluon.jit
def softmax_step(s, row_max, row_sum, scale):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    s is unscaled, row_max scaled and in log2 units.
    """
    new_max = gl.maximum(row_max, gl.max(s, 1) * scale)
    pivot = gl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = gl.exp2(s * scale - pivot[:, None])
    alpha = gl.exp2(row_max - pivot)
    return p, new_max, alpha * row_sum + gl.sum(p, 1), alpha


@gluon.jit
def per_row(x, acc):
    """A number for each row of the scores as one for each row of O, in the same threads."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)


@gluon.jit
def fold_block(
    block, p, acc, row_max, row_sum, stage, tile, rings, q_tile, last_key, scale,
    CONSUMER: gl.constexpr
):  # fmt: skip
    """Issue S of this block, and P V of the one before, whose P is given. Then compute this block's
    softmax, while the tensor cores work for the other consumer: (p, acc, row_max, row_sum, stage).
    """
    before, stage = stage, stage.next()
    rings.k.wait(stage)
    pipeline.named_barrier_sync(CONSUMER)  # wait for the turn
    s_token = multiply_qk(q_tile, rings.k.tile(stage))
    rings.v.wait(before)
    acc_token = multiply_pv(p, rings.v.tile(before), acc)
    pipeline.named_barrier_arrive(CONSUMER, 2)  # give the turn away
    s = hopper.warpgroup_mma_wait(1, deps=[s_token])
    rings.k.release(stage)
    if block >= tile.full_end:
        s = masked(s, block, last_key)
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale)
    acc = hopper.warpgroup_mma_wait(0, deps=[acc_token])
    rings.v.release(before)
    p = rounded(p, rings.v.tile(stage), acc)
    return p, acc * per_row(alpha, acc)[:, None], row_max, row_sum, stage


@gluon.jit
def consume(tile, rings, o, lse, q_length, scale, CONSUMER: gl.constexpr):
    """A consumer: the attention of 64 queries of the tile."""
    rows: gl.constexpr = gl.SliceLayout(1, accumulator_layout(BLOCK_KV))
    DIM: gl.constexpr = o.block_type.shape[3]
    row = tile.query + CONSUMER * ROWS + gl.arange(0, ROWS, layout=rows)
    last_key = gl.minimum(row + tile.offset, tile.kv_length - 1)
    acc = gl.zeros([ROWS, DIM], gl.float32, accumulator_layout(DIM))
    row_max = gl.full([ROWS], float("-inf"), gl.float32, rows)
    row_sum = gl.zeros([ROWS], gl.float32, rows)
    if CONSUMER == 1:
        pipeline.named_barrier_arrive(CONSUMER, 2)  # consumer 0 has the first turn

    q_stage, stage = rings.q.at(CONSUMER, 0), rings.k.at(0, 0)
    rings.q.wait(q_stage)
    q_tile = rings.q.tile(q_stage)
    rings.k.wait(stage)
    s = hopper.warpgroup_mma_wait(0, deps=[multiply_qk(q_tile, rings.k.tile(stage))])
    rings.k.release(stage)
    s = masked(s, tile.end - 1, last_key)
    p, row_max, row_sum, _ = softmax_step(s, row_max, row_sum, scale)
    p = rounded(p, rings.v.tile(stage), acc)
    for block in range(tile.end - 2, -1, -1):
        p, acc, row_max, row_sum, stage = fold_block(
            block, p, acc, row_max, row_sum, stage, tile, rings, q_tile, last_key, scale, CONSUMER
        )
    rings.v.wait(stage)
    acc = hopper.warpgroup_mma_wait(0, deps=[multiply_pv(p, rings.v.tile(stage), acc)])

    row_sum = gl.where(row_sum == 0.0, 1.0, row_sum)
    gl.store(lse + row, (row_max + gl.log2(row_sum)) / LOG2E, mask=row < q_length)
    o_tile = rings.o.index(CONSUMER)
    pipeline.as_matrix(o_tile).store((acc * per_row(1.0 / row_sum, acc)[:, None]).to(o.dtype))
    hopper.fence_async_shared()
    store_tile(o, [tile.sequence, tile.head, tile.query + CONSUMER * ROWS, 0], o_tile)
    hopper.tma.store_wait(0)


@gluon.jit(do_not_specialize=["q_length", "kv_length", "heads", "section"])
def forward_kernel(
    q, k, v, o, lse, scale, q_length, kv_length, heads, section,
    CAUSAL: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr
):  # fmt: skip
    """Divide the warps of a program into two consumers, of four each, and a producer."""
    tile = locate(q_length, kv_length, heads, section, CAUSAL)
    k_ring, v_ring = pipeline.make_pipeline(k, STAGES, 2), pipeline.make_pipeline(v, STAGES, 2)
    rings = Rings(pipeline.make_pipeline(q, 2, 1), k_ring, v_ring, pipeline.make_slots(o, 2))
    lse += (tile.sequence.to(gl.int64) * heads + tile.head) * q_length
    hopper.fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (tile, rings, o, lse, q_length, scale, 0)),
            (consume, (tile, rings, o, lse, q_length, scale, 1)),
            (produce, (tile, rings, q, k, v, GROUP)),
        ],
        [4, 1],  # warps of the second and the third one
        [240, 24],  # and registers of their threads
    )


def limits(request):
    """Why this lesson cannot serve a request, as a sentence, or None."""
    q = request.q
    if q.is_cuda and torch.cuda.get_device_capability(q.device) != (9, 0):
        return f"{q.device} is no Hopper GPU (compute capability 9.0)."
    takes = q.element_size() == 2 and q.shape[3] in STAGES and 0 not in (*q.shape, *request.k.shape)
    given = f"q is {q.dtype} with head_dim {q.shape[3]}"
    return None if takes else f"{given}; 16 bits, 64 and 128 work, and no empty tensor."


def forward(request):
    """Attention of a request's q (batch, M, heads, head_dim), k and v (batch, N, kv_heads,
    head_dim): o like q, and its LSE (batch, heads, M) in fp32, natural log.
    """
    q, k, v = (x.contiguous() for x in (request.q, request.k, request.v))
    batch, q_length, heads, head_dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    q_box, o_box = (describe_swizzled(x, ROWS.value, head_dim) for x in (q, o))
    k_box, v_box = (describe_swizzled(x, BLOCK_KV.value, head_dim) for x in (k, v))
    programs = triton.cdiv(q_length, 2 * ROWS.value) * heads * batch
    section = request.group * max(1, 2**24 // k[0, :, 0].nbytes)  # K and V in 32 MB of L2 cache
    forward_kernel[programs,](
        q_box, k_box, v_box, o_box, lse, request.scale * LOG2E.value, q_length, k.shape[1], heads,
        section, request.window_right == 0, request.group, STAGES[head_dim], num_warps=4
    )  # fmt: skip
    return o, lse


if __name__ == "__main__":
    from flash_versions.lessons.check import run

    run(__file__)
