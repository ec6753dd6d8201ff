"""RMSNorm fused into the matrix product that follows it: y = rms_norm(x) W^T in one kernel.

An RMSNorm divides every row of x by its root mean square r and multiplies every column with a
weight n. The product with a linear layer's W then sums over the columns:

    y_ij = sum_k (x_ik / r_i * n_k) W_jk  =  1 / r_i * sum_k x_ik (n_k W_jk)

* n goes to the other side: it multiplies the columns of W once, when the model is loaded (`fold`).
* r_i is the same for all of a row's sum, so it can wait until the sum is there. The product starts
  with x as it is, sums up the squares of the rows that come by, and divides at the end, when the
  accumulator is still in registers.

    y = norm_linear(x, n, eps, W, bias)           rms_norm(x) W^T + bias
    y = norm_swiglu(x, n, eps, gate, up)          silu(rms_norm(x) G^T) * (rms_norm(x) U^T)

So the norm writes nothing and reads nothing: x is read once instead of twice, the normalised x
never exists, one launch and one rounding to 16 bits are gone (see docs/understand/norm_gemm.md).
What it costs: each tile of y squares its rows of x anew, on cores that wait for the tensor cores.

Two kernels do this. The portable one below, in Triton, runs everywhere; rmsnorm_hopper.py has
A pass through registers on its way to Hopper's tensor cores. For a handful of rows, as in decoding,
decode/gemv.py is the better one: there the time is that of reading W.

The gradient is that of the formula, in plain PyTorch: x is normalised again, nothing else is kept.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.rows import cdiv
from transformer.model.kernels.gemm import rmsnorm_hopper as rmsnorm_gemm_hopper
from transformer.model.kernels.gemm.gemm import (
    check,
    in_one_dtype,
    matrix,
    needs_grad,
    suits_hopper,
)
from transformer.model.kernels.gemm.portable import (
    TileConfig,
    default_config,
    load_block,
    rows_and_columns,
)


def norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    folded: torch.Tensor | None = None,
) -> torch.Tensor:
    """A linear layer of normalised x: (x / rms(x) * norm_weight) weight^T + bias; differentiable.

    Args:
        x: (..., K), float16, bfloat16 or float32.
        norm_weight: (K,), any floating-point dtype; of a norm that scales by 1 + w, that.
        eps: added to the mean square under the root.
        weight: (N, K), as that of `torch.nn.Linear`.
        bias: (N,).
        folded: `fold(norm_weight, weight)`, from who calls often with the same two; None: computed
            here, which takes as long as reading and writing the weight.

    x, weight, bias and folded have one dtype, and all have one device; under torch.autocast they
    are brought to its dtype first.

    Raises:
        ValueError: shapes, dtypes or devices do not fit each other.

    Returns:
        (..., N) in x's dtype; summed up in fp32 and rounded once.
    """
    x, weight, bias, folded = in_one_dtype(x, weight, bias, folded)
    refuse(x, norm_weight, eps, weight, folded=folded)
    check(x, weight, bias=bias)
    if torch.compiler.is_compiling():  # and fusing by itself
        return F.linear(normalise(x, norm_weight, eps), weight, bias)
    if torch.is_grad_enabled() and needs_grad(x, norm_weight, weight, bias):
        return NormLinear.apply(x, norm_weight, eps, weight, bias, folded)
    folded = fold(norm_weight, weight) if folded is None else folded
    return run(x, eps, folded, None, bias)


def norm_swiglu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    folded: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """silu(n G^T) * (n U^T) of normalised x, n = x / rms(x) * norm_weight; differentiable.

    Args:
        x: (..., K), as in `norm_linear`; so `norm_weight` and `eps`.
        gate: (N, K); it and `up` may be the two halves of one weight.
        up: (N, K).
        folded: both weights through `fold`, or None.

    Raises:
        ValueError: as in `norm_linear`.

    Returns:
        (..., N) in x's dtype; neither product is rounded or written.
    """
    folded_gate, folded_up = folded or (None, None)
    x, gate, up, folded_gate, folded_up = in_one_dtype(x, gate, up, folded_gate, folded_up)
    refuse(x, norm_weight, eps, gate, **{"folded[0]": folded_gate, "folded[1]": folded_up})
    check(x, gate, up=up)
    if torch.compiler.is_compiling():
        normed = normalise(x, norm_weight, eps)
        return F.silu(F.linear(normed, gate)) * F.linear(normed, up)
    if torch.is_grad_enabled() and needs_grad(x, norm_weight, gate, up):
        return NormSwiGLU.apply(x, norm_weight, eps, gate, up, folded_gate, folded_up)
    if folded_gate is None:
        folded_gate, folded_up = fold(norm_weight, gate), fold(norm_weight, up)
    return run(x, eps, folded_gate, folded_up, None)


def fold(norm_weight: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The weight (N, K) of a linear layer with its columns multiplied by the weight (K,) of the
    norm before it: rounded once, to the layer's dtype, and without gradient. To be kept as long as
    neither of the two changes.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.detach().to(wide) * norm_weight.detach().to(wide)).to(weight.dtype)


def normalise(x: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The norm by torch's operations, as the model's."""
    return norm_weight.type_as(x) * F.rms_norm(x, x.shape[-1:], eps=eps)


class NormLinear(torch.autograd.Function):
    """`norm_linear` for autograd: x is normalised anew in the backward, and so not kept."""

    @staticmethod
    def forward(ctx: Any, x, norm_weight, eps, weight, bias, folded) -> torch.Tensor:
        """Run the kernel."""
        ctx.save_for_backward(x, norm_weight, weight)
        ctx.eps = eps
        return run(x, eps, fold(norm_weight, weight) if folded is None else folded, None, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        """Of x, norm_weight, weight and bias."""
        x, norm_weight, weight = ctx.saved_tensors
        inputs, normed = normed_anew(ctx, x, norm_weight)
        dx, d_norm = through_norm(inputs, normed, dy @ weight)
        rows = dy.reshape(-1, dy.shape[-1])
        d_weight = rows.mT @ matrix(normed.detach()) if ctx.needs_input_grad[3] else None
        d_bias = rows.sum(0) if ctx.needs_input_grad[4] else None
        return dx, d_norm, None, d_weight, d_bias, None


class NormSwiGLU(torch.autograd.Function):
    """`norm_swiglu` for autograd: what leads to y is computed anew in the backward."""

    @staticmethod
    def forward(ctx: Any, x, norm_weight, eps, gate, up, folded_gate, folded_up) -> torch.Tensor:
        """Run the kernel."""
        ctx.save_for_backward(x, norm_weight, gate, up)
        ctx.eps = eps
        if folded_gate is None:
            folded_gate, folded_up = fold(norm_weight, gate), fold(norm_weight, up)
        return run(x, eps, folded_gate, folded_up, None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple:
        """Of x, norm_weight, gate and up."""
        x, norm_weight, *weights = ctx.saved_tensors
        inputs, normed = normed_anew(ctx, x, norm_weight)
        leaves = [t.detach().requires_grad_() for t in (normed, *weights)]
        with torch.enable_grad():
            y = F.silu(F.linear(leaves[0], leaves[1])) * F.linear(leaves[0], leaves[2])
        d_normed, d_gate, d_up = torch.autograd.grad(y, leaves, dy)
        return *through_norm(inputs, normed, d_normed), None, d_gate, d_up, None, None


def normed_anew(
    ctx: Any, x: torch.Tensor, norm_weight: torch.Tensor
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """(x, norm_weight) of a forward as leaves, those that need gradients; and the normalised x."""
    leaves = [t.detach().requires_grad_(n) for t, n in zip((x, norm_weight), ctx.needs_input_grad)]
    with torch.enable_grad():
        return leaves, normalise(leaves[0], leaves[1], ctx.eps)


def through_norm(
    leaves: list[torch.Tensor], normed: torch.Tensor, d_normed: torch.Tensor
) -> list[torch.Tensor | None]:
    """The gradients of those leaves that need them."""
    wanted = [t for t in leaves if t.requires_grad]
    found = iter(torch.autograd.grad(normed, wanted, d_normed) if wanted else ())
    return [next(found) if t.requires_grad else None for t in leaves]


def run(
    x: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """x weight^T / rms(x) + bias or, with `up`, silu(gate) * up of two such products, by a kernel;
    the weights are folded, the arguments checked.
    """
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if y.numel() == 0:
        return y
    a, b, up = matrix(x), matrix(weight), None if up is None else matrix(up)
    result = y.view(-1, y.shape[-1])
    bias = None if bias is None else bias.contiguous()
    on_hopper = all(suits_hopper(m) for m in (a, b, up, result) if m is not None)
    norm_gemm = rmsnorm_gemm_hopper.norm_gemm if on_hopper else portable_norm_gemm
    with devices.on_device(x):
        norm_gemm(a, b, result, float(eps), up=up, bias=bias)
    return y


def refuse(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    **folded: torch.Tensor | None,
) -> None:
    """Refuse what a product without a norm does not have, with a ValueError."""
    if weight.dim() == 2 and (norm_weight.shape != weight.shape[1:] or weight.shape[1] == 0):
        raise ValueError(
            f"norm_weight has shape {tuple(norm_weight.shape)} and the weight "
            f"{tuple(weight.shape)}; (K,) and (N, K) go together, K at least 1."
        )
    if norm_weight.device != x.device or not norm_weight.is_floating_point():
        raise ValueError(
            f"norm_weight is {norm_weight.dtype} on {norm_weight.device} and x on {x.device}; both "
            "must have one device, and a floating-point dtype."
        )
    if not eps >= 0:
        raise ValueError(f"eps={eps} is under a root with the mean square; 0 or more works.")
    for name, tensor in folded.items():
        if tensor is not None and (tensor.shape, tensor.device) != (weight.shape, x.device):
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)} on {tensor.device}; fold() of this weight "
                f"has {tuple(weight.shape)} on {x.device}."
            )


@triton.jit(do_not_specialize=["rows"])
def norm_gemm_kernel(
    a,
    b,
    up,
    c,
    bias,
    rows,
    columns,
    inner,
    a_stride,
    b_stride,
    up_stride,
    eps,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
):
    """A tile of C = A B^T, its rows divided by the root mean square of A's. As the kernel without
    a norm (portable.py), and `squares`.

    They have a loop of their own, which reads A once more: with both in one loop, the pipeline that
    Triton 3.6 makes of it for Hopper gave sums that changed from run to run.
    """
    row, column = rows_and_columns(tl.program_id(0), rows, columns, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = acc
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        wide = load_block(a, row, a_stride, k, rows, inner).to(tl.float32)
        squares += tl.sum(wide * wide, 1)
    for start in range(0, inner, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_block = load_block(a, row, a_stride, k, rows, inner)
        b_block = load_block(b, column, b_stride, k, columns, inner)
        acc = tl.dot(a_block, b_block.T, acc, input_precision="ieee")
        if up is not None:
            up_block = load_block(up, column, up_stride, k, columns, inner)
            acc_up = tl.dot(a_block, up_block.T, acc_up, input_precision="ieee")
    scale = tl.rsqrt(squares / inner + eps)[:, None]
    acc *= scale
    if up is not None:
        acc = acc / (1 + tl.exp(-acc)) * (acc_up * scale)
    if bias is not None:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    c_tile = c + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(c_tile, acc.to(c.dtype.element_ty), mask=inside)


launch_norm_gemm = Launcher(norm_gemm_kernel)


def portable_norm_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    eps: float,
    *,
    up: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> None:
    """c = a b^T / rms(a) (+ bias) or, with `up`, silu(gate) * up of two such products.

    Args:
        a: (M, K), contiguous rows.
        b: (N, K), contiguous rows.
        c: (M, N), contiguous, written.
        eps: added to the mean square under the root.
        up: (N, K), contiguous rows.
        bias: (N,), contiguous.
        config: tile sizes; None chooses.
    """
    config = config or default_config(a, up is not None)
    rows, columns = c.shape
    launch_norm_gemm(
        (cdiv(rows, config.rows) * cdiv(columns, config.columns),),
        (
            a,
            b,
            up,
            c,
            bias,
            rows,
            columns,
            a.shape[1],
            a.stride(0),
            b.stride(0),
            0 if up is None else up.stride(0),
            eps,
        ),
        {
            "BLOCK_M": config.rows,
            "BLOCK_N": config.columns,
            "BLOCK_K": config.block_k,
            "GROUP": config.group,
        },
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
