"""Calls that are replayed: they launch what the ordinary way launches, or go the ordinary way.

Kernels are stand-ins that note what they are launched with; CPU tensors pass as those of an H200.
"""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

from flash_versions import VERSIONS, attention
from flash_versions.dispatch import launch as launch_module
from flash_versions.dispatch.launch import start
from flash_versions.dispatch.replay import driver, keys, script
from flash_versions.dispatch.replay.recording import note
from flash_versions.versions import masks
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.tiles import intervals, varlen_scheduler
from tests.flash_versions.dispatch.test_launch import CALLS, inputs, late, step
from tests.helpers.kernels.budget import assert_within_budget
from tests.helpers.kernels.launches import (
    LAUNCHERS,
    STREAM,
    StandIn,
    TapeOf,
    noted_launches,
    on_a_gpu,
)

# The backwards that do more than to take memory and to launch kernels, by what they do.
NOT_REPLAYED = {"lengths of a cache": "aten.clone"}


@pytest.fixture
def launches(monkeypatch):
    """What is launched, as (kernel, grid, arguments, which of them are addresses)."""
    on_a_gpu(monkeypatch)
    monkeypatch.setitem(LAUNCHERS, "lay out", varlen_scheduler.launch_lay_out)
    monkeypatch.setitem(LAUNCHERS, "fold", intervals.launch_fold)
    monkeypatch.setitem(LAUNCHERS, "list", intervals.launch_list)
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


# Interval masks: key j is hidden from queries in front of its start, and from its end on.
STARTS, ENDS = torch.arange(256), torch.arange(256) + 100
MASKS = {
    "ends": (inputs, {"query_ends": ENDS, "causal": True}),
    "ends of each sequence": (inputs, {"query_ends": ENDS.repeat(2, 1)}),
    "ends of each head": (inputs, {"query_ends": ENDS.repeat(2, 4, 1)}),
    "starts and ends": (inputs, {"query_starts": STARTS.int(), "query_ends": ENDS.int()}),
    "one tensor for both": (inputs, {"query_starts": ENDS, "query_ends": ENDS}),
}  # fmt: skip


def described(results):
    return [(x.dtype, x.shape, x.stride()) for x in results]


@pytest.mark.parametrize("name", ["fa3", "fa4"])
@pytest.mark.parametrize("case", [*CALLS, *MASKS])
def test_a_replay_launches_what_the_ordinary_way_launches(case, name, launches):
    make, options = (CALLS | MASKS)[case]

    def call():
        launches.clear()
        leaves = make()
        o, lse = attention(*leaves, version=name, return_lse=True, **options)
        forward = launches.copy()  # apart, as the backward may get temporaries of the forward
        launches.clear()
        gradients = torch.autograd.grad((o, lse), leaves, (torch.ones_like(o), lse.detach()))
        return forward, launches.copy(), (o, lse, *gradients)

    *ordinary, results = call()
    theirs_all = []  # so that every call has other memory
    for _ in range(4):
        *replayed, theirs = call()
        theirs_all.append(theirs)
        assert described(theirs) == described(results)
        assert all(map(same, replayed, ordinary))
    (found,) = kept()
    assert found.forward.replay is not None
    (tape,) = tapes(found)
    assert (tape.reason or "").partition(".default")[0] == NOT_REPLAYED.get(case, ""), tape.reason


def test_the_same_key_has_the_same_launches(launches):
    """Calls by turns: no key is another's."""
    ordinary = {}
    for _ in range(4):
        for case, (make, options) in CALLS.items():
            launches.clear()
            attention(*make(), version="fa3", **options)
            assert same(launches, ordinary.setdefault(case, launches.copy())), case
    assert len(kept()) == len(CALLS)


@pytest.mark.parametrize("case", ["plain", "packed"])
@pytest.mark.parametrize("objects", [1, 2], ids=["one object", "two of one address"])
def test_tensors_that_begin_at_one_address(objects, case, launches):
    """attention(q, x, x) is another call than attention(q, k, v); torch's guards refuse to compare
    one object with two.
    """
    make, options = CALLS[case]
    given = [make() for _ in range(4)]
    calls = [(x, y, y if objects == 1 else y.view(y.shape)) for x, y, _ in given]
    for tensors in [*calls, given[0]]:
        launches.clear()
        o = attention(*tensors, version="fa3", **options)
        torch.autograd.grad(o, {*tensors}, torch.ones_like(o))
        addresses = {value for told in launches for part in told[3:] for _, value in part}
        assert {x.data_ptr() for x in (*tensors, o)} <= addresses
    assert len(kept()) == 2 and kept()[0].forward.replay is not None


def test_a_gradient_that_begins_where_a_tensor_does(launches):
    leaves = inputs()
    for do in [leaves[0].detach()] * 4 + [torch.randn(leaves[0].shape).bfloat16()]:
        o = attention(*leaves, version="fa3")
        launches.clear()
        torch.autograd.grad(o, leaves, do)
        addresses = {value for told in launches for x in told[3:] for _, value in x}
        assert {x.data_ptr() for x in (*leaves, do)} <= addresses


def test_a_mask_with_plans_goes_the_ordinary_way(launches):
    """Its lists lie in memory that a call is neither given nor takes."""
    make, options = MASKS["ends"]
    leaves, planned = make(), masks.plan_mask(options)
    for given in [planned] * 4 + [options] * 4 + [planned]:
        launches.clear()
        step("fa3", leaves, **given)
        names = [name for name, *_ in launches]
    assert "fold" not in names, "the plans of the first call are still used"
    (call,) = kept()
    assert call.forward.replay is not None


def test_an_option_that_is_copied_goes_the_ordinary_way(launches):
    for _ in range(3):
        attention(*inputs(), version="fa3", alibi_slopes=torch.ones(8)[::2])
    assert not keys.known


def test_where_a_tape_may_be_played(monkeypatch):
    x = SimpleNamespace(is_cuda=True, get_device=lambda: 0)
    usual = {"current_device": 0, "current_stream": STREAM, "is_capturing": 0, "has_hooks": 0}
    for name, value in usual.items():
        monkeypatch.setattr(keys, name, lambda *_, value=value: value)
    assert keys.place_of(x) == (0, STREAM)
    for name in ("current_device", "is_capturing", "has_hooks"):
        with monkeypatch.context() as patch:
            patch.setattr(keys, name, lambda: 1)
            assert keys.place_of(x) is None


def test_lengths_that_are_the_queries_bounds(monkeypatch):
    """With pages, cu_seqlens_k gives lengths, and without it all pages are full: two calls, though
    in the first one tensor is given twice.
    """
    on_a_gpu(monkeypatch)
    q = torch.randn(5, 2, 16)
    k, v = torch.randn(2, 2, 8, 2, 16)
    bounds, table = torch.tensor([0, 2, 5]), torch.tensor([[0], [1]])
    options = {"version": "fa2", "cu_seqlens_q": bounds, "block_table": table, "num_splits": 1}
    ends = attention(q, k, v, cu_seqlens_k=bounds, **options)
    full = attention(q, k, v, **options)
    assert len(kept()) == 2
    for b, rows in enumerate((slice(0, 2), slice(2, 5))):
        own = k[b : b + 1], v[b : b + 1]
        assert_within_budget(full[None, rows], None, q[None, rows], *own)
        own = (x[:, : rows.stop - rows.start] for x in own)
        assert_within_budget(ends[None, rows], None, q[None, rows], *own)


@contextmanager
def autocast(dtype):
    """torch.autocast for a GPU that is not there: it would warn, and stay off. Also for the CPU,
    where these tensors are: torch's guards compare what concerns a tensor.
    """
    before = {x: torch.get_autocast_dtype(x) for x in ("cuda", "cpu")}
    for device in before:
        torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        for device, its_dtype in before.items():
            torch.set_autocast_enabled(device, False)
            torch.set_autocast_dtype(device, its_dtype)


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
    "autocast": lambda: autocast(torch.float16),
    "autocast that casts nothing": lambda: autocast(torch.bfloat16),
}


@pytest.mark.parametrize("name", STATES)
def test_only_where_torch_does_the_same_is_a_call_served(name, launches):
    q, k, v = (x.detach() for x in inputs())

    def find(q=q):
        return keys.find(q, k, v, (), ("fa3",))

    find()[2].keep("a call")
    with STATES[name]():
        assert find()[0] is None
        if name == "autocast that casts nothing":
            find()[2].keep("another")
            assert find()[0] == "another"
            assert find(q.float()) == keys.NOT_FOUND, "it would be cast"
    with autocast(torch.float16):
        assert find() == keys.NOT_FOUND
    found = []
    torch.vmap(lambda x: found.append(find()) or x)(torch.ones(1))
    assert found == [keys.NOT_FOUND]
    assert find() == ("a call", (q, k, v), STREAM)


UNUSUAL = {
    "another GPU": ("current_device", lambda: 1),
    "another stream": ("current_stream", lambda device: STREAM + 1),
    "a capture": ("is_capturing", lambda: True),
    "other strides": other_strides,
    "expanded": lambda x: x[:1].expand_as(x),
    "not aligned": late,
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_another_backward_is_not_the_usual_one(name, launches, monkeypatch):
    leaves, played = inputs(), []
    for _ in range(4):
        step("fa3", leaves)
    (call,) = kept()
    usual = call.usual

    def replay(tensors):
        played.append(usual.replay(tensors))
        return played[-1]

    call.usual = usual._replace(replay=replay)
    o = attention(*leaves, version="fa3")
    do, change = torch.ones_like(o), UNUSUAL[name]
    if isinstance(change, tuple):
        monkeypatch.setattr(keys, *change)
    else:
        do = change(do).detach()
    launches.clear()
    torch.autograd.grad(o, leaves, do)
    assert played == ([None] if change is late else []), "the guards do not see an alignment"
    assert launches[-1][0] == "finish"


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


def test_a_usual_backward_with_one_gradient_less(launches):
    leaves = inputs()
    for wanted in [(True, True)] * 4 + [(True, False), (False, True)]:
        found = attention(*leaves, version="fa3", return_lse=True)
        outputs = [x for x, is_wanted in zip(found, wanted) if is_wanted]
        launches.clear()
        torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
        assert [name for name, *_ in launches] == ["prepare", "backward", "finish"], wanted
    (call,) = kept()
    assert call.usual is not None


def test_saved_tensors_that_were_moved_are_read_where_they_are(launches):
    leaves = inputs()
    for _ in range(3):
        step("fa3", leaves)
    launches.clear()
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x):
        step("fa3", leaves)
    prepared = {value for told in launches[1:] for x in told[3:] for _, value in x}
    assert not {x.data_ptr() for x in leaves} & prepared, "the copies are what it read"


def test_a_version_of_a_users_own_is_not_replayed(launches):
    """It may launch kernels that no recording is told of."""
    called = []

    def forward(request):
        called.append(request)
        return VERSIONS["fa3"].forward(request)

    mine = replace(VERSIONS["fa3"], forward=forward)
    for n in range(1, 5):
        attention(*inputs(), version=mine)
        assert len(called) == n
    assert not keys.known


@pytest.mark.parametrize(("name", "case"), [("fa2", "ends"), ("fa3", "full"), ("fa3", "packed")])
def test_what_is_kept_of_a_call_keeps_no_tensor(name, case, launches, monkeypatch):
    """Nor does what serves it wait for the garbage collector, which may have been turned off."""
    make, options = (CALLS | MASKS)[case]
    for i, launcher in enumerate((fa2_forward.launch_forward, fa2_backward.launch_delta,
                                  fa2_backward.launch_dkdv, fa2_backward.launch_dq)):  # fmt: skip
        monkeypatch.setattr(launcher, "kernel", StandIn(str(i), launches, flat))
        monkeypatch.setattr(launcher, "compiled", {})
    seen = []
    gc.disable()
    try:
        for _ in range(4):
            leaves = make()
            o = attention(*leaves, version=name, **options)
            gradients = torch.autograd.grad(o, leaves, torch.ones_like(o))
            seen += map(weakref.ref, (*leaves, o, *gradients))
        (call,) = kept()
        assert call.forward.replay is not None
        del o, leaves, gradients
        assert not any(x() is not None for x in seen)
        parts = [weakref.ref(x) for x in (call, call.forward, call.forward.replay)]
        del call
        keys.known.clear()
        assert not any(x() is not None for x in parts)
    finally:
        gc.enable()


@pytest.mark.parametrize("what", ["do", "dlse"])
def test_a_gradient_that_is_a_negative_view(what, launches):
    """Its memory has the other sign."""
    leaves = inputs()
    for negative in (False, False, False, True):
        o, lse = attention(*leaves, version="fa3", return_lse=True)
        given = {"do": torch.ones_like(o), "dlse": torch.ones_like(lse)}
        if negative:
            given[what] = torch._neg_view(given[what])
        launches.clear()
        torch.autograd.grad((o, lse), leaves, tuple(given.values()))
        addresses = {value for told in launches for x in told[3:] for _, value in x}
        assert (given[what].data_ptr() in addresses) != negative


BAD = {
    "causal is a number": {"causal": 1},
    "scale is a bool": {"scale": True},
    "a window of bools": {"window": (True, False)},
    "a window as text": {"window": "10"},
    "a version that is no name": {"version": ["fa3"]},
    "lengths that are no tensor": {"kv_lengths": [1, 2]},
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_argument_is_refused_after_good_ones_that_are_equal(case, launches):
    q, k, v = (x.detach() for x in inputs())
    good = ({"causal": True}, {"scale": 1.0}, {"window": (1, 0)}, {})
    for _ in range(4):
        for options in good:
            attention(q, k, v, **{"version": "fa3"} | options)
    with pytest.raises(ValueError, match=r"must (be|hold)|is unknown"):
        attention(q, k, v, **{"version": "fa3"} | BAD[case])


def test_gradients_are_asked_for_by_grad_mode(launches):
    leaves = inputs()
    for _ in range(4):
        with torch.no_grad():
            assert not attention(*leaves, version="fa3").requires_grad
        assert attention(*leaves, version="fa3").requires_grad
        assert attention(leaves[0].detach(), *leaves[1:], version="fa3").requires_grad
        assert not attention(*(x.detach() for x in leaves), version="fa3").requires_grad


def test_only_what_is_asked_for_is_returned(launches):
    leaves = inputs()
    for _ in range(4):
        assert isinstance(attention(*leaves, version="fa3"), torch.Tensor)
        o, lse = attention(*leaves, version="fa3", return_lse=True)
        assert o.shape == (2, 256, 4, 128) and lse.shape == (2, 4, 256)
        (dq,) = torch.autograd.grad(lse, leaves[:1], lse.detach())
        assert dq.shape == leaves[0].shape


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in make_dual
@pytest.mark.parametrize("what", ["do", "dlse"])
def test_forward_mode_through_a_backward_is_refused(what, launches):
    """Its gradients would come without their tangents."""
    leaves = inputs()
    o, lse = attention(*leaves, version="fa3", return_lse=True)
    given = {"do": torch.ones_like(o), "dlse": torch.ones_like(lse)}
    with forward_ad.dual_level():
        torch.autograd.grad((o, lse), leaves, tuple(given.values()), retain_graph=True)
        given[what] = forward_ad.make_dual(given[what], torch.ones_like(given[what]))
        with pytest.raises(RuntimeError, match="attention has no forward-mode derivative"):
            torch.autograd.grad((o, lse), leaves, tuple(given.values()))


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
    "an operation of torch": (lambda x, k: (torch.empty(4).copy_(x),), "aten.copy_"),
    "a result that was given": (lambda x, k: (x,), "was not taken here"),
    "two results in one": (lambda x, k: (lambda y: (y, y))(torch.empty(4)), "share memory"),
    "a tensor from elsewhere": (
        lambda x, k: (launch(k, ELSEWHERE), (torch.empty(4),))[1], "neither given nor taken",
    ),
    "a fill behind a launch": (
        lambda x, k: (lambda y: (launch(k, y), (y.fill_(1.0),))[1])(torch.empty(4)), "aten.fill_",
    ),
    "a value that is read": (lambda x, k: (torch.empty(int(x[0].item())),), "_local_scalar_dense"),
    "an interpreted kernel": (
        lambda x, k: (note(None, (1,), (x,)), (torch.empty(4),))[1], "interpreted",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_tape_can_do_is_done_by_the_function(case, driven):
    function, reason = REFUSED[case]
    kernel = Kernel(lambda *given: None)
    tape, _ = recorded(lambda x: function(x, kernel), torch.full((4,), 3.0))
    assert tape.replay is None and reason in tape.reason


def empty(n, **options):
    """Memory that the tests' fixture does not fill."""
    return torch.empty_strided((n,), (1,), **options)


def test_memory_is_filled_and_temporaries_lie_apart(driven):
    seen = []
    kernel = Kernel(lambda *given: seen.append(given))

    def function(x):
        a, b, c = empty(3), empty(100, dtype=torch.bfloat16), torch.zeros(5)
        o = torch.empty(2, 4).fill_(-1.0)
        launch(kernel, a, b[8:], c, o[1])
        return (o.squeeze(0), None)

    tape, results = recorded(function, torch.zeros(4))
    assert tape.replay is not None
    a, b, c, o = seen[-1]
    assert b - a == 256 + 16 and o == results[-1][0].data_ptr() + 16 and c not in (a, b, o)
    assert torch.equal(results[-1][0], torch.full((2, 4), -1.0)) and results[-1][1] is None


def with_temporary(size, tell):
    """A tape with a temporary of so many bytes: its kernel tells the address."""
    kernel = Kernel(lambda *given: tell(given[0]))

    def function(x):
        launch(kernel, torch.empty_strided((size,), (1,), dtype=torch.uint8), x)
        return (torch.empty(4),)

    tape, _ = recorded(function, torch.zeros(4))
    return tape


def test_a_block_belongs_to_one_call_at_a_time(driven):
    """Launches of one stream by several threads: none gets what another's are about to use."""
    seen, barriers = [], []
    tape = with_temporary(100, lambda x: (seen.append(x), *[y.wait(10) for y in barriers]))
    barriers.append(Barrier(4))
    for _ in range(3):
        seen.clear()
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda _: tape((torch.zeros(4),), STREAM), range(4)))
        assert len(set(seen)) == 4
    ((_, blocks),) = script.scratch.items()
    assert {address for address, _ in blocks} == set(seen)
