"""FlashAttention 2, forward of few queries: a copy with some arithmetic on top.

What the ordinary kernel wastes here. With one tile of query rows to a key head, every key is read
once, by one program. The time is that of reading them plus the latency before the first load is
issued and after the last one arrives: two more loops, whose instructions come from memory, too, and
the launch of a second kernel. At 8k keys that is half of the time.

What changes.
* One loop: every block is masked. The mask costs nothing where the arithmetic waits for memory.
* Both loads of a block are asked for before anything is computed with either.
* Shares of the splits differ by one block at most, so that no program works while all others rest.
* With keys in pages, the pages of the next block are looked up while a block is worked on: the
  loads of its keys do not wait for another load.
* The reduction is launched as soon as every program has begun, and waits on the GPU for what they
  write (programmatic dependent launch, from Hopper on): launching takes none of the time.

    program (key head of a sequence, split):    let the reduction be launched
                                                load Q tile
                                                for j in this split's blocks:
                                                    load K_j and V_j
                                                    fold them with the mask
                                                store O, LSE (one split) or acc, m, l (several)

Cost. What a multiprocessor has under way must cover the time that memory takes to answer: 128 KiB,
as one program with large tiles or as two or three with small ones. Where thousands of short
sequences wait, as in rollouts, a program's beginning and end take as long as its blocks: then it is
five with one block under way each, and some read while others begin.

Sources. Flash-Decoding (Dao, Haziza, Massa, Sizov 2023). Programmatic dependent launch: NVIDIA,
CUDA C++ Programming Guide.
"""

from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.precision import is_fp8
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig, padded_head_dim
from flash_versions.versions.fa2.combine import Partials, combine
from flash_versions.versions.fa2.splits import FULL, splits_of
from flash_versions.versions.tiles.algebra import (
    Window,
    blocks_of_queries,
    finalize,
    mask_scores,
    softmax_step,
)
from flash_versions.versions.tiles.intervals import Intervals
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    launch_tiles,
    load_rows,
    store_row_values,
    store_rows,
)
from flash_versions.versions.tiles.score_mods import (
    ScoreMods,
    add_alibi,
    cap_scores,
    drop,
    place_queries,
    sink_state,
)
from flash_versions.versions.tiles.sequences import (
    Sequences,
    key_rows,
    new_outputs,
    pages_of_block,
    query_rows,
    rows_of_block,
)

COUNTS = ["q_length", "kv_length", "slots", "kv_heads", "num_splits"]
MOST_ROWS = 32  # query rows of a key head that are one tile at most
READ_AT_ONCE = 16  # splits, which the reduction reads in one tile
# The fastest on an H200 at head_dim 128: for one program on each multiprocessor, for
# up to three (as with splits), and for more.
WHOLE = LaunchConfig(16, 128, num_warps=8, num_stages=3)
SHARED = LaunchConfig(16, 64, num_warps=4, num_stages=3)
CROWDED = LaunchConfig(16, 64, num_warps=4, num_stages=2)


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, queries, k, v, keys, window, mods,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
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
def attend(
    begin, end, is_first, q, k, v, rows, keys, queries, sequences, window, mods,
    BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """What the queries of a key head see in KV blocks [begin, end), and if these are the first in
    the sink: (acc, row_max, row_sum).
    """
    q_tile = load_rows(q, rows, queries.pos, MASKED=True)
    acc = tl.zeros([BLOCK_Q, v.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max, row_sum = sink_state(row_max, row_sum, mods, rows.head, is_first)
    pages = pages_of_block(sequences, keys, begin, BLOCK_KV)
    for j in range(begin, end):
        block = rows_of_block(sequences, keys, pages, j, BLOCK_KV)
        pages = pages_of_block(sequences, keys, j + 1, BLOCK_KV)
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, queries, k, v, block, window, mods, BLOCK_KV
        )
    if mods.dropout_rescale is not None:
        acc *= mods.dropout_rescale
    return acc, row_max, row_sum


@triton.jit
def store_result(o, lse_out, rows, queries, acc, row_max, row_sum):
    """Write O and the LSE of queries that have seen all of their keys."""
    out, lse = finalize(acc, row_max, row_sum)
    store_rows(o, rows, queries.pos, out)
    store_row_values(lse_out, rows, queries.pos, lse)


@triton.jit
def store_partial(partials, slot, rows, queries, acc, row_max, row_sum):
    """Write the state of queries that have seen a part of their keys to a slot of the workspace."""
    rows = Rows(slot, rows.head, rows.first, rows.length)
    store_rows(partials.acc, rows, queries.pos, acc)
    store_row_values(partials.row_max, rows, queries.pos, row_max)
    store_row_values(partials.row_sum, rows, queries.pos, row_sum)


@triton.jit
def share_of(split, num_splits, begin, end):
    """The blocks of one split, [begin, end), of those of all: shares differ by one at most."""
    share, longer = (end - begin) // num_splits, (end - begin) % num_splits
    begin += split * share + tl.minimum(split, longer)
    return begin, begin + share + (split < longer).to(tl.int32)


@triton.jit(do_not_specialize=COUNTS)
def decode_kernel(
    q, k, v, o, lse_out, partials, sequences, window, mods, q_length, kv_length, slots, kv_heads,
    num_splits,
    GROUP: tl.constexpr, SPLIT: tl.constexpr, OVERLAP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
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

    state = attend(
        begin, end, split == 0, q, k, v, rows, keys, queries, sequences, window, mods,
        BLOCK_Q, BLOCK_KV
    )  # fmt: skip
    if SPLIT:
        store_partial(partials, split * slots + rows.batch, rows, queries, *state)
    else:
        store_result(o, lse_out, rows, queries, *state)


launch_decode = Launcher(decode_kernel)


def decodes(request: Request) -> bool:
    """Whether the query rows of a key head are one small tile. In fp32 large tiles would not fit
    the registers; 8-bit numbers are not read here.
    """
    rows = request.q.shape[1] * request.group
    alike = request.cu_seqlens_q is None and not request.has_intervals
    return alike and rows <= MOST_ROWS and request.q.element_size() == 2


def choose_config(request: Request, programs: int) -> LaunchConfig:
    """Tile sizes, where so many programs do the work of one split."""
    for_each = programs / devices[request.q.device].num_sms
    return fitted(request, CROWDED if for_each > 3 else WHOLE if FULL <= for_each <= 1 else SHARED)


def fitted(request: Request, config: LaunchConfig) -> LaunchConfig:
    """Tile sizes with as many bytes under way whatever the head dim, or as fit."""
    q = request.q
    head_dim = padded_head_dim(max(q.shape[3], request.v.shape[3]))
    rows = q.shape[1] * request.group
    config = replace(
        config,
        block_q=max(16, 1 << (rows - 1).bit_length()),
        num_stages=max(2, 1 + (config.num_stages - 1) * 128 // max(64, head_dim)),
    )
    return config.fitted(head_dim, q.element_size(), devices[q.device].shared_memory)


def arguments(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    *work: Any,
    intervals: Intervals | None = None,
) -> tuple:
    """What the kernels of FA2's forward are given, up to `kv_heads`; work: what some have beside
    it, such as the partial results.
    """
    q, k, mods = request.q, request.k, ScoreMods.of(request)
    return (
        *map(View.of, (q, k, request.v, o)),
        View.of_rows(lse),
        *work,
        Sequences.of(request),
        Window(request.window_left, request.window_right, intervals),
        mods.with_descales(request) if is_fp8(q) else mods,
        q.shape[1],
        request.max_kv_length,
        q.shape[0],
        k.shape[2],
    )


def forward(
    request: Request, config: LaunchConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE of a request that `decodes`, as `fa2.forward` returns them.

    Args:
        request: see `Request`.
        config: tile sizes; None chooses by shape and device.
    """
    batch = request.q.shape[0]
    programs = request.k.shape[2] * batch
    config = config or choose_config(request, programs)
    o, lse = new_outputs(request)
    num_splits, partials = splits_of(request, programs, config.block_kv, READ_AT_ONCE), None
    if num_splits > 1:
        partials = Partials.allocate(num_splits * batch, o, packed=False)
    overlap = num_splits > 1 and devices.launches_overlap(request.q.device)
    launch_tiles(
        launch_decode,
        (programs, num_splits),
        (*arguments(request, o, lse, partials), num_splits),
        config,
        GROUP=request.group,
        SPLIT=partials is not None,
        OVERLAP=overlap,
    )
    if partials is not None:
        combine(partials, num_splits, o, lse, overlap)
    return o, lse, None
