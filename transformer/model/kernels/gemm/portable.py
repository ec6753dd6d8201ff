"""C = A B^T in plain Triton: on any GPU from Ampere on, and simulated.

One program for each tile of C. Its loop multiplies blocks of A and B that Triton prefetches, and
ends with the same fusions as the kernel for Hopper (hopper.py): bias, residual, SwiGLU. Of
SwiGLU's two weights a program has a tile each, so two accumulators, and multiplies A with both.

With a norm the rows are also divided by the root mean square of A's. Their squares are
summed up in a loop of their own, which reads A once more: with both in one loop, the pipeline that
Triton 3.6 makes of it for Hopper gave sums that changed from run to run.

Source: the Triton tutorial on matrix multiplication.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.rows import cdiv


@triton.jit
def load_block(x, row, row_stride, k, rows, inner):
    """Rows `row` and columns `k` of a matrix, 0 outside of it."""
    pointers = x + row.to(tl.int64)[:, None] * row_stride + k[None, :]
    return tl.load(pointers, mask=(row < rows)[:, None] & (k < inner)[None, :], other=0.0)


@triton.jit
def rows_and_columns(
    tile, rows, columns, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr
):
    """Numbers of a tile's rows and columns: GROUP tiles down, then the next column of tiles, so
    that what is computed at one time shares A and B in the L2 cache.
    """
    down = tl.cdiv(rows, BLOCK_M)
    in_group = GROUP * tl.cdiv(columns, BLOCK_N)
    first = tile // in_group * GROUP
    height = tl.minimum(down - first, GROUP)
    row = (first + tile % in_group % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tile % in_group // height * BLOCK_N + tl.arange(0, BLOCK_N)
    return row, column


@triton.jit(do_not_specialize=["rows"])
def gemm_kernel(
    a, b, up, c, residual, bias, rows, columns, inner, a_stride, b_stride, up_stride, c_stride,
    residual_stride, eps,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """A tile of C; with `eps`, of a norm."""
    row, column = rows_and_columns(tl.program_id(0), rows, columns, BLOCK_M, BLOCK_N, GROUP)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc_up = acc
    squares = tl.zeros((BLOCK_M,), tl.float32)
    if eps is not None:
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
    if eps is not None:
        scale = tl.rsqrt(squares / inner + eps)[:, None]
        acc *= scale
        acc_up *= scale
    if up is not None:
        acc = acc / (1 + tl.exp(-acc)) * acc_up
    if bias is not None:
        acc += tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    row = row.to(tl.int64)[:, None]
    if residual is not None:
        added = tl.load(residual + row * residual_stride + column[None, :], mask=inside, other=0.0)
        acc += added.to(tl.float32)
    tl.store(c + row * c_stride + column[None, :], acc.to(c.dtype.element_ty), mask=inside)


launch_gemm = Launcher(gemm_kernel)


def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    up: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    eps: float | None = None,
) -> None:
    """As `hopper.gemm`, with any dtype and any matrices whose rows are contiguous."""
    # Blocks fit the shared memory of every GPU from Ampere on (99 KiB).
    height, width, depth, warps, stages = 128, 64 if up is not None else 128, 64, 8, 3
    if a.dtype == torch.float32:  # multiplied without tensor cores, from registers
        height, width, depth, warps, stages = 64, 64, 32, 4, 2
    rows, columns = c.shape
    matrices = (a, b, up, c, residual)
    strides = (0 if x is None else x.stride(0) for x in matrices)
    launch_gemm(
        (cdiv(rows, height) * cdiv(columns, width),),
        (*matrices, bias, rows, columns, a.shape[1], *strides, eps),
        {"BLOCK_M": height, "BLOCK_N": width, "BLOCK_K": depth, "GROUP": 8},
        num_warps=warps,
        num_stages=stages,
    )
