"""A process of tests.benchmarks.training.parallel: does a part, and leaves what it finds.

    python -m tests.benchmarks.training.parallel_worker FILE DEVICE tiny|full PART

Rank 0 writes FILE; the random model is in the folder of FILE.
"""

import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.frame import forget_peak, now, peak_gib
from tests.helpers.models.random_checkpoint import QWEN
from transformer.model.decoder import Config, choose_attention
from transformer.rl.recipes import Settings
from transformer.rl.trainer import Trainer, resolved
from transformer.tasks.skills import Add
from transformer.tasks.task import Task
from transformer.training import byte_tokenizer
from transformer.training.corpus import Teacher
from transformer.training.parallel import connected, own_device
from transformer.training.run import Recipe, Training

TINY = Config(512, 64, 96, 2, 2, 1, 32, 1024, tied_embeddings=True, qkv_bias=True)


class Varied(Task):
    """Sums, with a reward that differs between any two answers: also a random model learns."""

    name, arguments, question = "varied", Add(3).arguments, Add(3).question

    def answer(self, *arguments):
        return "0"

    def reward(self, completion, *arguments):
        return float(len(completion))


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
    trainer = Trainer(resolved(settings, world.device, world), world.device, world)
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
    settings = {
        "model": str(folder / "random"),
        "task": "tests.benchmarks.training.parallel_worker:Varied",
        "max_tokens": 256,
        "micro_batch": 128,
        "lr": 1e-6,
        "eval_every": 0,
    }
    return grpo_speed(world, Settings(**settings | sizes), 1 if tiny else 3)


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
    attention = "sdpa"  # the versions would be simulated
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


FAST = {
    "supervised, 0.4 B": large_supervised,
    "GRPO, 0.5 B": large_grpo,
    "GRPO, shipped model": shipped_grpo,
    "GRPO, 0.5 B, per GPU": growing_grpo,
}
GROWING = {"GRPO, 0.5 B, per GPU": "GRPO, 0.5 B"}  # what is the same on one GPU


if __name__ == "__main__":
    file, device, sizes, part = sys.argv[1:]
    with connected(own_device(device)) as world:
        forget_peak(world.device)
        found = FAST[part](world, Path(file).parent, sizes == "tiny")
        if world.main:
            torch.save(found, file)
