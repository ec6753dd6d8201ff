"""FlashAttention 4, backward, on Hopper: FA3's kernels, with exponentials on two units.

What changes. A polynomial computes a share of P = 2^(S - LSE) (`../exp2.py`). The LSE is known, so
of the forward's two tricks only this one applies. P is rounded to 16 bits for dV and dS for dQ and
dK, which covers its error. FA3's kernels for Hopper take 2^x as a parameter. The columns for the
polynomial are selected by register, in the accumulator of S^T as in that of S, so no data moves.

    P^T = 2^(S^T - LSE)   [exp unit]        now:    P^T = 2^(S^T - LSE)   [exp unit | multiply-add]

Cost. Eight instructions in place of one, for the share. There is little to gain: a step of 128 keys
and 64 queries keeps the exponential units busy for 512 cycles, and the tensor cores for 2560 at
head_dim 128 and 1280 at head_dim 64. So the share is 0 unless a caller asks for it.

Source. Zadouri et al. 2026, "FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for
Asymmetric Hardware Scaling", arXiv:2603.05451, which was written for Blackwell.
"""

from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper.backward import kernel as exact
from flash_versions.versions.fa4.exp2 import DEGREES, mixed_exp2

DEGREE = tl.constexpr(DEGREES[torch.bfloat16])
DEGREE_FP16 = tl.constexpr(DEGREES[torch.float16])


@triton.jit
def exp2(x, EIGHTHS: tl.constexpr):
    """2^x for P in bf16, a share of it by the polynomial."""
    return mixed_exp2(x, EIGHTHS, DEGREE)


@triton.jit
def exp2_half(x, EIGHTHS: tl.constexpr):
    """The same for P in fp16."""
    return mixed_exp2(x, EIGHTHS, DEGREE_FP16)


def backward(
    request: Request, *given: Any, eighths: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of attention on a Hopper GPU.

    Args:
        request: as FA3's, and so is what is given behind it, from o to the configuration.
        eighths: of the exponentials that are polynomials, 0 to 8; 0 is FA3's kernel.

    Raises:
        ValueError: eighths is out of range, or the configuration does not fit the request.

    Returns:
        dq, dk, dv, dsink as FA3's.
    """
    if eighths not in range(9):
        raise ValueError(f"eighths={eighths} is not possible; 0 to 8 are.")
    if not eighths:
        return exact.backward(request, *given)
    function = exp2_half if request.q.dtype == torch.float16 else exp2
    mixed = partial(exact.backward, function=function, share=eighths)
    return mixed(request, *given)
