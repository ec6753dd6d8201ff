"""A replayed launch: what CUDA's driver is told, byte by byte. The driver is a stand-in."""

import ctypes
import gc
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from struct import calcsize, pack, unpack
from threading import Barrier, local
from types import SimpleNamespace

import pytest
import torch

from flash_versions.dispatch.replay import cuda, driver, graphs
from flash_versions.dispatch.replay.recording import lasting, note
from tests.helpers.kernels.launches import TapeOf

STREAM, HANDLE = 7, 0x1234
GRID = (5, 3, 2)


class Map:
    """Like Triton's object of an encoded descriptor: 128 bytes behind Python's header, which here
    are 16 references.
    """

    __slots__ = tuple(f"part{i}" for i in range(16))

    def __init__(self, address):
        for name in self.__slots__:
            setattr(self, name, address)


class Descriptor:
    def __init__(self, x):
        self.base, self.shape, self.strides, self.block_shape = x, x.shape, x.stride(), [1, 1]


class CudaLauncher:
    """Triton's launcher; what it is called with is in `seen`."""

    __module__ = "nvidia_driver"
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, **options):
        self.__dict__.update(options, seen=[])

    def __call__(self, *given):
        self.seen.append(given)


class Driver:
    """CUDA's driver, for a function with parameters of these formats. `told` is what it was told:
    (about, parameters) of each launch, of those in a graph when the graph is launched.
    """

    def __init__(self, formats):
        self.sizes = [calcsize(x) for x in formats]
        self.told, self.errors, self.contexts, self.wait = [], [], [], lambda: None
        self.graphs, self.thread, self.refused = [], local(), None
        kinds = ctypes.POINTER(cuda.Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *kinds, ctypes.c_void_p)(self.start)

    def start(self, config, function, parameters, extra):
        assert function == HANDLE and extra is None
        self.wait()
        found = config.contents
        attributes = [found.attributes[i] for i in range(found.number)]
        about = [[*found.grid], [*found.block], found.shared, found.stream]
        about.append([(x.id, *x.value[: 3 if x.id == cuda.CLUSTER else 1]) for x in attributes])
        told = [ctypes.string_at(parameters[i], n) for i, n in enumerate(self.sizes)]
        self.told.append((about, told))
        return self.errors.pop(0) if self.errors else 0

    def cuFuncGetParamInfo(self, function, index, offset, size):  # noqa: N802
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuDevicePrimaryCtxRetain(self, context, device):  # noqa: N802
        context._obj.value = 99
        return 0

    def cuCtxSetCurrent(self, context):  # noqa: N802
        self.contexts.append(context.value)
        self.thread.context = context.value
        return 0

    def cuCtxGetCurrent(self, context):  # noqa: N802
        context._obj.value = getattr(self.thread, "context", None)
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        now = getattr(self.thread, "mode", 0)
        self.thread.mode, mode._obj.value = mode._obj.value, now
        return 0

    def cuGraphCreate(self, graph, flags):  # noqa: N802
        assert self.thread.mode == graphs.RELAXED
        self.graphs.append([])
        graph._obj.value = len(self.graphs)
        return 0

    def cuGraphAddKernelNode_v2(self, place, graph, before, number, node):  # noqa: N802
        assert self.thread.context, "the driver would crash"
        if self.refused == "kernel":
            return 2
        kernels = self.graphs[graph.value - 1]
        assert list(before)[: number.value] == [len(kernels)][: len(kernels)], "behind the last"
        kernels.append(None)
        place._obj.value = len(kernels)
        return self.set(kernels, len(kernels), node)

    def cuGraphInstantiateWithFlags(self, made, graph, flags):  # noqa: N802
        assert self.thread.mode == graphs.RELAXED and flags.value == 0
        made._obj.value = graph.value
        return 2 if self.refused == "graph" else 0

    def cuGraphDestroy(self, graph):  # noqa: N802
        assert self.thread.mode == graphs.RELAXED
        self.graphs[graph.value - 1] = None
        return 0

    def set(self, kernels, place, node):
        x = node._obj
        about = [[*x.grid], [*x.block], x.shared]
        assert (x.function, x.extra, x.kernel, x.context) == (HANDLE, None, None, None)
        told = [ctypes.string_at(x.parameters[i], n) for i, n in enumerate(self.sizes)]
        kernels[place - 1] = about, told
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, made, place, node):  # noqa: N802
        assert self.thread.context, "here, too"
        if self.refused == "parameters":
            return 2
        return self.set(self.graphs[made.value - 1], place.value, node)

    def cuGraphLaunch(self, made, stream):  # noqa: N802
        self.wait()
        for about, told in self.graphs[made.value - 1]:
            self.told.append(([*about, stream.value, []], told))
        return self.errors.pop(0) if self.errors else 0

    def cuGetErrorString(self, error, text):  # noqa: N802
        text._obj.value = b"a reason"
        return 0


def kernel(signature, metadata=(), num_ctas=1, **options):
    return SimpleNamespace(
        function=HANDLE, packed_metadata=(8, num_ctas, 1000), run=CudaLauncher(**options),
        src=SimpleNamespace(signature={str(i): x for i, x in enumerate(signature)}),
        metadata=SimpleNamespace(tensordesc_meta=metadata),
    )  # fmt: skip


@pytest.fixture
def told(monkeypatch):
    """told(formats) puts the driver of a function with such parameters in place."""

    def make_tensordesc_arg(x, metadata):
        assert getattr(cuda.library().thread, "context", None), "nothing is encoded without"
        return [Map(x.base.data_ptr()), *x.shape, *x.strides]

    module = SimpleNamespace(make_tensordesc_arg=make_tensordesc_arg)
    monkeypatch.setitem(sys.modules, CudaLauncher.__module__, module)

    def put(formats):
        found = Driver(formats)
        found.thread.context = 98
        for place in (cuda, driver, graphs):
            monkeypatch.setattr(place, "library", lambda: found)
        return found

    return put


def empty(*shape):
    """Memory that the tests' fixture does not fill."""
    return torch.empty_strided(shape, (shape[1], 1) if len(shape) == 2 else (1,))


def taped(compiled, *arguments):
    """A tape that takes o, and launches with the arguments that these functions of (x, o) give."""

    def function(x):
        o = empty(4)
        given = tuple(f(x, o) if callable(f) else f for f in arguments)
        note(compiled, GRID, given)
        return (o,)

    tape, x = TapeOf(function), empty(3, 4)
    for _ in range(2):
        tape((x,), STREAM)
    return tape


def an_x(x, o):
    return x


SEQUENCES = "*i32", "constexpr", "i32"
SIGNATURE = "*fp32", "i32", "i64", "i1", "fp32", "constexpr", "*fp32", SEQUENCES
FORMATS = "QiqbfQQiQQ"


def test_every_kind_of_parameter(told, monkeypatch):
    seen, pair = told(FORMATS), torch.zeros(2)
    monkeypatch.setitem(lasting, pair.data_ptr(), pair)
    compiled = kernel(SIGNATURE)
    given = -5, -(2**40), True, 2.5, "constant"
    tape = taped(compiled, an_x, *given, lambda x, o: o[2:], (pair, None, 9))
    assert tape.replay is not None, tape.reason
    for _ in range(3):  # at other addresses
        x = empty(3, 4)
        (o,) = tape((x,), STREAM)
        values = x.data_ptr(), *given[:4], o.data_ptr() + 8, pair.data_ptr(), 9, 0, 0
        about, found = seen.told[-1]
        assert found == [pack(f"<{f}", y) for f, y in zip(FORMATS, values, strict=True)]
        assert about == [[*GRID], [256, 1, 1], 1000, STREAM, []]
    assert len(seen.told) == 3 and compiled.run.seen == []


def several(**options):
    """A tape of three launches, that was recorded."""
    compiled = kernel(("*fp32", "i32", "*fp32"), **options)

    def function(x):
        a, o = empty(4), empty(4)
        for given in ((x, 1, a), (a, 2, o), (x, 3, o)):
            note(compiled, (given[1], 1, 1), given)
        return (o,)

    tape = TapeOf(function)
    for _ in range(2):
        tape((empty(3, 4),), STREAM)
    return tape


def grids(seen):
    """The first numbers of the grids of launches."""
    return [about[0][0] for about, _ in seen.told]


@pytest.mark.parametrize("options", [{}, {"launch_pdl": True}], ids=["a graph", "one by one"])
def test_launches_of_a_tape_write_their_parameters_together(options, told):
    seen = told("QiQQQ")
    tape = several(**options)
    for _ in range(5):
        x = empty(3, 4)
        (o,) = tape((x,), STREAM)
    assert len(seen.told) == 15 and len(seen.graphs) == (not options)
    assert all(about[3] == STREAM for about, _ in seen.told)
    found = [[unpack(f, y)[0] for f, y in zip("QiQ", given)] for _, given in seen.told[-3:]]
    (a,) = {found[0][2], found[1][0]}
    assert found == [[x.data_ptr(), 1, a], [a, 2, o.data_ptr()], [x.data_ptr(), 3, o.data_ptr()]]
    assert [about[0] for about, _ in seen.told[-3:]] == [[n, 1, 1] for n in (1, 2, 3)]
    assert tape.replay.__doc__.count("pack(") == 1


def test_tapes_of_the_same_kernels_share_a_graph(told):
    seen = told("QiQQQ")
    tapes = several(), several()
    for _ in range(3):
        for tape in tapes:
            tape((empty(3, 4),), STREAM)
    assert len(seen.graphs) == 1 and grids(seen) == [1, 2, 3] * 6
    assert [len(x) for x in graphs.pools.values()] == [1]


def test_a_graph_belongs_to_one_call_at_a_time(told):
    seen = told("QiQQQ")
    tape, together = several(), Barrier(4)
    seen.wait = lambda: together.wait(10)
    inputs = [empty(3, 4) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:  # whose threads have no context at first
        for _ in range(5):
            seen.told.clear()
            results = list(pool.map(lambda x: tape((x,), STREAM)[0], inputs))
            found = {unpack("Q", y[i])[0] for _, y in seen.told for i in (0, 2)}
            assert {x.data_ptr() for x in (*inputs, *results)} <= found
    assert len(seen.graphs) == 4 == len(*graphs.pools.values())
    assert {*seen.contexts} == {98}


@pytest.mark.parametrize("what", ["kernel", "graph"])
def test_what_the_driver_makes_no_graph_of_is_launched_one_by_one(what, told):
    seen = told("QiQQQ")
    seen.refused = what
    several()((empty(3, 4),), STREAM)
    assert grids(seen) == [1, 2, 3] and seen.graphs == [None]
    assert seen.thread.mode == 0


@pytest.mark.parametrize("what", ["kernel", "graph", "parameters"])
def test_a_call_whose_graph_is_refused_goes_the_ordinary_way(what, told, monkeypatch):
    seen = told("QiQQQ")
    tape = several()
    (pool,) = graphs.pools.values()
    if what != "parameters":  # else the graph of the recording is used
        pool.clear()
    seen.refused = what
    result, x = (empty(4),), empty(3, 4)
    with monkeypatch.context() as patch:
        patch.setattr(tape, "function", lambda x: result)
        assert tape((x,), STREAM) is result and not seen.told
    assert len(pool) == (what == "parameters"), "one that refuses parameters is not made again"
    seen.refused = None
    tape((x,), STREAM)
    assert grids(seen) == [1, 2, 3] and seen.thread.mode == 0


def test_a_graph_that_fails_says_so(told):
    seen = told("QiQQQ")
    tape = several()
    seen.errors = [1]
    with pytest.raises(RuntimeError, match="refused a launch: a reason"):
        tape((empty(3, 4),), STREAM)
    tape((empty(3, 4),), STREAM)
    assert len(seen.graphs) == 2, "one that failed is not used again"


def test_a_kernel_of_triton_s_launcher_is_no_part_of_a_graph(told):
    seen = told("QQQ")
    known, unknown = kernel(("*fp32",)), kernel(("*fp32",), global_scratch_size=8)

    def function(x):
        for compiled in (known, unknown, known):
            note(compiled, GRID, (x,))
        return (empty(4),)

    tape = TapeOf(function)
    for _ in range(3):
        tape((empty(3, 4),), STREAM)
    assert len(seen.told) == 2 and len(unknown.run.seen) == 1 and not seen.graphs


def test_a_thread_without_a_context_encodes_a_map(told):
    seen = told(["128s", *"iiqq", *"QQ"])
    tape = taped(kernel(("tensordesc<fp32[1, 1]>",), ({},)), lambda x, o: Descriptor(x))
    seen.contexts.clear()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(tape, (empty(3, 4),), STREAM).result()
    assert tape.replay is not None, tape.reason
    assert seen.contexts == [98] and len(seen.told) == 1


def test_a_descriptor_is_its_map_and_its_numbers(told):
    seen = told(["128s", *"iiqq", "Q", "128s", *"iiqq", *"QQ"])
    box = "tensordesc<fp32[1, 1]>"
    compiled = kernel((box, "*fp32", box), ({}, {}))
    tape = taped(
        compiled, lambda x, o: Descriptor(x), lambda x, o: o, lambda x, o: Descriptor(x[1:])
    )
    assert tape.replay is None, "x[1:] is neither given nor taken"
    tape = taped(compiled, lambda x, o: Descriptor(x), lambda x, o: o, lambda x, o: Descriptor(x))
    for x in [empty(3, 4)] * 2 + [empty(3, 4)]:
        (o,) = tape((x,), STREAM)
        found = seen.told[-1][1]
        (first, *numbers), pointer, (second, *again) = found[:5], found[5], found[6:]
        references = {ctypes.cast(n, ctypes.py_object).value for n in unpack("16Q", first)}
        assert references == {x.data_ptr()} and second == first
        expected = [pack(f, n) for f, n in zip("iiqq", (3, 4, 4, 1))]
        assert numbers == expected and again == [*expected, bytes(8), bytes(8)]
        assert pointer == pack("Q", o.data_ptr())


def test_a_descriptor_that_cannot_be_encoded_costs_no_result(told, monkeypatch, caplog):
    caplog.set_level("DEBUG")
    seen = told(["128s", *"iiqq", *"QQ"])

    def refuse(x, metadata):
        raise RuntimeError("invalid argument")

    monkeypatch.setattr(sys.modules[CudaLauncher.__module__], "make_tensordesc_arg", refuse)
    tape = taped(kernel(("tensordesc<fp32[1, 1]>",), ({},)), lambda x, o: Descriptor(x))
    (o,) = tape((empty(3, 4),), STREAM)
    assert o.shape == (4,) and tape.replay is None and "invalid argument" in tape.reason
    assert "a call is not replayed: invalid argument" in caplog.text
    assert not seen.told


def test_the_layers_of_a_model_find_their_descriptors(told, monkeypatch):
    """Each layer's tensors are elsewhere, and a deep model calls as many before the first again."""
    told(["128s", *"iiqq", *"QQ"])
    encoded = []

    def encode(x, metadata):
        encoded.append(x.base.data_ptr())
        return [Map(x.base.data_ptr()), *x.shape, *x.strides]

    monkeypatch.setattr(sys.modules[CudaLauncher.__module__], "make_tensordesc_arg", encode)
    tape = taped(kernel(("tensordesc<fp32[1, 1]>",), ({},)), lambda x, o: Descriptor(x))
    encoded.clear()
    layers = [empty(3, 4) for _ in range(128)]
    for _ in range(3):
        for x in layers:
            tape((x,), STREAM)
    assert sorted(encoded) == sorted(x.data_ptr() for x in layers), "each once"


def test_a_tape_keeps_no_tensor_of_the_call_that_it_recorded(told):
    told(["128s", *"iiqq", *"QQQ"])
    seen = []

    def box(x, o):
        seen.extend(map(weakref.ref, (x, o)))
        return Descriptor(x)

    compiled = kernel(("tensordesc<fp32[1, 1]>", "*fp32"), ({},))
    tape = taped(compiled, box, lambda x, o: o)
    gc.collect()
    assert tape.replay is not None, tape.reason
    assert [x() for x in seen] == [None] * 4


def test_a_launch_without_programs_is_left_out(told):
    """Triton's launcher makes none, and the driver refuses it."""
    seen, compiled = told("QQQ"), kernel(("*fp32",))

    def function(x):
        note(compiled, (4, 0, 1), (x,))
        note(compiled, GRID, (x,))
        return (empty(4),)

    tape = TapeOf(function)
    for _ in range(3):
        tape((empty(3, 4),), STREAM)
    assert tape.replay is not None, tape.reason
    ((about, _),) = seen.told
    assert about[0] == [*GRID]


OPTIONS = {
    "programmatic": ({"launch_pdl": True}, [5, 3, 2], [(6, 1)]),
    "cooperative": ({"launch_cooperative_grid": True}, [5, 3, 2], [(2, 1)]),
    "clusters": ({"num_ctas": 2, "launch_pdl": True}, [10, 3, 2], [(6, 1), (4, 2, 1, 1), (5, 1)]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_attributes_are_triton_s(case, told):
    options, grid, attributes = OPTIONS[case]
    seen = told("QQQ")
    taped(kernel(("*fp32",), **options), an_x)((empty(3, 4),), STREAM)
    ((about, _),) = seen.told
    assert about[0] == grid and about[-1] == attributes


def test_threads_at_once_have_memory_of_their_own(told):
    seen = told("QQQQ")
    tape = taped(kernel(("*fp32", "*fp32")), an_x, lambda x, o: o)
    together = Barrier(4)
    seen.wait = lambda: together.wait(10)
    inputs = [empty(3, 4) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            seen.told.clear()
            results = list(pool.map(lambda x: tape((x,), STREAM)[0], inputs))
            found = {tuple(unpack("Q", part)[0] for part in parts[:2]) for _, parts in seen.told}
            assert found == {(x.data_ptr(), o.data_ptr()) for x, o in zip(inputs, results)}


def test_a_thread_without_a_context_gets_one(told):
    seen = told("QQQ")
    tape = taped(kernel(("*fp32",)), an_x)
    seen.errors = [cuda.INVALID_CONTEXT]
    tape((empty(3, 4),), STREAM)
    assert seen.contexts == [99] and len(seen.told) == 2
    for errors in ([1], [cuda.INVALID_CONTEXT, 1]):
        seen.errors = errors
        with pytest.raises(RuntimeError, match="refused a launch: a reason"):
            tape((empty(3, 4),), STREAM)
    tape((empty(3, 4),), STREAM)


UNKNOWN = {
    "another number of parameters": ("*fp32", "QQQQ", {}),
    "another size of one": ("*fp32", "iQQ", {}),
    "a type without a format": ("bf16", "hQQ", {}),
    "scratch memory": ("*fp32", "QQQ", {"global_scratch_size": 8}),
    "a profiler's memory": ("*fp32", "QQQ", {"profile_scratch_size": 8}),
    "instrumentation": ("*fp32", "QQQ", {"gsan_enabled": True}),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_launched_by_triton(case, told):
    kind, formats, options = UNKNOWN[case]
    seen, compiled = told(formats), kernel((kind, "constexpr"), **options)
    x = empty(3, 4)
    taped(compiled, an_x, "constant")((x,), STREAM)
    about = HANDLE, (8, 1, 1000), None, None, None
    assert compiled.run.seen == [(*GRID, STREAM, *about, x.data_ptr(), "constant")]
    assert seen.told == []


def test_an_old_driver_leaves_launches_to_triton(monkeypatch):
    monkeypatch.setattr(driver, "library", lambda: None)
    compiled = kernel(("*fp32",))
    taped(compiled, an_x)((empty(3, 4),), STREAM)
    assert len(compiled.run.seen) == 1
