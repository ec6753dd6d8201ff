"""The host's side of FA4's kernel for Blackwell: tensors as boxes, the arguments of a launch."""

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Plan, layout
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.host import box_width, counters, numbers, window_constants
from flash_versions.versions.fa4.blackwell.config import BlackwellConfig
from flash_versions.versions.fa4.blackwell.tensor_memory import ROWS
from flash_versions.versions.fa4.exp2 import DEGREES
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.tma import describe_swizzled

# (maxnreg of softmax, of the roles of one warp); the correction gets what is left of 64 K.
REGISTERS = 192, 32


def tile_width(request: Request) -> int:
    """The columns of all tiles, as K and V go through one pipeline."""
    return box_width(max(request.q.shape[3], request.v.shape[3]))


def describe_all(
    request: Request, o: torch.Tensor, config: BlackwellConfig
) -> tuple[TensorDescriptor, ...]:
    """Q, K, V and O as boxes."""
    width, rows = tile_width(request), ROWS.value
    return (
        describe_swizzled(request.q, rows, width),
        describe_swizzled(request.k, config.block_kv, width),
        describe_swizzled(request.v, config.block_kv, width),
        describe_swizzled(o, rows, width),
    )


def tensors(request: Request, config: BlackwellConfig, o: torch.Tensor, lse: torch.Tensor) -> tuple:
    """The arguments of the kernel that are tensors."""
    claims = counters.pair(o.device) if config.scheduler == "dynamic" else lse
    return (*describe_all(request, o, config), lse, claims)


def make_plan(request: Request, config: BlackwellConfig) -> Plan:
    """The launch of the kernel."""
    batch, q_length, heads, _ = request.q.shape
    tiles = cdiv(q_length, config.block_q) * heads * batch
    window = window_constants(request, config.block_kv)
    softmax_registers, other_registers = REGISTERS
    return Plan(
        config,
        (*layout(request), request.q.dtype),
        (min(tiles, devices[request.q.device].num_sms), 1, 1),
        numbers(request),
        {
            **window,
            "CUT": window["LEFT"] or window["RIGHT"] or window["EDGE"],
            "STAGES": config.stages,
            "SCHEDULER": config.scheduler,
            "THRESHOLD": config.threshold,
            "EIGHTHS": config.eighths,
            "DEGREE": config.degree or DEGREES[request.q.dtype],
            "SOFTMAX_REGISTERS": softmax_registers,
            "OTHER_REGISTERS": other_registers,
        },
    )
