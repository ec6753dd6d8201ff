"""The sloppy checkpoint learns three-digit sums with TRL's trainer: what our own is compared with.

    python -m tests.benchmarks.training.trl_end_to_end --seed 0

Needs the extra `trl`. The answer is one line of JSON on standard output: the settings, TRL's mean
reward, completion length and seconds of every step, and the held-out accuracy before and after,
greedy and sampled, measured by our own engine and evaluation on the weights that TRL saved.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_callback import PrinterCallback
from trl import GRPOConfig, GRPOTrainer

import flash_versions
import transformer
from transformer.model.weights import load_model
from transformer.tasks.skills import Add
from transformer.training import byte_tokenizer as bytes_
from transformer.training.evaluate import evaluate

SLOPPY = Path(transformer.__file__).with_name("checkpoints") / "sloppy"
SKILL = "sums of three digits"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--model", type=Path, default=SLOPPY, help="checkpoint that learns (the shipped sloppy)")
    add("--seed", type=int, default=0, help="of the problems and the draws (0)")
    add("--steps", type=int, default=20, help="of the optimiser (20)")
    add("--prompts", type=int, default=16, help="per step (16)")
    add("--group", type=int, default=8, help="completions per prompt (8)")
    add("--max-tokens", type=int, default=64, help="of a completion (64)")
    add("--lr", type=float, default=3e-4, help="constant (3e-4)")
    add("--loss", default="dapo", help="TRL's loss_type (dapo)")
    add("--ratio", default="token", help="token or sequence (token)")
    add("--scale", default="group", help="of the advantages: group, batch or none (group)")
    add("--beta", type=float, default=0.0, help="weight of the KL divergence (0)")
    add("--problems", type=int, default=512, help="held out, for the evaluations (512)")
    return parser.parse_args()


def held_out(folder: Path, count: int) -> dict[str, Any]:
    """Accuracy and form on held-out sums, by our engine in fp32."""
    attention = partial(flash_versions.attention, version="sdpa")
    model = load_model(folder, attention, dtype=torch.float32)
    return {
        name: asdict(evaluate(model, count, temperature=temperature, skills=[SKILL])[SKILL])
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }


def main() -> None:
    arguments = parse()
    rng = Random(f"grpo {arguments.seed}")
    problems = [Add(3).sample(rng) for _ in range(arguments.steps * arguments.prompts)]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    check_prompt(tokenizer, problems[0])
    decode = bytes_.tokenizer().decode
    before = held_out(arguments.model, arguments.problems)
    steps: list[dict[str, float]] = []
    started = time.perf_counter()

    def reward(completion_ids: list[list[int]], index: list[int], **_: Any) -> list[float]:
        nonlocal started
        rewards = []
        for tokens, i in zip(completion_ids, index):
            stopped = tokens[-1] == bytes_.IM_END
            rewards.append(problems[i].reward(decode(tokens[:-1])) if stopped else 0.0)
        now = time.perf_counter()
        mean_length = sum(map(len, completion_ids)) / len(completion_ids)
        # From one rollout's reward to the next: an optimiser step and a rollout.
        record = {"reward": sum(rewards) / len(rewards), "length": mean_length}
        steps.append({**record, "seconds": round(now - started, 3)})
        print(f"step {len(steps)}: {steps[-1]}", file=sys.stderr)
        started = now
        return rewards

    with tempfile.TemporaryDirectory() as folder:
        rows = arguments.prompts * arguments.group
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
            processing_class=tokenizer,
            reward_funcs=reward,
            train_dataset=Dataset.from_dict(
                {"prompt": [p.messages for p in problems], "index": list(range(len(problems)))}
            ),
            args=GRPOConfig(
                output_dir=folder,
                seed=arguments.seed,
                max_steps=arguments.steps,
                per_device_train_batch_size=rows,
                gradient_accumulation_steps=1,
                num_generations=arguments.group,
                num_iterations=1,
                max_completion_length=arguments.max_tokens,
                shuffle_dataset=False,
                temperature=1.0,
                top_p=1.0,
                top_k=0,
                loss_type=arguments.loss,
                importance_sampling_level=arguments.ratio,
                scale_rewards=arguments.scale,
                epsilon=0.2,
                epsilon_high=0.28,
                beta=arguments.beta,
                learning_rate=arguments.lr,
                lr_scheduler_type="constant",
                adam_beta1=0.9,
                adam_beta2=0.95,
                weight_decay=0.0,
                max_grad_norm=1.0,
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
                gradient_checkpointing=False,
                report_to=[],
                logging_strategy="no",
                save_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)  # it writes to standard output
        started = time.perf_counter()
        trainer.train()
        trainer.save_model(folder)
        result = {
            "settings": vars(arguments) | {"model": str(arguments.model)},
            "steps": steps,
            "before": before,
            "after": held_out(Path(folder), arguments.problems),
        }
    print(json.dumps(result))


def check_prompt(tokenizer: Any, problem: Any) -> None:
    """Stop unless TRL will ask in the very tokens in which we do."""
    theirs = tokenizer.apply_chat_template(
        problem.messages, add_generation_prompt=True, return_dict=False
    )
    (message,) = problem.messages
    ours = [*bytes_.encode_turn(message["role"], message["content"]), *bytes_.encode_prompt()]
    if theirs != ours:
        raise SystemExit(f"TRL asks in other tokens: {theirs} instead of {ours}")


if __name__ == "__main__":
    main()
