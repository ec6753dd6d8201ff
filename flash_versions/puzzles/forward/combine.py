"""Put parts together: FlashAttention 2's reduction.

The parts of the keys have each given an attention o_i and its LSE_i. The attention over all keys is
their average, and a part weighs as much as its sum of exponentials:

    LSE = log(sum of e^LSE_i)            o = sum of e^(LSE_i - LSE) o_i

A part without keys has LSE_i = -inf and weighs nothing. Its o_i may be anything, NaN included: what
weighs nothing must not be multiplied. If no part has keys, o = 0 and LSE = -inf.
"""

import torch
import triton
import triton.language as tl


def spec(parts, lses):
    """What is wanted, in PyTorch."""
    lse = torch.logsumexp(lses, 0)
    weight = (lses - lse).exp().nan_to_num(0.0)[..., None]
    return torch.where(weight > 0, weight * parts, 0.0).sum(0), lse


@triton.jit
def combine_kernel(parts, lses, o, lse, splits, queries, D: tl.constexpr, SPLITS: tl.constexpr):
    """o and LSE of one query; parts is (splits, queries, D), lses (splits, queries).

    SPLITS is a power of two and at least `splits`.
    """
    row = tl.program_id(0)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, D)
    # write: load the LSEs, find the weights, add up the parts that weigh something, store both
    there = split < splits
    each = tl.load(lses + split * queries + row, mask=there, other=float("-inf"))
    largest = tl.max(each, 0)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.sum(tl.exp(each - pivot), 0)
    weight = tl.exp(each - pivot) / tl.where(total == 0.0, 1.0, total)
    address = (split * queries + row)[:, None] * D + dim[None, :]
    tile = tl.load(parts + address, mask=(weight > 0.0)[:, None], other=0.0)
    tl.store(o + row * D + dim, tl.sum(tile * weight[:, None], 0))
    tl.store(lse + row, pivot + tl.log(total))
    # end


def combine(parts, lses):
    """o (queries, D) and LSE from parts (splits, queries, D) and lses (splits, queries)."""
    splits, queries, dim = parts.shape
    o = torch.empty(queries, dim)
    lse = torch.empty(queries)
    power = triton.next_power_of_2(splits)
    combine_kernel[(queries,)](parts, lses, o, lse, splits, queries, D=dim, SPLITS=power)
    return o, lse


# ---- check ----
HINTS = (
    "It is a softmax of the LSEs of a row, and a sum of the parts with its weights.",
    "Load the LSEs with other=-inf, subtract their maximum (0 if that is -inf), and take tl.exp.",
    "Load the parts with mask=(weight > 0.0)[:, None] and other=0.0: 0 * NaN would be NaN.",
)
RESULTS = ("o", "lse")


def cases():
    """Inputs by what is special about them."""
    empty = torch.randn(4, 3, 16), torch.randn(4, 3)
    empty[0][2, 1] = float("nan")
    empty[1][2, 1] = empty[1][:, 2] = float("-inf")
    return {
        "2 parts": (torch.randn(2, 4, 16), torch.randn(2, 4)),
        "3 parts": (torch.randn(3, 4, 16), torch.randn(3, 4)),
        "5 parts, LSEs of hundreds": (torch.randn(5, 3, 16), 300 * torch.randn(5, 3)),
        "a part without keys, with NaN in it, and a query without keys": empty,
    }


def reads(parts, lses):
    """Elements that may be loaded."""
    return {"parts": parts.numel(), "lses": lses.numel()}
