"""A mixture of experts against each expert by itself: values, gradients, the grouped product."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flash_versions.versions.oracle.budget import Accuracy
from tests.helpers.models.family_checkpoints import attention
from tests.transformer.model.test_model import CONFIG, make_model
from transformer.model import experts
from transformer.model.experts import MixtureOfExperts, grouped

MIXED = {"num_experts": 5, "experts_per_token": 2, "expert_size": 24, "dense_layers": (1,)}


def mixed(mixture: MixtureOfExperts, h: torch.Tensor, limit: float) -> torch.Tensor:
    """The definition: every expert for every token, most of them with the weight 0."""
    logits = mixture.gate(h)
    largest = logits.topk(mixture.chosen, -1).indices
    chosen = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, largest, True)
    weights = logits.softmax(-1) * chosen
    if mixture.normed:
        weights = weights / weights.sum(-1, keepdim=True)
    total = torch.zeros_like(h)
    stacked = dict(mixture.experts.named_parameters())
    for e in range(logits.shape[-1]):
        own = {name: parameter[e] for name, parameter in stacked.items()}
        gate_up = F.linear(h, own["gate_up_proj"], own.get("gate_up_proj_bias"))
        gate, up = gate_up.chunk(2, -1)
        inner = F.silu(gate) * up
        if limit:  # gpt-oss's kind
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        y = F.linear(inner, own["down_proj"], own.get("down_proj_bias"))
        total = total + weights[..., e, None] * y
    return total


@pytest.mark.parametrize(
    ("normed", "bias", "limit"), [(True, False, None), (False, True, None), (True, True, 0.2)]
)
def test_values_and_gradients_are_those_of_the_definition(normed, bias, limit):
    shape = {"normed_routing": normed, "mlp_bias": bias, "swiglu_limit": limit}
    model = make_model(replace(CONFIG, **MIXED, **shape), attention).requires_grad_(True)
    mixture = model.model.layers[0].mlp
    x = torch.randn(2, 7, 48, dtype=torch.float64, requires_grad=True)
    wanted = [x, *mixture.parameters()]
    direction = torch.randn_like(x)
    found, expected = mixture(x, nn.Identity()), mixed(mixture, x, limit)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    gradients = (torch.autograd.grad((y * direction).sum(), wanted) for y in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        assert theirs.abs().max() > 0
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ends", [[0, 4, 4, 9, 13], [13] * 5, [0, 0, 0, 0, 13]], ids=str)
def test_the_grouped_product_of_torch_is_ours(monkeypatch, dtype, ends):
    """What GPUs do in one kernel, by torch's own version for CPUs; also the gradients."""
    rows, weight = torch.randn(13, 16), torch.randn(5, 24, 16)
    bounds = torch.tensor(ends, dtype=torch.int32)
    direction, found = torch.randn(13, 24), []
    for kind, in_one in ((torch.float64, False), (dtype, False), (dtype, True)):
        monkeypatch.setattr(experts, "in_one_product", lambda weight, in_one=in_one: in_one)
        given = [x.to(kind).requires_grad_() for x in (rows, weight)]
        product = grouped(*given, bounds)
        gradients = torch.autograd.grad(product, given, direction.to(kind))
        found.append([x.detach().double() for x in (product, *gradients)])
    for exact, plain, actual in zip(*found, strict=True):
        errors = [(x - exact).abs().max().item() for x in (actual, plain)]
        rounding = torch.finfo(dtype).eps * exact.abs().max().item()
        assert Accuracy(*errors, rounding).ok, errors
