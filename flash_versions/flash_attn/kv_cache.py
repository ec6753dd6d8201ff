"""A cache of keys and values that grows in place, and the rotary embedding of what goes into it.

The cache is a tensor that the caller keeps, (batch, N, kv_heads, head_dim), or pages of it. The new
tokens of sequence b go to its slots cache_seqlens[b], cache_seqlens[b] + 1, ... One kernel turns
the keys and writes both; the lengths stay on the device, so a decoding step never waits for them
and can be a CUDA graph.

Source: `flash_attn_with_kvcache` of FlashAttention 2. Rotary embedding: Su et al. 2021, RoFormer,
arXiv:2104.09864.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.precision import NAMES, is_fp8
from flash_versions.dispatch.request import check_integers
from flash_versions.dispatch.sizes import padded_head_dim
from flash_versions.flash_attn.packing import places_of
from flash_versions.versions.tiles.rows import Rows, View, cdiv, load_rows, row_pointers, store_rows

DTYPES = (torch.float32, torch.float16, torch.bfloat16, *NAMES)
COUNTS = ["max_pages", "num_pages", "page_size", "new", "kv_heads", "rows"]


class Rotary(NamedTuple):
    """Tables of cosines and sines, one row for each position, as a kernel receives them."""

    cos: Any
    sin: Any
    cos_stride: Any
    sin_stride: Any
    PAIRS: Any
    INTERLEAVED: Any


@triton.jit
def turn_rows(view, rows, index, tile, position, rotary):
    """A tile of rows, turned by the angles of their positions, in fp32."""
    dim = tl.arange(0, view.PADDED)
    if rotary.INTERLEAVED:
        pair = dim // 2
        is_first = dim % 2 == 0
        partner = tl.where(is_first, dim + 1, dim - 1)
    else:
        pair = dim % rotary.PAIRS
        is_first = dim < rotary.PAIRS
        partner = tl.where(is_first, dim + rotary.PAIRS, dim - rotary.PAIRS)
    turns = (dim < 2 * rotary.PAIRS)[None, :]
    mask = (index < rows.length)[:, None] & turns
    ptrs = row_pointers(view, rows, index)[:, None] + partner[None, :]
    partner_tile = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    cos = rotary.cos + (position * rotary.cos_stride)[:, None] + pair[None, :]
    sin = rotary.sin + (position * rotary.sin_stride)[:, None] + pair[None, :]
    cos = tl.load(cos, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin, mask=mask, other=0.0).to(tl.float32)
    sin = tl.where(is_first[None, :], -sin, sin)
    tile = tile.to(tl.float32)
    return tl.where(turns, tile * cos + partner_tile * sin, tile)


@triton.jit(do_not_specialize=COUNTS)
def append_kernel(
    k_cache, v_cache, k, v, cache_seqlens, sequences, block_table, rotary, max_pages, num_pages,
    page_size, new, kv_heads, rows,
    BLOCK_ROWS: tl.constexpr
):  # fmt: skip
    """One program for BLOCK_ROWS rows of the new k and v; a row is one head of one token.

    `sequences` has the row of the table for each batch row; None: its own. Rows, and what follows
    from them, are 64-bit numbers.
    """
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    head = row % kv_heads
    token = row // kv_heads % new
    batch = tl.minimum(row, rows - 1) // kv_heads // new
    slot = tl.load(cache_seqlens + batch) + token
    fits = (row < rows) & (slot >= 0) & (slot < max_pages * page_size)
    slot = tl.where(fits, slot, 0)
    page = batch
    if sequences is not None:
        page = tl.load(sequences + batch, mask=fits, other=0).to(tl.int64)
    if block_table is not None:
        entry = block_table + page * max_pages + slot // page_size
        page = tl.load(entry, mask=fits, other=-1).to(tl.int64)
    fits = fits & (page >= 0) & (page < num_pages)
    page = tl.where(fits, page, 0)
    index = tl.where(fits, slot % page_size, 0)
    source = Rows(batch, head, slot * 0, tl.where(fits, new, 0))
    target = Rows(page, head, slot * 0, tl.where(fits, page_size, 0))

    k_tile = load_rows(k, source, token, MASKED=True)
    if rotary is not None:
        k_tile = turn_rows(k, source, token, k_tile, slot, rotary)
    store_rows(k_cache, target, index, k_tile)
    store_rows(v_cache, target, index, load_rows(v, source, token, MASKED=True))


launch_append = Launcher(append_kernel)


@torch.library.custom_op("flash_versions::append_to_cache", mutates_args=("k_cache", "v_cache"))
def append_op(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    sequences: torch.Tensor | None,
    block_table: torch.Tensor | None,
    rotary_cos: torch.Tensor | None,
    rotary_sin: torch.Tensor | None,
    rotary_interleaved: bool,
) -> None:
    """`append_to_cache` after its checks: one opaque call for torch.compile."""
    if reason := devices.limits(k.device, "k"):
        raise ValueError(reason)
    batch, new, kv_heads, _ = k.shape
    rows = batch * new * kv_heads
    if rows == 0:
        return
    if is_fp8(k):  # bits to copy, on a GPU that knows no such numbers, too
        k_cache, v_cache, k, v = (x.view(torch.int8) for x in (k_cache, v_cache, k, v))
    rotary = None
    if rotary_cos is not None and rotary_sin is not None:
        rotary = Rotary(
            rotary_cos,
            rotary_sin,
            rotary_cos.stride(0),
            rotary_sin.stride(0),
            tl.constexpr(rotary_cos.shape[1]),
            tl.constexpr(rotary_interleaved),
        )
    block_rows = max(1, 2048 // max(padded_head_dim(x.shape[3]) for x in (k, v)))
    where = (cache_seqlens, sequences, block_table)
    with devices.on_device(k):
        launch_append(
            (cdiv(rows, block_rows),),
            (
                View.of(k_cache), View.of(v_cache), View.of(k), View.of(v), *where, rotary,
                1 if block_table is None else block_table.shape[1], k_cache.shape[0],
                k_cache.shape[1], new, kv_heads, rows
            ),
            {"BLOCK_ROWS": block_rows},
        )  # fmt: skip


@append_op.register_fake
def append_nothing(*_: Any) -> None:
    """The operator returns nothing and writes into memory that exists."""


def append_to_cache(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cache_seqlens: torch.Tensor,
    *,
    block_table: torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    rotary_interleaved: bool = True,
    cu_seqlens_k_new: torch.Tensor | None = None,
) -> None:
    """Write new keys and values into a cache, in place; the keys turned by their positions.

    Token i of sequence b goes to slot cache_seqlens[b] + i, and is turned by that angle. A token
    past the end of the cache (or before slot 0, or in a page that does not exist) is dropped, and
    so is one of no sequence: the values of cache_seqlens, block_table and cu_seqlens_k_new are not
    read on the host. Of two sequences with one cache_batch_idx, either may be written. No gradient.

    The arguments are those of `flash_attn_with_kvcache`, with tensors of one dtype: float32,
    float16, bfloat16 or 8-bit floats.

    Raises:
        ValueError: an argument is malformed; the sentence names it.
    """
    check_integers("cu_seqlens_k_new", cu_seqlens_k_new, ("batch + 1",), k.device)
    batch = k.shape[0] if cu_seqlens_k_new is None else cu_seqlens_k_new.shape[0] - 1
    block_table = as_block_table(block_table, cache_batch_idx, batch, k.device)
    _check_new_rows(k_cache, v_cache, k, v, block_table, batch, cu_seqlens_k_new is not None)
    check_integers("cache_seqlens", cache_seqlens, (batch,), k.device)
    if rotary_cos is not None or rotary_sin is not None:
        _check_rotary(rotary_cos, rotary_sin, k, capacity_of(k_cache, block_table))
    sequences = None
    if cu_seqlens_k_new is not None:  # every token by itself: it knows its sequence and its slot
        sequences, place = places_of(cu_seqlens_k_new, k.shape[0])
        before = torch.nn.functional.pad(cache_seqlens, (0, 1), value=-k.shape[0])
        cache_seqlens = before[sequences] + place
        k, v = k[:, None], v[:, None]
    append_op(
        k_cache,
        v_cache,
        *(x if x.stride(3) == 1 else x.contiguous() for x in (k, v)),
        cache_seqlens.contiguous(),
        sequences,
        None if block_table is None else block_table.contiguous(),
        rotary_cos,
        rotary_sin,
        rotary_interleaved,
    )


def rotate(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = True,
) -> torch.Tensor:
    """Rotary embedding: x with every pair of dimensions turned by its position's angle.

    Computed in fp32 (fp64 for fp64) and rounded once. Differentiable.

    Args:
        x: (batch, length, heads, head_dim).
        cos: (positions, rotary_dim / 2); dimensions of x from rotary_dim on stay as they are.
        sin: like cos.
        positions: (batch, length) integers; clamped to the table.
        interleaved: pairs are the dimensions 2i and 2i + 1, else i and i + rotary_dim / 2.

    Returns:
        A new tensor like x.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    positions = positions.clamp(0, cos.shape[0] - 1)
    cos, sin = (table[positions][:, :, None].to(wide) for table in (cos, sin))
    turned, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], -1)
    pairs, pair_dim = ((-1, 2), -1) if interleaved else ((2, -1), -2)
    a, b = turned.to(wide).unflatten(-1, pairs).unbind(pair_dim)
    turned = torch.stack((a * cos - b * sin, a * sin + b * cos), pair_dim).flatten(-2)
    return torch.cat((turned.to(x.dtype), rest), -1)


def as_block_table(
    block_table: torch.Tensor | None,
    cache_batch_idx: torch.Tensor | None,
    batch: int,
    device: torch.device,
) -> torch.Tensor | None:
    """Where so many sequences lie, as a block table: without one, a row of a cache is a page that
    holds a whole sequence; with both, sequence b has row cache_batch_idx[b] of the table.
    """
    rows = batch if cache_batch_idx is None else "rows"
    check_integers("block_table", block_table, (rows, "pages of a row"), device)
    check_integers("cache_batch_idx", cache_batch_idx, (batch,), device)
    if cache_batch_idx is None:
        return block_table
    return cache_batch_idx[:, None] if block_table is None else block_table[cache_batch_idx.long()]


def capacity_of(cache: torch.Tensor, block_table: torch.Tensor | None) -> int:
    """Slots of one sequence."""
    return cache.shape[1] if block_table is None else block_table.shape[1] * cache.shape[1]


def _check_new_rows(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    batch: int,
    packed: bool,
) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache), ("k", k), ("v", v)):
        if packed and name in ("k", "v"):
            if x.dim() != 3:
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}; with cu_seqlens_k_new it must be (total, "
                    f"heads, head_dim)."
                )
        elif x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (batch, length, heads, head_dim)."
            )
        if x.dtype not in DTYPES or x.dtype != k_cache.dtype:
            raise ValueError(
                f"{name} has dtype {x.dtype}, k_cache has {k_cache.dtype}; use float32, float16, "
                f"bfloat16 or an 8-bit float for all."
            )
        if x.device != k.device:
            raise ValueError(f"{name} is on {x.device}, k is on {k.device}; use one device.")
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.shape[3] > 1 and x.stride(3) != 1:
            raise ValueError(
                f"{name} has stride {x.stride(3)} in its last dimension, which must be contiguous "
                f"(stride 1): it is written in place."
            )
    if v_cache.shape[:3] != k_cache.shape[:3]:
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)} and v_cache {tuple(v_cache.shape)}; they "
            f"may differ in the last dimension only."
        )
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x.shape[:-2] != k.shape[:-2] or x.shape[-2:] != cache.shape[2:]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; for this cache it must be "
                f"{(*k.shape[:-2], *cache.shape[2:])}."
            )
    if block_table is None and batch != k_cache.shape[0]:
        raise ValueError(
            f"k has {batch} sequences and k_cache {k_cache.shape[0]}; they must be the same "
            f"without cache_batch_idx and block_table."
        )


def _check_rotary(
    rotary_cos: torch.Tensor | None, rotary_sin: torch.Tensor | None, k: torch.Tensor, capacity: int
) -> None:
    if rotary_cos is None or rotary_sin is None:
        raise ValueError("rotary_cos and rotary_sin go together; one of them is None.")
    if is_fp8(k):
        raise ValueError(
            f"rotary_cos was given and k has dtype {k.dtype}, which would be rounded once more; "
            f"turn q and k before they are quantised."
        )
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin)):
        if x.dim() != 2 or x.shape != rotary_cos.shape or not 0 < 2 * x.shape[1] <= k.shape[-1]:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; both must be (positions, rotary_dim / 2), "
                f"with a rotary_dim from 2 to k's head_dim {k.shape[-1]}."
            )
        if x.shape[0] < capacity:
            raise ValueError(
                f"{name} has {x.shape[0]} positions; the cache has {capacity} slots, each of which "
                f"needs one."
            )
        if not x.is_floating_point() or x.device != k.device or x.stride(1) != 1:
            raise ValueError(
                f"{name} has dtype {x.dtype}, device {x.device} and strides {x.stride()}; it must "
                f"be a float tensor on {k.device} with a contiguous last dimension."
            )
