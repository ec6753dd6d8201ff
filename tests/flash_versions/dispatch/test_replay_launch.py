"""A replayed launch: what CUDA's driver is told, byte by byte. The driver is a stand-in."""

import ctypes
import sys
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
        self.told, self.wait = [], lambda: None
        self.graphs, self.thread = [], local()
        kinds = ctypes.POINTER(cuda.Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        self.cuLaunchKernelEx = ctypes.CFUNCTYPE(ctypes.c_int, *kinds, ctypes.c_void_p)(self.start)
        self.cuCtxGetCurrent = self.cuCtxSetCurrent = lambda *given: 0

    def start(self, config, function, parameters, extra):
        assert function == HANDLE and extra is None
        self.wait()
        found = config.contents
        attributes = [found.attributes[i] for i in range(found.number)]
        about = [[*found.grid], [*found.block], found.shared, found.stream]
        about.append([(x.id, *x.value[: 3 if x.id == cuda.CLUSTER else 1]) for x in attributes])
        told = [ctypes.string_at(parameters[i], n) for i, n in enumerate(self.sizes)]
        self.told.append((about, told))
        return 0

    def cuFuncGetParamInfo(self, function, index, offset, size):  # noqa: N802
        if index.value >= len(self.sizes):
            return 1
        size._obj.value = self.sizes[index.value]
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode):  # noqa: N802
        now = getattr(self.thread, "mode", 0)
        self.thread.mode, mode._obj.value = mode._obj.value, now
        return 0

    def cuGraphCreate(self, graph, flags):  # noqa: N802
        assert self.thread.mode == graphs.RELAXED, "else another thread's capture ends"
        self.graphs.append([])
        graph._obj.value = len(self.graphs)
        return 0

    def cuGraphAddKernelNode_v2(self, place, graph, before, number, node):  # noqa: N802
        kernels = self.graphs[graph.value - 1]
        assert list(before)[: number.value] == [len(kernels)][: len(kernels)], "behind the last"
        kernels.append(None)
        place._obj.value = len(kernels)
        return self.set(kernels, len(kernels), node)

    def cuGraphInstantiateWithFlags(self, made, graph, flags):  # noqa: N802
        made._obj.value = graph.value
        return 0

    def set(self, kernels, place, node):
        x = node._obj
        told = [ctypes.string_at(x.parameters[i], n) for i, n in enumerate(self.sizes)]
        kernels[place - 1] = [[*x.grid], [*x.block], x.shared], told
        return 0

    def cuGraphExecKernelNodeSetParams_v2(self, made, place, node):  # noqa: N802
        return self.set(self.graphs[made.value - 1], place.value, node)

    def cuGraphLaunch(self, made, stream):  # noqa: N802
        self.wait()
        for about, told in self.graphs[made.value - 1]:
            self.told.append(([*about, stream.value, []], told))
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
        return [Map(x.base.data_ptr()), *x.shape, *x.strides]

    module = SimpleNamespace(make_tensordesc_arg=make_tensordesc_arg)
    monkeypatch.setitem(sys.modules, CudaLauncher.__module__, module)

    def put(formats):
        found = Driver(formats)
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


def several(function=HANDLE, **options):
    """A tape of three launches, that was recorded."""
    compiled = kernel(("*fp32", "i32", "*fp32"), **options)
    compiled.function = function

    def launches(x):
        a, o = empty(4), empty(4)
        for given in ((x, 1, a), (a, 2, o), (x, 3, o)):
            note(compiled, (given[1], 1, 1), given)
        return (o,)

    tape = TapeOf(launches)
    for _ in range(2):
        tape((empty(3, 4),), STREAM)
    return tape


OPTIONS = {  # of Triton, the grid's first dimension by, and the attributes of a launch
    "a graph": ({}, 1, []),
    "programmatic": ({"launch_pdl": True}, 1, [(6, 1)]),
    "cooperative": ({"launch_cooperative_grid": True}, 1, [(2, 1)]),
    "clusters": ({"num_ctas": 2, "launch_pdl": True}, 2, [(6, 1), (4, 2, 1, 1), (5, 1)]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_launches_of_a_tape(case, told):
    options, factor, attributes = OPTIONS[case]
    seen = told("QiQQQ")
    tapes = several(**options), several(**options)
    for tape in tapes * 4:
        x = empty(3, 4)
        (o,) = tape((x,), STREAM)
    assert len(seen.told) == 24 and len(seen.graphs) == (not options), "tapes share a graph"
    several(function=HANDLE + 1, **options)
    assert len(seen.graphs) == 2 * (not options), "other kernels are another"
    found = [[unpack(f, y)[0] for f, y in zip("QiQ", given)] for _, given in seen.told[-3:]]
    (a,) = {found[0][2], found[1][0]}
    assert found == [[x.data_ptr(), 1, a], [a, 2, o.data_ptr()], [x.data_ptr(), 3, o.data_ptr()]]
    for n, (about, _) in enumerate(seen.told[-3:], 1):
        assert about == [[n * factor, 1, 1], [256, 1, 1], 1000, STREAM, attributes]


@pytest.mark.parametrize("options", [{}, {"launch_pdl": True}], ids=["a graph", "one by one"])
def test_threads_at_once_have_memory_of_their_own(options, told):
    seen = told("QiQQQ")
    tape, together = several(**options), Barrier(4)
    seen.wait = lambda: together.wait(10)
    inputs = [empty(3, 4) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            seen.told.clear()
            results = list(pool.map(lambda x: tape((x,), STREAM)[0], inputs))
            found = {unpack("Q", y[i])[0] for _, y in seen.told for i in (0, 2)}
            assert {x.data_ptr() for x in (*inputs, *results)} <= found


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


UNKNOWN = {
    "another size of one": ("*fp32", "iQQ", {}),
    "scratch memory": ("*fp32", "QQQ", {"global_scratch_size": 8}),
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
