"""Log-probabilities of given tokens, with their gradient: where training meets a large vocabulary.

Logits are the largest tensor of a training step: of 8 rows of 1,000 tokens, with a vocabulary of
150,000, they take 2.4 GB in bf16. Next to them there is only their gradient. A GPU reads them once
for the log-probabilities and once for the gradient (`kernels.logprobs`); elsewhere torch's
operations do a piece at a time.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from transformer.model.kernels.logprobs import Kept, gradient_of, logprobs_of

CHUNK = 2**24  # logits that are in fp32 at a time: 64 MiB


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, banned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of each token under softmax(logits / temperature), and its entropy.

    logits[b, t] is what the model says *before* tokens[b, t].

    Args:
        logits: (B, T, V), any floating dtype; -inf for what cannot be sampled.
        tokens: (B, T) int64.
        temperature: the one that the tokens were drawn with.
        banned: (V,) bool, tokens that cannot be sampled either.

    Returns:
        log-probabilities and entropies in nats, (B, T) fp32 (fp64 for fp64 logits). Entropies have
        no gradient.

    Raises:
        ValueError: shapes that do not fit or a temperature that is not a positive finite number.
    """
    if logits.ndim != 3 or tokens.shape != logits.shape[:2]:
        raise ValueError(
            "logits of shape (B, T, V) need tokens of shape (B, T), got"
            f" {tuple(logits.shape)} and {tuple(tokens.shape)}"
        )
    if banned is not None and (banned.shape, banned.dtype) != (logits.shape[2:], torch.bool):
        raise ValueError(
            f"banned must be bool {tuple(logits.shape[2:])}, one for each token of the vocabulary,"
            f" not {banned.dtype} {tuple(banned.shape)}"
        )
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be a positive finite number, got {temperature}")
    by_kernels = logits.is_cuda and logits.dtype != torch.float64
    return (_ByKernels.apply if by_kernels else _by_pieces)(logits, tokens, temperature, banned)


def _by_pieces(logits: Tensor, tokens: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
    """What is computed of a piece is not kept for its gradient, but computed again."""
    # Slices of T with at most CHUNK logits each, or one position.
    step = max(1, CHUNK // max(1, len(logits) * logits.shape[2]))
    pieces = zip(logits.split(step, 1), tokens.split(step, 1))
    again = partial(checkpoint, _of_a_piece, use_reentrant=False, preserve_rng_state=False)
    logprobs, entropies = zip(*(again(*piece, *given) for piece in pieces))
    return torch.cat(logprobs, 1), torch.cat(entropies, 1)


def _of_a_piece(
    logits: Tensor, tokens: Tensor, temperature: float, banned: Tensor | None
) -> tuple[Tensor, Tensor]:
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if banned is not None:
        scaled = scaled.masked_fill(banned, -math.inf)
    distribution = scaled.log_softmax(-1)
    logprobs = distribution.gather(-1, tokens[..., None]).squeeze(-1)
    return logprobs, torch.special.entr(distribution.detach().exp()).sum(-1)


class _ByKernels(torch.autograd.Function):
    """On a GPU. d logprob[token] / d logits = (one-hot of the token - softmax) / temperature."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, temperature: float, banned: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        rows, own = logits.flatten(0, 1).contiguous(), tokens.flatten().contiguous()
        banned = None if banned is None else banned.contiguous()
        *found, kept = logprobs_of(rows, own, temperature, banned)
        logprobs, entropy = (x.view(tokens.shape) for x in found)
        ctx.save_for_backward(rows, own, *kept)
        ctx.temperature, ctx.banned = temperature, banned
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor, None, None, None]:
        if torch.is_grad_enabled():  # in a backward pass: with create_graph
            raise RuntimeError(
                "log-probabilities have no second derivative: leave create_graph out"
            )
        rows, own, *kept = ctx.saved_tensors
        grads = grad.flatten().contiguous()  # of a sum it is one number, seen everywhere
        gradient = gradient_of(grads, rows, own, Kept(*kept), ctx.temperature, ctx.banned)
        return gradient.view(*grad.shape, rows.shape[1]), None, None, None
