"""SwiGLU's gate, silu(gate) * up, in one kernel, and its gradient in one."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.rows import cdiv

BLOCK = 1024  # elements of a program, all of one row


@triton.jit
def silu(gate, up):
    """silu(gate) * up, in fp32."""
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["stride"])
def gate_kernel(gate, up, y, stride, outputs, BLOCK: tl.constexpr):
    """A block of a row of y (rows, outputs). Rows of gate and of up are `stride` elements apart."""
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    g = tl.load(gate + row * stride + output, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + output, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * outputs + output, silu(g, u).to(y.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride"])
def gate_backward_kernel(gate, up, dy, d_gate_up, stride, outputs, BLOCK: tl.constexpr):
    """A block of a row of d_gate_up (rows, 2 outputs): with s = sigmoid(gate),

    d_gate = dy * up * s (1 + gate (1 - s))        d_up = dy * gate * s
    """
    row = tl.program_id(0).to(tl.int64)
    output = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = output < outputs
    g = tl.load(gate + row * stride + output, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * stride + output, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * outputs + output, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    place = d_gate_up + row * 2 * outputs + output
    dtype: tl.constexpr = d_gate_up.dtype.element_ty
    tl.store(place, (d * u * s * (1.0 + g * (1.0 - s))).to(dtype), mask=inside)
    tl.store(place + outputs, (d * g * s).to(dtype), mask=inside)


launch_gate, launch_backward = Launcher(gate_kernel), Launcher(gate_backward_kernel)


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.save_for_backward(*parts)
        return _run(*parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        made = dy.new_empty(*dy.shape[:-1], 2 * dy.shape[-1])
        _launch(launch_backward, ctx.saved_tensors, dy.contiguous(), made)
        return (made,) if len(ctx.saved_tensors) == 1 else made.chunk(2, -1)


def gated(*parts: Tensor) -> Tensor:
    """silu(gate) * up, rounded once; differentiable.

    Args:
        parts: gate and up, (..., N) each, or one tensor (..., 2 N) that has them side by side, as a
            product with both weights does: its gradient needs no copy. Of one dtype, float32,
            float16 or bfloat16.

    Returns:
        (..., N), in that dtype.
    """
    if torch.is_grad_enabled() and any(x.requires_grad for x in parts):
        return _Gated.apply(*parts)
    return _run(*parts)


def _run(*parts: Tensor) -> Tensor:
    *shape, width = parts[0].shape
    y = parts[0].new_empty(*shape, width if len(parts) == 2 else width // 2)
    _launch(launch_gate, parts, y)
    return y


def _launch(launch: Launcher, parts: Sequence[Tensor], *others: Tensor) -> None:
    gate, up = parts if len(parts) == 2 else parts[0].chunk(2, -1)
    gate, up = gate.reshape(-1, gate.shape[-1]), up.reshape(-1, up.shape[-1])
    if gate.stride() != up.stride() or gate.stride(1) != 1:
        gate, up = gate.contiguous(), up.contiguous()
    rows, outputs = gate.shape
    if gate.numel():
        with devices.on_device(gate):
            grid = rows, cdiv(outputs, BLOCK)
            launch(grid, (gate, up, *others, gate.stride(0), outputs), {"BLOCK": BLOCK})
