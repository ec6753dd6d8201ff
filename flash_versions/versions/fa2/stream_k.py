"""FlashAttention 2, forward of few queries on sequences of different lengths: Stream-K.

What a split of every sequence wastes here. If all sequences get as many programs, the work of a
program is as long as its sequence: most programs end early, and the memory is idle while the last
ones read. The lengths are on the GPU, so the host cannot give long sequences more programs.

What changes.
* The KV blocks of all sequences lie in one line, one sequence behind the other. The line is cut
  into as many shares as there is room for programs on the GPU, none longer than another by more
  than one block. A share may end in the middle of a sequence.
* Every program finds its share itself: it reads the lengths of all sequences at once, adds up their
  blocks, and looks where the share begins. A program would wait for its own length anyway.
* A share that has a whole sequence finishes it. Of a sequence that is cut, each share
  leaves a partial result, and `combine.py` combines them. In one share no more than the first and
  the last sequence are cut, so the workspace and the reduction grow with the number of shares, and
  not with that of the sequences.

    program (key head, share):      find the first and the last sequence of the share
                                    for each sequence between them:
                                        load Q tile
                                        for j in the blocks that both have:
                                            fold K_j and V_j with the mask
                                        store O, LSE (all of the sequence) or acc, m, l (a part)

All key heads have the same shares: the programs of a share read neighbouring memory at about the
same time.

Sources. One line of work, cut evenly: Osama, Merrill, Cecka, Garland, Owens 2023, "Stream-K". For
decoding: the scheduler of FlashInfer (Ye et al. 2025).
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import LaunchConfig, padded_head_dim
from flash_versions.versions.fa2.combine import Partials, combine
from flash_versions.versions.fa2.decode import (
    SHARED,
    WHOLE,
    arguments,
    attend,
    fitted,
    store_partial,
    store_result,
)
from flash_versions.versions.tiles.algebra import blocks_of_queries
from flash_versions.versions.tiles.rows import Rows, cdiv, launch_tiles
from flash_versions.versions.tiles.score_mods import place_queries
from flash_versions.versions.tiles.sequences import key_rows, new_outputs, query_rows

COUNTS = ["q_length", "kv_length", "batch", "kv_heads", "shares"]
SEQUENCES = 64  # whose blocks a program adds up at once, at least: no kernel for each small batch
RESERVED = 3072  # bytes of shared memory that a program takes besides its tiles, at most
LONG = 2048  # keys; with 1024 sequences of 256, shares lose up to 20 %
MOST_SEQUENCES = 1024  # whose lengths every program reads, all at once
WARPS = 8  # for so many a multiprocessor has all the registers that they can ask for


@triton.jit
def find_share(
    share, shares, batch, sequences, window, q_length, kv_length,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr, BATCH: tl.constexpr
):  # fmt: skip
    """The blocks [begin, end) of a share, the first sequence of the share and the block with which
    it begins, its start; and how many blocks a share has, which the first `longer` shares have one
    more than.

    A sequence without a visible key counts as one block, so that a program writes its result.
    """
    i = tl.arange(0, BATCH)
    keys = key_rows(sequences, tl.minimum(i, batch - 1), 0, kv_length)
    first, _, _, end = blocks_of_queries(0, q_length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV)
    ends = tl.cumsum(tl.where(i < batch, tl.maximum(end - first, 1), 0), 0)
    total = tl.max(ends, 0)
    blocks, longer = total // shares, total % shares
    begin = share * blocks + tl.minimum(share, longer)
    end = begin + blocks + (share < longer).to(tl.int32)
    before = ends <= begin
    sequence = tl.sum((before & (i < batch)).to(tl.int32), 0)
    start = tl.max(tl.where(before, ends, 0), 0)
    return begin, end, sequence, start, blocks, longer


@triton.jit
def share_with(block, blocks, longer):
    """The share that has a block, if shares have so many blocks and the first ones one more."""
    return tl.maximum(block // (blocks + 1), (block - longer) // tl.maximum(blocks, 1))


@triton.jit(do_not_specialize=COUNTS)
def shares_kernel(
    q, k, v, o, lse_out, partials, cut, sequences, window, mods, q_length, kv_length, batch,
    kv_heads, shares,
    GROUP: tl.constexpr, OVERLAP: tl.constexpr, BATCH: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per key head and share.

    The partial result of a share's sequence goes to slot 2 * share of the workspace, or to the next
    one if the sequence begins in the share. If it continues in others, line `share` of `cut` says
    so: the sequence, and in how many shares it lies; else the number is 0.
    """
    if OVERLAP:
        gdc_launch_dependents()
    head, share = tl.program_id(0) % kv_heads, tl.program_id(0) // kv_heads
    begin, end, sequence, start, blocks, longer = find_share(
        share, shares, batch, sequences, window, q_length, kv_length, GROUP, BLOCK_Q, BLOCK_KV,
        BATCH
    )  # fmt: skip
    pieces = 0
    while start < end:
        rows = query_rows(sequences, sequence, head, q_length)
        keys = key_rows(sequences, sequence, head, kv_length)
        queries = place_queries(0, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
        rows = Rows(rows.batch, queries.head, rows.first, rows.length)
        first_block, _, _, end_block = blocks_of_queries(
            0, rows.length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV
        )
        stop = start + tl.maximum(end_block - first_block, 1)
        j_begin = first_block + tl.maximum(begin - start, 0)
        j_end = tl.minimum(first_block + end - start, end_block)
        state = attend(
            j_begin, j_end, start >= begin, q, k, v, rows, keys, queries, sequences, window, mods,
            BLOCK_Q, BLOCK_KV
        )  # fmt: skip
        if (start >= begin) & (stop <= end):
            store_result(o, lse_out, rows, queries, *state)
        else:
            slot = 2 * share + (start >= begin).to(tl.int32)
            store_partial(partials, slot, rows, queries, *state)
        if (start >= begin) & (stop > end):
            pieces = share_with(stop - 1, blocks, longer) - share + 1
        sequence, start = sequence + 1, stop
    if head == 0:
        tl.store(cut + 2 * share, sequence - 1)
        tl.store(cut + 2 * share + 1, pieces)


launch_shares = Launcher(shares_kernel)


def pays(request: Request, long: int | None = None) -> bool:
    """Whether equal shares pay: for at least two sequences, of which the longest may have LONG
    keys or more, or `long`.

    Of shorter ones a program has many, and each costs it a beginning and an end; without shares no
    program waits for them long. Every program adds up all sequences, so there may not be too many.
    """
    uneven = request.is_ragged or request.cu_seqlens_k is not None
    batch = request.q.shape[0]
    return uneven and 1 < batch <= MOST_SEQUENCES and request.max_kv_length >= (long or LONG)


def choose_config(request: Request) -> LaunchConfig:
    """Tile sizes. With large tiles at head_dim 128, rows of one length lose less;
    at 64 and with pages, small ones are faster.
    """
    head_dim = padded_head_dim(max(request.q.shape[3], request.v.shape[3]))
    return fitted(request, WHOLE if head_dim == 128 and request.block_table is None else SHARED)


def shares_of(request: Request, config: LaunchConfig) -> int:
    """How many shares a key head gets: as many as there are programs on the GPU at the same time,
    which its shared memory and its registers limit.
    """
    about = devices[request.q.device]
    head_dim = padded_head_dim(max(request.q.shape[3], request.v.shape[3]))
    under_way = replace(config, num_stages=max(1, config.num_stages - 1))
    size = under_way.shared_bytes(head_dim, request.q.element_size()) + RESERVED
    at_once = max(1, min(about.shared_memory // size, WARPS // config.num_warps))
    return even_shares(at_once * about.num_sms // request.k.shape[2], request.q.shape[0])


def even_shares(shares: int, batch: int) -> int:
    """So many shares, or up to 1 / 20 fewer, if sequences of one length then begin and end with
    shares, which takes fewer reductions.
    """
    shares, batch = max(1, shares), max(1, batch)
    even = shares - shares % batch if batch <= shares else cdiv(batch, cdiv(batch, shares))
    return even if even >= 0.95 * shares else shares


def forward(
    request: Request, config: LaunchConfig | None = None, shares: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE of a request that `decodes`, as `fa2.forward` returns them.

    Args:
        request: see `Request`; num_splits is not looked at.
        config: tile sizes; None chooses by shape and device.
        shares: of each key head; None: as many as fill the GPU.
    """
    batch, device = request.q.shape[0], request.q.device
    config = config or choose_config(request)
    if shares is None:
        shares = shares_of(request, config)
    o, lse = new_outputs(request)
    partials = Partials.allocate(2 * shares, o, packed=False)
    cut = torch.empty((shares, 2), dtype=torch.int32, device=device)
    overlap = shares > 1 and devices.launches_overlap(device)
    launch_tiles(
        launch_shares,
        (request.k.shape[2] * shares,),
        (*arguments(request, o, lse, partials, cut), shares),
        config,
        GROUP=request.group,
        OVERLAP=overlap,
        BATCH=max(SEQUENCES, 1 << (batch - 1).bit_length()),
    )
    if shares > 1:
        combine(partials, shares, o, lse, overlap, cut)
    return o, lse, None
