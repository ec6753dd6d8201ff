"""What only FA2 has: splitting the keys, the reduction, and the choice of how many splits."""

import pytest
import torch

from flash_versions import attention
from flash_versions.budget import assess
from flash_versions.fa2 import forward as fa2
from flash_versions.version import LaunchConfig

CONFIG = LaunchConfig(block_q=16, block_kv=32, num_warps=4, num_stages=2)  # 5 blocks in 150 keys


def inputs(device, M=7, N=150, heads=4, kv_heads=2, dtype=torch.float32, batch=2, head_dim=64):
    q = torch.randn(batch, M, heads, head_dim, device=device)
    k, v = torch.randn(2, batch, N, kv_heads, head_dim, device=device)
    return tuple(x.to(dtype) for x in (q, k, v))


@pytest.mark.parametrize("num_splits", [1, 2, 3, 4, 5, 6, 1000])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_any_number_of_splits(num_splits, causal, device):
    q, k, v = inputs(device)
    o, lse = fa2.forward(q, k, v, causal=causal, scale=0.125, num_splits=num_splits, config=CONFIG)
    for name, accuracy in assess(o, lse, q, k, v, causal=causal).items():
        assert accuracy.ok, f"{name}: {accuracy}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "shape",
    [
        {"M": 1, "heads": 8, "kv_heads": 2},
        {"M": 1, "heads": 3, "kv_heads": 1, "head_dim": 80},
        {"M": 40, "N": 130},
        {"M": 20, "N": 300, "head_dim": 256, "batch": 1},
    ],
    ids=str,
)
def test_split_shapes(shape, dtype, device):
    q, k, v = inputs(device, dtype=dtype, **shape)
    o, lse = attention(q, k, v, causal=True, num_splits=3, version="fa2", return_lse=True)
    for name, accuracy in assess(o, lse, q, k, v, causal=True).items():
        assert accuracy.ok, f"{name}: {accuracy}"


def test_splits_with_lengths_of_their_own(device):
    q, k, v = inputs(device, M=1, batch=4)
    lengths = torch.tensor([150, 33, 1, 0], device=device)
    o, lse = fa2.forward(
        q, k, v, causal=True, scale=0.125, kv_lengths=lengths, num_splits=5, config=CONFIG
    )
    for name, accuracy in assess(o, lse, q, k, v, causal=True, kv_lengths=lengths).items():
        assert accuracy.ok, f"{name}: {accuracy}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls in the interpreter")
@pytest.mark.parametrize(("causal", "masked"), [(False, 0), (True, 8)], ids=["full", "causal"])
def test_only_blocks_that_are_cut_pay_for_the_mask(causal, masked, monkeypatch):
    """256 queries in tiles of 64, blocks of 32 keys: the diagonal cuts two blocks of each tile."""
    calls, mask_scores = [], fa2.mask_scores
    monkeypatch.setattr(fa2, "mask_scores", lambda *a, **k: calls.append(1) or mask_scores(*a, **k))
    q, k, v = inputs("cpu", M=256, N=256, heads=1, kv_heads=1, batch=1, head_dim=16)
    fa2.forward(q, k, v, causal=causal, scale=0.1, config=LaunchConfig(64, 32, 4, 2))
    assert len(calls) == masked


def test_more_splits_than_blocks_is_one_program_per_block(device):
    q, k, v = inputs(device)
    run = {"causal": False, "scale": 0.125, "config": CONFIG}
    one_each = fa2.forward(q, k, v, num_splits=5, **run)
    more = fa2.forward(q, k, v, num_splits=64, **run)
    assert torch.equal(one_each[0], more[0]) and torch.equal(one_each[1], more[1])


@pytest.mark.parametrize(
    ("programs", "n_blocks", "multiprocessors", "expected"),
    [
        (1024, 64, 132, 1),  # prefill: the grid fills the GPU
        (106, 64, 132, 1),  # 80 % full is full
        (8, 2048, 132, 33),  # one query, 8 key heads, a long cache: two programs for each SM
        (8, 64, 132, 16),  # a short cache: at least four blocks each
        (8, 3, 132, 1),
        (1, 10_000, 132, 264),
        (4, 100, 1, 1),  # the interpreter
    ],
)
def test_heuristic(programs, n_blocks, multiprocessors, expected):
    assert fa2.choose_num_splits(programs, n_blocks, multiprocessors) == expected
