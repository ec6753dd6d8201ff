"""Short training runs of a tiny random model, kept step by step, for trainers of other libraries.

A run is judged as the kernels are: the distance of its losses and gradients to the same run in fp64
may be twice that of torch's SDPA in fp32, plus a few roundings. The optimizer is plain SGD: Adam
divides a gradient by its own size, so rounding errors of tiny gradients would become large steps.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from flash_versions.integrations import hf

hf.register()
OURS = "fv_fa2"
STEPS, LENGTH, VOCABULARY = 3, 24, 256
EPS = torch.finfo(torch.float32).eps
ROUNDINGS = 16  # a gradient is the sum of as many tokens' parts or more


@dataclass
class Steps:
    """What a run went through: the loss and all gradients of each step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)

    def add(self, loss: float, model: torch.nn.Module) -> None:
        """Keep a step, after its backward and before the optimizer's step."""
        named = [(n.removeprefix("_orig_mod."), p.grad) for n, p in model.named_parameters()]
        self.losses.append(loss)
        self.gradients.append({n: g.clone() for n, g in named if g is not None})


def random_model(implementation: str, dtype=torch.float32, vocabulary: int = VOCABULARY):
    """A Llama of two layers and grouped heads; the same weights in every call."""
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, max_position_embeddings=64,
        initializer_range=0.2, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        attn_implementation=implementation,
    )  # fmt: skip
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype)


def arguments(folder: Path, kind=transformers.TrainingArguments, **changes: Any):
    """A trainer's arguments for a run on the CPU that writes nothing."""
    given = {
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 2,
        "optim": "sgd", "learning_rate": 0.05, "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0, "use_cpu": True, "bf16": False, "report_to": [],
        "save_strategy": "no", "disable_tqdm": True, "seed": 0,
    }  # fmt: skip
    return kind(**{**given, **changes})


class Recorded:
    """Goes before a trainer's class and keeps its steps."""

    def training_step(self, model, inputs, *args, **kwargs):
        """The trainer's own step, then what it left."""
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.steps.add(float(loss), model)
        return loss

    def run(self) -> Steps:
        """Train; returns the steps."""
        self.steps = Steps()
        self.train()
        return self.steps


def random_rows(count: int, seed: int = 0) -> list[list[int]]:
    """Token sequences of different lengths up to LENGTH."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, LENGTH + 1, (count,), generator=g).tolist()
    return [torch.randint(3, VOCABULARY, (n,), generator=g).tolist() for n in lengths]


def distance(run: Steps, other: Steps) -> float:
    """The largest distance of a loss, or of gradients relative to the largest one of a step."""
    assert len(run.losses) == len(other.losses) == len(run.gradients) == len(other.gradients)
    found = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(run.losses, other.losses)]
    for mine, theirs in zip(run.gradients, other.gradients):
        assert mine.keys() == theirs.keys()
        largest = max(g.abs().max() for g in theirs.values())
        found += [float((mine[n] - g).abs().max() / largest) for n, g in theirs.items()]
    return max(found)


def check(run: Callable[[str, torch.dtype], Steps]) -> None:
    """Hold the steps of `run(implementation, dtype)` with ours against those with SDPA."""
    exact = run("sdpa", torch.float64)
    assert len(exact.losses) == len(set(exact.losses)) == STEPS
    plain, ours = (run(name, torch.float32) for name in ("sdpa", OURS))
    limit = 2 * distance(plain, exact) + ROUNDINGS * EPS
    assert limit < 2e-5, "the bound would let a wrong kernel pass"
    assert distance(ours, exact) <= limit
