"""Around FA3's backward for Hopper: what is computed of each query before it, and the rounding of
its dQ. Both kernels are portable.

Of the three kernels, the later two are launched while the one before still runs, and wait for it
when they need its results ("programmatic dependent launch" in CUDA). A backward takes 3 us less so,
which a short call feels. What was made before the first of them is there all the time.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.dispatch.launch import Launcher, Plan
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa2.backward import compute_delta
from flash_versions.versions.fa2.sink import sink_gradient
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig, tiles_of_keys
from flash_versions.versions.fa3.hopper.backward.split_groups import CONSUMERS
from flash_versions.versions.tiles.algebra import LOG2E
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    cdiv,
    load_row_values,
    load_rows,
    store_rows,
)
from flash_versions.versions.tiles.sequences import Sequences, new_gradients
from flash_versions.versions.tiles.tma import describable
from flash_versions.versions.tiles.varlen_scheduler import Tiles, Tiling, find_tile, lay_out

BLOCK = 64  # rows of a program
CLEARED = tl.constexpr(256)  # counters that a program clears at once


@triton.jit
def locate_rows(plan, sequences, q_length, heads, blocks, BLOCK: tl.constexpr):
    """(sequence, Rows, Rows of the workspace, positions) of a program: a block of one head and
    sequence. Of packed sequences, each begins in the workspace at a multiple of BLOCK.
    """
    program = tl.program_id(0)
    if plan is None:
        row = program // blocks
        rows = Rows(row // heads, row % heads, program * 0, q_length)
        return row // heads, rows, rows, program % blocks * BLOCK + tl.arange(0, BLOCK)
    else:
        tile, sequence, rows, _ = find_tile(
            program, plan, sequences, q_length, 0, heads, blocks, LAST_FIRST=False
        )
        first = (rows.first + sequence * BLOCK) // BLOCK * BLOCK
        padded = Rows(rows.batch, rows.head, first, rows.length)
        return sequence, rows, padded, tile * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def clear(counters, number):
    """0 into so many counters, by all programs together."""
    for first in range(tl.program_id(0) * CLEARED, number, tl.num_programs(0) * CLEARED):
        place = first + tl.arange(0, CLEARED)
        tl.store(counters + place, tl.zeros([CLEARED], tl.int32), mask=place < number)


@triton.jit(do_not_specialize=["arrivals_number", "q_length", "padded_length", "heads", "blocks"])
def prepare_kernel(
    do,
    o,
    lse,
    dlse,
    values,
    dq_sum,
    turns,
    arrivals,
    plan,
    sequences,
    arrivals_number,
    q_length,
    padded_length,
    heads,
    blocks,
    HAS_DLSE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The LSE in log2 units and delta = rowsum(dO * O) - dLSE, into `values` (batch, heads, 2,
    padded_length). 0 into dQ's sum, if there are turns into their counters of STEP rows each, and
    if groups are divided into those of arrivals.

    An LSE of +inf makes P = 0: for a query that sees no key, and past the last one. There, delta is
    0, as dLSE may well be NaN.
    """
    if OVERLAP:
        gdc_launch_dependents()
    sequence, rows, padded, pos = locate_rows(plan, sequences, q_length, heads, blocks, BLOCK)
    if turns is not None:
        if tl.program_id(0) == 0:
            tl.store(turns, 0)
    if arrivals is not None:
        clear(arrivals, arrivals_number)
    if plan is not None:
        if sequence < 0:  # a plan has room for more tiles than there are
            return
    o_tile = load_rows(o, rows, pos, MASKED=True).to(tl.float32)
    do_tile = load_rows(do, rows, pos, MASKED=True).to(tl.float32)
    delta = tl.sum(o_tile * do_tile, 1)
    if HAS_DLSE:
        delta -= load_row_values(dlse, rows, pos, 0.0)
    row_lse = load_row_values(lse, rows, pos, float("-inf"))
    sees_nothing = row_lse == float("-inf")
    target = values + (rows.batch.to(tl.int64) * heads + rows.head) * 2 * padded_length
    target += padded.first + pos
    exists = padded.first + pos < padded_length
    tl.store(target, tl.where(sees_nothing, float("inf"), row_lse * LOG2E), mask=exists)
    tl.store(target + padded_length, tl.where(sees_nothing, 0.0, delta), mask=exists)
    store_rows(dq_sum, padded, pos, tl.zeros([BLOCK, dq_sum.PADDED], tl.float32))
    if turns is not None:  # in the order of `Turns.counter`
        step = rows.batch * tl.cdiv(q_length, STEP) + (padded.first + tl.min(pos, 0)) // STEP
        tl.store(turns + 1 + step * heads + rows.head, 0)


@triton.jit
def in_order(x, GROUP: tl.constexpr):
    """The columns of dQ's sum in their order. In every GROUP, the sum has column 8 a + 2 b + c as
    its column (GROUP / 4) b + 2 a + c, with b below 4 and c below 2 (`tiles.exchanged` says why).
    """
    parts = x.reshape(x.shape[0], x.shape[1] // GROUP, 4, GROUP // 8, 2)
    return parts.permute(0, 1, 3, 2, 4).reshape(x.shape[0], x.shape[1])


@triton.jit(do_not_specialize=["q_length", "heads", "blocks"])
def finish_kernel(
    dq_sum,
    dq,
    plan,
    sequences,
    scale,
    q_length,
    heads,
    blocks,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """dQ = scale * its sum, rounded; a second panel of 16 columns begins at FIRST, if not None."""
    sequence, rows, padded, pos = locate_rows(plan, sequences, q_length, heads, blocks, BLOCK)
    if OVERLAP:
        gdc_wait()
    if plan is not None:
        if sequence < 0:
            return
    total = load_rows(dq_sum, padded, pos, MASKED=True)
    if FIRST is None:
        total = in_order(total, 32)
    else:
        is_first = tl.arange(0, dq_sum.PADDED)[None, :] < FIRST
        total = tl.where(is_first, in_order(total, 32), in_order(total, 16))
    store_rows(dq, rows, pos, total * scale)


# Strides follow from lengths, so a class of requests does not know them.
VIEWS = ("do", "o", "lse", "dlse", "dq_sum", "dq", "sequences")
launch_prepare = Launcher(prepare_kernel, VIEWS)
launch_finish = Launcher(finish_kernel, VIEWS, launch_pdl=True)


class RowPlans(NamedTuple):
    """The plans of both kernels: before the main one, without and with a gradient of the LSE, and
    behind it.
    """

    prepare: tuple[Plan, Plan]
    finish: Plan

    @classmethod
    def of(cls, request: Request, config: BackwardConfig, overlap: bool) -> "RowPlans":
        """For a request's class; overlap: each is launched while the kernel before it runs."""
        block = BLOCK if request.cu_seqlens_q is None else config.block_q
        widths = config.widths(request.q.shape[3])
        first = widths[0] if widths[1:] == (16,) else None
        about = {"BLOCK": block, "STEP": config.block_q, "OVERLAP": overlap}
        without, with_ = (Plan(config, {"HAS_DLSE": x, **about}) for x in (False, True))
        finish = Plan(config, {"BLOCK": block, "FIRST": first, "OVERLAP": overlap})
        return cls((without, with_), finish)


class Workspace(NamedTuple):
    """What the kernel needs beside the request, and what it leaves.

    Of packed sequences, each has whole blocks of rows in `values` and `dq_sum`, which no other
    shares: additions past its last query meet no other rows.

    k, v: those of the request; of rows with lengths of their own, contiguous.
    do: the gradient of o, as descriptors can address it.
    values: LSE and delta of each query (batch, heads, 2, padded length), fp32.
    dq_sum: (batch, M, heads, head_dim in whole 32s) fp32, heads apart in memory, with columns
        `exchanged`; packed: (1, padded length, ...).
    dsink: the gradient of the sink, if there is one.
    turns: (1 + blocks of queries of all heads), int32: the counter of tickets and those of
        additions, see `Turns`; None without turns.
    sums: dK and dV of the parts of divided groups, fp32, (places, parts, block_kv, dims of k and
        v), a place for each tile of a key head, see `Parts`; None if no group is divided.
    arrivals: (places * consumers), int32: how many parts have left their sums.
    dq, dk, dv: the gradients, so far written only where a row belongs to no sequence.
    tiles: of packed sequences, blocks of queries.
    key_tiles: of sequences with lengths of their own, tiles of keys.
    """

    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    values: torch.Tensor
    dq_sum: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor
    dsink: torch.Tensor | None
    turns: torch.Tensor | None
    sums: torch.Tensor | None
    arrivals: torch.Tensor | None
    tiles: Tiles | None
    key_tiles: Tiles | None


def new_meeting(request: Request, config: BackwardConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for `Workspace.sums` and `Workspace.arrivals`, of divided groups."""
    places = tiles_of_keys(request, config.block_kv) * request.k.shape[2]
    dims = sum(sum(config.widths(x.shape[3])) for x in (request.k, request.v))
    sums = request.q.new_empty((places, config.parts, config.block_kv, dims), dtype=torch.float32)
    return sums, request.q.new_empty(places * CONSUMERS.value, dtype=torch.int32)


def prepare(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    config: BackwardConfig,
    plans: RowPlans,
) -> Workspace:
    """Allocate what the kernel needs, and fill in what it reads."""
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, head_dim = q.shape
    if not describable(do):  # such as the gradient of a sum: one number for all
        do = do.clone(memory_format=torch.contiguous_format)
    dq, dk, dv = new_gradients(request)
    length, tiles, key_tiles, sequences = q_length, None, None, None
    plan = plans.prepare[dlse is not None]
    block = plan.constants["BLOCK"]
    if request.is_ragged:
        if request.cu_seqlens_k is None:  # keys past the end of their sequence have no gradient
            k, v = k.contiguous(), v.contiguous()
            dk.zero_()
            dv.zero_()
        tilings = Tiling(config.block_q), Tiling(config.block_kv, of_keys=True, planned=True)
        tiles, key_tiles = lay_out(request, *tilings, of_queries=(dq,), of_keys=(dk, dv))
        if request.cu_seqlens_q is None:
            tiles = None
        else:
            sequences = Sequences.of(request)
            length = config.padded_length(q_length + request.batch * block)
    dsink = None
    if request.sink is not None:
        delta = compute_delta(o, lse, do, dlse)
        dsink = sink_gradient(request.sink, lse, delta)
    padded = config.padded_length(length)
    values = q.new_empty((batch, heads, 2, padded), dtype=torch.float32)
    width = cdiv(head_dim, 32) * 32
    dq_sum = q.new_empty((batch, heads, length, width), dtype=torch.float32).transpose(1, 2)
    turns = sums = arrivals = None
    if request.is_deterministic:
        counters = 1 + batch * heads * padded // config.block_q
        turns = q.new_empty(counters, dtype=torch.int32)
    if config.parts > 1:
        sums, arrivals = new_meeting(request, config)
    blocks = cdiv(padded, block) if tiles is None else tiles.number
    rows_of_lse = View.of_rows(lse)
    launch_prepare.launch(
        plan,
        (blocks * heads * batch,),
        (
            View.of(do),
            View.of(o),
            rows_of_lse,
            rows_of_lse if dlse is None else View.of_rows(dlse),
            values,
            View.of(dq_sum),
            turns,
            arrivals,
            tiles and tiles.plan,
            sequences,
            0 if arrivals is None else arrivals.numel(),
            q_length,
            padded,
            heads,
            blocks,
        ),
    )
    return Workspace(
        k, v, do, values, dq_sum, dq, dk, dv, dsink, turns, sums, arrivals, tiles, key_tiles
    )


def finish(request: Request, space: Workspace, plan: Plan) -> None:
    """Write dQ (batch, M, heads, head_dim), of its sum; of packed sequences by the tiles that
    `prepare` planned.
    """
    dq, tiles = space.dq, space.tiles
    batch, q_length, heads, _ = dq.shape
    if tiles is None:
        lines, sequences = None, None
        blocks = cdiv(q_length, plan.constants["BLOCK"])
    else:
        lines, sequences, blocks = tiles.plan, Sequences.of(request), tiles.number
    source = View.of(space.dq_sum)
    target = View(*View.of(dq)[:5], source.PADDED)  # of 16 dims, 32 columns
    launch_finish.launch(
        plan,
        (blocks * heads * batch,),
        (source, target, lines, sequences, request.scale, q_length, heads, blocks),
    )
