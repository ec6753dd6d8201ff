"""Low-rank adapters against the formulas of the paper, and what a run with them leaves."""

import copy

import pytest
import torch
from torch.testing import assert_close

from tests.helpers.models.tiny_grpo import make_trainer
from tests.helpers.models.tiny_model import sdpa
from transformer.model.weights import load_model
from transformer.training.lora import (
    ALPHA,
    AdaptedLinear,
    adapters_off,
    add_adapters,
    merged_weights,
)

RANK = 3
TOKENS = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def plain(tempted):
    return load_model(tempted, sdpa, dtype=torch.float32)


@pytest.fixture
def adapted(plain):
    """The plain model with adapters, which do nothing yet."""
    model = copy.deepcopy(plain)
    add_adapters(model, RANK, 0, torch.float32)
    return model


def disturb(model) -> None:
    """As if the adapters had learned something."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.normal_(std=0.02)


def merge(model, into):
    into.load_state_dict(dict(merged_weights(model)))
    return into


def test_at_the_beginning_nothing_changes(plain, adapted):
    assert torch.equal(adapted(TOKENS), plain(TOKENS))
    assert_close(dict(merged_weights(adapted)), dict(plain.state_dict()), rtol=0, atol=0)
    add_adapters(plain, RANK, 0, torch.bfloat16)
    assert all(p.requires_grad == (p.dtype == torch.float32) for p in plain.parameters())


def test_merged_weights_do_the_same(plain, adapted):
    disturb(adapted)
    unmerged = adapted(TOKENS)
    assert (unmerged - plain(TOKENS)).abs().max() > 0.1
    with adapters_off(adapted):
        assert torch.equal(adapted(TOKENS), plain(TOKENS))
    assert_close(merge(adapted, plain)(TOKENS), unmerged, rtol=1e-5, atol=1e-5)


def test_gradients_are_those_of_the_merged_weight(plain, adapted):
    """With W' = W + s B A: dA = s B^T dW', dB = s dW' A^T."""
    disturb(adapted)
    merged = merge(adapted, plain).double()
    scale = ALPHA / RANK
    for model in (merged, adapted):
        model(TOKENS).log_softmax(-1)[..., 7].sum().backward()
    for name, module in adapted.named_modules():
        if isinstance(module, AdaptedLinear):
            gradient = merged.get_submodule(name).weight.grad
            a, b = module.lora_a.detach().double(), module.lora_b.detach().double()
            expected_a, expected_b = scale * b.T @ gradient, scale * gradient @ a.T
            assert_close(module.lora_a.grad.double(), expected_a, rtol=1e-3, atol=1e-4)
            assert_close(module.lora_b.grad.double(), expected_b, rtol=1e-3, atol=1e-4)
        else:
            assert all(p.grad is None for p in module.parameters(recurse=False))


def test_a_run_learns_and_moves_nothing_else(tempted):
    trainer = make_trainer(tempted, lora_rank=RANK, lr=3e-2, prompts=8)
    before = {name: p.detach().clone() for name, p in trainer.policy.model.named_parameters()}
    rewards = []
    for _ in range(16):
        rollouts = trainer.roll_out().rollouts
        rewards.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
        trainer.learn(rollouts)
    assert sum(rewards[-4:]) / 4 > 2 * rewards[0]  # that of the policy before it learned
    for name, parameter in trainer.policy.model.named_parameters():
        assert torch.equal(parameter, before[name]) == ("lora" not in name), name
    kept = [state["exp_avg"] for state in trainer.learner.optimizer.state.values()]
    assert len(kept) == 2 * 7 * 2  # matrices, projections, layers
    assert all(RANK in moment.shape for moment in kept)


def test_the_reference_is_the_model_without_adapters(tempted):
    """KL to it is what a second copy of the model would give."""
    trainer = make_trainer(tempted, lora_rank=RANK, beta=0.1)
    trainer.learn(trainer.roll_out().rollouts)
    assert trainer.learner.reference is None
    start = make_trainer(tempted, beta=0.1).learner.reference
    rollouts = trainer.roll_out().rollouts
    state = copy.deepcopy(trainer.state())
    kl = trainer.learn(rollouts)["kl"]
    assert kl > 1e-5
    trainer.restore(state)
    trainer.learner.reference = start
    assert trainer.learn(rollouts)["kl"] == pytest.approx(kl, rel=1e-4)
