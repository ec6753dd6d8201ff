"""How well the shipped models do what their users ask; JSON.

    python -m tests.benchmarks.transformer.model_bars --out FILE [--device cpu]
        [--model NAME_OR_FOLDER ...]

A row is one kind of question to one model, with the share of greedy replies that are right, the
least share that is wanted (`bar`, if there is one) and up to five of the questions that were not
answered rightly. The kinds of questions:

    held-out problems  of every skill, in the words of the generator of the training data
    beyond: ...        requests just beyond the skills. Right is a reply that declines; an answer
                       counts as wrong, even one that happens to be true
    asked: differences all 8,100 differences of two numbers of two digits, as `89-71`, in two rows
    asked: openers     the fifty in tests/transformer/training/asked, with which people begin
    asked: phrasings   the 200 questions there, of all skills and of what lies beyond them
    asked: people      the 160 questions there that are hard to read: lists below zero, numbers in
                       words, missing numbers, chains, glued words, odd spaces, held keys
    asked: strangers   the 120 questions there, as twelve people might type them
    asked: letters     the 66 questions there about the letters of words, phrases and numbers

`answered wrongly` is the share of questions that got an answer which is not right; the rest was
declined. The people's questions were written by an author who had not seen the generator, when it
had such kinds. The phrasings were written before their author had read the generator. Then their
numbers and words were replaced by held-out ones. About two in three have a wording that some
pattern of the generator also gives. The openers are the commonest that there are, so training sees
most of them.
"""

from functools import partial
from pathlib import Path
from random import Random

import torch

import flash_versions
from flash_versions.bench.document import new_document
from tests.benchmarks.harness import keep, parser
from tests.helpers import ROOT
from transformer.model.decoder import Transformer
from transformer.model.weights import find_checkpoint, load_model
from transformer.tasks.phrases import REPLIES
from transformer.tasks.skills import TASKS
from transformer.tasks.task import REPLY, Marks, Problem, Task
from transformer.training.corpus import addressed
from transformer.training.evaluate import SKILLS, WITHOUT_THINKING, replies, score

SUITE = "shipped models"
ASKED = ROOT / "tests/transformer/training/asked"
SHOWN = 5  # questions of a row that were not answered rightly
# The intents that each kind of small talk in phrasings.txt may be answered by.
TALK = {
    "who": ("identity", "help"),
    "able": ("help", "identity"),
    "thanks": ("thanks",),
    "ok": ("agreement", "thanks"),
    "bye": ("goodbye",),
    "how": ("how are you", "greeting"),
    "opener": ("greeting", "how are you"),
    "no": ("unknown", "beyond"),
}
ARITHMETIC = {"sum": ("add", "+"), "diff": ("subtract", "-"), "prod": ("multiply", "*")}
ALSO_RIGHT = {"letter count of banana": "6"}  # to be declined or answered
# The least share wanted of the rows whose names begin so; the first that fits counts.
BARS = {
    "sums of three digits, without": None,
    "sums of": 0.995,
    "differences of two": 0.995,
    "differences": 0.98,
    "close differences": 0.98,
    "sorting": 0.98,
    "beyond": 0.97,
    "asked: differences": 0.995,
    "asked: openers": 1.0,
    "asked: phrasings": 0.93,
    "asked: people": 0.7,  # and at most 0.04 answered wrongly
    "asked: strangers": 0.7,  # likewise
    "asked: letters": 0.7,  # likewise
}


class Asked(Task):
    """A question from a list: right are some answers, in the form of worked replies, and some
    sentences.
    """

    name = "asked"

    def marks(self, completion: str, answers: tuple[str, ...], sentences: tuple[str, ...]) -> Marks:
        """Judge a whole reply."""
        match = REPLY.fullmatch(completion)
        right = match["answer"] in answers if match else completion in sentences
        return Marks(answer=float(right), form=1.0)


def asked(kind: str, truth: str, text: str) -> Problem:
    """A line of phrasings.txt, or an opener, as a problem."""
    if kind in TALK:
        sentences = tuple(sentence for intent in TALK[kind] for sentence in REPLIES[intent])
        return Problem(Asked(), ((ALSO_RIGHT.get(text, ""),), sentences), text)
    if kind in ARITHMETIC:
        task, sign = ARITHMETIC[kind]
        return Problem(TASKS[task], tuple(map(int, truth.split(sign))), text)
    return Problem(Asked(), ((truth,), ()), text)


def lists() -> dict[str, list[Problem]]:
    """The questions that are not drawn."""
    written = {
        name: [x.split("\t") for x in (ASKED / f"{name}.txt").read_text("utf-8").splitlines()]
        for name in ("openers", "phrasings", "people", "strangers", "letters")
    }
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    plain = [Problem(TASKS["subtract"], pair, "{}-{}".format(*pair)) for pair in pairs]
    return {
        "asked: differences of two digits, not below zero": [
            p for p in plain if p.arguments[0] >= p.arguments[1]
        ],
        "asked: differences of two digits, below zero": [
            p for p in plain if p.arguments[0] < p.arguments[1]
        ],
        **{f"asked: {name}": [asked(*line) for line in lines] for name, lines in written.items()},
    }


def measure(model: Transformer, count: int):
    """Rows: one for each skill, with `count` problems, and one for each list."""
    questions = lists()
    for name, skill in SKILLS.items():
        rng = Random(f"evaluate 1 {name}")
        if name != WITHOUT_THINKING:
            problems = (skill.sample(rng, held_out=True) for _ in range(count))
            questions[name] = [addressed(rng, problem) for problem in problems]
    for name, problems in questions.items():
        said = replies(model, problems)
        wrong = [(p, text) for p, text in zip(problems, said) if text is None or not p.reward(text)]
        yield {
            "suite": SUITE,
            "asked": name,
            "problems": len(problems),
            "right": round(score(problems, said).right, 4),
            "bar": next((bar for start, bar in BARS.items() if name.startswith(start)), None),
            "answered wrongly": round(
                sum("<answer>" in (text or "") for _, text in wrong) / len(problems), 4
            ),
            "wrong": [[problem.question, text] for problem, text in wrong[:SHOWN]],
        }


def main():
    """Measure the models that are named."""
    options = parser(__doc__)
    options.add_argument("--model", nargs="+", default=["reinforced", "sloppy"])
    options.add_argument("--problems", type=int, default=512, help="of each skill (512)")
    arguments = options.parse_args()
    device = torch.device(arguments.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    attention = partial(flash_versions.attention, version="sdpa")
    document = new_document(arguments.device, protocol={"greedy": True, "dtype": str(dtype)})
    for name in arguments.model:
        model = load_model(find_checkpoint(name), attention, device, dtype)
        for row in measure(model, arguments.problems):
            row = {"model": Path(name).name, **row}
            keep(document, arguments.out, [row], hidden=("wrong", "suite"))


if __name__ == "__main__":
    main()
