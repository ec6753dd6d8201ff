"""The trainer of GRPO: roll out, judge, compare within groups, update.

    problems --policy--> groups of completions --task--> rewards --group means--> advantages
    --loss--> gradient, summed over micro-batches --clip--> AdamW --> policy

A step depends on the settings, the weights, the optimiser's moments, two counters and the pool of
problems to ask again, and on nothing else: problems are a function of (seed, step), draws of (seed,
number of the completion). The mean of the last policies, if that is the result, goes into no step.
"""

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from transformer.generation.sampling import Sampling
from transformer.model.decoder import Transformer, choose_attention
from transformer.model.weights import find_checkpoint, load_config
from transformer.rl.groups import groups_of, spread
from transformer.rl.loss import Metrics, Totals, group_advantages, grpo_loss
from transformer.rl.recipes import Settings, find_task, flag
from transformer.rl.replay import Asked, Pool
from transformer.rl.rollout import Batch, Policy, Rollout, collate, completion_logprobs, roll_out
from transformer.training.lora import adapters_off, add_adapters, merged_weights
from transformer.training.parallel import (
    ALONE,
    World,
    clip_gradients,
    exchange_gradients,
    gathered,
    restore_training,
    shard,
    training_state,
)
from transformer.training.recompute import recompute_activations

GAP = 1e-3  # nats; in fp32 the sampler and the trainer differ by rounding only
DRAWS = 4  # dynamic sampling draws at most so many times the problems of a step
REMEMBERED = 8  # the pool holds at most so many times the problems of a step
EVALUATION_ROWS = 512  # completions of an evaluation at a time
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def resolved(settings: Settings, device: torch.device, world: World = ALONE) -> Settings:
    """The settings with "auto" replaced by what that means on a device.

    Raises:
        FileNotFoundError, ValueError: no such checkpoint, attention that cannot run on it, or more
            processes than share the problems evenly.
    """
    if settings.prompts % world.size:
        raise ValueError(
            f"the {settings.prompts} problems of a step do not divide over {world.size} processes:"
            f" {flag('prompts')} must be a multiple"
        )
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
        replayed: share of the sampled groups whose problem was asked before.
        seconds: that it took.
    """

    rollouts: list[Rollout]
    drawn: int
    replayed: float
    seconds: float


class Trainer:
    """A policy, its optimiser and where it stands.

    On several processes every rank has one, rolls out and learns from its share of the groups, and
    holds its part of the weights; all of them call the same methods in the same order.

    Args:
        settings: resolved.
        device: where everything happens.
        world: of whose ranks this is one.

    Attributes:
        step: steps taken.
        drawn: completions sampled for training so far, by all ranks.
        pool: problems to ask again, the same on every rank.
    """

    def __init__(self, settings: Settings, device: torch.device, world: World = ALONE) -> None:
        self.settings, self.device, self.world = settings, device, world
        self.task = find_task(settings.task)
        self.folder = find_checkpoint(settings.model)
        self.policy = Policy.load(self.folder, settings.attention, device)
        self.dtype = DTYPES[settings.dtype]
        model, lora = self.policy.model, settings.lora_rank
        self.reference = self._frozen() if settings.beta and not lora else None
        plain = self.dtype == torch.float32 and not lora and world.size == 1
        self._sampler = model if plain else self._frozen()
        self._result = self._frozen() if plain and settings.average else self._sampler
        if lora:
            add_adapters(model, lora, settings.seed, self.dtype)
        if settings.checkpointing:
            recompute_activations(model)
        shard(model, world, self.dtype)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=device.type == "cuda",
        )
        self.step = self.drawn = 0
        self.pool = Pool(REMEMBERED * settings.prompts)
        self._mean: dict[str, Tensor] = {}  # of the policies that are averaged, merged, whole, fp32

    def _frozen(self) -> Transformer:
        """A copy of the weights in the dtype of the arithmetic."""
        return copy.deepcopy(self.policy.model).to(self.dtype).requires_grad_(False)

    def sampler(self) -> Transformer:
        """The model that rollouts are drawn from: the policy as it is now, plain and whole."""
        if self._sampler is not self.policy.model:
            # Adapters are merged in fp32, in which each weight has to be gathered by itself.
            together = nullcontext() if self.settings.lora_rank else gathered(self.policy.model)
            with torch.no_grad(), together:
                for name, weight in merged_weights(self.policy.model):
                    self._sampler.get_parameter(name).copy_(weight)
        return self._sampler

    def result(self) -> Transformer:
        """The model that is judged and published: the mean of the policies of the last steps, if it
        is asked for and there is one, else the policy as it is now. The sampler may be the same
        object: one of the two is there at a time.
        """
        if not self._mean:
            return self.sampler()
        self._result.load_state_dict(self._mean)
        return self._result

    def _average(self) -> None:
        """Add the policy to the mean, if the last steps have begun: each step moves the weights by
        about the learning rate, in a direction that is mostly noise when few groups have a spread,
        and in the mean the noise cancels (arXiv:1803.05407).
        """
        s = self.settings
        count = self.step - (s.steps - round(s.average * s.steps))
        if count < 1:
            return
        for name, weight in merged_weights(self.policy.model):
            mean = self._mean.get(name, weight.float())
            self._mean[name] = mean.lerp(weight.float(), 1 / count)

    # ---- rollouts ----

    def problems(self, step: int) -> Iterator[Any]:
        """The problems that a step draws, as many as anybody asks for."""
        rng = Random(f"{self.settings.seed} {step}")
        while True:
            yield self.task.sample(rng)

    def _asked(self, fresh: Iterator[Asked], count: int) -> list[Asked]:
        """Problems to ask now: a share of them again, as far as the pool goes, the others fresh."""
        again = self.pool.take(round(self.settings.replay * count))
        asked = [*again, *islice(fresh, count - len(again))]
        if again:  # more is learned from them than from fresh ones, so every rank has its part
            Random(f"{self.settings.seed} {self.step} order").shuffle(asked)
        return asked

    def _spreads(self, found: Sequence[Rollout]) -> Iterator[bool]:
        """Whether the groups have a spread, those of all ranks; of this rank's rollouts."""
        mine = [spread(group) for group in groups_of(found, self.settings.group)]
        return chain(*self.world.gather(mine))

    def roll_out(self) -> Groups:
        """Sample the groups of this step; under dynamic sampling, until enough of them have a
        spread (DAPO, arXiv:2503.14476, section 3.2) or too many were drawn.
        """
        s, started, first = self.settings, time.perf_counter(), self.drawn
        fresh = (Asked(self.step, *one) for one in enumerate(self.problems(self.step)))
        model = self.sampler()
        rollouts, missing = list[Rollout](), s.prompts
        asked, spreads = list[Asked](), list[bool]()
        for _ in range(DRAWS if s.dynamic_sampling else 1):
            now = self._asked(fresh, missing)
            problems = [one.problem for one in now]
            with self.world.together():
                found = self._sampled(
                    model, problems, s.group, seed=s.seed, first=self.drawn, greedy=False
                )
            self.drawn += missing * s.group
            if s.replay:
                asked += now
                spreads += self._spreads(found)
            if s.dynamic_sampling:
                found = [r for group in groups_of(found, s.group) if spread(group) for r in group]
            rollouts += found
            missing = s.prompts - int(self.world.total(len(rollouts))) // s.group
            if not missing:
                break
        self.pool.put(asked, spreads)  # only now: no problem is asked twice in a step
        again, drawn = sum(one.step < self.step for one in asked), self.drawn - first
        return Groups(rollouts, drawn, again * s.group / drawn, time.perf_counter() - started)

    def _sampled(
        self,
        model: Transformer,
        problems: Sequence[Any],
        samples: int,
        *,
        seed: int,
        first: int,
        greedy: bool,
        rows: int | None = None,
    ) -> list[Rollout]:
        """This rank's share of the rollouts, numbered from `first` over all ranks; at most about
        `rows` at a time.
        """
        s, mine, rollouts = self.settings, self.world.share(len(problems)), list[Rollout]()
        size = max(1, len(mine) if rows is None else rows // samples)
        for at in range(mine.start, mine.stop, size):
            rollouts += roll_out(
                self.policy,
                model,
                problems[at : min(at + size, mine.stop)],
                samples,
                max_tokens=s.max_tokens,
                sampling=Sampling(temperature=0.0 if greedy else s.temperature),
                seed=seed,
                first=first + at * samples,
            )
        return rollouts

    # ---- learning ----

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Take one step of the optimiser for each epoch; returns what was measured.

        Completions whose advantage is 0 add nothing to the gradient unless there is a KL term, and
        are left out; the totals count them all the same.

        Args:
            rollouts: this rank's; sums, sizes and what is measured are those of all ranks.

        Raises:
            ValueError: the sampler and the trainer do not agree on the log-probabilities.
        """
        s, world = self.settings, self.world
        counted = [not (s.mask_truncated and rollout.truncated) for rollout in rollouts]
        advantages = self._advantages(rollouts)
        lengths = [len(rollout.completion.tokens) for rollout in rollouts]
        tokens = sum(length for length, counts in zip(lengths, counted) if counts)
        totals = Totals(
            rows=max(int(world.total(len(rollouts))), 1),
            tokens=int(world.total(tokens)),
            limit=s.max_tokens,
        )
        matters = (advantages != 0).tolist()
        kept = [row for row in range(len(rollouts)) if counted[row] and (s.beta or matters[row])]
        micro_batches = self._micro_batches(rollouts, kept)
        measured = {"learned": world.total(len(kept)), "lr": s.rate_at(self.step)}
        old: list[Tensor | None] = [None] * len(micro_batches)
        if s.epochs > 1:
            with torch.no_grad():
                old = [self._logprobs(batch)[0] for _, batch in micro_batches]
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate_at(self.step)
        for epoch in range(s.epochs if micro_batches else 0):
            metrics: Metrics | None = None
            for number, ((rows, batch), before) in enumerate(zip(micro_batches, old), 1):
                exchange_gradients(self.policy.model, number == len(micro_batches))
                reference = self._reference_logprobs(batch)
                logprobs, entropies = self._logprobs(batch)
                loss, seen = grpo_loss(
                    logprobs,
                    logprobs if before is None else before,
                    advantages[rows].to(self.device),
                    batch.mask,
                    s.loss(),
                    totals,
                    reference=reference,
                    sampler=batch.sampler,
                )
                (loss * world.size).backward()
                seen.sums["entropy"] = entropies.double().sum()
                metrics = seen if metrics is None else metrics + seen
            assert metrics is not None
            norm = clip_gradients(self.parameters, s.clip_gradient)
            means = self._everywhere(metrics).means()  # the host waits, but not for the optimiser
            measured |= means | {"gradient_norm": norm.item()}
            if epoch == 0:
                with world.together():
                    self._check_gap(means["gap_max"])
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.step += 1
        self._average()
        return measured

    def _advantages(self, rollouts: Sequence[Rollout]) -> Tensor:
        """Of this rank's rollouts; the spread of a batch is that of all ranks."""
        gathered = self.world.gather([rollout.reward for rollout in rollouts])
        rewards = torch.tensor([reward for given in gathered for reward in given])
        if not len(rewards):
            return rewards
        advantages = group_advantages(rewards.view(-1, self.settings.group), self.settings.scale)
        before = sum(map(len, gathered[: self.world.rank]))
        return advantages.flatten()[before : before + len(rollouts)]

    def _micro_batches(
        self, rollouts: Sequence[Rollout], kept: Sequence[int]
    ) -> list[tuple[Sequence[int], Batch]]:
        """The kept rows in batches of like lengths, so that there is little padding. Every rank has
        to go as often through the model: who has less work adds batches of nothing.
        """
        size, world = self.settings.micro_batch, self.world
        context = self.policy.model.config.max_positions
        rows = sorted(
            kept, key=lambda row: len(rollouts[row].prompt) + len(rollouts[row].completion.tokens)
        )
        found: list[tuple[Sequence[int], Batch]] = [
            (part, collate([rollouts[row] for row in part], self.device, context))
            for part in groups_of(rows, size)
        ]
        return found + [([], self._nothing())] * (int(world.most(len(found))) - len(found))

    def _everywhere(self, metrics: Metrics) -> Metrics:
        """The metrics of all ranks, joined."""
        sums = self.world.sum(torch.stack([*metrics.sums.values()]))
        maxima = self.world.max(torch.stack([*metrics.maxima.values()]))
        return Metrics(dict(zip(metrics.sums, sums)), dict(zip(metrics.maxima, maxima)))

    def _nothing(self) -> Batch:
        """A batch without a row; one token goes through the model and adds 0 to every gradient."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        unwanted = torch.zeros_like(token, dtype=torch.bool)
        return Batch(
            token, unwanted, token[0, :0], unwanted[:0], torch.zeros_like(token[:0]).float()
        )

    def _logprobs(self, batch: Batch) -> tuple[Tensor, Tensor]:
        return completion_logprobs(
            self._forward, batch, self.policy.banned, self.settings.temperature
        )

    def _forward(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Logits by the arithmetic of the sampler; gradients go to the fp32 weights."""
        model = self.policy.model
        if self.dtype == torch.float32 or self.world.size > 1:  # FSDP rounds by itself
            return model(tokens, wanted=wanted)
        weights = {name: p.to(self.dtype) for name, p in model.named_parameters()}
        return torch.func.functional_call(model, weights, (tokens,), {"wanted": wanted})

    def _reference_logprobs(self, batch: Batch) -> Tensor | None:
        if not self.settings.beta:
            return None
        reference = self.reference
        with torch.no_grad():
            if reference is None:
                with adapters_off(self.policy.model):
                    return self._logprobs(batch)[0]
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
        """Scores on held-out problems, and the greedy rollouts behind them, of this rank's share.

        "greedy": share of right greedy answers; "sampled": expected share of right sampled ones,
        pass@1; "pass@k": share of problems that at least one of k samples solves; "form": share of
        greedy answers whose form is right; "length": of greedy completions, in tokens.
        """
        s, rng = self.settings, Random(f"evaluate {self.settings.seed}")
        problems = [self.task.sample(rng, held_out=True) for _ in range(s.eval_problems)]
        model, seed = self.result(), -1 - s.seed
        with self.world.together():
            greedy, sampled = (
                self._sampled(
                    model, problems, k, seed=seed, first=0, greedy=is_greedy, rows=EVALUATION_ROWS
                )
                for k, is_greedy in ((1, True), (s.eval_samples, False))
            )
        found = [(r.answer, r.form, len(r.completion.tokens)) for r in greedy]
        answers, forms, lengths = zip(*chain(*self.world.gather(found)))
        drawn = list(chain(*self.world.gather([r.answer for r in sampled])))
        scores = {
            "greedy": fmean(answers),
            "sampled": fmean(drawn),
            f"pass@{s.eval_samples}": fmean(map(any, groups_of(drawn, s.eval_samples))),
            "form": fmean(forms),
            "length": fmean(lengths),
        }
        return {name: round(value, 5) for name, value in scores.items()}, greedy

    # ---- state ----

    def state(self) -> dict[str, Any]:
        """All that the next step and the result depend on."""
        training = training_state(self.policy.model, self.optimizer, self.world)
        counters = {"step": self.step, "drawn": self.drawn}
        return {**training, **counters, "pool": self.pool.state(), "mean": dict(self._mean)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        restore_training(self.policy.model, self.optimizer, state)
        self.step, self.drawn = int(state["step"]), int(state["drawn"])
        self._mean = dict(state["mean"])
        self.pool.restore(state["pool"], lambda step, i: next(islice(self.problems(step), i, None)))


def checkpoint_files(folder: Path) -> list[Path]:
    """What belongs to a checkpoint beside its weights and what is said about it."""
    names = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    return [folder / name for name in (*names, "chat_template.jinja") if (folder / name).exists()]
