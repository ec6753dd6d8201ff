"""FA2 with two running results."""

from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import Version, kernel_limits
from flash_versions.versions.fa2 import backward
from flash_versions.versions.fa2_pairs import forward


def limits(request: Request) -> str | None:
    """What it cannot serve, as a sentence."""
    if request.num_splits not in (None, 1):
        return f"num_splits={request.num_splits} is not possible; use version='fa2'."
    for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_starts", "block_table"):
        if getattr(request, name) is not None:
            return f"{name} is not possible; use version='fa2'."
    return kernel_limits(request)


VERSION = Version(
    name="fa2_pairs",
    title="FlashAttention 2, two running results",
    wasted="a softmax that waits for the maximum of the block before",
    idea="even blocks go into one running result, odd ones into another; joined at the end",
    source="an example",
    forward=forward.forward,
    limits=limits,
    backward=backward.backward,  # FA2's: it needs o and the LSE, however they were computed
)
