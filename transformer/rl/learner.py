"""A step of the optimiser: from rewards to advantages, to the gradient of the loss, to new weights.

The gradient is summed over micro-batches, and its norm is clipped.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from transformer.model.decoder import Transformer
from transformer.rl.groups import groups_of
from transformer.rl.loss import Metrics, Totals, group_advantages, grpo_loss
from transformer.rl.recipes import Settings
from transformer.rl.rollout import (
    Forward,
    Policy,
    Rollout,
    RolloutBatch,
    collate,
    collate_shared,
    completion_logprobs,
)
from transformer.training.lora import adapters_off, add_adapters
from transformer.training.parallel import (
    World,
    clip_gradients,
    exchange_gradients,
    forward_in,
    shard,
)
from transformer.training.recompute import recompute_activations

GAP = 1e-3  # nats; in fp32 the sampler and the trainer differ by rounding only


@dataclass(eq=False)
class Learner:
    """Changes the policy's weights in place; they become those of a sharded model, or get adapters.
    Of several processes each has one, see `Trainer`; dtype is that of the arithmetic.
    """

    settings: Settings
    policy: Policy
    dtype: torch.dtype
    device: torch.device
    world: World

    def __post_init__(self) -> None:
        s, model = self.settings, self.policy.model
        self.reference = frozen(model, self.dtype) if s.beta and not s.lora_rank else None
        if s.lora_rank:
            add_adapters(model, s.lora_rank, s.seed, self.dtype)
        if s.checkpointing:
            recompute_activations(model)
        shard(model, self.world, self.dtype)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=s.lr,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=self.device.type == "cuda",
        )

    def learn(self, rollouts: Sequence[Rollout], step: int) -> dict[str, float]:
        """Take one step of the optimiser for each epoch; returns what was measured.

        Completions whose advantage is 0 add nothing to the gradient unless there is a KL term, and
        are left out; the totals count them all the same.

        Args:
            rollouts: this rank's; sums, sizes and what is measured are those of all ranks.
            step: number of the step, which decides the learning rate.

        Raises:
            ValueError: the sampler and the trainer do not agree on the log-probabilities.
        """
        s, world = self.settings, self.world
        counted = [i for i, r in enumerate(rollouts) if not (s.mask_truncated and r.truncated)]
        advantages = self.advantages(rollouts)
        tokens = sum(len(rollouts[row].completion.tokens) for row in counted)
        totals = Totals(
            rows=max(int(world.total(len(rollouts))), 1),
            tokens=int(world.total(tokens)),
            limit=s.max_tokens,
        )
        matters = (advantages != 0).tolist()
        kept = [row for row in counted if s.beta or matters[row]]
        micro_batches = self._micro_batches(rollouts, kept)
        measured = {"learned": world.total(len(kept)), "lr": s.rate_at(step)}
        old: list[Tensor | None] = [None] * len(micro_batches)
        if s.epochs > 1:
            with torch.no_grad():
                old = [self._logprobs(batch)[0] for _, batch in micro_batches]
        for group in self.optimizer.param_groups:
            group["lr"] = s.rate_at(step)
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
                # Autograd's own thread wakes for each node that is written in Python.
                with torch.autograd.set_multithreading_enabled(world.size > 1):
                    (loss * world.size).backward()
                seen.sums["entropy"] = entropies.double().sum()
                metrics = seen if metrics is None else metrics + seen
            assert metrics is not None
            norm = clip_gradients(self.parameters, s.clip_gradient)
            means = self._everywhere(metrics).means()  # the host waits, but not for the optimiser
            measured |= means | {"gradient_norm": norm.item()}
            if epoch == 0:
                with world.together():
                    self._check_gap(means["gap_max"], step)
            self.optimizer.step()
            self.optimizer.zero_grad()
        return measured

    def advantages(self, rollouts: Sequence[Rollout]) -> Tensor:
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
    ) -> list[tuple[Sequence[int], RolloutBatch]]:
        """The kept rows in batches of like lengths, so that there is little padding. Every rank has
        to go as often through the model: who has less work adds batches of nothing.
        """
        s, size, world = self.settings, self.settings.micro_batch, self.world

        def length(row: int) -> int:
            return len(rollouts[row].prompt) + len(rollouts[row].completion.tokens)

        rows = sorted(kept, key=length)
        put = partial(collate, context=self.policy.model.config.max_positions)
        if s.group_layout == "shared":  # those of a group together
            longest = {row // s.group: length(row) for row in rows}
            rows = sorted(kept, key=lambda row: (longest[row // s.group], row // s.group))
            put = partial(collate_shared, exact=s.exact)
        found: list[tuple[Sequence[int], RolloutBatch]] = [
            (part, put([rollouts[row] for row in part], self.device))
            for part in groups_of(rows, size)
        ]
        most = int(world.total(len(found), ReduceOp.MAX))
        return found + [([], self._nothing())] * (most - len(found))

    def _everywhere(self, metrics: Metrics) -> Metrics:
        """The metrics of all ranks, joined."""
        sums = self.world.reduce(torch.stack([*metrics.sums.values()]))
        maxima = self.world.reduce(torch.stack([*metrics.maxima.values()]), ReduceOp.MAX)
        return Metrics(dict(zip(metrics.sums, sums)), dict(zip(metrics.maxima, maxima)))

    def _nothing(self) -> RolloutBatch:
        """A batch without a row; one token goes through the model and adds 0 to every gradient."""
        token = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        unwanted = torch.zeros_like(token, dtype=torch.bool)
        return RolloutBatch(
            token, unwanted, token[0, :0], unwanted[:0], torch.zeros_like(token[:0]).float()
        )

    def _logprobs(self, batch: RolloutBatch, model: Forward | None = None) -> tuple[Tensor, Tensor]:
        banned, temperature = self.policy.banned, self.settings.temperature
        model = model or partial(forward_in, self.dtype, self.policy.model, self.world)
        return completion_logprobs(model, batch, banned, temperature)

    def _reference_logprobs(self, batch: RolloutBatch) -> Tensor | None:
        if not self.settings.beta:
            return None
        if (reference := self.reference) is not None:
            with torch.no_grad():
                return self._logprobs(batch, reference)[0]
        with torch.no_grad(), adapters_off(self.policy.model):
            return self._logprobs(batch)[0]

    def _check_gap(self, gap: float, step: int) -> None:
        most = 0.0 if self.settings.exact else GAP if self.dtype == torch.float32 else math.inf
        if not gap <= most:
            what = "with --exact" if self.settings.exact else "in float32"
            raise ValueError(
                f"the sampler's and the trainer's log-probabilities of a token differ by {gap:.2g}"
                f" at step {step}, more than {most:g} {what}: they do not compute the same"
                " distribution, and training on would be wrong"
            )


def frozen(model: Transformer, dtype: torch.dtype) -> Transformer:
    """A copy of the weights in the dtype of the arithmetic, which does not learn."""
    return copy.deepcopy(model).to(dtype).requires_grad_(False)
