"""Linear layers in one kernel with what follows them: bias, residual, SwiGLU.

    y = linear(x, weight, bias, residual=x0)       x W^T + bias + x0
    y = swiglu(x, gate, up)                        silu(x G^T) * (x U^T)

Between a product and what follows it, PyTorch rounds to 16 bits, writes to memory and reads again.
Here it is done on the fp32 accumulator before that is stored, so there is one rounding, and the
intermediate tensors do not exist: of SwiGLU's 3 tensors of the intermediate size, one.

There are two kernels: hopper.py for what TMA can address on a Hopper GPU, portable.py for
everything else. Gradients are those of the formula, by torch's operations.

Sources: SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202.
"""

from typing import Any

import torch
import torch.nn.functional as F

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import in_autocast_dtype
from flash_versions.versions.tiles import wgmma
from transformer.model.kernels.gemm import hopper as gemm_hopper
from transformer.model.kernels.gemm import portable as gemm_portable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """x W^T + bias + residual, rounded once; differentiable.

    Args:
        x: (..., K), float16, bfloat16 or float32.
        weight: (N, K), as that of `torch.nn.Linear`.
        bias: (N,).
        residual: (..., N).
        out: (..., N), where the result is written; may be the residual. Not for gradients.

    All have one dtype and device; under torch.autocast they are brought to its dtype first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other, or out cannot be written.

    Returns:
        (..., N) in x's dtype: `out`, if that is given.
    """
    x, weight, bias, residual = in_one_dtype(x, weight, bias, residual)
    check(x, weight, bias=bias, residual=residual, out=out)
    if torch.compiler.is_compiling():  # and fusing by itself
        y = linear_reference(x, weight, bias, residual)
        return y if out is None else out.copy_(y)
    if out is not None:
        if torch.is_grad_enabled() and needs_grad(x, weight, bias, residual, out):
            raise ValueError(
                "out= was given and a gradient is asked for, which it would not have; leave it out "
                "or call linear under torch.no_grad()."
            )
        return run(x, weight, None, bias, residual, out)
    if torch.is_grad_enabled() and needs_grad(x, weight, bias, residual):
        return Linear.apply(x, weight, bias, residual)
    return run(x, weight, None, bias, residual)


def swiglu(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(x G^T) * (x U^T), rounded once; differentiable.

    Args:
        x: (..., K), float16, bfloat16 or float32.
        gate: (N, K); it and `up` may be the two halves of one weight.
        up: (N, K).

    All have one dtype and device; under torch.autocast they are brought to its dtype first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    Returns:
        (..., N) in x's dtype.
    """
    x, gate, up = in_one_dtype(x, gate, up)
    check(x, gate, up=up)
    if torch.compiler.is_compiling():
        return swiglu_reference(x, gate, up)
    if torch.is_grad_enabled() and needs_grad(x, gate, up):
        return SwiGLU.apply(x, gate, up)
    return run(x, gate, up, None, None)


def linear_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` by torch's operations."""
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def swiglu_reference(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`swiglu` by torch's operations."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


class Linear(torch.autograd.Function):
    """`linear` for autograd."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, residual) -> torch.Tensor:
        """Run the kernel."""
        ctx.save_for_backward(x, weight)
        return run(x, weight, None, bias, residual)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        """(dx, dweight, dbias, dresidual)."""
        x, weight = ctx.saved_tensors
        rows = dy.flatten(0, -2) if dy.dim() > 1 else dy[None]
        dx = dy @ weight if ctx.needs_input_grad[0] else None
        dweight = rows.mT @ x.reshape(rows.shape[0], -1) if ctx.needs_input_grad[1] else None
        dbias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, dy if ctx.needs_input_grad[3] else None


class SwiGLU(torch.autograd.Function):
    """`swiglu` for autograd: gate and up are computed anew in the backward, and so not kept."""

    @staticmethod
    def forward(ctx: Any, x, gate, up) -> torch.Tensor:
        """Run the kernel."""
        ctx.save_for_backward(x, gate, up)
        return run(x, gate, up, None, None)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        """(dx, dgate, dup)."""
        inputs, again = ctx.saved_tensors, torch.is_grad_enabled()  # for a second derivative
        if not again:
            inputs = [
                a.detach().requires_grad_(needed) for a, needed in zip(inputs, ctx.needs_input_grad)
            ]
        with torch.enable_grad():
            y = swiglu_reference(*inputs)
        wanted = [a for a, needed in zip(inputs, ctx.needs_input_grad) if needed]
        found = iter(torch.autograd.grad(y, wanted, dy, create_graph=again))
        return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)


def run(
    x: torch.Tensor,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The result by a kernel; the arguments are checked."""
    shape = (*x.shape[:-1], weight.shape[0])
    c = x.new_empty(shape) if out is None else out
    if 0 in (c.numel(), x.shape[-1]):  # nothing to multiply; a SwiGLU of that is 0, too
        return c.copy_(linear_reference(x, weight, bias, residual))
    a = matrix(x)
    b, up = matrix(weight), None if up is None else matrix(up)
    result = c.view(-1, shape[-1])
    residual = None if residual is None else matrix(residual)
    bias = None if bias is None else bias.contiguous()
    matrices = [m for m in (a, b, up, result, residual) if m is not None]
    gemm = gemm_hopper.gemm if all(map(suits_hopper, matrices)) else gemm_portable.gemm
    with devices.on_device(x):
        gemm(a, b, result, up=up, bias=bias, residual=residual)
    return c


def matrix(x: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of its last dimension, each contiguous; copied if it does not lie so."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def suits_hopper(x: torch.Tensor) -> bool:
    """Whether a matrix is on a Hopper GPU, of 16 bits, and such that TMA can address it."""
    return (
        wgmma.available(x.device)
        and x.dtype != torch.float32
        and x.data_ptr() % 16 == 0
        and x.stride(0) % 8 == 0
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
    )


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether any of the tensors takes part in a gradient."""
    return any(x is not None and x.requires_grad for x in tensors)


def in_one_dtype(*tensors: Any) -> tuple:
    """The tensors in the dtype of torch.autocast, if that is on."""
    if not all(x is None or isinstance(x, torch.Tensor) for x in tensors):
        kinds = ", ".join(type(x).__name__ for x in tensors)
        raise ValueError(f"the arguments must be tensors, not {kinds}.")
    cast = iter(in_autocast_dtype(*(x for x in tensors if x is not None)))
    return tuple(None if x is None else next(cast) for x in tensors)


def check(x: torch.Tensor, weight: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Refuse what does not fit, with a ValueError; `others` are bias, residual, out, up."""
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and the weight {tuple(weight.shape)}; (..., K) and "
            "(N, K) go together."
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; float16, bfloat16 and float32 work.")
    shape = (*x.shape[:-1], weight.shape[0])
    shapes = {"bias": shape[-1:], "residual": shape, "out": shape, "up": tuple(weight.shape)}
    named = {name: tensor for name, tensor in others.items() if tensor is not None}
    for name, tensor in {"weight": weight, **named}.items():
        if tuple(tensor.shape) != shapes.get(name, tuple(tensor.shape)):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}; x {tuple(x.shape)} and the weight "
                f"{tuple(weight.shape)} need {shapes[name]}."
            )
        if (tensor.dtype, tensor.device) != (x.dtype, x.device):
            raise ValueError(
                f"{name} is {tensor.dtype} on {tensor.device} and x {x.dtype} on {x.device}; all "
                "must have one dtype and device."
            )
    out = named.pop("out", None)
    if out is not None:
        check_out(out, {"x": x, "weight": weight, **named})
    if reason := devices.limits(x.device, "x"):
        raise ValueError(reason)


def check_out(out: torch.Tensor, inputs: dict[str, torch.Tensor]) -> None:
    """Refuse memory that cannot be written: only the residual is read where it is written."""
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; it must be contiguous.")
    for name, x in inputs.items():
        same = (x.data_ptr(), x.stride()) == (out.data_ptr(), out.stride())
        if overlap(x, out) and not (name == "residual" and same):
            raise ValueError(
                f"out shares memory with {name}, which is read while out is written; give it "
                "memory of its own, or exactly that of the residual."
            )


def overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory from the first to the last element of two tensors has bytes in common."""
    (x_begin, x_end), (y_begin, y_end) = (
        (t.data_ptr(), t.data_ptr() + t.element_size() * extent(t)) for t in (x, y)
    )
    return x.device == y.device and max(x_begin, y_begin) < min(x_end, y_end)


def extent(x: torch.Tensor) -> int:
    """Elements from the first to the last of a tensor, those between that it skips included."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
