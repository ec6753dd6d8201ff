"""The host's side of FA3's backward for Hopper: tensors as boxes, and the arguments of a launch."""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Plan, layout
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.backward.config import (
    BackwardConfig,
    default_config,
    heads_of_section,
    tiles_of_keys,
)
from flash_versions.versions.fa3.hopper.backward.problem import exp2
from flash_versions.versions.fa3.hopper.backward.rows import Workspace
from flash_versions.versions.fa3.hopper.host import (
    counters,
    score_scales,
    slopes_strides,
    window_bounds,
    window_constants,
)
from flash_versions.versions.tiles.intervals import Intervals, shape_of
from flash_versions.versions.tiles.ragged import describe_ragged
from flash_versions.versions.tiles.tma import describe_swizzled
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

# These differ from call to call: no kernel is compiled for each value.
COUNTS = [
    "q_length", "kv_length", "kv_heads", "batch", "section",
    "window_left", "window_right", "scale", "scale_log2", "cap_scale",
    "kv_apart", "slopes_batch_stride", "slopes_head_stride",
    "batch_lines", "head_lines", "spanned_blocks",
]  # fmt: skip
# Registers of a thread; 64 K in all. With 200 for consumers (and 88 for `accumulate`), ptxas makes
# products wait for each other.
REGISTERS = {"CONSUMER_REGISTERS": 208, "ACCUMULATOR_REGISTERS": 72, "PRODUCER_REGISTERS": 24}
HALVES_REGISTERS = {"CONSUMER_REGISTERS": 224, "ACCUMULATOR_REGISTERS": 56}
PAIR_REGISTERS = {"CONSUMER_REGISTERS": 256}
WIDE_REGISTERS = {"CONSUMER_REGISTERS": 240, "PRODUCER_REGISTERS": 24}


def tensors(request: Request, space: Workspace, plan: Plan) -> tuple:
    """The arguments of the kernel that are tensors."""
    q, k, v = request.q, space.k, space.v
    config = plan.config
    tiles: torch.Tensor | None = space.values
    bounds = spans = space.values
    if plan.constants["SPANS"]:
        intervals = Intervals.of(request, WARPGROUP_ROWS.value)
        assert intervals is not None
        bounds, spans = intervals.bounds, intervals.spans
    describe = describe_swizzled
    describe_q = describe_swizzled if request.cu_seqlens_q is None else describe_ragged
    if plan.constants["RAGGED"]:
        describe = describe_ragged
        assert space.key_tiles is not None
        tiles = space.key_tiles.plan
    widths = config.widths(q.shape[3])
    widths_v = config.widths(v.shape[3])
    # Consumers of 64 keys divide the dims: a box of dK or dV is a half.
    sharing = 2 if config.block_kv == 64 else 1
    rows, queries, keys = WARPGROUP_ROWS.value, config.block_q, config.block_kv
    seconds: list[Any] = [space.values] * 7
    if len(widths) == 2:
        seconds[0] = describe_q(q, queries, widths[1])
        seconds[1] = describe(k, keys, widths[1])
        if not config.by_halves:
            seconds[4] = describe_swizzled(space.dq_sum, queries, widths[1])
        seconds[5] = describe(space.dk, rows, widths[1])
    if len(widths_v) == 2:
        seconds[2] = describe(v, keys, widths_v[1])
        seconds[3] = describe_q(space.do, queries, widths_v[1])
        seconds[6] = describe(space.dv, rows, widths_v[1])
    turns = space.values if space.turns is None else space.turns
    claims: tuple = ()  # where programs claim tiles, of the kernel that has a scheduler
    if "SCHEDULER" in plan.constants:
        claims = (turns,)
        if plan.constants["SCHEDULER"] == "dynamic":
            claims = (counters.take(q.device),)
    if config.by_halves:  # whose boxes of dQ fit both panels
        del seconds[4]
    return (
        describe_values(space.values, queries),
        describe_q(q, queries, widths[0]),
        describe(k, keys, widths[0]),
        describe(v, keys, widths_v[0]),
        describe_q(space.do, queries, widths_v[0]),
        describe_swizzled(space.dq_sum, queries, config.dq_width(q.shape[3])),
        describe(space.dk, rows, widths[0] // sharing),
        describe(space.dv, rows, widths_v[0] // sharing),
        *(seconds if config.block_kv == 128 else ()),
        *claims,
        tiles,
        space.values if request.alibi_slopes is None else request.alibi_slopes,
        bounds,
        spans,
        turns,
        *((space.values, space.values) if space.sums is None else (space.sums, space.arrivals)),
    )


def numbers(request: Request, config: BackwardConfig) -> tuple:
    """The kernel's numbers, in the order of COUNTS."""
    batch, kv_length, kv_heads, _ = request.k.shape
    scales = score_scales(request)
    section = heads_of_section(request, config)
    lines: tuple[int, ...] = (0, 0, 0)
    if request.has_intervals:
        batch_lines, head_lines, _, blocks = shape_of(request, WARPGROUP_ROWS.value)
        lines = batch_lines, head_lines, blocks
    bounds = window_bounds(request)
    return (
        request.q.shape[1], kv_length, kv_heads * config.parts, batch, section, *bounds,
        request.scale, *scales, 0 if request.cu_seqlens_k is not None else kv_length,
        *slopes_strides(request), *lines
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
    programs = tiles_of_keys(request, config.block_kv) * request.k.shape[2] * config.parts
    if config.block_kv == 64:
        chosen: dict[str, Any] = WIDE_REGISTERS
    else:
        panels, panels_v = (len(config.widths(x.shape[3])) for x in (request.q, request.v))
        chosen = {"PANELS": panels, "PANELS_V": panels_v}
        if config.halves:
            chosen |= HALVES_REGISTERS
        elif config.pair:
            chosen |= PAIR_REGISTERS
        else:
            chosen |= {"KV_STAGES": config.kv_stages, "SCHEDULER": config.scheduler}
            chosen |= {"EARLY": config.early, "HELD": config.held}
            chosen |= REGISTERS
            if config.scheduler == "dynamic":
                programs = min(programs, devices[request.q.device].num_sms)
                if request.is_deterministic:  # so that turns are in the order of the tiles
                    chosen["SCHEDULER"] = "tickets"
    return Plan(
        config,
        (*layout(request), config.block_q, config.held),
        (programs, 1, 1),
        numbers(request, config),
        {
            **window_constants(request, config.block_kv),
            "GROUP": request.group // config.parts,
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
            "OVERLAP": devices.launches_overlap(request.q.device),
            "PARTS": config.parts,
            **chosen,
        },
    )
