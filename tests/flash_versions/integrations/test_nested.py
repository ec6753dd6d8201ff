"""Nested tensors, against each sequence for itself."""

import pytest
import torch

from flash_versions import attention
from flash_versions.integrations.nested import nested_attention

LENGTHS = (70, 1, 130)
OTHERS = (30, 64, 7)


def jagged(tensors):
    return torch.nested.nested_tensor(tensors, layout=torch.jagged, requires_grad=True)


def drawn(lengths, heads, device):
    return [torch.randn(n, heads, 32, device=device) for n in lengths]


@pytest.mark.parametrize(("lengths", "causal"), [(LENGTHS, True), (OTHERS, False)])
def test_each_sequence_for_itself(lengths, causal, device):
    """The same bits as packed sequences, which other tests hold against the oracle."""
    qs = drawn(LENGTHS, 4, device)
    ks, vs = drawn(lengths, 2, device), drawn(lengths, 2, device)
    q, k, v = jagged(qs), jagged(ks), jagged(vs)
    o = nested_attention(q, k, v, causal=causal, version="fa2")
    assert o.layout == torch.jagged and o.offsets() is q.offsets()
    o.values().square().sum().backward()
    leaves = [torch.cat(x).requires_grad_() for x in (qs, ks, vs)]
    given = {"cu_seqlens_q": q.offsets().int(), "cu_seqlens_k": k.offsets().int()}
    expected = attention(*leaves, causal=causal, version="fa2", **given)
    expected.square().sum().backward()
    assert torch.equal(o.values(), expected)
    for found, leaf in zip((q, k, v), leaves):
        assert torch.equal(found.grad.values(), leaf.grad)


def test_one_set_of_lengths(device):
    """Of q, k and v that share their offsets, as a projection makes them."""
    x = jagged(drawn(LENGTHS, 2, device))
    o = nested_attention(x, x, x, causal=True, version="fa2")
    assert o.offsets() is x.offsets()


def test_bad_input(device):
    q = jagged(drawn(LENGTHS, 2, device))
    dense = torch.randn(3, 8, 2, 32, device=device)
    with pytest.raises(ValueError, match="k is no jagged tensor"):
        nested_attention(q, dense, dense)
    with pytest.raises(ValueError, match="q has 4 dimensions with the lengths in number 2"):
        nested_attention(q.transpose(1, 2), q, q)
    fewer = jagged(drawn(LENGTHS[:2], 2, device))
    with pytest.raises(ValueError, match="q has 3 sequences, k 2 and v 2; give as many"):
        nested_attention(q, fewer, fewer)
    with pytest.raises(ValueError, match="return_lse=True is not possible"):
        nested_attention(q, q, q, return_lse=True)
    part = torch.nested.narrow(dense, 1, *torch.tensor([[0, 2, 1], [3, 1, 4]], device=device),
                               layout=torch.jagged)  # fmt: skip
    with pytest.raises(ValueError, match="q has rows of no sequence"):
        nested_attention(part, part, part)
