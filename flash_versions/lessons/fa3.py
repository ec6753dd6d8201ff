"""FlashAttention 3, what any GPU with TMA can use of it: one thread asks for a tile.

What FA2 wastes. Every thread computes 64-bit addresses and loads its part of K and V, while it
could feed the tensor cores. And programs begin head by head, with the heaviest tile of each head:
the last head's heaviest tile begins when most of the GPU is done, and the GPU waits for it.

The ideas.
* TMA (the tensor memory accelerator) copies a box of a tensor to shared memory. It knows address,
  shape and strides from a descriptor; what lies past the end arrives as 0, so no load has a mask.
  While it copies, all threads do something else: `num_stages` tiles are on their way.
* Heaviest first among all heads. The heads take turns: all their heaviest tiles, all their second
  ones, ... As many heads take turns as have keys that fit in the L2 cache together.

    FA2     every thread:  address, load, address, load | wait | tensor cores
    FA3     one thread:    copy box (sequence, head, row) | tensor cores, while TMA fills stages

Cost. FA2's products and traffic, without the address arithmetic.

Source: Shah et al. 2024, "FlashAttention-3: Fast and Accurate Attention with Asynchrony and
Low-precision", arXiv:2407.08608. Its other ideas, warps that only load and warpgroups that take
turns at the tensor cores, need Gluon: see `fa3_hopper`. `fa3_fp8` computes with 8-bit numbers.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

FEATURES = ("causal", "grouped_heads")
TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}  # by head_dim, the fastest on an H200
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def head_of(x, strides, sequence, head, length):
    """A head of a (batch, length, heads, DIM) tensor: its address, the stride of rows, length."""
    start = x + sequence.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return start, strides[1], length


@triton.jit
def row_pointers(x, row, DIM: tl.constexpr):
    """Where rows of a head are: pointers (rows, DIM)."""
    return x[0] + row.to(tl.int64)[:, None] * x[1] + tl.arange(0, DIM)[None, :]


@triton.jit
def load_rows(x, row, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Rows of a head as a (rows, DIM) tile; those past the length read as 0."""
    return x[0].load([x[1], x[2], row, 0]).reshape(ROWS, DIM)  # a box, by TMA: from this row on


@triton.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    s is unscaled, row_max scaled and in log2 units. alpha is 2^(m - m_new), by which everything
    counts less that was summed before.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp2(s * scale_log2 - pivot[:, None])
    alpha = tl.exp2(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, last_key, k, v, scale_log2,
    DIM: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold block j of the keys into the state (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, j * BLOCK_KV, BLOCK_KV, DIM)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    if MASKED:
        s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale_log2)
    v_tile = load_rows(v, j * BLOCK_KV, BLOCK_KV, DIM)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["q_length", "kv_length"])
def forward_kernel(
    q, k, v, o, lse, o_strides, section,
    scale_log2, q_length, kv_length, heads, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each tile of queries, head and sequence."""
    place, tiles = tl.program_id(0), tl.cdiv(q_length, BLOCK_Q)
    start = place // (section * tiles) * section  # the section's first head; its heads take turns
    width, turn = tl.minimum(section, tl.num_programs(0) // tiles - start), place - start * tiles
    place = (start + turn % width) * tiles + turn // width  # as FA2 would number it
    tile = tiles - 1 - place % tiles  # the last queries see the most keys
    head, sequence = (place // tiles) % heads, place // tiles // heads
    k, v = (k, sequence, head // GROUP), (v, sequence, head // GROUP)

    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = kv_length - q_length if CAUSAL else kv_length  # the last query sees the last key
    last_key = tl.minimum(row + offset, kv_length - 1)
    end = tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV)
    full_end = tl.maximum(tl.minimum(tile * BLOCK_Q + offset + 1, kv_length), 0) // BLOCK_KV

    q_tile = load_rows((q, sequence, head), tile * BLOCK_Q, BLOCK_Q, DIM)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for j in range(full_end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, last_key, k, v, scale_log2, DIM, BLOCK_KV, False
        )
    for j in range(full_end, end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, last_key, k, v, scale_log2, DIM, BLOCK_KV, True
        )
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * (1.0 / row_sum)[:, None]
    row_lse = (row_max + tl.log2(row_sum)) / LOG2E

    o = head_of(o, o_strides, sequence, head, q_length)
    tl.store(row_pointers(o, row, DIM), acc, mask=(row < q_length)[:, None])
    lse += (sequence.to(tl.int64) * heads + head) * q_length + row
    tl.store(lse, row_lse, mask=row < q_length)


def choose_tile(q):
    """BLOCK_Q, BLOCK_KV, warps and stages of the pipeline for q (batch, M, heads, head_dim): TILES,
    or in fp32 and on other GPUs smaller ones.
    """
    hopper = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    return TILES[q.shape[3]] if hopper and q.element_size() < 4 else (4096 // q.shape[3], 32, 8, 2)


def limits(request):
    """Why this lesson cannot serve a request, as a sentence, or None."""
    if 0 in (*request.q.shape, *request.k.shape):
        return "q or k is empty; TMA copies from tensors that are not."
    dim = request.q.shape[3]
    return None if dim in (64, 128) else f"q has head_dim {dim}; 64 and 128 work."


def boxes(x, rows):
    """x (batch, length, heads, head_dim), or a contiguous copy, as boxes of rows of one head."""
    return TensorDescriptor.from_tensor(x.contiguous().transpose(1, 2), [1, 1, rows, x.shape[3]])


def forward(request):
    """Attention of a request's q (batch, M, heads, head_dim), k and v (batch, N, kv_heads,
    head_dim): o like q, and its LSE (batch, heads, M) in fp32, natural log.
    """
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, head_dim = q.shape
    block_q, block_kv, num_warps, num_stages = choose_tile(q)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(q_length, block_q) * heads * batch,)
    section = request.group * max(1, 2**24 // k[0, :, 0].nbytes)  # K and V in 32 MB of L2 cache
    forward_kernel[grid](
        boxes(q, block_q), boxes(k, block_kv), boxes(v, block_kv), o, lse, o.stride(), section,
        request.scale * LOG2E.value, q_length, k.shape[1], heads, request.window_right == 0,
        request.group, head_dim, block_q, block_kv, num_warps=num_warps, num_stages=num_stages
    )  # fmt: skip
    return o, lse


if __name__ == "__main__":
    from flash_versions.lessons.check import run

    run(__file__)
