"""The most likely token and its log-probability, in one reading of the logits.

Logits of a large vocabulary are the longest rows in a model and there is one for each sequence of a
batch. So a row is cut into chunks, a program for each finds its largest logit m, where it is, and
l = sum exp(x - m), and a second kernel merges the chunks of a row, as FlashAttention does with its
splits:

    log p(token) = max - log sum exp x = -log sum_c l_c exp(m_c - max)

Of equal logits the first is taken, so the result does not depend on the chunks.
"""

import torch
import triton
import triton.language as tl

from flash_versions.memory import cdiv
from flash_versions.ops import on_device

CHUNK = 2048


@triton.jit
def chunk_kernel(logits, row_stride, size, maxima, sums, indices, chunks, CHUNK: tl.constexpr):
    """One program for one chunk of one row."""
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
def merge_kernel(maxima, sums, indices, tokens, logprobs, chunks, PADDED: tl.constexpr):
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, PADDED)
    inside = chunk < chunks
    largest = tl.load(maxima + row * chunks + chunk, mask=inside, other=float("-inf"))
    part = tl.load(sums + row * chunks + chunk, mask=inside, other=0.0)
    best, where = tl.max(largest, 0, return_indices=True)
    share = tl.where(inside, tl.exp(largest - best), 0.0)
    tl.store(tokens + row, tl.load(indices + row * chunks + where).to(tl.int64))
    tl.store(logprobs + row, -tl.log(tl.sum(part * share, 0)))


def greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The most likely token of each row.

    Args:
        logits: (batch, vocabulary), any float dtype that kernels read, the last dimension
            contiguous.

    Returns:
        tokens: (batch,) int64, the first of the largest.
        logprobs: (batch,) float32, of the tokens in the softmax of the logits. Not finite where a
            logit is NaN or +inf, or where all are -inf; the token then means nothing.
    """
    batch, size = logits.shape
    chunks = cdiv(size, CHUNK)
    maxima, sums, logprobs = (
        logits.new_empty(shape, dtype=torch.float32)
        for shape in ((batch, chunks), (batch, chunks), (batch,))
    )
    indices = torch.empty(batch, chunks, dtype=torch.int32, device=logits.device)
    tokens = torch.empty(batch, dtype=torch.int64, device=logits.device)
    with on_device(logits):
        chunk_kernel[(batch, chunks)](
            logits, logits.stride(0), size, maxima, sums, indices, chunks, CHUNK
        )
        padded = triton.next_power_of_2(chunks)
        merge_kernel[(batch,)](maxima, sums, indices, tokens, logprobs, chunks, padded, num_warps=1)
    return tokens, logprobs
