"""The kernel for decoding before equal shares and looked-up pages, for decode_gpu.py only:
every sequence has the same number of splits, and a block waits for the pages of its keys.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher, layout
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa2 import forward as fa2
from flash_versions.versions.fa2.combine import Partials, combine
from flash_versions.versions.tiles.algebra import (
    Window,
    blocks_of_queries,
    finalize,
    mask_scores,
    softmax_step,
)
from flash_versions.versions.tiles.rows import Rows, View, load_rows, store_row_values, store_rows
from flash_versions.versions.tiles.score_mods import (
    ScoreMods,
    add_alibi,
    cap_scores,
    drop,
    place_queries,
    sink_state,
)
from flash_versions.versions.tiles.sequences import key_rows, query_rows

# Change from call to call, a growing cache's with every token: no kernel of its own for each.
COUNTS = ["q_length", "kv_length", "slots", "kv_heads", "num_splits"]


class Sequences(NamedTuple):
    """As in tiles/sequences.py, with the size of a page as a number at run time."""

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
def fold_block(
    j,
    acc,
    row_max,
    row_sum,
    q_tile,
    queries,
    k,
    v,
    sequences,
    keys,
    window,
    mods,
    BLOCK_KV: tl.constexpr,
):
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    keys = rows_in_pages(sequences, keys, k_pos)
    k_tile = load_rows(k, keys, k_pos, MASKED=True)
    v_tile = load_rows(v, keys, k_pos, MASKED=True)
    s = cap_scores(tl.dot(q_tile, k_tile.T), mods)
    distance = (queries.pos + queries.offset)[:, None] - k_pos[None, :]
    s = add_alibi(s, queries.slope[:, None], distance, mods)
    s = mask_scores(
        s, k_pos[None, :], queries.first_key[:, None], queries.last_key[:, None], window
    )
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, mods.scale_log2)
    p = drop(p, mods, queries.sequence_head[:, None], queries.pos[:, None], k_pos[None, :])
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None])
    return acc, row_max, row_sum


@triton.jit
def share_of(split, num_splits, begin, end):
    """The blocks of one split, [begin, end), of those of all: shares differ by one at most."""
    share, longer = (end - begin) // num_splits, (end - begin) % num_splits
    begin += split * share + tl.minimum(split, longer)
    return begin, begin + share + (split < longer).to(tl.int32)


@triton.jit(do_not_specialize=COUNTS)
def decode_kernel(
    q,
    k,
    v,
    o,
    lse_out,
    partials,
    sequences,
    window,
    mods,
    q_length,
    kv_length,
    slots,
    kv_heads,
    num_splits,
    GROUP: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program per (key head, sequence) and split; its tile has all query rows of the head."""
    if OVERLAP:
        gdc_launch_dependents()
    head, sequence = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    split = tl.program_id(1)
    rows = query_rows(sequences, sequence, head, q_length)
    keys = key_rows(sequences, sequence, head, kv_length)
    queries = place_queries(0, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
    rows = Rows(rows.batch, queries.head, rows.first, rows.length)
    begin, _, _, end = blocks_of_queries(
        0, rows.length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV
    )
    begin, end = share_of(split, num_splits, begin, end)

    q_tile = load_rows(q, rows, queries.pos, MASKED=True)
    acc = tl.zeros([BLOCK_Q, v.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max, row_sum = sink_state(row_max, row_sum, mods, rows.head, split == 0)
    for j in range(begin, end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods, BLOCK_KV
        )
    if mods.dropout_rescale is not None:
        acc *= mods.dropout_rescale
    if SPLIT:
        slot = Rows(split * slots + rows.batch, rows.head, rows.first, rows.length)
        store_rows(partials.acc, slot, queries.pos, acc)
        store_row_values(partials.row_max, slot, queries.pos, row_max)
        store_row_values(partials.row_sum, slot, queries.pos, row_sum)
    else:
        out, lse = finalize(acc, row_max, row_sum)
        store_rows(o, rows, queries.pos, out)
        store_row_values(lse_out, rows, queries.pos, lse)


launch_decode = Launcher(decode_kernel)


def forward(request: Request) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE, with the tiles and the splits that a call had."""
    q, k, v, group = request.q, request.k, request.v, request.group
    batch, q_length, heads, _ = q.shape
    kv_heads = heads // group
    programs = kv_heads * batch
    config = fa2.decoding_config(request, programs)
    num_splits = fa2.splits_of(request, programs, config.block_kv, fa2.READ_AT_ONCE)
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty((batch, heads, q_length), dtype=torch.float32)
    partials = Partials.allocate(num_splits * batch, o, False) if num_splits > 1 else None
    overlap = num_splits > 1 and devices.launches_overlap(q.device)
    key = (*layout(request), num_splits)
    tensors = (View.of(q), View.of(k), View.of(v), View.of(o), View.of_rows(lse), partials)
    about = (
        Sequences.of(request),
        Window(request.window_left, request.window_right),
        ScoreMods.of(request),
        q_length,
        request.max_kv_length,
        batch,
        kv_heads,
        num_splits,
    )
    constants = {
        "GROUP": group,
        "SPLIT": partials is not None,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "OVERLAP": overlap,
    }
    compiler = config.num_warps, config.num_stages
    launch_decode(key, (programs, num_splits), (*tensors, *about), constants, *compiler)
    if partials is not None:
        combine(partials, key, num_splits, o, lse, overlap)
    return o, lse, None
