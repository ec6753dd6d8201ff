"""The yardstick itself: wrong kernels must not pass it, in any dtype."""

import pytest
import torch
import triton
import triton.language as tl

from flash_versions import attention, attention_reference
from flash_versions.budget import assess
from flash_versions.fa2 import forward as fa2
from flash_versions.version import LaunchConfig

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def inputs(request):
    q = torch.randn(2, 60, 4, 64)
    k, v = torch.randn(2, 2, 100, 2, 64)
    return tuple(x.to(request.param) for x in (q, k, v))


def no_scale(q, k, v):
    return attention(q, k, v, causal=True, scale=1.0, return_lse=True)


def mask_off_by_one(q, k, v):
    one_more = torch.cat((q[:, :1], q), 1)  # shifts the bottom-right diagonal by one
    o, lse = attention(one_more, k[:, :-1], v[:, :-1], causal=True, return_lse=True)
    return o[:, 1:], lse[:, :, 1:]


def top_left_diagonal(q, k, v):
    return attention(q, k[:, :60], v[:, :60], causal=True, return_lse=True)


def last_block_dropped(q, k, v):
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    last = attention(q[:, -1:], k[:, :96], v[:, :96])
    return torch.cat((o[:, :-1], last), 1), lse


def one_nan(q, k, v):
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    o[1, 30, 2, 5] = float("nan")
    return o, lse


def lse_in_log2(q, k, v):
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    return o, lse * 1.4426950408889634


def wrong_heads(q, k, v):
    return attention(q, k.flip(2), v.flip(2), causal=True, return_lse=True)


WRONG = [
    no_scale, mask_off_by_one, top_left_diagonal, last_block_dropped, one_nan, lse_in_log2,
    wrong_heads,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_wrong_results_are_rejected(wrong, inputs):
    accuracies = assess(*wrong(*inputs), *inputs, causal=True)
    assert not all(accuracy.ok for accuracy in accuracies.values())


@triton.jit
def step_without_rescale(s, row_max, row_sum, scale_log2):
    """FA2's softmax step, but what was summed under the old maximum is not rescaled."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - new_max[:, None])
    return p, new_max, row_sum + tl.sum(p, 1), tl.exp2(new_max * 0)


@triton.jit
def step_without_guard(s, row_max, row_sum, scale_log2):
    """FA2's softmax step without the guard for rows that have not seen a key."""
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    p = tl.exp2(s * scale_log2 - new_max[:, None])
    alpha = tl.exp2(row_max - new_max)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="swaps code that only the interpreter re-reads"
)
@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(
    ("step", "queries"),
    [(step_without_rescale, 60), (step_without_guard, 130)],
    ids=["rescale", "guard"],
)  # fmt: skip
def test_wrong_kernels_are_rejected(step, queries, inputs, monkeypatch):
    _, k, v = inputs
    q = torch.randn(2, queries, 4, 64).to(k.dtype)
    config = LaunchConfig(block_q=64, block_kv=32, num_warps=4, num_stages=1)
    run = {"causal": True, "scale": 0.125, "config": config}
    right = assess(*fa2.forward(q, k, v, **run), q, k, v, causal=True)
    assert all(accuracy.ok for accuracy in right.values())
    monkeypatch.setattr(fa2, "softmax_step", step)
    wrong = assess(*fa2.forward(q, k, v, **run), q, k, v, causal=True)
    assert not all(accuracy.ok for accuracy in wrong.values())


@pytest.mark.parametrize("wrong", [torch.zeros_like, lambda o: torch.full_like(o, torch.nan)])
def test_an_overflowing_baseline_excuses_nothing(wrong):
    q, k, v = (300 * torch.randn(1, 20, 1, 64).half() for _ in range(3))
    assert not attention_reference(q, k, v)[0].isfinite().all()
    assert not assess(wrong(q), None, q, k, v)["o"].ok
    assert assess(attention(q, k, v), None, q, k, v)["o"].ok


def test_plain_pytorch_is_within_its_own_budget(inputs):
    o, lse = attention_reference(*inputs, causal=True)
    assert all(accuracy.ok for accuracy in assess(o, lse, *inputs, causal=True).values())
