"""Decoding of sequences of different lengths: equal shares of all blocks, in any layout."""

from functools import partial
from operator import index

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.simulator.checking import Watch
from flash_versions.simulator.state import here
from flash_versions.versions.fa2 import decode, stream_k
from tests.flash_versions.versions.decode.test_decode import options_of
from tests.flash_versions.versions.test_packed import in_pages
from tests.helpers.kernels.budget import assert_right, random_inputs
from tests.helpers.kernels.watch import told
from tests.helpers.rotation import rotated

CONFIG = LaunchConfig(block_q=16, block_kv=16, num_warps=4, num_stages=1)
inputs = partial(
    random_inputs, M=1, N=150, heads=8, kv_heads=2, batch=5, head_dim=32, dtype=torch.bfloat16
)
LENGTHS = {
    "nothing, one, one past a block": [0, 1, 17, 150, 0],
    "one long among short": [3, 5, 150, 2, 1],
    "all empty": [0] * 5,
    "whole blocks": [16, 32, 48, 64, 80],
}
SHARES = [1, 3, 16]


def assert_shared(request, number, config=CONFIG):
    """Within the budget of `o` and of the LSE in so many shares; no access is out of order."""
    assert decode.decodes(request)
    with Watch({}).watching():
        o, lse, _ = stream_k.forward(request, config, number)
    assert_right(request, o, lse)
    return o, lse


@pytest.mark.parametrize(("name", "number"), rotated(LENGTHS, SHARES, name=str))
def test_lengths(name, number, device):
    lengths = torch.tensor(LENGTHS[name], device=device)
    q, k, v = inputs(device)
    for b, length in enumerate(LENGTHS[name]):  # slots that no result may depend on
        k[b, length:], v[b, length:] = float("nan"), float("nan")
    request = make_request(q, k, v, causal=True, kv_lengths=lengths)
    assert_shared(request, number)


@pytest.mark.parametrize(("name", "number"), rotated(options_of("cpu"), [1, 4], name=str))
def test_options(name, number, device):
    q, k, v = inputs(device, M=2)
    lengths = torch.tensor([150, 141, 2, 0, 150], device=device)
    assert_shared(make_request(q, k, v, kv_lengths=lengths, **options_of(device, 5)[name]), number)


@pytest.mark.parametrize(
    ("page_size", "number", "starts"),
    [(8, 3, False), (16, 4, True), (24, 4, False), (256, 2, True)],
)
def test_pages(page_size, number, starts, device):
    """Pages shorter and longer than a block, with lengths and starts inside of pages: the same bits
    as without pages.
    """
    lengths = [150, 1, 17, 0, 128]
    q, k, v = inputs(device)
    (k_pages, table), (v_pages, _) = (in_pages(x, page_size, lengths) for x in (k, v))
    given = {"kv_lengths": torch.tensor(lengths, device=device)}
    if starts:
        given["kv_starts"] = torch.tensor([70, 0, 3, 0, 127], device=device)
    request = make_request(q, k_pages, v_pages, causal=True, block_table=table, **given)
    found = stream_k.forward(request, CONFIG, number)
    o, lse = assert_shared(make_request(q, k, v, causal=True, **given), number)
    assert torch.equal(found[0], o) and torch.equal(found[1], lse)


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts blocks of simulated kernels")
def test_shares_differ_by_a_block(device, monkeypatch):
    shares = {}

    def count(begin, end, *given):
        share = here.program.ids
        shares[share] = shares.get(share, 0) + index(end) - index(begin)

    monkeypatch.setattr(stream_k, "attend", told(stream_k.attend, count))
    q, k, v = inputs(device)
    lengths = torch.tensor([150, 33, 1, 16, 80], device=device)  # 10, 3, 1, 1 and 5 blocks
    stream_k.forward(make_request(q, k, v, causal=True, kv_lengths=lengths), CONFIG, 6)
    assert sorted(shares.values()) == [3, 3, 3, 3] * 2 + [4] * 4  # of two heads


@pytest.mark.parametrize(
    ("given", "batch", "length", "shared"),
    [("", 5, 4096, False), ("kv_lengths", 5, 4096, True), ("kv_starts", 2, 4096, True),
     ("kv_lengths", 1, 4096, False), ("kv_lengths", 5, 1024, False),
     ("kv_lengths", 1025, 4096, False)],
)  # fmt: skip
def test_where_shares_pay(given, batch, length, shared):
    """Long sequences with lengths of their own, neither a single one nor thousands."""
    q = torch.empty(batch, 1, 8, 16, dtype=torch.bfloat16, device="meta")
    k = torch.empty(batch, length, 2, 16, dtype=torch.bfloat16, device="meta")
    request = make_request(q, k, k)._replace(**({given: torch.ones(batch)} if given else {}))
    assert stream_k.pays(request) == shared


@pytest.mark.parametrize("num_splits", [None, 2])
def test_who_shares(num_splits, device, monkeypatch):
    """Calls for which it pays, unless they ask for a number of splits."""
    calls, forward = [], stream_k.forward
    monkeypatch.setattr(stream_k, "LONG", 150)
    monkeypatch.setattr(stream_k, "forward", lambda *a: calls.append(1) or forward(*a))
    options = {"kv_lengths": torch.tensor([9, 8, 7, 6, 5], device=device), "version": "fa2"}
    attention(*inputs(device), causal=True, num_splits=num_splits, **options)
    assert bool(calls) == (num_splits is None)


@pytest.mark.parametrize(
    ("head_dim", "kv_heads", "batch", "expected"),
    [(128, 8, 1, 33), (256, 8, 1, 33), (128, 300, 1, 1), (128, 8, 16, 32), (128, 8, 64, 32)],
)
def test_as_many_shares_as_fit_the_gpu(head_dim, kv_heads, batch, expected, monkeypatch):
    """Or fewer, if sequences of one length then begin and end with them."""
    monkeypatch.setattr(devices, "assumed", Properties((9, 0), 232_448, 132))
    q = torch.empty(batch, 1, kv_heads, head_dim, dtype=torch.bfloat16)
    request = make_request(q, q, q)
    assert stream_k.shares_of(request, decode.fitted(request, decode.SHARED)) == expected
