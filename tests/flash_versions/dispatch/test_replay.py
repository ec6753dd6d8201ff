"""Calls that are replayed: they launch what the ordinary way launches, or go the ordinary way.

Kernels are stand-ins that note what they are launched with; CPU tensors pass as those of an H200.
"""

import random
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from flash_versions import attention
from flash_versions.dispatch import launch as launch_module
from flash_versions.dispatch.autograd.operators import backward_operator, forward_operator
from flash_versions.dispatch.launch import start
from flash_versions.dispatch.replay import driver, keys
from flash_versions.dispatch.replay.recording import note
from flash_versions.dispatch.request import make_request
from flash_versions.versions.tiles import varlen_scheduler
from tests.flash_versions.dispatch.test_launch import CALLS, PLAIN, inputs, late, step
from tests.helpers.kernels.launches import LAUNCHERS, STREAM, TapeOf, noted_launches, on_a_gpu

# The backwards that do more than to take memory and to launch kernels, by what they do.
NOT_REPLAYED = {"lengths of a cache": "contiguous"}


@pytest.fixture
def launches(monkeypatch):
    """What is launched, as (kernel, grid, arguments, which of them are addresses)."""
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(keys, "OFTEN", 1)
    monkeypatch.setitem(LAUNCHERS, "lay out", varlen_scheduler.launch_lay_out)
    with noted_launches(monkeypatch, flat) as found:
        yield found


def flat(x):
    """The parts of an argument: (is an address, value)."""
    if isinstance(x, torch.Tensor):
        return [(True, x.data_ptr())]
    if driver.is_descriptor(x):
        others = [(False, repr(y)) for name, y in vars(x).items() if name != "base"]
        return [(True, x.base.data_ptr()), *others]
    if isinstance(x, tuple):
        return [part for y in x for part in flat(y)]
    return [(False, repr(x) if not isinstance(x, int) else x)]


def same(replayed, ordinary):
    """Whether two calls launch the same: kernels, grids, numbers, and one address where the other
    has one.
    """
    if [x[:2] for x in replayed] != [x[:2] for x in ordinary]:
        return False
    pairs = set()
    for a, b in zip(replayed, ordinary):
        a, b = ([part for x in told[3:] for part in x] for told in (a, b))
        if len(a) != len(b):
            return False
        for (_, mine), (is_address, theirs) in zip(a, b):
            if is_address:
                pairs.add((mine, theirs))
            elif mine != theirs:
                return False
    return len({x for x, _ in pairs}) == len(pairs)


def kept():
    """The calls that were kept."""
    return [call for found in keys.known.values() for _, call in found]


def tapes(call):
    """The backwards of a call."""
    return [tape for found in call.backwards.values() for _, tape in found]


@pytest.mark.parametrize("name", ["fa3", "fa4"])
@pytest.mark.parametrize("case", CALLS)
def test_a_replay_launches_what_the_ordinary_way_launches(case, name, launches):
    make, options = CALLS[case]

    def call():
        launches.clear()
        leaves = make()
        o, lse = attention(*leaves, version=name, return_lse=True, **options)
        forward = launches.copy()  # apart, as the backward may get temporaries of the forward
        launches.clear()
        gradients = torch.autograd.grad(
            (o, lse), leaves, (torch.ones_like(o), lse.detach().clone())
        )
        return forward, launches.copy(), (o, lse, *gradients)

    *ordinary, results = call()
    theirs_all = []  # so that every call has other memory
    for _ in range(4):
        *replayed, theirs = call()
        theirs_all.append(theirs)
        for x, y in zip(theirs, results, strict=True):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert all(map(same, replayed, ordinary))
    (found,) = kept()
    assert found.forward.replays, found.forward.reason
    (tape,) = tapes(found)
    assert (NOT_REPLAYED.get(case) or "") in (tape.reason or ""), tape.reason
    assert bool(tape.replays) == (case not in NOT_REPLAYED)


@pytest.mark.parametrize("case", ["plain", "groups", "a sink", "slopes", "packed", "packed by two"])
def test_operators_are_replayed_too(case, launches):
    """As torch.compile calls them."""
    make, options = CALLS["packed" if case == "packed by two" else case]
    if case == "packed by two":
        options = options | {"cu_seqlens_k": options["cu_seqlens_q"].clone()}
    found = []
    with torch.no_grad():
        for _ in range(5):
            launches.clear()
            request = make_request(*make(), **options)
            o, lse, statistics = forward_operator("fa3", *request)
            forward = launches.copy()
            launches.clear()
            given = "fa3", *request, o, lse, statistics, torch.ones_like(o), None
            gradients = backward_operator(*given)
            found.append((forward, launches.copy(), (o, lse, *gradients)))
    for *replayed, theirs in found[1:]:
        assert all(map(same, replayed, found[0]))
        for x, y in zip(theirs, found[0][2], strict=True):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
    (call,) = kept()
    assert call.forward.replays
    assert tapes(call)[0].replays, tapes(call)[0].reason


def test_the_same_key_has_the_same_launches(launches, monkeypatch):
    """Calls by turns: no key is another's."""
    ordinary = {}
    for turn in range(6):
        for case, (make, options) in CALLS.items():
            with monkeypatch.context() as patch:
                if turn < 2:  # the second has all plans
                    patch.setattr(keys, "place_of", lambda x: None)
                launches.clear()
                attention(*make(), version="fa3", **options)
            if turn == 1:
                ordinary[case] = launches.copy()
            assert turn == 0 or same(launches, ordinary[case]), case
    others = "longer", "more keys", "a sequence more"  # "plain" calls of other lengths
    assert len(kept()) == len(CALLS) - len(others)


def empty(B, M, N, heads=16, kv_heads=16, D=64):
    """Tensors whose values do not matter, with which a test of large ones takes no time."""
    sizes = (B, M, heads, D), (B, N, kv_heads, D), (B, N, kv_heads, D)
    return [torch.empty_strided(n, torch.empty(n, device="meta").stride(), dtype=torch.bfloat16)
            .requires_grad_() for n in sizes]  # fmt: skip


LENGTHS = {
    "plain": (empty, PLAIN),
    "full": (empty, {}),
    "groups": (partial(empty, heads=32, kv_heads=8), PLAIN),
    "wide": (partial(empty, D=192), {}),
    "window": (empty, {"window": (65, 10)}),
    "in order": (empty, PLAIN | {"deterministic": True}),
    "packed": (lambda B, M, N: [x.detach()[0].requires_grad_() for x in empty(1, M, M)], PLAIN),
    "lengths": (empty, PLAIN),
}


@pytest.mark.parametrize("name", ["fa3", "fa4"])
@pytest.mark.parametrize("case", LENGTHS)
def test_lengths_that_never_came_before(case, name, launches, monkeypatch):
    """They are replayed, and launch what the ordinary way launches."""
    make, options = LENGTHS[case]
    rng, replayed = random.Random(0), 0

    def call(leaves, **more):
        launches.clear()
        o = attention(*leaves, version=name, **options, **more)
        forward = launches.copy()
        launches.clear()
        do = torch.empty_strided(o.shape, o.stride(), dtype=o.dtype)
        found = torch.autograd.grad(o, leaves, do)
        return forward, launches.copy(), (o, *found)

    for _ in range(40):
        B, M, N = 2, rng.randrange(1024, 4000), rng.randrange(1024, 4000)
        leaves, more = make(B, M, N), {}
        if case == "packed":
            bounds = sorted(rng.choices(range(M), k=B))
            more["cu_seqlens_q"] = torch.tensor([0, *bounds, M], dtype=torch.int32)
        elif case == "lengths":
            more["kv_lengths"] = torch.randint(N, (B,))
        with monkeypatch.context() as patch:
            patch.setattr(keys, "place_of", lambda x: None)
            call(leaves, **more)  # so that its plan is there
            *ordinary, expected = call(leaves, **more)
        before = [len(tape.replays) for found in kept() for tape in (found.forward, *tapes(found))]
        *mine, found = call(leaves, **more)
        after = [len(tape.replays) for found in kept() for tape in (found.forward, *tapes(found))]
        replayed += before == after
        assert all(map(same, mine, ordinary)), (B, M, N)
        for x, y in zip(found, expected, strict=True):
            assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
    assert replayed >= 15
    assert not any(tape.reason for found in kept() for tape in (found.forward, *tapes(found)))


WRONG = {
    "v is shorter": lambda q, k, v: ((q, k, v[:, :-16]), {}, "they may differ in the last"),
    "another batch": lambda q, k, v: ((q, k[:1], v[:1]), {}, "the batch must be equal"),
    "lengths": lambda q, k, v: (
        (q, k, v), {"kv_lengths": torch.ones(3, dtype=torch.int32)}, "kv_lengths has shape",
    ),
    "intervals": lambda q, k, v: (
        (q, k, v), {"query_starts": torch.ones(200, dtype=torch.int32)}, "a number for each key",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_lengths_that_do_not_go_together_are_refused(case, launches):
    """In the words of a first call, however often calls of such tensors were replayed."""
    q, k, v = (x.detach() for x in inputs())
    wrong, options, words = WRONG[case](q, k, v)
    right = {name: torch.ones(x.shape[0] - (1 if name == "kv_lengths" else -56), dtype=x.dtype)
             for name, x in options.items()}  # fmt: skip
    for _ in range(2):
        for _ in range(4):
            attention(q, k, v, **right)
        launches.clear()
        with pytest.raises(ValueError, match=words):
            attention(*wrong, **options)
        assert not launches
    if case != "intervals":  # which are planned by kernels that are simulated here
        assert any(found.forward.replays and not found.forward.reason for found in kept())


@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("objects", [1, 2], ids=["one object", "two of one address"])
def test_tensors_that_begin_at_one_address(objects, case, launches):
    """attention(q, x, x), where a recording could not tell k from v, before and behind calls that
    are replayed.
    """
    make, options = CALLS[case]
    given = [make() for _ in range(4)]
    calls = [(x, y, y if objects == 1 else y.view(y.shape)) for x, y, _ in given]
    for tensors in [*calls, *given, calls[0]]:
        launches.clear()
        o = attention(*tensors, version="fa3", **options)
        torch.autograd.grad(o, {*tensors}, torch.ones_like(o))
        addresses = {value for told in launches for part in told[3:] for _, value in part}
        assert {x.data_ptr() for x in (*tensors, o)} <= addresses
    assert len(kept()) == 1 and kept()[0].forward.replays


def test_a_kind_of_calls_that_comes_seldom_is_not_kept(launches, monkeypatch):
    """Three times each, none; one that comes more often is replayed."""
    monkeypatch.setattr(keys, "OFTEN", 4)
    for _ in range(3):
        for scale in range(1, 20):
            step("fa3", inputs(), causal=True, scale=scale / 10)
    assert not kept()
    for length in range(256, 264):
        step("fa3", inputs(M=length, N=length), causal=True)
    (call,) = kept()
    assert call.forward.replays and tapes(call)[0].replays


def other_strides(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


OTHERS = [torch.Tensor.half, other_strides, torch._neg_view, torch.nn.Parameter, torch.Tensor.clone]


@pytest.mark.parametrize("other", OTHERS)
def test_only_tensors_that_are_alike_are_served_by_a_call(other, launches):
    q, k, v = (x.detach() for x in inputs())
    keys.find(q, k, v, (), ("fa3",))[2].keep("a call")
    for given in ((other(q), k, v), (q, other(k), v), (q, k, other(v))):
        call, _, _ = keys.find(*given, (), ("fa3",))
        assert call == ("a call" if other is torch.Tensor.clone else None)


STATES = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "a dispatch mode": lambda: FlopCounterMode(display=False),
}


@pytest.mark.parametrize("name", STATES)
def test_only_where_torch_does_the_same_is_a_call_served(name, launches):
    q, k, v = (x.detach() for x in inputs())
    keys.find(q, k, v, (), ("fa3",))[2].keep("a call")
    with STATES[name]():
        assert keys.find(q, k, v, (), ("fa3",))[0] is None
    assert keys.find(q, k, v, (), ("fa3",)) == ("a call", (q, k, v), STREAM)


@pytest.mark.parametrize("change", [other_strides, late])
def test_a_backward_with_another_gradient(change, launches, monkeypatch):
    """With other strides, or not aligned, it is not what was recorded."""
    leaves, found = inputs(), []
    do = change(torch.ones_like(leaves[0])).detach()
    for _ in range(4):
        step("fa3", leaves)
    for place in (lambda x: None, keys.place_of):
        o = attention(*leaves, version="fa3")
        monkeypatch.setattr(keys, "place_of", place)
        launches.clear()
        torch.autograd.grad(o, leaves, do)
        found.append(launches.copy())
    assert same(*found)


def test_torch_s_setting_counts_at_each_backward(launches):
    leaves = inputs()
    try:
        for setting in [False] * 4 + [True, False] * 3:
            torch.use_deterministic_algorithms(setting)
            launches.clear()
            o = attention(*leaves, version="fa3")
            torch.autograd.grad(o, leaves, torch.ones_like(o))
            ((constants, _),) = [told[2] for told in launches if told[0] == "backward"]
            assert constants["ORDERED"] == setting
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_backward_with_one_gradient_less(launches):
    leaves = inputs()
    for wanted in [(True, True)] * 4 + [(True, False), (False, True)]:
        found = attention(*leaves, version="fa3", return_lse=True)
        outputs = [x for x, is_wanted in zip(found, wanted) if is_wanted]
        launches.clear()
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
        assert [name for name, *_ in launches] == ["prepare", "backward", "finish"], wanted


# The tape alone


class Kernel:
    """A compiled kernel that does something to tensors it knows by address."""

    function = packed_metadata = None

    def __init__(self, effect):
        self.effect = effect

    def run(self, x, y, z, stream, function, metadata, about, enter, leave, *arguments):
        self.effect(*arguments)


def launch(kernel, *arguments):
    start(kernel, (1, 1, 1), arguments)


@pytest.fixture
def driven(monkeypatch):
    """Triton's driver, for a kernel that needs none."""
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(launch_module, "runtime_driver", SimpleNamespace(active=active))


def recorded(function, *tensors):
    tape = TapeOf(function)
    results = [tape(tensors, STREAM) for _ in range(3)]
    return tape, results


ELSEWHERE = torch.zeros(4)
REFUSED = {
    "an operation of torch": (lambda x, k: (torch.empty(4).copy_(x),), "copy_"),
    "a result that was given": (lambda x, k: (x,), "was not taken here"),
    "two results in one": (lambda x, k: (lambda y: (y, y))(torch.empty(4)), "share memory"),
    "a tensor from elsewhere": (
        lambda x, k: (launch(k, ELSEWHERE), (torch.empty(4),))[1], "neither given nor taken",
    ),
    "a fill behind a launch": (
        lambda x, k: (lambda y: (launch(k, y), (y.fill_(1.0),))[1])(torch.empty(4)), "fill_",
    ),
    "a value that is read": (lambda x, k: (torch.empty(int(x[0].item())),), "item"),
    "a simulated kernel": (
        lambda x, k: (note(None, (1,), (x,)), (torch.empty(4),))[1], "simulated",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_tape_can_do_is_done_by_the_function(case, driven):
    function, reason = REFUSED[case]
    kernel = Kernel(lambda *given: None)
    tape, _ = recorded(lambda x: function(x, kernel), torch.full((4,), 3.0))
    assert not tape.replays and reason in tape.reason
