"""FlashAttention 2, forward: spend the time on the tensor cores, and fill the GPU.

`flash_versions/lessons/fa2.py` explains it. This kernel has every option, and more:

* A sliding window takes a third loop, over blocks that it cuts on the left.
* The query heads that share a key head become rows of one tile, so that K and V are read once for
  each key head.
* Split-KV is a second axis of the grid, which divides the KV blocks. Each program writes its
  accumulator, maximum and sum to a workspace, and `combine.py` combines them. With one split this
  is the ordinary kernel. If all rows of a key head are one small tile, `decode.py` has the same
  kernel with one loop, and `stream_k.py` one for sequences of different lengths.

    program (tile, split):      load Q tile
                                for j in this split's blocks that the window cuts on the left:
                                    update acc, m, l by K_j, V_j, with the mask
                                for j in this split's blocks that all queries see:
                                    update acc, m, l by K_j, V_j
                                for j in this split's blocks that are cut on the right:
                                    update acc, m, l by K_j, V_j, with the mask
                                store O, LSE (one split) or acc, m, l (several)

Sources. Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work
Partitioning", Algorithm 1. Not in that paper: splitting the keys is Flash-Decoding (Dao, Haziza,
Massa, Sizov 2023), part of FlashAttention since version 2.2; log2 units, the order of causal tiles
and packing the query heads of a key head are from the code of FlashAttention and its successors.
"""

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig, default_config
from flash_versions.versions.fa2 import decode, stream_k
from flash_versions.versions.fa2.combine import Partials, combine
from flash_versions.versions.fa2.decode import arguments, decodes, store_partial, store_result
from flash_versions.versions.fa2.splits import splits_of
from flash_versions.versions.tiles.algebra import blocks_of_queries, softmax_step
from flash_versions.versions.tiles.intervals import (
    Intervals,
    listed_block,
    listed_blocks,
    mask_unseen,
)
from flash_versions.versions.tiles.rows import Rows, launch_tiles, load_rows
from flash_versions.versions.tiles.score_mods import (
    add_alibi,
    cap_scores,
    descale_scores,
    descale_values,
    drop,
    in_16_bits,
    place_queries,
    sink_state,
)
from flash_versions.versions.tiles.sequences import new_outputs, rows_in_pages
from flash_versions.versions.tiles.varlen_scheduler import Tiling, find_tile, lay_out

COUNTS = ["q_length", "kv_length", "slots", "kv_heads", "tiles", "num_splits"]
EXACT_ROWS = 128  # that a tile is chosen for with batch_invariant
MEASURED = {  # by head_dim, the fastest on an H200
    64: LaunchConfig(128, 64, num_warps=8, num_stages=3),
    128: LaunchConfig(128, 128, num_warps=8, num_stages=3),
    256: LaunchConfig(128, 64, num_warps=8, num_stages=2),
}


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    keys = rows_in_pages(sequences, keys, k_pos)
    k_tile = in_16_bits(load_rows(k, keys, k_pos, MASKED), mods)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    s = cap_scores(descale_scores(s, mods, queries.sequence_head), mods)
    distance = (queries.pos + queries.offset)[:, None] - k_pos[None, :]
    s = add_alibi(s, queries.slope[:, None], distance, mods)
    if MASKED:
        s = mask_unseen(s, queries, keys, k_pos, window, KEYS_FIRST=False)
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, mods.scale_log2)
    p = drop(p, mods, queries.sequence_head[:, None], queries.pos[:, None], k_pos[None, :])
    v_tile = in_16_bits(load_rows(v, keys, k_pos, MASKED), mods)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def attend(
    state, q_tile, queries, k, v, sequences, keys, window, mods, begin, full_begin, full_end, end,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """Fold KV blocks [begin, end) into the state of a query tile: (acc, row_max, row_sum).

    Blocks outside [full_begin, full_end) are masked.
    """
    if window.left is not None:
        for j in range(begin, full_begin):
            state = fold_block(
                j, *state, q_tile, queries, k, v, sequences, keys, window, mods, BLOCK_KV,
                MASKED=True
            )  # fmt: skip
    for j in range(full_begin, full_end):
        state = fold_block(
            j, *state, q_tile, queries, k, v, sequences, keys, window, mods, BLOCK_KV, MASKED=False
        )
    for j in range(full_end, end):
        state = fold_block(
            j, *state, q_tile, queries, k, v, sequences, keys, window, mods, BLOCK_KV, MASKED=True
        )
    return state


@triton.jit
def attend_listed(
    state, q_tile, queries, k, v, sequences, keys, window, mods, tile, split, num_splits,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """The same with one split of the blocks that an interval mask leaves of a tile."""
    line, masked, all_blocks = listed_blocks(window.intervals, keys, tile)
    blocks_per_split = tl.cdiv(all_blocks, num_splits)
    begin = tl.minimum(split * blocks_per_split, all_blocks)
    end = tl.minimum(begin + blocks_per_split, all_blocks)
    for i in range(begin, tl.minimum(masked, end)):
        j = listed_block(window.intervals, line, i, masked)
        state = fold_block(
            j, *state, q_tile, queries, k, v, sequences, keys, window, mods, BLOCK_KV, MASKED=True
        )
    for i in range(tl.maximum(masked, begin), end):
        j = listed_block(window.intervals, line, i, masked)
        state = fold_block(
            j, *state, q_tile, queries, k, v, sequences, keys, window, mods, BLOCK_KV, MASKED=False
        )
    return state


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, o, lse_out, partials, plan, sequences, window, mods, q_length, kv_length, slots,
    kv_heads, tiles, num_splits,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, IN_ORDER: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per (query tile, key head, sequence) and split. IN_ORDER: blocks that an interval
    mask leaves are those of a range, in their order, all of them masked.
    """
    LAST_FIRST: tl.constexpr = window.right is not None  # the last queries see the most keys
    tile, sequence, rows, keys = find_tile(
        tl.program_id(0), plan, sequences, q_length, kv_length, kv_heads, tiles, LAST_FIRST
    )
    split = tl.program_id(1)
    if plan is not None:
        if sequence < 0:
            return
    queries = place_queries(tile, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
    rows = Rows(rows.batch, queries.head, rows.first, rows.length)
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, rows.length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV
    )
    if window.intervals is not None and IN_ORDER:
        full_begin, full_end, end = begin, begin, tl.cdiv(keys.length, BLOCK_KV)
    if SPLIT:
        blocks_per_split = tl.cdiv(end - begin, num_splits)
        begin = begin + split * blocks_per_split
        end = tl.minimum(begin + blocks_per_split, end)
        full_begin = tl.minimum(tl.maximum(full_begin, begin), end)
        full_end = tl.maximum(tl.minimum(full_end, end), full_begin)

    q_tile = in_16_bits(load_rows(q, rows, queries.pos, MASKED=True), mods)
    acc = tl.zeros([BLOCK_Q, v.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max, row_sum = sink_state(row_max, row_sum, mods, rows.head, split == 0)
    state = acc, row_max, row_sum
    if window.intervals is not None and not IN_ORDER:
        state = attend_listed(
            state, q_tile, queries, k, v, sequences, keys, window, mods,
            tile, split, num_splits, BLOCK_KV
        )  # fmt: skip
    else:
        state = attend(
            state, q_tile, queries, k, v, sequences, keys, window, mods,
            begin, full_begin, full_end, end, BLOCK_KV
        )  # fmt: skip
    acc, row_max, row_sum = state
    if mods.dropout_rescale is not None:
        acc *= mods.dropout_rescale
    acc = descale_values(acc, mods, queries.sequence_head)
    if SPLIT:
        slot = split * slots + rows.batch
        store_partial(partials, slot, rows, queries, acc, row_max, row_sum)
    else:
        store_result(o, lse_out, rows, queries, acc, row_max, row_sum)


launch_forward = Launcher(forward_kernel)


def forward(
    request: Request, config: LaunchConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE, of everything that a request can ask for.

    Args:
        request: see `Request`. num_splits: at most one split per KV block and MAX_SPLITS; None
            chooses by occupancy.
        config: tile sizes; None chooses by shape and device.

    Returns:
        o (batch, M, heads, head_dim_v), contiguous, in the request's out_dtype; lse natural log,
        fp32 (batch, heads, M); no further statistics.
    """
    exact = request.batch_invariant
    if decodes(request) and not exact:
        kernel = stream_k if request.num_splits is None and stream_k.pays(request) else decode
        return kernel.forward(request, config)
    group, (batch, q_length, _, _) = request.group, request.q.shape
    # One tile for every length: a product, and so its order of additions, has the same shape.
    rows = EXACT_ROWS if exact else q_length * group
    config = config or default_config(rows, request, MEASURED)
    o, lse = new_outputs(request)
    (tiles,) = lay_out(request, Tiling(config.block_q, group), of_queries=(o, lse))
    programs = tiles.number * request.k.shape[2] * batch  # packed: a batch of one
    num_splits, partials = 1 if exact else splits_of(request, programs, config.block_kv), None
    if num_splits > 1:
        partials = Partials.allocate(num_splits * batch, o, request.cu_seqlens_q is not None)
    intervals = Intervals.of(request, config.block_kv, config.block_q)
    given = arguments(request, o, lse, partials, tiles.plan, intervals=intervals)
    launch_tiles(
        launch_forward,
        (programs, num_splits),
        (*given, tiles.number, num_splits),
        config,
        GROUP=group,
        SPLIT=partials is not None,
        IN_ORDER=exact,
    )
    if partials is not None:
        combine(partials, num_splits, o, lse)
    return o, lse, None
