"""The next token of every row by its logits, the likeliest or a drawn one, and its log-probability.

Logits of a large vocabulary are the longest rows in a model and there is one for each sequence of a
batch: each pass over them costs as much as a layer. Here they are read once. A row is cut into
chunks, a program for each finds its largest logit m, where it is, and l = sum exp(x - m), and a
second kernel merges the chunks of a row, as FlashAttention does with its splits:

    weight of a chunk = l_c exp(m_c - max)      log p(token) = x - max - log sum_c weight_c

The likeliest token is the largest logit of the chunk with the largest; of equal ones the first. To
draw one, the cumulative distribution is inverted, first over the chunks and then in the only chunk
that has to be read again for it:

    weights        ▁▁▁▁▁▁▂▂▂▂▂▂▂▂▂▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▃▄▄▄▄▄
                                        │ uniform number x sum of weights
    chunk 3                  ▁▁▁▂▂▂▂▂▃▃▃│▃▄▄▄▄▄▅▅▅▅▅▅▅▅▅▅

Running sums are in fp64, or the likely tokens' rounding would swallow the unlikely ones. A row's
token depends on its logits and its number only, not on the size of the batch.

What a decoding step does with its token costs no kernel either: the second one writes it down where
the next step reads it and where the host will look. Both start before the kernel before them is
done (see `gemv`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.dispatch.device import devices
from flash_versions.versions.tiles.rows import cdiv
from transformer.model.kernels.decode.gemv import overlapping

CHUNK = 2048


class Record(NamedTuple):
    """Where the tokens of step after step are written down; contiguous.

    Attributes:
        tokens: (batch, columns) int64.
        scores: (batch, columns) float32, their log-probabilities.
        newest: (batch, 1) int64, those of the last step; None: not wanted.
        column: (batch, 1) int64, the column that each row writes next; None: there is one only.
    """

    tokens: Tensor
    scores: Tensor
    newest: Tensor | None = None
    column: Tensor | None = None


class Draws(NamedTuple):
    """The random numbers of step after step; contiguous.

    Attributes:
        numbers: (batch, most) float64, from [0, 1).
        drawn: (batch, 1) int64, how many of them a row has used; None: the first is meant. Steps
            after the last number use it again.
        temperature: divides the logits.
    """

    numbers: Tensor
    drawn: Tensor | None = None
    temperature: float = 1.0


@triton.jit
def load_logits(logits, index, size, banned, temperature):
    """A row's logits in fp32, scaled; -inf for what is banned and past the end."""
    x = tl.load(logits + index, mask=index < size, other=float("-inf")).to(tl.float32)
    if banned is not None:
        out = tl.load(banned + index, mask=index < size, other=1)
        x = tl.where(out != 0, float("-inf"), x)
    if temperature is not None:
        x = x / temperature
    return x


@triton.jit
def write_down(row, token, score, tokens, scores, newest, column, columns):
    """Into the row's next column; the only one if there is none to read."""
    out = row * columns
    if column is not None:
        next_column = tl.load(column + row)
        tl.store(column + row, next_column + 1)
        out += next_column
    tl.store(tokens + out, token)
    tl.store(scores + out, score)
    if newest is not None:
        tl.store(newest + row, token)


@triton.jit
def chunk_kernel(
    logits, row_stride, size, banned, temperature, maxima, sums, indices, chunks,
    CHUNK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for one chunk of one row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_logits(logits + row * row_stride, index, size, banned, temperature)
    largest, where = tl.max(x, 0, return_indices=True)
    pivot = tl.where(largest == float("-inf"), 0.0, largest)
    out = row * chunks + chunk
    tl.store(maxima + out, largest)
    tl.store(sums + out, tl.sum(tl.exp(x - pivot).to(sums.dtype.element_ty), 0))
    if indices is not None:
        tl.store(indices + out, tl.minimum(chunk * CHUNK + where, size - 1))  # a token even of NaN


@triton.jit
def load_chunks(maxima, sums, row, chunks, PADDED: tl.constexpr):
    """What `chunk_kernel` found of a row: the chunks' numbers, largest logits and sums; -inf and 0
    past the last one.
    """
    chunk = tl.arange(0, PADDED)
    address, inside = row * chunks + chunk, chunk < chunks
    largest = tl.load(maxima + address, mask=inside, other=float("-inf"))
    return chunk, largest, tl.load(sums + address, mask=inside, other=0.0)


@triton.jit
def likeliest_kernel(
    maxima, sums, indices, tokens, scores, newest, column, columns, chunks,
    PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for one row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    chunk, largest, part = load_chunks(maxima, sums, row, chunks, PADDED)
    best, where = tl.max(largest, 0, return_indices=True)
    share = tl.where(chunk < chunks, tl.exp(largest - best), 0.0)
    where = tl.minimum(where, chunks - 1)  # also where all are NaN
    token = tl.load(indices + row * chunks + where).to(tl.int64)
    score = -tl.log(tl.sum(part * share, 0))
    write_down(row, token, score, tokens, scores, newest, column, columns)


@triton.jit(do_not_specialize=["most"])
def draw_kernel(
    logits, row_stride, size, banned, temperature, numbers, most, drawn, maxima, sums, tokens,
    scores, newest, column, columns, chunks,
    CHUNK: tl.constexpr, PADDED: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """One program for one row."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    number = row * most
    if drawn is not None:
        used = tl.load(drawn + row)
        tl.store(drawn + row, tl.minimum(used + 1, most - 1))
        number += used
    uniform = tl.load(numbers + number)

    chunk, largest, part = load_chunks(maxima, sums, row, chunks, PADDED)
    best = tl.max(largest, 0)
    share = tl.where(largest > float("-inf"), tl.exp(largest - best), 0.0)
    weight = part * share  # NaN stays NaN
    running = tl.cumsum(weight, 0)
    total = tl.sum(tl.where(chunk == chunks - 1, running, 0.0), 0)
    target = uniform * total
    passed = (running > target) & (weight > 0)
    chosen = tl.min(tl.where(passed, chunk, chunks - 1), 0)
    missing = target - tl.sum(tl.where(chunk == chosen - 1, running, 0.0), 0)

    place = tl.arange(0, CHUNK)
    index = chosen * CHUNK + place
    x = load_logits(logits + row * row_stride, index, size, banned, temperature)
    pivot = tl.sum(tl.where(chunk == chosen, largest, 0.0), 0)
    scale = tl.sum(tl.where(chunk == chosen, share, 0.0), 0)
    weight = tl.exp(x - pivot).to(tl.float64) * scale
    # Sums of other orders differ in the last bits: a token without weight is never drawn, and if
    # the target is past the end of the chunk, its last token with a weight is.
    last = tl.max(tl.where(weight > 0, place, 0), 0)
    passed = (tl.cumsum(weight, 0) > missing) & (weight > 0)
    where = tl.min(tl.where(passed, place, last), 0)
    logit = tl.sum(tl.where(place == where, x, 0.0), 0)
    score = logit - best - tl.log(total.to(tl.float32))
    token = (chosen * CHUNK + where).to(tl.int64)
    write_down(row, token, score, tokens, scores, newest, column, columns)


def choose(
    logits: Tensor,
    draws: Draws | None = None,
    banned: Tensor | None = None,
    *,
    overlap: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The next token of each row: the likeliest, or one that is drawn by inverting the cumulative
    distribution of the softmax.

    Args:
        logits: (batch, vocabulary), any float dtype that kernels read; a token of -inf is never
            drawn.
        draws: by which numbers; None: take the likeliest, of equal ones the first.
        banned: (vocabulary,) bool, tokens whose probability is 0.
        overlap: start before the kernel before is done; None: where the GPU can.

    Returns:
        tokens: (batch,) int64.
        logprobs: (batch,) float32, of the tokens in the softmax of the logits, which the
            temperature divides. Not finite where a logit is NaN or +inf, or where all are -inf; the
            token then means nothing.
    """
    tokens = torch.empty(len(logits), 1, dtype=torch.int64, device=logits.device)
    scores = logits.new_empty(tokens.shape, dtype=torch.float32)
    sample_into(logits, Record(tokens, scores), draws, banned, overlap=overlap)
    return tokens[:, 0], scores[:, 0]


def sample_into(
    logits: Tensor,
    record: Record,
    draws: Draws | None = None,
    banned: Tensor | None = None,
    *,
    overlap: bool | None = None,
) -> None:
    """Write the next token of each row and its log-probability down in the row's next column of the
    record; the other arguments are those of `choose`.
    """
    batch, size = logits.shape
    chunks = cdiv(size, CHUNK)
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    banned = None if banned is None else banned.contiguous()
    per_chunk = logits.new_empty((batch, chunks), dtype=torch.float32)
    sums = torch.empty_like(per_chunk, dtype=torch.float64 if draws else torch.float32)
    indices = None if draws else torch.empty_like(per_chunk, dtype=torch.int32)
    temperature = draws.temperature if draws and draws.temperature != 1 else None
    given = (logits, logits.stride(0), size, banned, temperature)
    written = (*record, record.tokens.shape[1], chunks)
    padded = triton.next_power_of_2(chunks)
    options = overlapping(devices.launches_overlap(logits.device) if overlap is None else overlap)
    with devices.on_device(logits):
        chunk_kernel[(batch, chunks)](*given, per_chunk, sums, indices, chunks, CHUNK, **options)
        if draws is None:
            likeliest_kernel[(batch,)](
                per_chunk, sums, indices, *written, padded, num_warps=1, **options
            )
        else:
            most = draws.numbers.shape[1]
            draw_kernel[(batch,)](
                *given,
                draws.numbers,
                most,
                draws.drawn,
                per_chunk,
                sums,
                *written,
                CHUNK,
                padded,
                **options,
            )
