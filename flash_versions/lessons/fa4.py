"""FlashAttention 4, what any GPU with TMA can use of it: exponentials are the bottleneck.

What FA3 wastes. Tensor cores have become faster from GPU to GPU, the other units have not. In a
cycle, an SM (streaming multiprocessor) of Hopper multiplies and adds 2048 pairs of 16-bit numbers,
and one of Blackwell 4096; both compute 16 exponentials. At head_dim 128, the products of a score
take 2 x 128 / 4096 = 1/16 of a cycle on Blackwell, and its exponential takes as long. FA3 also
multiplies the accumulator by alpha in each block, although alpha is 1 in most of them.

The ideas.
* Conditional rescaling. A row has a reference r in the place of the running maximum, and p is
  2^(s - r). r rises only when a score exceeds it by more than 8, so p is at most 2^8, which 16 bits
  hold. o = sum p v / sum p does not depend on r, so nothing is approximated. Where no row of the
  tile rises, the accumulator is not touched.
* A polynomial for a quarter of the exponentials, on the multiply-add units: 128 of them a cycle.
  Its error is smaller than the rounding of P to 16 bits.

    x = n + f      2^x = 2^n 2^f      n: into the exponent's bits      2^f: c4 f^4 + ... + c1 f + 1

Cost. Products and traffic are FA3's. On Hopper, both ideas cost about what they save: there the
products take twice as long as the exponentials.

Source: Zadouri et al. 2026, "FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for
Asymmetric Hardware Scaling", arXiv:2603.05451. `fa4_hopper` has both ideas in FA3's pipeline.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

FEATURES = ("causal", "grouped_heads")
TILES = {64: (64, 64, 4, 3), 128: (64, 64, 4, 3)}  # by head_dim, the fastest on an H200
THRESHOLD = tl.constexpr(8.0)  # in log2 units: what is summed exceeds 1 by up to 2^8
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
def raise_reference(s, row_max, scale_log2):
    """Fold scores (queries, keys) into the references of their rows: (row_max, pivot, alpha).

    s is unscaled, row_max the reference in log2 units, which stays unless a score exceeds it by
    more than THRESHOLD. alpha is 2^(old - new), so exactly 1 where it stays.
    """
    block_max = tl.max(s, 1) * scale_log2
    new_max = tl.where(block_max > row_max + THRESHOLD, block_max, row_max)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    alpha = tl.where(row_max == float("-inf"), 1.0, tl.exp2(row_max - pivot))
    return new_max, pivot, alpha


@triton.jit
def polynomial_exp2(x):
    """2^x for x up to 127 without the special function unit: x = n + f with an integer n and f in
    -1/2 .. 1/2, a polynomial for 2^f, and n added to its exponent. 0 from x = -127 down.
    """
    x = tl.maximum(x, -127.0, propagate_nan=tl.PropagateNan.ALL)
    shifted = x + 12582912.0  # 1.5 * 2^23: this rounds x to n, and has n in its lowest bits
    f = x - (shifted - 12582912.0)
    p = (((0.009582853 * f + 0.055906426) * f + 0.24024099) * f + 0.69312418) * f + 1.0
    exponent = shifted.to(tl.int32, bitcast=True) << 23
    return (p.to(tl.int32, bitcast=True) + exponent).to(tl.float32, bitcast=True)


@triton.jit
def mixed_exp2(x):
    """2^x of a (rows, columns) tile, a quarter of the columns by the polynomial: of every 16, the
    odd ones of the upper 8. A thread of the tensor cores has columns 2 l, 2 l + 1 of every 8, so
    each has its share of both kinds, and no number moves from thread to thread.
    """
    even, odd = tl.split(x.reshape(x.shape[0], x.shape[1] // 2, 2))
    low, high = tl.split(odd.reshape(x.shape[0], x.shape[1] // 16, 2, 4).permute(0, 1, 3, 2))
    odd = tl.join(tl.exp2(low), polynomial_exp2(high)).permute(0, 1, 3, 2)
    return tl.join(tl.exp2(even), odd.reshape(even.shape)).reshape(x.shape)


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
    row_max, pivot, alpha = raise_reference(s, row_max, scale_log2)
    if tl.min(alpha) < 1.0:
        acc = acc * alpha[:, None]
    p = mixed_exp2(s * scale_log2 - pivot[:, None])
    row_sum = alpha * row_sum + tl.sum(p, 1)
    v_tile = load_rows(v, j * BLOCK_KV, BLOCK_KV, DIM)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
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
    if request.q.dtype == torch.float32:
        return "q has dtype float32, for which the polynomial is too coarse; 16 bits work."
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
