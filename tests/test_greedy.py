"""The greedy choice against torch: the token, its log-probability, and logits that are broken."""

import math

import pytest
import torch

from transformer.kernels.greedy import CHUNK, greedy


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1, 37, CHUNK, 3 * CHUNK + 5])
def test_token_and_log_probability(device, dtype, size):
    """Of the logits as they are, whatever their dtype; ties go to the first."""
    logits = (4 * torch.randn(3, size)).to(device, dtype)
    logits[1, size // 2 :] = logits[1].max()
    tokens, logprobs = greedy(logits)
    exact = logits.double().log_softmax(-1)
    assert tokens.tolist() == [row.index(max(row)) for row in logits.tolist()]
    expected = exact.gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=1e-6)


def test_rows_may_lie_apart_and_tokens_may_be_banned(device):
    """A whole chunk of -inf is no chunk; the last tokens of a batch are rows further apart."""
    logits = torch.randn(2, 3, 2 * CHUNK, device=device)
    logits[:, :, :CHUNK] = -math.inf
    tokens, logprobs = greedy(logits[:, -1])
    assert torch.equal(tokens, logits[:, -1].argmax(-1))
    assert logprobs.isfinite().all()


@pytest.mark.parametrize(
    "broken", [[math.nan], [math.inf], [math.inf, -math.inf], [math.nan, math.inf]]
)
@pytest.mark.parametrize("place", [0, CHUNK + 3])
def test_broken_logits_are_seen(device, broken, place):
    """In the score of their row and of no other."""
    logits = torch.randn(2, 2 * CHUNK, device=device)
    logits[1, place : place + len(broken)] = torch.tensor(broken, device=device)
    _, logprobs = greedy(logits)
    assert logprobs.isfinite().tolist() == [True, False]


def test_nothing_is_allowed(device):
    """All tokens banned: no token has a probability."""
    _, logprobs = greedy(torch.full((1, 5), -math.inf, device=device))
    assert not logprobs.isfinite().any()
