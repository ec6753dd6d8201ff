"""FlashAttention 1, forward: attention without ever writing the score matrix to memory.

`flash_versions/lessons/fa1.py` explains it: tiles, the online softmax, and o normalised after each
block. This kernel has more: windows, keys that begin and end where each sequence says, and head
dims up to 256; and it writes m and l, from which the backward computes P, as in the paper.

Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness", Algorithm 1, and Algorithm 2 for the mask.
"""

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import TWO_OUTPUTS, LaunchConfig, default_config
from flash_versions.versions.tiles.algebra import (
    Window,
    blocks_of_queries,
    first_visible,
    last_visible,
    mask_scores,
)
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    cdiv,
    launch_tiles,
    load_rows,
    store_row_values,
    store_rows,
)
from flash_versions.versions.tiles.sequences import Sequences, key_rows

COUNTS = ["q_length", "kv_length", "heads", "tiles"]
MEASURED = {  # by head_dim, the fastest on an H200
    64: LaunchConfig(128, 64, num_warps=4, num_stages=2),
    128: LaunchConfig(64, 64, num_warps=4, num_stages=3),
    256: LaunchConfig(128, 32, num_warps=8, num_stages=2),
}


@triton.jit
def softmax_step(s, row_max, row_sum):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    Natural units. alpha corrects what was summed with the old maximum: multiply it by alpha.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1))
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp(s - pivot[:, None])
    alpha = tl.exp(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def fold_block(
    j, o, row_max, row_sum, q_tile, first_key, last_key, k, v, keys, window, scale,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """Update the state (o, row_max, row_sum) by KV block j; o stays normalised."""
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


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, o, lse_out, row_max_out, row_sum_out, sequences, window, q_length, kv_length, heads,
    tiles, scale,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each query tile, head and sequence. Programs of a head have neighbouring
    numbers, so they run together and share K and V in L2.
    """
    program = tl.program_id(0)
    tile = program % tiles
    head = (program // tiles) % heads
    sequence = program // tiles // heads
    rows = Rows(sequence, head, sequence * 0, q_length)
    keys = key_rows(sequences, sequence, head // GROUP, kv_length)

    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = keys.length - q_length  # causal is bottom-right: the last query sees the last key
    first_key = first_visible(row, offset, window.left)
    last_key = last_visible(row, offset, window.right, keys.length)
    # Every block is masked, so the bounds between which no mask is needed are left out.
    begin, _, _, end = blocks_of_queries(tile, q_length, keys.length, window, 1, BLOCK_Q, BLOCK_KV)

    q_tile = load_rows(q, rows, row, MASKED=True)
    given = q_tile, first_key, last_key
    acc = tl.zeros([BLOCK_Q, v.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    state = acc, row_max, row_sum
    for j in range(begin, end):
        state = fold_block(j, *state, *given, k, v, keys, window, scale, BLOCK_KV)
    acc, row_max, row_sum = state
    lse = row_max + tl.log(tl.where(row_sum == 0.0, 1.0, row_sum))
    store_rows(o, rows, row, acc)
    store_row_values(lse_out, rows, row, lse)
    store_row_values(row_max_out, rows, row, row_max)
    store_row_values(row_sum_out, rows, row, row_sum)


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
    config = config or default_config(q_length, request, MEASURED, TWO_OUTPUTS)
    tiles = cdiv(q_length, config.block_q)

    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    statistics = torch.empty((2, *lse.shape), dtype=torch.float32, device=q.device)
    given = (Sequences.of(request), Window(request.window_left, request.window_right))
    launch_tiles(
        launch_forward,
        (tiles * heads * batch,),
        (
            *map(View.of, (q, k, v, o)), *map(View.of_rows, (lse, *statistics)), *given, q_length,
            k.shape[1], heads, tiles, request.scale
        ),
        config,
        GROUP=request.group,
    )  # fmt: skip
    return o, lse, statistics
