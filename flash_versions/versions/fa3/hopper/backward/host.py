"""The host's side of FA3's backward for Hopper: tensors as boxes, and the arguments of a launch."""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.launch import Plan, layout
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.backward import exp2
from flash_versions.versions.fa3.hopper.backward.config import (
    BackwardConfig,
    default_config,
    heads_of_section,
)
from flash_versions.versions.fa3.hopper.backward.rows import Workspace
from flash_versions.versions.fa3.hopper.host import (
    box_width,
    score_scales,
    slopes_strides,
    window_bounds,
    window_constants,
)
from flash_versions.versions.tiles.intervals import Intervals, shape_of
from flash_versions.versions.tiles.ragged import describe_ragged
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.tma import describe_swizzled
from flash_versions.versions.tiles.varlen_scheduler import Tiles
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

# Change from call to call: no kernel of its own for each.
COUNTS = [
    "q_length", "kv_length", "kv_heads", "batch", "section",
    "window_left", "window_right", "scale", "scale_log2", "cap_scale",
    "kv_apart", "slopes_batch_stride", "slopes_head_stride",
    "batch_lines", "head_lines", "spanned_blocks",
]  # fmt: skip
# Of a thread, 64 K in all. 200 and 88 are too few: ptxas then has products wait for each other.
REGISTERS = {"CONSUMER_REGISTERS": 208, "ACCUMULATOR_REGISTERS": 72, "PRODUCER_REGISTERS": 24}
WIDE_REGISTERS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}


def tensors(request: Request, space: Workspace, plan: Plan) -> tuple:
    """The arguments of the kernel that are tensors."""
    q, k, v = request.q, space.k, space.v
    config = plan.config
    tiles: torch.Tensor | None = space.values
    width, width_v = box_width(q.shape[3]), box_width(v.shape[3])
    # What leaves at once: of 128 keys, dK and dV of a consumer's 64 and half of the dims of dQ, or
    # all; of 64 keys half of the dims of dK and dV, and a quarter of those of dQ.
    parts = 1 if config.block_kv == 128 else 2
    dq_parts = 1 if config.held else 2 * parts
    bounds = spans = space.values
    if plan.constants["SPANS"]:
        intervals = Intervals.of(request, WARPGROUP_ROWS.value)
        assert intervals is not None
        bounds, spans = intervals.bounds, intervals.spans
    describe = describe_swizzled
    describe_q = describe_swizzled if request.cu_seqlens_q is None else describe_ragged
    if plan.constants["RAGGED"]:
        describe = describe_ragged
        tiles = Tiles.of_keys(request, config.block_kv, planned=True).plan
    return (
        describe_q(q, config.block_q, width),
        describe(k, config.block_kv, width),
        describe(v, config.block_kv, width_v),
        describe_q(space.do, config.block_q, width_v),
        describe_values(space.values, config.block_q),
        describe_swizzled(space.dq_sum, config.block_q, width // dq_parts),
        describe(space.dk, WARPGROUP_ROWS.value, width // parts),
        describe(space.dv, WARPGROUP_ROWS.value, width_v // parts),
        tiles,
        space.values if request.alibi_slopes is None else request.alibi_slopes,
        bounds,
        spans,
        space.values if space.turns is None else space.turns,
    )


def numbers(request: Request) -> tuple:
    """The arguments that follow them, up to the first constant."""
    batch, kv_length, kv_heads, _ = request.k.shape
    scales = score_scales(request)
    section = heads_of_section(request)
    lines: tuple[int, ...] = (0, 0, 0)
    if request.has_intervals:
        batch_lines, head_lines, _, blocks = shape_of(request, WARPGROUP_ROWS.value)
        lines = batch_lines, head_lines, blocks
    bounds = window_bounds(request)
    return (
        request.q.shape[1], kv_length, kv_heads, batch, section, *bounds, request.scale, *scales,
        0 if request.cu_seqlens_k is not None else kv_length, *slopes_strides(request), *lines
    )  # fmt: skip


def describe_values(values: torch.Tensor, queries: int) -> TensorDescriptor:
    """The rows of `Workspace.values` as boxes of so many queries."""
    return describe_swizzled(values.transpose(1, 2), 1, queries)


def make_plan(
    request: Request,
    config: BackwardConfig | None = None,
    function: Any = exp2,
    share: int | None = None,
) -> Plan:
    """The launch of the kernel between the two of `rows.py`."""
    config = config or default_config(request)
    config.check(request)
    batch, kv_length, kv_heads, _ = request.k.shape
    tiles = cdiv(kv_length, config.block_kv) * batch
    if request.is_ragged:  # as many as a plan has lines
        tiles = batch * kv_length // config.block_kv + request.batch
    chosen = {"EARLY": config.early, "HELD": config.held, **REGISTERS}
    if config.block_kv == 64:
        chosen = WIDE_REGISTERS
    return Plan(
        config,
        (*layout(request), config.block_q, config.held),
        (tiles * kv_heads, 1, 1),
        numbers(request),
        {
            **window_constants(request, config.block_kv),
            # Intervals begin and end where they like, as a window with both bounds does.
            **({"LEFT": True, "RIGHT": True} if request.has_intervals else {}),
            "RAGGED": request.is_ragged,
            "PACKED": request.cu_seqlens_q is not None,
            "ALIBI": request.alibi_slopes is not None,
            "SPANS": request.has_intervals,
            "ORDERED": request.is_deterministic,
            "EXP2": function,
            "SHARE": share,
            "STAGES": config.stages,
            **chosen,
        },
    )
