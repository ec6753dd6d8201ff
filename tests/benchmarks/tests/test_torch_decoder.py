"""The decoder in torch alone says what ours says, uncompiled and compiled."""

from dataclasses import replace

import pytest
import torch

from tests.benchmarks.tests.test_generate_speed import TINY
from tests.benchmarks.transformer.generate_speed import NoText, random_model
from tests.benchmarks.transformer.torch_decoder import TorchDecoder
from transformer.generation.engine import generate

SHAPES = {
    "Llama": TINY,
    "Qwen2": replace(TINY, qkv_bias=True, num_layers=2, tied_embeddings=False),
    "Qwen3": replace(TINY, qk_norm=True, num_kv_heads=2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_same_tokens(name, device):
    """Weights as large as these make the tokens differ from row to row."""
    model = random_model(SHAPES[name], None, torch.device(device), torch.float32, "torch")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
    prompts = torch.randint(64, (3, 9))
    completions, _ = generate(model, NoText(), prompts.tolist(), max_tokens=12)
    expected = [completion.tokens for completion in completions]
    assert len({tuple(tokens) for tokens in expected}) == 3
    theirs = TorchDecoder(model, 3, 21)
    if name != "Llama":  # one is enough to show that the compiled step is the same
        theirs.step = theirs.forward
    assert theirs.generate(prompts.to(device), 12).tolist() == expected


def test_a_model_with_more_parts_is_refused(device):
    model = random_model(
        replace(TINY, logits_softcap=30.0), None, torch.device(device), torch.float32, "torch"
    )
    with pytest.raises(ValueError, match="more than a Llama or a Qwen"):
        TorchDecoder(model, 1, 8)
