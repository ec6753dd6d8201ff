"""One rank of tests/transformer/training/test_parallel.py: torchrun starts two of them, FOLDER
holds what they share.

What a rank finds it puts into FOLDER/RANK.pt; the test compares it with one process.
"""

import contextlib
import io
import os
import sys
from pathlib import Path

import torch

from tests.helpers.models.tiny_grpo import CPU, TINY, Seldom, options
from tests.transformer.training.test_train import recipe
from transformer import grpo
from transformer.rl.groups import describe
from transformer.rl.recipes import Settings
from transformer.rl.run import Run
from transformer.rl.trainer import Trainer, resolved
from transformer.training.corpus import ChatBatch, Corpus, Teacher
from transformer.training.lora import merged_weights
from transformer.training.parallel import World, connected, whole
from transformer.training.run import Training

SELDOM = "tests.helpers.models.tiny_grpo:Seldom"
CASES = {
    "plain": {},
    "all at once": {
        "task": SELDOM, "epochs": 2, "beta": 0.05, "scale": "batch", "reduce": "grpo",
        "clip_gradient": 0.1, "dynamic_sampling": True, "replay": 0.5, "mask_truncated": True,
    },
    "replay": {"task": SELDOM, "replay": 0.5, "average": 1.0},
    "adapters": {"lora_rank": 2, "beta": 0.05, "average": 1.0, "checkpointing": True},
}  # fmt: skip
CHAINS = ("plain", "replay", "adapters")
LENGTH = {"steps": 2, "eval_every": 1, "eval_problems": 8, "average": 1.0}  # of the command


class Unlucky(Seldom):
    """Its reward cannot be computed on the second rank."""

    def reward(self, completion: str, *arguments) -> float:
        if os.environ.get("RANK") == "1":
            raise KeyError("no such word")
        return 0.0


def make(folder: Path, world: World, **changes) -> Trainer:
    # Adam divides by the gradient, so where that is all but 0 its rounding moves a weight: little,
    # where steps are small.
    settings = Settings(**{"model": str(folder), **TINY, "lr": 3e-4, "micro_batch": 3, **changes})
    return Trainer(resolved(settings, CPU, world), CPU, world)


def take(trainer: Trainer, steps: int, reward=lambda rank, row, given: given) -> dict:
    """Steps of training, and all that can be seen of them from outside."""
    world, gradients, rollouts, metrics = trainer.world, {}, [], []

    def keep(*_):
        names = [name for name, p in trainer.policy.model.named_parameters() if p.requires_grad]
        gradients.update(
            {n: whole(p.grad).clone() for n, p in zip(names, trainer.learner.parameters)}
        )

    hook = trainer.learner.optimizer.register_step_pre_hook(keep)
    for _ in range(steps):
        found = trainer.roll_out()
        rollouts.append(sorted(map(str, trainer.records(found))))
        for row, rollout in enumerate(found.rollouts):
            object.__setattr__(rollout, "reward", reward(world.rank, row, rollout.reward))
        measured = trainer.learn(found.rollouts)
        size = trainer.settings.group
        seen = {"drawn": found.drawn, "replayed": found.replayed}
        metrics.append({**measured, **describe(found.rollouts, size, world), **seen})
    hook.remove()
    return {
        "rollouts": rollouts,
        "metrics": metrics,
        "gradients": gradients,
        "weights": dict(merged_weights(trainer.policy.model)),
        "result": {name: p.clone() for name, p in trainer.result().state_dict().items()},
        "drawn": trainer.source.drawn,
        "pool": trainer.source.state()["pool"],
    }


def unequal(rank: int, row: int, given: float) -> float:
    """Rewards by which the second of two ranks has nothing to learn from."""
    return 0.0 if rank else given


def study(training: Training, batches: list[ChatBatch]) -> dict:
    """Steps of supervised training."""
    found = [training.learn(batch) for batch in batches]
    losses = [training.world.reduce(loss.clone()).item() for loss, _ in found]
    norms = [norm.item() for _, norm in found]
    return {"losses": losses, "norms": norms, "weights": training.plain(torch.float32).state_dict()}


def lessons() -> list[ChatBatch]:
    """Five batches; the second has a single row, so that one of two ranks has none."""
    given = Corpus(Teacher(), 3, 1024)[0][:5]
    given[1] = ChatBatch(given[1].tokens[:1], given[1].learned[:1])
    return given


def command(*argv) -> str:
    """What the command says in this process's rank."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = grpo.main([str(x) for x in argv])
    assert code == 0, said.getvalue()
    # The ranks connect once more, and torchrun's meeting place serves once.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    os.environ["MASTER_PORT"] = os.environ["NEXT_PORT"]
    return said.getvalue()


def failure(world: World, folder: Path) -> str:
    """The error of a rank whose neighbour, or itself, has a bad reward."""
    trainer = make(folder, world, task="tests.transformer.training.parallel_worker:Unlucky")
    try:
        trainer.roll_out()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path) -> None:
    model = folder / "model"
    found = {}
    argv = options(model, **LENGTH)
    found["command"] = command(*argv, "--out", folder / "command", "--save-every", 1)
    with connected(CPU) as world:
        for name, changes in CASES.items():
            trainer = make(model, world, **changes)
            found[name] = take(trainer, 3)
            found[name]["scores"] = trainer.evaluate()[0]
        found["unequal"] = take(make(model, world), 2, unequal)
        found["failure"] = failure(world, model)

        # One process began, two go on, and one ends it.
        for name in CHAINS:
            trainer = make(model, world, **CASES[name])
            run = Run(folder / name, trainer.settings, world)
            trainer.restore(run.load())
            found[f"chain {name}"] = take(trainer, 2)
            run.save({**trainer.state(), "best": 0.25, "seconds": 1.5})
            again = make(model, world, **CASES[name])
            again.restore(Run(folder / name, trainer.settings, world).load())
            found[f"again {name}"] = take(again, 1)

        training = Training(recipe(), folder / "taught", CPU, world)
        found["taught"] = study(training, lessons()[1:3])
        training.position = (0, 3)
        training.save()
    torch.save(found, folder / f"{world.rank}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
