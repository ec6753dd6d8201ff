"""Interval masks: each key says which queries see it, query_starts[j] <= i < query_ends[j].

One number or two for a key make documents, a prompt that answers share, and trees of answers. Two
small kernels prepare the others' work on the GPU:

* `fold_kernel` intersects the interval of each key with what causal and a window leave of it. From
  then on, the interval alone says whether a query sees the key. Of each block of keys the kernel
  notes the first and the last start and end.
* `list_kernel` makes, from these four numbers of each block, a list for each tile of queries: the
  blocks of keys that need the mask, then those that all queries of the tile see. Blocks that none
  of them sees are never loaded.

For a tile of keys no list is needed: the queries that see any of its keys lie between the first
start and the last end.

Source: Wang et al. 2024, "FlashMask: Efficient and Rich Mask Extension of FlashAttention",
arXiv:2410.01359, which keeps the rows that are masked; here it is those that are not.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import PLANS, Request
from flash_versions.versions.tiles.algebra import EVER, blocks_in_span, mask_outside, mask_scores
from flash_versions.versions.tiles.rows import cdiv

AT_ONCE = 64  # blocks that a program looks at together
COUNTS = [
    "starts_batch_stride", "starts_head_stride", "ends_batch_stride", "ends_head_stride",
    "window_left", "window_right", "q_length", "kv_length", "blocks", "heads",
]  # fmt: skip


class Intervals(NamedTuple):
    """What the two kernels leave, one line for all rows and key heads that share their intervals.

    bounds: (lines, blocks, 2, keys of a block) int32: the starts of the keys of a block, then their
        ends; (EVER, 0) for a key that no query sees, or that does not exist.
    spans: (lines, blocks, 4) int32: the first and the last start in a block, the first and the last
        end.
    lists: (lines, tiles, 2 + blocks) int32. A tile's list begins with the number of blocks that
        need the mask and the number of the others; then come the former in ascending order, and
        from the end of the list on, backwards, the latter. Anything if none was asked for.
    batch_lines, head_lines: from one row of the batch to the next, and from one key head to the
        next, so many lines.

    The numbers are doubled: a 1 in a tuple in a tuple is lost in Triton 3.6.
    """

    bounds: Any
    spans: Any
    lists: Any
    batch_lines: Any
    head_lines: Any
    blocks: Any
    tiles: Any

    @classmethod
    def of(
        cls, request: Request, block_kv: int, block_q: int | None = None, parts: int = 0
    ) -> "Intervals | None":
        """The intervals of a request, by blocks of block_kv keys; None if it has none.

        Args:
            request: see `Request`.
            block_kv: keys of a block.
            block_q: rows of a tile that wants a list, `request.group` to a query, or one to a query
                if there are parts.
            parts: a tile has so many parts of rows. Its list then is the number of blocks, at least
                one, and (block << 2 * parts) + flags for each, the last first. Flag 2 i says
                that a key of the block starts within part i of the rows, or behind it, and flag
                2 i + 1 that one ends there, or before.
        """
        if not request.has_intervals:
            return None
        kept = kept_plans(request)
        if kept is None:
            return cls.made(request, block_kv, block_q, parts)
        lengths = request.q.shape, request.k.shape[1:3], request.window_left, request.window_right
        key = (block_kv, block_q, parts, *lengths)
        if key not in kept:
            kept[key] = cls.made(request, block_kv, block_q, parts)
        return kept[key]

    @classmethod
    def made(cls, request: Request, block_kv: int, block_q: int | None, parts: int) -> "Intervals":
        """`of`, made anew."""
        batch_lines, head_lines, lines, blocks = shape_of(request, block_kv)
        q_length, kv_length = request.q.shape[1], request.k.shape[1]
        new = partial(torch.empty, dtype=torch.int32, device=request.q.device)
        bounds, spans = new((lines, blocks, 2, block_kv)), new((lines, blocks, 4))
        heads = request.k.shape[2] if head_lines else 1
        arguments: list[Any] = []
        for x in (request.query_starts, request.query_ends):
            arguments += [x, *(x.stride()[:2] if x is not None else (0, 0))]
        launch_fold(
            (blocks * lines,),
            (
                bounds, spans, *arguments, request.window_left, request.window_right, q_length,
                kv_length, blocks, heads,
            ),
            {"BLOCK_KV": block_kv},
        )  # fmt: skip
        lists, tiles = spans, 0  # any: Triton 3.6 compares no tuple with None in it with None
        if block_q is not None:
            group = 1 if parts else request.group
            tiles = cdiv(q_length * group, block_q)
            lists = new((lines, tiles, 2 + blocks))
            launch_list(
                (tiles * lines,),
                (lists, spans, q_length, blocks, tiles),
                {"GROUP": group, "BLOCK_Q": block_q, "PARTS": parts, "AT_ONCE": AT_ONCE},
            )
        return cls(bounds, spans, lists, *(2 * n for n in (batch_lines, head_lines, blocks, tiles)))


def kept_plans(request: Request) -> dict | None:
    """Where calls in this stream keep the intervals of a mask that is to be planned once
    (`masks.plan_mask`); None if it is not, or if one of its tensors is of another mask.

    A graph that is being captured makes its own: nobody else must read what it writes at replay.
    Plans of tensors that were changed in place since then are dropped.
    """
    tensors = request.query_starts, request.query_ends
    given = [x for x in tensors if x is not None]
    plans = getattr(given[0], PLANS, None)
    if plans is None or any(getattr(x, PLANS, None) is not plans for x in given):
        return None
    stream = 0
    if request.q.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return None
        stream = torch.cuda.current_stream(request.q.device).cuda_stream
    where, versions = (
        (request.q.device, stream),
        tuple(x if x is None else x._version for x in tensors),
    )
    if where not in plans or plans[where][0] != versions:
        plans[where] = versions, {}
    return plans[where][1]


def shape_of(request: Request, block_kv: int) -> tuple[int, int, int, int]:
    """(batch_lines, head_lines, lines, blocks) of a request's `Intervals`."""
    given = [x for x in (request.query_starts, request.query_ends) if x is not None]
    kv_length, kv_heads = request.k.shape[1:3]
    heads = 1 if all(x.stride(1) == 0 for x in given) else kv_heads
    batch = 1 if all(x.stride(0) == 0 for x in given) else request.batch
    batch_lines = heads if batch > 1 else 0
    return batch_lines, int(heads > 1), batch * heads, cdiv(kv_length, block_kv)


@triton.jit
def line_of(intervals, keys):
    """The line of a row and a key head."""
    return keys.batch * (intervals.batch_lines // 2) + keys.head * (intervals.head_lines // 2)


@triton.jit
def load_bounds(intervals, keys, k_pos):
    """(starts, ends) of the keys of a block, which begin at a multiple of their number."""
    BLOCK_KV: tl.constexpr = k_pos.shape[0]
    line = intervals.bounds + line_of(intervals, keys).to(tl.int64) * intervals.blocks * BLOCK_KV
    place = line + k_pos // BLOCK_KV * 2 * BLOCK_KV + k_pos % BLOCK_KV
    return tl.load(place), tl.load(place + BLOCK_KV)


@triton.jit
def mask_unseen(s, queries, keys, k_pos, window, KEYS_FIRST: tl.constexpr):
    """Scores (queries, keys), or (keys, queries) with KEYS_FIRST, with -inf where an interval, or
    without intervals the window, hides a key.
    """
    if window.intervals is not None:
        starts, ends = load_bounds(window.intervals, keys, k_pos)
        if KEYS_FIRST:
            return mask_outside(s, queries.pos[None, :], starts[:, None], ends[:, None])
        else:
            return mask_outside(s, queries.pos[:, None], starts[None, :], ends[None, :])
    elif KEYS_FIRST:
        return mask_scores(
            s, k_pos[:, None], queries.first_key[None, :], queries.last_key[None, :], window
        )
    else:
        return mask_scores(
            s, k_pos[None, :], queries.first_key[:, None], queries.last_key[:, None], window
        )


@triton.jit
def listed_blocks(intervals, keys, tile):
    """(line, masked, all) of a tile: its list, for `listed_block`, and how many blocks of it need
    the mask, and are there.
    """
    number = line_of(intervals, keys).to(tl.int64) * (intervals.tiles // 2) + tile
    line = intervals.lists + number * (2 + intervals.blocks // 2)
    masked = tl.load(line)
    return line, masked, masked + tl.load(line + 1)


@triton.jit
def listed_block(intervals, line, i, masked):
    """The block at place i of a list."""
    return tl.load(line + tl.where(i < masked, 2 + i, intervals.blocks // 2 + 1 - i + masked))


@triton.jit
def query_blocks(intervals, keys, tile, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The blocks of query rows, GROUP to a query, that see a tile of keys, as
    `algebra.block_range` gives them.
    """
    place = line_of(intervals, keys).to(tl.int64) * (intervals.blocks // 2) + tile
    span = intervals.spans + place * 4
    return blocks_in_span(
        tl.load(span), tl.load(span + 1), tl.load(span + 2), tl.load(span + 3), GROUP, BLOCK_Q
    )


@triton.jit
def clipped(x):
    """Numbers of any integer type as int32 from 0 to EVER."""
    return tl.minimum(tl.maximum(x, 0), EVER).to(tl.int32)


@triton.jit(do_not_specialize=COUNTS)
def fold_kernel(
    bounds, spans, starts, starts_batch_stride, starts_head_stride, ends, ends_batch_stride,
    ends_head_stride, window_left, window_right, q_length, kv_length, blocks, heads,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """The bounds and the span of one block of keys, a program for each."""
    block, line = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    head, batch = line % heads, line // heads
    key = block * BLOCK_KV + tl.arange(0, BLOCK_KV)
    exists = key < kv_length
    place = key + (q_length - kv_length)  # the query that has this key as its own
    start, end = key * 0, key * 0 + q_length
    if window_right is not None:
        start = tl.maximum(place - window_right, 0)
    if window_left is not None:
        end = tl.minimum(place + window_left + 1, q_length)
    if starts is not None:
        given = batch.to(tl.int64) * starts_batch_stride + head.to(tl.int64) * starts_head_stride
        start = tl.maximum(start, clipped(tl.load(starts + given + key, mask=exists, other=0)))
    if ends is not None:
        given = batch.to(tl.int64) * ends_batch_stride + head.to(tl.int64) * ends_head_stride
        end = tl.minimum(end, clipped(tl.load(ends + given + key, mask=exists, other=0)))
    is_seen = exists & (start < end)
    start = tl.where(is_seen, start, EVER)
    end = tl.where(is_seen, end, 0)
    number = tl.program_id(0).to(tl.int64)
    target = bounds + number * 2 * BLOCK_KV + tl.arange(0, BLOCK_KV)
    tl.store(target, start)
    tl.store(target + BLOCK_KV, end)
    tl.store(spans + number * 4, tl.min(start, 0))
    tl.store(spans + number * 4 + 1, tl.max(start, 0))
    tl.store(spans + number * 4 + 2, tl.min(end, 0))
    tl.store(spans + number * 4 + 3, tl.max(end, 0))


@triton.jit(do_not_specialize=["q_length", "blocks", "tiles"])
def list_kernel(
    lists, spans, q_length, blocks, tiles,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, PARTS: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """List the blocks of one tile, a program for each."""
    tile = tl.program_id(0) % tiles
    line = lists + tl.program_id(0).to(tl.int64) * (2 + blocks)
    spans += (tl.program_id(0) // tiles).to(tl.int64) * blocks * 4
    masked, others = 0, 0
    for first in range(0, blocks, AT_ONCE):
        block = first + tl.arange(0, AT_ONCE)
        exists = block < blocks
        if PARTS > 0:  # the last one first, as without intervals
            block = tl.where(exists, blocks - 1 - block, block)
        first_start = tl.load(spans + block * 4, mask=exists, other=EVER)
        last_start = tl.load(spans + block * 4 + 1, mask=exists, other=EVER)
        first_end = tl.load(spans + block * 4 + 2, mask=exists, other=0)
        last_end = tl.load(spans + block * 4 + 3, mask=exists, other=0)
        low = tile * BLOCK_Q // GROUP
        high = tl.minimum((tile * BLOCK_Q + BLOCK_Q - 1) // GROUP, q_length - 1)
        is_seen = (first_start <= high) & (last_end > low)
        is_cut = (last_start > low) | (first_end <= high)
        entry = block
        if PARTS > 0:
            entry = block << 2 * PARTS
            for part in tl.static_range(PARTS):
                low = tile * BLOCK_Q + part * (BLOCK_Q // PARTS)
                high = tl.minimum(low + BLOCK_Q // PARTS, q_length) - 1
                entry += (last_start > low).to(tl.int32) << 2 * part
                entry += (first_end <= high).to(tl.int32) << 2 * part + 1
            is_cut = is_seen  # flags say it, so one kind is enough
        is_masked = (is_seen & is_cut).to(tl.int32)
        is_other = (is_seen & ~is_cut).to(tl.int32)
        place = (1 if PARTS > 0 else 2) + masked + tl.cumsum(is_masked, 0) - 1
        tl.store(line + place, entry, mask=is_masked > 0)
        place = 2 + blocks - others - tl.cumsum(is_other, 0)
        tl.store(line + place, entry, mask=is_other > 0)
        masked += tl.sum(is_masked)
        others += tl.sum(is_other)
    if PARTS > 0:
        if masked == 0:
            tl.store(line + 1, (1 << 2 * PARTS) - 1)  # block 0, masked in full
        tl.store(line, tl.maximum(masked, 1))
    else:
        tl.store(line, masked)
        tl.store(line + 1, others)


launch_fold = Launcher(fold_kernel)
launch_list = Launcher(list_kernel)
