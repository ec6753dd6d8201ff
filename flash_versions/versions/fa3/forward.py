"""FlashAttention 3, forward, portable: the hardware fetches boxes, and heavy tiles come first.

Without the code for options: python -m flash_versions.diff --show fa3 --plain

What FA2 wasted. Every thread computes addresses, masks and copies for its share of each tile of K
and V. This takes registers and issue slots that the softmax needs as well. And the tiles of a
causal mask differ in work. FA2 takes the tiles of one head after the other, so that heavy tiles of
the last heads run at the end, when most of the GPU has no work left.

What changes.
* Tensor descriptors replace pointers. A descriptor says once where a (batch, head, row, dim) tensor
  lies, and one thread requests a box of it. Hopper's TMA (tensor memory accelerator) computes the
  addresses, copies the box to shared memory and writes 0 for elements outside of the tensor. So a
  load needs no mask and no registers.
* The loop over KV blocks is pipelined `num_stages` deep: copies of the next blocks run while the
  tensor cores, which on Hopper read K and V from shared memory, work on this one.
* Heavy tiles first, over several heads. Under a causal mask the last tiles of all heads of a
  section come before the others, so that light tiles run at the end. A section is as many heads as
  have their keys and values in the L2 cache.
* A persistent grid, on request: as many programs as the GPU holds at once, each of which walks over
  tiles. The explicit kernel gains by it, because its producer works on the next tile while the
  consumers finish this one. In this kernel nothing overlaps, and the hardware deals tiles to
  programs better than a fixed walk does, which with a causal mask costs a tenth of the speed
  (docs/understand/log.md). So by default every tile has its own program.
* A box holds rows of one head, and so does a tile: query heads are no longer packed. The query
  heads of a group get their common keys from the L2 cache. FA2 keeps decoding, where packing pays,
  and splits. (The kernels for Hopper pack heads, by boxes of several, and decode.)

    program p of n:     for number in p, p + n, p + 2n, ...:        n tiles: one each
                            tile = the number-th heaviest
                            load Q box
                            for j in the blocks that it sees:       in flight: boxes j + 1, j + 2
                                fold K_j, V_j
                            store O, LSE

Cost. K and V are fetched once per query head and tile, in place of once per group. Shared memory
holds the Q tile and `num_stages` tiles of K and of V.

Sources. Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao 2024, "FlashAttention-3: Fast and Accurate
Attention with Asynchrony and Low-precision", section 3. This kernel is the part of it that needs no
warp specialisation. The paper's producer warps, its ping-pong between warpgroups and its overlap of
products and softmax inside a warpgroup are in `hopper/forward.py`. The persistent grid and the
order of tiles are from the code of FlashAttention 3.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import UNLIMITED, devices
from flash_versions.dispatch.launch import Launcher, layout
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import READ_SHARED_MEMORY, LaunchConfig, default_config
from flash_versions.dispatch.version import WIDE
from flash_versions.versions.fa2.splits import splits_of
from flash_versions.versions.tiles.algebra import (
    Window,
    blocks_of_queries,
    finalize,
    mask_scores,
    softmax_step,
)
from flash_versions.versions.tiles.rows import Rows, View, cdiv, store_row_values, store_rows
from flash_versions.versions.tiles.score_mods import (
    ScoreMods,
    add_alibi,
    cap_scores,
    drop,
    place_queries,
    sink_state,
)
from flash_versions.versions.tiles.sequences import Sequences, new_outputs
from flash_versions.versions.tiles.tma import describe, undescribable
from flash_versions.versions.tiles.varlen_scheduler import Tiling, find_tile, lay_out

# These differ from call to call, a growing cache's with every token: no kernel for each value.
COUNTS = ["q_length", "kv_length", "heads", "tiles", "total", "section"]
FEW_ROWS = 64  # fewer query rows than a tensor core of Hopper multiplies at once are decoding
RESIDENT_WARPS = 8  # of this kernel on a multiprocessor: with up to 255 registers a thread
L2_BYTES = 32 * 2**20  # of keys and values that stay in the L2 cache while their tiles are computed
MAX_SECTION = 64  # heads; of more, the first tiles would read all keys from memory at once
MEASURED = {
    64: LaunchConfig(64, 64, num_warps=4, num_stages=3),
    128: LaunchConfig(64, 64, num_warps=4, num_stages=3),
    256: LaunchConfig(128, 64, num_warps=8, num_stages=2),
}


@triton.jit
def load_rows(desc, rows, index):
    """Rows index, index + 1, ... as a tile; past the ends of the tensor they read as 0, past the
    sequence's own end as whatever lies there.
    """
    box = desc.load([rows.batch, rows.head, rows.first + index, 0])
    return box.reshape(box.shape[2], box.shape[3])


@triton.jit
def own_rows(tile, pos, length):
    """A tile without what follows its sequence in memory, which may be NaN: 0 * NaN is NaN."""
    return tl.where((pos < length)[:, None], tile, 0.0)


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
    MASKED: tl.constexpr,
):
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, j * BLOCK_KV)
    s = cap_scores(tl.dot(q_tile, k_tile.T, input_precision="ieee"), mods)
    distance = (queries.pos + queries.offset)[:, None] - k_pos[None, :]
    s = add_alibi(s, queries.slope[:, None], distance, mods)
    if MASKED:
        s = mask_scores(
            s, k_pos[None, :], queries.first_key[:, None], queries.last_key[:, None], window
        )
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, mods.scale_log2)
    p = drop(p, mods, queries.sequence_head[:, None], queries.pos[:, None], k_pos[None, :])
    v_tile = load_rows(v, keys, j * BLOCK_KV)
    if MASKED:
        if sequences.cu_seqlens_k is not None or sequences.kv_lengths is not None:
            v_tile = own_rows(v_tile, k_pos, keys.length)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def attend(
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
    begin,
    full_begin,
    full_end,
    end,
    BLOCK_KV: tl.constexpr,
):
    """Fold KV blocks [begin, end) into the state of a query tile: (acc, row_max, row_sum).

    Blocks outside [full_begin, full_end) are masked.
    """
    if window.left is not None:
        for j in range(begin, full_begin):
            acc, row_max, row_sum = fold_block(
                j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
                BLOCK_KV, MASKED=True
            )  # fmt: skip
    for j in range(full_begin, full_end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
            BLOCK_KV, MASKED=False
        )  # fmt: skip
    for j in range(full_end, end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
            BLOCK_KV, MASKED=True
        )  # fmt: skip
    return acc, row_max, row_sum


@triton.jit
def forward_tile(
    tile,
    sequence,
    rows,
    keys,
    q,
    k,
    v,
    o,
    lse_out,
    sequences,
    window,
    mods,
    heads,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Compute and store one tile, whose rows and keys are those of a query head."""
    queries = place_queries(tile, sequence, heads, rows, keys, window, mods, 1, BLOCK_Q)
    keys = Rows(keys.batch, keys.head // GROUP, keys.first, keys.length)
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, rows.length, keys.length, window, 1, BLOCK_Q, BLOCK_KV
    )

    q_tile = load_rows(q, rows, tile * BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, o.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max, row_sum = sink_state(row_max, row_sum, mods, queries.head, True)
    acc, row_max, row_sum = attend(
        acc, row_max, row_sum, q_tile, queries, k, v, sequences, keys, window, mods,
        begin, full_begin, full_end, end, BLOCK_KV
    )  # fmt: skip
    if mods.dropout_rescale is not None:
        acc *= mods.dropout_rescale
    # A box of O would reach past the end of a packed sequence into the next: store by pointers.
    out, lse = finalize(acc, row_max, row_sum)
    store_rows(o, rows, queries.pos, out)
    store_row_values(lse_out, rows, queries.pos, lse)


@triton.jit
def heavy_first(number, tiles, total, section):
    """The place in an ordinary grid of the tile that is walked over as this number.

    There, the tiles of a head are neighbours, heaviest first. Here, the heads of a section take
    turns: all their heaviest tiles, all their second ones, ...
    """
    first = number // (section * tiles) * section
    width = tl.minimum(section, total // tiles - first)
    turn = number - first * tiles
    return (first + turn % width) * tiles + turn // width


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q,
    k,
    v,
    o,
    lse_out,
    plan,
    sequences,
    window,
    mods,
    q_length,
    kv_length,
    heads,
    tiles,
    total,
    section,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
):
    """Each program walks over tiles, one (query tile, query head, sequence) after the other."""
    LAST_FIRST: tl.constexpr = window.right is not None  # the last queries see the most keys
    for number in range(tl.program_id(0), total, tl.num_programs(0)):
        place = number if plan is not None else heavy_first(number, tiles, total, section)
        tile, sequence, rows, keys = find_tile(
            place, plan, sequences, q_length, kv_length, heads, tiles, LAST_FIRST
        )
        if plan is None or sequence >= 0:  # a plan has room for more tiles than there are
            forward_tile(
                tile, sequence, rows, keys, q, k, v, o, lse_out, sequences, window, mods, heads,
                GROUP, BLOCK_Q, BLOCK_KV
            )  # fmt: skip


launch_forward = Launcher(forward_kernel)


def choose_config(request: Request) -> LaunchConfig:
    """Tile sizes for a request: what happens to the scores takes registers, too, most of all the
    random numbers of dropout.
    """
    # On sm_100, too: in the rule's tile at head_dim 128, FA4's polynomial moves P between warps.
    config = default_config(request.q.shape[1], request, MEASURED, alike=READ_SHARED_MEMORY)
    if request.dropout_p > 0:
        wide = max(request.q.shape[3], request.v.shape[3]) > 128
        return replace(config, block_q=min(config.block_q, 64 if wide else 128), block_kv=32)
    if request.softcap is not None or request.alibi_slopes is not None:
        return replace(config, block_kv=min(config.block_kv, 64))
    return config


def left_to_gathering(request: Request) -> str | None:
    """Why a request is left to kernels that gather rows, as a sentence, or None: to FA2's, or on
    Hopper to the one for decoding (`hopper/decode`) where that is faster.
    """
    q, k, v = request.q, request.k, request.v
    if request.block_table is not None:
        return "block_table scatters the keys over pages; a box takes rows that lie in a line."
    if (widest := max(q.shape[3], v.shape[3])) > WIDE:
        return f"head_dim {widest} is left to FA2's kernels; these have head dims up to {WIDE}."
    for name, x in (("q", q), ("k", k), ("v", v)):
        if reason := undescribable(name, x):
            return reason
    if devices[q.device].shared_memory < UNLIMITED:
        major, minor = devices[q.device].capability
        if major < 9:
            return (
                f"compute capability {major}.{minor} has no TMA: descriptors would load element by "
                f"element."
            )
    rows = q.shape[0] * q.shape[1] // max(1, request.batch)
    if rows < FEW_ROWS:
        return (
            f"the sequences have fewer than {FEW_ROWS} query rows ({rows}): FA2 packs the query "
            f"heads of a key head into a tile."
        )
    config = choose_config(request)
    programs = cdiv(q.shape[1], config.block_q) * q.shape[2] * q.shape[0]
    if (num_splits := splits_of(request, programs, config.block_kv)) > 1:
        return f"the keys are to be split in {num_splits}, which FA2 does."
    return None


def needs_lists(request: Request) -> str | None:
    """Why FA2's kernels serve a request in the place of the portable ones here, as a sentence, or
    None.
    """
    if request.has_intervals:
        return "query_starts and query_ends need lists of blocks, which FA2's kernels walk over."
    return None


def heads_of_section(request: Request, l2_bytes: int = L2_BYTES) -> int:
    """Query heads, of all sequences, whose tiles take turns: as many as have keys and values that
    fit in so much of the L2 cache; one where tiles weigh the same.
    """
    q, k, v = request.q, request.k, request.v
    if request.window_right is None:
        return 1
    bytes_of_head = k.shape[1] * (k.shape[3] + v.shape[3]) * k.element_size()
    key_heads = max(1, l2_bytes // max(1, bytes_of_head))
    return min(key_heads * request.group, MAX_SECTION, q.shape[0] * q.shape[2])


def forward(
    request: Request, config: LaunchConfig | None = None, persistent: bool = False
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE, of a request that is not `left_to_gathering`.

    Args:
        request: see `Request`. Few rows are served, too, only not as fast; num_splits is not read.
        config: tile sizes; None chooses by shape and device.
        persistent: as many programs as the GPU holds at once walk over the tiles; otherwise each
            tile has its own.

    Returns:
        o (batch, M, heads, head_dim_v), contiguous, in q's dtype; lse natural log, fp32 (batch,
        heads, M); no further statistics.
    """
    if reason := needs_lists(request):
        raise ValueError(reason)
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, _ = q.shape
    config = config or choose_config(request)
    o, lse = new_outputs(request)
    (tiles,) = lay_out(request, Tiling(config.block_q), of_queries=(o, lse))
    total = tiles.number * heads * batch  # packed: a batch of one
    programs = total
    if persistent:
        resident = devices[q.device].num_sms * max(1, RESIDENT_WARPS // config.num_warps)
        programs = min(resident, total)

    launch_forward(
        layout(request),
        (programs,),
        (
            describe(q, config.block_q),
            describe(k, config.block_kv),
            describe(v, config.block_kv),
            View.of(o),
            View.of_rows(lse),
            tiles.plan,
            Sequences.of(request),
            Window(request.window_left, request.window_right),
            ScoreMods.of(request),
            q_length,
            request.max_kv_length,
            heads,
            tiles.number,
            total,
            heads_of_section(request),
        ),
        {
            "GROUP": request.group,
            "BLOCK_Q": config.block_q,
            "BLOCK_KV": config.block_kv,
        },
        config.num_warps,
        config.num_stages,
    )
    return o, lse, None
