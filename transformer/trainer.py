"""The trainer of GRPO: roll out, judge, compare within groups, update.

    problems --policy--> groups of completions --task--> rewards --group means--> advantages
    --loss--> gradient, summed over micro-batches --clip--> AdamW --> policy

A step depends on the settings, the weights, the optimiser's moments and two counters, and on
nothing else: problems are a function of (seed, step), draws of (seed, number of the completion).
"""

import copy
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from transformer.grpo_loss import Metrics, Totals, group_advantages, grpo_loss
from transformer.model import Transformer
from transformer.recipes import Settings, find_task
from transformer.rollout import Batch, Policy, Rollout, collate, completion_logprobs, roll_out
from transformer.sampling import Sampling
from transformer.session import choose_attention, find_checkpoint
from transformer.weights import load_config

GAP = 1e-3  # nats; in fp32 the sampler and the trainer differ by rounding only
DRAWS = 4  # dynamic sampling draws at most so many times the problems of a step
EVALUATION_ROWS = 512  # completions of an evaluation at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolved(settings: Settings, device: torch.device) -> Settings:
    """The settings with "auto" replaced by what that means on a device.

    Raises:
        FileNotFoundError, ValueError: no such checkpoint, or attention that cannot run on it.
    """
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    attention = settings.attention
    if attention == "auto" and device.type == "cpu":
        attention = "sdpa"  # the versions would run in the interpreter
    config = load_config(find_checkpoint(settings.model))
    attention, _ = choose_attention(attention, config, device, DTYPES[dtype])
    return replace(settings, attention=attention, dtype=dtype)


@dataclass(frozen=True)
class Groups:
    """The rollouts of a step.

    Attributes:
        rollouts: of the groups that are learned from, group by group.
        drawn: completions that were sampled, those of groups that were passed over included.
        seconds: that it took.
    """

    rollouts: list[Rollout]
    drawn: int
    seconds: float


class Trainer:
    """A policy, its optimiser and where it stands.

    Args:
        settings: resolved.
        device: where everything happens.

    Attributes:
        step: steps taken.
        drawn: completions sampled for training so far.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.task = find_task(settings.task)
        self.folder = find_checkpoint(settings.model)
        self.policy = Policy.load(self.folder, settings.attention, device)
        self.dtype = DTYPES[settings.dtype]
        self.parameters = [p for p in self.policy.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=device.type == "cuda",
        )
        self.reference = self._frozen() if settings.beta else None
        self._sampler = self.policy.model if self.dtype == torch.float32 else self._frozen()
        self.step = self.drawn = 0

    def _frozen(self) -> Transformer:
        """A copy of the weights in the dtype of the arithmetic."""
        return copy.deepcopy(self.policy.model).to(self.dtype).requires_grad_(False)

    def sampler(self) -> Transformer:
        """The model that rollouts are drawn from: the policy as it is now."""
        if self._sampler is not self.policy.model:
            with torch.no_grad():
                for ours, theirs in zip(
                    self._sampler.parameters(), self.policy.model.parameters(), strict=True
                ):
                    ours.copy_(theirs)
        return self._sampler

    # ---- rollouts ----

    def problems(self) -> Iterable[Any]:
        """The problems of this step, as many as anybody asks for."""
        rng = Random(f"{self.settings.seed} {self.step}")
        while True:
            yield self.task.sample(rng)

    def roll_out(self) -> Groups:
        """Sample the groups of this step; under dynamic sampling, until enough of them have a
        spread (DAPO, arXiv:2503.14476, section 3.2) or too many were drawn.
        """
        s, started, first = self.settings, time.perf_counter(), self.drawn
        source, rollouts = iter(self.problems()), list[Rollout]()
        for _ in range(DRAWS if s.dynamic_sampling else 1):
            missing = s.prompts - len(rollouts) // s.group
            found = roll_out(
                self.policy,
                self.sampler(),
                [next(source) for _ in range(missing)],
                s.group,
                max_tokens=s.max_tokens,
                sampling=Sampling(temperature=s.temperature),
                seed=s.seed,
                first=self.drawn,
            )
            self.drawn += len(found)
            if s.dynamic_sampling:
                found = [r for group in groups_of(found, s.group) if spread(group) for r in group]
            rollouts += found
            if len(rollouts) == s.prompts * s.group:
                break
        return Groups(rollouts, self.drawn - first, time.perf_counter() - started)

    # ---- learning ----

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Take one step of the optimiser for each epoch; returns what was measured.

        Completions whose advantage is 0 add nothing to the gradient unless there is a KL term, and
        are left out; the totals count them all the same.

        Raises:
            ValueError: the sampler and the trainer do not agree on the log-probabilities.
        """
        s = self.settings
        counted = [not (s.mask_truncated and rollout.truncated) for rollout in rollouts]
        advantages = self._advantages(rollouts)
        lengths = [len(rollout.completion.tokens) for rollout in rollouts]
        totals = Totals(
            rows=max(len(rollouts), 1),
            tokens=sum(length for length, counts in zip(lengths, counted) if counts),
            limit=s.max_tokens,
        )
        kept = [
            row for row in range(len(rollouts)) if counted[row] and (s.beta or advantages[row] != 0)
        ]
        kept.sort(key=lambda row: len(rollouts[row].prompt) + lengths[row])  # little padding
        micro_batches = [kept[at : at + s.micro_batch] for at in range(0, len(kept), s.micro_batch)]
        measured = {"learned": float(len(kept)), "lr": s.rate_at(self.step)}
        batches = [collate([rollouts[row] for row in rows], self.device) for rows in micro_batches]
        old: list[Tensor | None] = [None] * len(batches)
        if s.epochs > 1:
            with torch.no_grad():
                old = [self._logprobs(batch)[0] for batch in batches]
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate_at(self.step)
        for epoch in range(s.epochs if batches else 0):
            metrics: Metrics | None = None
            entropy = torch.zeros((), dtype=torch.float64, device=self.device)
            for rows, batch, before in zip(micro_batches, batches, old):
                logprobs, entropies = self._logprobs(batch)
                loss, seen = grpo_loss(
                    logprobs,
                    logprobs if before is None else before,
                    advantages[rows].to(self.device),
                    batch.mask,
                    s.loss(),
                    totals,
                    reference=self._reference_logprobs(batch),
                    sampler=batch.sampler,
                )
                loss.backward()
                metrics = seen if metrics is None else metrics + seen
                entropy += entropies.double().sum()
            assert metrics is not None
            means = metrics.means()
            if epoch == 0:
                self._check_gap(means["gap_max"])
            norm = torch.nn.utils.clip_grad_norm_(self.parameters, s.clip_gradient)
            self.optimizer.step()
            self.optimizer.zero_grad()
            means["entropy"] = entropy.item() / max(metrics.sums["tokens"].item(), 1.0)
            measured |= means | {"gradient_norm": norm.item()}
        self.step += 1
        return measured

    def _advantages(self, rollouts: Sequence[Rollout]) -> Tensor:
        rewards = torch.tensor([rollout.reward for rollout in rollouts])
        if not len(rewards):
            return rewards
        return group_advantages(
            rewards.view(-1, self.settings.group), self.settings.scale
        ).flatten()

    def _logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return completion_logprobs(
            self._forward, batch, self.policy.banned, self.settings.temperature
        )

    def _forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Logits by the arithmetic of the sampler; gradients go to the fp32 weights."""
        model = self.policy.model
        if self.dtype == torch.float32:
            return model(tokens, wanted=wanted)
        weights = {name: p.to(self.dtype) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, weights, (tokens,), {"wanted": wanted})

    def _reference_logprobs(self, batch: Batch) -> Tensor | None:
        if self.reference is None:
            return None
        reference = self.reference
        with torch.no_grad():
            return completion_logprobs(
                lambda tokens, wanted: reference(tokens, wanted=wanted),
                batch,
                self.policy.banned,
                self.settings.temperature,
            )[0]

    def _check_gap(self, gap: float) -> None:
        if self.dtype == torch.float32 and not gap <= GAP:
            raise ValueError(
                f"the sampler's and the trainer's log-probabilities of a token differ by {gap:.2g}"
                f" at step {self.step}, more than {GAP} in float32: they do not compute the same"
                " distribution, and training on would be wrong"
            )

    # ---- evaluation ----

    def evaluate(self) -> tuple[dict[str, float], list[Rollout]]:
        """Scores on held-out problems, and the greedy rollouts behind them.

        "greedy": share of right greedy answers; "sampled": expected share of right sampled ones,
        pass@1; "pass@k": share of problems that at least one of k samples solves; "form": share of
        greedy answers whose form is right; "length": of greedy completions, in tokens.
        """
        s, rng = self.settings, Random(f"evaluate {self.settings.seed}")
        problems = [self.task.sample(rng, held_out=True) for _ in range(s.eval_problems)]
        rolled: dict[str, list[Rollout]] = {"greedy": [], "sampled": []}
        for name, samples in (("greedy", 1), ("sampled", s.eval_samples)):
            sampling = Sampling(temperature=0.0 if name == "greedy" else s.temperature)
            size = max(1, EVALUATION_ROWS // samples)
            for at in range(0, len(problems), size):
                rolled[name] += roll_out(
                    self.policy,
                    self.sampler(),
                    problems[at : at + size],
                    samples,
                    max_tokens=s.max_tokens,
                    sampling=sampling,
                    seed=-1 - s.seed,
                    first=at * samples,
                )
        greedy, sampled = rolled["greedy"], rolled["sampled"]
        solved = [any(r.answer for r in group) for group in groups_of(sampled, s.eval_samples)]
        scores = {
            "greedy": fmean(r.answer for r in greedy),
            "sampled": fmean(r.answer for r in sampled),
            f"pass@{s.eval_samples}": fmean(solved),
            "form": fmean(r.form for r in greedy),
            "length": fmean(len(r.completion.tokens) for r in greedy),
        }
        return {name: round(value, 5) for name, value in scores.items()}, greedy

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """All that the next step depends on."""
        return {
            "model": self.policy.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "drawn": self.drawn,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.policy.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.drawn = int(state["step"]), int(state["drawn"])


def groups_of(rollouts: Sequence[Rollout], size: int) -> list[Sequence[Rollout]]:
    """The groups of some rollouts."""
    return [rollouts[at : at + size] for at in range(0, len(rollouts), size)]


def spread(group: Sequence[Rollout]) -> bool:
    """Whether the rewards of a group differ."""
    return len({rollout.reward for rollout in group}) > 1


def describe(rollouts: Sequence[Rollout], size: int) -> dict[str, float]:
    """What is worth knowing of a step's rollouts; empty if there are none."""
    if not rollouts:
        return {}
    logprobs = [x for r in rollouts for x in r.completion.logprobs or []]
    return {
        "reward": fmean(r.reward for r in rollouts),
        "accuracy": fmean(r.answer for r in rollouts),
        "form": fmean(r.form for r in rollouts),
        "length": fmean(len(r.completion.tokens) for r in rollouts),
        "truncated": fmean(r.truncated for r in rollouts),
        "skipped": fmean(not spread(group) for group in groups_of(rollouts, size)),
        "surprisal": -fmean(logprobs),
    }


def checkpoint_files(folder: Path) -> list[Path]:
    """What belongs to a checkpoint beside its weights and what is said about it."""
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    return [folder / name for name in (*names, "chat_template.jinja") if (folder / name).exists()]
