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

from flash_versions.dispatch.launch import Launcher, layout
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig, default_config
from flash_versions.versions.tiles.algebra import (
    Window,
    block_range,
    first_visible,
    last_visible,
    mask_scores,
)
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    cdiv,
    load_rows,
    store_row_values,
    store_rows,
)
from flash_versions.versions.tiles.sequences import Sequences, key_rows

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
    first_key,
    last_key,
    k,
    v,
    keys,
    window,
    scale,
    BLOCK_KV: tl.constexpr,
):
    """Fold KV block j into the state (o, row_max, row_sum); o stays normalised."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, k_pos, MASKED=True)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
    s = mask_scores(s, k_pos[None, :], first_key[:, None], last_key[:, None], window)
    p, new_max, new_sum, alpha = softmax_step(s, row_max, row_sum)
    v_tile = load_rows(v, keys, k_pos, MASKED=True)
    pv = tl.dot(p.to(v_tile.dtype), v_tile, input_precision="ieee")
    norm = 1.0 / tl.where(new_sum == 0.0, 1.0, new_sum)
    o = (o * (alpha * row_sum)[:, None] + pv) * norm[:, None]
    return o, new_max, new_sum


@triton.jit
def attend(
    q_tile,
    first_key,
    last_key,
    k,
    v,
    keys,
    window,
    scale,
    begin,
    end,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Attention of a query tile over KV blocks [begin, end): (o, row_max, row_sum), natural
    units.
    """
    o = tl.zeros([BLOCK_Q, v.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for j in range(begin, end):
        o, row_max, row_sum = fold_block(
            j, o, row_max, row_sum, q_tile, first_key, last_key, k, v, keys, window, scale, BLOCK_KV
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
    sequences,
    window,
    q_length,
    kv_length,
    heads,
    q_blocks,
    scale,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program per (query tile, head, batch); those of a head are neighbours and share K, V."""
    program = tl.program_id(0)
    tile = program % q_blocks
    head = (program // q_blocks) % heads
    batch = program // q_blocks // heads
    rows = Rows(batch, head, batch * 0, q_length)
    keys = key_rows(sequences, batch, head // GROUP, kv_length)

    q_first = tile * BLOCK_Q
    q_last = tl.minimum(q_first + BLOCK_Q - 1, q_length - 1)
    q_pos = q_first + tl.arange(0, BLOCK_Q)
    offset = keys.length - q_length  # causal is bottom-right: the last query sees the last key
    begin, _, _, end = block_range(
        first_visible(q_first, offset, window.left),
        last_visible(q_first, offset, window.right, keys.length),
        first_visible(q_last, offset, window.left),
        last_visible(q_last, offset, window.right, keys.length),
        BLOCK_KV,
    )
    out, row_max, row_sum = attend(
        load_rows(q, rows, q_pos, MASKED=True),
        first_visible(q_pos, offset, window.left),
        last_visible(q_pos, offset, window.right, keys.length),
        k, v, keys, window, scale, begin, end, BLOCK_Q, BLOCK_KV
    )  # fmt: skip
    lse = row_max + tl.log(tl.where(row_sum == 0.0, 1.0, row_sum))
    store_rows(o, rows, q_pos, out)
    store_row_values(lse_out, rows, q_pos, lse)
    store_row_values(row_max_out, rows, q_pos, row_max)
    store_row_values(row_sum_out, rows, q_pos, row_sum)


launch_forward = Launcher(forward_kernel)


def forward(
    request: Request, config: LaunchConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Attention, its LSE, and what the paper saves for its backward.

    Args:
        request: see `Request`; scale, window and kv_lengths are what this version offers.
        config: tile sizes; None chooses by shape and device.

    Returns:
        o (batch, M, heads, head_dim_v), contiguous, in q's dtype; lse = m + log l, natural log,
        fp32 (batch, heads, M); statistics fp32 (2, batch, heads, M): the row maximum m (natural
        units) and the row sum l.
    """
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, _ = q.shape
    config = config or default_config(q_length, request, MEASURED)
    q_blocks = cdiv(q_length, config.block_q)

    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, *lse.shape), dtype=torch.float32, device=q.device)
    launch_forward(
        layout(request),
        (q_blocks * heads * batch,),
        (
            View.of(q),
            View.of(k),
            View.of(v),
            View.of(o),
            View.of_rows(lse),
            View.of_rows(statistics[0]),
            View.of_rows(statistics[1]),
            Sequences.of(request),
            Window(request.window_left, request.window_right),
            q_length,
            k.shape[1],
            heads,
            q_blocks,
            request.scale,
        ),
        {"GROUP": request.group, "BLOCK_Q": config.block_q, "BLOCK_KV": config.block_kv},
        config.num_warps,
        config.num_stages,
    )
    return o, lse, statistics
