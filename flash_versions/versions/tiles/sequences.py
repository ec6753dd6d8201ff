"""Where the sequences of a request lie: one length for all, packed behind each other, or with keys
in pages.

Packed sequences are one batch with a first row each; keys in pages are rows found through a table.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.request import Request
from flash_versions.versions.tiles.rows import Rows, constant


class Sequences(NamedTuple):
    """Where the sequences lie; None where all are alike. See `api.attention`.

    With a block table, key j of sequence b is row j % page_size of page block_table[b, j //
    page_size], and a page is what a batch row is without. PAGE_SIZE is a compile-time constant, so
    that no key costs a division.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    kv_lengths: Any
    kv_starts: Any
    block_table: Any
    block_table_stride: Any
    PAGE_SIZE: Any

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
            None if table is None else constant(request.k.shape[1]),
        )


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
    """The rows of a sequence's keys; lengths and starts are clamped to what there is."""
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
        end = first + tl.minimum(tl.maximum(given, 0), end - first).to(tl.int32)
    if sequences.kv_starts is not None:
        given = tl.load(sequences.kv_starts + sequence)
        first = tl.minimum(tl.maximum(given, 0), end).to(tl.int32)
    return Rows(batch, head, first, end - first)


@triton.jit
def rows_in_pages(sequences, rows, index):
    """Rows of keys for these indices: with a block table, each in its page; else as they are."""
    if sequences.block_table is not None:
        page = load_pages(sequences, rows, index)
        offset = (rows.first + index) % sequences.PAGE_SIZE - index
        return Rows(page, rows.head, offset, rows.length)
    else:
        return rows


@triton.jit
def load_pages(sequences, rows, index):
    """The pages of keys at these indices; 0 past the length."""
    entry = rows.batch.to(tl.int64) * sequences.block_table_stride
    entry += (rows.first + index) // sequences.PAGE_SIZE
    return tl.load(sequences.block_table + entry, mask=index < rows.length, other=0)


@triton.jit
def looked_up(sequences, j, BLOCK: tl.constexpr):
    """The keys of block j whose pages have to be known: the first one if no block is in two
    pages, else all. A sequence begins where a page does, unless it has a start.
    """
    if sequences.kv_starts is not None:
        return j * BLOCK + tl.arange(0, BLOCK)
    elif sequences.PAGE_SIZE % BLOCK == 0:
        return j * BLOCK
    else:
        return j * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def pages_of_block(sequences, rows, j, BLOCK: tl.constexpr):
    """The pages of the keys of block j that are `looked_up`.

    A loop asks for those of the next block while it works on this one. The loads of keys then wait
    for no other load, and the compiler keeps as many of them under way as without pages.
    """
    if sequences.block_table is None:
        return rows.batch
    else:
        return load_pages(sequences, rows, looked_up(sequences, j, BLOCK))


@triton.jit
def rows_of_block(sequences, rows, pages, j, BLOCK: tl.constexpr):
    """The rows of block j of keys in its pages, for indices among the sequence's keys."""
    if sequences.block_table is None:
        return rows
    else:
        index = looked_up(sequences, j, BLOCK)
        offset = (rows.first + index) % sequences.PAGE_SIZE - index
        return Rows(pages, rows.head, offset, rows.length)


def new_outputs(request: Request, multiple: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for o (batch, M, heads, v's head_dim, rounded up to a multiple) and for its LSE
    (batch, heads, M), not written yet.
    """
    q, (*_, head_dim) = request.q, request.v.shape
    batch, q_length, heads, _ = q.shape
    head_dim = -(-head_dim // multiple) * multiple
    o = q.new_empty((batch, q_length, heads, head_dim), dtype=request.out_dtype)
    return o, q.new_empty((batch, heads, q_length), dtype=torch.float32)


def new_gradients(request: Request) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Memory for dQ, dK and dV, contiguous, not written yet. dK and dV are 0 where rows between
    sequences may belong to none, because the kernels write no such row: with kv_starts those in
    front of a sequence's first key, of packed keys with kv_lengths those behind its last one.
    """
    q, k, v = request.q, request.k, request.v
    unused = request.cu_seqlens_k is not None and request.kv_lengths is not None
    if request.kv_starts is not None or unused:
        return q.new_empty(q.shape), k.new_zeros(k.shape), v.new_zeros(v.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
