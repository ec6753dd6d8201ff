"""The host's side of FA3's backward for Hopper: tensors as boxes, and the arguments of a launch."""

from typing import Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig, heads_of_section
from flash_versions.versions.fa3.hopper.backward.rows import Workspace
from flash_versions.versions.fa3.hopper.host import box_width
from flash_versions.versions.tiles.algebra import LOG2E
from flash_versions.versions.tiles.tma import describe_swizzled
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

# Change from call to call: no kernel of its own for each.
COUNTS = [
    "q_length", "kv_length", "kv_heads", "batch", "section",
    "window_left", "window_right", "scale", "scale_log2", "cap_scale",
]  # fmt: skip


def boxes(request: Request, space: Workspace, config: BackwardConfig) -> tuple:
    """The arguments of the kernel that are tensors."""
    q, k, v = request.q, request.k, request.v
    width, width_v = box_width(q.shape[3]), box_width(v.shape[3])
    # What leaves at once: of 128 keys, dK and dV of a consumer's 64 and half of the dims of dQ, or
    # all; of 64 keys half of the dims of dK and dV, and a quarter of those of dQ.
    parts = 1 if config.block_kv == 128 else 2
    dq_parts = 1 if config.held else 2 * parts
    return (
        describe_swizzled(q, config.block_q, width),
        describe_swizzled(k, config.block_kv, width),
        describe_swizzled(v, config.block_kv, width_v),
        describe_swizzled(space.do, config.block_q, width_v),
        describe_values(space.values, config.block_q),
        describe_swizzled(space.dq_sum, config.block_q, width // dq_parts),
        describe_swizzled(space.dk, WARPGROUP_ROWS.value, width // parts),
        describe_swizzled(space.dv, WARPGROUP_ROWS.value, width_v // parts),
    )


def numbers(request: Request) -> tuple:
    """The arguments that follow them, up to the first constant."""
    q, k, softcap = request.q, request.k, request.softcap
    return (
        q.shape[1],
        k.shape[1],
        k.shape[2],
        k.shape[0],
        heads_of_section(request),
        request.window_left or 0,
        request.window_right or 0,
        request.scale,
        (softcap or request.scale) * LOG2E.value,
        0.0 if softcap is None else request.scale / softcap,
    )


def describe_values(values: torch.Tensor, queries: int) -> TensorDescriptor:
    """The rows of `Workspace.values` as boxes of so many queries."""
    return describe_swizzled(values.transpose(1, 2), 1, queries)


def constants(
    request: Request, config: BackwardConfig, function: Any, share: int | None
) -> dict[str, Any]:
    """The constants of `KeyProblem`."""
    return {
        "GROUP": request.group,
        "LEFT": request.window_left is not None,
        "RIGHT": request.window_right is not None,
        "EDGE": request.k.shape[1] % config.block_kv != 0,
        "CAP": request.softcap is not None,
        "EXP2": function,
        "SHARE": share,
    }
