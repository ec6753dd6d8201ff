"""How well a model does on problems that its training never saw, skill by skill."""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from random import Random

from transformer.generation.engine import generate
from transformer.generation.sampling import Sampling, row_generators
from transformer.model.decoder import Transformer
from transformer.tasks.beyond import KINDS
from transformer.tasks.skills import TASKS, Add, Beyond, SmallTalk, Sort, Subtract
from transformer.tasks.task import Marks, Problem, Task
from transformer.training import byte_tokenizer as bytes_
from transformer.training.corpus import FollowUps, addressed

WAYS = {"greedy": 0.0, "sampled": 1.0}  # of decoding, and their temperatures
MAX_TOKENS = 320
MAX_ROWS = 512  # bounds the memory of one batch
WITHOUT_THINKING = "sums of three digits, without thinking"
EMPTY_THOUGHT = "<think></think>"  # with which its replies are begun


@dataclass(frozen=True)
class Score:
    """Fractions of the replies that are right, and whose form is right."""

    right: float
    form: float


class Greeting(SmallTalk):
    """Bare openers alone."""

    openers = 1.0


NUMBERS = ("one digit", "two digits", "three digits", "four digits")
# Of each skill, problems that are held out are asked.
SKILLS: dict[str, Task] = {
    **{f"sums of {name}": Add(n) for n, name in enumerate(NUMBERS, 1)},
    **{
        f"{kind} of {name}{', below zero' * below}": Subtract(n, below, "close" in kind)
        for kind, lengths in (("differences", (2, 3, 4)), ("close differences", (3, 4)))
        for below in (False, True)
        for n, name in enumerate(NUMBERS, 1)
        if n in lengths
    },
    "sums with numbers below zero": TASKS["signed"],
    "numbers in words": TASKS["spelled"],
    "products": TASKS["multiply"],
    "comparing": TASKS["compare"],
    **{
        f"sorting {name} numbers, {order}": Sort(n, order)
        for order in ("ascending", "descending")
        for n, name in ((3, "three"), (4, "four"), (5, "five"), (6, "six"))
    },
    "reversing": TASKS["reverse"],
    "counting letters": TASKS["count"],
    "follow-up questions": FollowUps(),
    "greetings": Greeting(),
    "small talk": TASKS["small talk"],
    "anything else": TASKS["unknown"],
    **{f"beyond: {kind}": Beyond(kind) for kind in KINDS},
    WITHOUT_THINKING: Add(3),
}

COUNTDOWN: dict[str, Task] = {
    "countdown": TASKS["countdown"],
    **{
        name: SKILLS[name]
        for name in ("sums of three digits", "differences of three digits", "products")
    },
}
TAUGHT = {"chat": SKILLS, "countdown": COUNTDOWN}  # for each of the corpus's mixes


def evaluate(
    model: Transformer,
    count: int,
    *,
    temperature: float = 0.0,
    seed: int = 0,
    skills: Collection[str] = tuple(SKILLS),
) -> dict[str, Score]:
    """Ask `count` held-out problems of each skill, one in four under a system prompt.

    Args:
        model: one with the byte tokenizer, on any device, in any dtype.
        count: problems for each skill.
        temperature: 0 is greedy.
        seed: decides the problems, which do not depend on the temperature, and the draws.
        skills: names in SKILLS or COUNTDOWN.
    """
    known = {**SKILLS, **COUNTDOWN}
    problems, begun = [], []
    for name in skills:
        rng = Random(f"evaluate {seed} {name}")
        problems += [addressed(rng, known[name].sample(rng, held_out=True)) for _ in range(count)]
        begun += [EMPTY_THOUGHT if name == WITHOUT_THINKING else ""] * count
    said = replies(model, problems, temperature=temperature, seed=seed, begun=begun)
    return {
        name: score(problems[i : i + count], said[i : i + count])
        for name, i in zip(skills, range(0, len(problems), count))
    }


def replies(
    model: Transformer,
    problems: Sequence[Problem],
    *,
    temperature: float = 0.0,
    seed: int = 0,
    begun: Sequence[str] = (),
) -> list[str | None]:
    """The model's reply to each problem; None for a reply that did not end by itself.

    Args:
        model, temperature, seed: as of `evaluate`.
        problems: their conversations are the prompts.
        begun: how each reply begins; by default, with nothing.
    """
    begun = begun or [""] * len(problems)
    prompts = [_prompt(problem, text) for problem, text in zip(problems, begun, strict=True)]
    # The prompts of one batch are padded to the longest.
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    sampling = Sampling(temperature=temperature)
    completions, _ = generate(
        model,
        bytes_.tokenizer(),
        [prompts[i] for i in order],
        max_tokens=MAX_TOKENS,
        sampling=sampling,
        generators=() if sampling.greedy else row_generators(seed, len(order)),
        eos=(bytes_.IM_END,),
        at_once=MAX_ROWS,
    )
    said: list[str | None] = [None] * len(prompts)
    for i, completion in zip(order, completions):
        if completion.finish_reason == "stop":
            said[i] = begun[i] + completion.text
    return said


def score(problems: Sequence[Problem], said: Sequence[str | None]) -> Score:
    """The shares of replies that are right, and whose form is; a reply that is None is neither."""
    marks = [Marks(0, 0) if text is None else p.marks(text) for p, text in zip(problems, said)]
    right, form = (sum(column) / len(marks) for column in zip(*marks))
    return Score(right, form)


def _prompt(problem: Problem, begun: str) -> list[int]:
    tokens = []
    for message in problem.messages:
        tokens += bytes_.encode_turn(message["role"], message["content"])
    return [*tokens, *bytes_.encode_prompt(), *bytes_.encode(begun)]


def as_record(scores: dict[str, Score]) -> dict[str, dict[str, float]]:
    """Scores for a JSON file, to four digits."""
    return {
        name: {key: round(value, 4) for key, value in asdict(score).items()}
        for name, score in scores.items()
    }
