"""What the host does for a launch: little, and nothing that another call has left behind.

What is planned anew is the oracle of a plan that other calls made.
"""

import random
import weakref
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
from flash_versions.versions import fa3, fa4
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.fa3.hopper import host as hopper
from flash_versions.versions.fa3.hopper.backward import rows
from flash_versions.versions.tiles import tma as descriptor
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


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_a_plan_of_other_calls_is_what_would_be_planned_anew(name, launches, monkeypatch):
    """Every call after every other; then again, so that all plans are there."""
    monkeypatch.setattr(launch.Plan, "absent", lambda plan, x: x)
    cases = {call: (make(), options) for call, (make, options) in CALLS.items()}

    def launched(call):
        launches.clear()
        leaves, options = cases[call]
        step(name, leaves, **options)
        return launches.copy()

    warm = [{call: launched(call) for call in cases} for _ in range(3)]
    anew = {}
    for call in cases:
        forget()
        anew[call] = launched(call)
    for call, expected in anew.items():
        assert len(expected) == (6 if "sink" in call else 4), f"{call} does not come here"
        for round in warm:
            assert [told[:2] + told[3:] for told in round[call]] == [
                told[:2] + told[3:] for told in expected
            ], call
    for told in (x for round in warm for launches in round.values() for x in launches[:]):
        if told[2] is not None:  # the form was compiled for the constants that it is given
            constants, _ = told[2]
            assert list(told[-len(constants) :]) == [noted(x) for x in constants.values()]
    assert len({str(told) for told in anew.values()}) == len(anew), "two calls are one"


@pytest.mark.parametrize("call", ["plain", "slopes", "packed", "in order"])
def test_what_is_absent_is_nothing_once_a_kernel_is_compiled(call, launches):
    """And nothing else: a pointer that the kernel reads is never 0."""
    make, options = CALLS[call]
    first, second = [], []
    for found in (first, second):
        launches.clear()
        step("fa3", make(), **options)
        found += launches
    for (name, *_, before), (again, *_, after) in zip(
        *([(x[0], x[3:]) for x in found] for found in (first, second)), strict=True
    ):
        assert name == again and len(before) == len(after)
        gone = [i for i, x in enumerate(after) if x == "None" != before[i]]
        assert len({str(before[i]) for i in gone}) <= 1, "only the stand-in goes"
        assert [x for i, x in enumerate(before) if i not in gone] == [
            x for i, x in enumerate(after) if i not in gone
        ]


def test_packed_calls_of_one_plan_have_heads_of_their_own(launches, monkeypatch):
    """What fills the rows of no sequence is compiled for a number of heads."""
    kernel = StandIn("lay out", launches, noted)
    monkeypatch.setattr(varlen_scheduler.launch_lay_out, "kernel", kernel)
    monkeypatch.setattr(varlen_scheduler.launch_lay_out, "compiled", {})
    options = CALLS["packed"][1]
    for heads in (4, 2, 4, 2):
        launches.clear()
        step("fa3", [x.detach()[0].requires_grad_() for x in inputs(1, 256, 256, heads, heads)],
             **options)  # fmt: skip
        of_o, of_lse, of_dq, *_ = [y for x in launches if x[0] == "lay out" for y in x[-2]]
        assert of_o[1:] == of_dq[1:] == ["False", "1", str(128 * heads)]
        assert of_lse[1:] == ["True", str(heads), "1"]


CHOSEN = fa3.VERSION.forward, fa4.VERSION.forward, fa3.VERSION.backward


def forget():
    """Drop all plans, and what was compiled."""
    for chosen in CHOSEN:
        chosen.plans.clear()
    for launcher in LAUNCHERS.values():
        launcher.compiled.clear()


DIMS = ((64, 64), (72, 72), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))


def any_request(rng):
    """A request that the kernels for Hopper serve, of tensors without memory."""
    (D, D_v), group = rng.choice(DIMS), rng.choice([1, 1, 2, 4, 6])
    packed, causal = rng.random() < 0.3, rng.random() < 0.6
    batch, M = (1 if packed else rng.choice([1, 2, 8])), rng.randint(64, 6000)
    more = M + rng.choice([8, 16, 32, 96, 128])
    N = M if packed else rng.choice([M, M, rng.randint(64, 9000), more])
    kv_heads = rng.choice([2, 4, 8])
    shapes = (batch, M, kv_heads * group, D), (batch, N, kv_heads, D), (batch, N, kv_heads, D_v)
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    request = make_request(q, k, v, causal=causal)
    changes = {
        "cu_seqlens_q": packed, "kv_lengths": not packed and rng.random() < 0.1,
        "sink": rng.random() < 0.1, "alibi_slopes": rng.random() < 0.1,
    }  # fmt: skip
    sizes = {"cu_seqlens_q": rng.randint(2, 20), "kv_lengths": batch}
    given: dict = {
        name: torch.empty(sizes.get(name, kv_heads * group), device="meta", dtype=torch.int32)
        for name, is_given in changes.items()
        if is_given
    }
    if packed:
        given["cu_seqlens_k"] = given["cu_seqlens_q"]
    elif "kv_lengths" not in given and rng.random() < 0.15:
        given["query_ends"] = torch.empty((batch, kv_heads, N), device="meta", dtype=torch.int32)
    if rng.random() < 0.15:
        given["softcap"] = 20.0
    if rng.random() < 0.15:
        given["window_left"] = rng.choice([1, 64, 1000])
    if rng.random() < 0.1:
        given["window_right"] = rng.choice([None, 0, 3, 64])
    return request._replace(deterministic=rng.random() < 0.2, **given)


def test_requests_of_one_kind_have_one_plan(launches, monkeypatch):
    """However ragged the data, there are few plans, and each is right for all of its requests."""
    monkeypatch.setattr(fa3, "gradients_left", lambda request: None)
    monkeypatch.setattr(fa3, "choose_among", lambda request, hopper, portable: hopper(request))
    monkeypatch.setattr(fa3.forward, "left_to_splits", lambda request: None)
    rng, plans = random.Random(0), [{} for _ in CHOSEN]
    for n in range(2000):
        request = any_request(rng)
        kind = hopper.kind_of(request)
        for chosen, known in zip(CHOSEN, plans):
            chosen.plans = known
            found = planned(chosen.find(request, kind))
            chosen.plans = {}
            anew = planned(chosen.find(request, kind))
            assert found.config == anew.config, (n, chosen, request)
            assert found.constants == anew.constants, (n, chosen, request)


def planned(serve):
    """The plan of what is chosen."""
    return serve.args[0] if isinstance(serve, partial) else serve.plan


MEMORY = [torch.zeros(5000 * 1024, dtype=torch.bfloat16) for _ in range(3)]


def test_new_lengths_are_no_new_plans(launches):
    """200 lengths of one kind, forward and backward; packed sequences, too."""
    rng = random.Random(1)
    for n in range(200):
        M = rng.randint(1024, 5000)
        bounds = torch.tensor([0, M // 3, M], dtype=torch.int32)
        shape = (M, 8, 128) if n % 2 else (1, M, 8, 128)
        tensors = [backing[: M * 1024].view(shape).detach().requires_grad_() for backing in MEMORY]
        step("auto", tensors, causal=True, **({"cu_seqlens_q": bounds} if n % 2 else {}))
        launches.clear()
    assert sum(len(chosen.plans) for chosen in CHOSEN) <= 16
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
def test_tensors_of_other_forms_are_another_kind(name, launches):
    """A kernel that was compiled for int32, or for aligned addresses, gets no others."""
    kinds = set()
    for x in READ[name]:
        q, k, v = (x.detach() for x in inputs())
        if name == "cu_seqlens_q":
            q, k, v = q[0], k[0], v[0]
        kinds.add(VERSIONS["fa3"].kind_of(make_request(q, k, v, **{name: x})))
    assert len(kinds) == 3 and None not in kinds


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


def test_a_copied_descriptor_is_like_a_new_one_and_keeps_no_tensor():
    x, y = torch.zeros(2, 64, 3, 16), torch.zeros(2, 64, 3, 16)
    for _ in range(2):
        found = descriptor.describe(y, 32)
        anew = type(found)(**vars(found))  # every field is there, and passes its checks
        assert vars(anew) == vars(found)
        assert found.base is y and found.shape == [2, 3, 64, 16] and found.strides[2] == 48
        descriptor.describe(x, 32)
    strided = y.transpose(1, 2).contiguous().transpose(1, 2)
    for other in (strided, y.half(), y[:1], y[..., :8].contiguous()):
        found = descriptor.describe(other, 32)
        assert found.base is other and found.shape[0] == other.shape[0]
        assert found.strides[2] == other.stride(1) and found.shape[3] == other.shape[3]
    gone = weakref.ref(x)
    del x
    assert gone() is None


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
