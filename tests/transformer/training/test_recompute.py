"""Activation checkpointing: the same gradient out of less memory."""

import pytest
import torch

from tests.helpers.models.tiny_grpo import make_trainer
from tests.helpers.models.tiny_model import sdpa
from transformer.model.weights import load_model
from transformer.training.recompute import recompute_activations

TOKENS = torch.randint(256, (2, 30), generator=torch.Generator().manual_seed(1))


def kept(model) -> int:
    """Elements that a forward keeps for its backward; parameters, which are there anyway, apart."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in parameters:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(TOKENS)
    assert logits.requires_grad
    return sum(found.values())


def test_layers_keep_their_input_only(tempted):
    model = load_model(tempted, sdpa, dtype=torch.float32)
    everything = kept(model)
    recompute_activations(model)
    assert kept(model) < everything / 3
    with torch.no_grad():
        assert not model(TOKENS).requires_grad


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_steps_are_the_same_to_the_bit(tempted, dtype, lora_rank):
    trainers = [
        make_trainer(tempted, checkpointing=on, dtype=dtype, lora_rank=lora_rank, beta=0.1)
        for on in (False, True)
    ]
    for _ in range(2):
        groups = [trainer.roll_out().rollouts for trainer in trainers]
        assert [r.completion for r in groups[0]] == [r.completion for r in groups[1]]
        measured = [trainer.learn(rollouts) for trainer, rollouts in zip(trainers, groups)]
        assert measured[0] == measured[1]
    plain, checkpointed = (trainer.state()["model"] for trainer in trainers)
    torch.testing.assert_close(checkpointed, plain, rtol=0, atol=0)
