"""A process of tests.benchmarks.training.parallel: does the parts that it is given, and leaves what
it finds.

    python -m tests.benchmarks.training.parallel_worker FOLDER DEVICE tiny|full PART ...

Rank 0 writes FOLDER/"PART N.pt"; a rank that fails says why in FOLDER/"PART N reason".
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch

from flash_versions.bench.files import write
from tests.benchmarks.frame import forget_peak, now, peak_gib
from tests.helpers.models.random_checkpoint import QWEN
from transformer.generation.command import ElsewhereError
from transformer.model.decoder import Config, choose_attention
from transformer.rl.recipes import Settings
from transformer.rl.run import Run
from transformer.rl.trainer import Trainer, resolved
from transformer.tasks.skills import Add
from transformer.tasks.task import Task
from transformer.training import byte_tokenizer
from transformer.training.corpus import Teacher
from transformer.training.lora import merged_weights
from transformer.training.parallel import connected, own_device, shard
from transformer.training.run import Recipe, Training

TINY = Config(512, 64, 96, 2, 2, 1, 32, 1024, tied_embeddings=True, qkv_bias=True)


class Varied(Task):
    """Sums, with a reward that differs between any two answers: also a random model learns."""

    name, arguments, question = "varied", Add(3).arguments, Add(3).question

    def answer(self, *arguments):
        return ""

    def reward(self, completion, *arguments):
        return float(len(completion))


def weights(model):
    """Whole and on the CPU."""
    return {name: weight.detach().cpu().clone() for name, weight in merged_weights(model)}


def trainer_of(settings, world):
    return Trainer(resolved(settings, world.device, world), world.device, world)


def grpo_steps(trainer, count):
    """Steps of GRPO: what was measured in each."""
    found = []
    for _ in range(count):
        rollouts = trainer.roll_out().rollouts
        measured, total = trainer.learn(rollouts), trainer.world.total
        rows = total(len(rollouts))
        measured["reward"] = total(sum(r.reward for r in rollouts)) / rows
        measured["length"] = total(sum(len(r.completion.tokens) for r in rollouts)) / rows
        found.append(measured)
    return found


def grpo_equal(world, folder, tiny):
    """Four steps; two processes also take two and save, which one process takes up."""
    sizes = {"prompts": 4, "group": 4, "micro_batch": 5} if tiny else {"prompts": 16}
    settings = Settings(dtype="float32", steps=4, eval_every=0, **sizes)
    trainer = trainer_of(settings, world)
    found = {"start": weights(trainer.policy.model), "metrics": grpo_steps(trainer, 4)}
    found["weights"] = weights(trainer.policy.model)
    trainer = trainer_of(settings, world)
    run = Run(folder / "grpo", trainer.settings, world)
    if world.size > 1:
        grpo_steps(trainer, 2)
        run.save({**trainer.state(), "best": 0.0, "seconds": 0.0})
    elif (state := run.load(world.device)) is not None:
        trainer.restore(state)
        found["resumed metrics"] = found["metrics"][:2] + grpo_steps(trainer, 2)
        found["resumed weights"] = weights(trainer.policy.model)
    return found


def study(training, batches):
    """Steps of supervised training: what was measured in each."""
    found = []
    for batch in batches:
        loss, norm = training.learn(batch)
        mean = training.world.sum(loss.clone()).item() / int(batch.learned[:, 1:].sum())
        found.append({"loss": mean, "gradient_norm": norm.item()})
    training.record(**found[-1])
    return found


def exact(recipe, folder, world):
    """Supervised training in float32, also on a GPU."""
    in_float32 = lambda model, world, dtype: shard(model, world, torch.float32)  # noqa: E731
    with mock.patch("transformer.training.run.shard", in_float32):
        training = Training(recipe, folder, world.device, world)
    training.dtype = torch.float32
    return training


def supervised_equal(world, folder, tiny):
    """Twenty steps; two processes also take ten and save, which one process takes up."""
    recipe = Recipe(Teacher(), 0, 20, 2048 if tiny else 16384, 1e-3)
    chunk = recipe.corpus()[0]
    batches = [chunk[number % len(chunk)] for number in range(20)]
    training = exact(recipe, folder / f"supervised-{world.size}", world)
    found = {"start": weights(training.model), "metrics": study(training, batches)}
    found["weights"] = weights(training.model)
    if world.size > 1:
        training = exact(recipe, folder / "supervised", world)
        study(training, batches[:10])
        training.save()
    elif (folder / "supervised").exists():
        training = exact(recipe, folder / "supervised", world)
        found["resumed metrics"] = found["metrics"][:10] + study(training, batches[training.step :])
        found["resumed weights"] = weights(training.model)
    return found


def meet(world):
    """Seconds at which all ranks have done all that was asked of them."""
    now(world.device)  # waits for it
    world.barrier()
    return time.perf_counter()


def rates(world, tokens, **seconds):
    """Tokens per second, one figure for each phase of a step; lists are by step."""
    found = {"tokens": tokens, **{f"{phase}_seconds": times for phase, times in seconds.items()}}
    for phase, times in seconds.items():
        each = [count / spent for count, spent in zip(tokens, times)]
        found[f"{phase}_tokens_per_second"] = statistics.median(each)
    if (peak := peak_gib(world.device)) is not None:
        found["peak_gib"] = world.most(peak)
    return found


def grpo_speed(world, settings, steps):
    """Timed steps of GRPO, and the rollouts and the learning in them."""
    trainer = trainer_of(settings, world)
    tokens, rollout, learn = [], [], []
    for _ in range(steps + 1):
        began = meet(world)
        rollouts = trainer.roll_out().rollouts
        between = meet(world)
        trainer.learn(rollouts)
        rollout.append(between - began)
        learn.append(meet(world) - between)
        tokens.append(world.total(sum(len(r.completion.tokens) for r in rollouts)))
    step = [x + y for x, y in zip(rollout, learn)]
    found = rates(world, tokens[1:], step=step[1:], rollout=rollout[1:], learn=learn[1:])
    return found | {"attention": trainer.settings.attention, "dtype": trainer.settings.dtype}


def large_grpo(world, folder, tiny, times=1):
    """GRPO with a random model of half a billion weights, in micro-batches that fill most of the
    memory: smaller ones leave a GPU waiting for the host.
    """
    sizes = {"prompts": 4, "group": 4, "max_tokens": 48} if tiny else {"prompts": 128, "group": 16}
    sizes["prompts"] *= times
    settings = Settings(
        **{
            "model": str(folder / "random"),
            "task": "tests.benchmarks.training.parallel_worker:Varied",
            "max_tokens": 256,
        }
        | {"micro_batch": 128, "lr": 1e-6, "eval_every": 0}
        | sizes
    )
    return grpo_speed(world, settings, 1 if tiny else 3)


def growing_grpo(world, folder, tiny):
    """The same with as many problems for each GPU as it has alone."""
    return large_grpo(world, folder, tiny, world.size)


def shipped_grpo(world, folder, tiny):
    """GRPO with the shipped model."""
    sizes = {"prompts": 4, "group": 4} if tiny else {"prompts": 64, "group": 16}
    return grpo_speed(world, Settings(micro_batch=512, eval_every=0, **sizes), 1 if tiny else 9)


def large_supervised(world, folder, tiny):
    """Supervised training of the same body, with the vocabulary that its data have.

    Through the kernels that GRPO takes. cuDNN's, torch's choice on Hopper, are planned anew for
    each shape of a batch, which takes seconds, and the shapes depend on how many share a batch.
    All batches are seen once before they are timed, as a long training has seen their like.
    """
    body = replace(TINY if tiny else QWEN, vocab_size=byte_tokenizer.VOCAB_SIZE)
    attention = "sdpa"  # the versions would run in the interpreter
    if world.device.type == "cuda":
        attention, _ = choose_attention("auto", body, world.device, torch.bfloat16)
    recipe = Recipe(
        Teacher(), 0, 64, 2048 if tiny else 65536, 1e-4, model=body, attention=attention
    )
    training = Training(recipe, folder / f"large-{world.size}", world.device, world)
    batches = replace(recipe.corpus(), chunk_batches=3 if tiny else 8)[0]
    for batch in batches:
        training.learn(batch)
    tokens, step = [], []
    for batch in batches * (1 if tiny else 2):
        began = meet(world)
        training.learn(batch)
        step.append(meet(world) - began)
        tokens.append(batch.tokens.size)
    dtype = str(training.dtype).removeprefix("torch.")
    return rates(world, tokens, step=step) | {"attention": attention, "dtype": dtype}


EQUAL = {"grpo equal": grpo_equal, "supervised equal": supervised_equal}
FAST = {
    "supervised, 0.4 B": large_supervised,
    "GRPO, 0.5 B": large_grpo,
    "GRPO, shipped model": shipped_grpo,
    "GRPO, 0.5 B, per GPU": growing_grpo,
}
GROWING = {"GRPO, 0.5 B, per GPU": "GRPO, 0.5 B"}  # what is the same on one GPU


def work(names, folder, device, tiny):
    """A rank: do what is named; rank 0 leaves what it finds in the folder."""
    with connected(own_device(device)) as world:
        for name in names:
            torch.cuda.empty_cache()
            forget_peak(world.device)
            try:
                found = (EQUAL | FAST)[name](world, folder, tiny)
            except ElsewhereError:
                raise
            except Exception as error:
                reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
                write(folder / f"{name} {world.size} reason", reason)
                raise
            if world.main:
                torch.save(found, folder / f"{name} {world.size}.pt.part")
                (folder / f"{name} {world.size}.pt.part").rename(folder / f"{name} {world.size}.pt")


if __name__ == "__main__":
    folder, device, sizes, *names = sys.argv[1:]
    work(names, Path(folder), device, sizes == "tiny")
