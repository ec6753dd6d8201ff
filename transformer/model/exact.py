"""Arithmetic in which a row's bits depend on that row only, for a model with kernels="exact".

A sum of floating-point numbers depends on its order, and libraries choose the order by the shape
of the whole call: one row goes another way through BLAS than 16 rows, cuBLAS splits the sums of a
small product. So a token's logits change with its batch, its padding, the chunk that it is read in,
and between decoding and prefill. Here the shape of the weights alone decides:

    on a GPU    products by the project's own kernel (kernels/gemm), which adds k in steps of 64 or
                less from the first one on, whatever tile it takes, so layers that read the same may
                be one product; norms by kernels/norm.py, SwiGLU's gate by kernels/gate.py
    on a CPU    rows padded to a multiple of 16 and k in pieces of 256: so far, BLAS has one order
                for all numbers of rows (`check_products` tries it on this machine), and on CPUs
                with AVX-512 for all numbers of threads

Attention is `flash_versions.attention` with batch_invariant=True, or, where kernels would be
simulated and nobody wants to read along, `attention_by_blocks`.
"""

import itertools
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import flash_versions
from transformer.model.kernels.gate import gated
from transformer.model.kernels.gemm import gemm
from transformer.model.kernels.norm import aligned, norm_reference, rms_norm

BLOCKS = "blocks"  # the name of `attention_by_blocks` among the versions
ROWS = 16  # a multiple of it goes through BLAS
PIECE = 256  # elements of a row; from some more on, BLAS adds in an order of its own
BLOCK = 64  # keys


def by_kernels(x: Tensor) -> bool:
    """Whether Triton's kernels compute on this tensor."""
    return x.is_cuda


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None
) -> Tensor:
    """x W^T + bias + residual, summed up in fp32 and rounded once; differentiable.

    Args:
        x: (..., K).
        weight: (N, K).
        bias: (N,), or None.
        residual: (..., N), or None.
    """
    if by_kernels(x):
        return gemm.linear(aligned(x), weight, bias, residual=residual)
    wide = torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(-1, x.shape[-1]).to(wide)
    y = pieces(F.pad(rows, (0, 0, 0, -len(rows) % ROWS)), weight.to(wide))[: len(rows)]
    y = y.view(*x.shape[:-1], len(weight))
    for added in (bias, residual):
        y = y if added is None else y + added
    return y.to(x.dtype)


def pieces(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, added piece by piece of the rows."""
    first, *others = zip(x.split(PIECE, 1), weight.split(PIECE, 1))
    y = F.linear(*first)
    for part, of_weight in others:
        y = torch.addmm(y, part, of_weight.mT)
    return y


@cache
def check_products(inputs: int, outputs: int) -> None:
    """Try whether this CPU's BLAS adds in one order for all numbers of rows.

    Raises:
        ValueError: it does not.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(outputs, inputs, generator=generator)
    row = torch.randn(1, inputs, generator=generator)
    rows = [linear(row.expand(count, -1), weight) for count in (1, ROWS, 5 * ROWS, 16 * ROWS)]
    if not torch.cat(rows).eq(rows[0]).all():
        raise ValueError(
            f"exact=True is not possible on this CPU: its products of {inputs} by {outputs} depend"
            " on the number of rows; a GPU, or another build of torch, works"
        )


def norm(x: Tensor, *given: Any) -> Tensor:
    """See `rms_norm`. On a CPU, torch sums each row by itself, up to 32,768 elements."""
    return rms_norm(x, *given) if by_kernels(x) else norm_reference(x, *given)


def sigmoid(x: Tensor) -> Tensor:
    """In fp32 at least. On a CPU torch's own has two functions, for most elements and for the last
    few of a tensor.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return torch.sigmoid(wide) if by_kernels(x) else 1 / (1 + torch.exp(-wide))


def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """silu(gate) * up; on a GPU also of one tensor with both side by side, see `gated`."""
    if by_kernels(gate):
        return gated(gate) if up is None else gated(gate, up)
    assert up is not None
    return (gate * sigmoid(gate)).type_as(gate) * up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, with the approximation of GELU by a tanh."""
    if by_kernels(gate):
        return F.gelu(gate, approximate="tanh") * up
    wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
    inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide * wide * wide)
    return (0.5 * wide * (1 + torch.tanh(inner))).type_as(gate) * up


def attention_of(name: str, exact: bool, **options: Any) -> Callable[..., Tensor]:
    """What a model is handed as its attention, by the name of a version."""
    if name == BLOCKS:
        return attention_by_blocks
    if exact:
        options["batch_invariant"] = True
    return partial(flash_versions.attention, version=name, **options)


def attention_by_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    kv_lengths: Tensor | None = None,
    scale: float | None = None,
    window: Any = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
    block_table: Tensor | None = None,
    query_ends: Tensor | None = None,
) -> Tensor:
    """Causal attention by torch's operations: products with blocks of keys, counted from a row's
    first key and added in their order. A block that a query does not see adds exact zeros.

    Arguments are those of `flash_versions.attention`; differentiable, O(M N) memory.
    """
    if block_table is not None:
        k, v = (x[block_table.long()].flatten(1, 2) for x in (k, v))
    (batch, m, _, dim), n, group = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    wide = torch.promote_types(q.dtype, torch.float32)
    q_rows = rearrange(q.to(wide), "b m (k g) d -> (b k) (m g) d", g=group)
    q_rows = F.pad(q_rows * (dim**-0.5 if scale is None else scale), (0, 0, 0, -m * group % ROWS))
    k, v = (F.pad(x.to(wide), (0, 0, 0, 0, 0, -n % BLOCK)) for x in (k, v))
    blocks = [rearrange(x, "b n k d -> (b k) n d").split(BLOCK, 1) for x in (k, v)]
    scores = torch.cat([torch.bmm(q_rows, block.mT) for block in blocks[0]], 2)
    scores = scores[:, : m * group].unflatten(0, (batch, -1)).unflatten(2, (m, group))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)

    ends = torch.full((batch,), n, device=q.device) if kv_lengths is None else kv_lengths
    key, query = torch.arange(k.shape[1], device=q.device), torch.arange(m, device=q.device)
    behind = (ends[:, None] - m + query)[..., None] - key  # how far the key lies behind the query
    seen = (behind >= 0) & (key < n)
    if window is not None and window[0] is not None:
        seen = seen & (behind <= window[0])
    if query_ends is not None:
        seen = seen & (query[:, None] < F.pad(query_ends, (0, -n % BLOCK)).view(-1, 1, k.shape[1]))
    scores = scores.masked_fill(~seen[:, None, :, None], -math.inf)  # batch, kv head, m, group, n
    largest = scores.detach().amax(-1, keepdim=True)
    if sink is not None:
        sink = sink.to(wide).view(1, -1, 1, group, 1)
        largest = torch.maximum(largest, sink.detach())
    largest = largest.masked_fill(largest == -math.inf, 0)
    weights = torch.exp(scores - largest).flatten(0, 1).flatten(1, 2)
    weights = F.pad(weights, (0, 0, 0, -m * group % ROWS)).split(BLOCK, 2)
    *_, o = itertools.accumulate(torch.bmm(p, block) for p, block in zip(weights, blocks[1]))
    *_, total = itertools.accumulate(p.contiguous().sum(-1, keepdim=True) for p in weights)
    o, total = (
        x[:, : m * group].unflatten(0, (batch, -1)).unflatten(2, (m, group)) for x in (o, total)
    )
    if sink is not None:
        total = total + torch.exp(sink - largest)
    o = o / total.masked_fill(total == 0, 1)
    return rearrange(o, "b k m g d -> b m (k g) d").to(q.dtype)
