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

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import padded_head_dim
from flash_versions.versions.fa2.backward import compute_delta, sink_gradient
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig, shared_tiles
from flash_versions.versions.fa3.hopper.backward.split_groups import CONSUMERS
from flash_versions.versions.tiles.algebra import LOG2E
from flash_versions.versions.tiles.rows import Rows, View, cdiv, load_row_values, row_pointers
from flash_versions.versions.tiles.sequences import Sequences, new_gradients
from flash_versions.versions.tiles.tma import undescribable
from flash_versions.versions.tiles.varlen_scheduler import Tiles, Tiling, find_tile, lay_out

BLOCK = 64  # rows of a program
VECTOR = tl.constexpr(8)  # elements of 16 bits: strides of what descriptors address are multiples
CONTIGUOUS = torch.contiguous_format
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
def find_rows(view, rows, pos, DIM: tl.constexpr, PADDED: tl.constexpr):
    """(pointers, mask) of the rows `pos` as a tile of PADDED columns, of which DIM exist."""
    dim = tl.arange(0, PADDED)
    mask = (pos < rows.length)[:, None] & (dim < DIM)[None, :]
    return row_pointers(view, rows, pos)[:, None] + dim[None, :], mask


@triton.jit
def clear(counters, number):
    """0 into so many counters, by all programs together."""
    for first in range(tl.program_id(0) * CLEARED, number, tl.num_programs(0) * CLEARED):
        place = first + tl.arange(0, CLEARED)
        tl.store(counters + place, tl.zeros([CLEARED], tl.int32), mask=place < number)


@triton.jit(do_not_specialize=[
    "do_batch", "do_head", "do_row", "arrivals_number", "q_length", "length", "padded_length",
    "heads", "blocks",
])  # fmt: skip
def prepare_kernel(
    do, o, lse, dlse, values, dq_sum, turns, arrivals, plan, sequences, do_batch, do_head, do_row,
    arrivals_number, q_length, length, padded_length, heads, blocks,
    DIM: tl.constexpr, DIM_V: tl.constexpr, PADDED: tl.constexpr, PADDED_V: tl.constexpr,
    BLOCK: tl.constexpr, STEP: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """The LSE in log2 units and delta = rowsum(dO * O) - dLSE, into `values` (batch, heads, 2,
    padded_length). 0 into dQ's sum, if there are turns into their counters of STEP rows each, and
    if groups are divided into those of arrivals. All tensors are contiguous but dO, whose strides
    are counted in VECTORs.

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
    row = heads.to(tl.int64) * DIM_V
    o_view = View(o, row * q_length, DIM_V, row)
    do_view = View(
        do, do_batch.to(tl.int64) * VECTOR, do_head.to(tl.int64) * VECTOR,
        do_row.to(tl.int64) * VECTOR
    )  # fmt: skip
    o_ptrs, mask = find_rows(o_view, rows, pos, DIM_V, PADDED_V)
    do_ptrs, _ = find_rows(do_view, rows, pos, DIM_V, PADDED_V)
    o_tile = tl.load(o_ptrs, mask=mask, other=0.0).to(tl.float32)
    do_tile = tl.load(do_ptrs, mask=mask, other=0.0).to(tl.float32)
    delta = tl.sum(o_tile * do_tile, 1)
    lines = View(lse, heads.to(tl.int64) * q_length, q_length, 1)
    if dlse is not None:
        given = View(dlse, lines.batch_stride, lines.head_stride, 1)
        delta -= load_row_values(given, rows, pos, 0.0)
    row_lse = load_row_values(lines, rows, pos, float("-inf"))
    sees_nothing = row_lse == float("-inf")
    target = values + (rows.batch.to(tl.int64) * heads + rows.head) * 2 * padded_length
    target += padded.first + pos
    exists = padded.first + pos < padded_length
    tl.store(target, tl.where(sees_nothing, float("inf"), row_lse * LOG2E), mask=exists)
    tl.store(target + padded_length, tl.where(sees_nothing, 0.0, delta), mask=exists)
    line = length.to(tl.int64) * DIM
    ptrs, mask = find_rows(View(dq_sum, heads * line, line, DIM), padded, pos, DIM, PADDED)
    tl.store(ptrs, tl.zeros([BLOCK, PADDED], tl.float32), mask=mask)
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


@triton.jit(do_not_specialize=["q_length", "length", "heads", "blocks"])
def finish_kernel(
    dq_sum, dq, plan, sequences, scale, q_length, length, heads, blocks,
    DIM: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    FIRST: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """dQ, of DIM columns, = scale * its sum, of WIDTH, rounded; a second panel of 16 columns begins
    at FIRST, if not None.
    """
    sequence, rows, padded, pos = locate_rows(plan, sequences, q_length, heads, blocks, BLOCK)
    if OVERLAP:
        gdc_wait()
    if plan is not None:
        if sequence < 0:
            return
    line = length.to(tl.int64) * WIDTH
    ptrs, mask = find_rows(View(dq_sum, heads * line, line, WIDTH), padded, pos, WIDTH, PADDED)
    total = tl.load(ptrs, mask=mask, other=0.0)
    if FIRST is None:
        total = in_order(total, 32)
    else:
        is_first = tl.arange(0, PADDED)[None, :] < FIRST
        total = tl.where(is_first, in_order(total, 32), in_order(total, 16))
    row = heads.to(tl.int64) * DIM
    ptrs, mask = find_rows(View(dq, row * q_length, DIM, row), rows, pos, DIM, PADDED)
    tl.store(ptrs, (total * scale).to(dq.dtype.element_ty), mask=mask)


launch_prepare = Launcher(prepare_kernel)
launch_finish = Launcher(finish_kernel, launch_pdl=True)


def rows_of(request: Request, config: BackwardConfig) -> int:
    """The rows of a program."""
    return BLOCK if request.cu_seqlens_q is None else config.block_q


def sum_width(head_dim: int) -> int:
    """The columns of dQ's sum."""
    return cdiv(head_dim, 32) * 32


class Workspace(NamedTuple):
    """What the kernel needs beside the request, and what it leaves.

    Of packed sequences, each has whole blocks of rows in `values` and `dq_sum`, which no other
    shares: additions past its last query meet no other rows.

    k, v: those of the request; of rows with lengths of their own, contiguous.
    do: the gradient of o, as descriptors can address it.
    values: LSE and delta of each query (batch, 2, heads, padded length), fp32, heads apart.
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
    """Memory for `Workspace.sums` and `Workspace.arrivals`, of divided groups or shared tiles."""
    places = shared_tiles(request, config)
    dims = sum(sum(config.widths(x.shape[3])) for x in (request.k, request.v))
    shape = places, config.parts * config.tail, config.block_kv, dims
    sums = request.q.new_empty(shape, dtype=torch.float32)
    return sums, request.q.new_empty(places * CONSUMERS.value, dtype=torch.int32)


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """x in order and aligned, as the kernel is compiled for; as a rule, x itself."""
    return x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=CONTIGUOUS)


def prepare(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    config: BackwardConfig,
) -> Workspace:
    """Allocate what the kernel needs, and fill in what it reads."""
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, head_dim = q.shape
    if undescribable("do", do):  # such as the gradient of a sum: one number for all
        do = do.clone(memory_format=CONTIGUOUS)
    dq, dk, dv = new_gradients(request)
    tiles = key_tiles = sequences = None
    if request.is_ragged:
        if request.cu_seqlens_k is None:  # keys past the end of their sequence have no gradient
            k, v = k.contiguous(), v.contiguous()
            dk.zero_()
            dv.zero_()
        tilings = Tiling(config.block_q), Tiling(config.block_kv, of_keys=True, planned=True)
        results = {"of_queries": (dq,), "of_keys": (dk, dv)}
        tiles, key_tiles = lay_out(request, *tilings, **results)
        if request.cu_seqlens_q is None:
            tiles = None
        else:
            sequences = Sequences.of(request)
    dsink = None
    if request.sink is not None:
        delta = compute_delta(o, lse, do, dlse)
        dsink = sink_gradient(request.sink, lse, delta)
    padded, length, width = config.padded_length(q_length), q_length, sum_width(head_dim)
    if request.cu_seqlens_q is not None:
        length = padded = config.padded_length(q_length + request.batch * config.block_q)
    values = torch.empty_strided(
        (batch, 2, heads, padded), (2 * heads * padded, padded, 2 * padded, 1),
        dtype=torch.float32, device=q.device
    )  # fmt: skip
    line = length * width
    dq_sum = torch.empty_strided(
        (batch, length, heads, width), (heads * line, width, line, 1),
        dtype=torch.float32, device=q.device
    )  # fmt: skip
    turns = sums = arrivals = None
    if request.is_deterministic:
        counters = 1 + batch * heads * padded // config.block_q
        turns = q.new_empty(counters, dtype=torch.int32)
    if config.parts * config.tail > 1:
        sums, arrivals = new_meeting(request, config)
    block = rows_of(request, config)
    blocks = cdiv(padded, block) if tiles is None else tiles.number
    of_batch, of_row, of_head, _ = do.stride()
    launch_prepare(
        (blocks * heads * batch,),
        (
            do, contiguous(o), contiguous(lse), dlse if dlse is None else contiguous(dlse), values,
            dq_sum, turns, arrivals, tiles and tiles.plan, sequences, of_batch // VECTOR.value,
            of_head // VECTOR.value, of_row // VECTOR.value,
            0 if arrivals is None else arrivals.numel(), q_length, length, padded, heads, blocks
        ),
        {
            "DIM": width,
            "DIM_V": v.shape[3],
            "PADDED": padded_head_dim(width),
            "PADDED_V": padded_head_dim(v.shape[3]),
            "BLOCK": block,
            "STEP": config.block_q,
            "OVERLAP": devices.launches_overlap(q.device),
        },
    )  # fmt: skip
    return Workspace(
        k, v, do, values, dq_sum, dq, dk, dv, dsink, turns, sums, arrivals, tiles, key_tiles
    )


def finish(request: Request, space: Workspace, config: BackwardConfig) -> None:
    """Write dQ (batch, M, heads, head_dim), of its sum; of packed sequences by the tiles that
    `prepare` planned.
    """
    dq, tiles = space.dq, space.tiles
    batch, q_length, heads, head_dim = dq.shape
    block = rows_of(request, config)
    if tiles is None:
        lines, sequences, blocks = None, None, cdiv(q_length, block)
    else:
        lines, sequences, blocks = tiles.plan, Sequences.of(request), tiles.number
    _, length, _, width = space.dq_sum.shape
    widths = config.widths(head_dim)
    launch_finish(
        (blocks * heads * batch,),
        (space.dq_sum, dq, lines, sequences, request.scale, q_length, length, heads, blocks),
        {
            "DIM": head_dim,
            "WIDTH": width,
            "PADDED": padded_head_dim(width),
            "BLOCK": block,
            "FIRST": widths[0] if widths[1:] == (16,) else None,
            "OVERLAP": devices.launches_overlap(dq.device),
        },
    )
