"""FlashAttention 3 in FP8, forward, portable: half the bytes, twice the rate of products.

`flash_versions/lessons/fa3_fp8.py` explains it. This kernel has options, and takes scales of blocks
or of heads:

* Q, K and V come as `quantize.Quantized`. With the scales of Q and K, the factor of the scores is a
  number per row and KV block. The running maximum is in scaled units, so blocks with different
  scales are comparable. `row_sum` is 2^OFFSET times as large, as P is, which is subtracted in the
  LSE.
* The accumulator is kept in units of the head's largest V scale. P of a block is multiplied by its
  own V scale over that one, in the exponent; `row_sum` does not have this factor:

      P_j = 2^(score_j - row_max + shift_j),     shift_j = OFFSET + log2(v_scale_j / v_reference)
      o = v_reference * sum_j P_j V_j / row_sum, row_sum = sum_j P_j * v_reference / v_scale_j

Cost. The rounding errors are in `budget.py`. A kernel that quantises reads the inputs once before.

Source. Shah et al. 2024, section 3.3, "Low-precision with FP8": scales per block. The factor 2^8 is
from the code of FlashAttention 3.
"""

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import H200_SHARED_MEMORY, constant_in_compile, devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.precision import BLOCK_KEYS, BLOCK_ROWS, Quantized
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig, padded_head_dim
from flash_versions.dispatch.version import fp8_limits
from flash_versions.versions.fa3.forward import COUNTS, heads_of_section, heavy_first, load_rows
from flash_versions.versions.fp8.quantize import KEY_GROUP, P_OFFSET
from flash_versions.versions.tiles.algebra import Window, blocks_of_queries, finalize, mask_scores
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    cdiv,
    launch_tiles,
    load_row_values,
    row_pointers,
    store_row_values,
    store_rows,
)
from flash_versions.versions.tiles.score_mods import (
    ScoreMods,
    add_alibi,
    cap_scores,
    place_queries,
    sink_state,
)
from flash_versions.versions.tiles.sequences import Sequences, new_outputs
from flash_versions.versions.tiles.tma import describe
from flash_versions.versions.tiles.varlen_scheduler import find_tile

OFFSET = tl.constexpr(P_OFFSET)
ROWS_PER_SCALE = tl.constexpr(BLOCK_ROWS)
KEYS_PER_SCALE = tl.constexpr(BLOCK_KEYS)
PERMUTED = tl.constexpr(KEY_GROUP)
SMALLEST = tl.constexpr(2.0**-64)  # share of the largest scale: P rounds to 0 long before
TINY = tl.constexpr(2.0**-126)
MIN_WIDTH = 32  # of 8-bit numbers, a tensor core sums up no fewer


@triton.jit
def load_scale(view, rows, block):
    """The scale of a block."""
    return tl.load(row_pointers(view, rows, rows.first * 0 + block))


@triton.jit
def in_order_of_values(p):
    """The columns of P in the order in which V^T has its keys: within 16, key 8h + 2l + j comes to
    4l + 2h + j (h, j < 2; l < 4).
    """
    ROWS: tl.constexpr = p.shape[0]
    KEYS: tl.constexpr = p.shape[1]
    p = p.reshape(ROWS, KEYS // PERMUTED, 2, PERMUTED // 4, 2)
    return p.permute(0, 1, 3, 2, 4).reshape(ROWS, KEYS)


@triton.jit
def softmax_step(s, row_max, row_sum, scale_log2, shift, weight):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    s is unscaled, scale_log2 has a number per row, row_max is scaled and in log2 units. p comes
    times 2^shift, and counts `weight` times that in row_sum.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp2(s * scale_log2[:, None] - (pivot - shift)[:, None])
    alpha = tl.exp2(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1) * weight, alpha


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, q_scale, queries, k, v, reference, keys, k_scale, v_scale,
    window, mods,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    scale = q_scale * load_scale(k_scale, keys, j * BLOCK_KV // KEYS_PER_SCALE)
    scale_log2 = tl.maximum(scale * mods.scale_log2, TINY)  # 0 would make a masked score NaN
    s = tl.dot(q_tile, load_rows(k, keys, j * BLOCK_KV).T)
    if mods.cap_scale is not None or mods.slopes is not None:
        s = cap_scores(s * scale[:, None], mods)
        distance = (queries.pos + queries.offset)[:, None] - k_pos[None, :]
        s = add_alibi(s, queries.slope[:, None], distance, mods)
        scale_log2 = scale * 0.0 + mods.scale_log2
    if MASKED:
        s = mask_scores(
            s, k_pos[None, :], queries.first_key[:, None], queries.last_key[:, None], window
        )
    share = load_scale(v_scale, keys, j * BLOCK_KV // KEYS_PER_SCALE) / tl.where(
        reference > 0.0, reference, 1.0
    )
    share = tl.minimum(tl.maximum(share, SMALLEST), 1.0)  # a block of zeros has any scale
    p, row_max, row_sum, alpha = softmax_step(
        s, row_max, row_sum, scale_log2, OFFSET + tl.log2(share), 1.0 / share
    )
    v_tile = v.load([keys.batch, keys.head, 0, j * BLOCK_KV])  # behind the last key it is 0
    v_tile = v_tile.reshape(v_tile.shape[2], v_tile.shape[3])
    p = in_order_of_values(p.to(v_tile.dtype))
    acc = tl.dot(p, v_tile.T, acc * alpha[:, None])
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, q_scale, k, k_scale, v, v_scale, v_reference, o, lse_out, sequences, window, mods, q_length,
    kv_length, heads, tiles, total, section,
    GROUP: tl.constexpr, HEADS_PER_Q_SCALE: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """Each program computes and stores one (query tile, query head, sequence)."""
    LAST_FIRST: tl.constexpr = window.right is not None  # the last queries see the most keys
    place = heavy_first(tl.program_id(0), tiles, total, section)
    tile, sequence, rows, keys = find_tile(
        place, None, sequences, q_length, kv_length, heads, tiles, LAST_FIRST
    )
    queries = place_queries(tile, sequence, heads, rows, keys, window, mods, 1, BLOCK_Q)
    keys = Rows(keys.batch, keys.head // GROUP, keys.first, keys.length)
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, rows.length, keys.length, window, 1, BLOCK_Q, BLOCK_KV
    )

    q_tile = load_rows(q, rows, tile * BLOCK_Q)
    of_scale = Rows(
        rows.batch, rows.head // HEADS_PER_Q_SCALE, rows.first, tl.cdiv(q_length, ROWS_PER_SCALE)
    )
    scale_of_rows = load_row_values(q_scale, of_scale, queries.pos // ROWS_PER_SCALE, 1.0)
    reference = load_scale(v_reference, keys, keys.first)
    acc = tl.zeros([BLOCK_Q, o.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max, row_sum = sink_state(row_max, row_sum, mods, queries.head, True)
    row_sum *= tl.exp2(OFFSET)
    state = acc, row_max, row_sum
    given = q_tile, scale_of_rows, queries, k, v, reference, keys
    if window.left is not None:
        for j in range(begin, full_begin):
            state = fold_block(
                j, *state, *given, k_scale, v_scale, window, mods, BLOCK_KV, MASKED=True
            )
    for j in range(full_begin, full_end):
        state = fold_block(
            j, *state, *given, k_scale, v_scale, window, mods, BLOCK_KV, MASKED=False
        )
    for j in range(full_end, end):
        state = fold_block(j, *state, *given, k_scale, v_scale, window, mods, BLOCK_KV, MASKED=True)
    acc, row_max, row_sum = state
    out, lse = finalize(acc, row_max - OFFSET, row_sum)
    store_rows(o, rows, queries.pos, out * reference)
    store_row_values(lse_out, rows, queries.pos, lse)


launch_forward = Launcher(forward_kernel)


def limits(request: Request) -> str | None:
    """Why no kernel computes a request in FP8, as a sentence, or None."""
    device = request.q.device
    return fp8_limits(request) or devices.limits(device) or tensor_core_limits(device)


@constant_in_compile
def tensor_core_limits(device: torch.device) -> str | None:
    """Why a device has no FP8, as a sentence, or None."""
    capability = devices[device].capability
    if (0, 0) < capability < (8, 9):
        major, minor = capability
        return (
            f"the GPU has compute capability {major}.{minor}, whose tensor cores know no FP8; 8.9 "
            f"(Ada) or later works, or leave precision out."
        )
    return None


def choose_config(request: Request) -> LaunchConfig:
    """Tile sizes for a request that spill no register: large ones where the tensor cores read K and
    V from shared memory (Hopper and Blackwell's B200), small ones where they pass through
    registers.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    limit = devices[q.device].shared_memory
    block_q = min(128, max(16, 1 << (q.shape[1] - 1).bit_length()))
    if limit < H200_SHARED_MEMORY:
        config = LaunchConfig(min(block_q, max(32, 8192 // max(64, head_dim))), 32, 8, 2)
    elif block_q < 64:
        config = LaunchConfig(block_q, 64, num_warps=4, num_stages=3)
    else:
        plain = request.softcap is None and request.alibi_slopes is None
        block_kv = BLOCK_KEYS if plain and head_dim <= 128 else 64
        config = LaunchConfig(block_q, block_kv, num_warps=block_q // 16, num_stages=3)
    return config.fitted(head_dim, 1, limit)


def scales(x: torch.Tensor, blocks: int) -> View:
    """The view of a scale per head or per block, as one per block."""
    return View.of_rows(x.expand(-1, -1, blocks))


def forward(
    request: Request, quantized: Quantized, config: LaunchConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention of quantised tensors and its LSE, as `fa2.forward` has them, of a request that
    `limits` lets through.

    Args:
        request: see `Request`. Of its own q, k and v only the shapes and the dtype are read; there
            must be at least one query and one key.
        quantized: what they were quantised to.
        config: tile sizes, at most `BLOCK_KEYS` keys; None chooses by shape and device.
    """
    batch, q_length, heads, _ = request.q.shape
    kv_length, head_dim_v = request.k.shape[1], request.v.shape[3]
    config = config or choose_config(request)
    tiles = cdiv(q_length, config.block_q)
    total = tiles * heads * batch
    width = max(MIN_WIDTH, padded_head_dim(quantized.q.shape[3]))
    o, lse = new_outputs(request)
    launch_tiles(
        launch_forward,
        (total,),
        (
            describe(quantized.q, config.block_q, width),
            scales(quantized.q_scale, cdiv(q_length, BLOCK_ROWS)),
            describe(quantized.k, config.block_kv, width),
            scales(quantized.k_scale, cdiv(kv_length, BLOCK_KEYS)),
            describe(quantized.v.transpose(1, 2), padded_head_dim(head_dim_v), config.block_kv),
            scales(quantized.v_scale, cdiv(kv_length, BLOCK_KEYS)),
            View.of_rows(quantized.v_reference[..., None]), View.of(o), View.of_rows(lse),
            Sequences.of(request), Window(request.window_left, request.window_right),
            ScoreMods.of(request), q_length, kv_length, heads, tiles, total,
            heads_of_section(request)
        ),
        config,
        GROUP=request.group,
        HEADS_PER_Q_SCALE=heads // quantized.q_scale.shape[1],
    )  # fmt: skip
    return o, lse, None
