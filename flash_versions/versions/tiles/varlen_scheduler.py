"""Which program works on which tile, where sequences have lengths of their own.

A small kernel plans the tiles of packed sequences on the GPU, so the host never reads a length. The
heaviest tiles come first: what begins last is then short, and no program is left with a long one.
The same kernel fills rows of results that belong to no sequence, because each launch takes the host
several microseconds.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.versions.tiles.rows import Rows, cdiv
from flash_versions.versions.tiles.sequences import Sequences, key_rows, query_rows

PLANNED = tl.constexpr(64)  # tiles that one program plans, and sequences that it looks at
FILLED = tl.constexpr(1024)  # numbers that a program writes at once
FILLING = 264  # programs that fill rows of no sequence: two for each multiprocessor of an H200
LINE_SIZE = 8  # int32 of a line of a plan
LINE = tl.constexpr(LINE_SIZE)


class Tiling(NamedTuple):
    """How queries, or keys, are cut into tiles.

    Attributes:
        block: rows of a tile.
        group: rows to a query.
        of_keys: keys, or else queries.
        planned: whether there is a plan for sequences that are not packed, too.
    """

    block: int
    group: int = 1
    of_keys: bool = False
    planned: bool = False


class Tiles(NamedTuple):
    """The tiles of a request's queries or keys.

    Sequences of one length have `number` each. Packed ones, and others where a kernel asks for it
    (`planned`), share them by a plan, (1 + number, 8) int32. Its first line begins with how many
    tiles there are; then it has one line for each: its sequence, its number there, the first row
    and the length of the sequence's queries, the same of its keys. The heaviest tiles come first.
    Behind the last tile, the sequence is -1.
    """

    number: int
    plan: torch.Tensor | None


def lay_out(
    request: Request,
    *tilings: Tiling,
    of_queries: tuple[torch.Tensor, ...] = (),
    of_keys: tuple[torch.Tensor, ...] = (),
) -> list[Tiles]:
    """The tiles of a request. Where sequences are packed, the kernel that plans them also fills the
    rows that belong to no sequence.

    Args:
        request: see `Request`.
        tilings: which tiles.
        of_queries: results of queries, contiguous: (batch, M, heads, dim), which get 0 there, or an
            LSE (batch, heads, M), which gets -inf.
        of_keys: results of keys, (batch, N, kv_heads, dim).
    """
    q, cuts, batch = request.q, (request.cu_seqlens_q, request.cu_seqlens_k), request.batch
    found: list[Tiles] = []
    plans: list[torch.Tensor] = []
    programs = 1
    for tiling in tilings:
        x = request.k if tiling.of_keys else q
        rows = x.shape[1] * tiling.group
        if cuts[tiling.of_keys] is None and not tiling.planned:
            found.append(Tiles(cdiv(rows, tiling.block), None))
            continue
        number = x.shape[0] * rows // tiling.block + batch
        plan = torch.empty((1 + number, LINE_SIZE), dtype=torch.int32, device=x.device)
        found.append(Tiles(number, plan))
        plans.append(plan)
        programs = max(programs, cdiv(number, PLANNED.value))
    of_queries = of_queries if cuts[0] is not None else ()
    of_keys = of_keys if cuts[1] is not None else ()
    results = (*of_queries, *of_keys)
    if not (plans or results):
        return found
    if results and q.is_cuda:
        programs = max(programs, FILLING)
    planned = [about[:3] for tiles, about in zip(found, tilings) if tiles.plan is not None]
    filled = [(False, *form_of(x)) for x in of_queries] + [(True, *form_of(x)) for x in of_keys]
    launch_lay_out(
        (programs,),
        (
            tuple(plans), results, Sequences.of(request), q.shape[1], request.max_kv_length, batch
        ),
        {
            "TILINGS": tuple(planned),
            "RESULTS": tuple(filled),
            "CAUSAL": request.window_right is not None,
        },
    )  # fmt: skip
    return found


def form_of(x: torch.Tensor) -> tuple[bool, int, int]:
    """Whether a result is an LSE (batch, heads, M), which has all rows once for each head; how many
    times it has them, and the numbers in one of them.
    """
    return (True, x.shape[1], 1) if x.dim() == 3 else (False, 1, x.shape[2] * x.shape[3])


@triton.jit
def weight(tile, own, other, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """What a tile sees, or is seen by, of a sequence of `own` rows of which the other tensor has
    `other`: the mask's diagonal ends at the last row of both.
    """
    if CAUSAL and OF_KEYS:
        return other - tl.maximum(tile * BLOCK - (own - other), 0)
    elif CAUSAL:
        return other - own + tl.minimum((tile + 1) * BLOCK, own)
    else:
        return other + tile * 0


@triton.jit
def heavier(than, own, other, BLOCK: tl.constexpr, OF_KEYS: tl.constexpr, CAUSAL: tl.constexpr):
    """How many tiles of a sequence have more weight."""
    tiles = tl.cdiv(own, BLOCK)
    if CAUSAL and OF_KEYS:
        found = tl.minimum(tl.cdiv(tl.maximum(own - than, 0), BLOCK), tiles)
    elif CAUSAL:
        lighter = tl.maximum(than - (other - own), 0) // BLOCK
        found = tiles - tl.minimum(lighter, tl.maximum(tiles - 1, 0))
    else:
        found = tiles
    return tl.where(other > than, found, 0)


@triton.jit
def first_room(cu_seqlens, sequence, length, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """The first room for a sequence's tiles."""
    if cu_seqlens is not None:
        start = tl.load(cu_seqlens + sequence).to(tl.int64)
    else:
        start = sequence.to(tl.int64) * length
    return (start * GROUP // BLOCK).to(tl.int32) + sequence


@triton.jit
def rooms(cu_seqlens, length, batch, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """As many as `lay_out` takes memory for. Packed sequences are one of this length."""
    rows = tl.cast(length, tl.int64)
    if cu_seqlens is None:
        rows *= batch
    return (rows * GROUP // BLOCK).to(tl.int32) + batch


@triton.jit
def plan_tiles(
    plan, sequences, q_length, kv_length, batch,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, OF_KEYS: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """Plan PLANNED tiles of sequences, each program for itself.

    A room is a place in the plan. Sequence b owns the rooms from start[b] * GROUP // BLOCK + b on,
    up to those of the next sequence, which is enough for all of its tiles: start is cu_seqlens,
    without it b times the length. A tile's place is the number of tiles that are heavier, and of
    those before it that weigh the same: counted by sequences, as weights change steadily along one.
    Rooms without a tile come last.
    """
    length = kv_length if OF_KEYS else q_length
    cu_seqlens = sequences.cu_seqlens_k if OF_KEYS else sequences.cu_seqlens_q
    count = rooms(cu_seqlens, length, batch, GROUP, BLOCK)
    if tl.program_id(0) * PLANNED >= count:
        return
    room = tl.program_id(0) * PLANNED + tl.arange(0, PLANNED)
    begun = tl.zeros([PLANNED], tl.int32)
    for first in range(0, batch, PLANNED):
        b = first + tl.arange(0, PLANNED)
        theirs = tl.minimum(b, batch - 1)
        begins = first_room(cu_seqlens, theirs, length, GROUP, BLOCK)
        at_or_before = (begins[None, :] <= room[:, None]) & (b < batch)[None, :]
        begun += tl.sum(at_or_before.to(tl.int32), 1)
    sequence = tl.maximum(begun - 1, 0)
    tile = room - first_room(cu_seqlens, sequence, length, GROUP, BLOCK)
    rows = query_rows(sequences, sequence, 0, q_length)
    keys = key_rows(sequences, sequence, 0, kv_length)
    own, other = (keys.length, rows.length) if OF_KEYS else (rows.length, keys.length)
    own *= GROUP
    other *= GROUP
    has_rows = (begun > 0) & (tile * BLOCK < own)
    mine = weight(tile, own, other, BLOCK, OF_KEYS, CAUSAL)

    place = tl.where(CAUSAL and not OF_KEYS, tl.cdiv(own, BLOCK) - 1 - tile, tile)
    total, tiles_before = 0, tl.zeros([PLANNED], tl.int32)
    for first in range(0, batch, PLANNED):
        b = first + tl.arange(0, PLANNED)
        theirs = tl.minimum(b, batch - 1)
        q_own = query_rows(sequences, theirs, 0, q_length).length
        k_own = key_rows(sequences, theirs, 0, kv_length).length
        own_b, other_b = (k_own, q_own) if OF_KEYS else (q_own, k_own)
        own_b = tl.where(b < batch, own_b * GROUP, 0)
        other_b = b * 0 + other_b * GROUP  # one for all, or of each
        tiles = tl.cdiv(own_b, BLOCK)
        total += tl.sum(tiles)
        before = b[None, :] < sequence[:, None]
        tiles_before += tl.sum(tl.where(before, tiles[None, :], 0), 1)
        than = mine[:, None] - before.to(tl.int32)
        more = heavier(than, own_b[None, :], other_b[None, :], BLOCK, OF_KEYS, CAUSAL)
        place += tl.sum(tl.where(b[None, :] == sequence[:, None], 0, more), 1)
    in_rooms_before = tiles_before + tl.minimum(tl.maximum(tile, 0), tl.cdiv(own, BLOCK))
    place = tl.where(has_rows, place, total + room - in_rooms_before)

    exists = room < count
    line = plan + LINE * (1 + place)
    tl.store(line, tl.where(has_rows, sequence, -1), mask=exists)
    tl.store(line + 1, tile, mask=exists)
    tl.store(line + 2, rows.first, mask=exists)
    tl.store(line + 3, rows.length, mask=exists)
    tl.store(line + 4, keys.first, mask=exists)
    tl.store(line + 5, keys.length, mask=exists)
    tl.store(plan, total)


@triton.jit
def fill_outside(
    x, sequences, q_length, kv_length, batch,
    OF_KEYS: tl.constexpr, IS_LSE: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Fill rows of a result that are before the first or behind the last of packed sequences.
    Usually no such rows exist; the attention kernel writes all rows of sequences.
    """
    rows = kv_length if OF_KEYS else q_length
    cu_seqlens = sequences.cu_seqlens_k if OF_KEYS else sequences.cu_seqlens_q
    begin = tl.load(cu_seqlens).to(tl.int64) * WIDTH
    inside = tl.load(cu_seqlens + batch).to(tl.int64) * WIDTH - begin
    size = tl.cast(rows, tl.int64) * WIDTH
    outside = size - inside  # of each group
    mine = tl.program_id(0).to(tl.int64) * FILLED
    for first in range(mine, GROUPS * outside, tl.num_programs(0).to(tl.int64) * FILLED):
        number = first + tl.arange(0, FILLED)
        group = number // outside if GROUPS > 1 else number * 0
        i = number - group * outside
        at = group * size + tl.where(i < begin, i, i + inside)
        empty = tl.full([FILLED], float("-inf") if IS_LSE else 0.0, x.dtype.element_ty)
        tl.store(x + at, empty, mask=number < GROUPS * outside)


@triton.jit(do_not_specialize=["q_length", "kv_length", "batch"])
def lay_out_kernel(
    plans, results, sequences, q_length, kv_length, batch,
    TILINGS: tl.constexpr, RESULTS: tl.constexpr, CAUSAL: tl.constexpr
):  # fmt: skip
    """What `lay_out` says: TILINGS has the first fields of each `Tiling`, RESULTS for each result
    whether it is of keys, and its `form_of`.
    """
    for i in tl.static_range(len(TILINGS)):
        plan_tiles(
            plans[i], sequences, q_length, kv_length, batch,
            TILINGS[i][0], TILINGS[i][1], TILINGS[i][2], CAUSAL
        )  # fmt: skip
    for i in tl.static_range(len(RESULTS)):
        fill_outside(
            results[i], sequences, q_length, kv_length, batch,
            RESULTS[i][0], RESULTS[i][1], RESULTS[i][2], RESULTS[i][3]
        )  # fmt: skip


launch_lay_out = Launcher(lay_out_kernel)


@triton.jit
def find_tile(
    program, plan, sequences, q_length, kv_length, heads, tiles, LAST_FIRST: tl.constexpr
):
    """The work of a program: (tile, sequence, Rows of its queries, Rows of its keys), the head
    being that of the keys.

    Neighbours work on one head, and share its keys; of packed sequences on the heads of one tile:
    there, all tiles of one head would be far apart in memory.
    """
    if plan is not None:
        head = program % heads
        line = plan + LINE * (1 + program // heads)
        tile, sequence = tl.load(line + 1), tl.load(line)
        rows = Rows(sequence, head, tl.load(line + 2), tl.load(line + 3))
        keys = Rows(sequence, head, tl.load(line + 4), tl.load(line + 5))
        if sequences.cu_seqlens_q is not None:
            rows = Rows(sequence * 0, head, rows.first, rows.length)
        if sequences.cu_seqlens_k is not None and sequences.block_table is None:
            keys = Rows(sequence * 0, head, keys.first, keys.length)
        return tile, sequence, rows, keys
    else:
        tile = program % tiles
        if LAST_FIRST:
            tile = tiles - 1 - tile
        head = (program // tiles) % heads
        sequence = program // tiles // heads
        rows = query_rows(sequences, sequence, head, q_length)
        return tile, sequence, rows, key_rows(sequences, sequence, head, kv_length)
