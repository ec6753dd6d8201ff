"""FlashAttention 2, forward: spend the time on the tensor cores, and fill the GPU.

What FA1 wasted. It rescales o twice per KV block, masks every block although few are cut by the
diagonal, and multiplies each exponent by log2(e) because the hardware computes 2^x: work for the
ordinary FP units, which on an A100 are 16 times slower than the tensor cores. And with one query
and a long cache there is one program per head: most of the GPU idles while a few walk the keys.

What changes.
* Normalise once, at the end: the loop carries an unnormalised accumulator, and one rescale of it
  by alpha = 2^(m - m_new) per block remains.
* Stay in the log2 domain: log2(e) goes into the scale, so p = 2^(s * scale_log2 - m) is one FMA and
  one exp2.
* Two loops: blocks that every query of the tile sees in full need no mask; only the last ones pay
  for it.
* Causal tiles start with the last queries, which see the most keys: what ends last began first.
* The query heads that share a key head become rows of one tile, so that K and V are read once per
  key head.
* Split-KV: a second grid axis over ranges of KV blocks. Each program writes its accumulator,
  maximum and sum to a workspace and `combine.py` reduces them. One split is the ordinary kernel; as
  many splits as KV blocks is one program per block of S, and the inner loop is gone.

    program (tile, split):      load Q tile
                                for j in this split's unmasked blocks:  fold K_j, V_j
                                for j in this split's masked blocks:    fold K_j, V_j with the mask
                                store O, LSE (one split) or acc, m, l (several)

Sources. The deferred normalisation, the loops and the grid over query blocks: Dao 2023,
"FlashAttention-2: Faster Attention with Better Parallelism and Work Partitioning", Algorithm 1. Not
in that paper: splitting the keys is Flash-Decoding (Dao, Haziza, Massa, Sizov 2023), which
FlashAttention 2.2 took in; log2 units, the order of causal tiles and packing the query heads of a
key head are from the code of FlashAttention and its successors.
"""

import torch
import triton
import triton.language as tl

from flash_versions.fa2.combine import Partials, combine, finalise
from flash_versions.memory import (
    View,
    load_rows,
    rows_of,
    store_row_values,
    store_rows,
    visible_length,
)
from flash_versions.tile import LOG2E, kv_block_range, last_visible_key, mask_scores
from flash_versions.version import (
    LaunchConfig,
    default_config,
    num_multiprocessors,
    padded_head_dim,
)

# Change from call to call, a growing cache's with every token: no kernel of its own for each.
COUNTS = ["q_length", "kv_length", "batches", "kv_heads", "q_blocks", "num_splits"]
MAX_SPLITS = 65_535  # the second axis of a CUDA grid
MEASURED = {
    64: LaunchConfig(128, 64, num_warps=8, num_stages=3),
    128: LaunchConfig(128, 128, num_warps=8, num_stages=3),
    256: LaunchConfig(128, 64, num_warps=8, num_stages=2),
}


@triton.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    s is unscaled, row_max scaled and in log2 units. The caller owes acc * alpha + p @ v.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp2(s * scale_log2 - pivot[:, None])
    alpha = tl.exp2(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def fold_block(
    j,
    acc,
    row_max,
    row_sum,
    q_tile,
    k,
    v,
    last_key,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, k_pos, HEAD_DIM, PADDED_DIM, MASKED)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    if MASKED:
        s = mask_scores(s, k_pos, last_key)
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale_log2)
    v_tile = load_rows(v, k_pos, HEAD_DIM, PADDED_DIM, MASKED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def attend(
    q_tile,
    k,
    v,
    last_key,
    n_full,
    begin,
    end,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Unnormalised attention of a query tile over blocks [begin, end): (acc, row_max, row_sum)."""
    acc = tl.zeros([BLOCK_Q, PADDED_DIM], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for j in range(begin, tl.minimum(n_full, end)):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, k, v, last_key, scale_log2,
            HEAD_DIM, PADDED_DIM, BLOCK_KV, MASKED=False
        )  # fmt: skip
    for j in range(tl.maximum(n_full, begin), end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, k, v, last_key, scale_log2,
            HEAD_DIM, PADDED_DIM, BLOCK_KV, MASKED=True
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q,
    k,
    v,
    o,
    lse_out,
    partials,
    kv_lengths,
    q_length,
    kv_length,
    batches,
    kv_heads,
    q_blocks,
    num_splits,
    scale_log2,
    GROUP: tl.constexpr,
    CAUSAL: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """One program per (query tile, key head, batch) and split; row r is query r // GROUP."""
    program = tl.program_id(0)
    split = tl.program_id(1)
    tile = program % q_blocks
    if CAUSAL:
        tile = q_blocks - 1 - tile  # the last queries see the most keys: start with them
    kv_head = (program // q_blocks) % kv_heads
    batch = program // q_blocks // kv_heads
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_pos = row // GROUP
    head = kv_head * GROUP + row % GROUP
    kv_length = visible_length(kv_lengths, batch, kv_length)

    last_key = last_visible_key(q_pos, q_length, kv_length, CAUSAL)
    q_first = tile * BLOCK_Q // GROUP
    q_last = tl.minimum((tile * BLOCK_Q + BLOCK_Q - 1) // GROUP, q_length - 1)
    n_full, n_all = kv_block_range(
        last_visible_key(q_first, q_length, kv_length, CAUSAL),
        last_visible_key(q_last, q_length, kv_length, CAUSAL),
        BLOCK_KV,
    )
    blocks_per_split = tl.cdiv(n_all, num_splits)
    begin = split * blocks_per_split
    end = tl.minimum(begin + blocks_per_split, n_all)
    q_rows = rows_of(q, batch, head, q_length)
    q_tile = load_rows(q_rows, q_pos, HEAD_DIM, PADDED_DIM, MASKED=True)
    k_rows = rows_of(k, batch, kv_head, kv_length)
    v_rows = rows_of(v, batch, kv_head, kv_length)
    acc, row_max, row_sum = attend(
        q_tile, k_rows, v_rows, last_key, n_full, begin, end, scale_log2,
        HEAD_DIM, PADDED_DIM, BLOCK_Q, BLOCK_KV
    )  # fmt: skip
    if partials is None:
        out, lse = finalise(acc, row_max, row_sum)
        store_rows(rows_of(o, batch, head, q_length), q_pos, out, HEAD_DIM, PADDED_DIM)
        store_row_values(rows_of(lse_out, batch, head, q_length), q_pos, lse)
    else:
        slot = split * batches + batch
        acc_out = rows_of(partials.acc, slot, head, q_length)
        store_rows(acc_out, q_pos, acc, HEAD_DIM, PADDED_DIM)
        store_row_values(rows_of(partials.row_max, slot, head, q_length), q_pos, row_max)
        store_row_values(rows_of(partials.row_sum, slot, head, q_length), q_pos, row_sum)


def choose_num_splits(programs: int, n_blocks: int, multiprocessors: int) -> int:
    """How many KV splits fill the GPU: 1 if it is full, else two programs per multiprocessor.

    Args:
        programs: programs of the unsplit kernel.
        n_blocks: KV blocks that there are to share out; a split gets at least four, or the
            reduction costs more.
        multiprocessors: of the device; 1 on the CPU, where splitting gains nothing.
    """
    if programs == 0 or programs >= 0.8 * multiprocessors:
        return 1
    return max(1, min(2 * multiprocessors // programs, n_blocks // 4))


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
        num_splits: ranges into which the keys are split, at most one per KV block and MAX_SPLITS;
            None chooses by occupancy.
        config: tile sizes; None chooses by shape and device.

    Returns:
        o like q, contiguous; lse natural log, fp32 (batch, heads, M).
    """
    batch, q_length, heads, head_dim = q.shape
    kv_length, kv_heads = k.shape[1:3]
    group = heads // kv_heads
    config = config or default_config(q_length * group, q, MEASURED)
    q_blocks = triton.cdiv(q_length * group, config.block_q)
    n_blocks = max(1, triton.cdiv(kv_length, config.block_kv))
    programs = q_blocks * kv_heads * batch
    if num_splits is None:
        num_splits = choose_num_splits(programs, n_blocks, num_multiprocessors(q.device))
    num_splits = min(num_splits, n_blocks, MAX_SPLITS)

    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    partials = Partials.allocate(num_splits, q) if num_splits > 1 else None
    forward_kernel[(programs, num_splits)](
        View.of(q),
        View.of(k),
        View.of(v),
        View.of(o),
        View.of_rows(lse),
        partials,
        kv_lengths,
        q_length,
        kv_length,
        batch,
        kv_heads,
        q_blocks,
        num_splits,
        scale * LOG2E,
        GROUP=group,
        CAUSAL=causal,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded_head_dim(head_dim),
        BLOCK_Q=config.block_q,
        BLOCK_KV=config.block_kv,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if partials is not None:
        combine(partials, num_splits, o, lse)
    return o, lse
