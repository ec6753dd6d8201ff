"""FlashAttention 1: tiling and online softmax; the score matrix never leaves the chip."""

from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import WIDE, Version, head_dim_limits, kernel_limits
from flash_versions.versions.fa1 import backward, forward

FROM_FA2_ON = (
    "softcap", "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "block_table",
    "query_starts", "query_ends",
)  # fmt: skip


def limits(request: Request) -> str | None:
    """What FA1 cannot serve: beyond the limits of all kernels, what its lesson needs not."""
    if request.num_splits not in (None, 1):
        return f"num_splits={request.num_splits} is not possible; keys are split from 'fa2' on."
    for name in FROM_FA2_ON:
        if getattr(request, name) is not None:
            return f"{name} is not possible; use version='fa2' or later."
    if request.dropout_p > 0:
        return f"dropout_p={request.dropout_p} is not possible; use version='fa2' or later."
    if reason := head_dim_limits(request, WIDE):
        return f"{reason[:-1]}, more with version='fa2' or later."
    return kernel_limits(request)


VERSION = Version(
    name="fa1",
    title="FlashAttention 1",
    wasted="the M x N score matrix, written to memory and read back",
    idea="tiles and an online softmax: scores never leave the chip",
    source="Dao et al. 2022, arXiv:2205.14135",
    forward=forward.forward,
    limits=limits,
    backward=backward.backward,
    num_statistics=2,
    inexact="it normalises o in every block, also where a row sees none of its keys",
)
