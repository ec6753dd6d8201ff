"""Launches by CUDA's driver give the bits of Triton's, in all streams, threads and graphs."""

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from triton import knobs

from flash_versions import VERSIONS, attention
from flash_versions.dispatch import launch
from flash_versions.dispatch.autograd.call import known, similar

pytestmark = pytest.mark.gpu

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
    "packed on pages": (
        lambda: [packed(9, heads=8, D=128)[0], *pages()[1:]],
        lambda: {"cu_seqlens_q": cuts(0, 4, 9), "block_table": cuts(*range(16)).view(2, 8)},
    ),
    "packed, batched keys": (
        lambda: [packed()[0], *dense()[1:]], lambda: {"cu_seqlens_q": cuts(0, 300, 700)},
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


@pytest.fixture
def by_triton(monkeypatch):
    """by_triton(f): the names of what f launches, by Triton as a hook is set, and its results."""

    def run(function):
        seen = []
        with monkeypatch.context() as patch:
            hook = lambda metadata: seen.append(metadata.get()["name"])  # noqa: E731
            patch.setattr(knobs.runtime, "launch_enter_hook", hook)
            return seen, function()

    return run


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("case", CALLS)
def test_the_driver_gives_the_bits_of_triton_s_launches(case, version, by_triton):
    make, given = CALLS[case]
    options = given()
    kept = [make() for _ in range(3)]

    def everything():
        return [results(version, leaves, options) for leaves in kept for _ in range(2)]

    try:
        everything()  # compiled, and known
    except ValueError as error:
        pytest.skip(str(error))
    assert len(known) == 1
    seen, expected = by_triton(everything)
    assert len(seen) % len(expected) == 0 and seen
    for mine, theirs in zip(everything(), expected):
        for x, y in zip(mine, theirs, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("D", [128, 256])
def test_other_lengths_give_the_bits_of_triton_s_launches(D, by_triton):
    """They are served by a call that is like them."""
    inputs = [dense(1, M, M, 32, 32, D) for M in range(1024, 3072, 128)]

    def both(leaves):
        q, k, v = (x.detach().requires_grad_() for x in leaves)
        o = attention(q, k, v, causal=True)
        _, dk, dv = torch.autograd.grad(o, (q, k, v), torch.cos(o.detach()))
        return o, dk, dv  # dQ is added up in any order

    for leaves in inputs[:2] * 2:  # compiled, and known
        both(leaves)
    assert len(similar) == 1
    found = [both(leaves) for leaves in inputs]
    assert len(similar) == 1 and len(known) == len(inputs)
    _, expected = by_triton(lambda: [both(leaves) for leaves in inputs])
    for mine, theirs in zip(found, expected):
        assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("version", ["fa2", "fa3"])
def test_lengths_and_slopes_that_are_one_number_for_all(version):
    """Their stride is 0; a kernel reads copies."""
    q, k, v = dense()
    given = {"kv_lengths": cuts(77), "alibi_slopes": torch.ones(1, device="cuda") / 8}
    sizes = {"kv_lengths": 2, "alibi_slopes": 4}
    for name, x in given.items():
        expanded = x.expand(sizes[name])
        expected = attention(q, k, v, version=version, **{name: expanded.contiguous()})
        for _ in range(3):
            found = attention(q, k, v, version=version, **{name: expanded})
            assert torch.equal(found, expected)


def test_forms_are_known_to_the_driver(monkeypatch):
    """Of all kernels of all versions: Triton launches none of them."""
    made = []
    make_form = launch.make_form
    monkeypatch.setattr(
        launch, "make_form", lambda *given: made.append(make_form(*given)) or made[-1]
    )
    for make, given in CALLS.values():
        for version in VERSIONS:
            try:
                results(version, make(), given())
            except ValueError:
                continue
    assert made and all(type(form) is launch.native().Form for form in made)


@pytest.mark.parametrize("D", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("strides", ["contiguous", "heads first", "cut", "one row", "one head"])
def test_descriptors_of_all_kinds(strides, D, by_triton):
    """Boxes of tensors whose strides and sizes are unusual, and smaller than 128 KiB."""
    B, M, H = (1, 1, 4) if strides == "one row" else (2, 130, 1 if strides == "one head" else 4)
    q, k, v = torch.randn(3, B, max(M, 64), H, D, **BF16)
    if strides == "heads first":
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    elif strides == "cut":
        q, k, v = torch.randn(B, M, H, 3 * D, **BF16).split(D, dim=3)
    elif strides == "one row":
        k, v = k[:, :1], v[:, :1]

    def call():
        return results("auto", (q, k, v), {"causal": True})

    call()
    _, expected = by_triton(call)
    assert all(map(torch.equal, call(), expected))


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
    """Several at once, each with other tensors."""
    inputs = [dense(B=1, M=2048, N=2048) for _ in range(8)]
    expected = [results(version, leaves, {"causal": True}) for leaves in inputs]
    torch.cuda.synchronize()

    def work(leaves):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = [results(version, leaves, {"causal": True}) for _ in range(20)]
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found, right in zip(pool.map(work, inputs), expected):
            for mine in found:
                assert all(map(torch.equal, mine, right))


@pytest.mark.parametrize("version", ["fa2", "fa4"])
def test_a_graph_captures_a_backward_after_calls(version):
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


@pytest.mark.parametrize("version", ["fa2", "fa4"])
def test_no_memory_is_kept(version):
    """Of no call."""

    def step():
        results(version, dense(M=1024, N=1024), {"causal": True})

    for _ in range(4):
        step()
    torch.cuda.synchronize()
    gc.collect()  # what other tests have left
    before = torch.cuda.memory_allocated()
    for _ in range(50):
        step()
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.parametrize("case", ["causal", "packed"])
def test_a_thread_that_never_used_the_gpu(case):
    """It has no context of CUDA, which the driver needs."""
    make, given = CALLS[case]
    options, leaves = {**given(), "version": "fa3"}, make()
    expected = [attention(*leaves, **options) for _ in range(2)][0]
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(attention, *leaves, **options).result()
    assert torch.equal(found, expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_take_turns():
    """Also the one that is not current, and each from a thread of its own."""
    inputs = [[x.to(f"cuda:{n}") for x in dense(M=1000, N=1000)] for n in (0, 1)]
    expected = [results("auto", leaves, {"causal": True}) for leaves in inputs]

    def work(n):
        return [results("auto", inputs[n], {"causal": True}) for _ in range(50)]

    with ThreadPoolExecutor(2) as pool:
        for found, right in zip(pool.map(work, (0, 1)), expected):
            assert all(all(map(torch.equal, mine, right)) for mine in found)
    for n in (0, 1):
        with torch.cuda.device(n):
            assert all(map(torch.equal, work(n)[0], expected[n]))
