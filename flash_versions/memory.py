"""The pointer world of FA1 and FA2: tensors as a pointer with strides, tiles as rows gathered from
them.

Tensors are addressed as (batch, head, row, dim) whatever their layout, so transposed views, slices
of a packed QKV and expanded tensors (stride 0) cost nothing; packed sequences are one batch with a
first row each; keys in pages are rows found through a table. Offsets are 64-bit: `batch * stride`
of a large cache passes 2^31 elements long before memory ends.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.launch import Launcher, placement
from flash_versions.request import Request

PLANNED = 128  # tiles of packed sequences that one program plans, and sequences that it looks at


class View(NamedTuple):
    """A tensor as a kernel receives it; strides in elements, the last dimension has stride 1.

    DIM and PADDED, the width of a row and of its tile, are compile-time constants.
    """

    ptr: Any
    batch_stride: Any
    head_stride: Any
    row_stride: Any
    DIM: Any = None
    PADDED: Any = None

    @classmethod
    def of(cls, x: torch.Tensor) -> "View":
        """The view of a (batch, length, heads, dim) tensor."""
        batch_stride, row_stride, head_stride, _ = x.stride()
        return cls(x, batch_stride, head_stride, row_stride, *tile_width(x.shape[3]))

    @classmethod
    def of_rows(cls, x: torch.Tensor) -> "View":
        """The view of a (batch, heads, length) tensor: one number per row, as the LSE."""
        return cls(x, *x.stride())


class Rows(NamedTuple):
    """The rows of one sequence and head in a tensor: row i < length is row first + i of (batch,
    head). A vector of heads gives each row of a tile its own.
    """

    batch: Any
    head: Any
    first: Any
    length: Any


class Sequences(NamedTuple):
    """Where the sequences lie; None where all are alike. See `api.attention`.

    With a block table, key j of sequence b is row j % page_size of page block_table[b, j //
    page_size], and a page is what a batch row is without.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    kv_lengths: Any
    kv_starts: Any
    block_table: Any
    block_table_stride: Any
    page_size: Any

    @classmethod
    def of(cls, request: Request) -> "Sequences":
        """The sequences of a request."""
        table = request.block_table
        return cls(
            request.cu_seqlens_q,
            request.cu_seqlens_k,
            request.kv_lengths,
            request.kv_starts,
            table,
            None if table is None else table.stride(0),
            None if table is None else request.k.shape[1],
        )


@cache
def tile_width(head_dim: int) -> tuple[tl.constexpr, tl.constexpr]:
    """A row's width and its tile's, for a kernel. The same two objects each time: a launch compares
    them with those of the launches before.
    """
    return tl.constexpr(head_dim), tl.constexpr(padded_head_dim(head_dim))


def cdiv(a: int, b: int) -> int:
    """a / b rounded up. (triton.cdiv takes microseconds on the host.)"""
    return -(-a // b)


def padded_head_dim(head_dim: int) -> int:
    """The tile width for a head dimension: a power of two, and at least the 16 that a tensor core
    multiplies.
    """
    return max(16, 1 << (head_dim - 1).bit_length())


@triton.jit
def query_rows(sequences, sequence, head, q_length):
    """The rows of a sequence's queries."""
    if sequences.cu_seqlens_q is None:
        return Rows(sequence, head, sequence * 0, q_length)
    else:
        first = tl.load(sequences.cu_seqlens_q + sequence).to(tl.int32)
        end = tl.load(sequences.cu_seqlens_q + sequence + 1).to(tl.int32)
        return Rows(sequence * 0, head, first, end - first)


@triton.jit
def key_rows(sequences, sequence, head, kv_length):
    """The rows of a sequence's keys; lengths and starts are clamped to 0 .. kv_length."""
    batch = sequence
    first = sequence * 0
    end = kv_length
    if sequences.cu_seqlens_k is not None:
        first = tl.load(sequences.cu_seqlens_k + sequence).to(tl.int32)
        end = tl.load(sequences.cu_seqlens_k + sequence + 1).to(tl.int32)
        if sequences.block_table is not None:
            end = tl.minimum(end - first, kv_length)
            first = first * 0
        else:
            batch = batch * 0
    if sequences.kv_lengths is not None:
        given = tl.load(sequences.kv_lengths + sequence)
        end = tl.minimum(tl.maximum(given, 0), kv_length).to(tl.int32)
    if sequences.kv_starts is not None:
        given = tl.load(sequences.kv_starts + sequence)
        first = tl.minimum(tl.maximum(given, 0), end).to(tl.int32)
    return Rows(batch, head, first, end - first)


def new_results(
    shape: tuple[int, ...], like: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> torch.Tensor:
    """Memory for results; of packed sequences 0, for rows may belong to none of them."""
    allocate = torch.empty if cu_seqlens is None else torch.zeros
    return allocate(shape, dtype=like.dtype, device=like.device)


class Tiles(NamedTuple):
    """The tiles of a request's queries or keys.

    Sequences of one length have `number` each. Packed ones share them by a plan, (number, 8) int32
    with one line for each tile: its sequence, its number there, the first row and the length of the
    sequence's queries, the same of its keys. The sequence is -1 where there is nothing to do.
    """

    number: int
    plan: torch.Tensor | None

    @classmethod
    def of_queries(cls, request: Request, block: int, group: int) -> "Tiles":
        """Tiles of `block` rows, `group` rows to a query. Where later queries see more keys, the
        last tile of each sequence comes first.
        """
        cu_seqlens, last_first = request.cu_seqlens_q, request.window_right is not None
        return cls._of(request, request.q.shape[1], group, block, cu_seqlens, last_first)

    @classmethod
    def of_keys(cls, request: Request, block: int) -> "Tiles":
        """Tiles of `block` keys."""
        return cls._of(request, request.k.shape[1], 1, block, request.cu_seqlens_k, False)

    @classmethod
    def _of(
        cls,
        request: Request,
        length: int,
        group: int,
        block: int,
        cu_seqlens: torch.Tensor | None,
        last_first: bool,
    ) -> "Tiles":
        if cu_seqlens is None:
            return cls(cdiv(length * group, block), None)
        count = length * group // block + request.batch
        plan = torch.empty((count, 8), dtype=torch.int32, device=cu_seqlens.device)
        launch_plan(
            (
                plan.device,
                request.k.shape[1] if request.block_table is not None else None,
                *map(placement, (cu_seqlens, *Sequences.of(request)[:5])),
            ),
            (cdiv(count, PLANNED),),
            (
                plan,
                cu_seqlens,
                Sequences.of(request),
                request.q.shape[1],
                request.max_kv_length,
                request.batch,
                count,
            ),
            {"GROUP": group, "BLOCK": block, "LAST_FIRST": last_first, "PLANNED": PLANNED},
        )
        return cls(count, plan)


@triton.jit(do_not_specialize=["q_length", "kv_length", "batch", "count"])
def plan_kernel(
    plan,
    cu_seqlens,
    sequences,
    q_length,
    kv_length,
    batch,
    count,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """Plan PLANNED tiles of packed sequences, without asking how many each sequence has.

    Those of sequence b begin at cu_seqlens[b] * GROUP // BLOCK + b, which leaves room for all of
    its own; so a tile belongs to the last sequence that begins at or before it.
    """
    line = tl.program_id(0) * PLANNED + tl.arange(0, PLANNED)
    tile = count - 1 - line if LAST_FIRST else line
    begun = tl.zeros([PLANNED], tl.int32)
    for first in range(0, batch, PLANNED):
        b = first + tl.arange(0, PLANNED)
        start = tl.load(cu_seqlens + b, mask=b < batch, other=0).to(tl.int64)
        begins = (start * GROUP // BLOCK).to(tl.int32) + b
        at_or_before = (begins[None, :] <= tile[:, None]) & (b < batch)[None, :]
        begun += tl.sum(at_or_before.to(tl.int32), 1)
    sequence = tl.maximum(begun - 1, 0)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    tile -= (start * GROUP // BLOCK).to(tl.int32) + sequence
    has_rows = (begun > 0) & (tile * BLOCK < length * GROUP)
    rows = query_rows(sequences, sequence, 0, q_length)
    keys = key_rows(sequences, sequence, 0, kv_length)
    target, exists = plan + 8 * line, line < count
    tl.store(target, tl.where(has_rows, sequence, -1), mask=exists)
    tl.store(target + 1, tile, mask=exists)
    tl.store(target + 2, rows.first, mask=exists)
    tl.store(target + 3, rows.length, mask=exists)
    tl.store(target + 4, keys.first, mask=exists)
    tl.store(target + 5, keys.length, mask=exists)


launch_plan = Launcher(plan_kernel)


@triton.jit
def find_tile(
    program, plan, sequences, q_length, kv_length, heads, tiles, LAST_FIRST: tl.constexpr
):
    """The work of a program: (tile, sequence, Rows of its queries, Rows of its keys), the head
    being that of the keys.

    Neighbours work on one head, and share its keys; of packed sequences on the heads of one tile:
    there, all tiles of one head would be far apart in memory.
    """
    if plan is not None:
        head = program % heads
        line = plan + program // heads * 8
        tile, sequence = tl.load(line + 1), tl.load(line)
        rows = Rows(sequence, head, tl.load(line + 2), tl.load(line + 3))
        keys = Rows(sequence, head, tl.load(line + 4), tl.load(line + 5))
        if sequences.cu_seqlens_q is not None:
            rows = Rows(sequence * 0, head, rows.first, rows.length)
        if sequences.cu_seqlens_k is not None and sequences.block_table is None:
            keys = Rows(sequence * 0, head, keys.first, keys.length)
        return tile, sequence, rows, keys
    else:
        tile = program % tiles
        if LAST_FIRST:
            tile = tiles - 1 - tile
        head = (program // tiles) % heads
        sequence = program // tiles // heads
        rows = query_rows(sequences, sequence, head, q_length)
        return tile, sequence, rows, key_rows(sequences, sequence, head, kv_length)


@triton.jit
def rows_in_pages(sequences, rows, index):
    """Rows of keys for these indices: with a block table, each in its page; else as they are."""
    if sequences.block_table is not None:
        row = rows.first + index
        entry = rows.batch.to(tl.int64) * sequences.block_table_stride + row // sequences.page_size
        page = tl.load(sequences.block_table + entry, mask=index < rows.length, other=0)
        return Rows(page, rows.head, row % sequences.page_size - index, rows.length)
    else:
        return rows


@triton.jit
def row_pointers(view, rows, index):
    """Pointers to the first element of rows `index`."""
    start = rows.batch.to(tl.int64) * view.batch_stride + rows.head.to(tl.int64) * view.head_stride
    start += tl.cast(rows.first, tl.int64) * view.row_stride  # first may be a constant
    return view.ptr + start + index.to(tl.int64) * view.row_stride


@triton.jit
def load_rows(view, rows, index, MASKED: tl.constexpr):
    """Rows `index` as an (index, PADDED) tile; dims past DIM read as 0, and rows past the length if
    MASKED.
    """
    dim = tl.arange(0, view.PADDED)
    ptrs = row_pointers(view, rows, index)[:, None] + dim[None, :]
    if MASKED:
        mask = (index < rows.length)[:, None] & (dim < view.DIM)[None, :]
        return tl.load(ptrs, mask=mask, other=0.0)
    elif view.DIM < view.PADDED:
        return tl.load(ptrs, mask=(dim < view.DIM)[None, :], other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_rows(view, rows, index, tile):
    """Write an (index, PADDED) tile in the dtype of its target, without the padding and the rows
    past the length.
    """
    dim = tl.arange(0, view.PADDED)
    ptrs = row_pointers(view, rows, index)[:, None] + dim[None, :]
    mask = (index < rows.length)[:, None] & (dim < view.DIM)[None, :]
    tl.store(ptrs, tile.to(ptrs.dtype.element_ty), mask=mask)


@triton.jit
def store_row_values(view, rows, index, values):
    """Write one number per row, without the rows past the length."""
    tl.store(row_pointers(view, rows, index), values, mask=index < rows.length)


@triton.jit
def load_row_values(view, rows, index, other):
    """One number per row; `other` for the rows past the length."""
    return tl.load(row_pointers(view, rows, index), mask=index < rows.length, other=other)
