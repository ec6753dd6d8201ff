"""Exact GRPO: its gap, which has to be 0, and what it costs; writes JSON.

    python -m tests.benchmarks.training.grpo_exact --out FILE           # on a GPU
    python -m tests.benchmarks.training.grpo_exact --out FILE --device cpu --tiny

Suites: "step", seconds of a step of GRPO, exact and ordinary by turns; "layout", a step and a
rollout with the prompt shared and with a row for each answer; "run", runs on sums: the gap of
sampler and trainer in every step.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch

from flash_versions.bench.document import new_document
from tests.benchmarks.harness import (
    attempt,
    forget_peak,
    in_time,
    keep,
    now,
    parser,
    passed,
    peak_gib,
)
from tests.helpers.models.random_checkpoint import QWEN, TINY, write_checkpoint
from transformer.rl.recipes import RECIPES, Settings
from transformer.rl.trainer import Trainer, resolved
from transformer.tasks.task import Task

COLUMNS = ("gap", "gap_max", "sampler_kl", "ratio_max", "reward", "rollout_seconds")  # of a run


class Ask(Task):
    """Questions of a length, and rewards by lot."""

    name, length = "ask", 200

    def arguments(self, rng):
        return (rng.randrange(10**6),)

    def question(self, rng, number):
        return f"{number:<{self.length}}"

    def answer(self, number):
        return "0"

    def reward(self, completion, *arguments):
        return float(sha256(completion.encode()).digest()[0] % 2)


def asked(folder, tiny, shape):
    """Settings for questions to a random model, whose weights are written to a folder. The shape:
    prompts, their length, answers to each, and tokens of an answer.
    """
    write_checkpoint(Path(folder), TINY if tiny else QWEN)
    prompts, Ask.length, group, tokens = shape
    sizes = {"prompts": prompts, "group": group, "max_tokens": tokens, "micro_batch": 16}
    return {"model": folder, "task": f"{__name__}:Ask", **sizes}


class Steps:
    """Steps of GRPO: rollout and update."""

    def __init__(self, args, **settings):
        self.device = torch.device(args.device)
        given = Settings(dtype="float32" if args.tiny else "bfloat16", **settings)
        self.trainer = Trainer(resolved(given, self.device), self.device)

    def __call__(self):
        """{"rollout": seconds, "learn": seconds, "gap_max": nats, "peak_gib": of the update}."""
        began = now(self.device)
        rollouts = self.trainer.roll_out().rollouts
        middle = now(self.device)
        forget_peak(self.device)
        measured = self.trainer.learn(rollouts)
        ended = now(self.device)
        found = {"rollout": middle - began, "learn": ended - middle, "step": ended - began}
        return found | {"gap_max": measured.get("gap_max", 0.0), "peak_gib": peak_gib(self.device)}


def by_turns(made, rounds, seconds, warm_up=2):
    """Medians of steps by turns, and the ratios of the first contestant to the second; no round but
    the first begins after so many seconds of the script.
    """
    for _ in range(warm_up):
        for step in made.values():
            step()
    found = {name: [call()] for name, call in made.items()}
    for _ in in_time(range(1, rounds), seconds):
        for name, call in made.items():
            found[name].append(call())
    of = {
        name: {
            key: statistics.median(x[key] for x in rows)
            for key in rows[0]
            if rows[0][key] is not None
        }
        for name, rows in found.items()
    }
    first, second = of.values()
    ratios = {key: x / second[key] for key, x in first.items() if key != "gap_max"}
    gaps = {name: max(x["gap_max"] for x in rows) for name, rows in found.items()}
    taken = min(map(len, found.values()))
    return {"rounds": taken, "medians": of, "ratios": ratios, "largest_gap": gaps}


def step_suite(args, model):
    """Exact and ordinary steps."""
    with tempfile.TemporaryDirectory() as folder:
        if model == "sums":
            small = {"prompts": 2, "group": 2, "max_tokens": 8} if args.tiny else {}
            make = partial(Steps, args, **RECIPES["sums"] | small)
        else:
            shape = (2, 10, 2, 6) if args.tiny else (16, 200, 8, 128)
            make = partial(Steps, args, **asked(folder, args.tiny, shape) | {"micro_batch": 32})
        return by_turns({"exact": make(exact=True), "ordinary": make()}, args.rounds, args.seconds)


def layout_suite(args, prompts, exact):
    """A prompt of 2048 tokens with 16 answers of 256: shared, and with a row for each answer."""
    with tempfile.TemporaryDirectory() as folder:
        shape = (prompts, 12, 2, 6) if args.tiny else (prompts, 2048, 16, 256)
        make = partial(Steps, args, exact=exact, **asked(folder, args.tiny, shape))
        made = {name: make(group_layout=name) for name in ("shared", "rows")}
        return by_turns(made, args.rounds, args.seconds, warm_up=1)


def sums_run(args, seed, exact):
    """A run of the command: the gap in every step, and the scores; what there is of one that is not
    done when the script has run for so many seconds.

    Raises:
        RuntimeError: the command failed; its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, "-m", "transformer.grpo", "--recipe", "sums", "--seed", str(seed),
            "--steps", str(args.steps), "--device", args.device, "--out", str(out), "--quiet",
        ]  # fmt: skip
        command += ["--exact"] * exact
        if args.steps < 10:
            command += ["--prompts", "2", "--group", "2", "--eval-every", "0", "--max-tokens", "8"]
        try:
            left = max(1.0, args.seconds - passed())
            subprocess.run(command, check=True, timeout=left, capture_output=True, text=True)
        except subprocess.TimeoutExpired:
            pass
        except subprocess.CalledProcessError as error:
            raise RuntimeError(error.stderr.strip().rpartition("\n")[2]) from error
        lines = [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
    taken = [x for x in lines if "step" in x]
    gaps = [x["gap_max"] for x in taken if "gap_max" in x]  # none where no group taught anything
    return {
        "steps": len(taken),
        "compared": len(gaps),
        "largest_gap": max(gaps, default=None),
        **{key: [x.get(key) for x in taken] for key in COLUMNS},
        "held_out": [x for x in lines if "evaluation" in x],
    }


# What each suite measures, and of what: fields of its rows.
SUITES = {
    "step": (step_suite, [{"model": name} for name in ("sums", "0.5B")]),
    "layout": (
        layout_suite, [{"prompts": n, "exact": x} for n, x in ((1, False), (16, False), (1, True))]
    ),
    "run": (
        sums_run,
        [{"seed": n, "exact": x} for n, x in ((0, True), (0, False), (1, False), (2, False))],
    ),
}  # fmt: skip


def main():
    """Measure; the file is written again after each row."""
    add = (made := parser(__doc__, seconds=500.0)).add_argument
    add("--suite", nargs="*", choices=SUITES, default=tuple(SUITES))
    add("--rounds", type=int, default=8, help="timed steps of a contestant (8)")
    add("--steps", type=int, default=200, help="of a run (200)")
    add("--tiny", action="store_true", help="small models, to try the command")
    args = made.parse_args()
    document = new_document(args.device, protocol={"method": "wall clock of a step, median"})
    for suite in args.suite:
        measure, cases = SUITES[suite]
        for case in cases:
            row = {"suite": suite, **case} | ({"asked": args.steps} if suite == "run" else {})
            row = attempt(row, partial(measure, args, **case), args.seconds)
            keep(document, args.out, [row], hidden=COLUMNS)


if __name__ == "__main__":
    main()
