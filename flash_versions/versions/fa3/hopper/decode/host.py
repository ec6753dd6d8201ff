"""The host's side of the decoding kernel for Hopper: which requests it takes, and its launch."""

from dataclasses import dataclass

import torch

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import padded_head_dim
from flash_versions.versions.fa2 import stream_k
from flash_versions.versions.fa2.combine import Partials
from flash_versions.versions.fa2.stream_k import MOST_SEQUENCES, even_shares
from flash_versions.versions.fa3.hopper import totals
from flash_versions.versions.fa3.hopper.config import default_config as forward_config
from flash_versions.versions.fa3.hopper.decode.kernel import decode_kernel
from flash_versions.versions.fa3.hopper.decode.pieces import AT_ONCE, PANEL, ROWS
from flash_versions.versions.fa3.hopper.host import kv_apart, score_scales, slopes_strides
from flash_versions.versions.tiles import wgmma
from flash_versions.versions.tiles.ragged import describe_ragged
from flash_versions.versions.tiles.rows import cdiv
from flash_versions.versions.tiles.sequences import new_outputs
from flash_versions.versions.tiles.tile_scheduler import Counters
from flash_versions.versions.tiles.tma import undescribable
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

SCANNED = 128  # sequences whose blocks a program adds up at once, at least
# By panels. With one or two, two programs have 64 KiB of K and V under way on a multiprocessor, as
# much as keeps the memory busy: with more, programs wait longer, some longer than others. With
# four, one program has 96 KiB (docs/understand/log.md).
SLOTS = {1: 4, 2: 2, 4: 3}
# Of loads that wait for each other, of the program that combines pieces: an estimate, not timed.
MOST_ROUNDS = 8
EXACT_SLOTS = {1: 4, 2: 3, 4: 3}  # of larger blocks: an estimate, not timed
LONG = 1024  # keys of the longest sequence: with shorter ones FA2's kernel is as fast or faster
REGISTERS = 64 * 1024  # of a multiprocessor
MOST_COUNTERS = 512  # of a launch, without given shares: two programs for each multiprocessor
THREADS = 256  # Triton starts a producer's warp as a warpgroup


@dataclass(frozen=True)
class DecodeConfig:
    """The switches of the kernel.

    Attributes:
        block_kv: keys of a block; 64 or 128.
        programs: of a multiprocessor at the same time; 1 or 2.
        slots: of the ring, each for a block of K or of V; see `SLOTS`.
        split: keys of a split, whole blocks; 0: shares fill the GPU.
    """

    block_kv: int = 64
    programs: int = 2
    slots: int = 4
    split: int = 0


counters = Counters(MOST_COUNTERS, launches=1024)
launch_alone = Launcher(decode_kernel)
launch_by_two = Launcher(decode_kernel, maxnreg=REGISTERS // THREADS // 2)


def panels_of(head_dim: int) -> int:
    """Panels of a tile of vectors: 1, 2 or 4."""
    return max(1, padded_head_dim(head_dim) // PANEL.value)


def default_config(request: Request) -> DecodeConfig:
    """The configuration for a request; with batch_invariant, in the blocks of the forward."""
    head_dim = max(request.q.shape[3], request.v.shape[3])
    panels = panels_of(head_dim)
    programs = 1 if panels > 2 else 2
    if not request.batch_invariant:
        return DecodeConfig(programs=programs, slots=SLOTS[panels])
    block_kv, split = forward_config(request).block_kv, totals.split_keys(head_dim)
    return DecodeConfig(block_kv, programs, EXACT_SLOTS[panels], split)


def left_to_gathering(request: Request) -> str | None:
    """Why a request is not for this kernel, as a sentence, or None."""
    q, k, v = request.q, request.k, request.v
    if not wgmma.available(q.device):
        return f"{q.device} is no Hopper GPU (compute capability 9.0)."
    if q.dtype not in (torch.float16, torch.bfloat16):
        return f"q has dtype {q.dtype}; float16 and bfloat16 are what WGMMA multiplies here."
    if request.cu_seqlens_q is not None or request.has_intervals or request.dropout_p > 0:
        return "packed queries, intervals and dropout_p are left to the other kernels."
    if (rows := q.shape[1] * request.group) > WARPGROUP_ROWS.value:
        return f"a key head has {rows} query rows; a tile has {WARPGROUP_ROWS.value}."
    if request.num_splits is not None:
        return "num_splits was given; this kernel chooses the number of shares itself."
    if max(q.shape[3], v.shape[3]) > 256:
        return f"head_dim {max(q.shape[3], v.shape[3])} is left to FA2; 256 is possible."
    if not (request.batch_invariant or 1 <= q.shape[0] <= MOST_SEQUENCES):
        return f"{q.shape[0]} sequences: a program adds up the blocks of 1 to {MOST_SEQUENCES}."
    for name, x in (("k", k), ("v", v)):
        if reason := undescribable(name, x):
            return reason
    if request.block_table is not None:
        if reason := page_limits(k.shape[1], default_config(request).block_kv):
            return reason
        if request.kv_starts is not None:
            return "kv_starts with pages are left to FA2: a block begins where a page does."
    if rows_apart(request) is None:
        return (
            f"k has strides {k.stride()} and v {v.stride()}; k and v must have one common number "
            f"of rows from each sequence or page to the next, and at most 2^30 in all."
        )
    return None


def page_limits(page: int, block: int) -> str | None:
    """Why pages of so many keys do not fit blocks of so many, as a sentence, or None."""
    if page % 16 or (page % block and block % page):
        return (
            f"pages of {page} keys do not fit blocks of {block}: whole pages make a block, or "
            f"whole blocks a page, of a multiple of 16 keys."
        )
    return None


def rows_apart(request: Request) -> int | None:
    """Rows from one sequence, or one page, to the next, of k and of v; None if there is no such
    number.
    """
    return kv_apart(request._replace(cu_seqlens_k=None))


def pays(request: Request) -> bool:
    """Whether the kernel is faster than FA2's, for a request that is not `left_to_gathering`: with
    pages, and where lengths differ. Of rows of one length, both reach the same share of a copy's
    rate (docs/understand/speed.md). With many pieces of many rows (few key heads, few
    sequences) FA2 combines them on all multiprocessors.
    """
    if rounds_to_combine(request) > MOST_ROUNDS:
        return False
    return request.block_table is not None or stream_k.pays(request, LONG)


def rounds_to_combine(request: Request) -> int:
    """How many rounds of loads it takes to combine the pieces of a sequence as long as others."""
    batch, q_length = request.q.shape[:2]
    pieces = cdiv(usual_shares(request, default_config(request)), batch) + 1
    return cdiv(q_length * request.group, ROWS.value) * cdiv(pieces, AT_ONCE.value)


def usual_shares(request: Request, config: DecodeConfig) -> int:
    """How many shares each key head gets: as many programs as there is room for."""
    programs = config.programs * devices[request.q.device].num_sms
    return even_shares(programs // request.k.shape[2], request.q.shape[0])


def serves(request: Request) -> bool:
    """Whether the kernel takes a request and pays there."""
    return not left_to_gathering(request) and pays(request)


def forward(
    request: Request, config: DecodeConfig | None = None, shares: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Attention and its LSE of a request that is not `left_to_gathering`.

    Args:
        request: see `Request`.
        config: the switches; None chooses by shape.
        shares: of each key head; None: as many as fill the GPU.

    Raises:
        ValueError: its pages do not fit the blocks of the configuration.
    """
    config = config or default_config(request)
    q, k, v = request.q, request.k, request.v
    paged = request.block_table is not None
    if paged and (reason := page_limits(k.shape[1], config.block_kv)):
        raise ValueError(reason)
    batch, q_length, _, head_dim = q.shape
    kv_heads = k.shape[2]
    panels, panels_v = panels_of(head_dim), panels_of(v.shape[3])
    split = config.split // config.block_kv
    if split:
        shares = max(1, cdiv(request.max_kv_length, config.split))
    elif shares is None:
        shares = usual_shares(request, config)
    table_stride = request.block_table.stride(0) if request.block_table is not None else 0
    q_strides = q.stride(0), q.stride(1), q.stride(2)
    counts = q_length, request.max_kv_length, batch, kv_heads, shares, table_stride
    constants = {
        "GROUP": request.group,
        "DIM": head_dim,
        "DIM_V": v.shape[3],
        "PAGE_SIZE": k.shape[1] if paged else 0,
        "LENGTHS": request.kv_lengths is not None,
        "STARTS": request.kv_starts is not None,
        "CUTS": request.cu_seqlens_k is not None,
        "LEFT": request.window_left is not None,
        "RIGHT": request.window_right is not None,
        "CAP": request.softcap is not None,
        "ALIBI": request.alibi_slopes is not None,
        "SINK": request.sink is not None,
        "BLOCK_KV": config.block_kv,
        "SLOTS": config.slots,
        "SLOT_PANELS": max(panels, panels_v),
        "PANELS": panels,
        "PANELS_V": panels_v,
        "BATCH": 0 if split else max(SCANNED, 1 << (batch - 1).bit_length()),
        "SPLIT": split,
    }
    numbers = (
        *q_strides, *counts, rows_apart(request), request.window_left or 0,
        request.window_right or 0, *score_scales(request), *slopes_strides(request)
    )  # fmt: skip
    programs, slots = kv_heads * shares * (batch if split else 1), (batch if split else 2) * shares
    o, lse = new_outputs(request)
    partials = Partials.allocate(slots, o, packed=False)
    keys = min(config.block_kv, k.shape[1]) if paged else config.block_kv
    optional = (
        request.kv_lengths, request.kv_starts, request.cu_seqlens_k, request.block_table,
        request.alibi_slopes, request.sink,
    )  # fmt: skip
    tensors = (
        *(describe_ragged(x, keys, PANEL.value) for x in (k, v)), q, o, lse,
        partials.acc.ptr, partials.row_max.ptr, partials.row_sum.ptr,
        counters.take(q.device, kv_heads * (batch if split else shares)),
        *[lse if x is None else x for x in optional]
    )  # fmt: skip
    launcher = launch_alone if config.programs == 1 else launch_by_two
    launcher((programs,), (*tensors, *numbers), constants)
    return o, lse, None
