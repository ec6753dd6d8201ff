"""The host's side of FA3's kernel for Hopper: tensors as boxes, and the arguments of a launch."""

from functools import cache
from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Plan, layout, placement
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import padded_head_dim
from flash_versions.versions.fa3.forward import heads_of_section
from flash_versions.versions.fa3.hopper.config import HopperConfig
from flash_versions.versions.tiles.ragged import describe_packed
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.score_mods import ScoreMods
from flash_versions.versions.tiles.tile_scheduler import Counters
from flash_versions.versions.tiles.tma import describe_swizzled
from flash_versions.versions.tiles.varlen_scheduler import Tiles
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

# Change from call to call: no kernel of its own for each.
COUNTS = [
    "q_length", "kv_length", "heads", "batch", "section",
    "window_left", "window_right", "scale_log2", "cap_scale",
]  # fmt: skip

counters = Counters()


def describe_inputs(
    request: Request, config: HopperConfig
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Q, K and V as boxes."""
    q, k, v = request.q, request.k, request.v
    width, width_v = box_width(q.shape[3]), box_width(v.shape[3])
    if width != width_v and not config.epilogue_buffer:
        raise ValueError(
            f"head_dim {q.shape[3]} and {v.shape[3]} of v differ, and O fits Q's buffer only if "
            f"they do not; use epilogue_buffer=True."
        )
    describe = describe_swizzled if request.cu_seqlens_q is None else describe_packed
    return (
        describe(q, WARPGROUP_ROWS.value, width),
        describe(k, config.block_kv, width),
        describe(v, config.block_kv, width_v),
    )


@cache
def box_width(head_dim: int) -> int:
    """The columns of a tile of vectors of head_dim."""
    return max(64, padded_head_dim(head_dim))


def new_results(request: Request) -> tuple[torch.Tensor, torch.Tensor]:
    """o (batch, M, heads, head_dim_v) and lse (batch, heads, M), not written yet, but for rows that
    belong to no sequence; o with rows of whole 16-byte vectors, which FP8 inputs need not have.
    """
    q = request.q
    o = q.new_empty((*q.shape[:3], cdiv(request.v.shape[3], 8) * 8), dtype=request.out_dtype)
    lse = q.new_empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32)
    if request.cu_seqlens_q is not None:
        o.zero_()
        lse.fill_(float("-inf"))
    return o, lse


def num_programs(request: Request, config: HopperConfig) -> int:
    """A program for each tile, or as many as the GPU holds at once; of packed sequences, for each
    tile that there may be.
    """
    batch, q_length, heads, _ = request.q.shape
    tiles = cdiv(q_length, config.block_q) * heads * batch
    if request.cu_seqlens_q is not None:
        tiles = (q_length // config.block_q + request.batch) * heads
    if config.scheduler == "grid":
        return tiles
    return min(tiles, devices[request.q.device].num_sms)


def tensors(
    request: Request,
    config: HopperConfig,
    boxes: tuple[TensorDescriptor, ...],
    o: torch.Tensor,
    lse: torch.Tensor,
    scales: tuple[torch.Tensor, ...] | None,
) -> tuple:
    """The arguments of the kernel that are tensors."""
    plan: torch.Tensor | None = lse
    describe = describe_swizzled
    if request.cu_seqlens_q is not None:
        describe, plan = describe_packed, Tiles.of_queries(request, config.block_q, 1).plan
    return (
        *boxes,
        describe(o, WARPGROUP_ROWS.value, box_width(o.shape[3])),
        lse,
        counters.pair(o.device) if config.scheduler == "dynamic" else lse,
        plan,
        *(scales or (lse, lse, lse, lse)),
    )


def numbers(request: Request) -> tuple:
    """The arguments that follow them, up to the first constant."""
    batch, q_length, heads, _ = request.q.shape
    section = heads_of_section(request)
    bounds, scales = window_bounds(request), score_scales(request)
    return q_length, request.k.shape[1], heads, batch, section, *bounds, *scales


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
    # Tiles as high as a block is wide, and ends that are aligned: only the last block is cut.
    aligned = (
        config.block_q == config.block_kv
        and (kv_length - request.q.shape[1] + (right or 0)) % config.block_kv == 0
    )
    packed = request.cu_seqlens_q is not None
    cut = left is not None or (right is not None and (packed or not aligned))
    return {**window_constants(request, config.block_kv), "CUT": cut, "PACKED": packed}


def window_constants(request: Request, block_kv: int) -> dict[str, Any]:
    """The constants that forward and backward share."""
    return {
        "GROUP": request.group,
        "LEFT": request.window_left is not None,
        "RIGHT": request.window_right is not None,
        "EDGE": request.cu_seqlens_k is not None or request.k.shape[1] % block_kv != 0,
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
        numbers(request),
        {
            **constants(request, config),
            "FP8": scales is not None,
            "PER_BLOCK": per_block,
            "SHIFT": shift,
            "CONSUMERS": config.consumers,
            "STAGES": config.stages,
            "Q_STAGES": config.q_stages,
            "EPILOGUE_BUFFER": config.epilogue_buffer,
            "OVERLAP": config.overlap,
            "PING_PONG": config.ping_pong,
            "LATE_WAIT": config.late_wait,
            "SCHEDULER": config.scheduler,
            # 64 K registers less the producer's; Triton starts its warps as a warpgroup.
            "CONSUMER_REGISTERS": 240 if config.consumers == 2 else 160,
            "PRODUCER_REGISTERS": 24,
        },
    )
