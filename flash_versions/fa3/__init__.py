"""FlashAttention 3: asynchronous copies and products, in a grid that stays on the GPU."""

import torch

from flash_versions.fa2 import backward
from flash_versions.fa2 import forward as packing
from flash_versions.fa3 import ablation, forward, forward_hopper
from flash_versions.request import Request
from flash_versions.version import Version, kernel_limits


def serve(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
    """The forward of the first kernel that is made for a request.

    FA2's for what boxes do not reach and for decoding, which waits for memory, not for what FA3
    makes faster; on Hopper the explicit one, for all that it takes; else the portable one.
    """
    if forward.unsupported(request) is not None:
        return packing.forward(request)
    if forward_hopper.unsupported(request) is None:
        return forward_hopper.forward(request)
    return forward.forward(request)


VERSION = Version(
    name="fa3",
    title="FlashAttention 3",
    wasted="tensor cores that wait for loads and for the softmax",
    idea="asynchronous copies and products: some warps only load, others compute in turns",
    source="Shah et al. 2024, arXiv:2407.08608",
    forward=serve,
    limits=kernel_limits,
    backward=backward.backward,
    variants=ablation.VARIANTS,
)
