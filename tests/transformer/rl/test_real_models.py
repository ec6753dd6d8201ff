"""GRPO on checkpoints that transformers wrote: another tokenizer, another template, other parts."""

import json
from pathlib import Path
from random import Random

import pytest
import torch

from tests.helpers.models.tiny_grpo import Count, make_trainer, options
from tests.transformer.generation.test_chat import QWEN3, byte_backend
from transformer import grpo
from transformer.model.weights import load_model
from transformer.rl.run import read_metrics

ENDS = [259, *range(64)]  # so many that a random model ends some of its answers
SIZES = {
    "vocab_size": 288,  # more than the tokenizer has
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "eos_token_id": ENDS,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


class Verbose(Count):
    """Say much."""

    name = "verbose"

    def reward(self, completion: str, *arguments) -> float:
        return len(completion) / 10


@pytest.fixture(params=["Qwen2", "Llama", "Qwen3Moe"])
def folder(request, tmp_path) -> Path:
    """A random checkpoint in the layout of Hugging Face."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{request.param}Config")(
        **SIZES, **(EXPERTS if request.param == "Qwen3Moe" else {})
    )
    getattr(transformers, f"{request.param}ForCausalLM")(config).save_pretrained(tmp_path / "model")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=byte_backend(), eos_token="<|im_end|>", pad_token="<s>"
    )
    tokenizer.chat_template = QWEN3
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


WITH = {"task": f"{__name__}:Verbose", "max_tokens": 8, "lr": 1e-2}


def test_a_policy_knows_what_its_checkpoint_says(folder):
    policy = make_trainer(folder, **WITH).policy
    assert policy.eos == tuple(ENDS)
    assert policy.banned == (256, *range(264, 288))  # the pad, and rows without a token
    [problem] = [Verbose().sample(Random(0))]
    text = f"<|im_start|>user\n{problem.question}<|im_end|>\n<|im_start|>assistant\n"
    assert policy.tokenizer.decode(policy.encode(problem)) == text


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"lora-rank": 2, "beta": 0.1}], ids=["all", "lora"])
def test_the_command_trains_it(folder, tmp_path, changes):
    argv = options(folder, **WITH, **changes, steps=2, eval_every=2)
    assert grpo.main([*argv, "--checkpointing", "--out", str(tmp_path / "run")]) == 0
    steps = [line for line in read_metrics(tmp_path / "run") if "step" in line]
    assert [line["learned"] > 0 for line in steps] == [True, True]
    assert all(line["gap_max"] < 1e-4 for line in steps)
    start, final = load_model(folder), load_model(tmp_path / "run" / "final")
    assert final.config == start.config
    moved = {
        name
        for name, weight in final.named_parameters()
        if not torch.equal(weight, start.get_parameter(name).bfloat16())
    }
    assert moved
    if changes:
        assert all(name.endswith("_proj.weight") for name in moved)
    settings = json.loads((tmp_path / "run" / "config.json").read_text())
    assert settings["checkpointing"] is True
