"""The host's side of FA3's kernel for Hopper: which requests it takes, tensors as boxes, and its
launch.
"""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.autograd.compute import narrowed
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher, Plan, layout, placement
from flash_versions.dispatch.replay.recording import optional
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import box_width, panel_widths
from flash_versions.versions.fa3.forward import L2_BYTES, heads_of_section
from flash_versions.versions.fa3.hopper.config import (
    HopperConfig,
    default_config,
    has_fp16_scores,
)
from flash_versions.versions.fa3.hopper.forward import forward_kernel
from flash_versions.versions.tiles import wgmma
from flash_versions.versions.tiles.intervals import Intervals, shape_of
from flash_versions.versions.tiles.ragged import FAR, describe_ragged
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.score_mods import ScoreMods
from flash_versions.versions.tiles.sequences import new_outputs
from flash_versions.versions.tiles.tile_scheduler import Counters
from flash_versions.versions.tiles.tma import describe_swizzled
from flash_versions.versions.tiles.varlen_scheduler import Tiling, lay_out
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

FEW_HEADS = 8  # below which a section gets up to twice the heads whose keys the L2 cache holds
EVEN = 0.85  # share of a section's heads that the last section has at least, if possible
O_MULTIPLE = 8  # of columns of o: rows of whole 16-byte vectors, which FP8 inputs need not have

counters = Counters()
launch_forward = Launcher(forward_kernel)


def left_to_portable(request: Request) -> str | None:
    """Why a request that is not left to FA2 (`forward.left_to_gathering`) is left to the portable
    kernel, as a sentence, or None.
    """
    q = request.q
    if not wgmma.available(q.device):
        return f"{q.device} is no Hopper GPU (compute capability 9.0)."
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q has dtype {q.dtype}; float16 and bfloat16 are what WGMMA multiplies here."
    if request.block_table is not None:
        return "block_table is left to FA2's kernel: a box takes rows that lie in a line."
    if request.dropout_p > 0:
        return (
            "dropout_p is left to the portable kernel: a random number takes a hundred "
            "instructions, so tensor cores wait for those, whatever the kernel."
        )
    if request.is_ragged and kv_apart(request) is None:
        return (
            f"k has strides {request.k.stride()} and v {request.v.stride()}; k and v must have one "
            f"common number of rows from each sequence to the next, and at most 2^30 in all."
        )
    return None


def describe_inputs(
    request: Request, plan: Plan
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Q, K and V as boxes, of the first panel of their head dims."""
    q, k, v = request.q, request.k, request.v
    widths, widths_v = panel_widths(q.shape[3]), panel_widths(v.shape[3])
    config = plan.config
    if config.heads > 1 and request.alibi_slopes is not None:
        raise ValueError("heads of one tile share no slope; use heads=1.")
    if request.group % config.heads:
        raise ValueError(
            f"heads={config.heads} of a tile are not possible with {request.group} query heads to "
            f"a key head; use a divisor."
        )
    describe = describe_ragged if plan.constants["RAGGED"] else describe_swizzled
    describe_q = describe_swizzled if request.cu_seqlens_q is None else describe_ragged
    return (
        describe_q(q, WARPGROUP_ROWS.value // config.heads, widths[0], config.heads),
        describe(k, config.block_kv, widths[0]),
        describe(v, config.block_kv, widths_v[0]),
    )


def describe_second_panels(request: Request, plan: Plan, none: Any) -> list:
    """Q, K and V as boxes of the second panel of their head dims; `none` where the tensor has only
    one panel.
    """
    boxes = [none] * 3
    describe = describe_ragged if plan.constants["RAGGED"] else describe_swizzled
    describe_q = describe_swizzled if request.cu_seqlens_q is None else describe_ragged
    block_kv = plan.config.block_kv
    if plan.constants["PANELS"] == 2:
        _, width = panel_widths(request.q.shape[3])
        boxes[0] = describe_q(request.q, *plan.config.q_box(width))
        boxes[1] = describe(request.k, block_kv, width)
    if plan.constants["PANELS_V"] == 2:
        _, width = panel_widths(request.v.shape[3])
        boxes[2] = describe(request.v, block_kv, width)
    return boxes


def kv_apart(request: Request) -> int | None:
    """Rows from one sequence's first key to the next one's; 0 if they are packed; None if there is
    no such number, or v has another one, or all rows are more than boxes of sequences count.
    """
    if request.cu_seqlens_k is not None or request.k.shape[0] == 1:
        return 0
    (k_batch, k_row, *_), (v_batch, v_row, *_) = request.k.stride(), request.v.stride()
    if request.k.shape[1] == 1 or k_batch % k_row or k_batch // k_row * v_row != v_batch:
        return None
    apart = k_batch // k_row
    return apart if apart * request.k.shape[0] + request.k.shape[1] <= FAR.value else None


def num_tiles(request: Request, config: HopperConfig) -> int:
    """The tiles of queries; of packed sequences, those that there may be."""
    batch, q_length, heads, _ = request.q.shape
    tiles = cdiv(q_length, config.queries) * batch
    if request.cu_seqlens_q is not None:
        tiles = q_length // config.queries + request.batch
    return tiles * (heads // config.heads)


def num_programs(request: Request, config: HopperConfig) -> int:
    """A program for each tile, or as many as the GPU holds at once."""
    tiles = num_tiles(request, config)
    if config.scheduler == "grid":
        return tiles
    return min(tiles, devices[request.q.device].num_sms)


def tensors(
    request: Request,
    plan: Plan,
    boxes: tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor],
    o: torch.Tensor,
    lse: torch.Tensor,
    scales: tuple[torch.Tensor, ...] | None,
) -> tuple:
    """The arguments of the kernel that are tensors."""
    config = plan.config
    bounds: Any = lse
    lists: torch.Tensor | None = lse
    tiles: torch.Tensor | None = lse
    if plan.constants["LISTED"]:
        bounds, lists = describe_intervals(request, config)
    if plan.constants["RAGGED"]:
        tiling = Tiling(config.queries, planned=True)
        tiles = lay_out(request, tiling, of_queries=(o, lse))[0].plan
    describe = describe_swizzled if request.cu_seqlens_q is None else describe_ragged
    two_of_v = plan.constants["PANELS_V"] == 2
    two = plan.constants["PANELS"] == 2 or two_of_v
    width_v = panel_widths(o.shape[3])[0] if two_of_v else box_width(o.shape[3])
    width = min(config.o_columns, width_v)
    return (
        *boxes,
        describe(o, WARPGROUP_ROWS.value // config.heads, width, config.heads),
        *(describe_second_panels(request, plan, lse) if two else (lse, lse, lse)),
        lse,
        counters.take(o.device) if config.scheduler == "dynamic" else lse,
        tiles,
        lse if request.alibi_slopes is None else request.alibi_slopes,
        lse if request.sink is None else request.sink,
        bounds,
        lists,
        *(scales or (lse, lse, lse, lse)),
    )


def describe_intervals(
    request: Request, config: HopperConfig
) -> tuple[TensorDescriptor, torch.Tensor]:
    """The intervals of keys as a box for each block, and the lists of the tiles."""
    block_kv = config.block_kv
    intervals = Intervals.of(request, block_kv, config.queries, config.consumers)
    assert intervals is not None
    bounds = intervals.bounds.view(-1, intervals.blocks // 2, 1, 2 * block_kv)
    return describe_swizzled(bounds, 1, 2 * block_kv), intervals.lists


def more_numbers(request: Request, config: HopperConfig) -> tuple:
    """MORE_COUNTS, which end the arguments that are numbers."""
    lines: tuple[int, ...] = (0, 0, 0, 0)
    if request.has_intervals:
        batch_lines, head_lines, _, blocks = shape_of(request, config.block_kv)
        lines = batch_lines, head_lines, blocks, cdiv(request.q.shape[1], config.queries)
    return (kv_apart(request) or 0, *slopes_strides(request), *lines)


def even_section(request: Request) -> int:
    """`heads_of_section`, in whole groups, with about as many heads in the last section as in the
    others: if few are left for it, their heaviest tiles begin when there is nothing else to do.

    For that a section may have up to twice as many heads, and one of few heads has twice as many:
    keys that do not stay in the L2 cache cost less (docs/understand/log.md).
    """
    batch = 1 if request.is_ragged else request.q.shape[0]  # whose tiles the plan puts in order
    heads, group = batch * request.q.shape[2], request.group
    wide = max(request.q.shape[3], request.v.shape[3]) > 128  # few heads fit, and more are faster
    most = min(heads_of_section(request, 2 * L2_BYTES if wide else L2_BYTES), heads)
    if most in (1, heads):
        return most
    least = max(cdiv(heads, cdiv(heads, most)), min(FEW_HEADS, 2 * most))
    least = min(cdiv(least, group) * group, heads)
    sections = range(least, min(2 * least, heads) + 1, group)
    even = (section for section in sections if ((heads - 1) % section + 1) >= EVEN * section)
    return next(even, least)


def numbers(request: Request, section: int | None = None, least: int = 1) -> tuple:
    """The values of COUNTS; a section has at least `least` heads."""
    batch, q_length, heads, _ = request.q.shape
    section = max(section or even_section(request), least)
    bounds, scales = window_bounds(request), score_scales(request)
    return q_length, request.k.shape[1], heads, batch, section, *bounds, *scales


def slopes_strides(request: Request) -> tuple[int, int]:
    """Those of `ScoreMods`; 0 without ALiBi."""
    mods = ScoreMods.of(request)
    return mods.slopes_batch_stride, mods.slopes_head_stride or 0


def window_bounds(request: Request) -> tuple[int, int]:
    """How far a query sees to the left and to the right; 0 where there is no bound."""
    return request.window_left or 0, request.window_right or 0


def score_scales(request: Request) -> tuple[float, float]:
    """`ScoreMods.scale_log2` and its cap_scale, 0 without softcap."""
    mods = ScoreMods.of(request)
    return mods.scale_log2, mods.cap_scale or 0.0


def constants(request: Request, config: HopperConfig) -> dict[str, Any]:
    """The constants of `QueryProblem`."""
    left, right, kv_length = request.window_left, request.window_right, request.k.shape[1]
    # The last key that the first query sees. If it is a multiple of a consumer's queries, its rows
    # end in one block, its last: no other is cut. If it is also one of blocks, and tiles divide a
    # block, all consumers of a tile have the same last block.
    first_end, queries = kv_length - request.q.shape[1] + (right or 0), config.queries
    aligned = first_end % (queries // config.consumers) == 0
    alike = config.block_kv % queries == 0 and first_end % config.block_kv == 0
    ragged, listed = request.is_ragged, request.has_intervals
    quantized = request.precision is not None  # tiles of 8-bit numbers are padded to one panel
    cut = left is not None or (right is not None and (ragged or not aligned))
    uneven = ragged or left is not None or (right is not None and not alike)
    if listed:  # intervals say all that a window and the keys' end say
        request = request._replace(window_left=None, window_right=None)
        cut, uneven = False, ragged
    return {
        "HEADS": config.heads,
        **window_constants(request, config.block_kv),
        "CUT": cut,
        "UNEVEN": uneven,
        "RAGGED": ragged,
        "PACKED": request.cu_seqlens_q is not None,
        "ALIBI": request.alibi_slopes is not None,
        "SINK": request.sink is not None,
        "LISTED": listed,
        "PANELS": 1 if quantized else len(panel_widths(request.q.shape[3])),
        "PANELS_V": 1 if quantized else len(panel_widths(request.v.shape[3])),
    }


def window_constants(request: Request, block_kv: int) -> dict[str, Any]:
    """The constants that forward and backward share."""
    return {
        "GROUP": request.group,
        "LEFT": request.window_left is not None,
        "RIGHT": request.window_right is not None,
        "EDGE": request.is_ragged
        or (not request.has_intervals and request.k.shape[1] % block_kv != 0),
        "CAP": request.softcap is not None,
    }


def make_plan(
    request: Request,
    config: HopperConfig,
    dtype: torch.dtype,
    scales: tuple[torch.Tensor, ...] | None = None,
    per_block: bool = False,
    shift: float = 0.0,
) -> Plan:
    """The launch of the kernel; dtype is that of the tensors that it reads, the rest for FP8."""
    return Plan(
        config,
        (*layout(request), config.block_q, config.block_kv, dtype, *map(placement, scales or ())),
        (num_programs(request, config), 1, 1),
        (*numbers(request, config.section, config.heads), *more_numbers(request, config)),
        {
            **constants(request, config),
            "FP8": scales is not None,
            "FP16_SCORES": scales is not None and has_fp16_scores(request),
            "PER_BLOCK": per_block,
            "SHIFT": shift,
            "CONSUMERS": config.consumers,
            "STAGES": config.stages,
            "Q_STAGES": config.q_stages,
            "OVERLAP": config.overlap,
            "PING_PONG": config.ping_pong,
            "LATE_WAIT": config.late_wait,
            "SCHEDULER": config.scheduler,
            # Of 64 K registers; Triton counts the producer's warp as a warpgroup.
            "CONSUMER_REGISTERS": 240 if config.consumers == 2 else 160,
            "PRODUCER_REGISTERS": 24,
        },
    )


def forward(
    request: Request, config: HopperConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE on a Hopper GPU.

    Args:
        request: see `Request`; one that is not `left_to_portable`, on the current GPU, with rows
            padded as `compute.in_vectors` does.
        config: the schedule; None chooses by shape.

    Raises:
        ValueError: the configuration does not fit the request.

    Returns:
        o (batch, M, heads, head_dim_v), contiguous, in q's dtype; lse natural log, fp32 (batch,
        heads, M); no further statistics.
    """
    config = config or default_config(request)
    return launch(make_plan(request, config, request.q.dtype), request)


def launch(
    plan: Plan,
    request: Request,
    boxes: tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor] | None = None,
    scales: tuple[torch.Tensor, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Launch the kernel on the request's Q, K and V; in FP8, on other boxes and on the tensors of
    `Scales`.
    """
    boxes = boxes or describe_inputs(request, plan)
    o, lse = new_outputs(request, O_MULTIPLE)
    optional(lse)
    launch_forward.launch(plan, tensors(request, plan, boxes, o, lse, scales))
    return narrowed(o, request.v), lse, None
