"""FlashAttention 1, backward: the gradients without ever writing P or dS to memory.

`lesson-fa1` is the forward of `fa1` with the backward of this file.

What plain attention wastes. It keeps the M x N matrix P from the forward for the backward, and
writes dP and dS, which are as large.

The idea. The forward keeps one number for each query, its LSE = m + log l. The backward computes a
tile of P again when it needs it: P_ij = exp(S_ij - LSE_i). With S = scale Q K^T, O = P V and dO the
gradient of O:

    dV = P^T dO                 O_i = sum_j P_ij V_j: key j collects P_ij dO_i from every query
    dP = dO V^T                 dP_ij = dO_i . V_j
    dS = P * (dP - delta)       the softmax: if S_ij grows, P_ij grows and all other P_ik shrink
    dQ = scale dS K
    dK = scale dS^T Q

delta_i = sum_k P_ik dP_ik is a sum over all keys, and a tile does not have all keys. But it equals
dO_i . sum_k P_ik V_k = dO_i . O_i, and every tile has these two rows. If S_ij grows by x, LSE_i
grows by P_ij x: a gradient of the LSE is subtracted from delta.

    for j in blocks of keys:               K_j V_j: loaded once, dK_j dV_j: summed in registers
        for i in blocks of queries:        Q_i dO_i O_i: loaded N / BLOCK_KV times
                                           dQ_i: loaded and stored N / BLOCK_KV times, in fp32

Cost. Five matrix products for each pair of blocks; the forward has two. One program computes all
pairs of a key head, so only a large batch fills a GPU.

Source: Dao et al. 2022, arXiv:2205.14135, Algorithm 4 and appendix B, without dropout. The paper
keeps m and l; the loop over the heads of a group and the gradient of the LSE are additions.
"""

import torch
import triton
import triton.language as tl

TILES = {64: (128, 64, 8), 128: (32, 64, 8)}  # by head_dim: 80 KB of shared memory or less


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
def probabilities(s, row_lse):
    """P = exp(S - LSE) of scores (queries, keys); 0 for a query whose LSE is infinite."""
    return tl.exp(s - tl.where(row_lse == float("-inf"), float("inf"), row_lse)[:, None])


@triton.jit
def fold_queries(
    i, dk, dv, k_tile, v_tile, k_pos, q, o, do, dq, lse, dlse, offset, kv_length, scale,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr
):  # fmt: skip
    """Fold block i of the queries into (dk, dv) of a block of keys, dk without the scale; add to dq
    in memory.
    """
    row = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    exists = row < q[2]
    q_tile = load_rows(q, row, DIM)
    o_tile, do_tile = load_rows(o, row, DIM), load_rows(do, row, DIM)
    row_lse = tl.load(lse + row, mask=exists, other=float("inf"))
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    if dlse is not None:
        delta -= tl.load(dlse + row, mask=exists, other=0.0)
    delta = tl.where(row_lse == float("-inf"), 0.0, delta)  # no visible key: dLSE may be NaN

    s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
    last_key = tl.minimum(row + offset, kv_length - 1)
    s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    p = probabilities(s, row_lse)
    dv = tl.dot(p.to(do_tile.dtype).T, do_tile, dv, input_precision="ieee")
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    ds = (p * (dp - delta[:, None])).to(q_tile.dtype)
    dk = tl.dot(ds.T, q_tile, dk, input_precision="ieee")
    dq_tile = load_rows(dq, row, DIM) + tl.dot(ds, k_tile, input_precision="ieee") * scale
    tl.store(row_pointers(dq, row, DIM), dq_tile, mask=exists[:, None])
    return dk, dv


@triton.jit(do_not_specialize=["q_length", "kv_length"])
def backward_kernel(
    q, k, v, o, do, dq, dk, dv, lse, dlse, q_strides, k_strides, v_strides, o_strides, do_strides,
    dq_strides, dk_strides, scale, q_length, kv_length, lengths, kv_heads,
    CAUSAL: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each key head and sequence: it alone writes the gradients of its heads."""
    kv_head, sequence = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    if lengths is not None:  # this sequence has fewer keys
        kv_length = tl.maximum(tl.minimum(tl.load(lengths + sequence), kv_length), 0).to(tl.int32)
    k = head_of(k, k_strides, sequence, kv_head, kv_length)
    v = head_of(v, v_strides, sequence, kv_head, kv_length)
    dk = head_of(dk, dk_strides, sequence, kv_head, kv_length)
    dv = head_of(dv, dk_strides, sequence, kv_head, kv_length)
    offset = kv_length - q_length if CAUSAL else kv_length  # the last query sees the last key

    # Nothing of block j + 1 is loaded ahead: it reads the dQ that block j wrote.
    for j in tl.range(0, tl.cdiv(kv_length, BLOCK_KV), num_stages=1):
        k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
        k_tile, v_tile = load_rows(k, k_pos, DIM), load_rows(v, k_pos, DIM)
        dk_tile = tl.zeros([BLOCK_KV, DIM], tl.float32)
        dv_tile = tl.zeros([BLOCK_KV, DIM], tl.float32)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            of_lse = (sequence.to(tl.int64) * kv_heads * GROUP + head) * q_length
            for i in range(
                tl.maximum(j * BLOCK_KV - offset, 0) // BLOCK_Q, tl.cdiv(q_length, BLOCK_Q)
            ):
                dk_tile, dv_tile = fold_queries(
                    i, dk_tile, dv_tile, k_tile, v_tile, k_pos,
                    head_of(q, q_strides, sequence, head, q_length),
                    head_of(o, o_strides, sequence, head, q_length),
                    head_of(do, do_strides, sequence, head, q_length),
                    head_of(dq, dq_strides, sequence, head, q_length),
                    lse + of_lse, dlse if dlse is None else dlse + of_lse,
                    offset, kv_length, scale, DIM, BLOCK_Q
                )  # fmt: skip
        tl.store(row_pointers(dk, k_pos, DIM), dk_tile * scale, mask=(k_pos < kv_length)[:, None])
        tl.store(row_pointers(dv, k_pos, DIM), dv_tile, mask=(k_pos < kv_length)[:, None])
        tl.debug_barrier()  # the threads that load a row of dQ need not be those that stored it


def backward(request, o, lse, do, dlse):
    """Gradients dq, dk, dv of a request's q, k and v: o (batch, M, heads, head_dim) and lse (batch,
    heads, M) are what the forward returned, do and dlse their gradients; dlse may be None.
    """
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, head_dim = q.shape
    kv_length, kv_heads = k.shape[1:3]
    block_q, block_kv, num_warps = TILES[head_dim] if q.element_size() == 2 else (16, 16, 8)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    dlse = None if dlse is None else dlse.contiguous()
    backward_kernel[batch * kv_heads,](
        q, k, v, o, do, dq, dk, dv, lse, dlse, q.stride(), k.stride(), v.stride(), o.stride(),
        do.stride(), dq.stride(), dk.stride(), request.scale, q_length, kv_length,
        request.kv_lengths, kv_heads, request.window_right == 0, request.group, head_dim,
        block_q, block_kv, num_warps=num_warps, num_stages=1
    )  # fmt: skip
    return dq.to(q.dtype), dk, dv


if __name__ == "__main__":
    from flash_versions.lessons.check import run

    run(__file__)
