"""FlashAttention 1, backward: the gradients without ever writing P or dS to memory.

`flash_versions/lessons/fa1_backward.py` derives them and draws the schedule. This kernel has the
options of the forward, and computes P from its m and l: P_ij = exp(S_ij - m_i) / l_i.

Cost: five matrix products for each pair of blocks; the forward has two. What it wastes: there are
only as many programs as key heads, so only a large batch fills a GPU; for every KV block, all of dQ
is read and written in fp32, and O is read to compute the same D again.

Source: Dao et al. 2022, "FlashAttention: Fast and Memory-Efficient Exact Attention with
IO-Awareness", Algorithm 4 and its derivation in appendix B, without dropout. Not in the paper: the
loop over the heads of a group, the window, the gradient of the LSE.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import UNLIMITED, devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import READ_SHARED_MEMORY, LaunchConfig, padded_head_dim
from flash_versions.versions.tiles.algebra import (
    Window,
    first_visible,
    last_visible,
    mask_scores,
    seen_blocks,
)
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    launch_tiles,
    load_row_values,
    load_rows,
    store_rows,
)
from flash_versions.versions.tiles.sequences import Sequences, key_rows

COUNTS = ["q_length", "kv_length", "kv_heads"]
# By head dim, what spills little or nothing; 80 KiB of shared memory or less, which every GPU has.
CONFIGS = {
    64: LaunchConfig(128, 64, num_warps=8, num_stages=1),
    128: LaunchConfig(32, 64, num_warps=8, num_stages=1),
    256: LaunchConfig(16, 32, num_warps=8, num_stages=1),
}
# At head_dim 64, where products go through registers: the larger tile spills there.
THROUGH_REGISTERS = LaunchConfig(32, 64, num_warps=4, num_stages=1)
CONFIGS_FP32 = {  # exact products run on the ordinary FP units and need registers
    64: LaunchConfig(16, 32, num_warps=8, num_stages=1),
    128: LaunchConfig(16, 16, num_warps=8, num_stages=1),
    256: LaunchConfig(16, 16, num_warps=8, num_stages=1),
}


class QueryViews(NamedTuple):
    """What belongs to the queries in memory."""

    q: Any
    o: Any
    do: Any
    dq: Any
    dlse: Any
    row_max: Any
    row_sum: Any


@triton.jit
def probabilities(s, row_max, row_sum):
    """P = exp(S - m) / l of scores (queries, keys), 0 for a query that sees no key (m = -inf, l =
    0).
    """
    pivot = tl.where(row_max == float("-inf"), 0.0, row_max)
    norm = 1.0 / tl.where(row_sum == 0.0, 1.0, row_sum)
    return tl.exp(s - pivot[:, None]) * norm[:, None]


@triton.jit
def fold_queries(
    i, dk, dv, k_tile, v_tile, k_pos, queries, rows, offset, kv_length, window, scale,
    BLOCK_Q: tl.constexpr, HAS_DLSE: tl.constexpr
):  # fmt: skip
    """Fold query block i into (dk, dv) of a KV block, dk without the scale; add to dq in memory."""
    q_pos = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_tile = load_rows(queries.q, rows, q_pos, MASKED=True)
    do_tile = load_rows(queries.do, rows, q_pos, MASKED=True)
    o_tile = load_rows(queries.o, rows, q_pos, MASKED=True)
    row_max = load_row_values(queries.row_max, rows, q_pos, 0.0)
    row_sum = load_row_values(queries.row_sum, rows, q_pos, float("inf"))  # past the end: P = 0
    delta = tl.sum(do_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    if HAS_DLSE:
        delta -= load_row_values(queries.dlse, rows, q_pos, 0.0)
    delta = tl.where(row_sum == 0.0, 0.0, delta)  # no key: P is 0, and dLSE may well be NaN

    s = tl.dot(q_tile, k_tile.T, input_precision="ieee") * scale
    first_key = first_visible(q_pos, offset, window.left)
    last_key = last_visible(q_pos, offset, window.right, kv_length)
    s = mask_scores(s, k_pos[None, :], first_key[:, None], last_key[:, None], window)
    p = probabilities(s, row_max, row_sum)
    dv = tl.dot(p.to(do_tile.dtype).T, do_tile, dv, input_precision="ieee")
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    ds = (p * (dp - delta[:, None])).to(q_tile.dtype)
    dk = tl.dot(ds.T, q_tile, dk, input_precision="ieee")
    dq = load_rows(queries.dq, rows, q_pos, MASKED=True)
    dq += tl.dot(ds, k_tile, input_precision="ieee") * scale
    store_rows(queries.dq, rows, q_pos, dq)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def backward_kernel(
    queries, k, v, dk_out, dv_out, sequences, window, q_length, kv_length, kv_heads, scale,
    GROUP: tl.constexpr, HAS_DLSE: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per (key head, batch): it alone writes the gradients of its heads."""
    kv_head = tl.program_id(0) % kv_heads
    batch = tl.program_id(0) // kv_heads
    keys = key_rows(sequences, batch, kv_head, kv_length)
    offset = keys.length - q_length
    # Nothing of block j + 1 is loaded ahead: it reads the dQ that block j wrote. Within a block of
    # keys every row of dQ comes once, so there the order of loads and stores is free.
    for j in tl.range(0, tl.cdiv(keys.length, BLOCK_KV), num_stages=1):
        first = j * BLOCK_KV
        last = tl.minimum(first + BLOCK_KV, keys.length) - 1
        begin, _, _, end = seen_blocks(
            first, last, -offset, window.right, window.left, q_length, BLOCK_Q
        )
        k_pos = first + tl.arange(0, BLOCK_KV)
        k_tile = load_rows(k, keys, k_pos, MASKED=True)
        v_tile = load_rows(v, keys, k_pos, MASKED=True)
        dk = tl.zeros([BLOCK_KV, k.PADDED], tl.float32)
        dv = tl.zeros([BLOCK_KV, v.PADDED], tl.float32)
        for member in range(GROUP):
            rows = Rows(batch, kv_head * GROUP + member, batch * 0, q_length)
            for i in range(begin, end):
                dk, dv = fold_queries(
                    i, dk, dv, k_tile, v_tile, k_pos, queries, rows, offset, keys.length,
                    window, scale, BLOCK_Q, HAS_DLSE
                )  # fmt: skip
        store_rows(dk_out, keys, k_pos, dk * scale)
        store_rows(dv_out, keys, k_pos, dv)
        tl.debug_barrier()  # the threads that load a row of dQ need not be those that stored it


launch_backward = Launcher(backward_kernel)


def choose_config(request: Request) -> LaunchConfig:
    """Tile sizes by dtype, head dims and device."""
    head_dim = max(64, padded_head_dim(max(request.q.shape[3], request.v.shape[3])))
    if request.q.dtype == torch.float32:
        return CONFIGS_FP32[head_dim]
    about = devices[request.q.device]
    registers = about.capability[0] not in READ_SHARED_MEMORY and about.shared_memory < UNLIMITED
    return THROUGH_REGISTERS if registers and head_dim == 64 else CONFIGS[head_dim]


def backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    """Gradients of attention.

    Args:
        request: as in the forward.
        o: its result (batch, M, heads, head_dim_v).
        lse: its LSE (batch, heads, M), which is not needed beside the statistics.
        statistics: fp32 (2, batch, heads, M): the row maximum (natural units) and the row sum.
        do: gradient of o; any strides but the last dimension's, which is 1.
        dlse: gradient of the LSE (batch, heads, M), or None.
        config: tile sizes; None chooses by shape and device.

    Returns:
        dq, dk, dv like q, k, v, contiguous; None, for there is no sink.
    """
    q, k, v = request.q, request.k, request.v
    batch, q_length = q.shape[:2]
    kv_length, kv_heads = k.shape[1:3]
    config = config or choose_config(request)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    queries = QueryViews(
        *(View.of(x) for x in (q, o, do, dq)),
        *(View.of_rows(x) for x in (lse if dlse is None else dlse, *statistics)),
    )
    views = tuple(View.of(x) for x in (k, v, dk, dv))
    given = (Sequences.of(request), Window(request.window_left, request.window_right))
    launch_tiles(
        launch_backward,
        (kv_heads * batch,),
        (queries, *views, *given, q_length, kv_length, kv_heads, request.scale),
        config,
        GROUP=request.group,
        HAS_DLSE=dlse is not None,
    )
    return dq.to(q.dtype), dk, dv, None
