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

Two kernels do this. That of portable.py, in Triton, runs everywhere; rmsnorm_hopper.py has A pass
through registers on its way to Hopper's tensor cores. For a handful of rows, as in decoding,
decode/gemv.py is the better one: there the time is that of reading W.

The gradient is that of the formula, in plain PyTorch: x is normalised again, nothing else is kept.

Source: Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from transformer.model.kernels.gemm.gemm import Norm, check, in_one_dtype, product


def norm_linear(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    folded: Tensor | None = None,
) -> Tensor:
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
    norm = norm_of(x, norm_weight, eps, weight, None, (folded, None))
    return product(x, weight, None, bias, None, norm)


def norm_swiglu(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    gate: Tensor,
    up: Tensor,
    *,
    folded: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
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
    x, gate, up, *halves = in_one_dtype(x, gate, up, *(folded or (None, None)))
    return product(x, gate, up, None, None, norm_of(x, norm_weight, eps, gate, up, halves))


def fold(norm_weight: Tensor, weight: Tensor) -> Tensor:
    """The weight (N, K) of a linear layer with its columns multiplied by the weight (K,) of the
    norm before it: rounded once, to the layer's dtype, and without gradient. To be kept as long as
    neither of the two changes.
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.detach().to(wide) * norm_weight.detach().to(wide)).to(weight.dtype)


def norm_of(
    x: Tensor,
    norm_weight: Tensor,
    eps: float,
    weight: Tensor,
    up: Tensor | None,
    folded: Sequence[Tensor | None],
) -> Norm:
    """The norm, with weights that were folded before or are folded now; a ValueError for what does
    not fit the product.
    """
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
    for tensor in folded:
        if tensor is not None and (tensor.shape, tensor.device) != (weight.shape, x.device):
            raise ValueError(
                f"folded has shape {tuple(tensor.shape)} on {tensor.device}; fold() of this weight "
                f"has {tuple(weight.shape)} on {x.device}."
            )
    whole, half = folded
    if whole is None:
        check(x, weight, up=up)
        whole, half = fold(norm_weight, weight), None if up is None else fold(norm_weight, up)
    return Norm(norm_weight, eps, (whole, half))
