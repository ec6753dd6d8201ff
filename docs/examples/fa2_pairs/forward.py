"""FA2 with two running results: even KV blocks go into one, odd ones into the other.

What FA2 wasted. The softmax of a block needs the maximum of the block before it, so every block
waits. Two independent results are two chains of work: one can continue while the other waits. The
kernel joins them at the end, as split-KV joins the results of its splits.

    program (tile):     load Q tile
                        for j in every other block:
                            fold K_j, V_j into a
                            fold K_j+1, V_j+1 into b
                        join a and b, store O, LSE

Cost. Twice the registers for accumulators, and every block is masked.
"""

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher, layout
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig, default_config
from flash_versions.versions.fa2.forward import MEASURED, fold_block
from flash_versions.versions.tiles.algebra import Window, blocks_of_queries, finalize
from flash_versions.versions.tiles.rows import Rows, View, load_rows, store_row_values, store_rows
from flash_versions.versions.tiles.score_mods import ScoreMods, place_queries, sink_state
from flash_versions.versions.tiles.sequences import Sequences
from flash_versions.versions.tiles.varlen_scheduler import Tiles, find_tile


@triton.jit
def join(acc_a, max_a, sum_a, acc_b, max_b, sum_b):
    """Two running results over different keys as one: (acc, row_max, row_sum)."""
    row_max = tl.maximum(max_a, max_b)
    pivot = tl.where(row_max == float("-inf"), 0.0, row_max)  # no visible key: avoid inf - inf
    alpha, beta = tl.exp2(max_a - pivot), tl.exp2(max_b - pivot)
    acc = acc_a * alpha[:, None] + acc_b * beta[:, None]
    return acc, row_max, alpha * sum_a + beta * sum_b


@triton.jit(do_not_specialize=["q_length", "kv_length", "kv_heads", "tiles"])
def forward_kernel(
    q, k, v, o, lse_out, sequences, window, mods, q_length, kv_length, kv_heads, tiles,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per (query tile, key head, sequence)."""
    tile, sequence, rows, keys = find_tile(
        tl.program_id(0), None, sequences, q_length, kv_length, kv_heads, tiles, LAST_FIRST=True
    )
    queries = place_queries(tile, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
    rows = Rows(rows.batch, queries.head, rows.first, rows.length)
    begin, _, _, end = blocks_of_queries(
        tile, rows.length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV
    )
    q_tile = load_rows(q, rows, queries.pos, MASKED=True)
    zero = tl.zeros([BLOCK_Q, v.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    acc_a, max_a, sum_a = zero, row_max, row_sum
    acc_b, max_b, sum_b = zero, row_max, row_sum
    max_a, sum_a = sink_state(max_a, sum_a, mods, rows.head, True)
    for j in range(begin, end, 2):
        acc_a, max_a, sum_a = fold_block(
            j, acc_a, max_a, sum_a, q_tile, queries, k, v, sequences, keys, window, mods,
            BLOCK_KV, MASKED=True
        )  # fmt: skip
        acc_b, max_b, sum_b = fold_block(  # a block past the end is masked completely
            j + 1, acc_b, max_b, sum_b, q_tile, queries, k, v, sequences, keys, window, mods,
            BLOCK_KV, MASKED=True
        )  # fmt: skip
    acc, row_max, row_sum = join(acc_a, max_a, sum_a, acc_b, max_b, sum_b)
    if mods.dropout_rescale is not None:
        acc *= mods.dropout_rescale
    out, lse = finalize(acc, row_max, row_sum)
    store_rows(o, rows, queries.pos, out)
    store_row_values(lse_out, rows, queries.pos, lse)


launch_forward = Launcher(forward_kernel)


def forward(
    request: Request, config: LaunchConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """o (batch, M, heads, head_dim_v) in q's dtype; lse fp32 (batch, heads, M); no statistics."""
    q, k, v, group = request.q, request.k, request.v, request.group
    batch, q_length, heads, _ = q.shape
    config = config or default_config(q_length * group, request, MEASURED)
    tiles = Tiles.of_queries(request, config.block_q, group)
    o = torch.empty((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    launch_forward(
        layout(request),
        (tiles.number * (heads // group) * batch,),
        (
            View.of(q), View.of(k), View.of(v), View.of(o), View.of_rows(lse),
            Sequences.of(request), Window(request.window_left, request.window_right),
            ScoreMods.of(request), q_length, k.shape[1], heads // group, tiles.number,
        ),
        {"GROUP": group, "BLOCK_Q": config.block_q, "BLOCK_KV": config.block_kv},
        config.num_warps,
        config.num_stages,
    )  # fmt: skip
    return o, lse, None
