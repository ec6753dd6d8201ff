"""What each idea of FA3 is worth: its forward with one thing changed, for the benchmark.

A variant is a switch of the default configuration.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import Forward, ForwardQuantized
from flash_versions.versions.fa3 import forward
from flash_versions.versions.fa3.fp8 import forward as forward_fp8
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa3.hopper import host as forward_hopper
from flash_versions.versions.fa3.hopper.config import default_config, overlapping_fp8_config

# Of the kernel for Hopper, see `HopperConfig`.
SWITCHES: Mapping[str, dict[str, Any]] = {
    "no overlap": {"overlap": False},
    "no ping-pong": {"ping_pong": False},
    "neither": {"overlap": False, "ping_pong": False},
    "late wait": {"late_wait": True},
    "grid": {"scheduler": "grid"},
    "static": {"scheduler": "static"},
    "dynamic": {"scheduler": "dynamic"},
}


def varied(
    request: Request,
    run: Callable[..., Any] = forward_hopper.forward,
    configured: Callable[..., Any] = default_config,
    **switches: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward of a kernel for Hopper with some switches of its configuration turned.

    Raises:
        ValueError: this kernel does not serve the request.
    """
    if reason := forward.left_to_gathering(request) or forward_hopper.left_to_portable(request):
        raise ValueError(reason)
    return run(request, replace(configured(request), **switches))


def varied_fp8(
    request: Request,
    quantized: Quantized,
    run: Callable[..., Any] = forward_fp8_hopper.forward,
    configured: Callable[..., Any] = overlapping_fp8_config,
    **switches: Any,
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The same in FP8."""
    if reason := forward_fp8_hopper.left_to_portable(request):
        raise ValueError(reason)
    return run(request, quantized, replace(configured(request), **switches))


VARIANTS: Mapping[str, Forward] = {
    "portable": forward.forward,
    **{name: partial(varied, **switches) for name, switches in SWITCHES.items()},
}
FP8_VARIANTS: Mapping[str, ForwardQuantized] = {
    "portable": forward_fp8.forward,
    "no overlap": partial(varied_fp8, overlap=False),
    "ping-pong": partial(varied_fp8, ping_pong=True),
    "late wait": partial(varied_fp8, late_wait=True),
}
