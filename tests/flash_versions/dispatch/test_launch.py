"""What the host does for a launch: little, and nothing that another call has left behind."""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import create_function_from_signature

from flash_versions import VERSIONS, attention
from flash_versions.dispatch import launch
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.fa3.hopper.backward import rows
from flash_versions.versions.tiles import varlen_scheduler
from tests.helpers.kernels.launches import LAUNCHERS, StandIn, noted, noted_launches


@pytest.fixture
def launches(monkeypatch):
    with noted_launches(monkeypatch) as found:
        yield found


def inputs(B=2, M=256, N=256, heads=4, kv_heads=4, D=128, Dv=None, dtype=torch.bfloat16):
    shapes = (B, M, heads, D), (B, N, kv_heads, D), (B, N, kv_heads, Dv or D)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def step(name, leaves, **options):
    """A forward and a backward."""
    o = attention(*leaves, version=name, **options)
    return torch.autograd.grad(o, leaves, torch.ones_like(o))


def by_heads(x):
    """The same tensor with its heads apart in memory."""
    return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()


def late(x):
    """The same tensor 2 bytes past a multiple of 16, which boxes cannot reach."""
    return torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).requires_grad_()


PLAIN = {"causal": True}
CALLS = {
    "plain": (inputs, PLAIN),
    "another head's stride": (lambda: [by_heads(x) for x in inputs()], PLAIN),
    "another stride of k": (lambda: [f(x) for f, x in zip((torch.clone, by_heads, torch.clone),
                                                          inputs())], PLAIN),
    "fp16": (lambda: inputs(dtype=torch.float16), PLAIN),
    "full": (inputs, {}),
    "window": (inputs, {"window": (64, 0)}),
    "another window": (inputs, {"window": (65, 0)}),
    "scale": (inputs, PLAIN | {"scale": 0.25}),
    "softcap": (inputs, PLAIN | {"softcap": 20.0}),
    "longer": (lambda: inputs(M=512), PLAIN),
    "more keys": (lambda: inputs(N=320), PLAIN),
    "a sequence more": (lambda: inputs(B=3), PLAIN),
    "in order": (inputs, PLAIN | {"deterministic": True}),
    "groups": (lambda: inputs(kv_heads=2), PLAIN),
    "narrow": (lambda: inputs(D=64), PLAIN),
    "wide": (lambda: inputs(D=256), PLAIN),
    "narrow values": (lambda: inputs(Dv=64), PLAIN),
    "a sink": (inputs, PLAIN | {"sink": torch.ones(4)}),
    "slopes": (inputs, PLAIN | {"alibi_slopes": torch.ones(4)}),
    "slopes of each sequence": (inputs, PLAIN | {"alibi_slopes": torch.ones(2, 4)}),
    "lengths": (inputs, PLAIN | {"kv_lengths": torch.tensor([200, 3])}),
    "lengths of a cache": (lambda: [inputs()[0], *map(by_heads, inputs()[1:])],
                           PLAIN | {"kv_lengths": torch.tensor([200, 3])}),
    "packed": (lambda: [x.detach()[0].requires_grad_() for x in inputs()],
               PLAIN | {"cu_seqlens_q": torch.tensor([0, 100, 256])}),
}  # fmt: skip


MEMORY = [torch.zeros(5000 * 1024, dtype=torch.bfloat16) for _ in range(3)]


def test_new_lengths_are_compiled_for_nothing_new(launches):
    """200 lengths of one kind, forward and backward; packed sequences, too."""
    rng = random.Random(1)
    for n in range(200):
        M = rng.randint(1024, 5000)
        bounds = torch.tensor([0, M // 3, M], dtype=torch.int32)
        shape = (M, 8, 128) if n % 2 else (1, M, 8, 128)
        tensors = [backing[: M * 1024].view(shape).detach().requires_grad_() for backing in MEMORY]
        step("auto", tensors, causal=True, **({"cu_seqlens_q": bounds} if n % 2 else {}))
        launches.clear()
    forms = {name: len(launcher.compiled) for name, launcher in LAUNCHERS.items()}
    assert max(forms.values()) <= 8, forms


def behind(x, skipped):
    """The same numbers, so many elements behind an aligned address."""
    memory = x.new_zeros(x.numel() + skipped)
    return memory[skipped:].copy_(x.flatten()).view(x.shape)


CUTS = torch.tensor([0, 100, 256], dtype=torch.int32)
READ = {  # options whose tensors a kernel reads, in forms that Triton tells apart
    "cu_seqlens_q": (CUTS, CUTS.long(), behind(CUTS, 1)),
    "kv_lengths": (CUTS[1:].clone(), CUTS[1:].long(), behind(CUTS[1:], 1)),
    "alibi_slopes": (torch.ones(4), torch.ones(4).bfloat16(), behind(torch.ones(4), 1)),
}


@pytest.mark.parametrize("name", READ)
def test_tensors_of_other_forms_are_compiled_for_anew(name, launches, monkeypatch):
    """A kernel that was compiled for int32, or for aligned addresses, gets no others."""
    kernel = StandIn("lay out", launches, noted)
    monkeypatch.setattr(varlen_scheduler.launch_lay_out, "kernel", kernel)
    monkeypatch.setattr(varlen_scheduler.launch_lay_out, "compiled", {})
    for x in READ[name] * 2:
        q, k, v = (x.detach() for x in inputs())
        if name == "cu_seqlens_q":
            q, k, v = q[0], k[0], v[0]
        attention(q, k, v, version="fa3", **{name: x})
    where = LAUNCHERS["forward"] if name == "alibi_slopes" else varlen_scheduler.launch_lay_out
    assert len(where.compiled) == 3


def test_what_a_backward_reads_is_contiguous_and_aligned():
    """Whatever a gradient of the LSE is like: no kind tells it apart."""
    x = torch.randn(2, 4, 256)
    assert rows.contiguous(x) is x
    for other in (behind(x, 1), x.transpose(0, 1), x[:, :, :1].expand(x.shape)):
        found = rows.contiguous(other)
        assert torch.equal(found, other) and found.is_contiguous() and found.data_ptr() % 16 == 0


@pytest.mark.parametrize("D", [64, 256])
def test_gradients_that_must_be_deterministic_are_asked_for_anew(D, launches):
    """The kernel for Hopper computes them, too, with turns; its counters are cleared before."""

    def ordered(**options):
        launches.clear()
        step("fa3", inputs(D=D), **options)
        (_, prepare, (_, _, (constants, _), *arguments), _) = launches
        counters = [x for x in prepare if isinstance(x, tuple) and x[0] == torch.int32]
        assert bool(counters) == constants["ORDERED"]
        # A ticket, and a counter for each block of 64 queries of a head.
        assert all(x[1] == (1 + 2 * 4 * 256 // 64,) and x in arguments for x in counters)
        return constants["ORDERED"]

    for _ in range(2):
        assert not ordered() and ordered(deterministic=True)
        torch.use_deterministic_algorithms(True)
        try:
            assert ordered() and not ordered(deterministic=False)
        finally:
            torch.use_deterministic_algorithms(False)


def test_an_address_that_boxes_cannot_reach(launches, monkeypatch):
    found = []
    monkeypatch.setattr(fa2_forward, "forward", lambda request: found.append(request))
    q, k, v = (x.detach() for x in inputs())
    for _ in range(2):
        VERSIONS["fa3"].forward(make_request(q, k, v))
        assert not found
        VERSIONS["fa3"].forward(make_request(late(q).detach(), k, v))
        assert len(found) == 1
        found.clear()


def test_gradients_are_refused_after_a_call_without(launches, monkeypatch):
    results = torch.empty(2, 256, 4, 128), torch.empty(2, 4, 256), None
    monkeypatch.setattr(fa2_forward, "forward", lambda request: results)
    leaves, table = inputs(), torch.zeros(2, 1, dtype=torch.int32)
    for _ in range(2):
        with torch.no_grad():
            attention(*leaves, block_table=table, version="fa3")
        with pytest.raises(ValueError, match="block_table is for inference"):
            attention(*leaves, block_table=table, version="fa3")


@triton.jit
def any_kernel(x, n, pair, scale):
    """Whatever is compiled for such arguments."""


def arguments(rng):
    """Arguments of the kernel, of all kinds that Triton tells apart."""
    memory = torch.zeros(64, dtype=rng.choice([torch.float16, torch.bfloat16]))
    x = memory[rng.choice([0, 1, 8]) :]
    number = partial(rng.choice, [1, 2, 16, 17, 32, 0, -16, 2**31 - 1, 2**31, 2**40, -(2**31)])
    pair = rng.choice([(x, number()), (x, None), (None, number())])
    return rng.choice([x, None]), number(), pair, rng.choice([1.0, 2.0])


def test_kinds_are_what_triton_tells_apart():
    backend = make_backend(GPUTarget("cuda", 90, 32))
    bind = create_function_from_signature(any_kernel.signature, any_kernel.params, backend)
    rng, kinds, compiled = random.Random(0), set(), set()
    both = set()
    for _ in range(3000):
        given = arguments(rng)
        kind, form = str(launch.kinds_of(given)), str(bind(*given)[1])
        kinds.add(kind)
        compiled.add(form)
        both.add((kind, form))
    assert len(both) == len(kinds), "one kind, two forms"
    assert len(both) == len(compiled), "one form, two kinds"


@pytest.mark.parametrize("hook", [print, SimpleNamespace(calls=[print])], ids=["one", "chain"])
@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_with_a_hook_of_a_profiler_the_launch_is_triton_s(name, hook, launches, monkeypatch):
    asked = []

    class Form:
        function = packed_metadata = None
        run = staticmethod(lambda *given: asked.append("run"))

        def __getitem__(self, grid):
            return lambda *arguments: asked.append((grid, arguments))

    launch.start(Form(), (1, 1, 1), (5,))
    monkeypatch.setattr(knobs.runtime, name, hook)
    launch.start(Form(), (1, 1, 1), (5,))
    assert asked == ["run", ((1, 1, 1), (5,))]


class Noting:
    """A kernel that notes what is compiled for it, of another kernel's parameters."""

    def __init__(self, kernel):
        self.params, self.compiled = kernel.params, []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            self.compiled.append(arguments)
            return SimpleNamespace()

        return run


@triton.jit(do_not_specialize=["n"])
def optional_kernel(x, n):
    """Its number may be missing, which another form is compiled for."""


class Marked(torch.Tensor):
    """A tensor that kernels take as any other."""


def test_arguments_that_are_missing_or_of_a_subclass(monkeypatch):
    monkeypatch.setattr(launch, "start", lambda *given: None)
    kernel, x = Noting(optional_kernel), torch.zeros(4)
    launcher = launch.Launcher(kernel)
    for n in (None, 0, 5, None):
        launcher((1,), (x, n), {})
    assert [n for _, n in kernel.compiled] == [None, 0]
    for _ in range(2):
        launcher((1,), (torch.zeros(4).as_subclass(Marked), 3), {})
    assert len(kernel.compiled) == 2
    assert not [part for key in launcher.compiled for part in key if isinstance(part, torch.Tensor)]
