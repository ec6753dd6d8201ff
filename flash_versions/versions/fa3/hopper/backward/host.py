"""The host's side of FA3's backward for Hopper: tensors as boxes, and the arguments of a launch."""

from typing import Any

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.backward.config import (
    BackwardConfig,
    heads_of_section,
    shared_tiles,
    tiles_of_keys,
)
from flash_versions.versions.fa3.hopper.backward.rows import Workspace
from flash_versions.versions.fa3.hopper.host import (
    counters,
    score_scales,
    slopes_strides,
    window_constants,
)
from flash_versions.versions.tiles.intervals import Intervals, shape_of
from flash_versions.versions.tiles.ragged import describe_ragged
from flash_versions.versions.tiles.tma import Box, boxes, describe_swizzled
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

SCHEDULERS = {True: "tickets", False: "dynamic"}  # by is_deterministic: turns follow the tiles
COUNTS = [
    "q_length", "kv_length", "kv_heads", "batch", "section",
    "window_left", "window_right", "scale", "scale_log2", "cap_scale",
    "kv_apart", "slopes_batch_stride", "slopes_head_stride",
    "batch_lines", "head_lines", "spanned_blocks",
]  # fmt: skip


def boxes_of(request: Request, config: BackwardConfig) -> tuple:
    """How tensors are cut into boxes: LSE and delta, Q, K, V, dO, dQ's sum, dK, dV; then, of their
    second panels, Q, K, V, dO, dQ's sum, dK and dV, None without.
    """
    q, v = request.q, request.v
    of_keys = describe_ragged if request.is_ragged else describe_swizzled
    of_queries = describe_swizzled if request.cu_seqlens_q is None else describe_ragged
    # Consumers of 64 keys divide the dims: a box of dK or dV is a half.
    sharing = 2 if config.block_kv == 64 else 1
    rows, queries, keys = WARPGROUP_ROWS.value, config.block_q, config.block_kv
    found: list[Box | None] = [boxes(describe_swizzled, 1, queries)]
    for panel in range(2):
        width, width_v = ((*config.widths(x.shape[3]), 0)[panel] for x in (q, v))
        dq_width = config.dq_width(q.shape[3])
        if panel == 1:  # by halves, boxes of dQ fit both panels
            dq_width = width if config.kind == "narrow" else 0
        wanted = (
            (of_queries, queries, width),
            (of_keys, keys, width),
            (of_keys, keys, width_v),
            (of_queries, queries, width_v),
            (describe_swizzled, queries, dq_width),
            (of_keys, rows, width // sharing),
            (of_keys, rows, width_v // sharing),
        )
        found += [boxes(describe, n, width) if width else None for describe, n, width in wanted]
    return tuple(found)


def tensors(request: Request, space: Workspace, config: BackwardConfig) -> tuple:
    """The arguments of the kernel that are tensors."""
    values = space.values
    absent: Any = values  # any tensor, of which Triton only needs a type
    bounds = spans = absent
    if request.has_intervals:
        intervals = Intervals.of(request, WARPGROUP_ROWS.value)
        assert intervals is not None
        bounds, spans = intervals.bounds, intervals.spans
    turns = absent if space.turns is None else space.turns
    q, kind, described = request.q, config.kind, boxes_of(request, config)
    claims: Any = None  # where programs claim tiles, of the kind that has a scheduler
    if kind == "narrow":
        claims = turns if request.is_deterministic else counters.take(values.device)
    inner: tuple = values, q, space.k, space.v, space.do, space.dq_sum, space.dk, space.dv
    first, second = described[:8], described[8:]
    boxed = [box(x) for box, x in zip(first, inner)]
    missing: Any = None if kind == "wide" else absent
    beside = [missing] * len(second)
    if any(second):
        beside = [missing if box is None else box(x) for box, x in zip(second, inner[1:])]
    if config.by_halves:
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


def numbers(request: Request, config: BackwardConfig) -> tuple:
    """The values of COUNTS."""
    kv_batch, kv_length, kv_heads, _ = request.k.shape
    lines: tuple[int, ...] = (0, 0, 0)
    if request.has_intervals:
        batch_lines, head_lines, _, blocks = shape_of(request, WARPGROUP_ROWS.value)
        lines = batch_lines, head_lines, blocks
    return (
        request.q.shape[1], kv_length, kv_heads * config.parts, kv_batch,
        heads_of_section(request, config), request.window_left or 0, request.window_right or 0,
        request.scale, *score_scales(request),
        0 if request.cu_seqlens_k is not None else kv_length, *slopes_strides(request), *lines
    )  # fmt: skip


def num_programs(request: Request, config: BackwardConfig) -> int:
    """A program for each tile, or as many as the GPU holds at once."""
    programs = tiles_of_keys(request, config.block_kv) * request.k.shape[2] * config.parts
    if config.tail > 1:
        return programs + shared_tiles(request, config) * (config.tail - 1)
    if config.kind != "narrow":
        return programs
    return min(programs, devices[request.q.device].num_sms)


def all_constants(request: Request, config: BackwardConfig) -> dict[str, Any]:
    """The constants of the kernel."""
    return {
        **window_constants(request, config.block_kv),
        "GROUP": request.group // config.parts,
        # Intervals begin and end where they like, as a window with both bounds does.
        **({"LEFT": True, "RIGHT": True} if request.has_intervals else {}),
        "RAGGED": request.is_ragged,
        "PACKED": request.cu_seqlens_q is not None,
        "ALIBI": request.alibi_slopes is not None,
        "SPANS": request.has_intervals,
        "ORDERED": request.is_deterministic,
        "OVERLAP": devices.launches_overlap(request.q.device),
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
    }
