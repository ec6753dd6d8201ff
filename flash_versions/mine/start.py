"""Attention of mine: one kernel, with an online softmax. Change what you like, and check it.

python -m flash_versions.mine check    is it right? A wrong result is explained
"""

import torch
import triton
import triton.language as tl

# What `forward` can do: any of causal, window, softcap, alibi_slopes, sink, dropout_p, kv_lengths,
# cu_seqlens, kv_starts, block_table, query_intervals, grouped_heads (fewer key heads than query
# heads), head_dim_v (values wider or narrower than keys) and precision (FP8). Others are refused.
FEATURES = ("causal", "grouped_heads", "kv_lengths")


@triton.jit
def forward_kernel(
    q, k, v, o, lse, kv_lengths, q_strides, k_strides, v_strides, o_strides, scale, M, N,
    GROUP: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, CAUSAL: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each block of queries, query head and sequence."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    queries, dims = tile * BLOCK_Q + tl.arange(0, BLOCK_Q), tl.arange(0, PADDED)
    length = N
    if kv_lengths is not None:  # this sequence has fewer keys
        length = tl.minimum(tl.maximum(tl.load(kv_lengths + batch), 0), N).to(tl.int32)
    last = tl.full([BLOCK_Q], 0, tl.int32) + length - 1  # the last key that each query sees
    if CAUSAL:
        last = tl.minimum(last, queries + length - M)  # the last query sees the last key

    q_mask = (queries < M)[:, None] & (dims < DIM)[None, :]
    q_rows = batch * q_strides[0] + head * q_strides[2] + queries * q_strides[1]
    q_tile = tl.load(q + q_rows[:, None] + dims[None, :], mask=q_mask, other=0.0)
    k += batch * k_strides[0] + (head // GROUP) * k_strides[2]
    v += batch * v_strides[0] + (head // GROUP) * v_strides[2]
    acc = tl.zeros([BLOCK_Q, PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for first in range(0, tl.max(last, 0) + 1, BLOCK_KV):
        keys = first + tl.arange(0, BLOCK_KV)
        mask = (keys < length)[:, None] & (dims < DIM)[None, :]
        k_tile = tl.load(k + keys[:, None] * k_strides[1] + dims[None, :], mask=mask, other=0.0)
        s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * (scale * 1.4426950408889634)
        s = tl.where(keys[None, :] <= last[:, None], s, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(s, 1))
        pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no key yet: avoid inf - inf
        p, alpha = tl.exp2(s - pivot[:, None]), tl.exp2(row_max - pivot)
        row_max, row_sum = new_max, row_sum * alpha + tl.sum(p, 1)
        v_tile = tl.load(v + keys[:, None] * v_strides[1] + dims[None, :], mask=mask, other=0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")

    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)  # a query without a key: o is 0
    o_rows = batch * o_strides[0] + head * o_strides[2] + queries * o_strides[1]
    out = (acc / row_sum[:, None]).to(o.type.element_ty)
    tl.store(o + o_rows[:, None] + dims[None, :], out, mask=q_mask)
    lse_rows = (batch * tl.num_programs(1) + head) * M + queries
    tl.store(lse + lse_rows, (row_max + tl.log2(row_sum)) * 0.6931471805599453, mask=queries < M)


def forward(request):
    """o (batch, M, heads, head_dim) and lse, fp32 (batch, heads, M), of q (batch, M, heads,
    head_dim), k and v (batch, N, kv_heads, head_dim).

    A `backward(request, o, lse, do, dlse)` that returns dq, dk, dv may follow. Without one,
    training uses that of FA2, which is right only for the scores that the request describes.
    """
    q, k, v = request.q, request.k, request.v
    batch, M, heads, dim = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, M), dtype=torch.float32, device=q.device)
    block = 64 if dim <= 128 else 32
    forward_kernel[triton.cdiv(M, block), heads, batch](
        q, k, v, o, lse, request.kv_lengths, q.stride(), k.stride(), v.stride(), o.stride(),
        request.scale, M, k.shape[1], request.group, dim, triton.next_power_of_2(dim),
        request.window_right == 0, block, block
    )  # fmt: skip
    return o, lse
