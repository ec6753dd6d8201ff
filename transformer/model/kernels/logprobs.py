"""Log-probabilities of tokens over a large vocabulary, and their gradient: two readings of logits.

A program takes a row of logits and walks over it as FlashAttention walks over keys, with a running
largest logit m and sums that are rescaled when it grows:

    l = sum exp(x - m)            log p(token) = x[token] - m - log l
    s = sum exp(x - m) (x - m)    entropy      = log l - s / l

Both terms of the entropy are small where one logit is far ahead; those of m + log l - E[x] are not,
and would leave their rounding as the entropy of a policy that is sure.

The gradient of log p(token) is one-hot(token) - p. The first kernel keeps m and log l, so p is
exp(x - m - log l), and the second one writes each logit's gradient as it reads the logit. (One
number for both would be as large as logits are, and so would its rounding.)
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flash_versions.dispatch.device import devices
from flash_versions.versions.tiles.rows import cdiv
from transformer.model.kernels.decode.sample import load_logits

BLOCK = 4096
WARPS = 8


class Kept(NamedTuple):
    """What the gradient needs: the largest logit of each row, and log sum exp(x - that); (rows,)
    float32.
    """

    maxima: Tensor
    log_sums: Tensor


@triton.jit
def forward_kernel(
    logits, size, banned, temperature, tokens, logprobs, entropies, maxima, log_sums,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for one row."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * size
    largest = tl.full((), float("-inf"), tl.float32)
    sum_exp, sum_shifted = tl.zeros((), tl.float32), tl.zeros((), tl.float32)
    for start in range(0, size, BLOCK):
        x = load_logits(logits, start + tl.arange(0, BLOCK), size, banned, temperature)
        before, largest = largest, tl.maximum(largest, tl.max(x, 0))
        pivot = tl.where(largest == float("-inf"), 0.0, largest)
        exp = tl.exp(x - pivot)
        moved = tl.where(sum_exp > 0, before - pivot, 0.0)
        rescale = tl.exp(moved)
        moved = tl.where(rescale > 0, moved, 0.0)  # what weighs nothing is nowhere
        shifted = tl.where(x > float("-inf"), exp * (x - pivot), 0.0)
        sum_shifted = rescale * (sum_shifted + moved * sum_exp) + tl.sum(shifted, 0)
        sum_exp = rescale * sum_exp + tl.sum(exp, 0)
    log_sum = tl.log(sum_exp)
    token = tl.load(tokens + row)
    own = load_logits(logits, tl.maximum(token, 0), size, banned, temperature)
    own = tl.where((token >= 0) & (token < size), own, float("nan"))
    tl.store(logprobs + row, own - largest - log_sum)
    tl.store(entropies + row, log_sum - sum_shifted / sum_exp)
    tl.store(maxima + row, largest)
    tl.store(log_sums + row, log_sum)


@triton.jit
def backward_kernel(
    grads, logits, size, banned, temperature, tokens, maxima, log_sums, gradient,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for one block of one row."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = load_logits(logits + row * size, index, size, banned, temperature)
    grad = tl.load(grads + row)
    if temperature is not None:
        grad = grad / temperature
    one_hot = tl.where(index == tl.load(tokens + row), 1.0, 0.0)
    p = tl.exp(x - tl.load(maxima + row) - tl.load(log_sums + row))
    tl.store(gradient + row * size + index, grad * (one_hot - p), mask=index < size)


def logprobs_of(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, banned: Tensor | None = None
) -> tuple[Tensor, Tensor, Kept]:
    """Log-probability of each row's token under softmax(logits / temperature).

    Args:
        logits: (rows, vocabulary) contiguous, float32, float16 or bfloat16.
        tokens: (rows,) int64; NaN for one that is not in the vocabulary.
        temperature: positive.
        banned: (vocabulary,) bool, tokens whose probability is 0.

    Returns:
        log-probabilities and entropies in nats, (rows,) float32, and what `gradient_of` needs.
    """
    found = torch.empty(4, len(tokens), dtype=torch.float32, device=logits.device)
    logprobs, entropies, *others = found.unbind()
    kept = Kept(*others)
    given = (logits, logits.shape[1], banned, temperature if temperature != 1 else None)
    if len(tokens):
        with devices.on_device(logits):
            forward_kernel[(len(tokens),)](
                *given, tokens, logprobs, entropies, *kept, BLOCK, num_warps=WARPS
            )
    return logprobs, entropies, kept


def gradient_of(
    grads: Tensor,
    logits: Tensor,
    tokens: Tensor,
    kept: Kept,
    temperature: float = 1.0,
    banned: Tensor | None = None,
) -> Tensor:
    """The gradient of the logits.

    Args:
        grads: (rows,) float32 contiguous, those of the log-probabilities.
        kept: as `logprobs_of` returned it; the other arguments are what it was given.

    Returns:
        (rows, vocabulary), in the dtype of the logits.
    """
    gradient = torch.empty_like(logits)
    rows, size = logits.shape
    given = (grads, logits, size, banned, temperature if temperature != 1 else None)
    if rows:
        with devices.on_device(logits):
            backward_kernel[(rows, cdiv(size, BLOCK))](
                *given, tokens, *kept, gradient, BLOCK, num_warps=WARPS
            )
    return gradient
