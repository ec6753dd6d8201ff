"""A step of GRPO by our trainer against one by TRL's, which samples with `generate`; writes JSON.

    python -m tests.benchmarks.training.trl_speed --out FILE

Needs the extra `trl`. Both train the same checkpoint on the same problems in bf16 with fp32 master
weights: "shipped" is the checkpoint `sloppy` on its sums, "qwen2.5-0.5b" random weights of that
shape, whose completions hardly ever end by themselves, so all are as long as the limit; their
reward is a hash, for a spread within the groups. In one process ours runs, then TRL, then ours
again, so that a drift shows, and TRL with weights in bf16. A contestant that runs out of memory or
fails has a `reason`. `--device cpu --tiny` tries the command.

A step has two phases, each timed between two waits for the device. "rollout": from problems to
rewards (TRL: `_generate_and_score_completions`). "learn": all else, the optimiser included.
"""

import os
import statistics
import tempfile
import zlib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random

os.environ["HF_HUB_OFFLINE"] = "1"

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from transformers.trainer_callback import PrinterCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from flash_versions.bench.document import new_document  # noqa: E402
from tests.benchmarks.harness import attempt, forget_peak, keep, now, parser, peak_gib  # noqa: E402
from tests.helpers.models.random_checkpoint import QWEN, TINY, write_checkpoint  # noqa: E402
from transformer.generation.chat import Tokenizer, load_template  # noqa: E402
from transformer.generation.messages import encode_prompt  # noqa: E402
from transformer.model.weights import find_checkpoint  # noqa: E402
from transformer.rl.recipes import Settings, find_task  # noqa: E402
from transformer.rl.trainer import Trainer, resolved  # noqa: E402
from transformer.training import byte_tokenizer  # noqa: E402

LIBRARIES = ("trl", "transformers", "accelerate", "datasets", "tokenizers")
SUITE = "grpo step"
PHASES = ("seconds", "rollout_seconds", "learn_seconds")
LR = 1e-6  # so small that all contestants sample from about the same policy throughout
SEED = 0
PROTOCOL = {
    "turns": "ours, TRL, ours again and TRL-bf16, in one process; the fastest of the timed steps,"
    " as widths that are new compile kernels in any of them",
    "step": "on-policy, loss dapo, beta 0, AdamW, gradients clipped at 1, no checkpointing",
    "ours": "samples with a bf16 copy of the fp32 weights, learns with bf16 casts of them; batches"
    " of like lengths; `learned` rows go through the model, those with an advantage of 0 do not",
    "TRL": "GRPOTrainer with its default bf16=True: fp32 weights under autocast, in `generate` (one"
    " batch of all rows; the cache is in fp32, as the rotated keys are; TRL turns compilation off)"
    " and in learning (log-probabilities in chunks by TRL's fused head); sdpa; fused AdamW; all"
    " rows of a step are padded to its longest",
    "TRL-bf16": "the same with weights, cache and AdamW's moments in bf16, which is less exact",
}


@dataclass(frozen=True)
class Case:
    """What is trained, and the reward: the task's, or a hash of the tokens."""

    name: str
    folder: Path
    prompts: int
    group: int
    max_tokens: int
    micro_batch: int
    hashed: bool

    def problems(self, step):
        """Those of a step, as our trainer draws them."""
        rng = Random(f"{SEED} {step}")
        return [find_task("sums").sample(rng) for _ in range(self.prompts)]


def cases(folder, tiny):
    """All cases; `folder` is where the checkpoint with random weights goes."""
    write_checkpoint(folder, TINY if tiny else QWEN)
    prompts, group = (4, 4) if tiny else (64, 16)
    limit, micro_batch = (6, 8) if tiny else (256, 64)
    return [
        Case("shipped", find_checkpoint("sloppy"), prompts, group, 96, prompts * group, False),
        Case("qwen2.5-0.5b", folder, prompts, group, limit, micro_batch, True),
    ]


def hash_reward(tokens):
    """0 or 1, as likely as each other."""
    return float(zlib.crc32(repr(tokens).encode()) & 1)


def refuse_other_prompts(case):
    """Stop unless both ask in the very same tokens."""
    tokenizer, template = Tokenizer.load(case.folder), load_template(case.folder)
    theirs = AutoTokenizer.from_pretrained(case.folder)
    for problem in case.problems(0):
        _, mine = encode_prompt(tokenizer, template, problem.messages)
        asks = {"add_generation_prompt": True, "return_dict": False}
        if mine != (other := theirs.apply_chat_template(problem.messages, **asks)):
            raise SystemExit(f"{case.name}: TRL asks in other tokens, {other} instead of {mine}")


class Clock(TrainerCallback):
    """Times the steps of one contestant; TRL's end when the next ones begin."""

    def __init__(self, device):
        self.device, self.steps = device, []

    def on_train_begin(self, *_, **__):
        forget_peak(self.device)
        self.began = now(self.device)

    def rolled_out(self, seconds, completions, rewards):
        """The rollout of the step took so long and gave these tokens."""
        self.rollout = seconds
        lengths = [len(tokens) for tokens in completions]
        self.seen = {
            "tokens": sum(lengths),
            "mean_length": statistics.fmean(lengths),
            "reward": statistics.fmean(rewards),
            "reward_deviation": statistics.pstdev(rewards),
        }

    def on_step_end(self, *_, **__):
        seconds = now(self.device) - self.began
        spent = dict(zip(PHASES, (seconds, self.rollout, seconds - self.rollout)))
        self.steps.append({**spent, **self.seen, "peak_gib": peak_gib(self.device)})
        self.on_train_begin()


def ours(case, clock, steps, attention):
    """Our trainer's steps."""
    settings = Settings(
        model=str(case.folder), task="sums", seed=SEED, steps=steps, prompts=case.prompts,
        group=case.group, max_tokens=case.max_tokens, lr=LR, micro_batch=case.micro_batch,
        attention=attention, dtype="bfloat16",
    )  # fmt: skip
    trainer = Trainer(resolved(settings, clock.device), clock.device)
    clock.on_train_begin()
    for _ in range(steps):
        rollouts = trainer.roll_out().rollouts
        if case.hashed:
            rollouts = [replace(r, reward=hash_reward(r.completion.tokens)) for r in rollouts]
        seconds, rewards = now(clock.device) - clock.began, [r.reward for r in rollouts]
        clock.rolled_out(seconds, [r.completion.tokens for r in rollouts], rewards)
        learned = int(trainer.learn(rollouts)["learned"])
        clock.seen |= {"learned": learned, "attention": trainer.settings.attention}
        clock.on_step_end()


class TimedTRL(GRPOTrainer):
    """TRL's trainer, which tells a clock about its rollouts."""

    clock: Clock

    def _generate_and_score_completions(self, inputs):
        clock = self.clock
        started = now(clock.device)
        found = super()._generate_and_score_completions(inputs)
        clock.rolled_out(now(clock.device) - started, clock.completions, clock.rewards)
        return found


def trl(case, clock, steps, dtype):
    """TRL's steps."""
    problems = [problem for step in range(steps) for problem in case.problems(step)]

    def reward(completions, completion_ids, index, **_):
        rewards = []
        for (message,), tokens, i in zip(completions, completion_ids, index):
            if case.hashed:
                rewards.append(hash_reward(tokens))
            else:
                stopped = tokens[-1] == byte_tokenizer.IM_END
                rewards.append(problems[i].reward(message["content"]) if stopped else 0.0)
        clock.completions, clock.rewards = completion_ids, rewards
        return rewards

    rows = {"prompt": [p.messages for p in problems], "index": list(range(len(problems)))}
    loading = {"dtype": dtype, "attn_implementation": "sdpa"}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(  # the rest of the arithmetic is the same by default
            output_dir=folder, seed=SEED, max_steps=steps, shuffle_dataset=False,
            per_device_train_batch_size=case.micro_batch,
            gradient_accumulation_steps=case.prompts * case.group // case.micro_batch,
            num_generations=case.group, max_completion_length=case.max_tokens, top_p=1.0, top_k=0,
            loss_type="dapo", scale_rewards="group", epsilon_high=0.28, beta=0.0, learning_rate=LR,
            lr_scheduler_type="constant", adam_beta2=0.95, use_cpu=clock.device.type == "cpu",
            bf16=True, gradient_checkpointing=False, report_to=[], logging_strategy="no",
            save_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = TimedTRL(
            model=AutoModelForCausalLM.from_pretrained(case.folder, **loading),
            processing_class=AutoTokenizer.from_pretrained(case.folder), reward_funcs=reward,
            callbacks=[clock], train_dataset=Dataset.from_dict(rows), args=config,
        )  # fmt: skip
        trainer.clock = clock
        trainer.remove_callback(PrinterCallback)  # it writes to standard output
        trainer.train()


# Name: what runs, and its last argument (attention, or the dtype of the weights).
CONTESTANTS = {
    "ours": (ours, "auto"),
    "TRL": (trl, torch.float32),
    "ours again": (ours, "auto"),
    "TRL-bf16": (trl, torch.bfloat16),
}


def measure(case, name, device, args):
    """The fields of a contestant's row."""
    clock, (run, how) = Clock(device), CONTESTANTS[name]
    run(case, clock, args.warm_up + args.steps, how)
    timed = clock.steps[args.warm_up :]
    best = {f"{phase}_best": min(step[phase] for step in timed) for phase in PHASES}
    return {"warm_up": clock.steps[: args.warm_up], "steps": timed, **best}


def main():
    """Measure; the file is written again after each row."""
    add = (made := parser(__doc__, seconds=300.0)).add_argument
    add("--tiny", action="store_true", help="small models and few rows")
    add("--warm-up", type=int, default=1, help="steps that are not counted (1)")
    add("--steps", type=int, default=3, help="timed steps of a contestant (3)")
    args = made.parse_args()
    device = torch.device(args.device)
    protocol = {**PROTOCOL, **{name: getattr(args, name) for name in ("warm_up", "steps", "tiny")}}
    document = new_document(device.type, LIBRARIES, protocol=protocol)
    with tempfile.TemporaryDirectory() as folder:
        for case in cases(Path(folder), args.tiny):
            refuse_other_prompts(case)
            for name in CONTESTANTS:
                row = {"suite": SUITE, "case": case.name, "contestant": name}
                sizes = ("prompts", "group", "max_tokens", "micro_batch")
                row |= {size: getattr(case, size) for size in sizes}
                timed = partial(measure, case, name, device, args)
                keep(document, args.out, [attempt(row, timed, args.seconds)])


if __name__ == "__main__":
    main()
