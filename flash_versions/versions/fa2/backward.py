"""FlashAttention 2, backward: two kernels, in which no two programs write the same gradient.

`flash_versions/lessons/fa2_backward.py` explains them. These kernels have every option, and more:

* delta_i = rowsum(dO_i * O_i) includes a gradient of the LSE: dS = P * (dP - (delta - dLSE)).
* As in the forward, blocks that all queries see completely need no mask. A key is seen by a range
  of queries, as a query sees a range of keys.
* The query heads of a key head are rows of one tile, so the products sum over the group.

Source: Dao 2023, "FlashAttention-2", Algorithm 2, which adds to dQ atomically from the KV blocks;
the second kernel in its place is what deterministic implementations do.
"""

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import (
    KEY_GRADIENTS,
    QUERY_GRADIENT,
    LaunchConfig,
    backward_config,
)
from flash_versions.versions.tiles.algebra import (
    LOG2E,
    Window,
    block_range,
    blocks_of_queries,
    first_visible,
    last_visible,
)
from flash_versions.versions.tiles.intervals import (
    Intervals,
    listed_block,
    listed_blocks,
    mask_unseen,
    query_blocks,
)
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    cdiv,
    launch_tiles,
    load_row_values,
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
    uncap_gradient,
)
from flash_versions.versions.tiles.sequences import Sequences, new_gradients
from flash_versions.versions.tiles.varlen_scheduler import Tiling, find_tile, lay_out

COUNTS = ["q_length", "kv_length", "kv_heads", "tiles"]
SINK_BLOCK = 4096  # rows that a program loads at once for the gradient of a sink
# For dK and dV, block_kv is the tile and block_q what streams past; for dQ the other way round.
MEASURED_KV = {
    64: LaunchConfig(128, 64, num_warps=4, num_stages=2),
    128: LaunchConfig(64, 64, num_warps=4, num_stages=2),
    256: LaunchConfig(64, 64, num_warps=8, num_stages=2),
}
MEASURED_Q = {
    64: LaunchConfig(128, 64, num_warps=4, num_stages=3),
    128: LaunchConfig(64, 64, num_warps=4, num_stages=2),
    256: LaunchConfig(128, 64, num_warps=8, num_stages=1),
}


@triton.jit
def probabilities(s, lse, scale_log2):
    """P = exp(S - LSE) from scores and the LSE, which broadcasts against them; 0 for a query that
    sees no key, whose LSE is -inf, and past the last query, where it is +inf.
    """
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return tl.exp2(s * scale_log2 - lse * LOG2E)


@triton.jit
def fold_queries(
    i, dk, dv, k_tile, v_tile, k_pos, q, do, lse, delta, sequence, kv_heads, rows, keys, window,
    mods,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold query block i into (dk, dv) of a KV tile. Scores are transposed: (keys, queries)."""
    queries = place_queries(i, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
    rows = Rows(rows.batch, queries.head, rows.first, rows.length)
    q_tile = load_rows(q, rows, queries.pos, MASKED)
    capped = cap_scores(tl.dot(k_tile, q_tile.T, input_precision="ieee"), mods)
    distance = (queries.pos + queries.offset)[None, :] - k_pos[:, None]
    s = add_alibi(capped, queries.slope[None, :], distance, mods)
    if MASKED:
        s = mask_unseen(s, queries, keys, k_pos, window, KEYS_FIRST=True)
    row_lse = load_row_values(lse, rows, queries.pos, float("inf"))
    p = probabilities(s, row_lse[None, :], mods.scale_log2)
    do_tile = load_rows(do, rows, queries.pos, MASKED)
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
    j, dq, q_tile, do_tile, row_lse, row_delta, queries, k, v, keys, window, mods,
    BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold KV block j into dq of a query tile."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, keys, k_pos, MASKED)
    capped = cap_scores(tl.dot(q_tile, k_tile.T, input_precision="ieee"), mods)
    distance = (queries.pos + queries.offset)[:, None] - k_pos[None, :]
    s = add_alibi(capped, queries.slope[:, None], distance, mods)
    if MASKED:
        s = mask_unseen(s, queries, keys, k_pos, window, KEYS_FIRST=False)
    p = probabilities(s, row_lse[:, None], mods.scale_log2)
    v_tile = load_rows(v, keys, k_pos, MASKED)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    dp = drop(dp, mods, queries.sequence_head[:, None], queries.pos[:, None], k_pos[None, :])
    if mods.dropout_rescale is not None:
        dp *= mods.dropout_rescale
    ds = uncap_gradient(p * (dp - row_delta[:, None]), capped, mods)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["q_length", "heads"])
def delta_kernel(
    do, o, lse, dlse, delta, q_length, heads,
    HAS_DLSE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per block of rows, head and batch: delta = rowsum(dO * O) - dLSE, in fp32.

    0 for a query that sees no key: its P is 0, and its dLSE may well be NaN.
    """
    program = tl.program_id(0)
    blocks = tl.cdiv(q_length, BLOCK)
    head = (program // blocks) % heads
    rows = Rows(program // blocks // heads, head, program * 0, q_length)
    pos = program % blocks * BLOCK + tl.arange(0, BLOCK)
    o_tile = load_rows(o, rows, pos, MASKED=True).to(tl.float32)
    do_tile = load_rows(do, rows, pos, MASKED=True).to(tl.float32)
    row_delta = tl.sum(o_tile * do_tile, 1)
    if HAS_DLSE:
        row_delta -= load_row_values(dlse, rows, pos, 0.0)
    sees_nothing = load_row_values(lse, rows, pos, 0.0) == float("-inf")
    row_delta = tl.where(sees_nothing, 0.0, row_delta)
    store_row_values(delta, rows, pos, row_delta)


@triton.jit
def seeing_rows(rows, keys, window, mods):
    """The queries of a sequence from the first one on that sees a key; with dropout, which counts
    queries, and with intervals all of them.
    """
    if window.right is not None and window.intervals is None and mods.dropout_seed is None:
        unseeing = tl.maximum(rows.length - keys.length - window.right, 0)
        unseeing = tl.minimum(unseeing, rows.length)
        return Rows(rows.batch, rows.head, rows.first + unseeing, rows.length - unseeing)
    else:
        return rows


@triton.jit(do_not_specialize=COUNTS)
def dkdv_kernel(
    q, k, v, do, lse, delta, dk_out, dv_out, plan, sequences, window, mods, scale, q_length,
    kv_length, kv_heads, tiles,
    GROUP: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per (KV tile, key head, sequence): the first tiles, which most see, first."""
    tile, sequence, rows, keys = find_tile(
        tl.program_id(0), plan, sequences, q_length, kv_length, kv_heads, tiles, LAST_FIRST=False
    )
    if plan is not None:
        if sequence < 0:
            return
    # Blocks of queries count from the first query that sees a key, however many pads come before.
    rows = seeing_rows(rows, keys, window, mods)
    low = tile * BLOCK_KV
    if plan is not None or sequences.kv_starts is not None:  # all other rows are 0 already
        kv_length = keys.length
    high = tl.minimum(low + BLOCK_KV, keys.length) - 1
    offset = rows.length - keys.length
    begin, full_begin, full_end, end = block_range(
        first_visible(low, offset, window.right) * GROUP,
        (last_visible(low, offset, window.left, rows.length) + 1) * GROUP - 1,
        first_visible(high, offset, window.right) * GROUP,
        (last_visible(high, offset, window.left, rows.length) + 1) * GROUP - 1,
        BLOCK_Q,
    )
    k_pos = low + tl.arange(0, BLOCK_KV)
    if window.intervals is not None:
        begin, full_begin, full_end, end = query_blocks(
            window.intervals, keys, tile, GROUP, BLOCK_Q
        )
    if low > high:  # past the keys of this sequence: only zeros to write
        full_begin, full_end, end = begin, begin, begin

    k_tile = load_rows(k, keys, k_pos, MASKED=True)
    v_tile = load_rows(v, keys, k_pos, MASKED=True)
    dk = tl.zeros([BLOCK_KV, k.PADDED], tl.float32)
    dv = tl.zeros([BLOCK_KV, v.PADDED], tl.float32)
    # Keys past the end are not masked: their rows of dk and dv are replaced by 0 below, or not
    # stored. Queries past the end are: their P is 0.
    if window.right is not None or window.intervals is not None:
        for i in range(begin, full_begin):
            dk, dv = fold_queries(
                i, dk, dv, k_tile, v_tile, k_pos, q, do, lse, delta, sequence, kv_heads,
                rows, keys, window, mods, GROUP, BLOCK_Q, MASKED=True
            )  # fmt: skip
    for i in range(full_begin, full_end):
        dk, dv = fold_queries(
            i, dk, dv, k_tile, v_tile, k_pos, q, do, lse, delta, sequence, kv_heads,
            rows, keys, window, mods, GROUP, BLOCK_Q, MASKED=False
        )  # fmt: skip
    for i in range(full_end, end):
        dk, dv = fold_queries(
            i, dk, dv, k_tile, v_tile, k_pos, q, do, lse, delta, sequence, kv_heads,
            rows, keys, window, mods, GROUP, BLOCK_Q, MASKED=True
        )  # fmt: skip
    if mods.dropout_rescale is not None:
        dv *= mods.dropout_rescale
    exists = (k_pos < keys.length)[:, None]
    stored = Rows(keys.batch, keys.head, keys.first, kv_length)
    store_rows(dk_out, stored, k_pos, tl.where(exists, dk * scale, 0.0))
    store_rows(dv_out, stored, k_pos, tl.where(exists, dv, 0.0))


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q, k, v, do, lse, delta, dq_out, plan, sequences, window, mods, scale, q_length, kv_length,
    kv_heads, tiles,
    GROUP: tl.constexpr, IN_ORDER: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program per (query tile, key head, sequence), laid out as in the forward."""
    LAST_FIRST: tl.constexpr = window.right is not None
    tile, sequence, rows, keys = find_tile(
        tl.program_id(0), plan, sequences, q_length, kv_length, kv_heads, tiles, LAST_FIRST
    )
    if plan is not None:
        if sequence < 0:
            return
    queries = place_queries(tile, sequence, kv_heads, rows, keys, window, mods, GROUP, BLOCK_Q)
    rows = Rows(rows.batch, queries.head, rows.first, rows.length)
    begin, full_begin, full_end, end = blocks_of_queries(
        tile, rows.length, keys.length, window, GROUP, BLOCK_Q, BLOCK_KV
    )
    q_tile = load_rows(q, rows, queries.pos, MASKED=True)
    do_tile = load_rows(do, rows, queries.pos, MASKED=True)
    row_lse = load_row_values(lse, rows, queries.pos, float("inf"))
    row_delta = load_row_values(delta, rows, queries.pos, 0.0)
    dq = tl.zeros([BLOCK_Q, q.PADDED], tl.float32)
    given = q_tile, do_tile, row_lse, row_delta, queries
    if window.intervals is not None and IN_ORDER:
        for j in range(tl.cdiv(keys.length, BLOCK_KV)):
            dq = fold_keys(j, dq, *given, k, v, keys, window, mods, BLOCK_KV, MASKED=True)
    elif window.intervals is not None:
        line, masked, all_blocks = listed_blocks(window.intervals, keys, tile)
        for i in range(masked):
            j = listed_block(window.intervals, line, i, masked)
            dq = fold_keys(j, dq, *given, k, v, keys, window, mods, BLOCK_KV, MASKED=True)
        for i in range(masked, all_blocks):
            j = listed_block(window.intervals, line, i, masked)
            dq = fold_keys(j, dq, *given, k, v, keys, window, mods, BLOCK_KV, MASKED=False)
    else:
        if window.left is not None:
            for j in range(begin, full_begin):
                dq = fold_keys(j, dq, *given, k, v, keys, window, mods, BLOCK_KV, MASKED=True)
        for j in range(full_begin, full_end):
            dq = fold_keys(j, dq, *given, k, v, keys, window, mods, BLOCK_KV, MASKED=False)
        for j in range(full_end, end):
            dq = fold_keys(j, dq, *given, k, v, keys, window, mods, BLOCK_KV, MASKED=True)
    store_rows(dq_out, rows, queries.pos, dq * scale)


@triton.jit(do_not_specialize=["batches", "length"])
def sink_kernel(dsink, sink, lse, delta, batches, length, BLOCK: tl.constexpr):
    """dsink = -sum(exp(sink - LSE) * delta) over all queries of a head, a program for each head:
    a sink is a key whose value is 0, so its dP is 0 and its dS = P * (0 - delta). Each program adds
    up in a fixed order, so equal inputs give equal bits.
    """
    head = tl.program_id(0)
    logit = tl.load(sink + head).to(tl.float32)
    blocks = tl.cdiv(length, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for step in range(batches * blocks):
        rows = Rows(tl.cast(step // blocks, tl.int64), head, 0, length)
        index = step % blocks * BLOCK + tl.arange(0, BLOCK)
        row_lse = load_row_values(lse, rows, index, float("-inf"))
        p_delta = tl.exp(logit - row_lse) * load_row_values(delta, rows, index, 0.0)
        total += tl.where(row_lse == float("-inf"), 0.0, p_delta)  # of no sequence: it has no sink
    tl.store(dsink + head, -tl.sum(total, 0))


launch_delta = Launcher(delta_kernel)
launch_dkdv = Launcher(dkdv_kernel)
launch_dq = Launcher(dq_kernel)
launch_sink = Launcher(sink_kernel)


def compute_delta(
    o: torch.Tensor, lse: torch.Tensor, do: torch.Tensor, dlse: torch.Tensor | None
) -> torch.Tensor:
    """delta (batch, heads, M) in fp32, see `delta_kernel`."""
    batch, q_length, heads, _ = o.shape
    delta = torch.empty(lse.shape, dtype=torch.float32, device=lse.device)
    block = 64
    launch_delta(
        (cdiv(q_length, block) * heads * batch,),
        (
            View.of(do), View.of(o), View.of_rows(lse), View.of_rows(lse if dlse is None else dlse),
            View.of_rows(delta), q_length, heads
        ),
        {"HAS_DLSE": dlse is not None, "BLOCK": block},
    )  # fmt: skip
    return delta


def sink_gradient(
    sink: torch.Tensor | None, lse: torch.Tensor, delta: torch.Tensor
) -> torch.Tensor | None:
    """dsink (heads,) in the sink's dtype, None without one; lse and delta are (batch, heads, M)."""
    if sink is None:
        return None
    dsink = torch.empty_like(sink)
    batch, heads, length = lse.shape
    launch_sink(
        (heads,),
        (dsink, sink, View.of_rows(lse), View.of_rows(delta), batch, length),
        {"BLOCK": SINK_BLOCK},
        num_warps=8,
    )
    return dsink


def backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    kv_config: LaunchConfig | None = None,
    q_config: LaunchConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of attention.

    Args:
        request: as in the forward.
        o: its result (batch, M, heads, head_dim_v).
        lse: its LSE (batch, heads, M).
        statistics: None.
        do: gradient of o; any strides but the last dimension's, which is 1.
        dlse: gradient of the LSE (batch, heads, M), or None.
        kv_config: tile sizes of the kernel for dK and dV; None chooses by shape and device.
        q_config: tile sizes of the kernel for dQ; None chooses.

    Returns:
        dq, dk, dv like q, k, v, contiguous; dsink like the sink, or None without one.
    """
    q, k, v, group = request.q, request.k, request.v, request.group
    batch, q_length, heads, _ = q.shape
    kv_length, kv_heads = k.shape[1:3]
    dq, dk, dv = new_gradients(request)
    views = tuple(View.of(x) for x in (q, k, v, do))
    sides, sequences = (request.window_left, request.window_right), Sequences.of(request)
    given = (ScoreMods.of(request), request.scale)
    lengths = (q_length, kv_length, kv_heads)
    delta = compute_delta(o, lse, do, dlse)
    row_views = View.of_rows(lse), View.of_rows(delta)

    config = kv_config or backward_config(request, MEASURED_KV, KEY_GRADIENTS)
    q_config = q_config or backward_config(request, MEASURED_Q, QUERY_GRADIENT)
    tilings = Tiling(config.block_kv, of_keys=True), Tiling(q_config.block_q, group)
    tiles, q_tiles = lay_out(request, *tilings, of_queries=(dq,), of_keys=(dk, dv))
    listed = Intervals.of(request, q_config.block_kv, q_config.block_q)
    alike = listed is None or config.block_kv == q_config.block_kv
    intervals = listed if alike else Intervals.of(request, config.block_kv)
    about = (tiles.plan, sequences, Window(*sides, intervals))
    launch_tiles(
        launch_dkdv,
        (tiles.number * kv_heads * k.shape[0],),
        (*views, *row_views, View.of(dk), View.of(dv), *about, *given, *lengths, tiles.number),
        config,
        GROUP=group,
    )
    about = (q_tiles.plan, sequences, Window(*sides, listed))
    launch_tiles(
        launch_dq,
        (q_tiles.number * kv_heads * batch,),
        (*views, *row_views, View.of(dq), *about, *given, *lengths, q_tiles.number),
        q_config,
        GROUP=group,
        IN_ORDER=request.batch_invariant,
    )
    return dq, dk, dv, sink_gradient(request.sink, lse, delta)
