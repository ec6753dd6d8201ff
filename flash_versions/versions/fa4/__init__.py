"""FlashAttention 4: fewer rescales, exponentials on two units, roles with states."""

import warnings
from dataclasses import replace

import torch

from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.verified import is_verified
from flash_versions.dispatch.version import Forward, Version
from flash_versions.versions import fa3
from flash_versions.versions.fa3.hopper import config
from flash_versions.versions.fa4 import ablation, forward
from flash_versions.versions.fa4.blackwell import forward as forward_blackwell
from flash_versions.versions.fa4.blackwell import host as host_blackwell
from flash_versions.versions.fa4.hopper import host as forward_hopper


def choose_forward(request: Request) -> Forward:
    """The kernel for a request, asked in FA3's order."""
    if request.precision is not None:
        in_order = config.prefers_order_in_fp8(request)
        return fa3.choose_fp8(request, fa3.forward_quantized if in_order else forward_quantized)
    return fa3.choose_among(request, choose_hopper, choose_portable)


def choose_hopper(request: Request) -> Forward:
    """The kernel for Hopper. Where products take less time than the softmax, three consumers that
    wait for each product may be faster than two that overlap theirs. FA4's kernel always overlaps,
    so FA3's serves, and where programs share tiles.
    """
    if config.prefers_order(request) or config.shares_tail(request):
        return fa3.forward_hopper.forward
    return forward_hopper.forward


def choose_portable(request: Request) -> Forward:
    """The portable kernel for a plain call, FA2's for one with options; or the one for Blackwell:
    as it never ran on hardware, only where it was verified.
    """
    if is_verified(BLACKWELL, request.q.device) and not host_blackwell.left_to_portable(request):
        return forward_blackwell.forward
    chosen = fa3.choose_portable(request)
    return forward.forward if chosen is fa3.forward.forward else chosen


def serve_blackwell(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward for Blackwell, as it was asked for by its name; one line says that it is not
    verified.
    """
    if request.q.is_cuda and not is_verified(BLACKWELL, request.q.device):
        warnings.warn(
            f"version {BLACKWELL!r} is not verified on this GPU: the kernel was only "
            f"simulated, so run python -m flash_versions.verify before you rely on it.",
            stacklevel=2,
        )
    return forward_blackwell.forward(request)


def forward_quantized(
    request: Request, quantized: Quantized
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward of quantised tensors by FA4's own kernel, also where `choose_forward` takes
    FA3's, so that it can be measured; where there is no Hopper, FA3's.
    """
    if fa3.forward_fp8_hopper.left_to_portable(request):
        return fa3.forward_quantized(request, quantized)
    return forward_hopper.forward_quantized(request, quantized)


def blackwell_limits(request: Request) -> str | None:
    """What the kernel for Blackwell cannot serve."""
    if request.precision is not None:
        return f"precision={request.precision!r} is not possible; it comes with version 'fa4'."
    return (
        fa3.limits(request)
        or fa3.forward.left_to_gathering(request)
        or host_blackwell.left_to_portable(request)
    )


BLACKWELL = "fa4-blackwell"
VERSION = Version(
    name="fa4",
    title="FlashAttention 4",
    wasted="rescales that change nothing; multiply-add units idle during exponentials",
    idea="rescale only where the maximum grew much; compute a share of exp2 by a polynomial",
    source="Zadouri et al. 2026, arXiv:2603.05451",
    forward=lambda request: choose_forward(request)(request),
    limits=fa3.limits,
    backward=fa3.VERSION.backward,
    variants=ablation.VARIANTS,
    forward_quantized=forward_quantized,
    inexact=None,
    fp8_variants=ablation.FP8_VARIANTS,
)
EXPLICIT = replace(
    VERSION,
    name=BLACKWELL,
    title="FlashAttention 4 for Blackwell, not verified on hardware",
    forward=serve_blackwell,
    limits=blackwell_limits,
    inexact="its kernel rescales a tile of rows together",
    variants={},
    forward_quantized=None,
    fp8_variants={},
)
