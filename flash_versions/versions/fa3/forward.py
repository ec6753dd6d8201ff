"""FlashAttention 3, forward, portable: the hardware fetches boxes, and heavy tiles come first.

`flash_versions/lessons/fa3.py` explains both. A box holds rows of one head, and so does a tile:
query heads are no longer packed, and the query heads of a group get their common keys from the L2
cache. A section is as many heads as have their keys and values there, and its heads take turns:

    program p:          tile = the p-th heaviest
                        load Q box
                        for j in the blocks that it sees:       in flight: boxes j + 1, j + 2
                            fold K_j, V_j
                        store O, LSE

This kernel serves plain calls, causal or full. FA2 keeps decoding, where packing pays, splits, all
options and the gradients. (The kernels for Hopper pack heads, by boxes of several, decode, and have
options and a backward.)

Cost. K and V are fetched once per query head and tile, in place of once per group. Shared memory
holds the Q tile and `num_stages` tiles of K and of V.

Sources. Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao 2024, "FlashAttention-3: Fast and Accurate
Attention with Asynchrony and Low-precision", section 3. This kernel is the part of it that needs no
warp specialisation. The paper's producer warps, its ping-pong between warpgroups and its overlap of
products and softmax inside a warpgroup are in `hopper/forward.py`. The order of tiles is from the
code of FlashAttention 3.
"""

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import UNLIMITED, devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import READ_SHARED_MEMORY, LaunchConfig, default_config
from flash_versions.dispatch.version import WIDE
from flash_versions.versions.fa2.splits import FULL, splits_of
from flash_versions.versions.tiles.algebra import (
    LOG2E,
    Window,
    blocks_of_queries,
    finalize,
    last_visible,
    softmax_step,
)
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    cdiv,
    launch_tiles,
    store_row_values,
    store_rows,
)
from flash_versions.versions.tiles.sequences import new_outputs
from flash_versions.versions.tiles.tma import describe, undescribable

COUNTS = ["q_length", "kv_length", "heads", "tiles", "total", "section"]
FEW_ROWS = 64  # fewer query rows than a tensor core of Hopper multiplies at once are decoding
L2_BYTES = 32 * 2**20  # of keys and values that stay in the L2 cache while their tiles are computed
MOST_QUERIES = 128  # of a tile
MAX_SECTION = 64  # heads; of more, the first tiles would read all keys from memory at once
MEASURED = {
    64: LaunchConfig(64, 64, num_warps=4, num_stages=3),
    128: LaunchConfig(64, 64, num_warps=4, num_stages=3),
    256: LaunchConfig(128, 64, num_warps=8, num_stages=2),
}
OPTIONS = (
    "cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_starts", "block_table", "query_starts",
    "query_ends", "window_left", "softcap", "alibi_slopes", "sink",
)  # fmt: skip


@triton.jit
def load_rows(desc, rows, index):
    """Rows index, index + 1, ... as a tile; past the ends of the tensor they read as 0."""
    box = desc.load([rows.batch, rows.head, rows.first + index, 0])
    return box.reshape(box.shape[2], box.shape[3])


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, last_key, k, v, keys, scale_log2,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold KV block j into the state: (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, j * BLOCK_KV)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    if MASKED:
        s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale_log2)
    v_tile = load_rows(v, keys, j * BLOCK_KV)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit
def heavy_first(number, tiles, total, section):
    """The place in an ordinary grid of the tile that is worked on as this number.

    There, the tiles of a head are neighbours, heaviest first. Here, the heads of a section take
    turns: all their heaviest tiles, all their second ones, ...
    """
    first = number // (section * tiles) * section
    width = tl.minimum(section, total // tiles - first)
    turn = number - first * tiles
    return (first + turn % width) * tiles + turn // width


@triton.jit
def tile_at(place, q_length, kv_length, heads, tiles, window, GROUP: tl.constexpr):
    """The work at a place of an ordinary grid: (tile, Rows of its queries, Rows of their keys)."""
    tile = place % tiles
    if window.right is not None:  # the last queries see the most keys
        tile = tiles - 1 - tile
    head, sequence = (place // tiles) % heads, place // tiles // heads
    rows = Rows(sequence, head, 0, q_length)
    return tile, rows, Rows(sequence, head // GROUP, 0, kv_length)


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q, k, v, o, lse_out, window, scale_log2, q_length, kv_length, heads, tiles, total, section,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per (query tile, query head, sequence)."""
    place = heavy_first(tl.program_id(0), tiles, total, section)
    tile, rows, keys = tile_at(place, q_length, kv_length, heads, tiles, window, GROUP)
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = kv_length - q_length  # causal is bottom-right: the last query sees the last key
    last_key = last_visible(row, offset, window.right, kv_length)
    _, _, full_end, end = blocks_of_queries(tile, q_length, kv_length, window, 1, BLOCK_Q, BLOCK_KV)

    q_tile = load_rows(q, rows, tile * BLOCK_Q)
    acc = tl.zeros([BLOCK_Q, o.PADDED], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    state = acc, row_max, row_sum
    given = q_tile, last_key, k, v, keys, scale_log2
    for j in range(full_end):
        state = fold_block(j, *state, *given, BLOCK_KV, MASKED=False)
    for j in range(full_end, end):
        state = fold_block(j, *state, *given, BLOCK_KV, MASKED=True)
    out, lse = finalize(*state)
    store_rows(o, rows, row, out)
    store_row_values(lse_out, rows, row, lse)


launch_forward = Launcher(forward_kernel)


def choose_config(request: Request) -> LaunchConfig:
    """Tile sizes for a request."""
    # On sm_100, too: in the rule's tile at head_dim 128, FA4's polynomial moves P between warps.
    return default_config(request.q.shape[1], request, MEASURED, alike=READ_SHARED_MEMORY)


def left_to_gathering(request: Request, splits: bool = True) -> str | None:
    """Why a request is left to kernels that gather rows, as a sentence, or None: to FA2's, or on
    Hopper to the one for decoding (`hopper/decode`) where that is faster. Without splits, the keys
    are not to be split, whatever the request says.
    """
    q, k, v = request.q, request.k, request.v
    if request.block_table is not None:
        return "block_table scatters the keys over pages; a box takes rows that lie in a line."
    _, length, _, head_dim = q.shape
    if (widest := max(head_dim, v.shape[3])) > WIDE:
        return f"head_dim {widest} is left to FA2's kernels; these have head dims up to {WIDE}."
    if reason := undescribable("q", q) or undescribable("k", k) or undescribable("v", v):
        return reason
    capability, shared_memory, _ = devices[q.device]
    if shared_memory < UNLIMITED and capability[0] < 9:
        return (
            f"compute capability {capability[0]}.{capability[1]} has no TMA: descriptors would "
            f"load element by element."
        )
    cuts = request.cu_seqlens_q
    rows = length if cuts is None else length // max(1, cuts.shape[0] - 1)
    if rows < FEW_ROWS:
        return (
            f"the sequences have fewer than {FEW_ROWS} query rows ({rows}): FA2 packs the query "
            f"heads of a key head into a tile."
        )
    return left_to_splits(request) if splits else None


def left_to_splits(request: Request) -> str | None:
    """Why the keys of a request are to be split, as a sentence, or None."""
    batch, length, heads, _ = request.q.shape
    heads *= batch
    if request.num_splits is None:  # whatever the tiles, so many fill the GPU
        if cdiv(length, MOST_QUERIES) * heads >= FULL * devices[request.q.device].num_sms:
            return None
    config = choose_config(request)
    programs = cdiv(length, config.block_q) * heads
    if (num_splits := splits_of(request, programs, config.block_kv)) > 1:
        return f"the keys are to be split in {num_splits}, which FA2 does."
    return None


def left_for_options(request: Request) -> str | None:
    """Why FA2's kernel serves a request that boxes reach, in the place of the portable ones of FA3
    and FA4, as a sentence, or None: they serve plain calls, causal or full.
    """
    given = [name for name in OPTIONS if getattr(request, name) is not None]
    given += [name for name in ("window_right", "dropout_p") if getattr(request, name)]
    return f"{given[0]} is left to FA2's kernel; this one serves plain calls." if given else None


def heads_of_section(request: Request, l2_bytes: int = L2_BYTES) -> int:
    """Query heads, of all sequences, whose tiles take turns: as many as have keys and values that
    fit in so much of the L2 cache; one where tiles weigh the same.
    """
    if request.window_right is None:
        return 1
    (batch, _, heads, _), (_, keys, kv_heads, head_dim) = request.q.shape, request.k.shape
    bytes_of_head = keys * (head_dim + request.v.shape[3]) * request.k.element_size()
    key_heads = max(1, l2_bytes // max(1, bytes_of_head))
    return min(key_heads * (heads // kv_heads), MAX_SECTION, batch * heads)


def forward(
    request: Request, config: LaunchConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE of a request that is not `left_for_options`, as `fa2.forward` has them.

    Args:
        request: see `Request`. Few rows are served, too, only not as fast; num_splits is not read.
        config: tile sizes; None chooses by shape and device.

    Raises:
        ValueError: the request has options.
    """
    if reason := left_for_options(request):
        raise ValueError(reason)
    return launch(launch_forward, request, config or choose_config(request))


def launch(
    launcher: Launcher, request: Request, config: LaunchConfig, *rule: tuple
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Launch this kernel on a plain call, or FA4's, which also has a rule for its softmax."""
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, _ = q.shape
    o, lse = new_outputs(request)
    tiles = cdiv(q_length, config.block_q)
    total = tiles * heads * batch
    launch_tiles(
        launcher,
        (total,),
        (
            describe(q, config.block_q), describe(k, config.block_kv), describe(v, config.block_kv),
            View.of(o), View.of_rows(lse), Window(None, request.window_right),
            request.scale * LOG2E.value, *rule, q_length, k.shape[1], heads, tiles, total,
            heads_of_section(request)
        ),
        config,
        GROUP=request.group,
    )  # fmt: skip
    return o, lse, None
