"""The GRPO loss against its papers' formulas, token by token in Python's floats; its properties.

Places that the mask leaves out hold NaN or -inf in every input, so that nothing may depend on them.
"""

import itertools
import math
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.models.tiny_grpo import distance
from transformer.rl.loss import Loss, Totals, group_advantages, grpo_loss, length_mask

TOTALS = Totals(rows=9, tokens=41, limit=11)  # not the sizes of any micro-batch below
CLIPS = [(0.2, 0.28), (0.2, 0.2), (3e-4, 4e-4), (1.0, math.inf)]
KL = (0.0, 0.04)
POLICIES = ("ppo", "cispo")
LOSSES = [
    Loss(ratio, kind, *clip, kl, cap, policy_loss)
    for ratio, kind, clip, kl, cap, policy_loss in itertools.product(
        ("token", "sequence"), ("grpo", "dapo", "dr_grpo"), CLIPS, KL, (None, 1.5, 0.9), POLICIES
    )
]
deterministic = settings(deadline=None, max_examples=60, derandomize=True)


@dataclass
class Rows:
    """Random completions, as a rollout gives them after a few steps of learning."""

    logprobs: torch.Tensor
    old: torch.Tensor
    reference: torch.Tensor
    sampler: torch.Tensor
    advantages: torch.Tensor
    mask: torch.Tensor

    def part(self, rows, width=None) -> "Rows":
        return Rows(*(x[rows] if x.ndim == 1 else x[rows, :width] for x in vars(self).values()))

    def loss(self, loss: Loss, totals: Totals = TOTALS):
        """Value, gradient and metrics."""
        given = (self.logprobs, self.old, self.reference, self.sampler)
        given = logprobs, old, reference, sampler = [x.clone().requires_grad_() for x in given]
        value, metrics = grpo_loss(
            logprobs, old, self.advantages, self.mask, loss, totals, reference=reference,
            sampler=sampler,
        )  # fmt: skip
        gradient, *others = torch.autograd.grad(value, given, allow_unused=True)
        assert others == [None, None, None], "only the policy learns"
        return value.detach(), gradient, metrics


def random_rows(lengths, seed=0, dtype=torch.float64) -> Rows:
    g = torch.Generator().manual_seed(seed)
    rows, width = len(lengths), max(max(lengths), 1)

    def noise(scale):
        return scale * torch.randn(rows, width, generator=g, dtype=torch.float64)

    mask = length_mask(torch.tensor(lengths), width)
    old = -noise(1.5).abs()
    advantages = torch.randn(rows, generator=g, dtype=torch.float64).abs()
    advantages[1::2] *= -1
    advantages[-1] = 0
    inputs = [old + noise(0.4), old, old + noise(0.3), old + noise(0.3)]
    holes = [-math.inf, math.nan, math.nan, -math.inf]
    inputs = [x.masked_fill(~mask, hole).to(dtype) for x, hole in zip(inputs, holes)]
    return Rows(*inputs, advantages.to(dtype), mask)


def from_the_papers(x: Rows, loss: Loss, totals: Totals):
    """Value, gradient, and numbers of clipped tokens, low and high.

    The surrogate is written case by case: where A > 0 it grows with r up to the upper bound, where
    A < 0 it falls with r from the lower bound on (GRPO, equation 3; DAPO, equation 8). CISPO's is
    log-probability times advantage times a number, which is r between the bounds (MiniMax-M1).
    """
    value, clipped = 0.0, [0, 0]
    gradient = [[0.0] * x.mask.shape[1] for _ in x.mask]
    low, high = 1 - loss.clip_low, 1 + loss.clip_high
    columns = (x.logprobs, x.old, x.reference, x.sampler, x.mask)
    for b, (logprobs, old, reference, sampler, mask) in enumerate(
        zip(*(c.tolist() for c in columns))
    ):
        counted = [t for t, counts in enumerate(mask) if counts]
        advantage = float(x.advantages[b])
        for t in counted:
            weight = {
                "grpo": 1 / totals.rows / len(counted),
                "dapo": 1 / totals.tokens,
                "dr_grpo": 1 / totals.rows / totals.limit,
            }[loss.reduce]
            # The ratio, and the tokens whose log-probabilities it is the mean of.
            of = [t] if loss.ratio == "token" else counted
            r = math.exp(sum(logprobs[u] - old[u] for u in of) / len(of))
            importance = 1.0
            if loss.importance_cap is not None:
                importance = min(math.exp(old[t] - sampler[t]), loss.importance_cap)
            direct = 0.0  # the slope that does not go through r
            if loss.policy_loss == "cispo":
                direct = (low if r < low else high if r > high else r) * advantage
                surrogate, slope = direct * logprobs[t], 0.0
                clipped[0] += r < low
                clipped[1] += r > high
            elif advantage > 0 and r > high:
                surrogate, slope = high * advantage, 0.0
                clipped[1] += 1
            elif advantage < 0 and r < low:
                surrogate, slope = low * advantage, 0.0
                clipped[0] += 1
            else:
                surrogate, slope = r * advantage, r * advantage
            odds = math.exp(reference[t] - logprobs[t])
            k3 = odds - math.log(odds) - 1
            value += weight * (loss.beta * k3 - importance * surrogate)
            gradient[b][t] += weight * loss.beta * (1 - odds)
            gradient[b][t] -= weight * importance * direct
            for u in of:  # what reaches a log-probability through r
                gradient[b][u] -= weight * importance * slope / len(of)
    return value, torch.tensor(gradient, dtype=torch.float64), clipped


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_value_and_gradient_are_the_papers(dtype, tolerance):
    x = random_rows([7, 5, 1, 0, 3, 6, 2, 5, 4], dtype=dtype)
    total = [0, 0]
    for loss in LOSSES:
        value, gradient, metrics = x.loss(loss)
        expected_value, expected_gradient, clipped = from_the_papers(x, loss, TOTALS)
        assert value.dtype == gradient.dtype == dtype
        assert distance(value, expected_value) <= tolerance, loss
        assert distance(gradient, expected_gradient) <= tolerance, loss
        assert [metrics.sums["clipped_low"], metrics.sums["clipped_high"]] == clipped, loss
        total = [a + b for a, b in zip(total, clipped)]
    assert min(total) > 300, f"the bounds hardly bit: {total}"


lengths = st.lists(st.integers(0, 5), min_size=1, max_size=7)


@given(lengths, st.sampled_from(LOSSES), st.integers(1, 4), st.integers(0, 99))
@deterministic
def test_any_split_gives_the_same_loss_gradient_and_metrics(lengths, loss, parts, seed):
    x = random_rows(lengths, seed)
    value, gradient, metrics = x.loss(loss)
    assignment = torch.randint(
        parts, (len(lengths),), generator=torch.Generator().manual_seed(seed)
    )
    sum_of_values, joined, seen = 0.0, torch.zeros_like(gradient), []
    for part in assignment.unique():
        rows = (assignment == part).nonzero()[:, 0]
        width = max(1, max(lengths[row] for row in rows))  # a micro-batch is padded to its longest
        part_value, part_gradient, part_metrics = x.part(rows, width).loss(loss)
        sum_of_values += part_value
        joined[rows, :width] = part_gradient
        seen.append(part_metrics)
    assert distance(sum_of_values, value) <= 1e-13
    assert distance(joined, gradient) <= 1e-13
    assert reduce(add, seen).means() == pytest.approx(metrics.means(), rel=1e-12)


def test_empty_rows_add_nothing():
    for loss in LOSSES:
        value, gradient, metrics = random_rows([0, 0, 0]).loss(loss, Totals(3, tokens=0, limit=5))
        assert value == 0 and torch.equal(gradient, torch.zeros_like(gradient))
        means = metrics.means()
        assert set(means.values()) == {0.0}
        assert {"ratio", "clipped_low", "clipped_high", "kl", "gap", "ratio_max"} < set(means)


def test_the_metrics_are_means_and_maxima_over_the_counted_tokens():
    x = random_rows([5, 0, 3, 1])
    _, _, metrics = x.loss(Loss(beta=0.1))
    m = x.mask
    ratio = (x.logprobs - x.old)[m].exp()
    odds = (x.reference - x.logprobs)[m]
    gap = (x.old - x.sampler)[m].abs()
    means = metrics.means()
    assert metrics.sums["tokens"] == 9
    for name, expected in {
        "ratio": ratio.mean(),
        "ratio_max": ratio.max(),
        "kl": (odds.exp() - odds - 1).mean(),
        "gap": gap.mean(),
        "gap_max": gap.max(),
    }.items():
        assert means[name] == pytest.approx(float(expected), rel=1e-12), name


# ---- advantages ----


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-14), (torch.float32, 1e-6)])
@pytest.mark.parametrize("shape", [(5, 8), (1, 2), (3, 3)])
def test_advantages_are_numpys(shape, dtype, tolerance):
    rewards = torch.rand(shape, dtype=dtype) * 4 + 1
    r = rewards.double().numpy()
    centred = r - r.mean(1, keepdims=True)
    others = [[np.delete(row, i).mean() for i in range(len(row))] for row in r]
    for scale, expected in {
        "group": centred / (r.std(1, ddof=1, keepdims=True) + 1e-4),
        "batch": centred / (r.std(ddof=1) + 1e-4),
        "mean": centred / r.mean(1, keepdims=True),
        "none": centred,
        "rloo": r - others,
    }.items():
        advantages = group_advantages(rewards, scale)
        assert advantages.dtype == dtype
        assert distance(advantages, expected) <= tolerance, scale
    assert torch.equal(group_advantages(rewards), group_advantages(rewards, "group"))


@pytest.mark.parametrize("scale", ["group", "batch", "mean", "none", "rloo"])
@pytest.mark.parametrize("size", [2, 3, 7, 11])
def test_equal_rewards_give_exactly_zero(size, scale):
    for reward in (0.0, 0.1, 1 / 3, 1e8, -0.7)[: None if scale != "mean" else -1]:
        rewards = torch.full((3, size), reward)
        rewards[1, 0] += 1e9
        advantages = group_advantages(rewards, scale)
        assert not advantages[[0, 2]].any()
        assert advantages[1].any()


def test_advantages_of_whole_numbers_and_half_precision_are_fp32():
    rewards = [[0, 1, 1, 0], [1, 0, 0, 0]]
    expected = group_advantages(torch.tensor(rewards, dtype=torch.float32))
    for dtype in (torch.int64, torch.bool, torch.bfloat16):
        assert torch.equal(group_advantages(torch.tensor(rewards, dtype=dtype)), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_by_its_place(bad):
    rewards = torch.zeros(3, 4)
    rewards[1, 2] = bad
    with pytest.raises(ValueError, match=f"got {bad} for completion 2 of group 1$"):
        group_advantages(rewards)


# ---- refusals ----


@pytest.mark.parametrize(
    "field, value, sentence",
    [
        ("ratio", "tokens", "ratio must be one of token, sequence, got 'tokens'"),
        ("reduce", "bnpo", "reduce must be one of grpo, dapo, dr_grpo, got 'bnpo'"),
        ("policy_loss", "gspo", "policy_loss must be one of ppo, cispo, got 'gspo'"),
        ("clip_low", 0.0, "clip_low must be above 0 and at most 1, got 0.0"),
        ("clip_low", 1.1, "clip_low must be above 0 and at most 1, got 1.1"),
        ("clip_low", math.nan, "clip_low must be above 0 and at most 1, got nan"),
        ("clip_high", 0.0, "clip_high must be above 0 .*, got 0.0"),
        ("clip_high", 1e39, "clip_high must be above 0 and at most 1e[+]30, or inf, got 1e[+]39"),
        ("clip_high", math.nan, "clip_high must be above 0 .*, got nan"),
        ("beta", -0.1, r"beta must be between 0 \(no KL\) and 1e[+]30, got -0.1"),
        ("beta", math.inf, r"beta must be between 0 \(no KL\) and 1e[+]30, got inf"),
        ("beta", math.nan, r"beta must be between 0 \(no KL\) and 1e[+]30, got nan"),
        ("importance_cap", 0.0, "importance_cap must be .* or None for no correction, got 0.0"),
        ("importance_cap", 1e39, "importance_cap must be above 0 and at most 1e[+]30, or None .*"),
        ("importance_cap", math.nan, "importance_cap must be .* or None .*, got nan"),
    ],
)
def test_bad_settings_are_refused_in_one_sentence(field, value, sentence):
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        Loss(**{field: value})


UNFIT = {
    r"logprobs must have shape \(B, T\), got \(6,\)": {"logprobs": torch.zeros(6)},
    r"old must have the shape of logprobs, \(2, 3\), got \(2, 1\)": {"old": torch.zeros(2, 1)},
    "reference must have the shape of logprobs, .*": {"reference": torch.zeros(3)},
    "sampler must have the shape of logprobs, .*": {"sampler": torch.zeros(1, 3)},
    "mask must have the shape of logprobs, .*": {"mask": torch.ones(2, 4)},
    "the mask must be bool, got float32": {"mask": torch.ones(2, 3)},
    r"advantages must have shape \(2,\), .*, got \(2, 1\)": {"advantages": torch.zeros(2, 1)},
    "beta = 0.1 needs the reference's log-probabilities, got None": {"loss": Loss(beta=0.1)},
    "importance_cap = 2.0 needs the sampler's .*, got None": {"loss": Loss(importance_cap=2.0)},
}


@pytest.mark.parametrize("sentence", UNFIT)
def test_inputs_that_do_not_fit_are_refused_in_one_sentence(sentence):
    inputs = {
        "logprobs": torch.zeros(2, 3),
        "old": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3, dtype=torch.bool),
        "loss": Loss(),
        "totals": TOTALS,
    }
    grpo_loss(**inputs)
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        grpo_loss(**inputs | UNFIT[sentence])
