"""FlashAttention 1, forward: attention without ever writing the score matrix to memory.

Plain attention writes the (M, N) scores S = Q K^T to memory, reads them for the softmax, writes P
and reads it again for P V: O(M N) bytes for O(M D) of input. But a softmax can be folded together
block by block. Keep, per query row, the maximum score m and the sum of exponentials l seen so far;
when a block of scores arrives,

    m_new = max(m, rowmax(S_j))                        P_j = exp(S_j - m_new)
    l_new = exp(m - m_new) l + rowsum(P_j)
    o_new = (exp(m - m_new) l o + P_j V_j) / l_new

and o is at every moment the attention over the keys seen so far. Scores live in registers only, so
the traffic is one pass over K and V per query block.

Schedule: one program per query block, head and batch; an inner loop over KV blocks.

    program (batch, head, i):   load Q_i
                                for j in KV blocks:
                                    load K_j, V_j
                                    S = Q_i K_j^T, masked
                                    fold S and V_j into o, m, l
                                store O_i, m_i, l_i, LSE_i

Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness", Algorithm 1, and Algorithm 2 for the mask. The paper's outer loop runs over KV blocks
and re-reads O each time; here the query block is outside, so that every row of O is written once.
The update is the paper's: o stays normalised after each block.
"""

import torch
import triton
import triton.language as tl

from flash_versions.memory import (
    View,
    load_rows,
    rows_of,
    store_row_values,
    store_rows,
    visible_length,
)
from flash_versions.tile import kv_block_range, last_visible_key, mask_scores
from flash_versions.version import LaunchConfig, default_config, padded_head_dim

# Change from call to call, a growing cache's with every token: no kernel of its own for each.
COUNTS = ["q_length", "kv_length", "heads", "q_blocks"]
MEASURED = {
    64: LaunchConfig(128, 64, num_warps=4, num_stages=2),
    128: LaunchConfig(64, 64, num_warps=4, num_stages=3),
    256: LaunchConfig(128, 32, num_warps=8, num_stages=2),
}


@triton.jit
def softmax_step(s, row_max, row_sum):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    Natural units. alpha is the factor on everything that was summed under the old maximum.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1))
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp(s - pivot[:, None])
    alpha = tl.exp(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def fold_block(
    j,
    o,
    row_max,
    row_sum,
    q_tile,
    k,
    v,
    last_key,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Fold KV block j into the state (o, row_max, row_sum); o stays normalised."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, k_pos, HEAD_DIM, PADDED_DIM, MASKED=True)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
    s = mask_scores(s, k_pos, last_key)
    p, new_max, new_sum, alpha = softmax_step(s, row_max, row_sum)
    v_tile = load_rows(v, k_pos, HEAD_DIM, PADDED_DIM, MASKED=True)
    pv = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
    norm = 1.0 / tl.where(new_sum == 0.0, 1.0, new_sum)
    o = (o * (alpha * row_sum)[:, None] + pv) * norm[:, None]
    return o, new_max, new_sum


@triton.jit
def attend(
    q_tile,
    k,
    v,
    last_key,
    n_all,
    scale,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Attention of a query tile over KV blocks [0, n_all): (o, row_max, row_sum), natural units."""
    o = tl.zeros([BLOCK_Q, PADDED_DIM], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for j in range(n_all):
        o, row_max, row_sum = fold_block(
            j, o, row_max, row_sum, q_tile, k, v, last_key, scale, HEAD_DIM, PADDED_DIM, BLOCK_KV
        )
    return o, row_max, row_sum


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q,
    k,
    v,
    o,
    lse_out,
    row_max_out,
    row_sum_out,
    kv_lengths,
    q_length,
    kv_length,
    heads,
    q_blocks,
    scale,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program per (query tile, head, batch); those of a head are neighbours and share K, V."""
    program = tl.program_id(0)
    tile = program % q_blocks
    head = (program // q_blocks) % heads
    batch = program // q_blocks // heads
    kv_head = head // GROUP
    q_pos = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    kv_length = visible_length(kv_lengths, batch, kv_length)

    last_key = last_visible_key(q_pos, q_length, kv_length, CAUSAL)
    q_first = tile * BLOCK_Q
    q_last = tl.minimum(tile * BLOCK_Q + BLOCK_Q - 1, q_length - 1)
    _, n_all = kv_block_range(
        last_visible_key(q_first, q_length, kv_length, CAUSAL),
        last_visible_key(q_last, q_length, kv_length, CAUSAL),
        BLOCK_KV,
    )
    q_rows = rows_of(q, batch, head, q_length)
    q_tile = load_rows(q_rows, q_pos, HEAD_DIM, PADDED_DIM, MASKED=True)
    k_rows = rows_of(k, batch, kv_head, kv_length)
    v_rows = rows_of(v, batch, kv_head, kv_length)
    out, row_max, row_sum = attend(
        q_tile, k_rows, v_rows, last_key, n_all, scale,
        HEAD_DIM, PADDED_DIM, BLOCK_Q, BLOCK_KV
    )  # fmt: skip
    lse = row_max + tl.log(tl.where(row_sum == 0.0, 1.0, row_sum))
    store_rows(rows_of(o, batch, head, q_length), q_pos, out, HEAD_DIM, PADDED_DIM)
    store_row_values(rows_of(lse_out, batch, head, q_length), q_pos, lse)
    store_row_values(rows_of(row_max_out, batch, head, q_length), q_pos, row_max)
    store_row_values(rows_of(row_sum_out, batch, head, q_length), q_pos, row_sum)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool,
    scale: float,
    kv_lengths: torch.Tensor | None = None,
    num_splits: int | None = None,
    config: LaunchConfig | None = None,
    statistics: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention and its LSE.

    Args:
        q: (batch, M, heads, head_dim), any strides but the last dimension's, which is 1; so k and
            v.
        k: (batch, N, kv_heads, head_dim); query heads h*g .. h*g+g-1 use key head h, g = heads /
            kv_heads.
        v: like k.
        causal: query i sees keys j <= i + N - M.
        scale: positive factor on the scores.
        kv_lengths: (batch,) integers; row b sees only its first kv_lengths[b] keys. None means all
            N.
        num_splits: None or 1; keys are split from FA2 on.
        config: tile sizes; None chooses by shape and device.
        statistics: fp32 (2, batch, heads, M), receives what the paper saves for its backward: the
            row maximum m (natural units) and the row sum l. None keeps them from the caller.

    Returns:
        o like q, contiguous; lse = m + log l, natural log, fp32 (batch, heads, M).
    """
    batch, q_length, heads, head_dim = q.shape
    kv_length, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    config = config or default_config(q_length, q, MEASURED)
    q_blocks = triton.cdiv(q_length, config.block_q)
    programs = q_blocks * heads * batch

    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    if statistics is None:
        statistics = torch.empty((2, *lse.shape), dtype=torch.float32, device=q.device)
    forward_kernel[(programs,)](
        View.of(q),
        View.of(k),
        View.of(v),
        View.of(o),
        View.of_rows(lse),
        View.of_rows(statistics[0]),
        View.of_rows(statistics[1]),
        kv_lengths,
        q_length,
        kv_length,
        heads,
        q_blocks,
        scale,
        GROUP=group,
        CAUSAL=causal,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_head_dim(head_dim),
        BLOCK_Q=config.block_q,
        BLOCK_KV=config.block_kv,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return o, lse
