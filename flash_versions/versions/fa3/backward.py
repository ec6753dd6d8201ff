"""FlashAttention 3, backward, portable: FA2's two kernels with boxes, and heavy tiles come first.

What FA2 wasted. A backward loads four tensors block by block, a forward two: the kernel for dK and
dV reads a tile of Q and one of dO for every block, the kernel for dQ one of K and one of V. Every
thread computes their addresses and masks, in kernels whose two accumulators leave few registers.
And under a causal mask all queries see the first keys and few see the last ones. FA2 takes the
tiles of one head after the other, so that heavy tiles run at the end, when most of the GPU has no
work left.

What changes.
* Q, K, V and dO come as boxes, by descriptors, as in `forward.py`: one thread requests a box, TMA
  computes addresses and bounds, and copies of the next boxes run at the same time as products.
* A box holds rows of one head. So the kernel for dK and dV no longer has the query heads of a key
  head as rows of one tile: it walks over (block, head) pairs, and one loop still sums over both.
  The kernel for dQ has a program per query head.
* Heavy tiles first, over sections of heads: for dQ the last tiles of all heads of a section, as in
  the forward; for dK and dV the first ones. A section is as many heads as have in the L2 cache what
  the kernel loads block by block: keys and values for dQ, queries and dO for dK and dV.
* The function for exponentials is a parameter, `EXP2`, so that the next version changes only that.

    dK, dV program:             load K, V box
    (KV tile, key head)         for (i, h) in the query blocks that see it, times the group's heads:
                                    S^T = K Q_ih^T          P^T = 2^(S^T - LSE_ih)
                                    dV += P^T dO_ih         dP^T = V dO_ih^T
                                    dS^T = P^T * (dP^T - delta_ih)
                                    dK += dS^T Q_ih         in flight: the next boxes of Q and dO
                                store scale dK, dV

    dQ program:                 load Q, dO box, LSE, delta
    (query tile, query head)    for j in the KV blocks that it sees:
                                    S = Q K_j^T, P, dP = dO V_j^T, dS;  dQ += dS K_j
                                store scale dQ              in flight: the next boxes of K and V

What stays: delta's kernel, and P from the LSE. One program computes each tile of dQ, dK and dV, so
there are no atomic additions, and every run has the same bits.

Cost. Seven products, as in FA2. For dQ, K and V are fetched once per query head and tile, in place
of once per group. Where a packed sequence ends within a box, the rows of the next sequence are set
to 0 in registers; this happens only in blocks that are masked anyway.

Sources. Dao 2023, "FlashAttention-2", Algorithm 2; Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao
2024, "FlashAttention-3", section 3. The paper's backward is warp-specialised and has a warp that
adds dQ up in memory, as `hopper/backward` does. This kernel is the part that needs neither.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.device import UNLIMITED, devices
from flash_versions.dispatch.launch import Launcher, layout, placement
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import (
    KEY_GRADIENTS,
    QUERY_GRADIENT,
    READ_SHARED_MEMORY,
    ROWS_READ,
    LaunchConfig,
    backward_config,
)
from flash_versions.versions.fa2.backward import MEASURED_KV, MEASURED_Q, compute_delta
from flash_versions.versions.fa2.sink import sink_gradient
from flash_versions.versions.fa3 import forward
from flash_versions.versions.fa3.forward import (
    L2_BYTES,
    MAX_SECTION,
    heads_of_section,
    heavy_first,
    load_rows,
    own_rows,
)
from flash_versions.versions.tiles.algebra import (
    LOG2E,
    Window,
    block_range,
    blocks_of_queries,
    first_visible,
    last_visible,
    mask_scores,
)
from flash_versions.versions.tiles.rows import Rows, View, load_row_values, store_rows
from flash_versions.versions.tiles.score_mods import (
    ScoreMods,
    add_alibi,
    cap_scores,
    drop,
    place_queries,
    uncap_gradient,
)
from flash_versions.versions.tiles.sequences import Sequences, new_gradients
from flash_versions.versions.tiles.tma import describe, undescribable
from flash_versions.versions.tiles.varlen_scheduler import Tiling, find_tile, lay_out

COUNTS = ["q_length", "kv_length", "kv_heads", "tiles", "total", "section"]


@triton.jit
def exp2(x, share):
    """2^x by the special function unit; share is for other functions, see `backward`."""
    return tl.exp2(x)


@triton.jit
def probabilities(s, lse, scale_log2, share, EXP2: tl.constexpr):
    """P = exp(S - LSE) from scores and the LSE, which broadcasts against them; 0 for a query that
    sees no key, whose LSE is -inf, and past the last query, where it is +inf.
    """
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return EXP2(s * scale_log2 - lse * LOG2E, share)


@triton.jit
def fold_queries(
    step,
    dk,
    dv,
    k_tile,
    v_tile,
    k_pos,
    q,
    do,
    lse,
    delta,
    sequence,
    sequences,
    kv_heads,
    rows,
    keys,
    window,
    mods,
    share,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    EXP2: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold query block step // GROUP, in head step % GROUP of the group, into (dk, dv) of a KV
    tile. Scores are transposed: (keys, queries).
    """
    i, head = step // GROUP, keys.head * GROUP + step % GROUP
    rows = Rows(rows.batch, head, rows.first, rows.length)
    seen = Rows(keys.batch, head, keys.first, keys.length)
    queries = place_queries(i, sequence, kv_heads * GROUP, rows, seen, window, mods, 1, BLOCK_Q)
    q_tile = load_rows(q, rows, i * BLOCK_Q)
    do_tile = load_rows(do, rows, i * BLOCK_Q)
    if MASKED:
        if sequences.cu_seqlens_q is not None:
            q_tile = own_rows(q_tile, queries.pos, rows.length)
            do_tile = own_rows(do_tile, queries.pos, rows.length)
    capped = cap_scores(tl.dot(k_tile, q_tile.T, input_precision="ieee"), mods)
    distance = (queries.pos + queries.offset)[None, :] - k_pos[:, None]
    s = add_alibi(capped, queries.slope[None, :], distance, mods)
    if MASKED:
        s = mask_scores(
            s, k_pos[:, None], queries.first_key[None, :], queries.last_key[None, :], window
        )
    row_lse = load_row_values(lse, rows, queries.pos, float("inf"))
    p = probabilities(s, row_lse[None, :], mods.scale_log2, share, EXP2)
    kept = drop(p, mods, queries.sequence_head[None, :], queries.pos[None, :], k_pos[:, None])
    dv = tl.dot(kept.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
    dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")
    dp = drop(dp, mods, queries.sequence_head[None, :], queries.pos[None, :], k_pos[:, None])
    if mods.dropout_rescale is not None:
        dp *= mods.dropout_rescale
    ds = p * (dp - load_row_values(delta, rows, queries.pos, 0.0)[None, :])
    ds = uncap_gradient(ds, capped, mods)
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def fold_keys(
    j,
    dq,
    q_tile,
    do_tile,
    row_lse,
    row_delta,
    queries,
    k,
    v,
    sequences,
    keys,
    window,
    mods,
    share,
    BLOCK_KV: tl.constexpr,
    EXP2: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold KV block j into dq of a query tile."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, j * BLOCK_KV)
    v_tile = load_rows(v, keys, j * BLOCK_KV)
    if MASKED:
        if sequences.cu_seqlens_k is not None or sequences.kv_lengths is not None:
            k_tile = own_rows(k_tile, k_pos, keys.length)
            v_tile = own_rows(v_tile, k_pos, keys.length)
    capped = cap_scores(tl.dot(q_tile, k_tile.T, input_precision="ieee"), mods)
    distance = (queries.pos + queries.offset)[:, None] - k_pos[None, :]
    s = add_alibi(capped, queries.slope[:, None], distance, mods)
    if MASKED:
        s = mask_scores(
            s, k_pos[None, :], queries.first_key[:, None], queries.last_key[:, None], window
        )
    p = probabilities(s, row_lse[:, None], mods.scale_log2, share, EXP2)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    dp = drop(dp, mods, queries.sequence_head[:, None], queries.pos[:, None], k_pos[None, :])
    if mods.dropout_rescale is not None:
        dp *= mods.dropout_rescale
    ds = uncap_gradient(p * (dp - row_delta[:, None]), capped, mods)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=COUNTS)
def dkdv_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dk_out,
    dv_out,
    plan,
    sequences,
    window,
    mods,
    share,
    scale,
    q_length,
    kv_length,
    kv_heads,
    tiles,
    total,
    section,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    EXP2: tl.constexpr,
):
    """One program per (KV tile, key head, sequence): the first tiles, which most see, first."""
    number = tl.program_id(0)
    place = number if plan is not None else heavy_first(number, tiles, total, section)
    tile, sequence, rows, keys = find_tile(
        place, plan, sequences, q_length, kv_length, kv_heads, tiles, LAST_FIRST=False
    )
    if plan is not None:
        if sequence < 0:
            return
    low = tile * BLOCK_KV
    if plan is not None or sequences.kv_starts is not None:  # all other rows are 0 already
        kv_length = keys.length
    high = tl.minimum(low + BLOCK_KV, keys.length) - 1
    offset = rows.length - keys.length
    begin, full_begin, full_end, end = block_range(
        first_visible(low, offset, window.right),
        last_visible(low, offset, window.left, rows.length),
        first_visible(high, offset, window.right),
        last_visible(high, offset, window.left, rows.length),
        BLOCK_Q,
    )
    if low > high:  # past the keys of this sequence: only zeros to write
        full_begin, full_end, end = begin, begin, begin

    k_pos = low + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, low)
    v_tile = load_rows(v, keys, low)
    dk = tl.zeros([BLOCK_KV, dk_out.PADDED], tl.float32)
    dv = tl.zeros([BLOCK_KV, dv_out.PADDED], tl.float32)
    # Keys past the end are not masked: their rows of dk and dv are replaced by 0 below, or not
    # stored. Queries past the end are: their P is 0.
    if window.right is not None:
        for step in range(begin * GROUP, full_begin * GROUP):
            dk, dv = fold_queries(
                step, dk, dv, k_tile, v_tile, k_pos, q, do, lse, delta, sequence, sequences,
                kv_heads, rows, keys, window, mods, share, GROUP, BLOCK_Q, EXP2, MASKED=True
            )  # fmt: skip
    for step in range(full_begin * GROUP, full_end * GROUP):
        dk, dv = fold_queries(
            step, dk, dv, k_tile, v_tile, k_pos, q, do, lse, delta, sequence, sequences,
            kv_heads, rows, keys, window, mods, share, GROUP, BLOCK_Q, EXP2, MASKED=False
        )  # fmt: skip
    for step in range(full_end * GROUP, end * GROUP):
        dk, dv = fold_queries(
            step, dk, dv, k_tile, v_tile, k_pos, q, do, lse, delta, sequence, sequences,
            kv_heads, rows, keys, window, mods, share, GROUP, BLOCK_Q, EXP2, MASKED=True
        )  # fmt: skip
    if mods.dropout_rescale is not None:
        dv *= mods.dropout_rescale
    exists = (k_pos < keys.length)[:, None]
    stored = Rows(keys.batch, keys.head, keys.first, kv_length)
    store_rows(dk_out, stored, k_pos, tl.where(exists, dk * scale, 0.0))
    store_rows(dv_out, stored, k_pos, tl.where(exists, dv, 0.0))


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q,
    k,
    v,
    do,
    lse,
    delta,
    dq_out,
    plan,
    sequences,
    window,
    mods,
    share,
    scale,
    q_length,
    kv_length,
    kv_heads,
    tiles,
    total,
    section,
    GROUP: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    EXP2: tl.constexpr,
):
    """One program per (query tile, query head, sequence), in the order of the forward."""
    LAST_FIRST: tl.constexpr = window.right is not None
    number = tl.program_id(0)
    heads = kv_heads * GROUP
    place = number if plan is not None else heavy_first(number, tiles, total, section)
    tile, sequence, rows, keys = find_tile(
        place, plan, sequences, q_length, kv_length, heads, tiles, LAST_FIRST
    )
    if plan is not None:
        if sequence < 0:
            return
    queries = place_queries(tile, sequence, heads, rows, keys, window, mods, 1, BLOCK_Q)
    keys = Rows(keys.batch, keys.head // GROUP, keys.first, keys.length)
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, rows.length, keys.length, window, 1, BLOCK_Q, BLOCK_KV
    )
    q_tile = load_rows(q, rows, tile * BLOCK_Q)
    do_tile = load_rows(do, rows, tile * BLOCK_Q)
    row_lse = load_row_values(lse, rows, queries.pos, float("inf"))
    row_delta = load_row_values(delta, rows, queries.pos, 0.0)
    dq = tl.zeros([BLOCK_Q, dq_out.PADDED], tl.float32)
    if window.left is not None:
        for j in range(begin, full_begin):
            dq = fold_keys(
                j, dq, q_tile, do_tile, row_lse, row_delta, queries, k, v, sequences, keys, window,
                mods, share, BLOCK_KV, EXP2, MASKED=True
            )  # fmt: skip
    for j in range(full_begin, full_end):
        dq = fold_keys(
            j, dq, q_tile, do_tile, row_lse, row_delta, queries, k, v, sequences, keys, window,
            mods, share, BLOCK_KV, EXP2, MASKED=False
        )  # fmt: skip
    for j in range(full_end, end):
        dq = fold_keys(
            j, dq, q_tile, do_tile, row_lse, row_delta, queries, k, v, sequences, keys, window,
            mods, share, BLOCK_KV, EXP2, MASKED=True
        )  # fmt: skip
    store_rows(dq_out, rows, queries.pos, dq * scale)


launch_dkdv = Launcher(dkdv_kernel)
launch_dq = Launcher(dq_kernel)


def needs_pointers(request: Request) -> str | None:
    """Why boxes cannot serve a request's gradients, as a sentence, or None: the forward's reasons
    but for the splits, which a backward does not have.
    """
    return forward.left_to_gathering(request._replace(num_splits=1))


def left_to_gathering(request: Request) -> str | None:
    """Why a request's gradients are left to FA2's kernels, as a sentence, or None."""
    if reason := needs_pointers(request) or forward.needs_lists(request):
        return reason
    device, config = request.q.device, backward_config(request, MEASURED_KV, KEY_GRADIENTS)
    if devices[device].shared_memory == UNLIMITED:
        return None
    major, minor = devices[device].capability
    # Where tiles go through registers, which two accumulators have filled, they spill.
    if major in READ_SHARED_MEMORY and min(config.block_q, config.block_kv) >= ROWS_READ:
        return None
    return (
        f"tiles of {config.block_q} x {config.block_kv} in {request.q.dtype} on compute capability "
        f"{major}.{minor} are multiplied from registers: boxes in shared memory would be a detour."
    )


def key_heads_of_section(request: Request) -> int:
    """Key heads, of all sequences, whose KV tiles take turns: as many as have queries and dO that
    fit in the L2 cache; one where tiles weigh the same.
    """
    q, k, v = request.q, request.k, request.v
    if request.window_right is None:
        return 1
    streamed = request.group * q.shape[1] * (q.shape[3] + v.shape[3]) * q.element_size()
    heads = max(1, L2_BYTES // max(1, streamed))
    return min(heads, MAX_SECTION, k.shape[0] * k.shape[2])


def backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    kv_config: LaunchConfig | None = None,
    q_config: LaunchConfig | None = None,
    function: Any = exp2,
    share: tuple | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of attention, of a request that is not `left_to_gathering`.

    Args:
        request: as in the forward. Few rows are served, too, only not as fast.
        o: its result (batch, M, heads, head_dim_v).
        lse: its LSE (batch, heads, M).
        statistics: None.
        do: gradient of o; any strides but the last dimension's, which is 1.
        dlse: gradient of the LSE (batch, heads, M), or None.
        kv_config: tile sizes of the kernel for dK and dV; None chooses by shape and device.
        q_config: tile sizes of the kernel for dQ; None chooses.
        function: 2^x, a Triton function of a tile, (keys, queries) or (queries, keys), and of
            share.
        share: what the function has to know beside the tile: a tuple of constants.

    Returns:
        dq, dk, dv like q, k, v, contiguous; dsink like the sink, or None without one.
    """
    if reason := forward.needs_lists(request):
        raise ValueError(reason)
    q, k, group = request.q, request.k, request.group
    batch, q_length, heads, _ = q.shape
    kv_heads = k.shape[2]
    if undescribable("do", do):  # such as an expanded one, whose steps are 0
        do = do.clone(memory_format=torch.contiguous_format)
    dq, dk, dv = new_gradients(request)
    window = Window(request.window_left, request.window_right)
    given = (Sequences.of(request), window, ScoreMods.of(request), share, request.scale)
    lengths = (q_length, k.shape[1], kv_heads)
    key = (*layout(request), k.shape[1], share, *map(placement, (do, o, lse, dlse)))
    delta = compute_delta(key, o, lse, do, dlse)
    row_views = View.of_rows(lse), View.of_rows(delta)

    config = kv_config or backward_config(request, MEASURED_KV, KEY_GRADIENTS)
    q_config = q_config or backward_config(request, MEASURED_Q, QUERY_GRADIENT)
    tilings = Tiling(config.block_kv, of_keys=True), Tiling(q_config.block_q)
    tiles, q_tiles = lay_out(request, *tilings, of_queries=(dq,), of_keys=(dk, dv))
    total = tiles.number * kv_heads * k.shape[0]
    launch_dkdv(
        key,
        (total,),
        (
            *boxes(request, do, config),
            *row_views,
            View.of(dk),
            View.of(dv),
            tiles.plan,
            *given,
            *lengths,
            tiles.number,
            total,
            key_heads_of_section(request),
        ),
        constants(config, group, function),
        config.num_warps,
        config.num_stages,
    )
    config = q_config
    total = q_tiles.number * heads * batch
    launch_dq(
        key,
        (total,),
        (
            *boxes(request, do, config),
            *row_views,
            View.of(dq),
            q_tiles.plan,
            *given,
            *lengths,
            q_tiles.number,
            total,
            heads_of_section(request),
        ),
        constants(config, group, function),
        config.num_warps,
        config.num_stages,
    )
    return dq, dk, dv, sink_gradient(request.sink, lse, delta)


def boxes(request: Request, do: torch.Tensor, config: LaunchConfig) -> tuple:
    """Q, K, V and dO as boxes of a kernel's tiles and blocks."""
    return (
        describe(request.q, config.block_q),
        describe(request.k, config.block_kv),
        describe(request.v, config.block_kv),
        describe(do, config.block_q),
    )


def constants(config: LaunchConfig, group: int, function: Any) -> dict[str, Any]:
    """The constants of both kernels."""
    return {
        "GROUP": group,
        "BLOCK_Q": config.block_q,
        "BLOCK_KV": config.block_kv,
        "EXP2": function,
    }
