"""The trainer: its gradient by hand, what it skips, what a step depends on, when it stops."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.helpers.models.tiny_grpo import TINY, make_trainer
from transformer.generation.sampling import row_generators
from transformer.rl.groups import groups_of, pass_at_k, spread
from transformer.rl.recipes import Settings
from transformer.rl.rollout import Rollout
from transformer.rl.sampler import DRAWS
from transformer.rl.trainer import Trainer
from transformer.training.lora import merged_weights

# --- helpers


def gradient_of(trainer: Trainer, rollouts) -> tuple[list[torch.Tensor], dict[str, float]]:
    """The gradient of the (last) optimiser step that some rollouts lead to, and the metrics."""
    found: list[list[torch.Tensor]] = []
    weights = list(trainer.policy.model.parameters())
    hook = trainer.learner.optimizer.register_step_pre_hook(
        lambda *_: found.append([p.grad.detach().clone() for p in weights])
    )
    measured = trainer.learn(rollouts)
    hook.remove()
    return (found[-1] if found else [torch.zeros_like(p) for p in weights]), measured


def weights_of(trainer: Trainer) -> list[torch.Tensor]:
    """Those that learn."""
    return [p.detach().clone() for p in trainer.learner.parameters]


def policy_gradient(trainer: Trainer, rollouts) -> list[torch.Tensor]:
    """REINFORCE with a group's mean as the baseline, a row at a time without padding: what GRPO is
    while the policy is the one that rolled out, written down once more.
    """
    s, model = trainer.settings, trainer.policy.model
    counted = [not (s.mask_truncated and r.completion.finish_reason == "length") for r in rollouts]
    # A completion that is masked counts as a row, as in TRL, and its tokens do not.
    tokens = sum(len(r.completion.tokens) for r, c in zip(rollouts, counted) if c)
    rows, limit = len(rollouts), s.max_tokens
    loss = torch.zeros(())
    for row, rollout in enumerate(rollouts):
        start = row // s.group * s.group
        rewards = torch.tensor([r.reward for r in rollouts[start : start + s.group]])
        advantage = (rollout.reward - rewards.mean()) / (rewards.std() + 1e-4)
        answer = rollout.completion.tokens
        logits = model(torch.tensor([rollout.prompt + answer]))[0, -len(answer) - 1 : -1]
        logits[:, list(trainer.policy.banned)] = -torch.inf
        logprobs = (logits / s.temperature).log_softmax(-1)[torch.arange(len(answer)), answer]
        if counted[row]:
            weights = {"dapo": tokens, "grpo": rows * len(answer), "dr_grpo": rows * limit}
            loss = loss - advantage * logprobs.sum() / weights[s.reduce]
    return list(torch.autograd.grad(loss, list(model.parameters())))


def assert_same(ours, theirs, tolerance=1e-6):
    scale = max(x.abs().max().item() for x in theirs)
    assert scale > 0
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance * scale)


def scored(rollouts, rewards) -> list[Rollout]:
    return [replace(r, reward=float(reward)) for r, reward in zip(rollouts, rewards, strict=True)]


def test_ranks_with_unequal_shares_have_the_advantages_of_the_whole(tempted):
    trainer, first = make_trainer(tempted, scale="batch"), TINY["group"]
    rewards = [i * i for i in range(TINY["prompts"] * first)]
    rollouts = scored(trainer.roll_out().rollouts, rewards)
    whole = trainer.learner.advantages(rollouts)
    trainer.learner.world = SimpleNamespace(rank=1, gather=lambda mine: [rewards[:first], mine])
    assert torch.equal(trainer.learner.advantages(rollouts[first:]), whole[first:])


# --- the gradient


@pytest.mark.parametrize("reduce", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 0.7}, {"mask_truncated": True, "policy_loss": "cispo"}], ids=str
)
def test_the_gradient_by_hand(tempted, changes, reduce):
    trainer = make_trainer(tempted, max_tokens=8, reduce=reduce, **changes)
    rollouts = trainer.roll_out().rollouts
    assert any(r.truncated for r in rollouts) and not all(r.truncated for r in rollouts)
    expected = policy_gradient(trainer, rollouts)
    gradient, measured = gradient_of(trainer, rollouts)
    assert_same(gradient, expected, 1e-5)
    assert 0 < measured["gap_max"] < 1e-4
    assert measured["gradient_norm"] == pytest.approx(
        torch.linalg.vector_norm(torch.cat([g.flatten() for g in expected])).item(), rel=1e-5
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"reduce": "grpo", "beta": 0.1, "scale": "batch"},
        {"reduce": "dr_grpo", "scale": "rloo", "mask_truncated": True},
        {"ratio": "sequence", "epochs": 2},
        {"policy_loss": "cispo", "epochs": 2},
    ],
    ids=str,
)
def test_the_micro_batch_changes_nothing(tempted, changes):
    def of(micro_batch):
        trainer = make_trainer(tempted, max_tokens=8, micro_batch=micro_batch, **changes)
        with torch.no_grad():  # away from the reference
            trainer.policy.model.lm_head.weight.mul_(1.01)
        return gradient_of(trainer, trainer.roll_out().rollouts)

    whole, measured = of(16)
    for micro_batch in (1, 3):
        split, also = of(micro_batch)
        assert_same(split, whole, 1e-5 if "epochs" in changes else 1e-6)
        assert also == pytest.approx(measured, rel=1e-4, abs=1e-4)


def test_a_group_of_equal_rewards_is_skipped(tempted):
    """It costs nothing, and the gradient is the one that it would have had a part in."""
    trainer = make_trainer(tempted)
    rollouts = trainer.roll_out().rollouts
    rollouts = scored(rollouts, [0, 1, 0, 0] + [1] * 4 + [2, 0, 1, 1] + [0] * 4)
    expected = policy_gradient(trainer, rollouts)
    gradient, measured = gradient_of(trainer, rollouts)
    assert measured["learned"] == 6, "rows of an advantage of 0 are not computed"
    assert_same(gradient, expected, 1e-5)


# --- epochs, the reference, the sampler


def test_epochs_compare_with_the_policy_that_rolled_out(tempted):
    measured = {}
    for epochs in (1, 2):
        trainer = make_trainer(tempted, epochs=epochs, lr=1e-3)
        measured[epochs] = trainer.learn(trainer.roll_out().rollouts)
        steps = {int(state["step"]) for state in trainer.learner.optimizer.state.values()}
        assert steps == {epochs}
    assert measured[1]["ratio_max"] == measured[1]["ratio"] == 1
    assert measured[2]["ratio_max"] > 1.001


def test_the_reference_is_the_frozen_start(tempted):
    trainer = make_trainer(tempted, beta=0.1)
    assert trainer.learner.reference is not None
    start = weights_of(trainer)
    rows = TINY["prompts"] * TINY["group"]
    first = trainer.learn(trainer.roll_out().rollouts)
    assert first["learned"] == rows, "with a KL term no group may be skipped"
    second = trainer.learn(trainer.roll_out().rollouts)
    assert first["kl"] == 0 < 1e-6 < second["kl"]
    assert all(map(torch.equal, trainer.learner.reference.parameters(), start))
    assert not any(map(torch.equal, weights_of(trainer), start))

    resumed = make_trainer(tempted, beta=0.1)
    resumed.restore(trainer.state())
    assert resumed.learner.reference is not None
    assert all(map(torch.equal, resumed.learner.reference.parameters(), start))


@pytest.mark.parametrize("change", [{"temperature": 0.7}, {"seed": 0}], ids=str)
def test_a_gap_stops_before_the_update(tempted, change):
    """Rollouts of another temperature, or by other weights: a trainer with one of the known bugs
    would compute what it computes here.
    """
    trainer = make_trainer(tempted)
    rollouts = trainer.roll_out().rollouts
    trainer.learner.settings = replace(trainer.settings, **change)
    if "seed" in change:
        with torch.no_grad():
            trainer.policy.model.lm_head.weight.mul_(1.01)
    start = weights_of(trainer)
    with pytest.raises(ValueError, match=r"log-probabilities of a token differ by .* at step 0"):
        trainer.learn(rollouts)
    assert all(map(torch.equal, weights_of(trainer), start))
    assert trainer.step == 0


@pytest.mark.parametrize("epochs", [1, 2])
def test_bf16_samples_by_a_copy_and_measures_the_gap(tempted, epochs):
    """What is compared with the sampler is the trainer's, never the sampler's own."""
    trainer = make_trainer(tempted, dtype="bfloat16", beta=0.01, epochs=epochs)
    for step in range(2):
        sampler = trainer.sampler()
        assert sampler is not trainer.policy.model
        for ours, theirs in zip(sampler.parameters(), trainer.policy.model.parameters()):
            assert (ours.dtype, theirs.dtype) == (torch.bfloat16, torch.float32)
            assert torch.equal(ours, theirs.bfloat16())
        measured = trainer.learn(trainer.roll_out().rollouts)
        assert 0 < measured["gap"] <= measured["gap_max"] < 0.2
        assert (measured["kl"] == 0) == (step == 0 and epochs == 1)


def test_importance_weights_are_capped(tempted):
    """The sampler called every token e times less likely than the trainer does: the weight is e
    without a cap, and the cap with one. (In float32, that would be refused.)
    """
    gradients = {}
    for cap in (None, 1.5, 100.0):
        trainer = make_trainer(tempted, dtype="bfloat16", importance_cap=cap)
        rollouts = trainer.roll_out().rollouts
        trained = trainer.learn(rollouts)
        assert trained["gap_max"] < 0.2
        trainer.restore(make_trainer(tempted).state())
        for said in (r.completion.logprobs for r in rollouts):
            said[:] = [x - 1 for x in said]
        gradients[cap], measured = gradient_of(trainer, rollouts)
        assert measured["gap"] == pytest.approx(1, abs=0.05)
    assert_same(gradients[1.5], [1.5 * g for g in gradients[None]], 0.01)
    assert_same(gradients[100.0], [2.71828 * g for g in gradients[None]], 0.05)


# --- the mean of the last steps


def said(trainer: Trainer) -> list[float]:
    """Tokens and log-probabilities of the greedy answers of an evaluation."""
    found = [r.completion for r in trainer.evaluate()[1]]
    return [x for one in found for x in (*one.tokens, *one.logprobs)]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [0, 2])
def test_the_result_is_the_mean_of_the_last_steps(tempted, dtype, rank):
    """Of three out of five, rounded, by hand; evaluated as such, while nothing else changes."""
    changes = {"steps": 5, "dtype": dtype, "lora_rank": rank, "checkpointing": True}
    trainer, plain = (make_trainer(tempted, **changes, average=x) for x in (0.55, 0.0))
    judge = make_trainer(tempted, dtype=dtype)
    policies: list[dict[str, torch.Tensor]] = []
    for _ in range(5):
        for one in (trainer, plain):
            one.learn(one.roll_out().rollouts)
        policy = dict(merged_weights(plain.policy.model))
        policies.append({name: weight.double() for name, weight in policy.items()})
        averaged = policies[2:] or policies[-1:]
        result = trainer.result().state_dict()
        assert result.keys() == policy.keys()
        for name, weight in result.items():
            expected = torch.stack([one[name] for one in averaged]).mean(0)
            rounding = 2**-8 if dtype == "bfloat16" else 1e-6
            torch.testing.assert_close(weight.double(), expected, rtol=rounding, atol=1e-7)
            assert torch.equal(plain.result().get_parameter(name), policy[name].to(weight.dtype))
        judge.policy.model.load_state_dict(result)
        assert said(trainer) == pytest.approx(said(judge), abs=1e-5)
        for name, weight in merged_weights(trainer.policy.model):
            assert torch.equal(weight, policy[name]), "rollouts are the policy's own"
    assert plain.state()["mean"] == {}


# --- what a step depends on


def test_dynamic_sampling_draws_until_enough_groups_have_a_spread(tempted, monkeypatch):
    numbers = list[int]()  # of the completions' generators

    def watched(seed, rows, *, first):
        numbers.extend(range(first, first + rows))
        return row_generators(seed, rows, first=first)

    monkeypatch.setattr("transformer.rl.rollout.row_generators", watched)
    changes = {"task": "tests.helpers.models.tiny_grpo:Seldom", "dynamic_sampling": True}
    trainer = make_trainer(tempted, **changes)
    groups = trainer.roll_out()
    rows = TINY["prompts"] * TINY["group"]
    assert len(groups.rollouts) == rows < groups.drawn < DRAWS * rows
    assert groups.drawn == trainer.source.drawn and numbers == [*range(groups.drawn)]
    assert all(map(spread, groups_of(groups.rollouts, TINY["group"])))
    problems = [[r.problem for r in g] for g in groups_of(groups.rollouts, TINY["group"])]
    assert all(len({p.arguments for p in group}) == 1 for group in problems)
    assert len({group[0].arguments for group in problems}) == TINY["prompts"]
    assert trainer.learn(groups.rollouts)["learned"] > 0


def steps(trainer: Trainer, count: int) -> list[torch.Tensor]:
    for _ in range(count):
        trainer.learn(trainer.roll_out().rollouts)
    return weights_of(trainer)


@pytest.mark.parametrize("changes", [{}, {"replay": 0.5}, {"lora_rank": 2}], ids=str)
def test_a_restored_trainer_takes_the_same_steps(tempted, changes):
    changes = changes | {"task": "tests.helpers.models.tiny_grpo:Seldom", "dynamic_sampling": True}
    changes |= {"beta": 0.01, "warm_up": 3, "average": 1.0}
    whole = make_trainer(tempted, **changes)
    expected = steps(whole, 4)
    halfway, rest = make_trainer(tempted, **changes), make_trainer(tempted, **changes)
    steps(halfway, 2)
    state = halfway.state()
    assert all("lora" in name for name in state["model"]) == ("lora_rank" in changes)
    rest.restore(state)
    assert all(map(torch.equal, steps(rest, 2), expected))
    results = (x.result().state_dict() for x in (rest, whole))
    torch.testing.assert_close(*results, rtol=0, atol=0)
    other = steps(make_trainer(tempted, **changes, seed=1), 4)
    assert not any(map(torch.equal, other, expected))


@pytest.mark.parametrize("dtype, replay", [("float32", 0.5), ("bfloat16", 0.0)])
def test_an_evaluation_changes_nothing_and_repeats(tempted, dtype, replay):
    one, other = (make_trainer(tempted, dtype=dtype, replay=replay) for _ in range(2))
    scores, greedy = one.evaluate()
    assert one.evaluate()[0] == scores
    kinds = {"greedy", "sampled", "pass@2", "form", "length", "reward", "reward_range"}
    assert scores.keys() == kinds
    assert len(greedy) == TINY["eval_problems"]
    assert all(r.problem.held_out for r in greedy)
    assert all(map(torch.equal, steps(one, 2), steps(other, 2)))
    assert one.evaluate()[1] != greedy


def test_pass_at_k_is_what_all_choices_of_k_samples_say():
    for n, k in itertools.combinations_with_replacement(range(8, 0, -1), 2):
        for c in range(n + 1):
            solved = [any(kept) for kept in itertools.combinations([i < c for i in range(n)], k)]
            assert pass_at_k(n, c, k) == pytest.approx(np.mean(solved), abs=1e-15)
    papers = 1 - np.prod(1 - 4 / np.arange(95, 101))
    assert pass_at_k(100, 6, 4) == pytest.approx(papers, rel=1e-12)


def test_pass_at_k_is_not_the_mean(tempted):
    changes = {"eval_problems": 16, "eval_samples": 4, "eval_k": [1, 2, 4]}
    scores, _ = make_trainer(tempted, **changes).evaluate()
    assert scores["pass@1"] == scores["sampled"]
    assert 0 < scores["pass@1"] < scores["pass@2"] < scores["pass@4"] <= 1


def test_training_never_sees_a_held_out_problem(tempted):
    trainer = make_trainer(tempted, prompts=32, group=2, max_tokens=2)
    seen = [r.problem for _ in range(2) for r in trainer.roll_out().rollouts]
    assert not any(problem.held_out for problem in seen)
    trainer.step = 1
    assert trainer.roll_out().rollouts[0].problem.arguments != seen[0].arguments


def test_the_learning_rate_rises_and_falls(tempted):
    trainer = make_trainer(tempted, warm_up=2, lr=0.1, steps=5, decay=0.4)
    used: list[float] = []
    trainer.learner.optimizer.register_step_pre_hook(
        lambda optimizer, *_: used.extend(group["lr"] for group in optimizer.param_groups)
    )
    rates = [trainer.learn(trainer.roll_out().rollouts)["lr"] for _ in range(5)]
    assert rates == used == pytest.approx([0.05, 0.1, 0.1, 0.1, 0.05])
    assert Settings(lr=0.1).rate_at(0) == Settings(lr=0.1).rate_at(59) == 0.1


def test_the_norm_is_clipped(tempted):
    """AdamW's first moment holds a tenth of the first gradient."""
    trainer = make_trainer(tempted, clip_gradient=1e-3)
    measured = trainer.learn(trainer.roll_out().rollouts)
    moments = [state["exp_avg"].flatten() for state in trainer.learner.optimizer.state.values()]
    assert measured["gradient_norm"] > 0.01
    norm = torch.linalg.vector_norm(torch.cat(moments)).item()
    assert norm == pytest.approx(1e-4, rel=1e-2)
