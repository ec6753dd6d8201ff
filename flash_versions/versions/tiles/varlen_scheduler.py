"""Which program works on which tile, where sequences have lengths of their own.

A small kernel plans the tiles of packed sequences on the GPU, so the host never reads a length.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher, placement
from flash_versions.dispatch.request import Request
from flash_versions.versions.tiles.rows import Rows, cdiv
from flash_versions.versions.tiles.sequences import Sequences, key_rows, query_rows

PLANNED = 128  # tiles of packed sequences that one program plans, and sequences that it looks at


class Tiles(NamedTuple):
    """The tiles of a request's queries or keys.

    Sequences of one length have `number` each. Packed ones share them by a plan, (number, 8) int32
    with one line for each tile: its sequence, its number there, the first row and the length of the
    sequence's queries, the same of its keys. The sequence is -1 where there is nothing to do.
    """

    number: int
    plan: torch.Tensor | None

    @classmethod
    def of_queries(cls, request: Request, block: int, group: int) -> "Tiles":
        """Tiles of `block` rows, `group` rows to a query. Where later queries see more keys, the
        last tile of each sequence comes first.
        """
        cu_seqlens, last_first = request.cu_seqlens_q, request.window_right is not None
        return cls._of(request, request.q.shape[1], group, block, cu_seqlens, last_first)

    @classmethod
    def of_keys(cls, request: Request, block: int) -> "Tiles":
        """Tiles of `block` keys."""
        return cls._of(request, request.k.shape[1], 1, block, request.cu_seqlens_k, False)

    @classmethod
    def _of(
        cls,
        request: Request,
        length: int,
        group: int,
        block: int,
        cu_seqlens: torch.Tensor | None,
        last_first: bool,
    ) -> "Tiles":
        if cu_seqlens is None:
            return cls(cdiv(length * group, block), None)
        count = length * group // block + request.batch
        plan = torch.empty((count, 8), dtype=torch.int32, device=cu_seqlens.device)
        launch_plan(
            (
                plan.device,
                request.k.shape[1] if request.block_table is not None else None,
                *map(placement, (cu_seqlens, *Sequences.of(request)[:5])),
            ),
            (cdiv(count, PLANNED),),
            (
                plan,
                cu_seqlens,
                Sequences.of(request),
                request.q.shape[1],
                request.max_kv_length,
                request.batch,
                count,
            ),
            {"GROUP": group, "BLOCK": block, "LAST_FIRST": last_first, "PLANNED": PLANNED},
        )
        return cls(count, plan)


@triton.jit(do_not_specialize=["q_length", "kv_length", "batch", "count"])
def plan_kernel(
    plan,
    cu_seqlens,
    sequences,
    q_length,
    kv_length,
    batch,
    count,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST_FIRST: tl.constexpr,
    PLANNED: tl.constexpr,
):
    """Plan PLANNED tiles of packed sequences, without asking how many each sequence has.

    Those of sequence b begin at cu_seqlens[b] * GROUP // BLOCK + b, which leaves room for all of
    its own; so a tile belongs to the last sequence that begins at or before it.
    """
    line = tl.program_id(0) * PLANNED + tl.arange(0, PLANNED)
    tile = count - 1 - line if LAST_FIRST else line
    begun = tl.zeros([PLANNED], tl.int32)
    for first in range(0, batch, PLANNED):
        b = first + tl.arange(0, PLANNED)
        start = tl.load(cu_seqlens + b, mask=b < batch, other=0).to(tl.int64)
        begins = (start * GROUP // BLOCK).to(tl.int32) + b
        at_or_before = (begins[None, :] <= tile[:, None]) & (b < batch)[None, :]
        begun += tl.sum(at_or_before.to(tl.int32), 1)
    sequence = tl.maximum(begun - 1, 0)
    start = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = tl.load(cu_seqlens + sequence + 1).to(tl.int64) - start
    tile -= (start * GROUP // BLOCK).to(tl.int32) + sequence
    has_rows = (begun > 0) & (tile * BLOCK < length * GROUP)
    rows = query_rows(sequences, sequence, 0, q_length)
    keys = key_rows(sequences, sequence, 0, kv_length)
    target, exists = plan + 8 * line, line < count
    tl.store(target, tl.where(has_rows, sequence, -1), mask=exists)
    tl.store(target + 1, tile, mask=exists)
    tl.store(target + 2, rows.first, mask=exists)
    tl.store(target + 3, rows.length, mask=exists)
    tl.store(target + 4, keys.first, mask=exists)
    tl.store(target + 5, keys.length, mask=exists)


launch_plan = Launcher(plan_kernel)


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
        line = plan + program // heads * 8
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
