"""Split-KV: combine attentions over ranges of keys into the attention over all keys.

Each split s has written an accumulator acc_s = sum_j 2^(x_j - m_s) v_j over its own keys, with its
maximum m_s and its sum l_s = sum_j 2^(x_j - m_s); scores x are in log2 units. With the maximum over
all splits, m = max_s m_s,

    acc = sum_s 2^(m_s - m) acc_s          l = sum_s 2^(m_s - m) l_s          o = acc / l

This is the step of the online softmax, with splits in the place of blocks. A split without a
visible key has m_s = -inf, so its weight is 0. The loop reads a tile of splits at a time: its
maxima, sums and accumulators are loaded together.

If the keys of all sequences were cut into equal shares (`stream_k.py`), the programs belong to the
shares: one combines the parts of the sequence that begins in its share and continues in others.

Cost: for each query, a split writes and reads head_dim + 2 numbers. Attention itself reads
2 * head_dim numbers for each key. So splits pay if there are many more keys than queries.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.algebra import finalize
from flash_versions.versions.tiles.rows import (
    Rows,
    View,
    load_row_values,
    load_rows,
    store_row_values,
    store_rows,
)

COUNTS = ["num_splits", "batches", "heads", "q_length"]
TILE = 8192  # numbers of the splits' accumulators that a program has in registers at once


class Partials(NamedTuple):
    """What the splits leave: fp32 views whose batch index is the slot, split * batches + batch;
    `shares_kernel` says what it is of shares.
    """

    acc: View  # (slots, M, heads, head_dim_v), unnormalised
    row_max: View  # (slots, heads, M), log2 units
    row_sum: View  # (slots, heads, M)

    @classmethod
    def allocate(cls, slots: int, o: torch.Tensor, packed: bool) -> "Partials":
        """A workspace for partial results of o (batch, M, heads, head_dim_v). If packed, rows may
        belong to no sequence: they have seen no key.
        """
        _, q_length, heads, head_dim = o.shape
        shape = slots, heads, q_length
        acc = o.new_empty((slots, q_length, heads, head_dim), dtype=torch.float32)
        row_max, row_sum = (o.new_empty(shape, dtype=torch.float32) for _ in range(2))
        if packed:
            acc.zero_()
            row_max.fill_(float("-inf"))
            row_sum.zero_()
        return cls(View.of(acc), View.of_rows(row_max), View.of_rows(row_sum))


@triton.jit
def slots_of(split, num_splits, batches, batch, head, q_pos, cut):
    """One query row in the slots of the splits: (Rows of length 1 each, the index to read there: 0,
    or 1 for a split that does not exist, which is past the length). Of shares, `batch` is the one
    that has the first part.
    """
    if cut is None:
        slot = split * batches + batch
    else:
        slot = 2 * (batch + split) + (split == 0).to(tl.int32)
    return Rows(slot, head, q_pos, q_pos * 0 + 1), (split >= num_splits).to(tl.int32)


@triton.jit(do_not_specialize=COUNTS)
def combine_kernel(
    partials, o, lse_out, cut, num_splits, batches, heads, q_length,
    BLOCK_SPLITS: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    """One program per query row, of every share where there are shares; the splits are the rows of
    its tile.
    """
    program = tl.program_id(0)
    q_pos = program % q_length
    head = (program // q_length) % heads
    batch = program // q_length // heads

    if OVERLAP:
        gdc_launch_dependents()  # what follows may fetch its own tensors meanwhile
        gdc_wait()
    sequence = batch
    if cut is not None:
        sequence = tl.load(cut + 2 * batch)
        num_splits = tl.load(cut + 2 * batch + 1)
        if num_splits == 0:
            return
    split = tl.arange(0, BLOCK_SPLITS)
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    acc = tl.zeros([o.PADDED], tl.float32)
    for first in range(0, num_splits, BLOCK_SPLITS):
        slots, past_end = slots_of(first + split, num_splits, batches, batch, head, q_pos, cut)
        partial_max = load_row_values(partials.row_max, slots, past_end, float("-inf"))
        partial_sum = load_row_values(partials.row_sum, slots, past_end, 0.0)
        partial_acc = load_rows(partials.acc, slots, past_end, MASKED=True)
        new_maximum = tl.maximum(maximum, tl.max(partial_max, 0))
        pivot = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        weight, alpha = tl.exp2(partial_max - pivot), tl.exp2(maximum - pivot)
        total = alpha * total + tl.sum(weight * partial_sum, 0)
        acc = alpha * acc + tl.sum(weight[:, None] * partial_acc, 0)
        maximum = new_maximum

    # One row from here on: a tile of height 1, so that the ordinary functions finish it.
    row = q_pos + tl.arange(0, 1)
    row_max = tl.full([1], 0.0, tl.float32) + maximum
    row_sum = tl.full([1], 0.0, tl.float32) + total
    out, lse = finalize(acc[None, :], row_max, row_sum)
    rows = Rows(sequence, head, sequence * 0, q_length)
    store_rows(o, rows, row, out)
    store_row_values(lse_out, rows, row, lse)


launch_combine = Launcher(combine_kernel)
launch_combine_early = Launcher(combine_kernel, launch_pdl=True)


def combine(
    partials: Partials,
    num_splits: int,
    o: torch.Tensor,
    lse: torch.Tensor,
    overlap: bool = False,
    cut: torch.Tensor | None = None,
) -> None:
    """Reduce the partial results into o (batch, M, heads, head_dim_v) and lse (batch, heads, M).

    Args:
        partials: what the splits left.
        num_splits: their number; with `cut`, that of the shares.
        o: written.
        lse: written.
        overlap: launch while the splits are still being computed; their kernel must allow it.
        cut: (shares, 2), which sequences shares have cut, see `shares_kernel`; None: every sequence
            has all splits.
    """
    batch, q_length, heads, _ = o.shape
    rows = q_length * heads * (batch if cut is None else num_splits)
    out = View.of(o)
    most = num_splits if cut is None else min(num_splits, 2 * num_splits // batch + 2)  # usually
    block_splits = min(TILE // out.PADDED.value, 1 << (most - 1).bit_length())
    launch = launch_combine_early if overlap else launch_combine
    launch(
        (rows,),
        (partials, out, View.of_rows(lse), cut, num_splits, batch, heads, q_length),
        {"BLOCK_SPLITS": max(16, block_splits), "OVERLAP": overlap},
    )
