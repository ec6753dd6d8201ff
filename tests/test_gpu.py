"""What only a GPU can show: the same bits a thousand times, lengths past 2^31 elements, many
programs.
"""

import pytest
import torch

from flash_versions import VERSIONS, attention
from flash_versions.budget import assess

pytestmark = pytest.mark.gpu
by_version = pytest.mark.parametrize("version", VERSIONS)


def assert_within_budget(o, q, k, v, **options):
    accuracy = assess(o, None, q, k, v, **options)["o"]
    assert accuracy.ok, str(accuracy)


@by_version
@pytest.mark.parametrize("M", [1, 300], ids=["decode", "prefill"])
def test_a_thousand_launches_give_the_same_bits(version, M):
    q = torch.randn(2, M, 8, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 1000, 2, 128, device="cuda", dtype=torch.bfloat16)
    first = attention(q, k, v, causal=True, version=version)
    for _ in range(1000):
        assert torch.equal(attention(q, k, v, causal=True, version=version), first)


@by_version
def test_a_cache_of_more_than_32_bits_of_elements(version):
    """One key head of 2^31 / 64 + 100 keys: the last rows lie past 2^31 elements."""
    N, D = 2**31 // 64 + 100, 64
    k, v = (torch.randn(1, N, 1, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k[:, -50:] = 4.0  # scores of 128, e^100 times all others: the last keys decide
    q = torch.full((1, 1, 1, D), 4.0, device="cuda", dtype=torch.bfloat16)
    o = attention(q, k, v, version=version)
    assert_within_budget(o, q, k[:, -50:], v[:, -50:])


@by_version
def test_more_heads_than_a_grid_axis_holds(version):
    """70,000 (batch, head) pairs: more than the 65,535 of CUDA's second and third grid axis."""
    q, k, v = torch.randn(3, 7000, 2, 10, 16, device="cuda", dtype=torch.bfloat16)
    o = attention(q, k, v, version=version)
    assert_within_budget(o, q, k, v)


@by_version
@pytest.mark.parametrize("S", [1, 63, 64, 65, 127, 128, 129, 1000, 2047, 4096])
@pytest.mark.parametrize("D", [64, 128, 256])
def test_lengths_round_the_tile_sizes(version, S, D):
    q, k, v = torch.randn(3, 1, S, 2, D, device="cuda", dtype=torch.bfloat16)
    assert_within_budget(attention(q, k, v, causal=True, version=version), q, k, v, causal=True)


@by_version
def test_long_decode_with_the_splits_of_the_heuristic(version):
    q = torch.randn(1, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, 50_001, 8, 128, device="cuda", dtype=torch.bfloat16)
    assert_within_budget(attention(q, k, v, version=version), q, k, v)


@by_version
def test_memory_grows_with_the_length_not_its_square(version):
    def peak(S):
        q, k, v = torch.randn(3, 1, S, 4, 64, device="cuda", dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attention(q, k, v, causal=True, version=version)
        return torch.cuda.max_memory_allocated() - before

    assert peak(16384) < 2.2 * peak(8192)


def test_tensors_on_cpu_beside_a_gpu_are_refused_in_words():
    x = torch.ones(1, 2, 1, 64)
    with pytest.raises(ValueError, match="CPU tensors need Triton's interpreter, which is off"):
        attention(x, x, x, version="fa2")
