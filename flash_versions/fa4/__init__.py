"""FlashAttention 4: fewer rescales, exponentials on two units, roles with states."""

import torch

from flash_versions import fa3
from flash_versions.fa2 import backward as packing_backward
from flash_versions.fa2 import forward as packing
from flash_versions.fa3 import backward_hopper as exact_hopper
from flash_versions.fa3 import forward_fp8_hopper
from flash_versions.fa3.backward import unsupported as left_to_packing
from flash_versions.fa3.backward import without_boxes
from flash_versions.fa3.forward import unsupported as undescribable
from flash_versions.fa3.forward_hopper import unsupported
from flash_versions.fa4 import ablation, backward, backward_hopper, forward, forward_hopper
from flash_versions.quantize import Quantized
from flash_versions.request import Request
from flash_versions.version import Version


def serve(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward of the first kernel that is made for a request, chosen as in FA3."""
    if request.precision is not None:
        return fa3.serve_fp8(request, forward_quantized)
    if undescribable(request) is not None:
        return packing.forward(request)
    if unsupported(request) is None:
        return forward_hopper.forward(request)
    return forward.forward(request)


def serve_backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The backward of the first kernel that is made for a request, chosen as in FA3."""
    given = request, o, lse, statistics, do, dlse
    if (without_boxes(request) or exact_hopper.unsupported(request)) is None:
        return backward_hopper.backward(*given)
    if left_to_packing(request) is None:
        return backward.backward(*given)
    return packing_backward.backward(*given)


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
