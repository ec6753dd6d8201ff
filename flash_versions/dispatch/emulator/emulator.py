"""Gluon kernels for Hopper and Blackwell, run on the CPU: Triton interprets none of them.

`load` imports modules anew with stand-ins in the place of Triton. The same source, host code and
all, then computes with torch tensors, one thread per partition; machine.py lets them take
turns.

Hardware may be fast or slow. `machine.order` says which of these freedoms an emulation takes.
Loads that are late find a partition that does not wait for `full`; products that are late, that is,
which read their tiles when they are waited for, find one that releases a tile too early. Stores
always leave late: a tile is read when that is waited for. What was read reaches memory then, or, if
it is late as loads are, when that is waited for or the warps end. Shared memory begins as NaN.

Not modelled: layouts, registers, speed. A missing fence is noticed only before a TMA
store or a product, and, if `machine.loads_need_fences`, where TMA fills what was read.
Boxes are in tma.py, Hopper's products in wgmma.py, Blackwell's tensor memory and products in
tmem.py, and inline PTX is read by ptx.py. carried.py refuses a loop that Triton would compile to
another one than Python runs.
"""

import ast
import contextlib
import functools
import importlib
import math
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import torch

from flash_versions.dispatch.emulator import carried
from flash_versions.dispatch.emulator import ptx as gluon_ptx
from flash_versions.dispatch.emulator.machine import (
    Barrier,
    Barriers,
    MBarrierLayout,
    here,
    mbarrier,
    run_grid,
    warp_specialize,
)
from flash_versions.dispatch.emulator.tma import TensorDescriptor, fence_async_shared, tma
from flash_versions.dispatch.emulator.tmem import (
    TensorMemory,
    TensorMemoryLayout,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    tcgen05_commit,
    tcgen05_mma,
)
from flash_versions.dispatch.emulator.values import (
    Pointer,
    Tensor,
    allocation,
    computed,
    raw,
    tensor_of,
)
from flash_versions.dispatch.emulator.wgmma import warpgroup_mma, warpgroup_mma_wait


# ------------------------------------------------------------------------------- values
def constexpr(value):
    """A compile-time constant: for kernels a plain number, for the host one with a `value`."""
    return type("constexpr", (type(value),), {"value": value})(value)


def load_values(pointer, mask=True, other=0, cache_modifier=""):
    offset, mask, other = torch.broadcast_tensors(
        pointer.offset, tensor_of(mask), tensor_of(other).to(pointer.data.dtype)
    )
    inside = (offset >= 0) & (offset < pointer.data.numel())
    assert (inside | ~mask).all(), "a load past the ends of a tensor"
    values = pointer.data.detach()[torch.where(mask, offset, 0)]
    return Tensor(torch.where(mask, values, other))


def store(pointer, value, mask=True):
    offset, mask, value = torch.broadcast_tensors(
        pointer.offset, tensor_of(mask), tensor_of(value).to(pointer.data.dtype)
    )
    assert (offset[mask] >= 0).all(), "store in front of a tensor"
    pointer.data[offset[mask]] = value[mask]


def associative_scan(x, axis, combine):
    assert axis == 0 and x.data.dim() == 1, "only numbers in a line are scanned"
    found = [Tensor(x.data[0])]
    for value in x.data[1:]:
        found.append(combine(found[-1], Tensor(value)))
    return Tensor(torch.stack([value.data for value in found]))


def atomic_add(pointer, value, sem="acq_rel"):
    here.partition.pause()
    before = pointer.data[pointer.offset].clone()
    pointer.data[pointer.offset] += value
    return Tensor(before)


def barrier():
    """Of the threads of a partition, which are one here: others come as far as they can."""
    here.partition.pause(late=True)


class Shared:
    """Tiles in shared memory; views share their storage."""

    def __init__(self, data):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    @property
    def region(self):
        """The elements that it covers, from the first to the last: (storage, begin, end)."""
        begin = self.data.storage_offset()
        steps = zip(self.data.shape, self.data.stride())
        return allocation(self), begin, begin + 1 + sum((n - 1) * step for n, step in steps)

    def index(self, i):
        assert 0 <= i < self.shape[0], f"slot {i} of {self.shape[0]}"
        return Shared(self.data[int(i)])

    def reshape(self, shape):
        return Shared(self.data.view(shape))

    def permute(self, axes):
        return Shared(self.data.permute(axes))

    def slice(self, start, length, dim=0):
        return Shared(self.data.narrow(dim, start, length))

    def store(self, value):
        assert (value.shape, value.dtype) == (self.shape, self.dtype), "a tile of another kind"
        here.partition.program.check_write(self, "shared memory")
        self.data.copy_(value.data)
        unfenced = here.partition.program.unfenced
        unfenced[self.data.data_ptr()] = here.partition, self

    def load(self, layout):
        if here.partition.program.machine.order.late_products == 1:
            here.partition.pause(late=True)  # a read as late as products finds who releases before
        here.partition.program.read[self.data.data_ptr(), here.partition] = self
        return Tensor(self.data.clone())


class Layout:
    """Takes anything, means nothing."""

    def __init__(self, *arguments):
        pass

    @classmethod
    def get_default_for(cls, shape, dtype):
        return cls()


def allocate_shared_memory(dtype, shape, layout):
    if isinstance(layout, MBarrierLayout):
        return Barriers([Barrier() for _ in range(shape[0])])
    return Shared(torch.full(shape, math.nan if dtype.is_floating_point else -1, dtype=dtype))


# ------------------------------------------------------------------------------- inline PTX
def inline_asm_elementwise(asm, constraints, args, dtype, is_pure, pack):
    if "%clock64" in asm:
        return Tensor(torch.tensor(here.partition.program.machine.tick()))
    args = [x if isinstance(x, Pointer) else x.data for x in args]
    return Tensor(gluon_ptx.elementwise(asm, constraints, args, dtype, pack))


# ------------------------------------------------------------------------------- Triton's modules
class Jit:
    """A kernel or a function for kernels."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, *arguments, **named):
        return self.function(*arguments, **named)

    def __get__(self, instance, owner):
        return self if instance is None else functools.partial(self, instance)

    def __getitem__(self, grid):
        return functools.partial(self.launch, grid)

    def launch(self, grid, *arguments, num_warps, **constants):
        for option in ("num_stages", "maxnreg", "launch_pdl"):
            constants.pop(option, None)
        arguments = [Pointer(x.view(-1)) if isinstance(x, torch.Tensor) else x for x in arguments]
        run_grid(functools.partial(self.function, **constants), grid[0], arguments)


def jit(function=None, **options):
    return jit if function is None else Jit(function)


def aggregate(cls):
    def __init__(self, *values):
        for name, value in zip(cls.__annotations__, values, strict=True):
            setattr(self, name, value)

    cls.__init__ = __init__
    return cls


def module(name, *values, **named):
    made = ModuleType(name)
    vars(made).update({x.__name__: x for x in values}, **named)
    return made


def static_assert(condition, message=""):
    assert condition, message


ARITHMETIC = {
    "maximum": lambda a, b, propagate_nan=None: computed(torch.maximum)(a, b),
    "minimum": computed(torch.minimum),
    "where": computed(torch.where),
    "to_tensor": computed(lambda x: x),
    "cdiv": lambda a, b: (a + (b - 1)) // b,
    "max": lambda x, axis: Tensor(x.data.amax(axis)),
    "min": lambda x, axis: Tensor(x.data.amin(axis)),
    "sum": lambda x, axis: Tensor(x.data.sum(axis)),
    "reshape": Tensor.reshape,
    "permute": Tensor.permute,
    "join": lambda a, b: Tensor(torch.stack((a.data, b.data), -1)),
    "split": lambda x: tuple(map(Tensor, x.data.unbind(-1))),
    "broadcast": lambda a, b: tuple(map(Tensor, torch.broadcast_tensors(a.data, b.data))),
    "static_range": range,
    "static_assert": static_assert,
    "float8e4nv": torch.float8_e4m3fn,
    "float8e5": torch.float8_e5m2,
    **{name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "int32", "int64")},
    **{name: computed(getattr(torch, name)) for name in ("abs", "exp", "exp2", "log2")},
}
tl = module("triton.language", constexpr, PropagateNan=SimpleNamespace(ALL=None), **ARITHMETIC)
gl = module(
    "triton.experimental.gluon.language",
    constexpr,
    store,
    atomic_add,
    barrier,
    associative_scan,
    warp_specialize,
    allocate_shared_memory,
    inline_asm_elementwise,
    **ARITHMETIC,
    **dict.fromkeys(("NVMMASharedLayout", "NVMMADistributedLayout", "DotOperandLayout"), Layout),
    **dict.fromkeys(("SliceLayout", "BlockedLayout", "SwizzledSharedLayout"), Layout),
    tensor=Tensor,
    shared_memory_descriptor=Shared,
    load=load_values,
    num_warps=lambda: 4,
    program_id=lambda axis: Tensor(torch.tensor(here.partition.program.id, dtype=torch.int32)),
    num_programs=lambda axis: here.partition.program.programs,
    zeros=lambda shape, dtype, layout: Tensor(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, value, dtype, layout: Tensor(torch.full(shape, raw(value), dtype=dtype)),
    arange=lambda start, end, layout: Tensor(torch.arange(start, end, dtype=torch.int32)),
    convert_layout=lambda x, layout, assert_trivial: x,
)
gluon = module("gluon", jit, aggregate, language=gl, constexpr_function=lambda f: f)


class Semantic:
    """What builtins of Gluon are made of."""

    def memdesc_reinterpret(tile, dtype, shape, layout):
        return Shared(tile.data.view(-1).view(dtype).view(shape))


def builtin(function):
    return functools.partial(function, _semantic=Semantic)


def gdc_wait():
    """A kernel is emulated when the one before has ended."""


def gdc_launch_dependents():
    """See `gdc_wait`."""


NVIDIA = "triton.experimental.gluon.language.nvidia"
HOPPER = f"{NVIDIA}.hopper"
blackwell = module(
    f"{NVIDIA}.blackwell",
    mbarrier,
    tma,
    fence_async_shared,
    allocate_tensor_memory,
    get_tmem_reg_layout,
    tcgen05_commit,
    tcgen05_mma,
    TensorMemoryLayout,
    tensor_memory_descriptor=TensorMemory,
)
MODULES = {
    "triton": module("triton", jit, language=tl),
    "triton.language": tl,
    "triton.language.extra": module("extra"),
    "triton.language.extra.cuda": module("cuda", gdc_wait, gdc_launch_dependents),
    "triton.experimental": module("triton.experimental", gluon=gluon),
    "triton.experimental.gluon": gluon,
    gl.__name__: gl,
    f"{gl.__name__}._core": module("core", builtin),
    NVIDIA: module(NVIDIA, blackwell=blackwell),
    blackwell.__name__: blackwell,
    HOPPER: module(HOPPER, mbarrier, tma, fence_async_shared, warpgroup_mma, warpgroup_mma_wait),
    "triton.experimental.gluon.nvidia.hopper": module("host", TensorDescriptor),
}


ROOMS = ("flash_versions.versions.", "transformer.model.kernels.")
# Portable kernels that emulated host code launches: Triton interprets these.
INTERPRETED = (
    "flash_versions.versions.fa2.",
    "flash_versions.versions.fp8.",
    "flash_versions.versions.fa3.hopper.backward.rows",
    "flash_versions.versions.tiles.intervals",
    "flash_versions.versions.tiles.sequences",
    "flash_versions.versions.tiles.varlen_scheduler",
)


def parts(name, found):
    """Append the modules that an emulated kernel is made of, each after those it imports."""
    importlib.import_module(name)  # and all else that it imports, with the real Triton
    if name not in found:
        parts_of(Path(sys.modules[name].__file__).read_text(), found, name)
        found.append(name)
    return found


def parts_of(text, found, where):
    """Append the modules that a text imports and that are emulated, each after its own."""
    carried.check(text, where)
    for part in imported(text):
        parts(part, found)
    return found


@functools.cache
def imported(text):
    """The modules that a text imports and that are emulated."""
    names = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return [
        name
        for name in names
        if name.startswith(ROOMS) and not name.startswith(INTERPRETED) and is_file(name)
    ]


def is_file(name):
    """Whether a name is that of a module with a file, and of no package or function."""
    try:
        return not hasattr(importlib.import_module(name), "__path__")
    except ModuleNotFoundError:
        return False


def load(name):
    """Import a kernel's module and its `parts` once more, with the emulator in the place of Triton.

    Returns:
        The modules by name, without the "flash_versions.versions." in front; the kernel's is last.
    """
    names = parts(name, [])
    with emulated(names):
        return {x.removeprefix(ROOMS[0]): importlib.import_module(x) for x in names}


def run_file(path):
    """Run a file that is no module of the package as `load` imports one; returns its names."""
    names = parts_of(path.read_text(), [], path)
    with emulated(names):
        return runpy.run_path(str(path))


@contextlib.contextmanager
def emulated(names):
    """Inside, these modules and what imports Triton are imported with the emulator in its place."""
    packages = {name.rpartition(".")[0] for name in names}
    namespaces = [vars(sys.modules[package]) for package in packages]
    with contextlib.ExitStack() as stack:
        for namespace in (sys.modules, *namespaces):
            stack.enter_context(patch.dict(namespace))
        sys.modules.update(MODULES)
        for name in names:
            del sys.modules[name]
        yield
