"""FlashAttention 4: fewer rescales, exponentials on two units, roles with states."""

from functools import partial

import torch

from flash_versions.dispatch.launch import remembered
from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import Backward, Forward, Version
from flash_versions.versions import fa3
from flash_versions.versions.fa2 import backward as packing_backward
from flash_versions.versions.fa2 import forward as packing
from flash_versions.versions.fa3.backward import unsupported as left_to_packing
from flash_versions.versions.fa3.backward import without_boxes
from flash_versions.versions.fa3.forward import unsupported as undescribable
from flash_versions.versions.fa3.fp8 import hopper as forward_fp8_hopper
from flash_versions.versions.fa3.hopper.backward import kernel as exact_hopper
from flash_versions.versions.fa3.hopper.forward import unsupported
from flash_versions.versions.fa4 import ablation, backward, forward
from flash_versions.versions.fa4.hopper import forward as forward_hopper
from flash_versions.versions.fa4.hopper.config import default_config


def serve(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward of the first kernel that is made for a request."""
    if request.precision is not None:
        return fa3.serve_fp8(request, forward_quantized)
    return choose_forward(request)(request)


@remembered
def choose_forward(request: Request) -> Forward:
    """FA2's, the portable or the explicit one, as in FA3."""
    if undescribable(request) is not None:
        return packing.forward
    if unsupported(request) is not None:
        return forward.forward
    plan = forward_hopper.make_plan(request, default_config(request), request.q.dtype)
    return partial(forward_hopper.launch, plan)


def serve_backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The backward of the first kernel that is made for a request."""
    return choose_backward(request)(request, o, lse, statistics, do, dlse)


@remembered
def choose_backward(request: Request) -> Backward:
    """As in FA3; on Hopper its kernels, as polynomials pay nowhere there (`backward_hopper.py`)."""
    if (without_boxes(request) or exact_hopper.unsupported(request)) is None:
        return partial(exact_hopper.launch, exact_hopper.make_plan(request))
    if left_to_packing(request) is None:
        return backward.backward
    return packing_backward.backward


def forward_quantized(
    request: Request, quantized: Quantized
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward of quantised tensors; where there is no Hopper, FA3's, unchanged."""
    if forward_fp8_hopper.unsupported(request) is None:
        return forward_hopper.forward_quantized(request, quantized)
    return fa3.forward_quantized(request, quantized)


VERSION = Version(
    name="fa4",
    title="FlashAttention 4",
    wasted="rescales that change nothing; multiply-add units that wait for exponentials",
    idea="rescale only where the maximum grew much; compute a share of exp2 by a polynomial",
    source="Zadouri et al. 2026, arXiv:2603.05451",
    forward=serve,
    limits=fa3.limits,
    backward=serve_backward,
    variants=ablation.VARIANTS,
    backward_variants=ablation.BACKWARD_VARIANTS,
    forward_quantized=forward_quantized,
    fp8_variants=ablation.FP8_VARIANTS,
)
