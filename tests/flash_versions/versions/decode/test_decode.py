"""Decoding: few queries on many keys, everything that a call may ask for, split or whole."""

from functools import partial

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.simulator.checking import Watch
from flash_versions.versions.fa2 import combine, decode
from flash_versions.versions.fa2 import forward as fa2
from tests.helpers.kernels.budget import assert_right, random_inputs
from tests.helpers.kernels.watch import told
from tests.helpers.rotation import rotated

CONFIG = LaunchConfig(block_q=16, block_kv=32, num_warps=4, num_stages=1)  # 5 blocks in 150 keys
inputs = partial(
    random_inputs, M=1, N=150, heads=8, kv_heads=2, batch=2, head_dim=64, dtype=torch.bfloat16
)


def assert_decodes(request, config=CONFIG):
    """The kernel for decoding takes the request, and is within the budget of `o` and of the LSE; no
    access is out of order.
    """
    assert decode.decodes(request)
    with Watch({}).watching():
        o, lse, _ = fa2.forward(request, config)
    assert_right(request, o, lse)
    return o, lse


SHAPES = {
    "one head": {"heads": 1, "kv_heads": 1},
    "group of 4": {},
    "group of 7": {"heads": 14, "kv_heads": 2},
    "one key head": {"heads": 16, "kv_heads": 1},
    "three queries, fp16": {"M": 3, "heads": 10, "dtype": torch.float16},
    "head_dim 80": {"head_dim": 80},
    "head_dim 256": {"head_dim": 256, "batch": 1, "N": 70},
    "one key": {"N": 1},
}
SPLITS = [1, 3, 1000]


@pytest.mark.parametrize(("shape", "num_splits"), rotated(SHAPES, SPLITS, name=str))
def test_shapes(shape, num_splits, device):
    tensors = inputs(device, **SHAPES[shape])
    assert_decodes(make_request(*tensors, causal=True, num_splits=num_splits))


def options_of(device, batch=2):
    """What a call of 8 heads on 2, sequences of up to 150 keys, may ask for; the first two have
    starts.
    """
    starts = torch.tensor([3, 140] + [0] * (batch - 2), device=device)
    return {
        "full": {},
        "window": {"causal": True, "window": (70, None)},
        "window ahead": {"window": (40, 30)},
        "window behind": {"window": (70, None)},
        "softcap": {"softcap": 3.0},
        "sink": {"sink": torch.tensor([3.0, -5.0, 0.0, float("-inf")] * 2, device=device)},
        "alibi": {"causal": True, "alibi_slopes": torch.rand(batch, 8, device=device)},
        "dropout": {"dropout_p": 0.3},
        "starts": {"kv_starts": starts},
    }


LENGTHS = {"150, 33": [150, 33], "150, 141": [150, 141], "no key": [1, 0]}


@pytest.mark.parametrize(("lengths", "num_splits"), rotated(LENGTHS, SPLITS, name=str))
def test_lengths(lengths, num_splits, device):
    """Nothing past a sequence is read."""
    q, k, v = inputs(device)
    for b, length in enumerate(LENGTHS[lengths]):
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    given = {"kv_lengths": torch.tensor(LENGTHS[lengths], device=device)}
    assert_decodes(make_request(q, k, v, causal=True, num_splits=num_splits, **given))


@pytest.mark.parametrize(("name", "num_splits"), rotated(options_of("cpu"), SPLITS, name=str))
def test_options(name, num_splits, device):
    tensors = inputs(device, M=2)
    assert_decodes(make_request(*tensors, num_splits=num_splits, **options_of(device)[name]))


def test_strided_tensors(device):
    """Slices of a packed QKV, heads before rows, and one key for all rows (stride 0)."""
    q, k, v = torch.randn(2, 1, 3, 4, 64, device=device).bfloat16().unbind(2)
    assert_decodes(make_request(q, k, v))
    k, v = torch.randn(2, 2, 4, 40, 64, device=device).bfloat16().transpose(2, 3)
    assert_decodes(make_request(q, k, v, num_splits=2))
    assert_decodes(make_request(q, k[:, :1].expand_as(k), v, num_splits=2))


@pytest.mark.parametrize("num_splits", [2, 16, 17, 40])
def test_the_reduction_of_several_rounds(num_splits, device, monkeypatch):
    """A split without a visible key weighs nothing, in the first round or a later one."""
    monkeypatch.setattr(combine, "TILE", 16 * 64)  # 16 splits of head_dim 64 at once
    q, k, v = inputs(device, N=40 * 16, kv_heads=1, heads=1)
    lengths = torch.tensor([40 * 16, 17 * 16 + 1], device=device)
    config = LaunchConfig(16, 16, 4, 1)
    request = make_request(q, k, v, causal=True, kv_lengths=lengths, num_splits=num_splits)
    assert_decodes(request, config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts calls of simulated kernels")
def test_decoding_is_served_by_the_kernel_for_it(device, monkeypatch):
    calls, count = [], lambda *given: calls.append(1)
    monkeypatch.setattr(decode, "fold_block", told(decode.fold_block, count))
    q, k, v = inputs(device, N=64, heads=2)
    for version in ("fa2", "fa3", "fa4"):
        attention(q, k, v, causal=True, version=version)
        assert calls, version
        calls.clear()


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 16], ids=["splits", "shares"])
def test_same_bits_while_the_reduction_overlaps(batch):
    """Launched early, the reduction must not read what the programs have yet to write: thousands of
    launches, half of them in a CUDA graph, with new keys and lengths time and again.
    """
    q, k, v = inputs("cuda", batch=batch, N=8192, heads=32, kv_heads=8, head_dim=128)
    lengths = torch.full((batch,), 8192, device="cuda")
    call = partial(attention, q, k, v, causal=True, version="fa2", kv_lengths=lengths)
    call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = call()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(20):
        k.normal_()
        lengths.random_(0, 8193)
        first = call()
        torch.testing.assert_close(first, call(num_splits=1), rtol=2.0**-6, atol=2.0**-10)
        for _ in range(100):
            graph.replay()
            different += (replayed != first).any() + (call() != first).any()
    assert different.item() == 0
