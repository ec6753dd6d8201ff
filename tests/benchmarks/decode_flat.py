"""Equal shares in one loop over all blocks of a share, for decode_gpu.py only."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.fa2.decode import fold_block, store_partial, store_result
from flash_versions.versions.fa2.shares import COUNTS, find_share, share_with
from flash_versions.versions.tiles.algebra import blocks_of_queries
from flash_versions.versions.tiles.rows import Rows, load_rows
from flash_versions.versions.tiles.score_mods import place_queries, sink_state
from flash_versions.versions.tiles.sequences import (
    key_rows,
    pages_of_block,
    query_rows,
    rows_of_block,
)


@triton.jit
def begin_sequence(q, rows, queries, mods, is_first, acc, BLOCK_Q: tl.constexpr):
    """The queries of a sequence, and a state that has seen no key."""
    q_tile = load_rows(q, rows, queries.pos, MASKED=True)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max, row_sum = sink_state(row_max, row_sum, mods, rows.head, is_first)
    return q_tile, tl.zeros_like(acc), row_max, row_sum


@triton.jit
def place(
    sequence,
    head,
    batch,
    kv_heads,
    q_length,
    kv_length,
    sequences,
    window,
    mods,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Of a sequence, or of the last one if there are fewer: its rows of queries and of keys, its
    queries, its first block and the number of its blocks.
    """
    sequence = tl.minimum(sequence, batch - 1)
    rows = query_rows(sequences, sequence, head, q_length)
    keys = key_rows(sequences, sequence, head, kv_length)
    queries = place_queries(0, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
    rows = Rows(rows.batch, queries.head, rows.first, rows.length)
    first, _, _, end = blocks_of_queries(
        0, rows.length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV
    )
    return rows, keys, queries, first, tl.maximum(end - first, 1)


@triton.jit(do_not_specialize=COUNTS)
def flat_kernel(
    q,
    k,
    v,
    o,
    lse_out,
    partials,
    cut,
    sequences,
    window,
    mods,
    q_length,
    kv_length,
    batch,
    kv_heads,
    shares,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    OVERLAP: tl.constexpr,
    BATCH: tl.constexpr,
):
    """As `shares_kernel`, but the loads of a sequence begin before the one before it is done."""
    if OVERLAP:
        gdc_launch_dependents()
    head, share = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    begin, end, sequence, start, blocks, longer = find_share(
        share, shares, batch, sequences, window, q_length, kv_length, GROUP, BLOCK_Q, BLOCK_KV,
        BATCH
    )  # fmt: skip
    rows, keys, queries, first, number = place(
        sequence, head, batch, kv_heads, q_length, kv_length, sequences, window, mods, GROUP,
        BLOCK_Q, BLOCK_KV
    )  # fmt: skip
    q_tile, acc, row_max, row_sum = begin_sequence(
        q, rows, queries, mods, start >= begin, tl.zeros([BLOCK_Q, v.PADDED], tl.float32), BLOCK_Q
    )
    pages = pages_of_block(sequences, keys, first + begin - start, BLOCK_KV)
    for i in range(begin, end):
        stop = start + number
        j = first + i - start
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, queries, k, v,
            rows_of_block(sequences, keys, pages, j, BLOCK_KV), window, mods, BLOCK_KV
        )  # fmt: skip
        since = start
        if i + 1 == stop:
            sequence, start = sequence + 1, stop
        next_rows, keys, next_queries, first, number = place(
            sequence, head, batch, kv_heads, q_length, kv_length, sequences, window, mods, GROUP,
            BLOCK_Q, BLOCK_KV
        )  # fmt: skip
        pages = pages_of_block(sequences, keys, first + i + 1 - start, BLOCK_KV)
        if (i + 1 == stop) | (i + 1 == end):
            done = acc
            if mods.dropout_rescale is not None:
                done *= mods.dropout_rescale
            if (since >= begin) & (stop <= end):
                store_result(o, lse_out, rows, queries, done, row_max, row_sum)
            else:
                slot = 2 * share + (since >= begin).to(tl.int32)
                store_partial(partials, slot, rows, queries, done, row_max, row_sum)
            q_tile, acc, row_max, row_sum = begin_sequence(
                q, next_rows, next_queries, mods, True, acc, BLOCK_Q
            )
        rows, queries = next_rows, next_queries
    # The last sequence: it is still the current one if it has blocks left.
    if head == 0:
        pieces = 0
        if (start >= begin) & (start < end):
            pieces = share_with(start + number - 1, blocks, longer) - share + 1
        tl.store(cut + 2 * share, sequence)
        tl.store(cut + 2 * share + 1, pieces)


launch_flat = Launcher(flat_kernel)
