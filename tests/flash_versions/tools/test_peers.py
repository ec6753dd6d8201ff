"""The other implementations: plain PyTorch is right, the libraries are called as they ask to be."""

from functools import partial

import pytest
import torch

from flash_versions.bench import peers
from flash_versions.versions.oracle.budget import assess
from flash_versions.versions.oracle.checks import check_fp8


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("name", ["plain", "torch fa2"])
def test_peers_are_right(name, causal, monkeypatch):
    """Unequal lengths where the mask is aligned as ours; fewer key heads."""
    monkeypatch.setattr(peers, "free_memory", lambda device: 2**30)
    make = partial(torch.randn, dtype=torch.bfloat16)
    m, n = (3, 9) if name == "plain" else (9, 9)
    q, k, v = (make(2, x, h, 16) for x, h in ((m, 4), (n, 2), (n, 2)))
    o = peers.PEERS[name].function(q, k, v, causal)
    for accuracy in assess(o, None, q, k, v, causal=causal).values():
        assert accuracy.ok


def test_plain_attention_refuses_what_does_not_fit(monkeypatch):
    q = torch.randn(1, 8, 2, 16)
    monkeypatch.setattr(peers, "free_memory", lambda device: 3 * 2 * 8 * 8 * 4)
    assert peers.plain(q, q, q, False).shape == q.shape
    with pytest.raises(MemoryError, match=r"5 score matrices take .* GiB are free"):
        peers.plain(q.requires_grad_(), q, q, False)
    monkeypatch.setattr(peers, "free_memory", lambda device: 3 * 2 * 8 * 8 * 4 - 1)
    with pytest.raises(MemoryError, match="3 score matrices"):
        peers.plain(q.detach(), q, q, False)


@pytest.mark.gpu
@pytest.mark.skipif(not peers.installed("cudnn"), reason="cuDNN's front end is not installed")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_cudnn_fp8_on_a_gpu(dim, causal):
    shape = (2, 512, 4, dim)
    q, k, v = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for _ in range(3))
    for _ in range(2):  # the second call finds a plan
        check_fp8(peers.cudnn_fp8(q, k, v, causal), causal, dim**-0.5, (q, k, v))
