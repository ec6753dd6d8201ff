"""What the host does for a launch: little, and nothing that another call has left behind.

The answer that was not remembered is the oracle of the one that was.
"""

import sys
import weakref
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from triton import knobs

import flash_versions
from flash_versions import VERSIONS, attention
from flash_versions.dispatch import launch
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.tiles import tma as descriptor
from tests.helpers.kernels.launches import LAUNCHERS, noted, noted_launches, on_a_gpu

# Python functions of this package that a forward and backward enter, replayed or not.
MOST_CALLS = {True: 13, False: 142}
# (calls of Python functions of this package, files, folders, changes from folder to folder) that a
# first forward may take until the kernel starts, and a replayed one, as docs/extend/design.md says.
WAYS = [(174, 25, 11, 75), (10, 6, 3, 3)]


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
        (_, prepare, backward, _) = launches
        name, grid, (constants, _), *arguments = backward
        assert name == ("backward" if D == 64 else "backward, wide")
        counters = [x for x in prepare if isinstance(x, tuple) and x[0] == torch.int32]
        assert bool(counters) == constants["ORDERED"]
        if counters:  # a ticket, and a counter for each block of 64 queries of a head
            assert [x[1] for x in counters] == [(1 + 2 * 4 * 256 // 64,)]
            assert counters[0] in arguments
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


def test_a_version_that_is_no_name_is_refused(launches):
    with pytest.raises(ValueError, match=r"version=\['fa3'\] is unknown; there are auto, fa1"):
        attention(*inputs(), version=["fa3"])


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


@pytest.mark.parametrize("replayed", [True, False], ids=["replayed", "ordinary"])
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_a_warm_call_does_little(name, replayed, launches, monkeypatch):
    if replayed:
        on_a_gpu(monkeypatch)
    leaves = inputs()
    for _ in range(4):
        step(name, leaves, causal=True)
    entered, package = Counter(), str(Path(flash_versions.__file__).parent)

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(package):
            entered[f"{Path(code.co_filename).stem}.{code.co_name}"] += 1

    launches.clear()
    sys.setprofile(note)
    try:
        step(name, leaves, causal=True)
    finally:
        sys.setprofile(None)
    assert len(launches) == 4
    anew = ("__missing__", "moved", "driver.map", "driver.__init__")  # memory at a new address
    calls = sum(n for function, n in entered.items() if not function.endswith(anew))
    assert calls <= MOST_CALLS[replayed], entered.most_common()
    for decided in ("make_plan", "choose_config", "layout", "default_config", "box_steps"):
        assert not any(function.endswith(f".{decided}") for function in entered), decided


def test_the_way_of_a_call_is_short(launches, monkeypatch):
    """From `attention` until a kernel starts: the first call of a shape, after one of another shape
    that fills the caches, and one that is replayed.
    """
    on_a_gpu(monkeypatch)
    attention(*(x.detach() for x in inputs(B=16, M=384, N=384)), causal=True)
    q, k, v = (x.detach() for x in inputs(B=16, M=512, N=512))
    package = Path(flash_versions.__file__).parent
    entered = []

    def note(frame, event, _):
        file = Path(frame.f_code.co_filename)
        if event == "call" and not launches and package in file.parents:
            if file.name != "quick.py":  # which replaces functions of Triton
                entered.append(file.relative_to(package))

    found = []
    for _ in range(4):
        entered.clear()
        launches.clear()
        sys.setprofile(note)
        try:
            attention(q, k, v, causal=True)
        finally:
            sys.setprofile(None)
        assert [name for name, *_ in launches] == ["forward of fa4"]
        walked = [file.parent for file in entered]
        changes = sum(a != b for a, b in zip(walked, walked[1:]))
        found.append((len(entered), len(set(entered)), len(set(walked)), changes))
    first, *_, replayed = found
    for way, bounds in zip((first, replayed), WAYS):
        assert all(n <= bound for n, bound in zip(way, bounds)), (way, bounds)


def test_a_descriptor_is_copied_and_keeps_no_tensor():
    made = []

    class Descriptor:
        def __init__(self, x, shape, strides, box):
            self.base, self.shape, self.strides, self.box = x, shape, strides, box
            made.append(shape)

    described = partial(descriptor.described, Descriptor)
    x, y = torch.zeros(2, 8, 3, 16), torch.ones(2, 8, 3, 16)
    first, second = described(x, 4, 16), described(y, 4, 16)
    assert len(made) == 1 and first.base is x and second.base is y
    assert vars(first) | {"base": None} == vars(second) | {"base": None}
    alike = (
        y.transpose(1, 2).contiguous().transpose(1, 2), y.half(), y[:1], torch.ones(2, 8, 3, 32)
    )  # fmt: skip
    for count, other in enumerate(alike, 2):
        assert described(other, 4, 16).base is other and len(made) == count
    described(x, 2, 16), described(x, 4, 8)
    assert len(made) == 7
    gone = weakref.ref(x)
    del x, first
    assert gone() is None


def test_a_copied_descriptor_of_triton_is_like_a_new_one():
    x, y = torch.zeros(2, 64, 3, 16), torch.zeros(2, 64, 3, 16)
    for _ in range(2):
        found = descriptor.describe(y, 32)
        assert type(found)(**vars(found)) == found, "every field is there, and passes its checks"
        assert found.base is y and found.shape == [2, 3, 64, 16] and found.strides[2] == 48
        descriptor.describe(x, 32)


def test_hooks_of_a_profiler_are_called(launches, monkeypatch):
    """With a hook, the launch is Triton's own."""
    asked = []

    class Form:
        function = packed_metadata = None

        def run(self, *given):
            asked.append("run")

        def __getitem__(self, grid):
            return lambda *arguments: asked.append((grid, arguments))

    form = Form()
    launch.start(form, (1, 1, 1), (5,))
    assert asked == ["run"]
    for name in ("launch_enter_hook", "launch_exit_hook"):
        for hook in (lambda metadata: None, SimpleNamespace(calls=[print])):
            with monkeypatch.context() as patch:
                patch.setattr(knobs.runtime, name, hook)
                launch.start(form, (1, 1, 1), (5,))
            assert asked.pop() == ((1, 1, 1), (5,))
    launch.start(form, (1, 1, 1), (5,))
    assert asked == ["run", "run"]
