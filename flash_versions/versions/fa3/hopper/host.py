"""The host's side of FA3's kernel for Hopper: which requests it takes, tensors as boxes, and its
launch.
"""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.autograd.compute import narrowed
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import box_width, panel_widths
from flash_versions.versions.fa3.forward import L2_BYTES, heads_of_section
from flash_versions.versions.fa3.hopper import totals
from flash_versions.versions.fa3.hopper.config import (
    HopperConfig,
    are_alike,
    default_config,
    has_fp16_scores,
)
from flash_versions.versions.fa3.hopper.forward import forward_kernel
from flash_versions.versions.tiles import wgmma
from flash_versions.versions.tiles.algebra import LOG2E
from flash_versions.versions.tiles.intervals import Intervals, shape_of
from flash_versions.versions.tiles.ragged import FAR, describe_ragged
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.sequences import new_outputs
from flash_versions.versions.tiles.tile_scheduler import Counters
from flash_versions.versions.tiles.tma import boxes, describe_swizzled
from flash_versions.versions.tiles.varlen_scheduler import Tiling, lay_out

FEW_HEADS = 8  # below which a section gets up to twice the heads whose keys the L2 cache holds
MOST_COUNTERS = 512  # of a launch: two, and one for each consumer and shared tile
EVEN = 0.85  # share of a section's heads that the last section has at least, if possible
SIXTEEN_BITS = torch.float16, torch.bfloat16  # what WGMMA multiplies here, beside FP8
O_MULTIPLE = 8  # of columns of o: rows of whole 16-byte vectors, which FP8 inputs need not have

counters = Counters()
tail_counters = Counters(MOST_COUNTERS, launches=1024)
launch_forward = Launcher(forward_kernel)


def left_to_portable(request: Request) -> str | None:
    """Why a request that is not left to FA2 (`forward.left_to_gathering`) is left to the portable
    kernel, as a sentence, or None.
    """
    q = request.q
    if not wgmma.available(q.device):
        return f"{q.device} is no Hopper GPU (compute capability 9.0)."
    if q.dtype not in SIXTEEN_BITS:
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


def boxes_of(request: Request, config: HopperConfig) -> tuple[Any, ...]:
    """How Q, K, V and O are cut into boxes, of the first panel of their head dims; then how Q, K
    and V are of the second one, None where there is no second one.

    Raises:
        ValueError: the configuration does not fit the request.
    """
    if config.heads > 1 and request.alibi_slopes is not None:
        raise ValueError("heads of one tile share no slope; use heads=1.")
    if request.group % config.heads:
        raise ValueError(
            f"heads={config.heads} of a tile are not possible with {request.group} query heads to "
            f"a key head; use a divisor."
        )
    dim_v = request.v.shape[3]
    # Tiles of 8-bit numbers are padded to one panel.
    widths = panel_widths if request.precision is None else lambda dim: (box_width(dim),)
    (width, *second), (width_v, *second_v) = widths(request.q.shape[3]), widths(dim_v)
    of_keys = describe_ragged if request.is_ragged else describe_swizzled
    of_queries = describe_swizzled if request.cu_seqlens_q is None else describe_ragged
    width_o = min(
        config.o_columns, width_v if second_v else box_width(cdiv(dim_v, O_MULTIPLE) * O_MULTIPLE)
    )
    return (
        boxes(of_queries, *config.q_box(width)),
        boxes(of_keys, config.block_kv, width),
        boxes(of_keys, config.block_kv, width_v),
        boxes(of_queries, *config.q_box(width_o)),
        boxes(of_queries, *config.q_box(second[0])) if second else None,
        boxes(of_keys, config.block_kv, second[0]) if second else None,
        boxes(of_keys, config.block_kv, second_v[0]) if second_v else None,
    )


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


def num_tiles(request: Request, config: Any) -> int:
    """The tiles of queries; of packed sequences, those that there may be."""
    batch, q_length, heads, _ = request.q.shape
    tiles = cdiv(q_length, config.queries) * batch
    if request.cu_seqlens_q is not None:
        tiles = q_length // config.queries + request.batch
    return tiles * (heads // config.heads)


def num_programs(request: Request, config: Any) -> int:
    """A program for each tile, or as many as the GPU holds at once; also for FA4 on Blackwell."""
    tiles = num_tiles(request, config)
    if config.scheduler == "grid":
        return tiles
    return min(tiles, devices[request.q.device].num_sms)


def describe_intervals(
    request: Request, config: HopperConfig
) -> tuple[TensorDescriptor, torch.Tensor]:
    """The intervals of keys as a box for each block, and the lists of the tiles."""
    block_kv = config.block_kv
    intervals = Intervals.of(request, block_kv, config.queries, config.consumers)
    assert intervals is not None
    bounds = intervals.bounds.view(-1, intervals.blocks // 2, 1, 2 * block_kv)
    return describe_swizzled(bounds, 1, 2 * block_kv), intervals.lists


def even_section(request: Request) -> int:
    """`heads_of_section`, in whole groups, with about as many heads in the last section as in the
    others: if few are left for it, their heaviest tiles begin when there is nothing else to do.

    For that a section may have up to twice as many heads, and one of few heads has twice as many:
    keys that do not stay in the L2 cache cost less (docs/understand/log.md).
    """
    (batch, _, heads, head_dim), head_dim_v = request.q.shape, request.v.shape[3]
    if not request.is_ragged:  # the tiles of those are put in order by a plan
        heads *= batch
    wide = head_dim > 128 or head_dim_v > 128  # few heads fit, and more are faster
    most = min(heads_of_section(request, 2 * L2_BYTES if wide else L2_BYTES), heads)
    if most == 1 or most == heads:
        return most
    group = request.group
    least = max(cdiv(heads, cdiv(heads, most)), min(FEW_HEADS, 2 * most))
    least = min(cdiv(least, group) * group, heads)
    for section in range(least, min(2 * least, heads) + 1, group):
        if (heads - 1) % section + 1 >= EVEN * section:
            return section
    return least


def numbers(request: Request, least: int = 1) -> tuple:
    """The values of COUNTS; a section has at least `least` heads."""
    batch, q_length, heads, _ = request.q.shape
    return (
        q_length, request.k.shape[1], heads, batch, max(even_section(request), least),
        request.window_left or 0, request.window_right or 0, *score_scales(request)
    )  # fmt: skip


def numbers_of(request: Request, config: HopperConfig) -> tuple:
    """COUNTS and MORE_COUNTS: all of the kernel's arguments that are numbers."""
    lines: tuple[int, ...] = (0, 0, 0, 0)
    if request.has_intervals:
        batch_lines, head_lines, _, blocks = shape_of(request, config.block_kv)
        lines = batch_lines, head_lines, blocks, cdiv(request.q.shape[1], config.queries)
    apart = (kv_apart(request) or 0) if request.is_ragged else 0
    return *numbers(request, config.heads), apart, *slopes_strides(request), *lines


def slopes_strides(request: Request) -> tuple[int, int]:
    """From one sequence's slopes of ALiBi to the next one's, and from head to head; 0 without."""
    slopes = request.alibi_slopes
    if slopes is None:
        return 0, 0
    return slopes.stride(0) if slopes.dim() == 2 else 0, slopes.stride(-1)


def score_scales(request: Request) -> tuple[float, float]:
    """`ScoreMods.scale_log2` and its cap_scale, 0 without softcap."""
    scale, softcap = request.scale, request.softcap
    if softcap is None:
        return scale * LOG2E.value, 0.0
    return softcap * LOG2E.value, scale / softcap


def constants(
    request: Request, config: HopperConfig, per_block: bool = False, shift: float = 0.0
) -> dict[str, Any]:
    """The constants that the kernels of FA3 and FA4 share; arguments: see `all_constants`."""
    left, right, kv_length = request.window_left, request.window_right, request.k.shape[1]
    # The last key that the first query sees. If it is a multiple of a consumer's queries, its rows
    # end in one block, its last: no other is cut. If it is also one of blocks, and tiles divide a
    # block, all consumers of a tile have the same last block.
    first_end, queries = kv_length - request.q.shape[1] + (right or 0), config.queries
    aligned = first_end % (queries // config.consumers) == 0
    alike = config.block_kv % queries == 0 and first_end % config.block_kv == 0
    ragged, listed = request.is_ragged, request.has_intervals
    fp8 = request.precision is not None  # whose tiles are padded to one panel
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
        "PANELS": 1 if fp8 else len(panel_widths(request.q.shape[3])),
        "PANELS_V": 1 if fp8 else len(panel_widths(request.v.shape[3])),
        "FP8": fp8,
        "FP16_SCORES": fp8 and has_fp16_scores(request),
        "PER_BLOCK": per_block,
        "SHIFT": shift,
        "CONSUMERS": config.consumers,
        "STAGES": config.stages,
        "Q_STAGES": config.q_stages,
        "PING_PONG": config.ping_pong,
        "SCHEDULER": config.scheduler,
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


def all_constants(
    request: Request, config: HopperConfig, per_block: bool = False, shift: float = 0.0
) -> dict[str, Any]:
    """The constants of FA3's kernel; what follows the configuration is for FP8."""
    alike = are_alike(request) and len(panel_widths(request.v.shape[3])) == 1
    if config.tail != 1 and not (config.tail > 1 and alike):
        raise ValueError(f"tail={config.tail} is for tiles that are alike, of one panel of V.")
    keys = totals.split_keys(max(request.q.shape[3], request.v.shape[3]))
    return {
        **constants(request, config, per_block, shift),
        "OVERLAP": config.overlap,
        "LATE_WAIT": config.late_wait,
        "SPLIT": keys // config.block_kv if request.batch_invariant else 0,
        "TAIL": config.tail,
    }


def forward(
    request: Request, config: HopperConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE on a Hopper GPU, as `fa2.forward` has them.

    Args:
        request: see `Request`; one that is not `left_to_portable`, on the current GPU, with rows
            padded as `compute.in_vectors` does.
        config: the schedule; None chooses by shape.

    Raises:
        ValueError: the configuration does not fit the request.
    """
    config = config or default_config(request)
    return launch(launch_forward, request, config, all_constants(request, config))


def launch(
    launcher: Launcher,
    request: Request,
    config: HopperConfig,
    constants: dict[str, Any],
    described: tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor] | None = None,
    scales: tuple[torch.Tensor, ...] | None = None,
    others: tuple[torch.Tensor | None, ...] = (None,),
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Launch the kernel on the request's Q, K and V; in FP8, on other boxes and on the tensors of
    `Scales`. Others: further tensors of FA4's kernel, which may be absent; of FA3's, `Totals`.
    """
    q, k, v = request.q, request.k, request.v
    o, lse = new_outputs(request, O_MULTIPLE)
    programs = num_programs(request, config)
    claims = counters.take(o.device) if config.scheduler == "dynamic" else None
    states = programs if constants.get("SPLIT") else 0
    if config.tail > 1:
        if k.shape[1] <= (config.tail - 1) * config.block_kv:
            raise ValueError(f"tail={config.tail} programs cannot share {k.shape[1]} keys.")
        shared = num_tiles(request, config) % programs
        claims = tail_counters.take(o.device, 2 + shared * config.consumers)
        states = shared * config.tail
    if states:
        rows, width = states * config.block_q, sum(panel_widths(v.shape[3]))
        others = (q.new_empty(rows * (width + 2), dtype=torch.float32),)
    absent: Any = lse  # any tensor, of which Triton only needs a type
    tiles: Any = absent
    bounds = lists = absent
    if constants["LISTED"]:
        bounds, lists = describe_intervals(request, config)
    if constants["RAGGED"]:
        tiling = Tiling(config.queries, planned=True)
        tiles = lay_out(request, tiling, of_queries=(o, lse))[0].plan
    q_box, k_box, v_box, o_box, *second = boxes_of(request, config)
    second = [absent if box is None else box(x) for box, x in zip(second, (q, k, v))]
    launcher(
        (programs,),
        (
            *(described or (q_box(q), k_box(k), v_box(v))),
            o_box(o),
            *second,
            lse,
            absent if claims is None else claims,
            tiles,
            absent if request.alibi_slopes is None else request.alibi_slopes,
            absent if request.sink is None else request.sink,
            bounds,
            lists,
            *(scales or (absent, absent, absent, absent)),
            *[absent if x is None else x for x in others],
            *numbers_of(request, config),
        ),
        constants,
    )
    return narrowed(o, v), lse, None
