"""FlashAttention 3 in FP8: half the bytes, twice the rate of products.

What 16 bits waste. A tensor core multiplies 8-bit numbers twice as fast as 16-bit ones, and tiles
of them take half of the memory. But e4m3, the 8-bit format here, has 3 bits of fraction and ends at
448.

The ideas.
* Scaling factors. A block of 64 queries or 128 keys is divided by a scale of its own, so that its
  largest number becomes the largest that fits: value = 8-bit number * scale. The scales of Q and K
  become a part of the factor of the scores, and the product of P with V is multiplied by V's.
* P is at most 1, and e4m3 loses bits below 2^-6. So the exponent is raised by 8: P and its sum are
  2^8 times as large, which cancels in o.
* V is stored transposed, because a tensor core reads 8-bit operands only along the keys. Its keys
  change places in groups of 16, so that a thread that holds a score after S = Q K^T is the one that
  P V reads it from: `in_order_of_values` moves no data.

    Q, 64 rows * q_scale      K, 128 rows * k_scale         V, 128 rows * v_scale
    S = (Q K^T) * q_scale k_scale                           O = sum of (P V) * v_scale

Cost. Half of the traffic and of the time of products; a pass over Q, K and V before, here by torch.
The error is that of 8-bit inputs, some percent.

Source: Shah et al. 2024, arXiv:2407.08608, section 3.3. The engine's kernels have V's scales in the
exponent of P, too; for those with scores in fp16, Q and K are quantised to less than 448.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

FEATURES = ("causal", "grouped_heads", "precision")
TILES = {64: (128, 128, 8, 3), 128: (128, 128, 8, 3)}  # by head_dim, the fastest on an H200
LARGEST = {64: 22.0, 128: 15.0}  # of Q and K: head_dim products of these are half of fp16's range
ROWS_PER_SCALE, KEYS_PER_SCALE = tl.constexpr(64), tl.constexpr(128)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_rows(x, row, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Rows of a head as a (rows, DIM) tile; those past the length read as 0."""
    return x[0].load([x[1], x[2], row, 0]).reshape(ROWS, DIM)  # a box, by TMA: from this row on


@triton.jit
def in_order_of_values(p):
    """The columns of P in the order in which V has its keys: within 16, key 8 h + 2 l + j comes to
    4 l + 2 h + j (h, j < 2; l < 4).
    """
    return p.reshape(p.shape[0], p.shape[1] // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(p.shape)


@triton.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    s is unscaled, scale_log2 has a number for each row, row_max is scaled and in log2 units. p and
    row_sum come times 2^8.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp2(s * scale_log2[:, None] - (pivot - 8.0)[:, None])
    alpha = tl.exp2(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, row_scale, last_key, k, v,
    DIM: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold block j of the keys into the state (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, j * BLOCK_KV, BLOCK_KV, DIM)
    scale_log2 = row_scale * tl.load(k[3] + j * BLOCK_KV // KEYS_PER_SCALE)
    s = tl.dot(q_tile, k_tile.T)
    if MASKED:
        s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale_log2)
    v_tile = v[0].load([v[1], v[2], 0, j * BLOCK_KV]).reshape(DIM, BLOCK_KV)
    pv = tl.dot(in_order_of_values(p.to(v_tile.dtype)), v_tile.T)
    acc = acc * alpha[:, None] + pv * tl.load(v[3] + j * BLOCK_KV // KEYS_PER_SCALE)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["q_length", "kv_length"])
def forward_kernel(
    q, k, v, q_scale, k_scale, v_scale, o, lse, section,
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
    kv_head, blocks = head // GROUP, tl.cdiv(kv_length, KEYS_PER_SCALE)
    first = (sequence * (heads // GROUP) + kv_head) * blocks  # scale of this head
    k, v = (k, sequence, kv_head, k_scale + first), (v, sequence, kv_head, v_scale + first)

    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = kv_length - q_length if CAUSAL else kv_length  # the last query sees the last key
    last_key = tl.minimum(row + offset, kv_length - 1)
    end = tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV)
    full_end = tl.maximum(tl.minimum(tile * BLOCK_Q + offset + 1, kv_length), 0) // BLOCK_KV

    q_tile = load_rows((q, sequence, head), tile * BLOCK_Q, BLOCK_Q, DIM)
    q_scale += (sequence * heads + head) * tl.cdiv(q_length, ROWS_PER_SCALE) + row // ROWS_PER_SCALE
    row_scale = scale_log2 * tl.load(q_scale, mask=row < q_length, other=1.0)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for j in range(full_end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, row_scale, last_key, k, v, DIM, BLOCK_KV, False
        )
    for j in range(full_end, end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, row_scale, last_key, k, v, DIM, BLOCK_KV, True
        )
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * (1.0 / row_sum)[:, None]
    row_lse = (row_max - 8.0 + tl.log2(row_sum)) / LOG2E

    box = acc.to(o.dtype).reshape(1, 1, BLOCK_Q, DIM)
    o.store([sequence, head, tile * BLOCK_Q, 0], box)  # no row past the end is written
    lse += (sequence.to(tl.int64) * heads + head) * q_length + row
    tl.store(lse, row_lse, mask=row < q_length)


def limits(request):
    """Why this lesson cannot serve a request, as a sentence, or None."""
    if request.precision != "fp8:block:e4m3" or request.q.element_size() == 1:
        return f"precision={request.precision!r} is not possible; 'fp8' with inputs of 16 bits is."
    if 0 in (*request.q.shape, *request.k.shape):
        return "q or k is empty; TMA copies from tensors that are not."
    dim = request.q.shape[3]
    return None if dim in (64, 128) else f"q has head_dim {dim}; 64 and 128 work."


def quantize(x, block, largest):
    """x (batch, length, heads, dim) in 8 bits, and the scale of each block of rows (batch, heads,
    blocks): value = 8-bit number * scale, and the largest magnitude of a block becomes `largest`.
    """
    length = x.shape[1]
    x = torch.nn.functional.pad(x.float(), (0, 0, 0, 0, 0, -length % block)).unflatten(
        1, (-1, block)
    )
    scale = x.abs().amax((2, 4)) / largest
    scale = torch.where(scale > 0, scale, 1.0)
    x = (x * (1 / scale)[:, :, None, :, None]).clamp(-largest, largest)
    return x.flatten(1, 2)[:, :length].to(torch.float8_e4m3fn), scale.mT.contiguous()


def transpose(v):
    """v (batch, N, kv_heads, dim) with its keys last, in groups of 16, each in the order of P."""
    v = torch.nn.functional.pad(v, (0, 0, 0, 0, 0, -v.shape[1] % 16))
    return (
        v.unflatten(1, (-1, 2, 4, 2)).transpose(2, 3).flatten(1, 4).permute(0, 2, 3, 1).contiguous()
    )


def boxes(x, rows, columns):
    """A (batch, heads, length, width) tensor as boxes of so many rows and columns of one head."""
    return TensorDescriptor.from_tensor(x, [1, 1, rows, columns])


def forward(request):
    """Attention of a request's q (batch, M, heads, head_dim), k and v (batch, N, kv_heads,
    head_dim): o like q, and its LSE (batch, heads, M) in fp32, natural log.
    """
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, head_dim = q.shape
    large = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    block_q, block_kv, num_warps, num_stages = TILES[head_dim] if large else (64, 32, 4, 2)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    q, q_scale = quantize(q, ROWS_PER_SCALE.value, LARGEST[head_dim])
    k, k_scale = quantize(k, KEYS_PER_SCALE.value, LARGEST[head_dim])
    v, v_scale = quantize(v, KEYS_PER_SCALE.value, 448.0)
    grid = (triton.cdiv(q_length, block_q) * heads * batch,)
    section = request.group * max(1, 2**24 // k[0, :, 0].nbytes)  # K and V in 32 MB of L2 cache
    forward_kernel[grid](
        boxes(q.transpose(1, 2), block_q, head_dim),
        boxes(k.transpose(1, 2), block_kv, head_dim),
        boxes(transpose(v), head_dim, block_kv), q_scale, k_scale, v_scale,
        boxes(o.transpose(1, 2), block_q, head_dim), lse, section,
        request.scale * LOG2E.value, q_length, k.shape[1], heads, request.window_right == 0,
        request.group, head_dim, block_q, block_kv, num_warps=num_warps, num_stages=num_stages
    )  # fmt: skip
    return o, lse


if __name__ == "__main__":
    from flash_versions.lessons.check import run

    run(__file__)
