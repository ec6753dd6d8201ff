"""The trainer of GRPO: roll out, judge, compare within groups, update.

    problems --policy--> groups of completions --task--> rewards --group means--> advantages
    --loss--> gradient, summed over micro-batches --clip--> AdamW --> policy

A step depends on the settings, the weights, the optimiser's moments, two counters and the pool of
problems to ask again. The mean of the last policies, if that is the result, goes into no step.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from transformer.generation.session import DTYPES
from transformer.model.decoder import Transformer, choose_attention
from transformer.model.weights import find_checkpoint, load_config
from transformer.rl.learner import Learner, frozen
from transformer.rl.recipes import Settings, check_task, flag, task_of
from transformer.rl.rollout import Policy, Rollout
from transformer.rl.sampler import Groups, Sampler
from transformer.tasks.problems import Problems
from transformer.training.lora import merged_weights
from transformer.training.parallel import ALONE, World, gathered, restore_training, training_state


def resolved(
    settings: Settings,
    device: torch.device,
    world: World = ALONE,
    say: Callable[[str], None] = lambda line: None,
) -> Settings:
    """The settings with "auto" replaced by what that means on a device; `say` is told what a user
    may not expect of it.

    Raises:
        FileNotFoundError, ValueError: no such checkpoint, attention that cannot run on it, a task
            that cannot be trained on, or more processes than share the problems evenly.
    """
    if settings.prompts % world.size:
        raise ValueError(
            f"the {settings.prompts} problems of a step do not divide over {world.size} processes:"
            f" {flag('prompts')} must be a multiple"
        )
    if settings.exact and world.size > 1:
        raise ValueError(
            "--exact is for one process: the shards of several round weights and sums differently"
        )
    task = task_of(settings)  # first: bad lines of a file are told at once
    check_task(task)
    if isinstance(task, Problems):
        reward = " + ".join(map(str, task.terms))
        if settings.reward is None and 0 < len(task.texts) < len(task.lines):
            line = task.texts[0]
            say(
                f"note: {line.name} has the answer {line.fields['answer']!r:.40}, which is no"
                " number, so answers are compared as texts (--reward exact)"
            )
        settings = replace(settings, reward=reward, data_content=task.fingerprint())
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = load_config(find_checkpoint(settings.model))
    shared = settings.group_layout == "shared"
    if shared and any(config.layer_windows):
        raise ValueError(
            f"{flag('group_layout')} shared is not possible for {settings.model}: its layers see a"
            " window of the past, and in a shared sequence an answer lies far from the prompt"
        )
    attention, _ = choose_attention(
        settings.attention, config, device, DTYPES[dtype], simulated=False, exactly=settings.exact,
        shared=shared,
    )  # fmt: skip
    return replace(settings, attention=attention, dtype=dtype)


class Trainer:
    """A policy, the `source` of its rollouts, its `learner`, and the number of steps taken.

    On several processes every rank has one, rolls out and learns from its share of the groups, and
    holds its part of the weights; all of them call the same methods in the same order. Its settings
    are `resolved`.
    """

    def __init__(self, settings: Settings, device: torch.device, world: World = ALONE) -> None:
        self.settings, self.device, self.world = settings, device, world
        self.folder = find_checkpoint(settings.model)
        self.policy = Policy.load(self.folder, settings.attention, device, settings.exact)
        self.source = Sampler(settings, self.policy, world)
        self.dtype = DTYPES[settings.dtype]
        model = self.policy.model
        plain = self.dtype == torch.float32 and not settings.lora_rank and world.size == 1
        self._sampler = model if plain else frozen(model, self.dtype)
        separate = plain and settings.average
        self._result = frozen(model, self.dtype) if separate else self._sampler
        self.learner = Learner(settings, self.policy, self.dtype, device, world)
        self.step = 0
        self._mean: dict[str, Tensor] = {}  # of the policies that are averaged, merged, whole, fp32

    def roll_out(self) -> Groups:
        """Sample the groups of this step from the policy as it is now."""
        return self.source.roll_out(self.sampler(), self.step)

    def records(self, groups: Groups) -> list[dict[str, Any]]:
        """All rollouts of a step that has not been taken, for a file; those of all ranks."""
        advantages = self.learner.advantages(groups.rollouts).tolist()
        advantages += [0.0] * len(groups.passed_over)  # where all rewards are equal
        mine = [
            {
                "step": self.step + 1,
                "problem": r.problem.question,
                "prompt": self.policy.tokenizer.decode(r.prompt),
                "completion": r.completion.text,
                "tokens": len(r.completion.tokens),
                "reward": r.reward,
                "advantage": float(f"{advantage:.6g}"),
                "truncated": r.truncated,
            }
            for r, advantage in zip([*groups.rollouts, *groups.passed_over], advantages)
        ]
        return [*chain(*self.world.gather(mine))]

    def learn(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Take a step, see `Learner.learn`; returns what was measured."""
        measured = self.learner.learn(rollouts, self.step)
        self.step += 1
        self._average()
        return measured

    def evaluate(self) -> tuple[dict[str, float], list[Rollout]]:
        """Scores of the result on held-out problems, see `Sampler.evaluate`."""
        return self.source.evaluate(self.result())

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

    def state(self) -> dict[str, Any]:
        """All that the next step and the result depend on."""
        training = training_state(self.policy.model, self.learner.optimizer, self.world)
        return {**training, "step": self.step, **self.source.state(), "mean": dict(self._mean)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        restore_training(self.policy.model, self.learner.optimizer, state)
        self.step = int(state["step"])
        self._mean = {name: x.to(self.device, copy=True) for name, x in state["mean"].items()}
        self.source.restore(state)
