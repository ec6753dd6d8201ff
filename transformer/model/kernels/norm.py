"""RMSNorm of rows, each by itself: which rows are normed together changes no bit.

torch chooses how a row is summed by the number of rows. Here a program takes a few rows whole, a
number that the width of a row decides, and adds each of them in the same order.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_versions.dispatch.device import devices
from flash_versions.versions.tiles.rows import cdiv

TILE = 2048  # elements of a program, or one row


@triton.jit(do_not_specialize=["rows"])
def norm_kernel(
    x, weight, y, rows, group, stride, inner, eps,
    PLUS_ONE: tl.constexpr, ROUNDED_LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some rows of y = x / rms(x) * weight. Rows lie in groups, `stride` elements apart."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (k < inner)
    place = row // group * stride + row % group * inner + k
    wide = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + k, mask=k < inner, other=0.0).to(tl.float32)
    wide *= tl.rsqrt(tl.sum(wide * wide, 1) / inner + eps)[:, None]
    if PLUS_ONE:
        scale += 1.0
    if not ROUNDED_LAST:
        wide = wide.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + place, (wide * scale).to(y.dtype.element_ty), mask=inside)


def norm_reference(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, rounded_last: bool
) -> Tensor:
    """`rms_norm` by torch's operations."""
    if not rounded_last:
        return weight.type_as(x) * F.rms_norm(x, x.shape[-1:], eps=eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, x.shape[-1:], plus_one + weight.type_as(wide), eps).type_as(x)


class _Norm(torch.autograd.Function):
    """The kernel; its gradient is that of torch's operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *switches: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.switches = switches
        return _run(x, weight, *switches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            y = norm_reference(*leaves, *ctx.switches)
        return *torch.autograd.grad(y, leaves, dy), None, None, None


def aligned(x: Tensor) -> Tensor:
    """The tensor contiguous and aligned to 16 bytes: for others Triton compiles another kernel,
    which may add in another order.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _run(x: Tensor, weight: Tensor, eps: float, plus_one: bool, rounded_last: bool) -> Tensor:
    x = aligned(x)
    y = torch.empty_like(x)
    inner = x.shape[-1]
    _launch(x, weight, y, x.numel() // inner, 1, inner, eps, plus_one, rounded_last)
    return y


def _launch(
    x: Tensor, weight: Tensor, y: Tensor, rows: int, group: int, stride: int, eps: float,
    *switches: bool,
) -> None:  # fmt: skip
    inner = x.shape[-1]
    block = triton.next_power_of_2(inner)
    together, num_warps = max(1, TILE // block), 8 if block > TILE else 4
    if rows:
        with devices.on_device(x):
            norm_kernel[(cdiv(rows, together),)](
                x, aligned(weight), y, rows, group, stride, inner, float(eps), *switches,
                together, block, num_warps=num_warps,
            )  # fmt: skip


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` of heads where they lie: x (tokens, heads, K), a view of some of all heads."""
    _launch(x, weight, x, x.shape[0] * x.shape[1], x.shape[1], x.stride(0), eps, False, False)


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool = False, rounded_last: bool = False
) -> Tensor:
    """x / rms(x) * weight over the last dimension; differentiable.

    Args:
        x: (..., K), float32, float16 or bfloat16.
        weight: (K,).
        eps: added to the mean square under the root.
        plus_one: multiply by 1 + weight.
        rounded_last: round the product only, and not the quotient before it.
    """
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        return _Norm.apply(x, weight, eps, plus_one, rounded_last)
    return _run(x, weight, eps, plus_one, rounded_last)
