"""From hidden states to heads in one kernel: norm, projection, rotary embedding, cache.

A decoding step turns a few queries and keys and writes a few hundred bytes into the cache: nothing,
beside the launches that it takes. So for one token the projection does it, before its sums leave
the registers. A rotation turns the dims i and i + head_dim / 2 of a head together, so a program
takes pairs of rows of the weight that lie this far apart (see `gemv`).

Qwen3 norms each head before it is turned, and a program does not see a whole head. There, and with
more tokens, the projection comes first and a kernel of its own does the rest.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.dispatch.device import devices
from flash_versions.versions.tiles.rows import cdiv
from transformer.model.kernels.decode.gemv import (
    Norm,
    first_weights,
    launch,
    linear,
    overlapping,
    pairs,
    parts_of,
    project,
)
from transformer.model.kernels.gemm import gemm
from transformer.model.kernels.norm import norm_in_place

MANY_TOKENS = 256  # keep a GPU busy with one program each


class Heads(NamedTuple):
    """Where heads go, as a kernel receives it; see `qkv`."""

    q: Any
    cache: Any
    half_stride: Any  # from keys to values
    page_stride: Any
    page_size: Any
    block_table: Any
    lengths: Any
    starts: Any
    table: Any
    QUERY: Any
    KV: Any
    HALF: Any  # of head_dim


@triton.jit
def angles(heads, new, token, head, dim, inside):
    """Row, slot, cosine and sine for the dims (`dim`, `dim` + HALF) of heads, which broadcast to a
    tile; 0 degrees for values.

    Heads are counted through: those of the queries, then of the keys, then of the values; so are
    tokens, row by row, `new` of each. A token's slot is its position, behind the row's start.
    """
    row = token // new
    length = tl.load(heads.lengths + row).to(tl.int64)
    slot = length - new + token % new
    position = slot
    if heads.starts is not None:
        position += tl.load(heads.starts + row)
    angle = heads.table + position * (4 * heads.HALF) + dim  # a row: cosine twice, -sine, sine
    turned = inside & (head < heads.QUERY + heads.KV)
    cos = tl.load(angle, mask=turned, other=1.0).to(tl.float32)
    sin = tl.load(angle + 3 * heads.HALF, mask=turned, other=0.0).to(tl.float32)
    return row, slot, cos, sin


@triton.jit
def product(x, y, DTYPE: tl.constexpr):
    """x y, rounded to a dtype, as `rope.rotate` rounds it. A plain product and the sum behind it
    would become one FMA, on Hopper also in bf16, and the product would not be rounded.
    """
    return tl.fma(x, y, tl.zeros_like(x)).to(DTYPE).to(tl.float32)


@triton.jit
def turn_and_store(
    heads, max_pages, one, other, row, slot, cos, sin, token, head, dim, inside, EXACT: tl.constexpr
):
    """Turn pairs of dims by their angles, round, and store: queries to q, keys and values to their
    slots in the cache.
    """
    HALF: tl.constexpr = heads.HALF
    DTYPE: tl.constexpr = heads.q.dtype.element_ty
    if EXACT:
        first = (product(one, cos, DTYPE) - product(other, sin, DTYPE)).to(DTYPE)
        second = (product(other, cos, DTYPE) + product(one, sin, DTYPE)).to(DTYPE)
    else:
        first = (one * cos - other * sin).to(DTYPE)
        second = (other * cos + one * sin).to(DTYPE)

    to_query = heads.q + (token * heads.QUERY + head) * (2 * HALF) + dim
    is_query = inside & (head < heads.QUERY)
    tl.store(to_query, first, mask=is_query)
    tl.store(to_query + HALF, second, mask=is_query)

    page = row.to(tl.int64)
    if heads.block_table is not None:
        page = tl.load(heads.block_table + row * max_pages + slot // heads.page_size)
        page, slot = page.to(tl.int64), slot % heads.page_size
    kv_head = head - heads.QUERY
    to_cache = heads.cache + kv_head // heads.KV * heads.half_stride + page * heads.page_stride
    to_cache += (slot * heads.KV + kv_head % heads.KV) * (2 * HALF) + dim
    is_cached = inside & (head >= heads.QUERY)
    tl.store(to_cache, first, mask=is_cached)
    tl.store(to_cache + HALF, second, mask=is_cached)


@triton.jit(do_not_specialize=["max_pages"])
def qkv_kernel(
    x, norm_weight, eps, weight, bias, heads, max_pages,
    K: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """norm(x) @ weight.T + bias, cut into heads, turned and stored; see `qkv`."""
    PAIRS: tl.constexpr = ROWS // 2
    HALF: tl.constexpr = heads.HALF
    ALL: tl.constexpr = (heads.QUERY + 2 * heads.KV) * HALF
    index = tl.arange(0, ROWS)
    first = tl.program_id(0) * PAIRS
    pair = tl.minimum(first + index // 2, ALL - 1).to(tl.int64)
    row = pair // HALF * (2 * HALF) + pair % HALF + index % 2 * HALF
    w = first_weights(weight, row, K, BLOCK_K, OVERLAP)
    pair = first + tl.arange(0, PAIRS)
    head, dim, inside = pair // HALF, pair % HALF, pair < ALL
    # Asked for here, the angles are there when the product is.
    place, slot, cos, sin = angles(heads, 1, 0, head, dim, inside)
    found = project(x, norm_weight, eps, weight, row, w, K, BLOCK_K)
    if bias is not None:
        found += tl.load(bias + row).to(tl.float32)
    one, other = pairs(found, PAIRS)
    turn_and_store(heads, max_pages, one, other, place, slot, cos, sin, 0, head, dim, inside, False)


@triton.jit
def norm_weight(q_norm, k_norm, heads, head, dim, inside):
    """What the dims of heads are multiplied by behind their norm; values have none."""
    is_query = inside & (head < heads.QUERY)
    is_key = inside & (head >= heads.QUERY) & (head < heads.QUERY + heads.KV)
    of_query = tl.load(q_norm + dim, mask=is_query, other=0.0).to(tl.float32)
    return of_query + tl.load(k_norm + dim, mask=is_key, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["new", "max_pages"])
def place_kernel(
    projected, q_norm, k_norm, eps, heads, new, max_pages,
    HEADS: tl.constexpr, PADDED: tl.constexpr, EXACT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for some heads of one token: norm, turn, store."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    HALF: tl.constexpr = heads.HALF
    ALL: tl.constexpr = heads.QUERY + 2 * heads.KV
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    dim = tl.arange(0, PADDED)[None, :]
    inside = (head < ALL) & (dim < HALF)
    source = projected + (token * ALL + head) * (2 * HALF) + dim
    one = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    if q_norm is not None:
        squares = tl.sum(one * one + other * other, 1)
        scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
        of_one = norm_weight(q_norm, k_norm, heads, head, dim, inside)
        of_other = norm_weight(q_norm + HALF, k_norm + HALF, heads, head, dim, inside)
        is_value = head >= heads.QUERY + heads.KV
        one = tl.where(is_value, one, one * scale * of_one)
        other = tl.where(is_value, other, other * scale * of_other)
    row, slot, cos, sin = angles(heads, new, tl.program_id(0), head, dim, inside)
    turn_and_store(
        heads, max_pages, one, other, row, slot, cos, sin, token, head, dim, inside, EXACT
    )


def qkv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cache: Tensor,
    lengths: Tensor,
    table: Tensor,
    *,
    block_table: Tensor | None = None,
    starts: Tensor | None = None,
    norm: Norm | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    exact: bool = False,
    overlap: bool = False,
) -> Tensor:
    """Project, turn, and write keys and values into the cache. No gradient.

    Args:
        x: (tokens, K), the newest tokens of all rows of the batch, as many of each.
        weight: (heads + 2 kv_heads) head_dim rows of K: those of queries, keys, values.
        bias: one number for each of the rows, or None.
        cache: (2, batch, capacity, kv_heads, head_dim), keys and values of this layer, changed in
            place; its last three dimensions contiguous. With a block table, in pages: (2, pages,
            page_size, kv_heads, head_dim).
        lengths: (batch,) int32, tokens of each row with these: the last one's position plus one.
        table: see `transformer.model.rope.rotary_table`; as many positions as the rows are long.
        block_table: (batch, max_pages) int32, the pages of each row, or None.
        starts: (batch,) int32, the position of each row's first slot; None: 0.
        norm: of x, or None.
        q_norm: of each query head, or None; `k_norm` of each key head. Both or none.
        exact: a token's bits do not depend on the others, and are those of `rope.rotate` and
            `rms_norm`; x is normed already.
        overlap: see `gemv.linear`.

    Returns:
        Queries (batch, tokens / batch, heads, head_dim).

    Raises:
        ValueError: the cache has another dtype.
    """
    (x_norm, eps), (q_weight, q_eps) = parts_of(norm), parts_of(q_norm)
    tokens, batch = len(x), len(lengths)
    _, _, page_size, kv_heads, head_dim = cache.shape
    heads = weight.shape[0] // head_dim - 2 * kv_heads
    if cache.dtype != x.dtype:
        raise ValueError(
            f"the cache is {cache.dtype} but the model computes {x.dtype}: create it with"
            f" dtype={x.dtype}"
        )
    q = x.new_empty(batch, tokens // batch, heads, head_dim)
    place = Heads(
        q,
        cache,
        cache.stride(0),
        cache.stride(1),
        0 if block_table is None else page_size,
        block_table,
        lengths,
        starts,
        table,
        tl.constexpr(heads),
        tl.constexpr(kv_heads),
        tl.constexpr(head_dim // 2),
    )
    max_pages = 0 if block_table is None else block_table.shape[1]
    with devices.on_device(x):
        if tokens == 1 and q_norm is None and k_norm is None and not exact:
            arguments = (x, x_norm, eps, weight, bias, place, max_pages)
            launch(qkv_kernel, arguments, x.shape[1], weight.shape[0], overlap)
            return q
        all_heads = heads + 2 * kv_heads
        if exact:
            projected = gemm.linear(x, weight, bias)
            if q_norm is not None and k_norm is not None:
                each = projected.view(tokens, all_heads, head_dim)
                norm_in_place(each[:, :heads], q_norm.weight, q_norm.eps)
                norm_in_place(each[:, heads : heads + kv_heads], k_norm.weight, k_norm.eps)
                q_weight = None
        else:
            projected = linear(x, weight, bias, norm=norm, overlap=overlap)
        together = 1 if tokens < MANY_TOKENS else triton.next_power_of_2(all_heads)
        place_kernel[(tokens, cdiv(all_heads, together))](
            projected,
            q_weight,
            None if q_weight is None else parts_of(k_norm)[0],
            q_eps,
            place,
            tokens // batch,
            max_pages,
            HEADS=together,
            PADDED=triton.next_power_of_2(head_dim // 2),
            EXACT=exact,
            num_warps=1 if together == 1 else 4,
            **overlapping(overlap),
        )
    return q
