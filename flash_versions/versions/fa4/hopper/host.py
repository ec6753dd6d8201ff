"""The host's side of FA4's kernel for Hopper: the arguments of a launch."""

import torch

from flash_versions.dispatch.launch import Plan, layout, placement
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.host import (
    constants,
    more_numbers,
    num_programs,
    numbers,
)
from flash_versions.versions.fa4.exp2 import DEGREES
from flash_versions.versions.fa4.hopper.config import RolesConfig
from flash_versions.versions.fp8.quantize import P_OFFSET


def make_plan(
    request: Request,
    config: RolesConfig,
    dtype: torch.dtype,
    scales: tuple[torch.Tensor, ...] | None = None,
    per_block: bool = False,
    stamps: torch.Tensor | None = None,
) -> Plan:
    """The launch of the kernel; dtype is that of the tensors that it reads."""
    return Plan(
        config,
        (*layout(request), config.block_kv, dtype, *map(placement, scales or ())),
        (num_programs(request, config), 1, 1),
        (*numbers(request, config.section, config.heads), *more_numbers(request, config)),
        {
            **constants(request, config),
            "FP8": scales is not None,
            "PER_BLOCK": per_block,
            "SHIFT": 0.0 if scales is None else P_OFFSET - config.threshold,
            "CONSUMERS": config.consumers,
            "STAGES": config.stages,
            "V_STAGES": config.slots_of_v,
            "Q_STAGES": config.q_stages,
            "EPILOGUE_BUFFER": config.epilogue_buffer,
            "HELD": config.held,
            "PING_PONG": config.ping_pong,
            "LATE_WAIT": config.late_wait,
            "SCHEDULER": config.scheduler,
            "THRESHOLD": config.threshold,
            "EIGHTHS": config.eighths,
            "DEGREE": DEGREES[dtype],
            "TRACED_ROUNDS": 0 if stamps is None else stamps.shape[2],
            "TRACED_BLOCKS": 0 if stamps is None else stamps.shape[3],
            "CONSUMER_REGISTERS": 240 if config.consumers == 2 else 160,
            "OTHER_REGISTERS": 24,
        },
    )
