"""Attention to a shared prefix and to a row's own keys, merged in one kernel.

All rows of a group attend to the prefix in one call, which reads its keys once, and each row to
what it has said itself. `flash_versions.merge_attention_states` has the formula; by torch's
operations it takes twenty launches.
"""

import triton
import triton.language as tl
from torch import Tensor

from flash_versions.dispatch.device import devices


@triton.jit
def merge_kernel(
    o, lse, o_prefix, lse_prefix, new, together, heads, dim,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for one token, of which `together` tokens attended to a prefix."""
    token = tl.program_id(0).to(tl.int64)
    head, d = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    in_own = (token // new * heads + head) * new + token % new
    in_prefix = (token // together * heads + head) * together + token % together
    own = tl.load(lse + in_own, mask=head < heads, other=float("-inf"))
    prefix = tl.load(lse_prefix + in_prefix, mask=head < heads, other=float("-inf"))
    pivot = tl.maximum(own, prefix)
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
    own, prefix = tl.exp(own - pivot)[:, None], tl.exp(prefix - pivot)[:, None]
    total = own + prefix
    total = tl.where(total > 0, total, 1.0)
    place = (token * heads + head[:, None]) * dim + d[None, :]
    inside = (head < heads)[:, None] & (d < dim)[None, :]
    found = tl.load(o + place, mask=inside, other=0.0).to(tl.float32) * (own / total)
    found += tl.load(o_prefix + place, mask=inside, other=0.0).to(tl.float32) * (prefix / total)
    tl.store(o + place, found.to(o.dtype.element_ty), mask=inside)


def merge(o: Tensor, lse: Tensor, o_prefix: Tensor, lse_prefix: Tensor) -> None:
    """Add what rows saw in the prefix of their group to what they saw of their own, in place.

    Args:
        o: (rows, new, heads, dim) contiguous.
        lse: (rows, heads, new) float32 contiguous, natural log.
        o_prefix: (groups, rows / groups * new, heads, dim) contiguous: in the same order.
        lse_prefix: (groups, heads, rows / groups * new).
    """
    rows, new, heads, dim = o.shape
    with devices.on_device(o):
        merge_kernel[(rows * new,)](
            o, lse, o_prefix, lse_prefix, new, o_prefix.shape[1], heads, dim,
            triton.next_power_of_2(heads), triton.next_power_of_2(dim),
        )  # fmt: skip
