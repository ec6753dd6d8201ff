"""How torch calls a kernel: operators, autograd, compile, export, checkpointing, autocast."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from flash_versions import VERSIONS, attention
from flash_versions.dispatch.autograd import operators
from flash_versions.dispatch.request import make_request

by_version = pytest.mark.parametrize("version", VERSIONS)


def inputs(M=20, N=30, heads=2, kv_heads=1, head_dim=16, batch=2, requires_grad=True, **options):
    q = torch.randn(batch, M, heads, head_dim, **options)
    k, v = torch.randn(2, batch, N, kv_heads, head_dim, **options)
    return tuple(x.detach().requires_grad_(requires_grad) for x in (q, k, v))


@by_version
def test_opcheck(version):
    q, k, v = inputs(requires_grad=False)
    q = q.transpose(1, 2).contiguous().transpose(1, 2)  # any strides
    request = make_request(q, k, v, causal=True)
    arguments = (version, *request)
    torch.library.opcheck(torch.ops.flash_versions.forward.default, arguments)
    results = torch.ops.flash_versions.forward(*arguments)
    do, dlse = torch.randn_like(results[0]), torch.randn_like(results[1])
    torch.library.opcheck(
        torch.ops.flash_versions.backward.default, (*arguments, *results, do, dlse)
    )


def test_compile_of_packed_sequences_takes_every_total():
    def layer(q, k, v, cu_seqlens):
        return attention(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, version="fa2")

    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    for lengths in ([5, 0, 12], [30, 3, 4], [1, 1, 40]):
        total = sum(lengths)
        q, k, v = (torch.randn(total, heads, 16) for heads in (4, 2, 2))
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
        assert torch.equal(compiled(q, k, v, cu_seqlens), layer(q, k, v, cu_seqlens))
    assert counter.frame_count == 1


@by_version
def test_compile_with_aot_autograd(version):
    """Forward and backward as one functional graph each, as inductor gets them."""

    def layer(q, k, v, sink):
        options = {} if version == "fa1" else {"sink": sink}
        o, lse = attention(q, k, v, causal=True, version=version, return_lse=True, **options)
        return o.sum() + lse.square().sum() + sink.sum()

    torch._dynamo.reset()
    given = *inputs(30, 30), torch.randn(2, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    gradients = torch.autograd.grad(compiled(*given), given)
    for g, e in zip(gradients, torch.autograd.grad(layer(*given), given)):
        assert torch.equal(g, e)


class Layer(torch.nn.Module):
    def forward(self, q, k, v):
        return attention(q, k, v, causal=True, version="fa2")


def test_export_with_a_dynamic_length():
    given = inputs(20, 20, requires_grad=False)
    S = torch.export.Dim("S", min=2, max=4096)
    program = torch.export.export(Layer(), given, dynamic_shapes=[{1: S}] * 3)
    longer = inputs(50, 50, requires_grad=False)
    assert torch.equal(program.module()(*longer), Layer()(*longer))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler, g++")
def test_where_packages_are_not_known_to_load_they_are_refused(monkeypatch, tmp_path):
    """Before anything is written, and AOTInductor alone; a CPU passes for a GPU here."""
    assert operators.NOT_AHEAD_OF_TIME == ("cuda",)
    monkeypatch.setattr(operators, "NOT_AHEAD_OF_TIME", ("cpu",))
    package = tmp_path / "model.pt2"
    exported = torch.export.export(Layer(), inputs(requires_grad=False))
    with pytest.raises(RuntimeError, match="cannot be packaged by AOTInductor for a GPU"):
        torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    assert not package.exists()


def test_checkpointing_drops_the_same_elements_again():
    given = inputs()

    def layer(q, k, v):
        return attention(q, k, v, dropout_p=0.5, version="fa2").square().sum()

    torch.manual_seed(1)
    expected = torch.autograd.grad(layer(*given), given)
    torch.manual_seed(1)
    recomputed = torch.autograd.grad(checkpoint(layer, *given, use_reentrant=False), given)
    assert all(torch.equal(g, e) for g, e in zip(recomputed, expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.half], ids=["bf16", "half"])
def test_autocast_casts_as_torch_does(dtype):
    q, k, v = inputs()
    with torch.autocast("cpu", dtype=dtype):
        o = attention(q, k.bfloat16(), v, version="fa2")
    assert o.dtype == dtype
    assert torch.equal(
        o, attention(q.to(dtype), k.bfloat16().to(dtype), v.to(dtype), version="fa2")
    )
    o.float().sum().backward()
    assert q.grad.dtype == torch.float32


def test_only_the_lse_has_a_gradient():
    """d(lse^2) of a row without a key is 0 * -inf behind the usual mask."""
    given = inputs(M=5, N=3)
    _, lse = attention(*given, causal=True, version="fa2", return_lse=True)
    torch.where(lse.isfinite(), lse * lse, 0.0).sum().backward()
    assert all(x.grad.isfinite().all() for x in given)
    assert [x.grad.any().item() for x in given] == [True, True, False]


def test_gradients_may_be_negative_views():
    leaves = [torch.randn(1, 4, 2, 16, requires_grad=True) for _ in range(3)]
    results = attention(*leaves, return_lse=True)
    given = [torch.randn_like(x) for x in results]
    views = [torch._neg_view(-x) for x in given]
    expected = torch.autograd.grad(results, leaves, given, retain_graph=True)
    assert all(map(torch.equal, torch.autograd.grad(results, leaves, views), expected))


# What a call asks for, what torch says when the gradients are computed, and what must be.
DETERMINISTIC = [
    (None, False, False),
    (None, True, True),
    (True, False, True),
    (False, True, False),
]


@pytest.mark.parametrize("door", ["function", "operator"])
@pytest.mark.parametrize(("asked", "by_torch", "expected"), DETERMINISTIC)
def test_a_backward_knows_whether_it_has_to_be_deterministic(
    asked, by_torch, expected, door, monkeypatch
):
    found = []

    def differentiate(request, *results):
        found.append(request.is_deterministic)
        return VERSIONS["fa2"].backward(request, *results)

    noting = replace(VERSIONS["fa2"], name="noting", backward=differentiate)
    monkeypatch.setitem(VERSIONS, "noting", noting)
    given = inputs()
    if door == "function":
        o = attention(*given, version="noting", deterministic=asked)
    else:
        request = make_request(*given, deterministic=asked)
        o, _, _ = torch.ops.flash_versions.forward("noting", *request)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(by_torch)
    try:
        o.sum().backward()
    finally:
        torch.use_deterministic_algorithms(before)
    assert found == [expected]


DERIVATIVES = {
    "torch.func.grad, vjp": lambda f, q: torch.func.grad(lambda x: f(x).sum())(q),
    "forward-mode derivative": lambda f, q: torch.func.jvp(f, (q,), (q,)),
    "second derivative": lambda f, q: torch.autograd.functional.hessian(lambda x: f(x).sum(), q),
}


@pytest.mark.parametrize("sentence", DERIVATIVES)
def test_derivatives_that_there_are_not_are_refused_in_words(sentence):
    q, k, v = inputs(requires_grad=False)
    with pytest.raises(RuntimeError, match=f"attention .*{sentence}.*'reference'"):
        DERIVATIVES[sentence](lambda x: attention(x, k, v, version="fa2"), q)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in make_dual
def test_forward_mode_through_a_backward_is_refused():
    """Its gradients would come without their tangents."""
    given = inputs()
    o = attention(*given, version="fa2")
    with forward_ad.dual_level():
        do = forward_ad.make_dual(torch.ones_like(o), torch.ones_like(o))
        with pytest.raises(RuntimeError, match="attention has no forward-mode derivative"):
            torch.autograd.grad(o, given, do)


def test_a_transform_may_differentiate_what_is_around():
    given = inputs(requires_grad=False)
    found = torch.func.grad(lambda x: (x * attention(*given)).sum())(torch.ones(()))
    assert torch.equal(found, attention(*given).sum())


def in_vmap(function, *given):
    return torch.vmap(function)(*[x[None] for x in given])


def compiled(function, *given):
    return torch.compile(function, backend="eager")(*given)


def counted(function, *given):
    with FlopCounterMode(display=False):
        return function(*given)


@pytest.mark.parametrize("way", [in_vmap, compiled, counted])
def test_a_version_that_is_not_registered_is_not_replaced_where_operators_are_needed(way):
    """An operator knows a version by its name, be it another's."""
    called = []

    def forward(request):
        called.append(True)
        return VERSIONS["fa2"].forward(request)

    mine, given = replace(VERSIONS["fa2"], name="unheard of", forward=forward), inputs()
    attention(*given, version=mine)
    assert called
    with pytest.raises(ValueError, match="version 'unheard of' is not registered; torch"):
        way(partial(attention, version=mine), *given)


def test_lengths_changed_before_the_backward_are_noticed():
    given = inputs()
    lengths = torch.tensor([30, 10])
    o = attention(*given, version="fa2", kv_lengths=lengths)
    lengths.fill_(5)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


class Counted(torch.Tensor):
    """A tensor around another one, which sees the operators that get it."""

    seen: list = []

    @staticmethod
    def __new__(cls, x):
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device)

    def __init__(self, x):
        self.x = x

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function.name())
        args, kwargs = tree_map_only(Counted, lambda y: y.x, (args, kwargs or {}))
        return function(*args, **kwargs)


def test_a_subclass_among_the_tensors_sees_the_operator():
    q, k, v = inputs(requires_grad=False)
    Counted.seen.clear()
    o = torch.ops.flash_versions.forward("fa2", *make_request(q, k, v)._replace(v=Counted(v)))[0]
    assert Counted.seen == ["flash_versions::forward"] and torch.equal(o, attention(q, k, v))


def test_the_operator_gives_shapes_of_meta_tensors():
    q, k, v = (x.to("meta") for x in inputs(requires_grad=False))
    request = make_request(*inputs(requires_grad=False))._replace(q=q, k=k, v=v)
    o, lse, _ = torch.ops.flash_versions.forward("fa2", *request)
    assert o.shape == q.shape and lse.is_meta
