"""FlashAttention 1: tiling and online softmax; the score matrix never leaves the chip."""

from flash_versions.fa1 import forward
from flash_versions.version import Request, Version, kernel_limits


def limits(request: Request) -> str | None:
    """What FA1 cannot serve: beyond the limits of all kernels, there are no KV splits."""
    if request.num_splits not in (None, 1):
        return f"num_splits={request.num_splits} is not possible; keys are split from 'fa2' on."
    return kernel_limits(request)


VERSION = Version(
    name="fa1",
    title="FlashAttention 1",
    wasted="the M x N score matrix, written to memory and read back",
    idea="tiles and an online softmax: scores never leave the chip",
    source="Dao et al. 2022, arXiv:2205.14135",
    forward=forward.forward,
    limits=limits,
)
