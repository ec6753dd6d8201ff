"""Several launches as one: CUDA graphs, whose kernels get other parameters in each call.

The driver launches a graph in less time than two kernels, even if each first gets the parameters of
this call (docs/understand/log.md). On the GPU, the way into and out of a graph takes longer than
that between two kernels, and the way from kernel to kernel within it is shorter. So a single kernel
is launched as such. So are kernels whose launches have attributes, such as clusters, or an early
start while the kernel before still runs. In a graph of ordinary edges that one would wait; CUDA
12.3 has edges that let it start, which are not made here.

A graph takes a tenth of a MiB of the GPU's memory and is never given back. So tapes of the same
kernels in one stream share graphs: there are as many as calls ever ran at once.
"""

import ctypes
from collections.abc import Callable
from functools import partial

from flash_versions.dispatch.replay.cuda import Launches, library

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
# set(node) for each kernel in order, and launch(); they return 0 or the number of an error.
Graph = tuple[Callable[..., int], ...]
pools: dict[tuple, list[Graph]] = {}  # by stream and kernels: graphs that no call uses now


class Node(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS: a kernel of a graph."""

    _fields_ = (
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint), ("parameters", ctypes.POINTER(ctypes.c_void_p)),
        ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    )  # fmt: skip


def pool(launches: Launches, stream: int) -> list[Graph] | None:
    """The graphs of these kernels that no call uses, at first at least one. None if there is only
    one launch, or one with attributes, or the driver refuses a graph.
    """
    if len(launches.parts) == 1 or any(config.number for _, config, _ in launches.parts):
        return None
    key = stream, *[handle for handle, *_ in launches.parts]
    found = pools.setdefault(key, [])
    if not found:
        if (graph := new_graph(more(launches), stream)) is None:
            return None
        found.append(graph)
    return found


def more(launches: Launches) -> tuple:
    """(memory, node, node, ...): memory for the parameters of launches, and the kernels, which read
    it. In place of `Launches.more`.
    """
    view, parameters = launches.memory()
    nodes = [
        ctypes.byref(Node(handle, config.grid, config.block, config.shared, pointers))
        for (handle, config, _), pointers in zip(launches.parts, parameters)
    ]
    return view, *nodes


def new_graph(params: tuple, stream: int) -> Graph | None:
    """A graph of launches with these parameters, one after the other; None if the driver refuses
    it.
    """
    # In the usual mode, making a graph would end another thread's capture of one.
    mode = ctypes.c_int(RELAXED)
    library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    try:
        return instance(params[1:], stream)
    finally:
        library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def instance(nodes: tuple, stream: int) -> Graph | None:
    """Likewise, where it disturbs no capture."""
    cuda, graph, made = library(), ctypes.c_void_p(), ctypes.c_void_p()
    error = cuda.cuGraphCreate(ctypes.byref(graph), 0)
    places: list[ctypes.c_void_p] = []
    for node in nodes:
        place, before = ctypes.c_void_p(), (ctypes.c_void_p * 1)(*places[-1:])
        about = graph, before, ctypes.c_size_t(min(len(places), 1)), node
        error = error or cuda.cuGraphAddKernelNode_v2(ctypes.byref(place), *about)
        places.append(place)
    flags = ctypes.c_ulonglong(0)
    if error or cuda.cuGraphInstantiateWithFlags(ctypes.byref(made), graph, flags):
        cuda.cuGraphDestroy(graph)
        return None
    sets = [partial(cuda.cuGraphExecKernelNodeSetParams_v2, made, place) for place in places]
    return *sets, partial(cuda.cuGraphLaunch, made, ctypes.c_void_p(stream))
