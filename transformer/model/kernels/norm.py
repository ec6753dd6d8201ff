"""RMSNorm of rows, each by itself: which rows are normed together changes no bit.

torch chooses how a row is summed by the number of rows. Here a program takes a few rows whole, a
number that the width of a row decides, and adds each of them in the same order.
"""

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.rows import cdiv

TILE = 2048  # elements of a program, or one row
PROGRAMS = 256  # of the gradient, at most: each has a share of the weight's


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


@triton.jit(do_not_specialize=["rows"])
def norm_backward_kernel(
    x, weight, dy, dx, d_weight, rows, inner, eps,
    PLUS_ONE: tl.constexpr, ROUNDED_LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx of every n-th tile of rows, n the number of programs, and their share of d_weight: with
    z = x / rms(x) and dz = dy * weight, each row

    dx = (dz - z mean(dz z)) / rms(x)        d_weight = the sum over rows of dy z
    """
    k = tl.arange(0, BLOCK)[None, :]
    scale = tl.load(weight + k, mask=k < inner, other=0.0).to(tl.float32)
    if PLUS_ONE:
        scale += 1.0
    total = tl.zeros((1, BLOCK), tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(rows, ROWS), tl.num_programs(0)):
        row = (tile * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside, place = (row < rows) & (k < inner), row * inner + k
        z = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        d = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(z * z, 1) / inner + eps)[:, None]
        z *= inverse
        mean = tl.sum(d * scale * z, 1)[:, None] / inner
        found = inverse * (d * scale - z * mean)
        tl.store(dx + place, found.to(dx.dtype.element_ty), mask=inside)
        if not ROUNDED_LAST:  # what the weight was multiplied with
            z = z.to(dx.dtype.element_ty).to(tl.float32)
        total += tl.sum(d * z, 0)[None, :]
    tl.store(d_weight + tl.program_id(0) * inner + k, total, mask=k < inner)


launch_norm, launch_backward = Launcher(norm_kernel), Launcher(norm_backward_kernel)


def norm_reference(
    x: Tensor, weight: Tensor, eps: float, plus_one: bool, rounded_last: bool
) -> Tensor:
    """`rms_norm` by torch's operations."""
    if not rounded_last:
        return weight.type_as(x) * F.rms_norm(x, x.shape[-1:], eps=eps)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.rms_norm(wide, x.shape[-1:], plus_one + weight.type_as(wide), eps).type_as(x)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, *switches: Any) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.switches = switches
        return _run(x, weight, *switches)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        (x, weight), (eps, *switches) = ctx.saved_tensors, ctx.switches
        x, dy = aligned(x), aligned(dy)
        rows, inner = x.numel() // x.shape[-1], x.shape[-1]
        constants, num_warps = _tile(inner, *switches)
        programs = min(cdiv(rows, constants["ROWS"]), PROGRAMS)
        dx, shares = torch.empty_like(x), weight.new_empty(programs, inner, dtype=torch.float32)
        if rows:
            arguments = x, aligned(weight), dy, dx, shares, rows, inner, float(eps)
            with devices.on_device(x):
                launch_backward((programs,), arguments, constants, num_warps)
        return dx, shares.sum(0).type_as(weight), None, None, None


def aligned(x: Tensor) -> Tensor:
    """The tensor contiguous and aligned to 16 bytes: for others Triton compiles another kernel,
    which may add in another order.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def _run(x: Tensor, weight: Tensor, eps: float, plus_one: bool, rounded_last: bool) -> Tensor:
    x = aligned(x)
    y = torch.empty_like(x)
    _launch(x, weight, y, 1, x.shape[-1], eps, plus_one, rounded_last)
    return y


def _launch(
    x: Tensor, weight: Tensor, y: Tensor, group: int, stride: int, eps: float, *switches: bool
) -> None:
    rows, inner = x.numel() // x.shape[-1], x.shape[-1]
    constants, num_warps = _tile(inner, *switches)
    if rows:
        arguments = x, aligned(weight), y, rows, group, stride, inner, float(eps)
        with devices.on_device(x):
            launch_norm((cdiv(rows, constants["ROWS"]),), arguments, constants, num_warps)


@cache
def _tile(inner: int, plus_one: bool, rounded_last: bool) -> tuple[dict[str, Any], int]:
    """A kernel's constants and warps, which follow from the width of a row."""
    block = triton.next_power_of_2(inner)
    switches = {"PLUS_ONE": plus_one, "ROUNDED_LAST": rounded_last}
    return switches | {"ROWS": max(1, TILE // block), "BLOCK": block}, 8 if block > TILE else 4


def norm_in_place(x: Tensor, weight: Tensor, eps: float) -> None:
    """`rms_norm` of heads where they lie: x (tokens, heads, K), a view of some of all heads."""
    _launch(x, weight, x, x.shape[1], x.stride(0), eps, False, False)


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
