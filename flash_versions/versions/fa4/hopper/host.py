"""The host's side of FA4's kernel for Hopper: its launch, of what FA3's kernel takes."""

from typing import Any

import torch

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa3.hopper.host import constants, launch
from flash_versions.versions.fa4.exp2 import DEGREES
from flash_versions.versions.fa4.hopper.config import RolesConfig, default_config, fp8_config
from flash_versions.versions.fa4.hopper.forward import forward_kernel
from flash_versions.versions.fp8.quantize import P_OFFSET

launch_forward = Launcher(forward_kernel)


def all_constants(
    request: Request,
    config: RolesConfig,
    per_block: bool = False,
    stamps: torch.Tensor | None = None,
) -> dict[str, Any]:
    """The constants of FA4's kernel; arguments as those of `forward` and `fa3.hopper.host`."""
    shift = 0.0 if request.precision is None else P_OFFSET - config.threshold
    shared = constants(request, config, per_block, shift)
    return {
        **shared,
        "THRESHOLD": config.threshold,
        "EIGHTHS": config.eighths,
        "DEGREE": DEGREES[request.q.dtype],
        "STARTS": config.starts and shared["FP16_SCORES"] and not per_block,
        "TRACED_ROUNDS": 0 if stamps is None else stamps.shape[2],
        "TRACED_BLOCKS": 0 if stamps is None else stamps.shape[3],
    }


def forward(
    request: Request, config: RolesConfig | None = None, stamps: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE on a Hopper GPU; arguments and results as `fa3.hopper.host.forward`.

    Args:
        request: what FA3's kernel for Hopper takes.
        config: the schedule; None chooses by shape.
        stamps: where an instrumented launch leaves its time stamps, see `roles.Trace`: int64
            (programs, roles, tiles, blocks, states).
    """
    config = config or default_config(request)
    constants = all_constants(request, config, stamps=stamps)
    return launch(launch_forward, request, config, constants, others=(stamps,))


def forward_quantized(
    request: Request,
    quantized: Quantized,
    config: RolesConfig | None = None,
    stamps: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """`forward` of FP8 tensors; arguments and results as `fa3.fp8.hopper.forward`.

    Raises:
        ValueError: the configuration has polynomials, which are of scores in fp32.
    """
    config = config or fp8_config(request)
    if config.eighths:
        raise ValueError(f"eighths={config.eighths} is not possible in FP8; 0 is.")
    boxes = forward_fp8_hopper.describe_inputs(request, quantized, config)
    per_block, scales = forward_fp8_hopper.scales_of(request, quantized)
    constants = all_constants(request, config, per_block, stamps)
    return launch(launch_forward, request, config, constants, boxes, scales, (stamps,))
