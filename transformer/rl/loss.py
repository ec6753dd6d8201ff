"""The GRPO loss: pure functions from rewards and log-probabilities to a number to minimise.

A group of G completions answers one prompt. What one of them earned above the mean of its group is
its advantage A; the loss makes each of its tokens more likely where A > 0, less likely where A < 0:

    r = exp(logprobs - old)                   how far the policy moved since the rollout, per token
    l = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) + beta KL         policy_loss "ppo"
    l = -constant(clip(r, 1 - clip_low, 1 + clip_high)) A logprobs + beta KL            "cispo"
    loss = sum over the tokens of the batch of weight * l

The papers differ in A, in r, in the bounds, in l and in the weight of a token:

    paper                        scale     ratio       reduce     remarks
    GRPO      arXiv:2402.03300   "group"   "token"     "grpo"     equal bounds, beta 0.04
    DAPO      arXiv:2503.14476   "group"   "token"     "dapo"     clip-higher: 0.2 and 0.28, no KL
    Dr. GRPO  arXiv:2503.20783   "none"    "token"     "dr_grpo"  no KL
    GSPO      arXiv:2507.18071   "group"   "sequence"  "grpo"     bounds 3e-4 and 4e-4, no KL
    MaxRL     arXiv:2602.02710   "mean"    "token"     "dapo"     rewards of 0 or more
    RLOO      arXiv:2402.14740   "rloo"    "token"     "dr_grpo"  one epoch; KL in its rewards
    CISPO     arXiv:2506.13585   "group"   "token"     "dapo"     "cispo", clip_low 1, no KL

Two facts save a search for bugs that are none. On-policy (old equals logprobs) r is 1 and the value
of the loss says nothing: with "grpo" it is -mean(A), which is 0 in every group, but its gradient is
not. And a group whose rewards are all equal has A = 0: as long as beta = 0 its rows add nothing to
value or gradient, and leaving them out changes neither if `Totals` still counts them. Also because
r is 1, both policy losses have the same gradient in the first epoch.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from transformer.generation.sampling import LARGEST

Scale = Literal["group", "batch", "mean", "none", "rloo"]
Ratio = Literal["token", "sequence"]
Reduce = Literal["grpo", "dapo", "dr_grpo"]
PolicyLoss = Literal["ppo", "cispo"]

SPREAD_FLOOR = 1e-4  # added to a standard deviation of rewards


@dataclass(frozen=True)
class Loss:
    """How the loss is computed; the table at the top of the file gives the papers' choices.

    Attributes:
        ratio: "token": r = exp(logprobs - old) of each token. "sequence" (GSPO, equation 7): one r
            for all tokens of a completion, the exponential of the mean of logprobs - old.
        reduce: the weight of a token. "dapo": 1 / tokens of the batch. "grpo": 1 / (rows of the
            batch * tokens of its row), so that rows weigh the same and tokens of long rows less.
            "dr_grpo": 1 / (rows * the limit of a completion's length), a constant. TRL's "bnpo" is
            "dapo" within each micro-batch, so it depends on the split; here it would be "dapo".
        clip_low: r below 1 - clip_low earns nothing more, for A < 0; 1 for no bound.
        clip_high: r above 1 + clip_high earns nothing more, for A > 0; math.inf for no bound.
        beta: weight of the KL divergence from the reference, in nats per token; 0 for none.
        importance_cap: C of truncated importance sampling, which weighs a token's first term by
            min(exp(old - sampler), C) where the sampler's probabilities differ from the trainer's
            (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
            Training"); None for no correction.
        policy_loss: "ppo": a token whose r has left the bounds, in the direction of its A, has no
            gradient. "cispo" (MiniMax-M1, equation 4): r is a weight, clipped for both signs of A
            and without a gradient of its own; every token has the gradient of its logprobs. The
            paper has no lower bound. TRL's epsilon_high is 1 + clip_high.

    Raises:
        ValueError: a value is NaN, unknown or out of range.
    """

    ratio: Ratio = "token"
    reduce: Reduce = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.0
    importance_cap: float | None = None
    policy_loss: PolicyLoss = "ppo"

    def __post_init__(self) -> None:
        _check_choice("ratio", self.ratio, Ratio)
        _check_choice("reduce", self.reduce, Reduce)
        _check_choice("policy_loss", self.policy_loss, PolicyLoss)
        # Written so that NaN, for which every comparison is false, is refused.
        if not 0 < self.clip_low <= 1:
            raise ValueError(f"clip_low must be above 0 and at most 1, got {self.clip_low}")
        if not (0 < self.clip_high <= LARGEST or self.clip_high == math.inf):
            raise ValueError(
                f"clip_high must be above 0 and at most {LARGEST:g}, or inf, got {self.clip_high}"
            )
        if not 0 <= self.beta <= LARGEST:
            raise ValueError(f"beta must be between 0 (no KL) and {LARGEST:g}, got {self.beta}")
        if self.importance_cap is not None and not 0 < self.importance_cap <= LARGEST:
            raise ValueError(
                f"importance_cap must be above 0 and at most {LARGEST:g}, or None for no"
                f" correction, got {self.importance_cap}"
            )


@dataclass(frozen=True)
class Totals:
    """Sizes of the whole batch of one optimiser step: all its micro-batches, on all ranks.

    They normalise the loss, and a micro-batch cannot know them: dividing by its own sizes would
    make the gradient depend on the split.

    Attributes:
        rows: completions, also those that are masked or left out.
        tokens: True elements of all masks, also of rows that are left out.
        limit: tokens that a completion may have, for "dr_grpo": the constant of the rollout, not
            the length of the longest that came out.

    Raises:
        ValueError: there is no row, a negative number of tokens or no room for one.
    """

    rows: int
    tokens: int
    limit: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.tokens < 0 or self.limit < 1:
            raise ValueError(
                "a batch has at least 1 row, 0 tokens and a limit of 1 token, got"
                f" {self.rows}, {self.tokens} and {self.limit}"
            )


@dataclass(frozen=True)
class Metrics:
    """What a loss saw: sums and maxima over its tokens. `+` joins micro-batches exactly.

    Across ranks, all-reduce every sum with SUM and every maximum with MAX; nothing here waits for
    the device but `means`. Rows that were left out of the loss are not in its metrics.

    Attributes:
        sums: 0-d fp64: "tokens", their number; "ratio"; "clipped_low" and "clipped_high", tokens
            whose r was clipped, so that "ppo" has no gradient and "cispo" a bounded one; "kl" if
            there is a reference; if there are the sampler's log-probabilities, "gap", of
            |old - sampler|, and "sampler_kl", the sampler's divergence from the trainer, by k3.
        maxima: 0-d fp64: "ratio_max", and "gap_max" if there is a gap.
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def __add__(self, other: "Metrics") -> "Metrics":
        sums = {name: x + other.sums[name] for name, x in self.sums.items()}
        maxima = {name: torch.maximum(x, other.maxima[name]) for name, x in self.maxima.items()}
        return Metrics(sums, maxima)

    def means(self) -> dict[str, float]:
        """Means per token, by the names of the sums, and the maxima; zeros if there is no token."""
        # One wait for the device, not one for each.
        found = torch.stack([*self.sums.values(), *self.maxima.values()]).tolist()
        sums, maxima = dict(zip(self.sums, found)), dict(zip(self.maxima, found[len(self.sums) :]))
        tokens = max(sums.pop("tokens"), 1.0)
        return {name: x / tokens for name, x in sums.items()} | maxima


def group_advantages(rewards: Tensor, scale: Scale = "group") -> Tensor:
    """What each completion earned above the mean of its group, (reward - mean) / spread.

    Args:
        rewards: (groups, G), one row for each prompt. For scale "batch", of all ranks.
        scale: "group": the spread is the group's standard deviation, with Bessel's correction, plus
            1e-4 (GRPO); hard and easy groups then weigh as much as those in between. "batch": the
            same of all rewards. "mean": the group's mean (MaxRL). For rewards of 0 and 1 the
            gradient is then, up to order G - 1 of its series, that of log p(right) and not of
            p(right): as when right answers are shown, hard problems weigh more, and a decision that
            the model cannot make stays in doubt instead of becoming certain one way or the other.
            "none": 1 (Dr. GRPO). "rloo": 1 - 1 / G, and so what is left is the reward less the
            mean of the others of the group (RLOO, leave one out).

    Returns:
        (groups, G), at least fp32; exactly 0 where all rewards of a group are equal.

    Raises:
        ValueError: an unknown scale, a group of one, a reward that is not finite, or one below 0
            for scale "mean".
    """
    _check_choice("scale", scale, Scale)
    if rewards.ndim != 2 or len(rewards) < 1 or rewards.shape[1] < 2:
        raise ValueError(
            "rewards must have shape (groups, G) with at least one group and G >= 2, got"
            f" {tuple(rewards.shape)}"
        )
    if not rewards.isfinite().all():
        group, completion = (~rewards.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"rewards must be finite, got {rewards[group, completion].item()} for completion"
            f" {completion} of group {group}"
        )
    rewards = rewards.to(torch.promote_types(rewards.dtype, torch.float32))
    if scale == "mean" and rewards.min() < 0:
        raise ValueError(f'scale "mean" takes rewards of 0 or more, got {rewards.min().item()}')
    # The mean of equal numbers may be rounded, that of zeros is not: measure from the first one.
    shifted = rewards - rewards[:, :1]
    centred = shifted - shifted.mean(1, keepdim=True)
    if scale in ("none", "rloo"):
        return centred if scale == "none" else centred / (1 - 1 / rewards.shape[1])
    if scale == "mean":
        mean = rewards.mean(1, keepdim=True)
        return centred / mean.where(mean > 0, 1)
    spread = rewards.std() if scale == "batch" else rewards.std(1, keepdim=True)
    return centred / (spread + SPREAD_FLOOR)


def length_mask(lengths: Tensor, width: int) -> Tensor:
    """Which tokens of right-padded completions count: (B,) lengths -> (B, width) bool.

    A length includes the end-of-turn token: without it, stopping is never learned. A comparison
    with the pad's id would not do: the id may end a turn, and the policy may have sampled it.
    """
    return torch.arange(width, device=lengths.device) < lengths[:, None]


def grpo_loss(
    logprobs: Tensor,
    old: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss: Loss,
    totals: Totals,
    *,
    reference: Tensor | None = None,
    sampler: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """The part of a batch's loss that a micro-batch contributes; the batch's is the plain sum.

    The sum, and so the accumulated gradient, is the same for any split into micro-batches. Where
    gradients are averaged over ranks, multiply by their number.

    Args:
        logprobs: (B, T) of the policy that learns, natural logarithms at the temperature of the
            rollout. The only input that gets a gradient.
        old: (B, T) of the policy when the rollout was made; logprobs itself in the first epoch. By
            the trainer's arithmetic, where the sampler's is not the same.
        advantages: (B,).
        mask: (B, T) bool, the tokens that count; see length_mask. Other inputs may hold anything,
            even NaN, where it is False. A row without a True, as of a truncated completion that is
            not to count, adds nothing, but is one of the rows in `totals`.
        loss: how to compute it.
        totals: sizes of the whole batch.
        reference: (B, T) of the reference policy. KL is estimated by k3 = e^d - d - 1 with
            d = reference - logprobs (Schulman 2020, "Approximating KL divergence"), which is never
            negative and unbiased on-policy; with beta = 0 it is only measured.
        sampler: (B, T) that the tokens were drawn with; without importance_cap their distance from
            `old` is only measured.

    Returns:
        The loss, 0-d, and its metrics.

    Raises:
        ValueError: shapes that do not fit, a mask that is not bool, beta without a reference or
            importance_cap without the sampler's log-probabilities.
    """
    inputs = {"old": old, "mask": mask, "reference": reference, "sampler": sampler}
    _check_inputs(logprobs, advantages, loss, inputs)
    old, advantage, unused = old.detach(), advantages[:, None], ~mask
    lengths = mask.sum(-1, keepdim=True).clamp(min=1)

    log_ratio = (logprobs - old).masked_fill(unused, 0)
    if loss.ratio == "sequence":
        log_ratio = (log_ratio.sum(-1, keepdim=True) / lengths).expand_as(mask)
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
    low, high = ratio < 1 - loss.clip_low, ratio > 1 + loss.clip_high
    if loss.policy_loss == "cispo":
        per_token = -clipped.detach() * advantage * logprobs.masked_fill(unused, 0)
    else:
        # The minimum for both signs of A: it takes away the gain from going too far, not the loss.
        per_token = -torch.minimum(ratio * advantage, clipped * advantage)
        low, high = low & (advantage < 0), high & (advantage > 0)
    seen = {"ratio": ratio, "clipped_low": low, "clipped_high": high}
    if sampler is not None:
        gap = (old - sampler.detach()).masked_fill(unused, 0)
        seen["gap"], seen["sampler_kl"] = gap.abs(), gap.expm1() - gap
        if loss.importance_cap is not None:
            per_token = per_token * gap.exp().clamp(max=loss.importance_cap)
    if reference is not None:
        distance = (reference.detach() - logprobs).masked_fill(unused, 0)
        kl = distance.expm1() - distance
        seen["kl"] = kl
        if loss.beta:
            per_token = per_token + loss.beta * kl

    rows, tokens = totals.rows, max(totals.tokens, 1)
    sizes: Any = {"grpo": rows * lengths, "dapo": tokens, "dr_grpo": rows * totals.limit}
    per_token = per_token.masked_fill(unused, 0) / sizes[loss.reduce]
    return per_token.sum(), _metrics(mask, seen)


def _metrics(mask: Tensor, seen: dict[str, Tensor]) -> Metrics:
    with torch.no_grad():
        # 0 is neutral in the maxima too: ratios and gaps are never negative.
        counted = {name: x.double().masked_fill(~mask, 0) for name, x in seen.items()}
        sums = {"tokens": mask.sum().double()} | {name: x.sum() for name, x in counted.items()}
        maxima = {
            f"{name}_max": F.pad(counted[name].flatten(), (0, 1)).amax()
            for name in ("ratio", "gap")
            if name in counted
        }
    return Metrics(sums, maxima)


def _check_choice(name: str, value: object, choices: Any) -> None:
    if value not in get_args(choices):
        raise ValueError(f"{name} must be one of {', '.join(get_args(choices))}, got {value!r}")


def _check_inputs(logprobs: Tensor, advantages: Tensor, loss: Loss, inputs: dict[str, Any]) -> None:
    if logprobs.ndim != 2:
        raise ValueError(f"logprobs must have shape (B, T), got {tuple(logprobs.shape)}")
    for name, x in inputs.items():
        if x is not None and x.shape != logprobs.shape:
            raise ValueError(
                f"{name} must have the shape of logprobs, {tuple(logprobs.shape)}, got"
                f" {tuple(x.shape)}"
            )
    if advantages.shape != logprobs.shape[:1]:  # (B, 1) would broadcast, into a wrong loss
        raise ValueError(
            f"advantages must have shape ({len(logprobs)},), one for each row of logprobs, got"
            f" {tuple(advantages.shape)}"
        )
    if (dtype := inputs["mask"].dtype) != torch.bool:
        raise ValueError(f"the mask must be bool, got {str(dtype).removeprefix('torch.')}")
    if loss.beta and inputs["reference"] is None:
        raise ValueError(f"beta = {loss.beta} needs the reference's log-probabilities, got None")
    if (cap := loss.importance_cap) is not None and inputs["sampler"] is None:
        raise ValueError(f"importance_cap = {cap} needs the sampler's log-probabilities, got None")
