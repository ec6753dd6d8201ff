"""The host's side of FA3's backward for Hopper: tensors as boxes, and the arguments of a launch."""

from typing import Any

import torch

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher, Plan
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.backward.config import (
    BackwardConfig,
    heads_of_section,
    shared_tiles,
    tiles_of_keys,
)
from flash_versions.versions.fa3.hopper.backward.rows import Counts, RowPlans, Workspace
from flash_versions.versions.fa3.hopper.host import (
    counters,
    score_scales,
    slopes_strides,
    window_constants,
)
from flash_versions.versions.tiles.intervals import Intervals, shape_of
from flash_versions.versions.tiles.ragged import ragged_box
from flash_versions.versions.tiles.tma import Box, box_steps, swizzled_box
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

SCHEDULERS = {True: "tickets", False: "dynamic"}  # by is_deterministic: turns follow the tiles
COUNTS = [
    "q_length", "kv_length", "kv_heads", "batch", "section",
    "window_left", "window_right", "scale", "scale_log2", "cap_scale",
    "kv_apart", "slopes_batch_stride", "slopes_head_stride",
    "batch_lines", "head_lines", "spanned_blocks",
]  # fmt: skip


class BackwardPlan(Plan):
    """What a kind of requests has in common; with the plans of the kernels around the main one."""

    rows: RowPlans


def boxes_of(request: Request, config: BackwardConfig) -> tuple:
    """How tensors are cut into boxes: LSE and delta, Q, K, V, dO, dQ's sum, dK, dV; then, of their
    second panels, Q, K, V, dO, dQ's sum, dK and dV, None without.
    """
    q, k, v = request.q, request.k, request.v
    box = ragged_box if request.is_ragged else swizzled_box
    box_q = swizzled_box if request.cu_seqlens_q is None else ragged_box
    # Consumers of 64 keys divide the dims: a box of dK or dV is a half.
    sharing = 2 if config.block_kv == 64 else 1
    rows, queries, keys = WARPGROUP_ROWS.value, config.block_q, config.block_kv
    found: list[Box | None] = [swizzled_box(torch.float32, 1, queries)]
    for panel in range(2):
        width, width_v = ((*config.widths(x.shape[3]), 0)[panel] for x in (q, v))
        dq_width = config.dq_width(q.shape[3])
        if panel == 1:  # by halves, boxes of dQ fit both panels
            dq_width = width if config.kind == "narrow" else 0
        wanted = (
            (box_q, q.dtype, queries, width),
            (box, k.dtype, keys, width),
            (box, v.dtype, keys, width_v),
            (box_q, q.dtype, queries, width_v),
            (swizzled_box, torch.float32, queries, dq_width),
            (box, k.dtype, rows, width // sharing),
            (box, v.dtype, rows, width_v // sharing),
        )
        found += [cut(kind, n, columns) if columns else None for cut, kind, n, columns in wanted]
    return tuple(found)


UNKNOWN = [None] * 8


def tensors(request: Request, space: Workspace, plan: Plan, steps: list) -> tuple:
    """The arguments of the kernel that are tensors; steps: as `Counts` has them, or UNKNOWN."""
    values, constants = space.values, plan.constants
    absent: Any = plan.absent(values)
    bounds = spans = absent
    if constants["SPANS"]:
        intervals = Intervals.of(request, WARPGROUP_ROWS.value)
        assert intervals is not None
        bounds, spans = intervals.bounds, intervals.spans
    turns = absent if space.turns is None else space.turns
    q, kind = request.q, plan.config.kind
    claims: Any = None  # where programs claim tiles, of the kind that has a scheduler
    if kind == "narrow":
        is_dynamic = constants["SCHEDULER"] == "dynamic"
        claims = counters.take(values.device) if is_dynamic else turns
    inner: tuple = values, q, space.k, space.v, space.do, space.dq_sum, space.dk, space.dv
    first, second = plan.boxes[:8], plan.boxes[8:]
    boxed = [box(x, at) for box, x, at in zip(first, inner, steps)]
    missing: Any = None if kind == "wide" else absent
    beside = [missing] * len(second)
    if any(second):
        given = zip(second, inner[1:], steps[1:])
        beside = [missing if box is None else box(x, at) for box, x, at in given]
    if plan.config.by_halves:
        beside[4] = None  # dQ's sum
    return (
        *boxed,
        *beside,
        claims,
        absent if space.key_tiles is None else space.key_tiles.plan,
        absent if request.alibi_slopes is None else request.alibi_slopes,
        bounds,
        spans,
        turns,
        *((absent, absent) if space.sums is None else (space.sums, space.arrivals)),
    )


def count(request: Request, plan: BackwardPlan) -> Counts:
    """What follows from the shapes and strides of a request; numbers in the order of COUNTS."""
    q, k, v, config = request.q, request.k, request.v, plan.config
    batch, length, heads, _ = q.shape
    kv_batch, kv_length, kv_heads, head_dim = k.shape
    lines: tuple[int, ...] = (0, 0, 0)
    if plan.constants["SPANS"]:
        batch_lines, head_lines, _, blocks = shape_of(request, WARPGROUP_ROWS.value)
        lines = batch_lines, head_lines, blocks
    numbers = (
        length, kv_length, kv_heads * config.parts, kv_batch, heads_of_section(request, config),
        request.window_left or 0, request.window_right or 0, request.scale, *score_scales(request),
        0 if request.cu_seqlens_k is not None else kv_length, *slopes_strides(request), *lines
    )  # fmt: skip
    padded, width = config.padded_length(length), plan.rows.width
    if request.cu_seqlens_q is not None:
        length = padded = config.padded_length(length + request.batch * config.block_q)
    values = (batch, 2, heads, padded), (2 * heads * padded, padded, 2 * padded, 1)
    line, strides = length * width, (q.stride(), k.stride(), v.stride())
    dq_sum = (batch, length, heads, width), (heads * line, width, line, 1)
    steps: list | None = None
    if not plan.constants["RAGGED"]:
        row, row_v = kv_heads * head_dim, kv_heads * v.shape[3]
        of_k = box_steps(k.shape, (kv_length * row, row, head_dim, 1))
        of_v = box_steps(v.shape, (kv_length * row_v, row_v, v.shape[3], 1))
        inputs = map(box_steps, (q.shape, k.shape, v.shape), strides)
        steps = [box_steps(*values), *inputs, None, box_steps(*dq_sum), of_k, of_v]
    return Counts(strides, values, dq_sum, steps, numbers, num_programs(request, config))


def num_programs(request: Request, config: BackwardConfig) -> int:
    """A program for each tile, or as many as the GPU holds at once."""
    programs = tiles_of_keys(request, config.block_kv) * request.k.shape[2] * config.parts
    if config.tail > 1:
        return programs + shared_tiles(request, config) * (config.tail - 1)
    if config.kind != "narrow":
        return programs
    return min(programs, devices[request.q.device].num_sms)


def make_plan(launcher: Launcher, request: Request, config: BackwardConfig) -> BackwardPlan:
    """The plan of a request's kind."""
    overlap = devices.launches_overlap(request.q.device)
    plan = BackwardPlan(
        launcher,
        config,
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
            "OVERLAP": overlap,
            "PARTS": config.parts,
            "TAIL": config.tail,
            "PANELS": len(config.widths(request.q.shape[3])),
            "PANELS_V": len(config.widths(request.v.shape[3])),
            "KIND": config.kind,
            "STAGES": config.stages,
            "KV_STAGES": config.kv_stages,
            "SCHEDULER": SCHEDULERS[request.is_deterministic],
            "EARLY": config.early,
            "HELD": config.held,
        },
        boxes_of(request, config),
    )
    plan.rows = RowPlans.of(request, config, overlap)
    return plan
