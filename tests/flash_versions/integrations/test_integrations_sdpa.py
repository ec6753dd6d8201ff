"""torch's scaled_dot_product_attention through our kernels, against torch's own in fp64.

The rule is the budget's: the distance to fp64 may be twice that of torch in fp32, plus one rounding
at the size of what is summed.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as held_since_import

from flash_versions.integrations import sdpa
from flash_versions.integrations.sdpa import use_for_sdpa

EPS = torch.finfo(torch.float32).eps
CASES = {
    "plain": ((2, 4, 9, 16), (2, 4, 7, 16), {}),
    "causal": ((2, 4, 9, 16), (2, 4, 9, 16), {"is_causal": True}),
    "causal, fewer queries": ((1, 2, 5, 16), (1, 2, 9, 16), {"is_causal": True}),
    "causal, more queries": ((1, 2, 9, 16), (1, 2, 5, 16), {"is_causal": True}),
    "grouped heads": ((2, 4, 5, 16), (2, 2, 5, 16), {"enable_gqa": True, "scale": 0.4}),
    "no batch, grouped heads": ((4, 5, 16), (2, 5, 16), {"enable_gqa": True}),
    "no heads": ((5, 16), (7, 16), {}),
    "five dimensions": ((2, 3, 2, 5, 16), (2, 3, 2, 5, 16), {"is_causal": True}),
    "keys shared by the batch": ((2, 4, 5, 16), (1, 1, 5, 16), {}),
    "no keys": ((1, 2, 3, 16), (1, 2, 0, 16), {}),
}


@pytest.fixture
def served(monkeypatch) -> list:
    """One entry for every call that our kernels serve."""
    calls = []

    def counted(*args, **options):
        o = attention(*args, **options)
        calls.append(options)
        return o

    attention = sdpa.attention
    monkeypatch.setattr(sdpa, "attention", counted)
    return calls


def inputs(q_shape, k_shape, device="cpu"):
    shapes = (q_shape, k_shape, k_shape)
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def results_of(tensors, run=None, **options):
    """o and the gradients of q, k and v; under `run`, a context."""
    function = held_since_import
    if run is None:
        o = function(*tensors, **options)
    else:
        with run:
            o = function(*tensors, **options)
    do = torch.linspace(-1, 1, o.numel(), dtype=o.dtype, device=o.device).view(o.shape)
    return o, *torch.autograd.grad(o, tensors, do)


@pytest.mark.parametrize("name", CASES)
def test_same_as_torch(name, device, served):
    q_shape, k_shape, options = CASES[name]
    tensors = inputs(q_shape, k_shape, device)
    exact = results_of([x.detach().double().requires_grad_() for x in tensors], **options)
    baseline = results_of(tensors, **options)
    found = results_of(tensors, use_for_sdpa("fa2"), **options)
    assert len(served) == 1
    for ours, torchs, truth in zip(found, baseline, exact):
        assert ours.shape == truth.shape and ours.dtype == torch.float32
        if truth.numel():
            error, budget = (ours - truth).abs().max(), (torchs - truth).abs().max()
            largest = max(x.detach().abs().max() for x in tensors if x.numel())
            assert error <= 2 * budget + EPS * max(largest, truth.abs().max())


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_transformer_encoder_layer(training, device, served):
    """nn.MultiheadAttention reaches F.scaled_dot_product_attention from within a torch function."""
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True).to(device)
    layer.train(training)
    x = torch.randn(2, 7, 32, device=device, requires_grad=True)
    mask = nn.Transformer.generate_square_subsequent_mask(7, device=device)
    for options in ({}, {"src_mask": mask, "is_causal": True}):
        expected = layer(x, **options)
        with use_for_sdpa("fa2"):
            found = layer(x, **options)
        assert (found - expected).abs().max() < 1e-5
        gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
        assert (gradients[0] - gradients[1]).abs().max() < 1e-4
        with use_for_sdpa("fa2"), torch.no_grad():  # torch would take a fused path of its own
            assert (layer(x, **options) - expected).abs().max() < 1e-5
    assert len(served) == 4


X = torch.randn(1, 2, 5, 16)
LEFT_TO_TORCH = {
    "attn_mask has shape \\(5, 5\\), and these kernels take no": (
        "fa2", (X, X, X, torch.ones(5, 5, dtype=torch.bool).tril(-1))
    ),
    "version 'fa1': q has dtype torch.f": ("fa1", (X.double(),) * 3),
}  # fmt: skip


@pytest.mark.parametrize("sentence", LEFT_TO_TORCH)
def test_what_is_refused_or_left_to_torch(sentence, served):
    version, given = LEFT_TO_TORCH[sentence]
    expected = F.scaled_dot_product_attention(*given)
    with use_for_sdpa(version), pytest.raises(ValueError, match=f"^{sentence}"):
        F.scaled_dot_product_attention(*given)
    with use_for_sdpa(version, otherwise="torch"):
        assert torch.equal(F.scaled_dot_product_attention(*given), expected) and not served
        F.scaled_dot_product_attention(X, X, X)
    assert len(served) == 1


def test_bad_arguments():
    with pytest.raises(ValueError, match="^version='fa9' is unknown; there are auto, fa1, fa2"):
        use_for_sdpa("fa9")
    with pytest.raises(ValueError, match="^otherwise='ignore' is unknown; there are 'raise' and"):
        use_for_sdpa(otherwise="ignore")
    with use_for_sdpa("fa2"), pytest.raises(ValueError, match="^query, key and value have shapes"):
        F.scaled_dot_product_attention(*inputs((2, 4, 5, 16), (3, 4, 5, 16)))


def test_contexts_nest_and_end(served):
    mask = torch.ones(5, 5, dtype=torch.bool)
    with pytest.raises(KeyError), use_for_sdpa("fa1"):
        F.scaled_dot_product_attention(X, X, X)
        with use_for_sdpa("sdpa", otherwise="torch"):
            F.scaled_dot_product_attention(X, X, X)  # calls the very function that is replaced
            F.scaled_dot_product_attention(X, X, X, mask)  # not even the outer one takes it
        F.scaled_dot_product_attention(X, X, X)
        raise KeyError
    F.scaled_dot_product_attention(X, X, X)
    assert [call["version"] for call in served] == ["fa1", "sdpa", "fa1"]


def test_compile(device):
    """Inside the context, around the context, and after it."""

    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True) + 1

    def opens_the_context(q, k, v):
        with use_for_sdpa("fa2"):
            return causal(q, k, v)

    tensors = inputs((1, 2, 5, 16), (1, 2, 9, 16), device)
    expected = opens_the_context(*tensors)
    torch._dynamo.reset()
    with use_for_sdpa("fa2"):
        compiled = torch.compile(causal, fullgraph=True, backend="aot_eager")
        found = compiled(*tensors)
    assert torch.equal(found, expected)
    for x, y in zip(*(torch.autograd.grad(o.sum(), tensors) for o in (found, expected))):
        assert torch.equal(x, y)
    assert torch.equal(compiled(*tensors), causal(*tensors))  # torch's own again
    compiled = torch.compile(opens_the_context, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*tensors), expected)
