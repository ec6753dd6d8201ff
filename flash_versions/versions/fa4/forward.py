"""FlashAttention 4, forward, portable: rescale only where needed, exponentials on two units.

Without the code for options: python -m flash_versions.diff --show fa4 --plain

What FA3 wasted. Once loads and products overlap, the softmax is what remains between two products.
In every block FA3 multiplies the accumulator by 2^(old maximum - new maximum), which takes head_dim
products for each row, and after the first few blocks that factor is mostly 1 or close to it. And
every score costs an exponential. An SM computes 16 of them in a cycle, while its multiply-add
units, 128 operations in a cycle, have time. From one generation of GPUs to the next, tensor cores
become faster and these units do not: at head_dim 128 on Hopper, exponentials take half as long as
16-bit products and as long as 8-bit ones; on Blackwell they take as long as 16-bit ones.

What changes.
* Conditional rescaling (`softmax.py`). Each row has a reference in place of its maximum. The
  reference is raised, and the accumulator multiplied, only where a block exceeds it by a factor of
  more than 2^8. The result is exact all the same.
* Blocks from the last to the first. The nearest keys of a causal query tend to have the largest
  scores, so the first reference is a good one. notebooks/04_fa4 counts, on the scores of the
  shipped model, how often a block rescales in each direction.
* A polynomial for a share of the exponentials (`exp2.py`), on the multiply-add units. It is used
  for 16-bit P only, whose rounding covers the polynomial's error.

    fold block j, as FA3:                       now:
        S = Q K_j^T                                 S = Q K_j^T
        m = max(m, rowmax S)                        raise r where rowmax S > r + 8
        P = 2^(S - m)          [exp unit]           P = 2^(S - r)     [exp unit | multiply-add]
        acc *= 2^(m_old - m)   [every block]        if any row was raised: acc *= alpha
        acc += P V_j                                acc += P V_j

Everything else is FA3's: boxes, the order of tiles, the walk.

Cost. The decision takes one minimum over the rows of a tile and one branch for each block. The
warps of a portable program have to agree on it, through shared memory, and the branch separates two
products that overlap without it. On Hopper that costs far more than it saves, and both tricks are
off there (`choose_rule`). In the explicit kernel each warp decides for its own rows. A polynomial
takes 8 instructions in place of one that keeps the exponential unit busy for 8 cycles of a warp.

Source. Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao 2026, "FlashAttention-4: Algorithm and Kernel
Pipelining Co-Design for Asymmetric Hardware Scaling", arXiv:2603.05451. It was written for
Blackwell, whose tensor memory and pairs of SMs have no counterpart here.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher, layout
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions.fa3.forward import (
    COUNTS,
    choose_config,
    heads_of_section,
    heavy_first,
    load_rows,
    needs_lists,
)
from flash_versions.versions.fa4.exp2 import DEGREES, mixed_exp2
from flash_versions.versions.fa4.softmax import raise_reference
from flash_versions.versions.tiles.algebra import Window, blocks_of_queries, finalize, mask_scores
from flash_versions.versions.tiles.rows import Rows, View, store_row_values, store_rows
from flash_versions.versions.tiles.score_mods import (
    ScoreMods,
    add_alibi,
    cap_scores,
    drop,
    place_queries,
    sink_state,
)
from flash_versions.versions.tiles.sequences import Sequences, new_outputs
from flash_versions.versions.tiles.tma import describe
from flash_versions.versions.tiles.varlen_scheduler import Tiling, find_tile, lay_out

THRESHOLD = 8.0  # log2: how far a block may exceed a row's reference
EIGHTHS = 2  # of the exponentials that are polynomials
AS_FA3 = (8, 9, 12)  # compute capabilities where neither pays, see `choose_rule`
SHARED_OUT = 32  # columns that `mixed_exp2` shares out at a time


class Rule(NamedTuple):
    """How a kernel computes its softmax; see `raise_reference` and `mixed_exp2`."""

    THRESHOLD: Any
    EIGHTHS: Any
    DEGREE: Any
    counts: Any  # pointer to two int32 that count blocks and rescales, or None


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
    rule,
    BLOCK_KV: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, j * BLOCK_KV)
    s = cap_scores(tl.dot(q_tile, k_tile.T, input_precision="ieee"), mods)
    distance = (queries.pos + queries.offset)[:, None] - k_pos[None, :]
    s = add_alibi(s, queries.slope[:, None], distance, mods)
    if MASKED:
        s = mask_scores(
            s, k_pos[None, :], queries.first_key[:, None], queries.last_key[:, None], window
        )
    row_max, pivot, alpha = raise_reference(s, row_max, mods.scale_log2, rule.THRESHOLD)
    acc = rescale(acc, alpha, rule, MASKED)
    p = mixed_exp2(s * mods.scale_log2 - pivot[:, None], rule.EIGHTHS, rule.DEGREE)
    row_sum = alpha * row_sum + tl.sum(p, 1)
    p = drop(p, mods, queries.sequence_head[:, None], queries.pos[:, None], k_pos[None, :])
    v_tile = load_rows(v, keys, j * BLOCK_KV)
    if MASKED:
        if sequences.cu_seqlens_k is not None or sequences.kv_lengths is not None:
            # What follows the sequence in the tensor may be NaN, and 0 * NaN is NaN.
            v_tile = tl.where((k_pos < keys.length)[:, None], v_tile, 0.0)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def rescale(acc, alpha, rule, MASKED: tl.constexpr):
    """acc * alpha, left alone where alpha is 1 for all rows of the tile.

    Blocks that are cut are few and always multiply: a second branch would cost registers.
    """
    if rule.counts is not None:
        tl.atomic_add(rule.counts, 1)
    if MASKED or rule.THRESHOLD == 0:
        acc = acc * alpha[:, None]
        if rule.counts is not None:
            tl.atomic_add(rule.counts + 1, 1)
    else:
        # Without an axis: along one, Triton 3.6 and 3.7 fail to compile this for Blackwell.
        if tl.min(alpha) < 1.0:
            acc = acc * alpha[:, None]
            if rule.counts is not None:
                tl.atomic_add(rule.counts + 1, 1)
    return acc


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
    rule,
    begin,
    full_begin,
    full_end,
    end,
    BLOCK_KV: tl.constexpr,
):
    """Fold KV blocks [begin, end) into the state of a query tile, the last one first: (acc,
    row_max, row_sum).

    Blocks outside [full_begin, full_end) are masked.
    """
    for i in range(full_end, end):
        acc, row_max, row_sum = fold_block(
            full_end + end - 1 - i, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys,
            window, mods, rule, BLOCK_KV, MASKED=True
        )  # fmt: skip
    for i in range(full_begin, full_end):
        acc, row_max, row_sum = fold_block(
            full_begin + full_end - 1 - i, acc, row_max, row_sum, q_tile, queries, k, v, sequences,
            keys, window, mods, rule, BLOCK_KV, MASKED=False
        )  # fmt: skip
    if window.left is not None:
        for i in range(begin, full_begin):
            acc, row_max, row_sum = fold_block(
                begin + full_begin - 1 - i, acc, row_max, row_sum, q_tile, queries, k, v, sequences,
                keys, window, mods, rule, BLOCK_KV, MASKED=True
            )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def forward_tile(
    tile,
    sequence,
    rows,
    keys,
    q,
    k,
    v,
    o,
    lse_out,
    sequences,
    window,
    mods,
    rule,
    heads,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Compute and store one tile, whose rows and keys are those of a query head."""
    queries = place_queries(tile, sequence, heads, rows, keys, window, mods, 1, BLOCK_Q)
    keys = Rows(keys.batch, keys.head // GROUP, keys.first, keys.length)
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, rows.length, keys.length, window, 1, BLOCK_Q, BLOCK_KV
    )

    q_tile = load_rows(q, rows, tile * BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, o.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max, row_sum = sink_state(row_max, row_sum, mods, queries.head, True)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods, rule,
        begin, full_begin, full_end, end, BLOCK_KV
    )  # fmt: skip
    if mods.dropout_rescale is not None:
        acc *= mods.dropout_rescale
    # A box of O would reach past the end of a packed sequence into the next: store by pointers.
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
    plan,
    sequences,
    window,
    mods,
    rule,
    q_length,
    kv_length,
    heads,
    tiles,
    total,
    section,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Each program walks over tiles, one (query tile, query head, sequence) after the other."""
    LAST_FIRST: tl.constexpr = window.right is not None  # the last queries see the most keys
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        place = number if plan is not None else heavy_first(number, tiles, total, section)
        tile, sequence, rows, keys = find_tile(
            place, plan, sequences, q_length, kv_length, heads, tiles, LAST_FIRST
        )
        if plan is None or sequence >= 0:  # a plan has room for more tiles than there are
            forward_tile(
                tile, sequence, rows, keys, q, k, v, o, lse_out, sequences, window, mods, rule,
                heads, GROUP, BLOCK_Q, BLOCK_KV
            )  # fmt: skip


launch_forward = Launcher(forward_kernel)


@cache
def constants_of(
    threshold: float, eighths: int, dtype: torch.dtype
) -> tuple[tl.constexpr, tl.constexpr, tl.constexpr]:
    """THRESHOLD, EIGHTHS and DEGREE of a `Rule`. The same objects each time, as for
    `memory.tile_width`.
    """
    return tl.constexpr(threshold), tl.constexpr(eighths), tl.constexpr(DEGREES.get(dtype))


def choose_rule(request: Request, config: LaunchConfig) -> tuple[float, int]:
    """THRESHOLD and EIGHTHS of a request's `Rule`: both tricks, or FA3's softmax where they do not
    pay.

    On Hopper they were measured to cost more than they free: a branch between two products keeps
    them from overlapping (docs/understand/log.md). Where products are mma.sync's, Triton changes
    P's layout once it was taken apart, and the warps agree through shared memory: off there, too.

    No polynomial in fp32, where its error would show; beyond head_dim 128, where products take four
    times as long as exponentials; and where a block is too narrow to be shared out.
    """
    if devices[request.q.device].capability[0] in AS_FA3:
        return 0.0, 0
    wide = max(request.q.shape[3], request.v.shape[3]) > 128
    if wide or request.q.dtype == torch.float32 or config.block_kv % SHARED_OUT:
        return THRESHOLD, 0
    return THRESHOLD, EIGHTHS


def check_rule(request: Request, config: LaunchConfig, threshold: float, eighths: int) -> None:
    """Refuse what the kernel cannot do; ValueError with a sentence."""
    if not 0 <= threshold <= THRESHOLD:
        raise ValueError(f"threshold={threshold!r} is not possible; 0 to {THRESHOLD:g} are.")
    if eighths not in range(9):
        raise ValueError(f"eighths={eighths!r} is not possible; 0 to 8 are.")
    if eighths and request.q.dtype == torch.float32:
        raise ValueError(
            f"eighths={eighths} is not possible in float32, where the polynomial's error would "
            f"show; use eighths=0, or float16 or bfloat16."
        )
    if eighths % 8 and config.block_kv % SHARED_OUT:
        raise ValueError(
            f"eighths={eighths} with block_kv={config.block_kv} is not possible; 0 and 8 are, or a "
            f"block_kv that is a multiple of {SHARED_OUT}."
        )


def forward(
    request: Request,
    config: LaunchConfig | None = None,
    threshold: float | None = None,
    eighths: int | None = None,
    counts: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE, of a request that is not `fa3.forward.left_to_gathering`.

    Args:
        request: see `Request`. Few rows are served, too, only not as fast; num_splits is not read.
        config: tile sizes; None chooses by shape and device.
        threshold: how far, in log2 units, scores may exceed a row's reference before it is raised,
            up to 8; 0 rescales in every block, as FA3 does; None: see `choose_rule`.
        eighths: of the exponentials that are polynomials, 0 to 8; None: see `choose_rule`.
        counts: two int32 to which the kernel adds the blocks that it folds and those in which it
            rescales; see `count_rescales`.

    Raises:
        ValueError: threshold or eighths is out of range, or does not suit the dtype or the tile.

    Returns:
        o (batch, M, heads, head_dim_v), contiguous, in q's dtype; lse natural log, fp32 (batch,
        heads, M); no further statistics.
    """
    if reason := needs_lists(request):
        raise ValueError(reason)
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, _ = q.shape
    config = config or choose_config(request)
    chosen_threshold, chosen_eighths = choose_rule(request, config)
    threshold = chosen_threshold if threshold is None else threshold
    eighths = chosen_eighths if eighths is None else eighths
    check_rule(request, config, threshold, eighths)
    o, lse = new_outputs(request)
    (tiles,) = lay_out(request, Tiling(config.block_q), of_queries=(o, lse))
    total = tiles.number * heads * batch  # packed: a batch of one
    launch_forward(
        (*layout(request), threshold, eighths, counts is None),
        (total,),
        (
            describe(q, config.block_q),
            describe(k, config.block_kv),
            describe(v, config.block_kv),
            View.of(o),
            View.of_rows(lse),
            tiles.plan,
            Sequences.of(request),
            Window(request.window_left, request.window_right),
            ScoreMods.of(request),
            Rule(*constants_of(threshold, eighths, q.dtype), counts),
            q_length,
            request.max_kv_length,
            heads,
            tiles.number,
            total,
            heads_of_section(request),
        ),
        {
            "GROUP": request.group,
            "BLOCK_Q": config.block_q,
            "BLOCK_KV": config.block_kv,
        },
        config.num_warps,
        config.num_stages,
    )
    return o, lse, None


def count_rescales(request: Request, threshold: float = THRESHOLD) -> tuple[int, int]:
    """How often a request's accumulators are rescaled: (blocks folded, of these rescaled), over all
    query tiles. FA3 rescales in every block.
    """
    counts = torch.zeros(2, dtype=torch.int32, device=request.q.device)
    forward(request, threshold=threshold, counts=counts)
    blocks, rescales = counts.tolist()
    return blocks, rescales
