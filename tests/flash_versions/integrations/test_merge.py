"""Merging partial results of attention, against attention over all keys."""

import itertools

import pytest
import torch

from flash_versions import attention_reference
from flash_versions.integrations.distributed.merge import merge_attention_states

N = 7


def inputs(dtype=torch.float64):
    q = torch.randn(2, 5, 4, 8, dtype=dtype)
    k, v = torch.randn(2, 2, N, 2, 8, dtype=dtype)
    return q, k, v


def parts(q, k, v, *bounds):
    """(o, lse) over the keys between each two neighbouring bounds."""
    return [attention_reference(q, k[:, a:b], v[:, a:b]) for a, b in itertools.pairwise(bounds)]


def assert_equals_all_keys(merged, q, k, v):
    for found, expected in zip(merged, attention_reference(q, k, v)):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("cut", [0, 1, 3, N])
def test_keys_cut_anywhere(cut):
    q, k, v = inputs()
    (o_a, lse_a), (o_b, lse_b) = parts(q, k, v, 0, cut, N)
    assert_equals_all_keys(merge_attention_states(o_a, lse_a, o_b, lse_b), q, k, v)


def test_scores_of_any_size():
    """exp(lse) would overflow, or be 0 for both sides."""
    q, k, v = inputs()
    for size in (1e4, -1e4):
        k[..., 0], q[..., 0] = size, 1.0
        (o_a, lse_a), (o_b, lse_b) = parts(q, k, v, 0, 3, N)
        assert_equals_all_keys(merge_attention_states(o_a, lse_a, o_b, lse_b), q, k, v)


def test_queries_without_a_key():
    """Of four queries, one saw keys in a, one in b, one in both and one in neither."""
    empty_o, empty_lse = torch.tensor(float("nan")), torch.tensor(-torch.inf)
    o_a, o_b = torch.randn(2, 4, 1, 3)
    lse_a, lse_b = torch.randn(2, 1, 4)
    o_a[[1, 3]], lse_a[:, [1, 3]] = empty_o, empty_lse
    o_b[[0, 3]], lse_b[:, [0, 3]] = empty_o, empty_lse
    leaves = [x.requires_grad_() for x in (o_a, lse_a, o_b, lse_b)]
    o, lse = merge_attention_states(*leaves)
    assert torch.equal(o[0], o_a[0]) and torch.equal(o[1], o_b[1])
    assert torch.equal(lse[:, 0], lse_a[:, 0]) and torch.equal(lse[:, 1], lse_b[:, 1])
    assert o[2].isfinite().all() and lse[0, 2] > torch.maximum(lse_a, lse_b)[0, 2]
    assert torch.equal(o[3], torch.zeros(1, 3)) and lse[0, 3] == -torch.inf
    gradients = torch.autograd.grad([o.sum(), lse[:, :3].sum()], leaves)
    assert all(g.isfinite().all() for g in gradients)
    for g_o, g_lse in (gradients[:2], gradients[2:]):
        assert not g_o[3].any() and not g_lse[:, 3].any()


def test_gradients():
    q, k, v = inputs()
    leaves = [x.requires_grad_() for part in parts(q, k, v, 0, 3, N) for x in part]
    assert torch.autograd.gradcheck(merge_attention_states, leaves)


o_good, lse_good = torch.ones(2, 5, 4, 8), torch.ones(2, 4, 5)
REFUSED = {
    "o: rank": ((o_good[0, 0], lse_good, o_good, lse_good), r"o_a has shape \(4, 8\)"),
    "o: other shape": ((o_good, lse_good, o_good[1:], lse_good), r"o_b has shape \(1, 5, 4, 8\)"),
    "lse: layout": ((o_good, lse_good.mT, o_good, lse_good), r"lse_a has .* \(2, 4, 5\)"),
    "device": ((o_good, lse_good, o_good, lse_good.to("meta")), "lse_b is on meta, o_a is on cpu"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_tensor(name):
    arguments, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        merge_attention_states(*arguments)
