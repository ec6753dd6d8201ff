"""The shipped model's skills, taught from nothing: the recipe, the scores on the way, the card.

The loss is on the assistant's tokens only, the end of the turn among them.
"""

import argparse
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

import flash_versions
from transformer.generation.progress import Progress
from transformer.model.decoder import Config, Transformer
from transformer.training import byte_tokenizer, model_card
from transformer.training.corpus import ChatBatch, Corpus, Teacher
from transformer.training.evaluate import TAUGHT, WAYS, Score, as_record, evaluate
from transformer.training.run import Forward, Recipe, Training, rows_of

# The sloppy teacher gets about 26 % of the sums of three digits right.
SLOPPY = Teacher(hasty=0.35, forget=0.5)
# With this patience a teacher solves about 35 % of the countdown problems.
PATIENCE = 0.75
MODEL = Config(
    vocab_size=byte_tokenizer.VOCAB_SIZE,
    hidden_size=192,
    intermediate_size=512,
    num_layers=4,
    num_heads=3,
    num_kv_heads=1,
    head_dim=64,
    max_positions=byte_tokenizer.MAX_POSITIONS,
    tied_embeddings=True,
    qk_norm=True,
)
IGNORED = -100  # by `cross_entropy`
AS_GIVEN = ("seed", "steps", "batch_tokens", "tasks", "attention", "eval_every")  # by one name


@dataclass(frozen=True, kw_only=True)
class Teaching(Recipe):
    """A teacher, its tasks, and the shape of the model.

    Attributes:
        problems: of each skill, in the last evaluation.
        command: that made the model, for its card.
    """

    teacher: Teacher
    tasks: str = "chat"
    model: Config = MODEL
    problems: int = field(default=512, compare=False)
    command: str = field(default="", compare=False)

    clip = 0.4  # of the gradient of the loss per token; about 0.4 of the tokens count in it

    def make_model(self, device: torch.device, dtype: torch.dtype) -> Transformer:
        """A model with random weights."""
        attention = partial(flash_versions.attention, version=self.attention)
        return Transformer(self.model, attention).to(device)

    def corpus(self) -> Corpus:
        """The data; ValueError if it cannot be made."""
        return Corpus(self.teacher, self.seed, self.batch_tokens, self.tasks)

    def loss(self, model: Transformer, forward: Forward, batch: ChatBatch, rows: range) -> Tensor:
        """As in `Recipe`. The vocabulary is small, so all logits are computed: the host need not
        know which are wanted.
        """
        device = model.model.embed_tokens.weight.device
        tokens, learned = rows_of(batch, rows)
        targets = tokens.masked_fill(~learned, IGNORED)[:, 1:].to(device, non_blocking=True)
        logits = forward(tokens.to(device, non_blocking=True))[:, :-1].flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum")

    def weighed(self, batch: ChatBatch) -> float:
        """A constant: every learned token weighs the same, in whichever batch it is."""
        return self.batch_tokens

    def measure(self, training: Training, progress: Progress) -> None:
        """Record and show scores, see `score`."""
        model = training.plain(training.dtype)
        if training.world.main:  # others wait at the next step
            self.score(training, model, min(64, self.problems), 0, progress)

    def score(
        self, training: Training, model: Transformer, problems: int, seed: int, progress: Progress
    ) -> dict[str, dict[str, Score]]:
        """Scores of greedy and of sampled replies by skill; they are also recorded and shown."""
        scores, skills = {}, TAUGHT[self.tasks]
        for name, temperature in WAYS.items():
            found = evaluate(model, problems, temperature=temperature, seed=seed, skills=skills)
            training.record(evaluation=name, problems=problems, scores=as_record(found))
            scores[name] = found
        progress.say(model_card.table(scores))
        return scores

    def publish(self, training: Training, progress: Progress) -> None:
        """Write the checkpoint and what is known about it. What is evaluated is what ships: the
        weights as they lie in the folder, rounded to bf16.
        """
        whole, folder = training.plain(torch.float32), training.folder
        if not training.world.main:
            return
        model = model_card.ship(whole, folder, training.device, training.dtype)
        scores = self.score(training, model, self.problems, 1, progress)
        made = model_card.TEXTS["teaching"].format(
            command=self.command,
            seconds=training.seconds,
            machine=model_card.machine(model.model.embed_tokens.weight.device),
            tokens=training.step * self.batch_tokens,
        )
        origin = model_card.character(self.teacher)
        model_card.write(folder, model, self.tasks, origin, made, scores, problems=self.problems)


def plan(arguments: argparse.Namespace, argv: Sequence[str]) -> Teaching:
    """The run that the arguments ask for.

    Raises:
        OSError, ValueError: a recipe that cannot work, in a sentence.
    """
    teacher = SLOPPY if arguments.teacher == "sloppy" else Teacher()
    if arguments.tasks == "countdown":
        teacher = replace(teacher, patience=PATIENCE)
    dials = {name: getattr(arguments, name) for name in ("hasty", "forget", "patience")}
    given = {name: value for name, value in dials.items() if value is not None}
    if arguments.attention.endswith(".py"):
        flash_versions.load_version(arguments.attention)
    workers = arguments.workers
    if workers is None:
        here = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        workers = min(16, max(1, (os.cpu_count() or 2) // here - 1))
    recipe = Teaching(
        **{name: getattr(arguments, name) for name in AS_GIVEN},
        teacher=replace(teacher, **given),
        learning_rate=arguments.lr,
        model=MODEL,
        workers=workers,
        problems=arguments.eval_problems,
        command=shlex.join(["python", "-m", "transformer.train", *argv]),
    )
    recipe.corpus()  # refuses what it cannot do, before any work
    return recipe
