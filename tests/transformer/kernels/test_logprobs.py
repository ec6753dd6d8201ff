"""Log-probabilities and their gradient: torch's operations by pieces, and the kernels for a GPU."""

import math

import pytest
import torch
from torch.distributions import Categorical

from tests.helpers.models.tiny_grpo import distance
from transformer.generation.sampling import Sampling, process_logits
from transformer.model import logprobs as module
from transformer.model.kernels.logprobs import BLOCK, gradient_of, logprobs_of
from transformer.model.logprobs import token_logprobs


def test_logprobs_are_those_that_the_sampler_drew_from():
    temperature = 0.7
    logits = 3 * torch.randn(4, 6, 50)
    tokens = torch.randint(50, (4, 6))
    logprobs, entropy = token_logprobs(logits, tokens, temperature)
    drawn_from = process_logits(logits.flatten(0, 1), Sampling(temperature), None)
    exact = drawn_from.double().log_softmax(-1)
    assert distance(logprobs.flatten(), exact.gather(1, tokens.reshape(-1, 1))[:, 0]) < 1e-6
    assert distance(entropy.flatten(), Categorical(logits=exact).entropy()) < 1e-6


def test_tokens_that_cannot_be_sampled_leave_no_nan():
    logits = torch.randn(2, 3, 8)
    logits[..., 5:] = -math.inf
    logits.requires_grad_()
    tokens = torch.randint(5, (2, 3))
    tokens[0, 2] = 6  # a pad, outside the mask
    logprobs, entropy = token_logprobs(logits, tokens)
    assert logprobs[0, 2] == -math.inf
    assert distance(entropy, Categorical(logits=logits.detach()[..., :5]).entropy()) < 1e-6
    kept = torch.ones(2, 3, dtype=torch.bool)
    kept[0, 2] = False
    logprobs.where(kept, 0).sum().backward()
    assert logits.grad.isfinite().all()
    assert not logits.grad[0, 2].any() and not logits.grad[..., 5:].any()


def test_pieces_are_the_whole_and_keep_nothing_of_its_size(monkeypatch):
    tokens = torch.randint(60, (3, 9))
    logits = torch.randn(3, 9, 60, requires_grad=True)
    whole = token_logprobs(logits, tokens, 0.8)
    (gradient,) = torch.autograd.grad(whole[0].sum(), logits)
    monkeypatch.setattr(module, "CHUNK", 200)
    saved = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x)
    with hooks:
        pieces = token_logprobs(logits, tokens, 0.8)
    (gradient_by_pieces,) = torch.autograd.grad(pieces[0].sum(), logits)
    torch.testing.assert_close((*pieces, gradient_by_pieces), (*whole, gradient))
    known = {x.untyped_storage().data_ptr() for x in (logits, tokens)}
    assert saved and {x.untyped_storage().data_ptr() for x in saved} == known


def test_logits_and_tokens_that_do_not_fit_are_refused():
    tokens = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"got \(2, 4, 5\) and \(2, 3\)$"):
        token_logprobs(torch.zeros(2, 4, 5), tokens)
    with pytest.raises(ValueError, match="^temperature must be .*, got 0.0$"):
        token_logprobs(torch.zeros(2, 3, 5), tokens, 0.0)
    with pytest.raises(ValueError, match=r"^banned must be bool \(5,\), one for each token"):
        token_logprobs(torch.zeros(2, 3, 5), tokens, 1.0, torch.zeros(4, dtype=torch.bool))


# ---- the kernels ----


def exact(logits, tokens, temperature, banned, grads):
    """Log-probabilities, entropies and the gradient of the logits, in fp64."""
    x = logits.double().detach().requires_grad_()
    scaled = x / temperature
    if banned is not None:
        scaled = scaled.masked_fill(banned, -math.inf)
    distribution = Categorical(logits=scaled)
    logprobs = distribution.logits.gather(1, tokens[:, None])[:, 0]
    (logprobs * grads.double()).sum().backward()
    return logprobs.detach(), torch.special.entr(distribution.probs).sum(-1).detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "size, temperature, scale",
    [(1, 1.0, 1), (37, 0.7, 3), (BLOCK, 1.0, 1), (2 * BLOCK + 5, 1.5, 8), (2 * BLOCK, 1.0, 20)],
)
def test_kernels_against_fp64(device, dtype, size, temperature, scale):
    """Whether a row knows its token or not; one of its blocks may be banned as a whole."""
    rows = 5
    logits = (scale * torch.randn(rows, size)).to(device, dtype)
    banned = None
    if size > 1:
        banned = torch.rand(size, device=device) < 0.3
        banned[:BLOCK] |= size > BLOCK
    allowed = (torch.arange(size, device=device) if banned is None else ~banned).nonzero()[:, 0]
    allowed = allowed if size > 1 else torch.zeros(1, dtype=torch.int64, device=device)
    tokens = allowed[torch.randint(len(allowed), (rows,), device=device)]
    grads = torch.randn(rows, device=device)
    logprobs, entropies, kept = logprobs_of(logits, tokens, temperature, banned)
    gradient = gradient_of(grads, logits, tokens, kept, temperature, banned)
    expected = exact(logits, tokens, temperature, banned, grads)
    assert distance(logprobs, expected[0]) < 1e-6 and distance(entropies, expected[1]) < 2e-6
    assert gradient.dtype == dtype
    # A rounding of the result, and 1e-6 of the token's own gradient for that of the exponent.
    eps = torch.finfo(dtype).eps / 2
    allowance = eps * expected[2].abs() + 2e-6 * grads.abs()[:, None].double()
    tiny = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert ((gradient.double() - expected[2]).abs() <= allowance + tiny).all()


def test_small_entropies_are_not_rounding(device):
    """A policy that is sure: one logit is far ahead of thousands."""
    logits = torch.randn(3, BLOCK + 9, device=device) - 12
    logits[:, BLOCK + 3] = 10 + torch.arange(3.0, device=device)
    tokens = torch.full((3,), BLOCK + 3, device=device)
    _, entropies, _ = logprobs_of(logits, tokens)
    expected = torch.special.entr(logits.double().softmax(-1)).sum(-1)
    assert expected.min() > 1e-6 and expected.max() < 1e-4
    torch.testing.assert_close(entropies.double(), expected, rtol=0, atol=1e-7)


def flat(found):
    """All tensors that `logprobs_of` returns."""
    return [*found[:2], *found[2]]


def test_kernels_and_pieces_agree_on_what_cannot_be_sampled(device):
    """-inf in the logits or in the mask: the same; a row whose own token is banned leaves no NaN in
    a gradient that is 0; a row of NaN stays alone.
    """
    logits = torch.randn(4, 2 * BLOCK, device=device)
    banned = torch.rand(2 * BLOCK, device=device) < 0.5
    tokens = (~banned).nonzero()[:4, 0]
    tokens[1] = banned.nonzero()[0, 0]
    by_mask = logprobs_of(logits, tokens, 1.0, banned)
    filled = logits.masked_fill(banned, -math.inf)
    for one, other in zip(flat(by_mask), flat(logprobs_of(filled, tokens))):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    assert by_mask[0][1] == -math.inf and by_mask[0][[0, 2, 3]].isfinite().all()
    grads = torch.tensor([1.0, 0.0, -1.0, 2.0], device=device)
    gradient = gradient_of(grads, logits, tokens, by_mask[2], 1.0, banned)
    assert gradient.isfinite().all() and not gradient[:, banned].any() and not gradient[1].any()

    logits[2, 7] = math.nan
    found = logprobs_of(logits, tokens)[:2]
    assert [x.isnan().tolist() for x in found] == [[False, False, True, False]] * 2


def test_tensors_may_lie_anyhow(device):
    """Through autograd: logits and tokens of a longer sequence, a gradient that is one number."""
    whole = torch.randn(2, 9, 50, device=device)
    tokens = torch.randint(25, (9, 2), device=device).T * 2
    banned = (torch.arange(100, device=device) % 4 == 2)[::2]  # odd tokens
    results = []
    for function in (module._ByKernels.apply, module._by_pieces):
        x = whole.clone().requires_grad_()
        logprobs, entropy = function(x[:, :-1], tokens[:, 1:], 0.8, banned)
        logprobs.mean().backward()
        results.append((logprobs.detach(), entropy, x.grad))
    assert all(distance(one, other) < 1e-6 for one, other in zip(*results))


def test_no_row_at_all(device):
    """What a rank without work has."""
    logits = torch.zeros(0, 9, device=device)
    tokens = torch.zeros(0, dtype=torch.int64, device=device)
    found = logprobs_of(logits, tokens)
    assert all(x.shape == (0,) for x in flat(found))
    assert gradient_of(found[0], logits, tokens, found[2]).shape == (0, 9)
    batch = logits[None].requires_grad_()
    module._ByKernels.apply(batch, tokens[None], 1.0, None)[0].sum().backward()
    assert batch.grad.shape == (1, 0, 9)
