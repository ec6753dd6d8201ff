"""The most likely token and its log-probability, in one reading of the logits.

Logits of a large vocabulary are the longest rows in a model and there is one for each sequence of a
batch. So a row is cut into chunks, a program for each finds its largest logit m, where it is, and
l = sum exp(x - m), and a second kernel merges the chunks of a row, as FlashAttention does with its
splits:

    log p(token) = max - log sum exp x = -log sum_c l_c exp(m_c - max)

Of equal logits the first is taken, so the result does not depend on the chunks.

What a decoding step does with its token costs no kernel either: the second one writes it down where
the next step reads it and where the host will look. Both start before the kernel before them is
done (see `skinny`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.memory import cdiv
from flash_versions.ops import on_device
from flash_versions.version import launches_overlap
from transformer.kernels.skinny import overlapping

CHUNK = 2048


class Record(NamedTuple):
    """Where the tokens of step after step are written down.

    Attributes:
        newest: (batch, 1) int64, those of the last step.
        tokens: (batch, columns) int64.
        scores: (batch, columns) float32, their log-probabilities.
        column: (batch, 1) int64, the column that each row writes next.
    """

    newest: torch.Tensor
    tokens: torch.Tensor
    scores: torch.Tensor
    column: torch.Tensor


@triton.jit
def chunk_kernel(
    logits,
    row_stride,
    size,
    maxima,
    sums,
    indices,
    chunks,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for one chunk of one row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits + row * row_stride + index, mask=index < size, other=float("-inf"))
    x = x.to(tl.float32)
    largest, where = tl.max(x, 0, return_indices=True)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    out = row * chunks + chunk
    tl.store(maxima + out, largest)
    tl.store(sums + out, tl.sum(tl.exp(x - pivot), 0))
    tl.store(indices + out, tl.minimum(chunk * CHUNK + where, size - 1))  # a token even of NaN


@triton.jit
def merge_kernel(
    maxima,
    sums,
    indices,
    newest,
    tokens,
    logprobs,
    column,
    columns,
    chunks,
    PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program for one row. It goes to the row's next column; to the only one if there is none
    to read.
    """
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    inside = chunk < chunks
    out = row * columns
    if column is not None:
        next_column = tl.load(column + row)
        tl.store(column + row, next_column + 1)
        out += next_column
    largest = tl.load(maxima + row * chunks + chunk, mask=inside, other=float("-inf"))
    part = tl.load(sums + row * chunks + chunk, mask=inside, other=0.0)
    best, where = tl.max(largest, 0, return_indices=True)
    share = tl.where(inside, tl.exp(largest - best), 0.0)
    token = tl.load(indices + row * chunks + where).to(tl.int64)
    tl.store(tokens + out, token)
    tl.store(logprobs + out, -tl.log(tl.sum(part * share, 0)))
    if newest is not None:
        tl.store(newest + row, token)


def greedy(
    logits: torch.Tensor, *, overlap: bool | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row.

    Args:
        logits: (batch, vocabulary), any float dtype that kernels read, the last dimension
            contiguous.
        overlap: start before the kernel before is done; None: where the GPU can.

    Returns:
        tokens: (batch,) int64, the first of the largest.
        logprobs: (batch,) float32, of the tokens in the softmax of the logits. Not finite where a
            logit is NaN or +inf, or where all are -inf; the token then means nothing.
    """
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    logprobs = logits.new_empty(len(logits), dtype=torch.float32)
    launch(logits, None, tokens, logprobs, None, 1, overlap)
    return tokens, logprobs


def greedy_step(logits: torch.Tensor, record: Record) -> None:
    """Write the most likely token of each row, see `greedy`, and its log-probability down in the
    row's next column; the record is contiguous.
    """
    launch(logits, *record, record.tokens.shape[1])


def launch(
    logits: torch.Tensor,
    newest: torch.Tensor | None,
    tokens: torch.Tensor,
    logprobs: torch.Tensor,
    column: torch.Tensor | None,
    columns: int,
    overlap: bool | None = None,
) -> None:
    """Launch the two kernels; overlap: early, None: where the GPU can."""
    batch, size = logits.shape
    chunks = cdiv(size, CHUNK)
    maxima, sums = (logits.new_empty((batch, chunks), dtype=torch.float32) for _ in range(2))
    indices = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    options = overlapping(launches_overlap(logits.device) if overlap is None else overlap)
    with on_device(logits):
        chunk_kernel[(batch, chunks)](
            logits,
            logits.stride(0),
            size,
            maxima,
            sums,
            indices,
            chunks,
            CHUNK,
            **options,
        )
        merge_kernel[(batch,)](
            maxima,
            sums,
            indices,
            newest,
            tokens,
            logprobs,
            column,
            columns,
            chunks,
            triton.next_power_of_2(chunks),
            num_warps=1,
            **options,
        )
