"""Linear layers of one token: y = norm(x) W^T, bound by the bytes of W.

A decoding step of one sequence multiplies every weight of the model with one token. The tensor
cores have nothing to do; the time is that of reading W once. So a program takes a few whole rows of
W and streams through them:

    W, N rows of K       program 0   ████████████████  rows 0 and 1
                         program 1   ████████████████  rows 2 and 3     x stays in the cache
                         ...

* Every weight is multiplied where it arrives and summed up in fp32. The threads of a program add
  their sums once, at the end of the rows.
* The norm before the layer costs no kernel: its root mean square is a factor of the whole output,
  so each program sums up the squares of x as it reads x, and divides at the end. Its weight
  multiplies x on the way, in fp32.
* What follows the layer costs no kernel either: the bias, the residual, the gate of SwiGLU, the
  rotary embedding and the write into the cache (gemv_qkv). The last three need two outputs that
  are far apart, gate i and up i, or i and i + head_dim / 2 of a head: a program reads both rows.

Between two kernels the memory stands still: a launch, a first load, a last sum. On Hopper, with
`overlap` (programmatic dependent launch), a program starts as soon as the kernel before leaves room
for it, asks for its first weights, which no kernel writes, and only then waits for x:

    the kernel before   ████████████▌ last sums
    this one                   launch │ weights ····▌ wait for x ▌████████████

With more tokens these functions leave the products to cuBLAS, which also reads W once then, and
fuse what is around them.

No atomics and one order of sums: same inputs, same bits. What tensors have to be is said and not
checked: `model.fused` is the only caller, in every step.

Sources: RMSNorm (arXiv:1910.07467), SwiGLU (arXiv:2002.05202), rotary embedding (arXiv:2104.09864);
griddepcontrol: NVIDIA's PTX ISA.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.dispatch.device import devices
from flash_versions.versions.tiles.rows import cdiv
from transformer.model.kernels.gate import gated, silu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Norm:
    """The RMSNorm before a layer: its weight (K,) and the epsilon under the root."""

    weight: Tensor
    eps: float


@triton.jit
def weight_tile(weight, row, index, K: tl.constexpr):
    """weight[row, index], (rows, BLOCK_K); 0 past the end of a row. Read once in a step."""
    address = weight + row[:, None] * K + index
    return tl.load(address, mask=index < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def first_weights(weight, row, K: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr):
    """The first weights of a program's rows. With OVERLAP they are all that is read before the
    kernel before is done: it is when this returns.
    """
    if OVERLAP:
        gdc_launch_dependents()
    w = weight_tile(weight, row, tl.arange(0, BLOCK_K)[None, :], K)
    if OVERLAP:
        gdc_wait()
    return w


@triton.jit
def project(x, norm_weight, eps, weight, row, w, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """norm(x) @ weight[row].T in fp32, (rows,); `w` are the first weights."""
    k = tl.arange(0, BLOCK_K)[None, :]
    sums = tl.zeros([row.shape[0], BLOCK_K], tl.float32)  # apart by k until the end
    squares = tl.zeros([1, BLOCK_K], tl.float32)
    for first in tl.range(0, K, BLOCK_K):
        index = first + k
        x_tile = tl.load(x + index, mask=index < K, other=0.0).to(tl.float32)
        following = weight_tile(weight, row, index + BLOCK_K, K)
        if norm_weight is not None:
            squares += x_tile * x_tile
            x_tile *= tl.load(norm_weight + index, mask=index < K, other=0.0).to(tl.float32)
        sums += w.to(tl.float32) * x_tile
        w = following
    y = tl.sum(sums, 1)
    if norm_weight is not None:
        y *= tl.rsqrt(tl.sum(squares, 1) / K + eps)
    return y


@triton.jit
def pairs(y, PAIRS: tl.constexpr):
    """The even and the odd elements of y (2 PAIRS,)."""
    return tl.split(tl.reshape(y, [PAIRS, 2]))


@triton.jit
def linear_kernel(
    x, norm_weight, eps, weight, bias, residual, y, outputs,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y (outputs,) = norm(x) @ weight.T + bias + residual."""
    output = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = tl.minimum(output, outputs - 1)
    w = first_weights(weight, row, K, BLOCK_K, OVERLAP)
    # Asked for here, what is added is there when the product is.
    added = tl.zeros([ROWS], tl.float32)
    if bias is not None:
        added += tl.load(bias + row).to(tl.float32)
    if residual is not None:
        added += tl.load(residual + row).to(tl.float32)
    found = added + project(x, norm_weight, eps, weight, row, w, K, BLOCK_K)
    tl.store(y + output, found.to(y.dtype.element_ty), mask=output < outputs)


@triton.jit
def swiglu_kernel(
    x, norm_weight, eps, weight, bias, y, outputs,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """y (outputs,) = silu(gate) * up; the weight holds the rows of the gate, then of up."""
    PAIRS: tl.constexpr = ROWS // 2
    index = tl.arange(0, ROWS)
    first = tl.program_id(0).to(tl.int64) * PAIRS
    row = tl.minimum(first + index // 2, outputs - 1) + index % 2 * outputs
    w = first_weights(weight, row, K, BLOCK_K, OVERLAP)
    found = project(x, norm_weight, eps, weight, row, w, K, BLOCK_K)
    if bias is not None:
        found += tl.load(bias + row).to(tl.float32)
    gate, up = pairs(found, PAIRS)
    output = first + tl.arange(0, PAIRS)
    tl.store(y + output, silu(gate, up).to(y.dtype.element_ty), mask=output < outputs)


def launch(kernel: Any, arguments: tuple, width: int, rows: int, overlap: bool) -> None:
    """Launch a kernel of this family on a weight of so many rows of `width`: `arguments`, then the
    constants that all of them share.
    """
    rows_of_tile, block_k, num_warps = choose_tile(rows, width)
    sizes = {"K": width, "ROWS": rows_of_tile, "BLOCK_K": block_k, "num_warps": num_warps}
    kernel[(cdiv(rows, rows_of_tile),)](*arguments, **sizes, **overlapping(overlap))


def overlapping(overlap: bool) -> dict[str, bool]:
    """What a launch is told of it: the kernel's constant, and to be early."""
    if overlap:
        return {"OVERLAP": True, "launch_pdl": True}
    return {"OVERLAP": False}


def choose_tile(rows: int, width: int) -> tuple[int, int, int]:
    """How a weight of so many rows of `width` is cut into programs, by measurements on an H200:
    rows of a program, elements of a row that are loaded at once, warps.

    A program that holds its rows whole has all its loads on their way at once. Where there are many
    rows, a thread takes 64 weights of them; where there are few, 32, so that there are twice as
    many programs.
    """
    padded = max(16, triton.next_power_of_2(width))
    block_k = min(padded, 4096 if width <= 8192 else 16384)
    many = rows > width
    rows_of_tile = (4 if many else 2) * (2 if padded <= 1024 else 1)
    of_a_warp = 32 * (64 if many else 32)
    return rows_of_tile, block_k, max(1, min(16, rows_of_tile * block_k // of_a_warp))


def parts_of(norm: Norm | None) -> tuple[Tensor | None, float]:
    """The norm's weight and epsilon, as kernels take them; None and 0 if there is no norm."""
    return (None, 0.0) if norm is None else (norm.weight, norm.eps)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm | None) -> Tensor:
    """norm(x) @ weight.T + bias of several tokens, by torch."""
    if norm is not None:
        x = F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)
    return F.linear(x, weight, bias)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    residual: Tensor | None = None,
    overlap: bool = False,
) -> Tensor:
    """norm(x) @ weight.T + bias + residual; sums in fp32, rounded once. No gradient.

    Args:
        x: (tokens, K) contiguous.
        weight: (N, K) contiguous, in x's dtype.
        bias: (N,), or None.
        norm: RMSNorm of x, or None.
        residual: (tokens, N) contiguous, or None; the result may take its place.
        overlap: start before the kernel before is done (compute capability 9.0 and later); the
            weight must not be its output.

    Returns:
        (tokens, N), in x's dtype.
    """
    norm_weight, eps = parts_of(norm)
    tokens, outputs = x.shape[0], weight.shape[0]
    if tokens > 1:
        if residual is not None and bias is None and norm is None:
            return torch.addmm(residual, x, weight.T, out=residual)
        y = product(x, weight, bias, norm)
        return y if residual is None else y + residual
    y = x.new_empty(1, outputs)
    arguments = (x, norm_weight, eps, weight, bias, residual, y, outputs)
    with devices.on_device(x):
        launch(linear_kernel, arguments, x.shape[1], outputs, overlap)
    return y


def swiglu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    overlap: bool = False,
) -> Tensor:
    """silu(gate) * up of norm(x); the other arguments are those of `linear`.

    Args:
        x: (tokens, K).
        weight: (2 N, K), the rows of the gate, then those of up.
        bias: (2 N,), or None.

    Returns:
        (tokens, N), in x's dtype.
    """
    norm_weight, eps = parts_of(norm)
    tokens, outputs = x.shape[0], weight.shape[0] // 2
    if tokens > 1:
        return gated(product(x, weight, bias, norm))
    y = x.new_empty(tokens, outputs)
    with devices.on_device(x):
        arguments = (x, norm_weight, eps, weight, bias, y, outputs)
        launch(swiglu_kernel, arguments, x.shape[1], 2 * outputs, overlap)
    return y
