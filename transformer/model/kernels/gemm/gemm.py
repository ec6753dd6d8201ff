"""Linear layers in one kernel with what is around them: norm, bias, residual, SwiGLU.

    y = linear(x, weight, bias, residual=x0)       x W^T + bias + x0
    y = swiglu(x, gate, up)                        silu(x G^T) * (x U^T)
    y = linear(x, fold(n, weight), eps=eps)        rms_norm(x) W^T, n is the norm's weight

Between a product and what follows it, PyTorch rounds to 16 bits, writes to memory and reads again.
Here it is done on the fp32 accumulator before that is stored, so there is one rounding, and the
intermediate tensors do not exist: of SwiGLU's 3 tensors of the intermediate size, one.

An RMSNorm divides every row of x by its root mean square r and multiplies every column with a
weight n. The product with a linear layer's W then sums over the columns:

    y_ij = sum_k (x_ik / r_i * n_k) W_jk  =  1 / r_i * sum_k x_ik (n_k W_jk)

* n goes to the other side: it multiplies the columns of W once, when the model is loaded (`fold`).
* r_i is the same for all of a row's sum, so it can wait until the sum is there. The product starts
  with x as it is, sums up the squares of the rows that come by, and divides at the end, when the
  accumulator is still in registers.

So the norm writes nothing and reads nothing: x is read once instead of twice, the normalised x
never exists, one launch and one rounding to 16 bits are gone (see docs/understand/norm_gemm.md).
What it costs: each tile of y squares its rows of x anew, on cores that wait for the tensor cores.

There are two kernels: hopper.py for what TMA can address on a Hopper GPU, portable.py for
everything else. For a handful of rows, as in decoding, decode/gemv.py is the better one: there the
time is that of reading W. The gradient of `linear` is that of the formula, by torch's operations;
norms and SwiGLU are left to torch where a gradient is wanted.

Sources: SwiGLU: Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202; RMSNorm: Zhang
and Sennrich 2019, arXiv:1910.07467.
"""

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
    eps: float | None = None,
) -> Tensor:
    """x W^T + bias + residual, rounded once; differentiable.

    Args:
        x: (..., K), float16, bfloat16 or float32.
        weight: (N, K), as that of `torch.nn.Linear`.
        bias: (N,).
        residual: (..., N); not with a norm.
        eps: x / rms(x) takes the place of x, with this added to the mean square; None: x itself.

    All have one dtype and device; under torch.autocast they are brought to its dtype first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    Returns:
        (..., N) in x's dtype.
    """
    return product(x, weight, None, bias, residual, eps)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, *, eps: float | None = None) -> Tensor:
    """silu(x G^T) * (x U^T), rounded once; differentiable.

    Args:
        x, eps: as in `linear`.
        gate: (N, K); it and `up` may be the two halves of one weight.
        up: (N, K).

    Raises:
        ValueError: as in `linear`.

    Returns:
        (..., N) in x's dtype.
    """
    return product(x, gate, up, None, None, eps)


def fold(norm_weight: Tensor, weight: Tensor) -> Tensor:
    """The weight (N, K) of a linear layer with its columns multiplied by the weight (K,) of the
    norm before it: rounded once, to the layer's dtype, and without gradient. To be kept as long as
    neither of the two changes.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.detach().to(wide) * norm_weight.detach().to(wide)).to(weight.dtype)


def product(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
) -> Tensor:
    """`linear`, or `swiglu` if there is an `up`."""
    tensors = in_one_dtype(x, weight, up, bias, residual)
    x, weight, up, bias, residual = tensors
    check(x, weight, bias=bias, residual=residual, up=up)
    if eps is not None and (residual is not None or not eps >= 0):
        raise ValueError(f"eps={eps} is of a norm: it is 0 or more, and there is no residual then.")
    gradient = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    # A compiler fuses by itself.
    if torch.compiler.is_compiling() or (gradient and (up, eps) != (None, None)):
        return reference(x, weight, up, bias, residual, eps)
    if gradient:
        return Product.apply(x, weight, bias, residual)
    return run(x, weight, up, bias, residual, None if eps is None else float(eps))


def reference(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
) -> Tensor:
    """`product` by torch's operations."""
    if eps is not None:
        x = F.rms_norm(x, x.shape[-1:], eps=eps)
    y = F.linear(x, weight, bias)
    if up is not None:
        y = F.silu(y) * F.linear(x, up)
    return y if residual is None else y + residual


class Product(torch.autograd.Function):
    """`linear` for autograd."""

    @staticmethod
    def forward(ctx: Any, x, weight, bias, residual) -> Tensor:
        """Run the kernel."""
        ctx.save_for_backward(x, weight)
        return run(x, weight, None, bias, residual, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple:
        """Of all tensors."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias, of_residual = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        d_weight = rows.mT @ x.reshape(len(rows), -1) if of_weight else None
        d_bias = rows.sum(0) if of_bias else None
        return dy @ weight if of_x else None, d_weight, d_bias, dy if of_residual else None


def run(
    x: Tensor,
    weight: Tensor,
    up: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
    eps: float | None,
) -> Tensor:
    """The result by a kernel; the arguments are checked."""
    c = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if 0 in (c.numel(), x.shape[-1]):  # nothing to multiply
        return c.copy_(reference(x, weight, up, bias, residual, None))
    a, b, result = matrix(x), matrix(weight), c.view(-1, c.shape[-1])
    up, residual = (None if t is None else matrix(t) for t in (up, residual))
    bias = None if bias is None else bias.contiguous()
    matrices = [m for m in (a, b, up, result, residual) if m is not None]
    gemm: Any = gemm_hopper.gemm if suits_hopper(*matrices) else gemm_portable.gemm
    with devices.on_device(x):
        gemm(a, b, result, up=up, bias=bias, residual=residual, eps=eps)
    return c


def matrix(x: Tensor) -> Tensor:
    """A tensor as rows of its last dimension, each contiguous; copied if it does not lie so."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()


def suits_hopper(*matrices: Tensor) -> bool:
    """Whether matrices are on a Hopper GPU, of 16 bits, and such that TMA can address them."""
    x = matrices[0]
    narrow = wgmma.available(x.device) and x.dtype != torch.float32
    return narrow and all(map(addressable, matrices))


def addressable(x: Tensor) -> bool:
    """Whether TMA can address a matrix of 16-bit numbers."""
    from_row_to_row, in_a_row = x.stride()
    aligned = x.data_ptr() % 16 == 0 and from_row_to_row % 8 == 0
    return aligned and in_a_row == 1 and from_row_to_row >= x.shape[1]


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
