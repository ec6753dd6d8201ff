"""Training on several GPUs against one; writes JSON.

    python -m tests.benchmarks.training.parallel --gpus 2 4 --out FILE

Steps of GRPO and of supervised training, for a random model in the shape of Qwen2.5-0.5B and for
the shipped one, which is so small that the host sets its pace. Each with the same global batch on
every number of GPUs, and GRPO of the random model also with as many problems for each GPU ("per
GPU"). Each part is started in processes of its own, under torchrun where there are several; there,
rank 0 writes FILE.

A time is that of the slowest rank, medians of steps after a first one; a ratio is that of tokens
per second, over one GPU's. What fails has a `reason` in the place of figures, and does not keep the
rest from being measured. The file is written again after each part. `--device cpu --tiny` runs the
same under gloo, to try the command.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast over NVLink is not what is measured

import torch  # noqa: E402

from flash_versions.bench.document import new_document, save  # noqa: E402
from tests.benchmarks.harness import forget_peak, now, parser, passed, peak_gib  # noqa: E402
from tests.helpers.models.random_checkpoint import QWEN  # noqa: E402
from transformer.model.decoder import Config, Transformer, choose_attention  # noqa: E402
from transformer.model.weights import save_model  # noqa: E402
from transformer.rl.recipes import Settings  # noqa: E402
from transformer.rl.trainer import Trainer, resolved  # noqa: E402
from transformer.tasks.skills import Add  # noqa: E402
from transformer.tasks.task import Task  # noqa: E402
from transformer.training import byte_tokenizer  # noqa: E402
from transformer.training.corpus import Teacher  # noqa: E402
from transformer.training.parallel import connected, own_device  # noqa: E402
from transformer.training.run import Training  # noqa: E402
from transformer.training.teaching import Teaching  # noqa: E402

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
    return now(world.device)


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
GROWING = {"GRPO, 0.5 B, per GPU": "GRPO, 0.5 B"}  # what is the same on one GPU


def run(name, size, args, folder):
    """What rank 0 found of a part on so many processes, or a reason."""
    if (left := args.seconds - passed()) < 5:
        return {"reason": "no time was left"}
    file, log = folder / f"{name} {size}.pt", folder / f"{name} {size}.log"
    command = [sys.executable]
    if size > 1:
        # An address, since the name of a machine without a network may not be known to itself.
        where = ("--standalone", "--local-addr=127.0.0.1", f"--nproc-per-node={size}")
        command += ["-m", "torch.distributed.run", *where]
    command += ["-m", __spec__.name, "--part", name, "--out", str(file), "--device", args.device]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with open(log, "w") as output:
        process = subprocess.Popen(
            command + ["--tiny"] * args.tiny, env=environment, stdout=output, stderr=output
        )
        try:
            process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()  # torchrun then ends the ranks
            process.wait()
            return {"reason": f"did not end within {left:.0f} s"}
    if process.returncode == 0:
        return torch.load(file)
    print("\n".join(log.read_text().splitlines()[-80:]), flush=True)
    return {"reason": f"ended with code {process.returncode}"}


def work(args):
    """Do a part as one of its processes; the random model is in the folder of FILE."""
    with connected(own_device(args.device)) as world:
        forget_peak(world.device)
        found = FAST[args.part](world, args.out.parent, args.tiny)
        if world.main:
            torch.save(found, args.out)


def speed(what, found):
    """Rows: one GPU, and each number of several with the ratio to it, if one was measured."""
    one = found.get(1, {"reason": "not yet measured"})
    for gpus, measured in sorted(found.items()):
        row = {"suite": "processes", "what": what, "gpus": gpus, **measured}
        if gpus > 1 and "reason" not in one and "reason" not in measured:
            rates = [name for name in measured if name.endswith("tokens_per_second")]
            row |= {f"{x.split('_')[0]}_ratio": measured[x] / one[x] for x in rates}
        yield row


def random_model(folder, config, device):
    """A checkpoint that can be trained, though it knows nothing."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Transformer(config)
    save_model(model, folder)
    for name, content in byte_tokenizer.files().items():
        (folder / name).write_text(content, encoding="utf-8")


def measure(args, folder):
    """Everything; the file is written again after each part."""
    protocol = {
        "method": "the same global batch, but for the rows that say per GPU; slowest rank,"
        " median of steps after a first one",
        "NCCL_NVLS_ENABLE": os.environ["NCCL_NVLS_ENABLE"],
    }
    document = new_document(args.device, gpus=max(args.gpus), protocol=protocol)
    random_model(folder / "random", TINY if args.tiny else QWEN, args.device)
    found = {name: {} for name in args.what}
    for size in sorted({1, *args.gpus}):
        for name in args.what:
            same = GROWING.get(name) if size == 1 else None
            result = found.get(same, {}).get(1) or run(same or name, size, args, folder)
            found[name][size] = result
            print(f"{name}, {size}: {json.dumps(result)}", flush=True)
            document["rows"] = [row for name in args.what for row in speed(name, found[name])]
            save(document, args.out)


def main():
    """Measure, or do a part."""
    add = (made := parser(__doc__, seconds=600.0)).add_argument
    add("--gpus", type=int, nargs="+", default=[2], help="beside one (2)")
    add("--what", nargs="+", choices=FAST, default=[*FAST], help="time only this")
    add("--tiny", action="store_true", help="sizes for a CPU")
    add("--part", choices=FAST, help="be a process of this part")
    args = made.parse_args()
    if args.part is not None:
        work(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        measure(args, Path(folder))


if __name__ == "__main__":
    main()
