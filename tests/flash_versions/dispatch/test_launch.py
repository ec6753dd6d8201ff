"""What the host does for a launch: little, and nothing that another call has left behind.

The answer that was not remembered is the oracle of the one that was.
"""

import sys
import weakref
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

from flash_versions import VERSIONS, attention
from flash_versions.dispatch import launch
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.tiles import tma as descriptor
from tests.helpers.kernels.launches import LAUNCHERS, noted, noted_launches


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
def test_what_is_remembered_is_what_would_be_decided_anew(name, launches, monkeypatch):
    """Every call after every other; then again, so that all of them are warm."""
    cases = {call: (make(), options) for call, (make, options) in CALLS.items()}

    def launched(call):
        launches.clear()
        leaves, options = cases[call]
        step(name, leaves, **options)
        return launches.copy()

    warm = [{call: launched(call) for call in cases} for _ in range(3)]
    monkeypatch.setattr(launch, "on_gpu", lambda request: False)
    for launcher in LAUNCHERS.values():
        launcher.compiled.clear()
    anew = {call: launched(call) for call in cases}
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


SPECIALIZED = ("window_left", "window_right", "softcap", "dropout_p", "precision")


def test_a_description_says_everything():
    """Each field and each property of a tensor makes another."""
    q, k, v = (x.detach() for x in inputs())
    plain = make_request(q, k, v)
    others = {
        "scale": 0.5, "window_left": 1, "window_right": 1, "softcap": 2.0, "dropout_p": 0.5,
        "num_splits": 2, "return_lse": True, "precision": "fp8", "deterministic": True,
    }  # fmt: skip
    tensors = [name for name in plain._fields if name not in others]
    requests = [plain, *[plain._replace(**{name: x}) for name, x in others.items()]]
    for name in tensors:
        x = getattr(plain, name)
        x = torch.zeros(4, 4, 4, 4) if x is None else x
        changed = [x.double(), x[:1], x.transpose(0, 1), late(x)]
        requests += [plain._replace(**{name: y}) for y in changed]
    requests.append(make_request(*(x.to("meta") for x in (q, k, v))))
    assert len({launch.description(request) for request in requests}) == len(requests)
    again = make_request(q.clone(), k.clone(), v.clone())
    assert launch.description(again) == launch.description(plain)
    # A compiled form may be made for numbers that are multiples of 16, and for None.
    compiled = [plain, *[plain._replace(**{name: others[name]}) for name in SPECIALIZED]]
    compiled += [plain._replace(**{x: f(plain.q)}) for x in "qkv" for f in (by_heads, late)]
    compiled += [plain._replace(q=q[:, :3]), plain._replace(sink=torch.ones(4))]
    assert len({launch.layout(request) for request in compiled}) == len(compiled)


@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_a_warm_call_decides_nothing_anew(name, launches):
    leaves, entered = inputs(), []
    for _ in range(4):
        step(name, leaves, causal=True)

    def note(frame, event, _):
        file = frame.f_code.co_filename
        if event == "call" and "/flash_versions/" in file and "/tests/" not in file:
            entered.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        step(name, leaves, causal=True)
    finally:
        sys.setprofile(None)
    assert not {"make_plan", "choose_config", "layout", "default_config", "box_steps"} & {*entered}


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
