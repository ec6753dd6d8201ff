"""Exact GRPO: bits that have to be equal, and what it costs; writes JSON.

    python -m tests.benchmarks.training.grpo_exact --out FILE           # on a GPU
    python -m tests.benchmarks.training.grpo_exact --out FILE --device cpu --tiny

Suites: "products", elements of a product whose bits depend on the number of rows or on the tile;
"where", the first tensor of a model in which decoding and prefill differ;
"model", logits whose bits depend on batch, padding, chunk, cache or decoding; "step", seconds of a
step of GRPO, exact and ordinary by turns; "layout", a step and a rollout with the prompt shared and
with a row for each answer; "run", runs on sums: the gap of sampler and trainer in every step.
"""

import json
import random
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from hashlib import sha256
from pathlib import Path
from unittest import mock

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
from tests.helpers.models.random_checkpoint import TINY
from transformer.generation.batch import prefill
from transformer.generation.chat import Tokenizer
from transformer.generation.sampling import Sampling
from transformer.model import exact
from transformer.model.cache import KVCache
from transformer.model.config import Config
from transformer.model.decoder import Transformer, choose_attention
from transformer.model.kernels.gemm import gemm, hopper
from transformer.model.kernels.gemm.config import GemmConfig
from transformer.model.paged_cache import PagedKVCache
from transformer.model.weights import CHECKPOINTS, load_model
from transformer.rl.learner import Learner, frozen
from transformer.rl.recipes import RECIPES, Settings
from transformer.rl.rollout import Policy, roll_out
from transformer.rl.trainer import Trainer, resolved
from transformer.tasks.task import Problem, Task
from transformer.training.parallel import ALONE

# The shape of Qwen2.5-0.5B.
HALF_BILLION = Config(
    vocab_size=151936, hidden_size=896, intermediate_size=4864, num_layers=24, num_heads=14,
    num_kv_heads=2, head_dim=64, max_positions=4096, qkv_bias=True, tied_embeddings=True,
)  # fmt: skip
COLUMNS = ("gap", "gap_max", "sampler_kl", "ratio_max", "reward", "rollout_seconds")  # of a run
SAID = 256  # token ids that a rollout may say: bytes, which the shipped tokenizer has


class Ask(Task):
    """Questions of a length, and rewards by lot."""

    name = "ask"

    def reward(self, completion, *arguments):
        return float(sha256(completion.encode()).digest()[0] % 2)


def policy_of(config, exactly, device, dtype, shared=False):
    """A random policy that says bytes and never ends."""
    name, _ = choose_attention(
        "auto", config, device, dtype, simulated=False, exactly=exactly, shared=shared
    )
    torch.manual_seed(0)
    attend = exact.attention_of(name, exactly, deterministic=True)
    with torch.device(device):
        model = Transformer(config, attend, "exact" if exactly else "auto")
    tokenizer = Tokenizer.load(CHECKPOINTS / "sloppy")
    banned = tuple(range(SAID, config.vocab_size))
    return Policy(model, tokenizer, None, (config.vocab_size - 1,), banned)


def products(device, tiny):
    """Elements that differ, of products of the model's shapes."""
    found = {}
    sizes = [(64, 48)] if tiny else [(896, 1152), (896, 9728), (4864, 896), (896, 151936)]
    for inner, columns in sizes:
        for dtype in (torch.bfloat16, torch.float32):
            x = torch.randn(300, inner, device=device).to(dtype)
            weight = torch.randn(columns, inner, device=device).to(dtype)
            whole = exact.linear(x, weight)
            parts = [exact.linear(x[i : i + n], weight) for i, n in ((0, 1), (1, 7), (8, 120))]
            differ = (torch.cat(parts) != whole[:128]).sum().item()
            if dtype == torch.bfloat16 and device.type == "cuda" and gemm.suits_hopper(x):
                for rows, wide, together in (
                    (64, 64, 0),
                    (64, 256, 1),
                    (128, 128, 0),
                    (128, 128, 1),
                ):
                    config = GemmConfig(
                        rows=rows, columns=wide, stages=3, ping_pong=not together,
                    )  # fmt: skip
                    other = torch.empty_like(whole)
                    hopper.gemm(x, weight, other, config=config)
                    differ += (other != whole).sum().item()
            found[f"{inner} x {columns}, {dtype}"] = differ
    return {"differ": sum(found.values()), "of": found}


def logits_of(model, rows, rng, device):
    """Elements of logits that are not those of each row alone, and how many were compared."""
    config, dtype = model.config, model.model.embed_tokens.weight.dtype
    alone = [model(torch.tensor([row], device=device))[0] for row in rows]
    width = max(map(len, rows)) + rng.randint(0, 30)
    right = torch.zeros(len(rows), width, dtype=torch.int64)
    for line, row in zip(right, rows):
        line[: len(row)] = torch.tensor(row)
    together = model(right.to(device))
    pairs = [(together[i, : len(row)], alone[i]) for i, row in enumerate(rows)]
    size = (config, len(rows), width + 8, device, dtype)
    for cache in (KVCache(*size), PagedKVCache(*size, page_size=rng.choice((16, 64, 256)))):
        if isinstance(cache, PagedKVCache):
            cache.allocate([width + 8] * len(rows))
        last = prefill(model, cache, rows, rng.choice((40, 300, 16384)))
        pairs += [(last[i], alone[i][-1]) for i in range(len(rows))]
        if rng.random() < 0.5:
            cache.fix()
        more = [[rng.randrange(config.vocab_size) for _ in range(3)] for _ in rows]
        for step in range(3):
            newest = torch.tensor([[x[step]] for x in more], device=device)
            logits = model(newest, cache, last_only=True)[:, -1]
            for i, row in enumerate(rows):
                whole = torch.tensor([row + more[i][: step + 1]], device=device)
                pairs.append((logits[i], model(whole, last_only=True)[0, -1]))
    differ = sum((x != y).sum().item() for x, y in pairs)
    return differ, sum(x.numel() for x, _ in pairs)


def model_of(name, dtype, device, tiny):
    """An exact model: one that ships, or a random one."""
    if name == "0.5B":
        return policy_of(TINY if tiny else HALF_BILLION, True, device, dtype).model.to(dtype)
    attend, _ = choose_attention("auto", TINY, device, dtype, simulated=False, exactly=True)
    return load_model(CHECKPOINTS / name, exact.attention_of(attend, True), device, dtype, "exact")


def invariance(name, dtype, trials, device, tiny):
    """Logits whose bits depend on the neighbours, in random trials."""
    model = model_of(name, dtype, device, tiny)
    config = model.config
    rng, longest = random.Random(0), 40 if tiny else min(900, config.max_positions - 40)
    differ = of = 0
    with torch.no_grad():
        for _ in range(trials):
            lengths = [rng.randint(1, longest) for _ in range(rng.randint(1, 3 if tiny else 12))]
            rows = [[rng.randrange(config.vocab_size) for _ in range(n)] for n in lengths]
            found = logits_of(model, rows, rng, device)
            differ, of = differ + found[0], of + found[1]
    return {"trials": trials, "differ": differ, "elements": of}


def recorded(model, tokens, cache=None):
    """What the layers compute of row 0's last token: [(name, values)]."""
    seen, attend, linear = [], model.attention, exact.linear

    def attention(q, k, v, **options):
        o = attend(q, k, v, **options)
        seen.extend((name, x[0, -1]) for name, x in zip(("q", "k", "v", "o"), (q, k, v, o)))
        return o

    def product(x, weight, bias=None, residual=None):
        y = linear(x, weight, bias, residual)
        if residual is not None:
            seen.append(("x", y[0] if y.dim() == 2 else y[0, -1]))
        return y

    patched = mock.patch.object(model, "attention", attention)
    with patched, mock.patch.object(exact, "linear", product):
        seen.append(("logits", model(tokens, cache, last_only=True)[0, -1]))
    return seen


def where(name, dtype, device, tiny):
    """The first tensor in which decoding, one row of 8, is not the prefill of that row."""
    model = model_of(name, dtype, device, tiny)
    rng, config = random.Random(0), model.config
    rows = [[rng.randrange(config.vocab_size) for _ in range(30 - 3 * i)] for i in range(8)]
    with torch.no_grad():
        alone = recorded(model, torch.tensor([rows[0]], device=device))
        cache = KVCache(config, len(rows), 40, device, dtype)
        prefill(model, cache, [row[:-1] for row in rows], 16384)
        step = recorded(model, torch.tensor([row[-1:] for row in rows], device=device), cache)
    pairs = [(i, x[0], int((x[1] != y[1]).sum())) for i, (x, y) in enumerate(zip(alone, step))]
    wrong = [f"tensor {i} of {len(pairs)}, {key}: {n} differ" for i, key, n in pairs if n]
    return {"first": wrong[0] if wrong else None, "tensors": len(wrong), "of": len(pairs)}


class Steps:
    """Steps of GRPO by a random policy: rollout and update."""

    def __init__(self, config, shape, device, dtype, **settings):
        self.prompts, self.length, self.group, self.answer = shape
        exactly, shared = settings.get("exact", False), settings.get("group_layout") == "shared"
        self.settings = Settings(
            max_tokens=self.answer, group=self.group, prompts=self.prompts,
            micro_batch=settings.pop("micro_batch", 16), **settings,
        )  # fmt: skip
        self.policy = policy_of(config, exactly, device, dtype, shared)
        self.sampler = frozen(self.policy.model, dtype)
        self.learner = Learner(self.settings, self.policy, dtype, device, ALONE)
        self.shared, self.device, self.step = shared, device, 0

    def __call__(self):
        """{"rollout": seconds, "learn": seconds, "gap_max": nats, "peak_gib": of the update}."""
        problems = [
            Problem(Ask(), (self.length, i), f"{i:<{self.length}}") for i in range(self.prompts)
        ]
        began = now(self.device)
        rollouts = roll_out(
            self.policy, self.sampler, problems, self.group, max_tokens=self.answer,
            sampling=Sampling(temperature=1.0), seed=self.step, shared=self.shared,
        )  # fmt: skip
        middle = now(self.device)
        forget_peak(self.device)
        measured = self.learner.learn(rollouts, 0)
        ended = now(self.device)
        self.step += 1
        with torch.no_grad():
            for name, weight in self.policy.model.named_parameters():
                self.sampler.get_parameter(name).copy_(weight)
        found = {"rollout": middle - began, "learn": ended - middle, "step": ended - began}
        return found | {"gap_max": measured.get("gap_max", 0.0), "peak_gib": peak_gib(self.device)}


class SumsSteps:
    """The same of the shipped recipe on sums."""

    def __init__(self, device, dtype, **settings):
        given = RECIPES["sums"] | settings | {"dtype": str(dtype).removeprefix("torch.")}
        self.trainer = Trainer(resolved(Settings(**given), device), device)
        self.device = device

    def __call__(self):
        """See `Steps`."""
        began = now(self.device)
        groups = self.trainer.roll_out()
        middle = now(self.device)
        measured = self.trainer.learn(groups.rollouts)
        ended = now(self.device)
        found = {"rollout": middle - began, "learn": ended - middle, "step": ended - began}
        return found | {"gap_max": measured.get("gap_max", 0.0)}


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


def step_suite(name, device, tiny, rounds, seconds):
    """Exact and ordinary steps."""
    dtype = torch.float32 if tiny else torch.bfloat16
    if name == "sums":
        small = {"prompts": 2, "group": 2, "max_tokens": 8} if tiny else {}
        make = partial(SumsSteps, device, dtype, **small)
    else:
        shape = (2, 10, 2, 6) if tiny else (16, 200, 8, 128)
        make = partial(Steps, TINY if tiny else HALF_BILLION, shape, device, dtype, micro_batch=32)
    return by_turns({"exact": make(exact=True), "ordinary": make()}, rounds, seconds)


def layout_suite(prompts, exactly, device, tiny, rounds, seconds):
    """A prompt of 2048 tokens with 16 answers of 256: shared, and with a row for each answer."""
    dtype = torch.float32 if tiny else torch.bfloat16
    shape = (prompts, 12, 2, 6) if tiny else (prompts, 2048, 16, 256)
    make = partial(Steps, TINY if tiny else HALF_BILLION, shape, device, dtype, exact=exactly)
    made = {name: make(group_layout=name) for name in ("shared", "rows")}
    return by_turns(made, rounds, seconds, warm_up=1)


def sums_run(steps, seed, exactly, device, seconds):
    """A run of the command: the gap in every step, and the scores; what there is of one that is not
    done when the script has run for so many seconds.

    Raises:
        RuntimeError: the command failed; its last words.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [
            sys.executable, "-m", "transformer.grpo", "--recipe", "sums", "--steps", str(steps),
            "--seed", str(seed), "--device", device.type, "--out", str(out), "--quiet",
        ]  # fmt: skip
        command += ["--exact"] * exactly
        if steps < 10:
            command += ["--prompts", "2", "--group", "2", "--eval-every", "0", "--max-tokens", "8"]
        try:
            left = max(1.0, seconds - passed())
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


def main():
    """Measure; the file is written again after each row."""
    suites = ("products", "where", "model", "step", "layout", "run")
    add = (made := parser(__doc__, seconds=500.0)).add_argument
    add("--suite", nargs="*", choices=suites, default=suites)
    add("--trials", type=int, default=20, help="of a model (20)")
    add("--rounds", type=int, default=8, help="timed steps of a contestant (8)")
    add("--steps", type=int, default=200, help="of a run (200)")
    add("--tiny", action="store_true", help="small models, to try the command")
    args = made.parse_args()
    device, tiny = torch.device(args.device), args.tiny
    document = new_document(device.type, protocol={"method": "wall clock of a step, median"})
    work = []
    for suite in args.suite:
        if suite == "products":
            work.append(({"suite": suite}, partial(products, device, tiny)))
        if suite == "where":
            for name in ("reinforced", "0.5B"):
                dtype = torch.float32 if tiny else torch.bfloat16
                work.append(
                    ({"suite": suite, "model": name}, partial(where, name, dtype, device, tiny))
                )
        if suite == "model":
            for dtype in (torch.bfloat16, torch.float32):
                for name in ("reinforced", "0.5B"):
                    trials = args.trials if dtype == torch.bfloat16 else max(1, args.trials // 4)
                    row = {"suite": suite, "model": name, "dtype": str(dtype)}
                    work.append((row, partial(invariance, name, dtype, trials, device, tiny)))
        if suite == "step":
            for name in ("sums", "0.5B"):
                measure = partial(step_suite, name, device, tiny, args.rounds, args.seconds)
                work.append(({"suite": suite, "model": name}, measure))
        if suite == "layout":
            for prompts, exactly in ((1, False), (16, False), (1, True)):
                measure = partial(layout_suite, prompts, exactly, device, tiny)
                measure = partial(measure, args.rounds, args.seconds)
                work.append(({"suite": suite, "prompts": prompts, "exact": exactly}, measure))
        if suite == "run":
            for seed, exactly in ((0, True), (0, False), (1, False), (2, False)):
                row = {"suite": suite, "seed": seed, "exact": exactly, "asked": args.steps}
                measure = partial(sums_run, args.steps, seed, exactly, device, args.seconds)
                work.append((row, measure))
    for row, measure in work:
        rows = [attempt(row, measure, args.seconds)]
        keep(document, args.out, rows, hidden=COLUMNS)


if __name__ == "__main__":
    main()
