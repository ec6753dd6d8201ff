"""How well a model does on problems that its training never saw, skill by skill."""

from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from random import Random

from transformer.generation.engine import generate
from transformer.generation.sampling import Sampling, row_generators
from transformer.model.decoder import Transformer
from transformer.tasks.skills import TASKS, Add, Subtract
from transformer.tasks.task import Problem, Task
from transformer.training import byte_tokenizer as bytes_
from transformer.training.corpus import addressed, second_question

MAX_TOKENS = 320
MAX_ROWS = 512  # bounds the memory of one batch
EMPTY_THOUGHT = "<think></think>"


@dataclass(frozen=True)
class Skill:
    """A kind of held-out problem; without thinking, the reply is begun with an empty thought."""

    draw: Callable[[Random], Problem]
    thinking: bool = True


@dataclass(frozen=True)
class Score:
    """Fractions of the replies that are right, and whose form is right."""

    right: float
    form: float


def _held_out(task: Task) -> Callable[[Random], Problem]:
    return lambda rng: task.sample(rng, held_out=True)


SKILLS = {
    "sums of two digits": Skill(_held_out(Add(2))),
    "sums of three digits": Skill(_held_out(Add(3))),
    "sums of four digits": Skill(_held_out(Add(4))),
    "differences of three digits": Skill(_held_out(Subtract(3))),
    "differences of four digits": Skill(_held_out(Subtract(4))),
    "products": Skill(_held_out(TASKS["multiply"])),
    "comparing": Skill(_held_out(TASKS["compare"])),
    "sorting": Skill(_held_out(TASKS["sort"])),
    "reversing": Skill(_held_out(TASKS["reverse"])),
    "counting letters": Skill(_held_out(TASKS["count"])),
    "follow-up questions": Skill(second_question),
    "small talk": Skill(_held_out(TASKS["small talk"])),
    "anything else": Skill(_held_out(TASKS["unknown"])),
    "sums of three digits, without thinking": Skill(_held_out(Add(3)), thinking=False),
}

COUNTDOWN = {
    "countdown": Skill(_held_out(TASKS["countdown"])),
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
    cases = []
    for name in skills:
        rng = Random(f"evaluate {seed} {name}")
        for _ in range(count):
            problem = addressed(rng, known[name].draw(rng))
            begun = "" if known[name].thinking else EMPTY_THOUGHT
            cases.append((name, problem, begun, _prompt(problem, begun)))
    cases.sort(key=lambda case: len(case[3]))  # prompts of one batch are padded to the longest
    sampling = Sampling(temperature=temperature)
    right, form = dict.fromkeys(skills, 0.0), dict.fromkeys(skills, 0.0)
    for start in range(0, len(cases), MAX_ROWS):
        batch = cases[start : start + MAX_ROWS]
        completions, _ = generate(
            model,
            bytes_.tokenizer(),
            [prompt for *_, prompt in batch],
            max_tokens=MAX_TOKENS,
            sampling=sampling,
            generators=() if sampling.greedy else row_generators(seed, len(batch), first=start),
            eos=(bytes_.IM_END,),
        )
        for (name, problem, begun, _), completion in zip(batch, completions):
            if completion.finish_reason == "stop":
                text = begun + completion.text
                marks = problem.marks(text)
                right[name] += marks.answer / count
                form[name] += marks.form / count
    return {name: Score(right[name], form[name]) for name in skills}


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
