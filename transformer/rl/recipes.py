"""The settings of a GRPO run, and recipes: settings that were found to work, by name."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from random import Random
from typing import Any, Literal, get_args

from transformer.generation.command import flag, refuse_below
from transformer.generation.sampling import LARGEST, Sampling
from transformer.model.files import read_jsonl
from transformer.rl.loss import Loss, PolicyLoss, Ratio, Reduce, Scale
from transformer.rl.practice import Mix, Practice
from transformer.tasks.named import find_named
from transformer.tasks.problems import Problems
from transformer.tasks.skills import TASKS, Add
from transformer.tasks.task import REPLY, Problem, Task

Layout = Literal["rows", "shared"]


def setting(default: Any, about: str, decides: bool = True) -> Any:
    """A field of Settings with its help; without a part in the outcome, it is not compared."""
    return field(default=default, metadata={"help": about}, compare=decides)


@dataclass(frozen=True)
class Settings:
    """What decides the outcome of a run: equal settings on one machine give the same bits.

    Raises:
        ValueError: a setting that cannot work, in a sentence.
    """

    model: str = setting("sloppy", "what learns: a checkpoint folder, or the name of a shipped one")
    task: str = setting("sums", "a task by its name, or module:Class")
    data: str | None = setting(None, "problems of your own instead, a JSONL file")
    eval_data: str | None = setting(None, "a file of held-out ones; None: one in 16 of --data")
    reward: str | None = setting(
        None,
        "of --data: number, exact, module:function, or a sum such as number + 0.2 * mine:short",
    )
    reward_seconds: float = setting(60.0, "that the reward of a completion may take", decides=False)
    system: str | None = setting(None, "system prompt of problems that have none")
    seed: int = setting(0, "of the problems and the completions")
    steps: int = setting(60, "of the optimiser")
    prompts: int = setting(16, "problems of a step")
    group: int = setting(8, "completions of each problem")
    max_tokens: int = setting(96, "of a completion")
    temperature: float = setting(1.0, "of the rollouts, and of the log-probabilities in training")
    lr: float = setting(3e-4, "learning rate; constant but for warm-up and decay")
    warm_up: int = setting(0, "steps over which the learning rate rises to it")
    decay: float = setting(0.0, "share of the steps, the last, over which it falls to nothing")
    clip_gradient: float = setting(1.0, "largest norm of the gradient")
    epochs: int = setting(1, "updates with the same rollouts")
    scale: Scale = setting("group", "divides advantages, see rl/loss.py; rloo: leave one out")
    policy_loss: PolicyLoss = setting("ppo", "cispo: clipped weights for all tokens (MiniMax-M1)")
    ratio: Ratio = setting("token", "probability ratios of a token, or of a sequence (GSPO)")
    reduce: Reduce = setting("dapo", "how the tokens' losses become one number, see rl/loss.py")
    clip_low: float = setting(0.2, "how far a ratio may fall; 1: to nothing")
    clip_high: float = setting(0.28, "how far a ratio may rise (DAPO's clip-higher)")
    beta: float = setting(0.0, "weight of the KL divergence from the starting model; 0: none")
    importance_cap: float | None = setting(
        None, "correct for the sampler's rounding, with weights up to this"
    )
    mask_truncated: bool = setting(False, "leave completions that hit the limit out of the loss")
    dynamic_sampling: bool = setting(False, "draw more problems until enough groups have a spread")
    replay: float = setting(
        0.0, "share of the problems that are asked again, of groups that had a spread"
    )
    average: float = setting(0.0, "share of the steps, the last, whose mean weights are the result")
    micro_batch: int = setting(64, "completions in memory at a time; less needs less memory")
    eval_every: int = setting(10, "steps between evaluations on held-out problems; 0: none")
    eval_problems: int = setting(128, "held-out problems of an evaluation")
    eval_samples: int = setting(4, "sampled completions of each, for pass@k")
    eval_k: list[int] | None = setting(None, "k of pass@k, such as 1 2 4; None: --eval-samples")
    stop_on_collapse: bool = setting(
        True, "stop when the held-out reward falls by a fifth of its range"
    )
    group_layout: Layout = setting("rows", "shared: prompts of groups are computed once")
    exact: bool = setting(False, "the sampler's log-probabilities are the trainer's to the bit")
    attention: str = setting("auto", "a version of attention, or mine.py, in rollouts and training")
    dtype: str = setting("auto", "float32 or bfloat16; auto: bfloat16 on a GPU")
    lora_rank: int = setting(0, "train low-rank adapters of this rank only; 0: all weights")
    checkpointing: bool = setting(False, "recompute activations in the backward pass")
    save_rollouts: str | None = setting(None, "a new file: a JSON line for each completion")
    data_content: str | None = None  # a fingerprint; no option

    def __post_init__(self) -> None:
        least = {"steps": 1, "prompts": 1, "group": 2, "max_tokens": 1, "warm_up": 0, "epochs": 1}
        least |= {"micro_batch": 1, "eval_every": 0, "eval_problems": 1, "eval_samples": 1}
        refuse_below(self, **least, lora_rank=0)
        for name in ("lr", "clip_gradient", "reward_seconds"):
            if not 0 < (value := getattr(self, name)) <= LARGEST:
                raise ValueError(f"{flag(name)} must be above 0, at most {LARGEST:g}, got {value}")
        for name, of in {"decay": "steps", "average": "steps", "replay": "problems"}.items():
            if not 0 <= (share := getattr(self, name)) <= 1:
                raise ValueError(f"{flag(name)} is a share of the {of}, 0 to 1, got {share}")
        for k in self.eval_k or ():
            if not 1 <= k <= self.eval_samples:
                raise ValueError(
                    f"--eval-k must be between 1 and --eval-samples, {self.eval_samples}, got {k}"
                )
        if not self.temperature > 0:
            raise ValueError(
                f"--temperature must be positive, got {self.temperature}: greedy rollouts would be"
                " all alike, and nothing could be learned from them"
            )
        Sampling(temperature=self.temperature)
        if self.data is None and self.reward is not None:
            raise ValueError("--reward needs --data; a task of your own has a method `reward`")
        if self.data is None and self.eval_data is not None:
            raise ValueError("--eval-data needs --data")
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ValueError(f"--dtype {self.dtype} is unknown; auto, float32 and bfloat16 work")
        if self.exact and self.lora_rank:
            raise ValueError(
                "--exact is not possible with --lora-rank: the sampler has the adapters merged into"
                " its weights, which rounds differently"
            )
        if self.group_layout not in get_args(Layout):
            raise ValueError(f"--group-layout is rows or shared, not {self.group_layout}")
        self.loss()

    def loss(self) -> Loss:
        """How the loss is computed."""
        names = {one.name for one in fields(Loss)} & {one.name for one in fields(self)}
        return Loss(**{name: getattr(self, name) for name in names})

    def rate_at(self, step: int) -> float:
        """Learning rate of a step."""
        rising = (step + 1) / self.warm_up if self.warm_up else 1.0
        falling = (self.steps - step) / (self.decay * self.steps) if self.decay else 1.0
        return self.lr * min(1.0, rising, falling)


# What differs from the defaults.
RECIPES: Mapping[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)


def task_of(settings: Settings) -> Task:
    """The task of a run: problems of a file, or a task by its name.

    Raises:
        OSError, ValueError: there is none, or a line of the file cannot be used.
    """
    if settings.data is None:
        return find_task(settings.task)
    path, other = Path(settings.data), settings.eval_data
    held_out = None if other is None else read_jsonl(Path(other))
    return Problems(str(path), read_jsonl(path), held_out, settings.reward)


def find_task(name: str) -> Task:
    """A task by its name, or from a class anywhere: `package.module:Class`.

    Raises:
        ValueError: there is none.
    """
    known: dict[str, Task] = {"sums": Add(3), "mix": Mix(), "practice": Practice(), **TASKS}
    task = find_named(name, known, "task", "module:Class")
    if isinstance(task, type) and issubclass(task, Task):
        try:
            task = task()
        except Exception as error:  # the class is the user's
            raise ValueError(f"there is no task {name}: {error}") from error
    if not isinstance(task, Task):
        raise ValueError(f"{name} is no transformer.tasks.task.Task but {task!r:.80}")
    if not isinstance(getattr(task, "name", None), str):
        example = name.rpartition(":")[2]
        raise ValueError(f'{name} has no name: give the class one, such as name = "{example}"')
    return task


def check_task(task: Task) -> None:
    """Try a task before a run depends on it: a few problems for training and for evaluation.

    Raises:
        ValueError: no problem on one side, a question or an answer that is no string, an answer
            that the form of a reply does not take, or a demonstration that earns nothing.
    """
    rng = Random("check")
    for held_out in 4 * (False, True):
        _check_problem(task.sample(rng, held_out), rng)


def _check_problem(problem: Problem, rng: Random) -> None:
    task, arguments, question = problem.task, problem.arguments, problem.question
    if not isinstance(question, str):
        raise ValueError(f"task {task.name!r}: question() must return a string, got {question!r}")
    own = type(task)
    if own.marks is not Task.marks or own.answer is Task.answer:
        return  # it judges completions in a way of its own, which nobody has to demonstrate
    about = f"task {task.name!r}: answer() for {question!r}"
    answer = task.answer(*arguments)
    if not isinstance(answer, str):
        raise ValueError(f"{about} must return a string, got {answer!r}; str() makes it one")
    if task.form is REPLY and (not 0 < len(answer) <= 40 or "<" in answer):
        raise ValueError(
            f"{about} is {answer!r:.60}, {len(answer)} characters long: the form of a reply takes 1"
            " to 40 characters without '<'; a class may have another `form`"
        )
    if "answer" not in task.form.groupindex:
        raise ValueError(
            f"task {task.name!r}: form {task.form.pattern!r} has no group (?P<answer>...)"
        )
    if task.form is not REPLY and own.demonstrate is Task.demonstrate:
        return  # GRPO needs no demonstration, and the usual one has the usual form
    reply = task.demonstrate(rng, *arguments)
    marks = task.marks(reply, *arguments)
    if marks != (1, 1):
        raise ValueError(
            f"task {task.name!r} does not accept its own demonstration {reply!r:.200} for"
            f" {question!r}: {'right()' if marks.form else 'form'} refuses it"
        )
