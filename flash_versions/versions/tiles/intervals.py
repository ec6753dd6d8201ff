"""Interval masks: each key says which queries see it, query_starts[j] <= i < query_ends[j].

One number or two for a key make documents, a prompt that answers share, and trees of answers. For
every tile of queries a small kernel lists the blocks of keys that the tile sees: those that need
the mask, then those that all of its queries see. Blocks that none of them sees are never loaded.

For a tile of keys no list is needed: the queries that see any of its keys lie between the first
start and the last end.

Source: Wang et al. 2024, "FlashMask: Efficient and Rich Mask Extension of FlashAttention",
arXiv:2410.01359, which keeps the rows that are masked; here it is those that are not.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher, layout
from flash_versions.dispatch.request import Request
from flash_versions.versions.tiles.algebra import Window, blocks_of_queries
from flash_versions.versions.tiles.rows import cdiv

EVER = tl.constexpr(2**30)  # later than every query
AT_ONCE = 32  # blocks that a program looks at together
COUNTS = ["batch_stride", "head_stride", "tile_stride", "q_length", "kv_length"]


class Intervals(NamedTuple):
    """Where a kernel finds the interval of a key, and the blocks that a tile of queries sees.

    starts and ends point to (batch, kv_heads, N) integers; None: from the first query, to the last.
    lists points to (batch, kv_heads, tiles, 2 + blocks) int32. A tile's list begins with the number
    of blocks that need the mask and the number of the others; then come the former in ascending
    order, and from the end of the list on, backwards, the latter.
    """

    starts: Any
    starts_batch_stride: Any
    starts_head_stride: Any
    ends: Any
    ends_batch_stride: Any
    ends_head_stride: Any
    lists: Any = None
    lists_batch_stride: Any = None
    lists_head_stride: Any = None
    lists_stride: Any = None

    @classmethod
    def of(cls, request: Request) -> "Intervals | None":
        """The intervals of a request, without lists; None if it has none."""
        if not request.has_intervals:
            return None
        starts, ends = request.query_starts, request.query_ends
        of_starts, of_ends = (x.stride() if x is not None else (0, 0, 0) for x in (starts, ends))
        return cls(starts, of_starts[0], of_starts[1], ends, of_ends[0], of_ends[1])

    @classmethod
    def listed(cls, request: Request, block_q: int, block_kv: int) -> "Intervals | None":
        """The same with lists for tiles of block_q rows, `request.group` to a query."""
        intervals = cls.of(request)
        if intervals is None:
            return None
        given = [x for x in (request.query_starts, request.query_ends) if x is not None]
        # One list for all that share an interval.
        batch = 1 if all(x.stride(0) == 0 for x in given) else request.batch
        heads = 1 if all(x.stride(1) == 0 for x in given) else request.k.shape[2]
        q_length, kv_length = request.q.shape[1], request.k.shape[1]
        tiles = cdiv(q_length * request.group, block_q)
        blocks = cdiv(kv_length, block_kv)
        lists = torch.empty(
            (batch, heads, tiles, 2 + blocks), dtype=torch.int32, device=request.q.device
        )
        window = Window(request.window_left, request.window_right, *by_key(intervals))
        launch_list(
            layout(request),
            (tiles, heads, batch),
            (lists, *lists.stride()[:3], window, q_length, kv_length),
            {
                "GROUP": request.group,
                "BLOCK_Q": block_q,
                "BLOCK_KV": block_kv,
                "AT_ONCE": AT_ONCE,
            },
        )
        by_batch, by_head = lists.stride()[:2]
        return intervals._replace(
            lists=lists,
            lists_batch_stride=0 if batch == 1 else by_batch,
            lists_head_stride=0 if heads == 1 else by_head,
            lists_stride=lists.stride(2),
        )


def by_key(intervals: Intervals | None) -> tuple:
    """What a `Window` has of them behind its sides."""
    return () if intervals is None else (1, intervals)


@triton.jit
def load_intervals(intervals, batch, head, key, exists, START: tl.constexpr, END: tl.constexpr):
    """(starts, ends) of keys; START and END of those that do not exist."""
    starts = tl.where(exists, 0, START)
    ends = tl.where(exists, EVER, END)
    if intervals.starts is not None:
        line = batch.to(tl.int64) * intervals.starts_batch_stride
        line += head.to(tl.int64) * intervals.starts_head_stride
        starts = tl.load(intervals.starts + line + key, mask=exists, other=START)
        starts = tl.minimum(tl.maximum(starts, 0), EVER).to(tl.int32)
    if intervals.ends is not None:
        line = batch.to(tl.int64) * intervals.ends_batch_stride
        line += head.to(tl.int64) * intervals.ends_head_stride
        ends = tl.load(intervals.ends + line + key, mask=exists, other=END)
        ends = tl.minimum(tl.maximum(ends, 0), EVER).to(tl.int32)
    return starts, ends


@triton.jit
def mask_intervals(s, query, key, keys, intervals):
    """Scores with -inf where a query is outside the interval of a key. The positions are (queries,
    1) and (1, keys), or the other way round, as s is.
    """
    starts, ends = load_intervals(
        intervals, keys.batch, keys.head, key, key < keys.length, START=0, END=0
    )
    return tl.where((query >= starts) & (query < ends), s, float("-inf"))


@triton.jit
def listed_blocks(intervals, keys, tile):
    """(line, masked, all) of a tile: its list, for `listed_block`, and how many blocks of it need
    the mask, and are there.
    """
    line = intervals.lists + keys.batch.to(tl.int64) * intervals.lists_batch_stride
    line += keys.head.to(tl.int64) * intervals.lists_head_stride
    line += tile.to(tl.int64) * intervals.lists_stride
    masked = tl.load(line)
    return line, masked, masked + tl.load(line + 1)


@triton.jit
def listed_block(intervals, line, i, masked):
    """The block at place i of a list."""
    return tl.load(line + tl.where(i < masked, 2 + i, intervals.lists_stride - 1 - i + masked))


@triton.jit
def query_blocks(
    intervals,
    keys,
    key,
    q_length,
    begin,
    full_begin,
    full_end,
    end,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
):
    """The blocks of query rows that see a tile of keys, as `algebra.block_range` gives them, from
    those that the window leaves.
    """
    exists = key < keys.length
    first, until = load_intervals(intervals, keys.batch, keys.head, key, exists, EVER, 0)
    last, before = load_intervals(intervals, keys.batch, keys.head, key, exists, 0, EVER)
    begin = tl.maximum(begin, tl.minimum(tl.min(first, 0), q_length) * GROUP // BLOCK_Q)
    end = tl.minimum(end, tl.cdiv(tl.minimum(tl.max(until, 0), q_length) * GROUP, BLOCK_Q))
    end = tl.maximum(end, begin)
    all_begun = tl.cdiv(tl.minimum(tl.max(last, 0), q_length) * GROUP, BLOCK_Q)
    none_ended = tl.minimum(tl.min(before, 0), q_length) * GROUP // BLOCK_Q
    full_begin = tl.minimum(tl.maximum(tl.maximum(full_begin, all_begun), begin), end)
    full_end = tl.minimum(tl.maximum(tl.minimum(full_end, none_ended), full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit(do_not_specialize=COUNTS)
def list_kernel(
    lists,
    batch_stride,
    head_stride,
    tile_stride,
    window,
    q_length,
    kv_length,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """List the blocks of one tile, a program for each."""
    tile, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    intervals = window.intervals
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, q_length, kv_length, window, GROUP, BLOCK_Q, BLOCK_KV
    )
    low = tile * BLOCK_Q // GROUP
    high = tl.minimum((tile * BLOCK_Q + BLOCK_Q - 1) // GROUP, q_length - 1)
    line = lists + batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    line += tile.to(tl.int64) * tile_stride
    masked, others = 0, 0
    for first in range(begin, end, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        key = block[:, None] * BLOCK_KV + tl.arange(0, BLOCK_KV)[None, :]
        exists = key < kv_length
        starts, ends = load_intervals(intervals, batch, head, key, exists, EVER, 0)
        seen = (starts <= high) & (ends > low)
        whole = ((starts <= low) & (ends > high)) | ~exists
        is_seen = (tl.max(seen.to(tl.int32), 1) > 0) & (block < end)
        is_whole = (tl.min(whole.to(tl.int32), 1) > 0) & (block >= full_begin) & (block < full_end)
        is_masked = (is_seen & ~is_whole).to(tl.int32)
        is_other = (is_seen & is_whole).to(tl.int32)
        place = 2 + masked + tl.cumsum(is_masked, 0) - 1
        tl.store(line + place, block, mask=is_masked > 0)
        place = tile_stride - others - tl.cumsum(is_other, 0)
        tl.store(line + place, block, mask=is_other > 0)
        masked += tl.sum(is_masked)
        others += tl.sum(is_other)
    tl.store(line, masked)
    tl.store(line + 1, others)


launch_list = Launcher(list_kernel)
