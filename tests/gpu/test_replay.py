"""Calls that are replayed on a GPU give the ordinary way's bits, wherever their tensors are."""

import gc
import random
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from triton import knobs

from flash_versions import VERSIONS, attention
from flash_versions.dispatch.replay import keys

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def kept_at_once(monkeypatch):
    """The first call is kept, so that the second is recorded and the third replayed."""
    monkeypatch.setattr(keys, "OFTEN", 1)


BF16 = {"device": "cuda", "dtype": torch.bfloat16}


def dense(B=2, M=300, N=412, heads=4, kv_heads=2, D=64, Dv=None):
    shapes = (B, M, heads, D), (B, N, kv_heads, D), (B, N, kv_heads, Dv or D)
    return [torch.randn(shape, **BF16) for shape in shapes]


def packed(total=700, heads=4, kv_heads=2, D=64):
    return [torch.randn(total, h, D, **BF16) for h in (heads, kv_heads, kv_heads)]


def cuts(*bounds):
    return torch.tensor(bounds, dtype=torch.int32, device="cuda")


def pages():
    shapes = (2, 1, 8, 128), (16, 64, 2, 128), (16, 64, 2, 128)
    return [torch.randn(shape, **BF16) for shape in shapes]


CALLS = {
    "full": (dense, dict),
    "causal": (dense, lambda: {"causal": True}),
    "head dim 128": (lambda: dense(D=128), lambda: {"causal": True}),
    "head dim 256": (lambda: dense(D=256), lambda: {"causal": True}),
    "head dim 72": (lambda: dense(D=72), dict),
    "values of their own": (lambda: dense(D=128, Dv=64), dict),
    "window": (dense, lambda: {"window": (100, 20)}),
    "softcap": (dense, lambda: {"softcap": 20.0}),
    "slopes": (dense, lambda: {"alibi_slopes": torch.ones(4, device="cuda") / 8}),
    "sink": (dense, lambda: {"sink": torch.ones(4, device="cuda")}),
    "lengths": (dense, lambda: {"kv_lengths": cuts(412, 77), "causal": True}),
    "intervals": (dense, lambda: {"query_ends": cuts(*range(50, 462)), "causal": True}),
    "intervals of heads": (
        dense, lambda: {"query_starts": cuts(*range(824)).view(2, 1, 412).repeat(1, 2, 1) // 4},
    ),
    "packed": (packed, lambda: {"cu_seqlens_q": cuts(0, 20, 500, 690), "causal": True}),
    "packed by two": (
        packed, lambda: {"cu_seqlens_q": cuts(0, 20, 700), "cu_seqlens_k": cuts(0, 300, 700)},
    ),
    "decode": (lambda: dense(M=1, N=4096, D=128), dict),
    "decode, lengths": (lambda: dense(M=1, N=4096, D=128), lambda: {"kv_lengths": cuts(4000, 9)}),
    "pages": (
        pages, lambda: {"kv_lengths": cuts(500, 33), "block_table": cuts(*range(16)).view(2, 8)},
    ),
}  # fmt: skip


def results(version, leaves, options):
    """o, the LSE and, where there is a backward, the gradients, dQ of which is deterministic."""
    if "block_table" in options:
        with torch.no_grad():
            return attention(*leaves, version=version, return_lse=True, **options)
    leaves = [x.detach().requires_grad_() for x in leaves]
    o, lse = attention(*leaves, version=version, return_lse=True, deterministic=True, **options)
    dlse = torch.where(lse.isfinite(), 0.5, 0.0)
    return o, lse, *torch.autograd.grad((o, lse), leaves, (torch.cos(o.detach()), dlse))


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CALLS)
def test_a_replay_gives_the_bits_of_the_ordinary_way(case, version, monkeypatch):
    make, given = CALLS[case]
    options = given()
    kept = [make() for _ in range(5)]

    def everything():
        return [results(version, leaves, options) for leaves in kept for _ in range(2)]

    try:
        with monkeypatch.context() as patch:
            patch.setattr(keys, "place_of", lambda x: None)
            expected = everything()
    except ValueError as error:
        pytest.skip(str(error))
    assert not keys.known
    found = everything()
    for mine, theirs in zip(found, expected):
        for x, y in zip(mine, theirs, strict=True):
            assert torch.equal(x, y)
    ((_, call),) = [one for found in keys.known.values() for one in found]
    assert call.forward.replays or version == "fa1", call.forward.reason
    backwards = [tape for found in call.backwards.values() for _, tape in found]
    assert not backwards or any(tape.replays or tape.reason for tape in backwards)


LENGTHS = {
    "causal": (lambda n, m: dense(1 + n % 3, n, n), dict),
    "groups": (lambda n, m: dense(1, n, n, heads=8, D=128), lambda: {"causal": True}),
    "other keys": (lambda n, m: dense(1, n, m, D=128), dict),
    "window": (lambda n, m: dense(1, n, n), lambda: {"window": (100, 0)}),
    "packed": (lambda n, m: packed(n), lambda: {"causal": True}),
}


@pytest.mark.parametrize("version", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_that_never_came_before(case, version, monkeypatch):
    """A replay of other lengths gives the ordinary way's bits, and most are replayed."""
    make, given = LENGTHS[case]
    rng, options = random.Random(0), given()
    served = 0
    for _ in range(60):
        n, m = rng.randrange(1, 3000), rng.randrange(1, 3000)
        leaves = make(n, m)
        if case == "packed":
            options["cu_seqlens_q"] = cuts(0, *sorted(rng.choices(range(n), k=1 + n % 5)), n)
        with monkeypatch.context() as patch:
            patch.setattr(keys, "place_of", lambda x: None)
            expected = results(version, leaves, options)
        before = recordings()
        found = results(version, leaves, options)
        served += recordings() == before
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y), (n, m)
    assert served >= 30


def recordings():
    """How many there are, of all calls."""
    calls = [call for found in keys.known.values() for _, call in found]
    tapes = [tape for call in calls for found in call.backwards.values() for _, tape in found]
    return sum(len(tape.replays) for tape in [*tapes, *[call.forward for call in calls]])


@pytest.mark.parametrize("version", ["fa2", "fa4"])
def test_a_call_under_autocast_is_another_one(version):
    q, k, v = (x.half() for x in dense())

    def dtypes():
        return [attention(q, k, v, causal=True, version=version).dtype for _ in range(4)]

    assert {*dtypes()} == {torch.float16}
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            assert {*dtypes()} == {dtype}
    assert {*dtypes()} == {torch.float16}


@pytest.mark.parametrize("version", ["fa2", "fa4"])
def test_streams_and_threads(version):
    """Several at once, each with other tensors, on all GPUs."""
    inputs = [dense(B=1, M=2048, N=2048) for _ in range(8)]
    for i, leaves in enumerate(inputs):
        inputs[i] = [x.to(f"cuda:{i % torch.cuda.device_count()}") for x in leaves]
    expected = [results(version, leaves, {"causal": True}) for leaves in inputs]
    for device in range(torch.cuda.device_count()):
        torch.cuda.synchronize(device)

    def work(leaves):
        with torch.cuda.device(leaves[0].device), torch.cuda.stream(torch.cuda.Stream()):
            found = [results(version, leaves, {"causal": True}) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(work, inputs), expected):
            for mine in found:
                assert all(map(torch.equal, mine, right))


@pytest.mark.parametrize("version", ["fa2", "fa4"])
def test_a_graph_captures_a_backward_after_replays(version):
    leaves = dense()
    for _ in range(4):
        before = results(version, leaves, {"causal": True})
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = results(version, leaves, {"causal": True})
    leaves[0].copy_(torch.randn_like(leaves[0]))
    graph.replay()
    expected = results(version, leaves, {"causal": True})
    for mine, theirs, old in zip(found, expected, before, strict=True):
        assert torch.equal(mine, theirs)
        assert not torch.equal(mine, old)


def test_a_hook_of_triton_sees_every_launch(monkeypatch):
    q, k, v = dense()
    for _ in range(4):
        attention(q, k, v)
    seen = []
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: seen.append(metadata))
    attention(q, k, v)
    assert len(seen) == 1


@pytest.mark.parametrize("version", ["fa2", "fa4"])
def test_no_memory_is_kept(version):
    """Neither of any call nor of the one that was recorded."""

    def step():
        results(version, dense(M=1024, N=1024), {"causal": True})

    for _ in range(4):  # replays keep a block of scratch memory for each stream
        step()
    torch.cuda.synchronize()
    gc.collect()  # what other tests have left
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        step()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("version", ["fa2", "fa3", "fa4"])
@pytest.mark.parametrize("case", ["causal", "packed"])
def test_kernels_are_launched_by_the_driver_alone(case, version):
    make, given = CALLS[case]
    options = given()
    for _ in range(4):
        results(version, make(), options)
    ((_, call),) = [one for found in keys.known.values() for one in found]
    ((_, tape),) = [one for found in call.backwards.values() for one in found]
    for replay in (*call.forward.replays, *tape.replays):
        assert "start_again(" in replay.__doc__
        assert "\n    run" not in replay.__doc__, "this driver or this Triton is not known"


@pytest.mark.parametrize("case", ["causal", "packed"])
def test_a_thread_that_never_used_the_gpu(case, monkeypatch):
    """It has no context of CUDA, which the driver needs."""
    make, given = CALLS[case]
    options = {**given(), "version": "fa3"}
    for _ in range(4):
        attention(*make(), **options)
    leaves = make()
    with monkeypatch.context() as patch:
        patch.setattr(keys, "place_of", lambda x: None)
        expected = attention(*leaves, **options)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(attention, *leaves, **options).result()
    assert torch.equal(found, expected)
