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
from typing import Any, NamedTuple

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
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, residual: Tensor | None = None
) -> Tensor:
    """x W^T + bias + residual, rounded once; differentiable.

    Args:
        x: (..., K), float16, bfloat16 or float32.
        weight: (N, K), as that of `torch.nn.Linear`.
        bias: (N,).
        residual: (..., N).

    All have one dtype and device; under torch.autocast they are brought to its dtype first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    Returns:
        (..., N) in x's dtype.
    """
    return product(x, weight, None, bias, residual)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """silu(x G^T) * (x U^T), rounded once; differentiable.

    Args:
        x: (..., K), as in `linear`.
        gate: (N, K); it and `up` may be the two halves of one weight.
        up: (N, K).

    Raises:
        ValueError: as in `linear`.

    Returns:
        (..., N) in x's dtype.
    """
    return product(x, gate, up, None, None)


class Norm(NamedTuple):
    """A norm of x before the product.

    Attributes:
        weight: (K,), any floating-point dtype.
        eps: added to the mean square under the root.
        folded: the product's weights through `rmsnorm.fold`.
    """

    weight: Tensor
    eps: float
    folded: tuple[Tensor, Tensor | None]


def product(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    norm: Norm | None = None,
) -> Tensor:
    """`linear`, or `swiglu` if there is an `up`, of x or of the normalised x."""
    x, weight, up, bias, residual = in_one_dtype(x, weight, up, bias, residual)
    check(x, weight, bias=bias, residual=residual, up=up)
    if torch.compiler.is_compiling():  # and fusing by itself
        return reference(x, weight, up, bias, residual, norm)
    if torch.is_grad_enabled():
        of_norm = None if norm is None else norm.weight
        if any(t is not None and t.requires_grad for t in (x, weight, up, bias, residual, of_norm)):
            return Product.apply(x, of_norm, weight, up, bias, residual, norm)
    return run(x, weight, up, bias, residual, norm)


def reference(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Norm | None = None,
) -> Tensor:
    """`product` by torch's operations."""
    if norm is not None:
        x = normalise(x, norm.weight, norm.eps)
    y = F.linear(x, weight, bias)
    if up is not None:
        y = F.silu(y) * F.linear(x, up)
    return y if residual is None else y + residual


def normalise(x: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
    """The norm by torch's operations, as the model's."""
    return norm_weight.type_as(x) * F.rms_norm(x, x.shape[-1:], eps=eps)


class Product(torch.autograd.Function):
    """These products for autograd, also with a norm before them: the normalised x, gate and up are
    computed anew in the backward, and so not kept.
    """

    @staticmethod
    def forward(ctx: Any, x, norm_weight, weight, up, bias, residual, norm) -> Tensor:
        """Run the kernel; `norm_weight` is that of the norm, which has a gradient."""
        ctx.save_for_backward(x, norm_weight, weight, up)
        ctx.eps = None if norm is None else norm.eps
        return run(x, weight, up, bias, residual, norm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        """Of all tensors but those that were folded."""
        x, norm_weight, weight, up = ctx.saved_tensors
        of_x, of_norm, of_weight, of_up, of_bias, of_residual, _ = ctx.needs_input_grad
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
                y = reference(*factors)
            d_normed, d_weight, d_up = gradients(y, factors, dy)
        dx, d_norm = d_normed, None
        if norm_weight is not None:
            dx, d_norm = gradients(normed, inputs, d_normed)
        d_bias = rows.sum(0) if of_bias else None
        return dx, d_norm, d_weight, d_up, d_bias, dy if of_residual else None, None


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
    norm: Norm | None,
) -> Tensor:
    """The result by a kernel; the arguments are checked. With a norm, the kernel multiplies x as it
    is with the folded weights, and divides by its root mean square.
    """
    c = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if 0 in (c.numel(), x.shape[-1]):  # nothing to multiply
        return c.copy_(reference(x, weight, up, bias, residual))
    weight, up = (weight, up) if norm is None else norm.folded
    a, b, result = matrix(x), matrix(weight), c.view(-1, c.shape[-1])
    up, residual = (None if t is None else matrix(t) for t in (up, residual))
    bias = None if bias is None else bias.contiguous()
    matrices = [m for m in (a, b, up, result, residual) if m is not None]
    gemm: Any = gemm_hopper.gemm if all(map(suits_hopper, matrices)) else gemm_portable.gemm
    eps = None if norm is None else float(norm.eps)
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


def in_one_dtype(*tensors: Any) -> tuple:
    """The tensors in the dtype of torch.autocast, if that is on."""
    if not all(x is None or isinstance(x, Tensor) for x in tensors):
        kinds = ", ".join(type(x).__name__ for x in tensors)
        raise ValueError(f"the arguments must be tensors, not {kinds}.")
    cast = iter(in_autocast_dtype(*(x for x in tensors if x is not None)))
    return tuple(None if x is None else next(cast) for x in tensors)


def check(x: Tensor, weight: Tensor, **others: Tensor | None) -> None:
    """Refuse what does not fit, with a ValueError; `others` are bias, residual, up."""
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and the weight {tuple(weight.shape)}; (..., K) and "
            "(N, K) go together."
        )
    if x.dtype not in DTYPES:
        raise ValueError(f"x has dtype {x.dtype}; float16, bfloat16 and float32 work.")
    shape = (*x.shape[:-1], weight.shape[0])
    shapes = {"bias": shape[-1:], "residual": shape, "up": tuple(weight.shape)}
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
    if reason := devices.limits(x.device, "x"):
        raise ValueError(reason)
