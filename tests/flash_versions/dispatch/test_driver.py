"""Launches by CUDA's driver alone are those of Triton's launcher, byte for byte."""

import gc
import random
import tracemalloc
import weakref
from collections.abc import Callable
from contextlib import contextmanager, suppress
from functools import partial
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from flash_versions import attention
from flash_versions.dispatch import launch
from flash_versions.dispatch.autograd import call
from flash_versions.dispatch.autograd.call import known, look, similar
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions import api
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.tiles.tma import swizzled_box
from tests.flash_versions.dispatch.test_launch import CALLS, by_heads, late, step
from tests.helpers.kernels.driver import driven


@pytest.fixture
def cuda(monkeypatch):
    with driven(monkeypatch) as notes:
        yield notes


class Pair(NamedTuple):
    x: object
    n: object


@triton.jit(do_not_specialize=["count"])
def any_kernel(x, n, pair, desc, scale, count, optional, BLOCK: tl.constexpr):
    """Reads parameters of all kinds, so that the compiler keeps them."""
    tile = desc.load([0, 0, 0, 0]).to(tl.float32).sum()
    tl.store(x, tile * scale + n + pair.n + count + BLOCK)
    if optional is not None:
        tl.store(pair.x, tl.load(optional))


@gluon.jit
def copy_kernel(desc, x, SIZE: gl.constexpr):
    """Gluon's descriptors."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    gl.store(x + gl.arange(0, SIZE, layout=layout), desc.shape[2] + desc.strides[1])


def both(cuda, form, grid, arguments):
    """What a form launches, and what Triton does."""
    assert type(form) is launch.native().Form, "the driver alone does not launch it"
    mine = cuda.of(form, grid, arguments)
    knobs.runtime.launch_exit_hook.add(nothing := lambda metadata: None)
    try:
        return mine, cuda.of(form, grid, arguments)
    finally:
        knobs.runtime.launch_exit_hook.remove(nothing)


def arguments(numbers, optional=None):
    x, tile = torch.zeros(64), torch.zeros(2, 32, 3, 64, dtype=torch.float16)
    n, m, count = numbers
    desc = TensorDescriptor(tile, [2, 3, 32, 64], [6144, 64, 192, 1], [1, 1, 16, 64])
    return x, n, Pair(x, m), desc, 0.5, count, optional


NUMBERS = (5, 7, 9), (1, 16, 1), (2**40, -3, 2**31 - 1), (-(2**40), 1, -5)


@pytest.mark.parametrize("options", [{}, {"launch_pdl": True}], ids=str)
@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("has_optional", [False, True])
def test_parameters_of_all_kinds(has_optional, numbers, options, cuda):
    given = arguments(numbers, torch.ones(1) if has_optional else None)
    launcher = launch.Launcher(any_kernel, **options)
    form = launcher((3, 2), given, {"BLOCK": 16})
    mine, theirs = both(cuda, form, (3, 2), given)
    assert mine == theirs and len(mine) > 200
    other = cuda.of(form, (3, 2), arguments(numbers, given[-1]))
    assert len(other) == len(mine) and other != mine, "addresses are those of each launch"
    assert cuda.of(form, (0, 2), given) == b"", "an empty grid"


@triton.jit
def store_kernel(x, n):
    """A program of several blocks in a cluster may do this."""
    tl.store(x + tl.arange(0, 256), n)


@pytest.mark.parametrize("options", [{"num_ctas": 2}, {"launch_cooperative_grid": True}], ids=str)
def test_attributes_of_a_launch(options, cuda):
    given = torch.zeros(256), 7
    form = launch.Launcher(store_kernel, **options)((4,), given, {})
    mine, theirs = both(cuda, form, (4,), given)
    assert mine == theirs
    plain = launch.Launcher(store_kernel)((4,), given, {})
    assert len(cuda.of(plain, (4,), given)) < len(mine)


def test_a_kernel_of_another_triton_is_launched_by_it(cuda, monkeypatch):
    """One whose compiled kernels have other facts than those that are known."""
    given = torch.zeros(256), 7
    form = launch.Launcher(store_kernel)((4,), given, {})
    compiled = store_kernel[(4,)](*given)
    assert type(launch.make_form(compiled, ())) is type(form) is launch.native().Form
    monkeypatch.setattr(compiled, "packed_metadata", (4, 1))
    other = launch.make_form(compiled, ())
    assert other.func is launch.launch_by_triton


@pytest.mark.parametrize("version", [13000, 13020])  # an older driver's maps are corrected
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [3, 5000])  # below 128 KiB and above
@pytest.mark.parametrize("strided", [False, True])
def test_boxes_are_encoded_as_triton_encodes_them(strided, rows, dtype, version, monkeypatch):
    with driven(monkeypatch, version) as cuda:
        if version < 13020 and not hasattr(driver.active.utils, "fill_tma_descriptor_tiled"):
            pytest.skip("this Triton does not correct maps")
        compare_boxes(strided, rows, dtype, cuda)


def compare_boxes(strided, rows, dtype, cuda):
    x = torch.zeros(2, rows, 3, 64, dtype=dtype)
    if strided:
        x = torch.zeros(2, rows, 3, 192, dtype=dtype)[..., 64:128]
    box, out = swizzled_box(dtype, 64, 64), torch.zeros(32, dtype=torch.int64)
    plan = launch.Plan(launch.Launcher(copy_kernel), None, {"SIZE": 32}, (box,))
    boxed = box, x, *box.steps(x.shape, x.stride())
    plan.launch((1,), (boxed, out))
    mine, theirs = both(cuda, plan.form, (1,), (boxed, out))
    assert mine == theirs
    assert mine == cuda.of(plan.form, (1,), (box(x), out)), "a descriptor does as well"
    one = x[:1]
    boxed = box, one, *box.steps(one.shape, one.stride())
    assert cuda.of(plan.form, (1,), (box(one), out)) == cuda.of(plan.form, (1,), (boxed, out))


@pytest.mark.parametrize("case", ["plain", "packed", "wide", "slopes", "a sink"])
def test_attention_is_launched_as_by_triton(case, cuda, monkeypatch):
    """All of its kernels, forward and backward, when a call comes again, too."""
    compared = []
    make_form = launch.make_form

    def compare(*given):
        form = make_form(*given)

        def launched(grid, arguments):
            compared.append(both(cuda, form, grid, arguments))
            assert compared[-1][0] == compared[-1][1]

        return launched

    monkeypatch.setattr(launch, "make_form", compare)
    make, options = CALLS[case]
    leaves = make()
    for _ in range(3):
        step("auto", leaves, **options)
    assert len(known) == 1 and len(compared) >= 6


@pytest.mark.parametrize(
    "case",
    ["plain", "full", "narrow", "wide", "window", "softcap", "another head's stride"],
)
@pytest.mark.parametrize("name", ["fa3", "fa4"])
def test_steps_launch_what_triton_launches(name, case, cuda, monkeypatch):
    """With the same memory taken, a call that came before is the same to the byte."""
    make, options = CALLS[case]
    leaves, memory, empty_strided = make(), {}, launch.TAKE["cpu"]
    do, taken = torch.ones(2, 256, 4, leaves[2].shape[3]).bfloat16(), []

    def take(*about):
        taken.append((*about, len(taken)))
        if taken[-1] not in memory:
            memory[taken[-1]] = empty_strided(*about)
        return memory[taken[-1]]

    def call():
        taken.clear()
        o = attention(*leaves, version=name, **options)
        torch.autograd.grad(o, leaves, do)

    monkeypatch.setitem(launch.TAKE, "cpu", take)
    for _ in range(3):
        call()
    (found,) = known.values()
    gradients = found.gradients[False]
    assert found.steps is not None and gradients.steps is not None
    mine = cuda.of(call)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda metadata: None)
    assert mine == cuda.of(call) and len(mine) > 2000


@pytest.mark.parametrize(("kv_heads", "D"), [(8, 128), (2, 64)])
def test_lengths_that_never_came_are_served_by_a_call_that_is_like_them(
    kv_heads, D, cuda, monkeypatch
):
    """Requests are made for few of 200 lengths, and the launches are those of Triton."""
    made, rng = [], random.Random(0)
    original = api.make_request
    monkeypatch.setattr(api, "make_request", lambda *x, **y: made.append(1) or original(*x, **y))
    memory = torch.zeros(3, 3000 * 1024, dtype=torch.bfloat16)

    def run(M):
        leaves = [
            x[: M * heads * D].view(1, M, heads, D).detach().requires_grad_()
            for x, heads in zip(memory, (8, kv_heads, kv_heads))
        ]
        o = attention(*leaves, causal=True)
        torch.autograd.grad(o, leaves, torch.ones_like(o))

    lengths = [rng.randint(900, 2900) for _ in range(200)]
    for M in lengths:
        run(M)
    assert len(made) < 40 and len(known) > 150 and len(similar) < 20
    monkeypatch.setattr(JITFunction, "run", None)  # nothing more is compiled
    run(2901)


def test_lengths_of_a_call_whose_gradients_are_left_to_fa2(cuda, monkeypatch):
    """Its forward has steps, and its backward has none."""
    lengths = []

    def gradients(request, *given):
        lengths.append(request.k.shape[1])
        return *map(torch.zeros_like, request[:3]), None

    monkeypatch.setattr(fa2_backward, "backward", gradients)
    expected = [1024, 1024, 1152, 1280, 1152]
    for N in expected:
        shapes = (1, N, 32, 256), (1, N, 32, 256), (1, N, 32, 64)
        leaves = [torch.zeros(x, dtype=torch.bfloat16, requires_grad=True) for x in shapes]
        step("fa3", leaves, causal=True)
    assert lengths == expected and similar


def places(given, *tensors):
    """Arguments with places for some tensors."""
    if isinstance(given, torch.Tensor):
        where = [i for i, x in enumerate(tensors) if x is given]
        return launch.PLACES[where[0]] if where else given
    if isinstance(given, tuple):
        made = [places(x, *tensors) for x in given]
        return type(given)(*made) if hasattr(given, "_fields") else tuple(made)
    return given


def test_steps_are_launches_with_other_addresses(cuda):
    x, out, more = torch.zeros(2, 80, 3, 64, dtype=torch.float16), torch.zeros(32), torch.zeros(64)
    box = swizzled_box(torch.float16, 64, 64)
    plan = launch.Plan(launch.Launcher(copy_kernel), None, {"SIZE": 32}, (box,))
    boxed = box, x, *box.steps(x.shape, x.stride())
    plan.launch((1,), (boxed, out.long()))
    given = arguments((5, 7, 9))
    form = launch.Launcher(any_kernel)((3, 2), given, {"BLOCK": 16})
    out = out.long()

    def at(x, out, y):
        first = (box, x, *boxed[2:]), out
        second = y, given[1], Pair(y, given[2].n), *given[3:]
        return first, second

    first, second = at(x, out, more)
    launches = (
        (plan.form, (1,), places(first, x, out, more)),
        (form, (3, 2), places(second, x, out, more)),
    )
    taken = [torch.zeros(64) for _ in range(2)]
    steps = launch.native().Steps(2, ((lambda: taken[0], ()),), launches)
    others = [torch.zeros_like(x), torch.zeros_like(out)]
    for tensors in ((x, out), others):
        mine = cuda.of(steps, *tensors)
        first, second = at(*tensors, taken[0])
        assert mine == cuda.of(plan.form, (1,), first) + cuda.of(form, (3, 2), second)
    assert steps(*others)[0] is taken[0]
    late_one = torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)
    assert cuda.of(steps, late_one, out) == b"" and steps(late_one, out) is None
    with pytest.raises(TypeError, match="2 tensors"):
        steps(x)
    with pytest.raises(AttributeError, match="data_ptr"):
        steps(x, "out")
    with pytest.raises(ValueError, match="place"):
        launch.native().Steps(0, (), launches)


@pytest.mark.parametrize("change", ["strides", "not contiguous", "late"])
def test_a_backward_whose_tensors_are_unlike_the_forward_s_takes_no_steps(
    change, cuda, monkeypatch
):
    """Hooks of saved tensors may lay them out anew, and a gradient may come in any strides."""
    leaves = CALLS["another head's stride" if change == "strides" else "plain"][0]()
    do, counts = torch.ones(2, 256, 4, 128).bfloat16(), []

    def call(do):
        pack = (lambda x: x.contiguous()) if counts and change == "strides" else lambda x: x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            return torch.autograd.grad(attention(*leaves, causal=True), leaves, do)

    for _ in range(3):
        call(do)
    (found,) = known.values()
    steps = found.gradients[False].steps
    found.gradients[False].steps = lambda *given: counts.append(1) or steps(*given)
    call(do)
    assert counts == [1]
    other = {"strides": do, "not contiguous": by_heads(do).detach(), "late": late(do).detach()}
    monkeypatch.setattr(launch.Plan, "launch", lambda *given: counts.append("plan"))
    call(other[change])
    assert counts[1:] in (["plan"] * 3, [1, "plan", "plan", "plan"])


class OfAnotherCopy(NamedTuple):
    """A place as another copy of the package has it, such as one from the Kernels Hub."""

    number: int


def test_what_steps_take_lives_until_all_is_launched(cuda):
    """And not longer than the results: a GPU's memory may be taken again once it is let go."""
    taken, alive = [], []

    def take():
        x = torch.zeros(256)
        taken.append(weakref.ref(x))
        return x

    form = launch.Launcher(store_kernel)((4,), (torch.zeros(256), 7), {})
    given = ((form, (4,), (OfAnotherCopy(0), 7)),) * 3
    steps = launch.native().Steps(0, ((take, ()), (take, ())), given)
    with cuda.told(lambda: alive.append([x() is not None for x in taken])):
        found = steps()
    assert alive == [[True, True]] * 3
    del found
    assert [x() for x in taken] == [None, None]


def test_an_error_in_steps_is_raised_and_keeps_nothing(cuda):
    taken = []

    def take(fails):
        if fails:
            raise MemoryError("no memory")
        x = torch.zeros(256)
        taken.append(weakref.ref(x))
        return x

    form = launch.Launcher(store_kernel)((4,), (torch.zeros(256), 7), {})
    given = ((form, (4,), (launch.PLACES[0], 7)),)
    steps = launch.native().Steps(0, ((take, (False,)), (take, (True,))), given)
    with pytest.raises(MemoryError, match="no memory"):
        steps()
    assert taken[0]() is None
    with pytest.raises(RuntimeError, match="refused a launch: invalid argument"):
        form((1, 70_000), (torch.zeros(256), 7))


def test_a_hook_of_triton_is_called(cuda, monkeypatch):
    given, seen = arguments((5, 7, 9)), []
    form = launch.Launcher(any_kernel)((1,), given, {"BLOCK": 16})
    mine = cuda.of(form, (1,), given)
    for name in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(knobs.runtime, name, lambda metadata: seen.append(metadata))
            assert cuda.of(form, (1,), given) == mine
    assert len(seen) == 2


WRONG: dict[str, tuple[Callable, str]] = {
    "too few": (lambda given: given[:3], "fewer"),
    "too many": (lambda given: (*given, 1, 2, 3), "more"),
    "a number for a tuple": (lambda given: (*given[:2], 5, *given[3:]), "tuple"),
    "a tensor for a number": (lambda given: (given[0], given[0], *given[2:]), "only integer|int"),
    "a text for a pointer": (lambda given: ("x", *given[1:]), "data_ptr"),
    "64 bits for 32": (lambda given: (given[0], 2**31, *given[2:]), "32 bits"),
    "more below 0": (lambda given: (given[0], -(2**40), *given[2:]), "32 bits"),
    "a shape without strides": (lambda given: (*given[:3], (1, 2), *given[4:]), "index"),
    "another rank": (lambda given: (*given[:3], (1, given[0], (1,), (1,)), *given[4:]), "rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused(case, cuda):
    change, sentence = WRONG[case]
    given = arguments((5, 7, 9))
    form = launch.Launcher(any_kernel)((1,), given, {"BLOCK": 16})
    with pytest.raises(
        (TypeError, AttributeError, OverflowError, ValueError, IndexError), match=sentence
    ):
        form((1,), change(given))
    with pytest.raises(ValueError, match="too many programs"):
        form((2**32 + 1,), given)


def test_where_the_module_cannot_be_had_triton_launches(cuda, monkeypatch):
    monkeypatch.setattr(launch, "native", lambda: None)
    given = arguments((5, 7, 9))
    launcher = launch.Launcher(any_kernel)
    sizes = {len(cuda.of(launcher, (1,), given, {"BLOCK": 16})) for _ in range(2)}
    assert len(sizes) == 1 and sizes != {0}
    assert not launcher.forms


def test_nothing_is_leaked(cuda):
    """By what succeeds, nor by what fails on its way."""
    module, given, tensors = launch.native(), arguments((5, 7, 9)), q_k_v()
    form = launch.Launcher(any_kernel)((1,), given, {"BLOCK": 16})
    placed = places(given, given[0])
    launches = ((form, (1, 2), placed), (form, (3,), placed))
    takes = ((torch.empty, (64,)),)
    steps = module.Steps(1, takes, launches)
    actions = {
        "a key": lambda: look((*tensors, None, tensors[0]), ("auto", True, 0.5, (1, None))),
        "no key": lambda: look((*tensors, [1], torch.eye(3).to_sparse()), ("auto", 2**70)),
        "kinds": lambda: module.kinds(given, bytes(len(given)), (1, "x", any_kernel)),
        "too few of kinds": lambda: module.kinds(given, b"", ()),
        "a launch": lambda: form((3, 2), given),
        "too many programs": lambda: form((2**32,), given),
        "steps": lambda: steps(given[0]),
        "a text for a tensor": lambda: steps("x"),
        "new steps": lambda: module.Steps(1, takes, launches),
        "a place of nothing": lambda: module.Steps(0, (), launches),
        "no launch": lambda: module.Steps(1, takes, (*launches, (form, (1,), given[:2]))),
        "memory that fails": lambda: module.Steps(1, ((torch.empty, ("x",)),), launches)(given[0]),
    }  # fmt: skip
    actions |= {name: partial(lambda f: form((1,), f(given)), f) for name, (f, _) in WRONG.items()}
    for name, action in actions.items():
        tracemalloc.start()
        for n in range(300):
            if n == 100:
                gc.collect()
                before, _ = tracemalloc.get_traced_memory()
            with suppress(Exception):
                action()
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
        assert grown < 200 * 8, f"{name}: {grown} bytes"


# Keys of calls


def key_of(tensors, options):
    _, keys = look(tensors, options)
    return keys and keys[0]


def q_k_v(requires_grad=False):
    return tuple(torch.zeros(2, 64, 4, 64).requires_grad_(requires_grad) for _ in range(3))


CHANGED = {
    "dtype": lambda q: q.half(),
    "length": lambda q: torch.zeros(2, 65, 4, 64),
    "strides": lambda q: q.transpose(1, 2).contiguous().transpose(1, 2),
    "alignment": late,
    "gradient": lambda q: q.clone().requires_grad_(),
}


@pytest.mark.parametrize("case", CHANGED)
def test_calls_that_are_served_otherwise_have_other_keys(case, cuda):
    q, k, v = q_k_v()
    key = key_of((q, k, v), ("auto", True))
    assert key is not None and key == key_of(q_k_v(), ("auto", True))
    other = CHANGED[case](q).detach().requires_grad_(case == "gradient")
    assert key_of((other, k, v), ("auto", True)) not in (None, key)


@pytest.mark.parametrize(
    "options",
    [("fa3", True), ("auto", 1), ("auto", 1.0), ("auto", None), ("auto", (1, 0)), ("auto", (1,))],
)
def test_options_that_are_equal_but_not_alike_have_other_keys(options, cuda):
    assert key_of(q_k_v(), options) not in (None, key_of(q_k_v(), ("auto", True)))


def test_the_same_object_twice_is_told_apart(cuda):
    q, k, v = q_k_v()
    cuts = torch.tensor([0, 3])
    given = [(q, k, v, cuts, other) for other in (cuts, cuts.clone(), None)]
    assert len({key_of(x, ()) for x in given}) == 3


def test_a_number_that_is_a_tensor_has_a_key(cuda):
    """It is refused later, by a sentence."""
    q, k, v = q_k_v()
    for _ in range(3):
        assert key_of((q, k, v, torch.tensor(1.0), torch.ones(4)), ()) is not None
        with pytest.raises(ValueError, match="alibi_slopes has shape"):
            attention(q, k, v, alibi_slopes=torch.tensor(1.0))


def test_a_tensor_of_another_device_has_no_key(cuda, monkeypatch):
    monkeypatch.setattr(call, "current_device", lambda: 0)
    assert key_of(q_k_v(), ()) is None


class Marked(torch.Tensor):
    """Whose operations are watched."""


UNUSUAL = {
    "a list": lambda x: [x],
    "a subclass": lambda x: x.as_subclass(Marked),
    "a negative view": torch._neg_view,
    "no strides": lambda x: x.to_sparse(),
    "nothing in it": lambda x: x[:, :0],
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_unusual_tensors_have_no_key(case, cuda):
    q, k, v = q_k_v()
    assert key_of((q, UNUSUAL[case](k), v), ()) is None


@pytest.mark.parametrize("option", [[0, 1], {}, 2**70, object()])
def test_unusual_options_have_no_key(option, cuda):
    assert key_of(q_k_v(), (option,)) is None


@contextmanager
def autocast():
    torch.set_autocast_enabled("cuda", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)


WATCHED = {
    "a dispatch mode": lambda: FlopCounterMode(display=False),
    "autocast": autocast,
    "forward mode": torch.autograd.forward_ad.dual_level,
}


@pytest.mark.parametrize("case", WATCHED)
def test_where_torch_watches_calls_have_no_key(case, cuda):
    with WATCHED[case]():
        assert key_of(q_k_v(), ()) is None


def test_autocast_that_casts_nothing_changes_no_key(cuda):
    """As in a model whose projections ran under it."""
    q, k, v = (x.half() for x in q_k_v())
    key = key_of((q, k, v), ())
    with autocast():
        assert key_of((q, k, v), ()) == key is not None
        for other in ((q.float(), k, v), (q, k.float(), v), (q, k, v.float())):
            assert key_of(other, ()) is None


def test_a_transform_has_no_key(cuda):
    found = []
    torch.vmap(lambda q: (found.append(key_of((q, q, q), ())), q)[1])(q_k_v()[0])
    assert found == [None]


def test_modes_of_gradients_have_other_keys(cuda):
    given = q_k_v(requires_grad=True)
    key = key_of(given, ())
    with torch.no_grad():
        assert key_of(given, ()) not in (None, key)


def test_private_names_of_torch_are_there():
    """They are found by name, and calls take longer in a torch that has other ones."""
    assert {x.__name__ for x in launch.WATCHERS} == {
        "_len_torch_dispatch_stack", "peek_interpreter_stack", "_get_tracing_state",
    }  # fmt: skip
    if torch.version.cuda:
        assert launch.TAKE["cuda"] is not None and hasattr(torch._C, "_cuda_getDevice")


# What a version is asked for


def ints(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def dense(B=2, M=6, N=16):
    return [torch.randn(B, n, 2, 64) for n in (M, N, N)]


def packed(total=9):
    return [torch.randn(total, 2, 64) for _ in range(3)]


def on_pages(*shape):
    return [torch.randn(*shape, 2, 64), *torch.randn(2, 8, 4, 2, 64)]


CUT = {"cu_seqlens_q": ints(0, 4, 9)}
TABLE = ints(*range(8)).view(2, 4)
ASKED: dict[str, tuple[Callable, dict]] = {
    "plain": (dense, {"causal": True}),
    "exact": (dense, {"batch_invariant": True}),
    "packed": (packed, CUT),
    "packed by two": (packed, CUT | {"cu_seqlens_k": ints(0, 2, 9)}),
    "pages": (lambda: on_pages(2, 1), {"block_table": TABLE, "kv_lengths": ints(13, 2)}),
    "packed on pages": (lambda: on_pages(9), CUT | {"block_table": TABLE}),
    "a part of a table": (lambda: on_pages(2, 1), {"block_table": TABLE[:, :2]}),
    "packed, batched keys": (lambda: [packed()[0], *dense()[1:]], CUT),
    "lengths": (dense, {"kv_lengths": ints(13, 2), "kv_starts": ints(1, 1)}),
    "one length for all": (dense, {"kv_lengths": ints(13).expand(2)}),
    "every other length": (dense, {"kv_lengths": ints(13, 7, 2, 7)[::2]}),
    "one slope for all": (dense, {"alibi_slopes": torch.ones(1).expand(2)}),
    "a column of sinks": (dense, {"sink": torch.randn(2, 3)[:, 1]}),
    "an end for all": (dense, {"query_ends": ints(3).expand(16)}),
    "ends of heads": (dense, {"query_ends": torch.randint(6, (2, 2, 16))}),
    "ends of all sequences": (dense, {"query_ends": torch.randint(6, (2, 16))}),
    "a negative view": (lambda: [torch._neg_view(x) for x in dense()], {}),
    "strides of 0": (lambda: [x[:, :1].expand(x.shape) for x in dense()], {}),
    "one query": (lambda: [x[:, ::16] if x.shape[1] == 16 else x[:, 3:4] for x in dense()], {}),
    "no keys": (lambda: dense(N=0), {}),
    "no sequences": (lambda: dense(B=0), {}),
}


@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("case", ASKED)
def test_a_version_is_asked_for_what_make_request_says(case, needs_grad, cuda, monkeypatch):
    """By a call that never came, and by those like it; results and gradients have the shapes of the
    caller's tensors.
    """
    make, options = ASKED[case]
    if needs_grad and "block_table" in options:
        pytest.skip("pages have no gradients")
    asked = []

    def forward(request):
        asked.append(request)
        batch, length, heads, _ = request.q.shape
        return torch.zeros(*request.q.shape[:3], 64), torch.zeros(batch, heads, length), None

    def gradients(request, o, lse, statistics, do, dlse):
        asked.append(request)
        assert o.shape == do.shape and o.dim() == 4 and lse.dim() == 3
        sink = request.sink
        return *map(torch.zeros_like, request[:3]), sink if sink is None else sink.clone()

    monkeypatch.setattr(call, "planned", lambda version, request, kind: (forward, None))
    monkeypatch.setattr(call, "planned_backward", lambda *given: gradients)
    for _ in range(3):
        asked.clear()
        leaves = [x.requires_grad_(needs_grad) for x in make()]
        expected = make_request(*leaves, return_lse=True, **options)
        o, lse = attention(*leaves, version="fa2", return_lse=True, **options)
        assert o.shape == leaves[0].shape
        assert lse.dim() == o.dim() - 1
        if needs_grad:
            o.sum().backward()
            assert [x.grad.shape for x in leaves] == [x.shape for x in leaves]
        assert len(asked) == 1 + needs_grad
        for found in asked:
            for name, x, y in zip(Request._fields, found, expected):
                if not isinstance(y, torch.Tensor):
                    assert type(x) is type(y) and x == y, name
                    continue
                assert (x.shape, x.stride(), x.dtype) == (y.shape, y.stride(), y.dtype), name
                assert torch.equal(x, y), name
