"""FlashAttention 2, forward: spend the time on the tensor cores, and fill the GPU.

Without the code for options: python -m flash_versions.diff --show fa2 --plain

What FA1 wasted. It rescales o twice for each KV block, masks every block although the diagonal cuts
only few, and multiplies each exponent by log2(e) because the hardware computes 2^x. The ordinary
floating-point units do this work, and on an A100 they are 16 times slower than the tensor cores.
With one query and a long cache, FA1 has one program for each head, and most of the GPU is idle.

What changes.
* Normalise once, at the end: the accumulator of the loop is not normalised, and only one
  multiplication of it by alpha = 2^(m - m_new) remains in each block.
* Compute in units of log2: the scale contains log2(e), so p = 2^(s * scale_log2 - m) is one
  multiply-add and one exp2.
* Two loops, and a third with a sliding window: blocks that every query of the tile sees completely
  need no mask.
* The first program of a causal head has the last queries, which see the most keys.
* The query heads that share a key head become rows of one tile, so that K and V are read once for
  each key head.
* Split-KV: a second axis of the grid divides the KV blocks. Each program writes its accumulator,
  maximum and sum to a workspace, and `combine.py` combines them. With one split this is the
  ordinary kernel. If all rows of a key head are one small tile, `decode.py` has the same kernel
  with one loop, and `shares.py` one for sequences of different lengths.

    program (tile, split):      load Q tile
                                for j in this split's blocks that the window cuts on the left:
                                    update acc, m, l by K_j, V_j, with the mask
                                for j in this split's blocks that all queries see:
                                    update acc, m, l by K_j, V_j
                                for j in this split's blocks that are cut on the right:
                                    update acc, m, l by K_j, V_j, with the mask
                                store O, LSE (one split) or acc, m, l (several)

Sources. The deferred normalisation, the loops and the grid over query blocks: Dao 2023,
"FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", Algorithm 1. Not
in that paper: splitting the keys is Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), part of
FlashAttention since version 2.2; log2 units, the order of causal tiles and packing the query heads
of a key head are from the code of FlashAttention and its successors.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher, layout
from flash_versions.dispatch.precision import is_fp8
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig, default_config, padded_head_dim
from flash_versions.versions.fa2 import shares
from flash_versions.versions.fa2.combine import Partials, combine
from flash_versions.versions.fa2.decode import launch_decode
from flash_versions.versions.tiles.algebra import (
    Window,
    blocks_of_queries,
    finalize,
    softmax_step,
)
from flash_versions.versions.tiles.intervals import (
    Intervals,
    listed_block,
    listed_blocks,
    mask_unseen,
)
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    cdiv,
    load_rows,
    store_row_values,
    store_rows,
)
from flash_versions.versions.tiles.score_mods import (
    ScoreMods,
    add_alibi,
    cap_scores,
    descale_scores,
    descale_values,
    drop,
    in_16_bits,
    place_queries,
    sink_state,
)
from flash_versions.versions.tiles.sequences import Sequences, new_outputs, rows_in_pages
from flash_versions.versions.tiles.varlen_scheduler import Tiling, find_tile, lay_out

# These differ from call to call, a growing cache's with every token: no kernel for each value.
COUNTS = ["q_length", "kv_length", "slots", "kv_heads", "tiles", "num_splits"]
MAX_SPLITS = 65_535  # the second axis of a CUDA grid
DECODING_ROWS = 32  # query rows of a key head that are one tile of `decode.py` at most
WORTH_SPLITTING = 4  # KV blocks; a reduction takes as long as a few of them
READ_AT_ONCE = 16  # splits of a decoding step, which its reduction reads in one tile
FULL = 0.8  # programs for each multiprocessor, from which on the GPU counts as full
MEASURED = {  # by head_dim, the fastest on an H200
    64: LaunchConfig(128, 64, num_warps=8, num_stages=3),
    128: LaunchConfig(128, 128, num_warps=8, num_stages=3),
    256: LaunchConfig(128, 64, num_warps=8, num_stages=2),
}
# The fastest in decoding on an H200, at head_dim 128: for one program on each multiprocessor, for
# up to three (as with splits), and for more.
WHOLE = LaunchConfig(16, 128, num_warps=8, num_stages=3)
SHARED = LaunchConfig(16, 64, num_warps=4, num_stages=3)
CROWDED = LaunchConfig(16, 64, num_warps=4, num_stages=2)


@triton.jit
def fold_block(
    j,
    acc,
    row_max,
    row_sum,
    q_tile,
    queries,
    k,
    v,
    sequences,
    keys,
    window,
    mods,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
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
    acc,
    row_max,
    row_sum,
    q_tile,
    queries,
    k,
    v,
    sequences,
    keys,
    window,
    mods,
    begin,
    full_begin,
    full_end,
    end,
    BLOCK_KV: tl.constexpr,
):
    """Fold KV blocks [begin, end) into the state of a query tile: (acc, row_max, row_sum).

    Blocks outside [full_begin, full_end) are masked.
    """
    if window.left is not None:
        for j in range(begin, full_begin):
            acc, row_max, row_sum = fold_block(
                j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
                BLOCK_KV, MASKED=True
            )  # fmt: skip
    for j in range(full_begin, full_end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
            BLOCK_KV, MASKED=False
        )  # fmt: skip
    for j in range(full_end, end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
            BLOCK_KV, MASKED=True
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def attend_listed(
    acc,
    row_max,
    row_sum,
    q_tile,
    queries,
    k,
    v,
    sequences,
    keys,
    window,
    mods,
    tile,
    split,
    num_splits,
    BLOCK_KV: tl.constexpr,
):
    """The same with one split of the blocks that an interval mask leaves of a tile."""
    line, masked, all_blocks = listed_blocks(window.intervals, keys, tile)
    blocks_per_split = tl.cdiv(all_blocks, num_splits)
    begin = tl.minimum(split * blocks_per_split, all_blocks)
    end = tl.minimum(begin + blocks_per_split, all_blocks)
    for i in range(begin, tl.minimum(masked, end)):
        acc, row_max, row_sum = fold_block(
            listed_block(window.intervals, line, i, masked), acc, row_max, row_sum, q_tile,
            queries, k, v, sequences, keys, window, mods, BLOCK_KV, MASKED=True
        )  # fmt: skip
    for i in range(tl.maximum(masked, begin), end):
        acc, row_max, row_sum = fold_block(
            listed_block(window.intervals, line, i, masked), acc, row_max, row_sum, q_tile,
            queries, k, v, sequences, keys, window, mods, BLOCK_KV, MASKED=False
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def forward_tile(
    tile,
    split,
    sequence,
    rows,
    keys,
    q,
    k,
    v,
    o,
    lse_out,
    partials,
    sequences,
    window,
    mods,
    slots,
    kv_heads,
    num_splits,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Compute and store one split of a tile, whose rows and keys are those of a key head."""
    queries = place_queries(tile, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
    rows = Rows(rows.batch, queries.head, rows.first, rows.length)
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, rows.length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV
    )
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
    if window.intervals is not None:
        acc, row_max, row_sum = attend_listed(
            acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
            tile, split, num_splits, BLOCK_KV
        )  # fmt: skip
    else:
        acc, row_max, row_sum = attend(
            acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
            begin, full_begin, full_end, end, BLOCK_KV
        )  # fmt: skip
    if mods.dropout_rescale is not None:
        acc *= mods.dropout_rescale
    acc = descale_values(acc, mods, queries.sequence_head)
    if SPLIT:
        slot = Rows(split * slots + rows.batch, rows.head, rows.first, rows.length)
        store_rows(partials.acc, slot, queries.pos, acc)
        store_row_values(partials.row_max, slot, queries.pos, row_max)
        store_row_values(partials.row_sum, slot, queries.pos, row_sum)
    else:
        out, lse = finalize(acc, row_max, row_sum)
        store_rows(o, rows, queries.pos, out)
        store_row_values(lse_out, rows, queries.pos, lse)


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q,
    k,
    v,
    o,
    lse_out,
    partials,
    plan,
    sequences,
    window,
    mods,
    q_length,
    kv_length,
    slots,
    kv_heads,
    tiles,
    num_splits,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program per (query tile, key head, sequence) and split."""
    LAST_FIRST: tl.constexpr = window.right is not None  # the last queries see the most keys
    tile, sequence, rows, keys = find_tile(
        tl.program_id(0), plan, sequences, q_length, kv_length, kv_heads, tiles, LAST_FIRST
    )
    split = tl.program_id(1)
    if plan is not None:
        if sequence < 0:
            return
    forward_tile(
        tile, split, sequence, rows, keys, q, k, v, o, lse_out, partials, sequences, window, mods,
        slots, kv_heads, num_splits, GROUP, SPLIT, BLOCK_Q, BLOCK_KV
    )  # fmt: skip


launch_forward = Launcher(forward_kernel)


def choose_num_splits(programs: int, n_blocks: int, num_sms: int) -> int:
    """How many KV splits fill the GPU: 1 if it is full, else two programs per multiprocessor.

    Args:
        programs: programs of the unsplit kernel.
        n_blocks: KV blocks that there are to share out; a split gets at least four, or the
            reduction costs more.
        num_sms: of the device; 1 on the CPU, where splitting gains nothing.
    """
    if programs == 0 or programs >= FULL * num_sms:
        return 1
    return max(1, min(2 * num_sms // programs, n_blocks // 4))


def splits_of(request: Request, programs: int, block_kv: int, at_once: int = 1) -> int:
    """How many KV splits a request gets, if so many programs do the work of one split.

    Args:
        request: its num_splits, if it has one, is what it gets.
        programs: see `choose_num_splits`.
        block_kv: keys of a block.
        at_once: so many cost the reduction no more than two do, so a split may be a single block,
            as far as the GPU is not full.
    """
    n_blocks = max(1, cdiv(request.max_kv_length, block_kv))
    if request.window_left is not None and request.window_right is not None:
        seen = request.window_left + request.window_right + request.q.shape[1]
        n_blocks = min(n_blocks, cdiv(max(seen, 0), block_kv) + 1)
    num_splits = request.num_splits
    if num_splits is None:
        num_sms = devices[request.q.device].num_sms
        num_splits = choose_num_splits(programs, n_blocks, num_sms)
        if n_blocks >= WORTH_SPLITTING and 0 < programs < FULL * num_sms:
            num_splits = max(num_splits, min(at_once, 2 * num_sms // programs))
    return min(num_splits, n_blocks, MAX_SPLITS)


def decodes(request: Request) -> bool:
    """Whether the query rows of a key head are one small tile, for `decode.py`. In fp32 its large
    tiles would not fit the registers; it does not read 8-bit numbers.
    """
    rows = request.q.shape[1] * request.group
    alike = request.cu_seqlens_q is None and not request.has_intervals
    return alike and rows <= DECODING_ROWS and request.q.element_size() == 2


def decoding_config(request: Request, programs: int) -> LaunchConfig:
    """Tile sizes for decoding, where so many programs do the work of one split."""
    for_each = programs / devices[request.q.device].num_sms
    return fitted(request, CROWDED if for_each > 3 else WHOLE if FULL <= for_each <= 1 else SHARED)


def shares_config(request: Request) -> LaunchConfig:
    """Tile sizes for equal shares. With large tiles at head_dim 128, rows of one length lose less;
    at 64 and with pages, small ones are faster.
    """
    head_dim = padded_head_dim(max(request.q.shape[3], request.v.shape[3]))
    return fitted(request, WHOLE if head_dim == 128 and request.block_table is None else SHARED)


def fitted(request: Request, config: LaunchConfig) -> LaunchConfig:
    """Tile sizes for decoding with as many bytes under way whatever the head dim, or as fit."""
    q = request.q
    head_dim = padded_head_dim(max(q.shape[3], request.v.shape[3]))
    rows = q.shape[1] * request.group
    config = replace(
        config,
        block_q=max(16, 1 << (rows - 1).bit_length()),
        num_stages=max(2, 1 + (config.num_stages - 1) * 128 // max(64, head_dim)),
    )
    return config.fitted(head_dim, q.element_size(), devices[q.device].shared_memory)


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
    q, k, v, group = request.q, request.k, request.v, request.group
    batch, q_length, heads, _ = q.shape
    kv_heads = heads // group
    if few_rows := decodes(request):
        programs = kv_heads * batch
        if request.num_splits is None and shares.pay(request):
            return shares.forward(request, config or shares_config(request))
        config = config or decoding_config(request, programs)
    else:
        config = config or default_config(q_length * group, request, MEASURED)
    o, lse = new_outputs(request)
    if few_rows:
        lay_out(request, of_queries=(o, lse))
    else:
        (tiles,) = lay_out(request, Tiling(config.block_q, group), of_queries=(o, lse))
        programs = tiles.number * kv_heads * batch  # packed: a batch of one
    num_splits = splits_of(request, programs, config.block_kv, READ_AT_ONCE if few_rows else 1)
    partials = None
    if num_splits > 1:
        partials = Partials.allocate(num_splits * batch, o, request.cu_seqlens_q is not None)
    overlap = few_rows and num_splits > 1 and devices.launches_overlap(q.device)
    intervals = Intervals.of(request, config.block_kv, config.block_q)
    key = (*layout(request), num_splits, intervals and intervals.key)
    mods = ScoreMods.of(request)
    if is_fp8(q):
        mods = mods.with_descales(request)
    tensors = (View.of(q), View.of(k), View.of(v), View.of(o), View.of_rows(lse), partials)
    about = (
        Sequences.of(request),
        Window(request.window_left, request.window_right, intervals),
        mods,
        q_length,
        request.max_kv_length,
        batch,
        kv_heads,
    )
    constants = {
        "GROUP": group,
        "SPLIT": partials is not None,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
    }
    compiler = config.num_warps, config.num_stages
    grid = (programs, num_splits)
    if few_rows:
        constants["OVERLAP"] = overlap
        launch_decode(key, grid, (*tensors, *about, num_splits), constants, *compiler)
    else:
        arguments = (*tensors, tiles.plan, *about, tiles.number, num_splits)
        launch_forward(key, grid, arguments, constants, *compiler)
    if partials is not None:
        combine(partials, key, num_splits, o, lse, overlap)
    return o, lse, None
