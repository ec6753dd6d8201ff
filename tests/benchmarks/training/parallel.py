"""Training on several GPUs against one; writes JSON.

    python -m tests.benchmarks.training.parallel --out FILE
    torchrun --nproc-per-node 2 -m tests.benchmarks.training.parallel --out FILE --add

Steps of GRPO and of supervised training, for a random model in the shape of Qwen2.5-0.5B and for
the shipped one, which is so small that the host sets its pace. Each with the same global batch on
every number of GPUs, and GRPO of the random model also with as many problems for each GPU ("per
GPU").

A time is that of the slowest rank, medians of steps after a first one. What fails has a `reason` in
the place of figures; with several processes, what fails on one of them ends all. `--device cpu
--tiny` runs the same under gloo, to try the command.
"""

import os
import statistics
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink is not what is measured

import torch  # noqa: E402

from flash_versions.bench.document import new_document  # noqa: E402
from tests.benchmarks.harness import attempt, earlier, forget_peak, keep, now, parser, peak_gib  # noqa: E402
from tests.helpers.models.random_checkpoint import QWEN, TINY, write_checkpoint  # noqa: E402
from transformer.model.decoder import choose_attention  # noqa: E402
from transformer.rl.recipes import Settings  # noqa: E402
from transformer.rl.trainer import Trainer, resolved  # noqa: E402
from transformer.tasks.skills import Add  # noqa: E402
from transformer.tasks.task import Task  # noqa: E402
from transformer.training import byte_tokenizer  # noqa: E402
from transformer.training.corpus import Teacher  # noqa: E402
from transformer.training.parallel import connected, own_device  # noqa: E402
from transformer.training.run import Training  # noqa: E402
from transformer.training.teaching import Teaching  # noqa: E402


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
    world.total(0)  # waits for all
    return now(world.device)


def rates(world, tokens, **seconds):
    """Tokens per second, one figure for each phase of a step; lists are by step."""
    found = {"tokens": tokens, **{f"{phase}_seconds": times for phase, times in seconds.items()}}
    for phase, times in seconds.items():
        each = [count / spent for count, spent in zip(tokens, times)]
        found[f"{phase}_tokens_per_second"] = statistics.median(each)
    if (peak := peak_gib(world.device)) is not None:
        found["peak_gib"] = world.total(peak, torch.distributed.ReduceOp.MAX)
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
        "task": "tests.benchmarks.training.parallel:Varied",
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
    recipe = Teaching(
        teacher=Teacher(), seed=0, steps=64, batch_tokens=2048 if tiny else 65536,
        learning_rate=1e-4, model=body, attention=attention
    )  # fmt: skip
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


def main():
    """Measure; the first rank writes the file again after each part."""
    add = (made := parser(__doc__, seconds=600.0, add=True)).add_argument
    add("--what", nargs="+", choices=FAST, default=[*FAST], help="time only this")
    add("--tiny", action="store_true", help="sizes for a CPU")
    args = made.parse_args()
    protocol = {
        "method": "the same global batch, but for the rows that say per GPU; slowest rank,"
        " median of steps after a first one",
        "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"],
    }
    with connected(own_device(args.device)) as world, tempfile.TemporaryDirectory() as own:
        folder = Path(world.gather(own)[0])  # the first rank's
        document = new_document(args.device, gpus=world.size, protocol=protocol)
        document["rows"] = earlier(args)
        if world.main:
            write_checkpoint(folder / "random", TINY if args.tiny else QWEN)
        world.total(0)  # all have come
        for what in args.what:
            forget_peak(world.device)
            row = {"suite": "processes", "what": what, "gpus": world.size}
            row = attempt(row, partial(FAST[what], world, folder, args.tiny), args.seconds)
            if world.main:
                keep(document, args.out, [row], place=("what", "gpus"))
        world.total(0)  # all have come


if __name__ == "__main__":
    main()
