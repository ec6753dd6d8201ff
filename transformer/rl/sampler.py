"""What the policy is asked: the problems of a step and of an evaluation, and its answers to them.

Problems are a function of (seed, step), draws of (seed, number of the completion), so what a step
samples depends on the settings, the weights, a counter and the pool of problems to ask again only.

Late in training nearly all groups are all right and teach nothing. What still has a spread is rare,
and a pool of such problems finds it again without a search.

Related: prioritized level replay (arXiv:2010.03934), which scores levels by how much may be learned
from them, and the prioritized sampling of Kimi k1.5 (arXiv:2501.12599), by how often they fail.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress, islice
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

from transformer.generation.sampling import Sampling
from transformer.model.decoder import Transformer
from transformer.rl.groups import groups_of, pass_at_k, spread
from transformer.rl.recipes import Settings, task_of
from transformer.rl.rollout import Policy, Rollout, roll_out
from transformer.tasks.problems import Problems
from transformer.tasks.task import Problem
from transformer.training.parallel import World

DRAWS = 4  # dynamic sampling draws at most so many times the problems of a step
REMEMBERED = 8  # the pool holds at most so many times the problems of a step, the latest
EVALUATION_ROWS = 512  # completions of an evaluation at a time


class Asked(NamedTuple):
    """A problem that was asked, with the step that drew it and its number among those of that step,
    by which it can be drawn again.
    """

    step: int
    number: int
    problem: Problem


@dataclass(frozen=True)
class Groups:
    """The rollouts of a step.

    Attributes:
        rollouts: of the groups that are learned from, group by group.
        passed_over: those of the others, under dynamic sampling.
        drawn: completions that were sampled, those of groups that were passed over included.
        replayed: share of the sampled groups whose problem was asked before.
        seconds: that it took.
    """

    rollouts: list[Rollout]
    passed_over: list[Rollout]
    drawn: int
    replayed: float
    seconds: float


class Sampler:
    """Asks the policy for the rollouts of training and of evaluation; on several processes, for its
    share of the groups.

    Attributes:
        drawn: completions sampled for training so far, by all ranks.
        pool: problems to ask again, the same on every rank. The one that has waited longest is
            asked first: otherwise the same few problems would be learned by heart, step after step.
    """

    def __init__(self, settings: Settings, policy: Policy, world: World) -> None:
        self.settings, self.policy, self.world = settings, policy, world
        self.task = task_of(settings)
        self._check_prompts()
        self.drawn = 0
        self.pool: deque[Asked] = deque(maxlen=REMEMBERED * settings.prompts)

    def problems(self, step: int) -> Iterator[Any]:
        """The problems that a step draws, as many as anybody asks for."""
        rng = Random(f"{self.settings.seed} {step}")
        while True:
            yield self.task.sample(rng).under(self.settings.system)

    def _check_prompts(self) -> None:
        """Refuse prompts of a file that leave no room for an answer, before the first step."""
        if not isinstance(self.task, Problems):
            return
        for number, line in enumerate(self.task.lines):
            try:
                self.policy.encode(self.task.problem(number).under(self.settings.system))
            except ValueError as error:
                raise ValueError(f"{line.name}: {error}") from error

    def roll_out(self, model: Transformer, step: int) -> Groups:
        """Sample the groups of a step from a model.

        Under dynamic sampling, go on until enough of them have a spread (DAPO, arXiv:2503.14476,
        section 3.2) or too many were drawn.
        """
        s, started, first = self.settings, time.perf_counter(), self.drawn
        fresh = (Asked(step, *one) for one in enumerate(self.problems(step)))
        rollouts, passed_over, missing = list[Rollout](), list[Rollout](), s.prompts
        asked, spreads = list[Asked](), list[bool]()
        for _ in range(DRAWS if s.dynamic_sampling else 1):
            again = min(round(s.replay * missing), len(self.pool))
            now = [self.pool.popleft() for _ in range(again)]
            now += islice(fresh, missing - again)
            if again:  # more is learned from them than from fresh ones, so every rank has its part
                Random(f"{s.seed} {step} order").shuffle(now)
            problems = [one.problem for one in now]
            with self.world.together():
                found = self._sampled(
                    model, problems, s.group, seed=s.seed, first=self.drawn, greedy=False
                )
            self.drawn += missing * s.group
            groups = [(group, spread(group)) for group in groups_of(found, s.group)]
            if s.replay:
                asked += now
                spreads += chain(*self.world.gather([differs for _, differs in groups]))
            for group, differs in groups:
                (passed_over if s.dynamic_sampling and not differs else rollouts).extend(group)
            missing = s.prompts - int(self.world.total(len(rollouts))) // s.group
            if not missing:
                break
        self.pool.extend(compress(asked, spreads))  # only now: no problem is asked twice in a step
        drawn, replayed = self.drawn - first, s.group * sum(one.step < step for one in asked)
        seconds = time.perf_counter() - started
        return Groups(rollouts, passed_over, drawn, replayed / drawn, seconds)

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
                reward_seconds=s.reward_seconds,
                shared=s.group_layout == "shared",
            )
        return rollouts

    def evaluate(self, model: Transformer) -> tuple[dict[str, float], list[Rollout]]:
        """Scores on held-out problems, and the greedy rollouts behind them, of this rank's share.

        "greedy": share of right greedy answers; "sampled": expected share of right sampled ones,
        pass@1; "pass@k": expected share of problems that at least one of k samples solves, for each
        k asked for; "form": share of greedy answers whose form is right; "length": of greedy
        completions, in tokens; "reward": mean of the sampled ones, "reward_range": the largest less
        the smallest of them.
        """
        s, rng = self.settings, Random(f"evaluate {self.settings.seed}")
        problems = self.task.draw(rng, s.eval_problems, held_out=True)
        problems = [problem.under(s.system) for problem in problems]
        seed = -1 - s.seed
        with self.world.together():
            greedy, sampled = (
                self._sampled(
                    model, problems, k, seed=seed, first=0, greedy=is_greedy, rows=EVALUATION_ROWS
                )
                for k, is_greedy in ((1, True), (s.eval_samples, False))
            )
        found = [(r.answer, r.form, len(r.completion.tokens)) for r in greedy]
        answers, forms, lengths = zip(*chain(*self.world.gather(found)))
        judged = chain(*self.world.gather([(r.answer, r.reward) for r in sampled]))
        drawn, rewards = zip(*judged)
        n, solved = s.eval_samples, [sum(map(bool, x)) for x in groups_of(drawn, s.eval_samples)]
        scores = {
            "greedy": fmean(answers),
            "sampled": fmean(drawn),
            **{f"pass@{k}": fmean(pass_at_k(n, c, k) for c in solved) for k in s.eval_k or [n]},
            "form": fmean(forms),
            "length": fmean(lengths),
            "reward": fmean(rewards),
            "reward_range": max(rewards) - min(rewards),
        }
        return {name: float(f"{value:.5g}") for name, value in scores.items()}, greedy

    def state(self) -> dict[str, Any]:
        """All that the next rollouts depend on, beside the weights."""
        return {"drawn": self.drawn, "pool": [(step, number) for step, number, _ in self.pool]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a state."""
        self.drawn = int(state["drawn"])
        self.pool.clear()
        for step, i in state["pool"]:
            self.pool.append(Asked(step, i, next(islice(self.problems(step), i, None))))
