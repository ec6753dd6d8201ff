"""FlashAttention 1: attention without ever writing the score matrix to memory.

What plain attention wastes. It writes the M x N scores S = Q K^T to memory, reads them for the
softmax, writes P = softmax(S) and reads it again for P V: O(M N) bytes of traffic for inputs of
O(N D). At 8192 tokens and head_dim 128, S is 16 times as large as Q, K, V and O together.

The idea. A softmax can be computed block by block. For each query, keep the largest score m so far,
the sum of exponentials l and the output o. A block of scores S_j changes them as follows:

    m_new = max(m, rowmax(S_j))                        P_j = exp(S_j - m_new)
    l_new = exp(m - m_new) l + rowsum(P_j)
    o_new = (exp(m - m_new) l o + P_j V_j) / l_new

After each block, o is the attention over the keys so far, and S_j can be forgotten.

             K_0 V_0   K_1 V_1   K_2 V_2       One program for each row of blocks. It walks from
      Q_0    [ cut ]                           left to right, with o, m and l in registers, and
      Q_1    [ all ]   [ cut ]                 with a causal mask it ends at the diagonal, where
      Q_2    [ all ]   [ all ]   [ cut ]       the mask cuts a block.

Cost. Each program reads Q, and K and V up to the diagonal, and writes O once: O(M N D / BLOCK_Q)
bytes, most of which the L2 cache serves: programs of a head have neighbouring numbers, so they run
at the same time. The products take 4 M N D operations, as before.

Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness", arXiv:2205.14135, Algorithm 1. There the outer loop goes over blocks of keys, and O
is read and written in each of them; here it goes over queries, so that O is written once.
`fa1_backward` has the gradients.
"""

import torch
import triton
import triton.language as tl

FEATURES = ("causal", "grouped_heads", "kv_lengths")
TILES = {64: (128, 64, 4, 2), 128: (64, 64, 4, 3)}  # by head_dim, the fastest on an H200


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
def load_rows(x, row, DIM: tl.constexpr):
    """Rows of a head as a (rows, DIM) tile; those past the length read as 0."""
    return tl.load(row_pointers(x, row, DIM), mask=(row < x[2])[:, None], other=0.0)


@triton.jit
def softmax_step(s, row_max, row_sum):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    alpha is exp(m - m_new), by which everything counts less that was summed before.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1))
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp(s - pivot[:, None])
    alpha = tl.exp(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, last_key, k, v, scale,
    DIM: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """Fold block j of the keys into the state (acc, row_max, row_sum); acc stays normalised."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, k_pos, DIM)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
    s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    p, new_max, new_sum, alpha = softmax_step(s, row_max, row_sum)
    v_tile = load_rows(v, k_pos, DIM)
    pv = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
    norm = 1.0 / tl.where(new_sum == 0.0, 1.0, new_sum)
    acc = (acc * (alpha * row_sum)[:, None] + pv) * norm[:, None]
    return acc, new_max, new_sum


@triton.jit(do_not_specialize=["q_length", "kv_length"])
def forward_kernel(
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, lengths,
    scale, q_length, kv_length, heads, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each tile of queries, head and sequence."""
    place, tiles = tl.program_id(0), tl.cdiv(q_length, BLOCK_Q)
    tile = place % tiles
    head, sequence = (place // tiles) % heads, place // tiles // heads
    if lengths is not None:  # this sequence has fewer keys
        kv_length = tl.maximum(tl.minimum(tl.load(lengths + sequence), kv_length), 0).to(tl.int32)
    k = head_of(k, k_strides, sequence, head // GROUP, kv_length)
    v = head_of(v, v_strides, sequence, head // GROUP, kv_length)

    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = kv_length - q_length if CAUSAL else kv_length  # the last query sees the last key
    last_key = tl.minimum(row + offset, kv_length - 1)
    end = tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV)

    q_tile = load_rows(head_of(q, q_strides, sequence, head, q_length), row, DIM)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for j in range(end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, last_key, k, v, scale, DIM, BLOCK_KV
        )
    row_lse = row_max + tl.log(tl.where(row_sum == 0.0, 1.0, row_sum))

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
    dim = request.q.shape[3]
    return None if dim in (64, 128) else f"q has head_dim {dim}; 64 and 128 work."


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
    forward_kernel[grid](
        q, k, v, o, lse, q.stride(), k.stride(), v.stride(), o.stride(), request.kv_lengths,
        request.scale, q_length, k.shape[1], heads, request.window_right == 0,
        request.group, head_dim, block_q, block_kv, num_warps=num_warps, num_stages=num_stages
    )  # fmt: skip
    return o, lse


if __name__ == "__main__":
    from flash_versions.lessons.check import run

    run(__file__)
