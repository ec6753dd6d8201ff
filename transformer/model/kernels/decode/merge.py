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
    o, lse, o_prefix, lse_prefix, new, samples, heads, group, dim,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for one token."""
    token = tl.program_id(0).to(tl.int64)
    row, place = token // new, token % new
    head, d = tl.arange(0, HEADS), tl.arange(0, BLOCK)
    # In the prefix's call, the heads of all samples that share a key head follow each other.
    prefix_head = (head // group * samples + row % samples) * group + head % group
    prefix_row, all_heads = row // samples, heads * samples
    own = tl.load(lse + (row * heads + head) * new + place, mask=head < heads, other=float("-inf"))
    in_prefix = (prefix_row * all_heads + prefix_head) * new + place
    prefix = tl.load(lse_prefix + in_prefix, mask=head < heads, other=float("-inf"))
    pivot = tl.maximum(own, prefix)
    pivot = tl.where(pivot == float("-inf"), 0.0, pivot)
    own, prefix = tl.exp(own - pivot)[:, None], tl.exp(prefix - pivot)[:, None]
    total = own + prefix
    total = tl.where(total > 0, total, 1.0)
    in_o = (token * heads + head[:, None]) * dim + d[None, :]
    in_prefix = (prefix_row * new + place) * all_heads + prefix_head
    in_prefix = in_prefix[:, None] * dim + d[None, :]
    inside = (head < heads)[:, None] & (d < dim)[None, :]
    found = tl.load(o + in_o, mask=inside, other=0.0).to(tl.float32) * (own / total)
    seen = tl.load(o_prefix + in_prefix, mask=inside, other=0.0).to(tl.float32)
    found += seen * (prefix / total)
    tl.store(o + in_o, found.to(o.dtype.element_ty), mask=inside)


def merge(o: Tensor, lse: Tensor, o_prefix: Tensor, lse_prefix: Tensor, kv_heads: int) -> None:
    """Add what rows saw in the prefix of their group to what they saw of their own, in place.

    Args:
        o: (rows, new, heads, dim) contiguous.
        lse: (rows, heads, new) float32 contiguous, natural log.
        o_prefix: (groups, new, samples * heads, dim) contiguous; heads as `grouped` orders them.
        lse_prefix: (groups, samples * heads, new).
        kv_heads: that the heads share.
    """
    rows, new, heads, dim = o.shape
    with devices.on_device(o):
        merge_kernel[(rows * new,)](
            o, lse, o_prefix, lse_prefix, new, rows // len(o_prefix), heads, heads // kv_heads, dim,
            triton.next_power_of_2(heads), triton.next_power_of_2(dim),
        )  # fmt: skip


def grouped(q: Tensor, groups: int, kv_heads: int) -> Tensor:
    """Queries of a group's rows as heads of one row, which read the keys of the prefix together.

    Args:
        q: (rows, new, heads, dim), the rows of a group in succession.

    Returns:
        (groups, new, samples * heads, dim), those of a key head together.
    """
    q = q.unflatten(2, (kv_heads, -1)).unflatten(0, (groups, -1))
    return q.permute(0, 2, 3, 1, 4, 5).flatten(2, 4)
