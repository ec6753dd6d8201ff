"""Delta: what the backward needs before all else.

P = softmax(S) and O = P V. With the gradient dO of O, dP = dO V^T, and a softmax's gradient is

    dS = P * (dP - delta)            delta_i = sum over j of P_ij dP_ij

That sum runs over all keys. But dP_ij is dO_i . V_j, so it is dO_i . (sum over j of P_ij V_j), and
that is dO_i . O_i. So one pass over O and dO gives it, and no key is read.

Accumulate in fp32, whatever the type of O and dO.
"""

import torch
import triton
import triton.language as tl


def spec(o, do):
    """What is wanted, in PyTorch."""
    return (o.float() * do.float()).sum(1) if o.dtype != torch.float64 else (o * do).sum(1)


@triton.jit
def delta_kernel(o, do, delta, queries, D: tl.constexpr, BLOCK: tl.constexpr):
    """delta of BLOCK queries; o and do are (queries, D)."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    address = row[:, None] * D + tl.arange(0, D)[None, :]
    # write: two tiles, the sum of their products, a store
    here = (row < queries)[:, None]
    o_tile = tl.load(o + address, mask=here, other=0.0).to(tl.float32)
    do_tile = tl.load(do + address, mask=here, other=0.0).to(tl.float32)
    tl.store(delta + row, tl.sum(o_tile * do_tile, 1), mask=row < queries)
    # end


def delta(o, do):
    """The sum of o * do for each query, fp32; both are (queries, D)."""
    result = torch.empty(o.shape[0], dtype=torch.float32)
    delta_kernel[(triton.cdiv(o.shape[0], 16),)](o, do, result, o.shape[0], D=o.shape[1], BLOCK=16)
    return result


# ---- check ----
HINTS = (
    "Both tiles have the addresses `address`, and the mask (row < queries)[:, None].",
    "A product of two fp16 tiles is fp16: convert both with .to(tl.float32) first.",
    "tl.store(delta + row, tl.sum(o_tile * do_tile, 1), mask=row < queries)",
)
RESULTS = ("delta",)
TILE = 512


def cases():
    """Inputs by what is special about them."""
    return {
        "32 queries": (torch.randn(32, 16), torch.randn(32, 16)),
        "21 queries, head_dim 32": (torch.randn(21, 32), torch.randn(21, 32)),
        "fp16, products of 10^5": (
            300 * torch.randn(20, 16).half(),
            300 * torch.randn(20, 16).half(),
        ),
    }
