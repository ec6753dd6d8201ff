"""FlashAttention 4, forward, portable: rescale only where needed, exponentials on two units.

`flash_versions/lessons/fa4.py` explains both, `softmax.py` why the result is exact all the same,
and `exp2.py` the polynomial, which is used for 16-bit P only. Blocks come from the last to the
first: the nearest keys of a causal query tend to have the largest scores, so the first reference is
a good one. notebooks/04_fa4 counts, on the scores of the shipped model, how often a block rescales
in each direction.

    fold block j, as FA3:                       now:
        S = Q K_j^T                                 S = Q K_j^T
        m = max(m, rowmax S)                        raise r where rowmax S > r + 8
        P = 2^(S - m)          [exp unit]           P = 2^(S - r)     [exp unit | multiply-add]
        acc *= 2^(m_old - m)   [every block]        if any row was raised: acc *= alpha
        acc += P V_j                                acc += P V_j

Everything else is FA3's: boxes, the order of tiles, and that it serves plain calls.

Cost. The decision takes one minimum over the rows of a tile and one branch for each block. The
warps of a portable program have to agree on it, through shared memory, and the branch separates two
products that overlap without it. On Hopper that costs far more than it saves, and both tricks are
off there (`choose_rule`). In the explicit kernel each warp decides for its own rows. A polynomial
takes 8 instructions in place of one that keeps the exponential unit busy for 8 cycles of a warp.

Source. Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao 2026, "FlashAttention-4: Algorithm and Kernel
Pipelining Co-Design for Asymmetric Hardware Scaling", arXiv:2603.05451. It was written for
Blackwell, whose tensor memory and pairs of SMs have no counterpart here.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions.fa3.forward import (
    COUNTS,
    choose_config,
    heavy_first,
    launch,
    left_for_options,
    load_rows,
    tile_at,
)
from flash_versions.versions.fa4.exp2 import DEGREES, mixed_exp2
from flash_versions.versions.fa4.softmax import raise_reference
from flash_versions.versions.tiles.algebra import blocks_of_queries, finalize, last_visible
from flash_versions.versions.tiles.rows import constant, store_row_values, store_rows

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
    j, acc, row_max, row_sum, q_tile, last_key, k, v, keys, scale_log2, rule,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, j * BLOCK_KV)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    if MASKED:
        s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    row_max, pivot, alpha = raise_reference(s, row_max, scale_log2, rule.THRESHOLD)
    acc = rescale(acc, alpha, rule, MASKED)
    p = mixed_exp2(s * scale_log2 - pivot[:, None], rule.EIGHTHS, rule.DEGREE)
    row_sum = alpha * row_sum + tl.sum(p, 1)
    v_tile = load_rows(v, keys, j * BLOCK_KV)
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


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, o, lse_out, window, scale_log2, rule, q_length, kv_length, heads, tiles, total,
    section,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per (query tile, query head, sequence), which folds the last block first."""
    place = heavy_first(tl.program_id(0), tiles, total, section)
    tile, rows, keys = tile_at(place, q_length, kv_length, heads, tiles, window, GROUP)
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = kv_length - q_length  # causal is bottom-right: the last query sees the last key
    last_key = last_visible(row, offset, window.right, kv_length)
    _, _, full_end, end = blocks_of_queries(tile, q_length, kv_length, window, 1, BLOCK_Q, BLOCK_KV)

    q_tile = load_rows(q, rows, tile * BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, o.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    state = acc, row_max, row_sum
    given = q_tile, last_key, k, v, keys, scale_log2
    for i in range(full_end, end):
        state = fold_block(full_end + end - 1 - i, *state, *given, rule, BLOCK_KV, MASKED=True)
    for i in range(full_end):
        state = fold_block(full_end - 1 - i, *state, *given, rule, BLOCK_KV, MASKED=False)
    out, lse = finalize(*state)
    store_rows(o, rows, row, out)
    store_row_values(lse_out, rows, row, lse)


launch_forward = Launcher(forward_kernel)


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
    """Attention and its LSE of a request that is not `left_for_options`, as `fa2.forward` has them.

    Args:
        request: see `Request`. Few rows are served, too, only not as fast; num_splits is not read.
        config: tile sizes; None chooses by shape and device.
        threshold: how far, in log2 units, scores may exceed a row's reference before it is raised,
            up to 8; 0 rescales in every block, as FA3 does; None: see `choose_rule`.
        eighths: of the exponentials that are polynomials, 0 to 8; None: see `choose_rule`.
        counts: two int32 to which the kernel adds the blocks that it folds and those in which it
            rescales.

    Raises:
        ValueError: the request has options; threshold or eighths is out of range, or does not suit
            the dtype or the tile.
    """
    if reason := left_for_options(request):
        raise ValueError(reason)
    config = config or choose_config(request)
    chosen_threshold, chosen_eighths = choose_rule(request, config)
    threshold = chosen_threshold if threshold is None else threshold
    eighths = chosen_eighths if eighths is None else eighths
    check_rule(request, config, threshold, eighths)
    degree = DEGREES.get(request.q.dtype)
    rule = Rule(constant(threshold), constant(eighths), constant(degree), counts)
    return launch(launch_forward, request, config, rule)
