"""The exercises of `06_grpo`: advantages, the loss of one token, a task."""

import math
from numbers import Real
from random import Random

import torch

from lessons.practice.exercises import exercise
from transformer.rl.loss import Loss, Totals, group_advantages, grpo_loss
from transformer.tasks.task import Task, worked

CLOSE = 1e-3
ONE = Totals(rows=1, tokens=1, limit=1)
REWARDS = (
    [[1.0, 1, 1, 0], [0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]],
    [[0.1, 0.1, 0.1], [0.5, -2.0, 7.0]],
    [[1.0, 0.0]],
)


@exercise(
    "advantages_of",
    "Each row is a group. A group's own mean and standard deviation are what its rewards are"
    " compared with.",
    "rewards.mean(1, keepdim=True) and rewards.std(1, keepdim=True) keep a column for each row.",
)
def check_advantages_of(advantages_of):
    """Against the package, for groups of several sizes."""
    for rewards in map(torch.tensor, REWARDS):
        found, truth = advantages_of(rewards.clone()), group_advantages(rewards)
        assert isinstance(found, torch.Tensor) and found.shape == rewards.shape, (
            f"for rewards of shape {tuple(rewards.shape)} it should return a tensor of that shape;"
            f" it returned {found!r:.80}."
        )
        for group, mine, right in zip(rewards.tolist(), found.tolist(), truth.tolist()):
            for reward, number, expected in zip(group, mine, right):
                assert abs(number - expected) < CLOSE, (
                    f"in the group of rewards {group}, {reward} has the advantage {number:.3f};"
                    f" it should be {expected:.3f}."
                )


@exercise(
    "clipped_loss",
    "r = math.exp(logprob - old) says how many times as likely the token is now.",
    "There are two products with the advantage: one with r, one with r clipped to 1 - low ..."
    " 1 + high.",
    "The loss is minus the smaller of the two products, because training makes a loss smaller.",
)
def check_clipped_loss(clipped_loss):
    """Against the package, inside of the bounds and on either side of them, for both signs."""
    for ratio in (0.5, 0.9, 1.0, 1.1, 1.6):
        for advantage in (1.5, -0.5):
            for low, high in ((0.2, 0.28), (0.05, 0.4)):
                old = -1.25
                logprob = old + math.log(ratio)
                truth, _ = grpo_loss(
                    torch.tensor([[logprob]]),
                    torch.tensor([[old]]),
                    torch.tensor([advantage]),
                    torch.tensor([[True]]),
                    Loss(clip_low=low, clip_high=high),
                    ONE,
                )
                found = clipped_loss(logprob, old, advantage, low, high)
                assert isinstance(found, Real), f"it should return a number, not {found!r:.80}."
                assert abs(found - truth.item()) < CLOSE, (
                    f"a token that is now {ratio} times as likely, with advantage {advantage} and"
                    f" bounds {1 - low:g} and {1 + high:g}, has the loss {found:.3f}; it should be"
                    f" {truth.item():.3f}."
                )


@exercise(
    "digit_sum",
    "arguments draws with the generator that it is given, and returns a tuple of one number.",
    "arguments returns (rng.randint(0, 9999),); question has to contain the number.",
    "answer returns str(sum(map(int, str(number)))).",
)
def check_digit_sum(digit_sum):
    """Draws problems, and has the task judge right and wrong replies."""
    task = digit_sum()
    assert isinstance(task, Task), f"it should be a Task, not {task!r:.80}."
    drawn = [task.arguments(Random(seed)) for seed in range(50)]
    if None in drawn:
        raise NotImplementedError
    for arguments in drawn:
        assert isinstance(arguments, tuple) and len(arguments) == 1, (
            f"arguments should return a tuple of one number, such as (407,); it gave {arguments!r}."
        )
        assert isinstance(arguments[0], int) and 0 <= arguments[0] <= 9999, (
            f"numbers should be from 0 to 9999; it drew {arguments[0]!r}."
        )
    assert len(set(drawn)) > 25, (
        f"of 50 draws only {len(set(drawn))} differ; every draw needs the generator `rng`."
    )
    for (number,) in [*drawn, (0,), (9999,), (1000,)]:
        truth = str(sum(map(int, str(number))))
        answer, question = task.answer(number), task.question(Random(0), number)
        if answer is None or question is None:
            raise NotImplementedError
        assert isinstance(question, str) and str(number) in question, (
            f"the question about {number} does not say the number: {question!r:.80}."
        )
        assert answer == truth, f"the answer for {number} is {answer!r}; it should be {truth!r}."
        assert task.reward(worked("", truth), number) == 1.0, (
            f"a reply with the right answer {truth} to {number} earns nothing."
        )
        assert task.reward(worked("", truth + "0"), number) == 0.0, (
            f"a reply with the wrong answer {truth}0 to {number} earns something."
        )
