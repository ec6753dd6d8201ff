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

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import in_autocast_dtype
from flash_versions.versions.tiles import wgmma
from transformer.model.kernels.gemm import hopper as gemm_hopper
from transformer.model.kernels.gemm import portable as gemm_portable

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
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
        return Product.apply(x, None, None, weight, None, bias, residual, None)
    return run(x, weight, None, bias, residual)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
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
        return Product.apply(x, None, None, gate, up, None, None, None)
    return run(x, gate, up, None, None)


def linear_reference(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """`linear` by torch's operations."""
    y = F.linear(x, weight, bias)
    return y if residual is None else y + residual


def swiglu_reference(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """`swiglu` by torch's operations."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def normalise(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The norm by torch's operations, as the model's."""
    return norm_weight.type_as(x) * F.rms_norm(x, x.shape[-1:], eps=eps)


class Product(torch.autograd.Function):
    """These products for autograd, also with a norm before them: the normalised x, gate and up are
    computed anew in the backward, and so not kept.
    """

    @staticmethod
    def forward(ctx: Any, x, norm_weight, eps, weight, up, bias, residual, folded) -> Tensor:
        """Run the kernel; `folded` are the weights with a norm's in them."""
        ctx.save_for_backward(x, norm_weight, weight, up)
        ctx.eps = eps
        weight, up = folded or (weight, up)
        return run(x, weight, up, bias, residual, eps=eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        """Of all tensors but those that were folded."""
        x, norm_weight, weight, up = ctx.saved_tensors
        of_x, of_norm, _, of_weight, of_up, of_bias, of_residual, _ = ctx.needs_input_grad
        inputs = leaves((x, of_x), (norm_weight, of_norm))
        with torch.enable_grad():
            normed = inputs[0] if norm_weight is None else normalise(inputs[0], inputs[1], ctx.eps)
        rows, of_normed = dy.reshape(-1, dy.shape[-1]), of_x or of_norm
        if up is None:
            d_weight = rows.mT @ normed.detach().reshape(len(rows), -1) if of_weight else None
            d_normed, d_up = dy @ weight if of_normed else None, None
        else:
            factors = leaves((normed, of_normed), (weight, of_weight), (up, of_up))
            with torch.enable_grad():
                y = swiglu_reference(*factors)
            d_normed, d_weight, d_up = gradients(y, factors, dy)
        dx, d_norm = d_normed, None
        if norm_weight is not None:
            dx, d_norm = gradients(normed, inputs, d_normed)
        d_bias = rows.sum(0) if of_bias else None
        return dx, d_norm, None, d_weight, d_up, d_bias, dy if of_residual else None, None


def leaves(*tensors: tuple[Tensor | None, bool]) -> list[Any]:
    """Tensors as leaves of a graph, those that need a gradient with one."""
    return [None if x is None else x.detach().requires_grad_(needed) for x, needed in tensors]


def gradients(y: Tensor, inputs: Sequence[Any], dy: Tensor | None) -> list[Any]:
    """The gradients of those leaves that need them."""
    needed = [x is not None and x.requires_grad for x in inputs]
    wanted = [x for x, one in zip(inputs, needed) if one]
    found = iter(torch.autograd.grad(y, wanted, dy) if wanted else ())
    return [next(found) if one else None for one in needed]


def run(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    out: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """The result by a kernel; the arguments are checked. With `eps`, x is divided by its root mean
    square, and the weights are folded.
    """
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
    gemm: Any = gemm_hopper.gemm if all(map(suits_hopper, matrices)) else gemm_portable.gemm
    eps = None if eps is None else float(eps)
    with devices.on_device(x):
        gemm(a, b, result, up=up, bias=bias, residual=residual, eps=eps)
    return c


def matrix(x: Tensor) -> Tensor:
    """A tensor as rows of its last dimension, each contiguous; copied if it does not lie so."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def suits_hopper(x: Tensor) -> bool:
    """Whether a matrix is on a Hopper GPU, of 16 bits, and such that TMA can address it."""
    return (
        wgmma.available(x.device)
        and x.dtype != torch.float32
        and x.data_ptr() % 16 == 0
        and x.stride(0) % 8 == 0
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
    )


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether any of the tensors takes part in a gradient."""
    return any(x is not None and x.requires_grad for x in tensors)


def in_one_dtype(*tensors: Any) -> tuple:
    """The tensors in the dtype of torch.autocast, if that is on."""
    if not all(x is None or isinstance(x, Tensor) for x in tensors):
        kinds = ", ".join(type(x).__name__ for x in tensors)
        raise ValueError(f"the arguments must be tensors, not {kinds}.")
    cast = iter(in_autocast_dtype(*(x for x in tensors if x is not None)))
    return tuple(None if x is None else next(cast) for x in tensors)


def check(x: Tensor, weight: Tensor, **others: Tensor | None) -> None:
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


def check_out(out: Tensor, inputs: dict[str, Tensor]) -> None:
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


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether the memory from the first to the last element of two tensors has bytes in common."""
    (x_begin, x_end), (y_begin, y_end) = (
        (t.data_ptr(), t.data_ptr() + t.element_size() * extent(t)) for t in (x, y)
    )
    return x.device == y.device and max(x_begin, y_begin) < min(x_end, y_end)


def extent(x: Tensor) -> int:
    """Elements from the first to the last of a tensor, those between that it skips included."""
    if x.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
