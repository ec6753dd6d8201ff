"""Launching kernels with little time on the host.

To find the compiled form of a kernel, Triton looks at each argument of a call: is a stride a
multiple of 16, is a pointer aligned? For the fifty or so arguments of attention it takes longer
than the launch itself, and its launcher takes several times as long as CUDA's. A `Launcher` asks
Triton once for each class of arguments. Lengths, strides and totals are numbers at run time, so a
new length is no new class. What knows classes and launches is written in C (`launch.c`), which is
compiled once, as Triton compiles its own launchers; where that is not possible, Triton launches.
"""

import ctypes
import logging
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import triton.language as tl
from triton import knobs
from triton.runtime import driver as runtime_driver
from triton.runtime.build import compile_module_from_src
from triton.runtime.jit import JITFunction

MOST_SHARED = 228 * 1024  # bytes; above that, Triton's launcher sets another attribute
# The types of Triton's signatures by the format of `struct` that has their size.
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "b", "u8": "b",
           "u16": "h", "u32": "I", "u64": "q", "fp32": "f", "fp64": "d"}  # fmt: skip
# What `launch.c` calls of CUDA's driver, in its order.
DRIVER = ("cuLaunchKernelEx", "cuTensorMapEncodeTiled", "cuFuncGetParamInfo", "cuCtxGetCurrent",
          "cuCtxSetCurrent", "cuDevicePrimaryCtxRetain", "cuGetErrorString",
          "cuDriverGetVersion")  # fmt: skip
ATTRIBUTE = struct.Struct("=Q3I52x")  # of a launch: its number and up to three parts of its value
COOPERATIVE, CLUSTER, SPREAD, AFTER_PREVIOUS = 2, 4, 5, 6  # `CUlaunchAttributeID`
SLOT = struct.Struct("=5i5I")  # `Slot` of `launch.c`
MOST_DIMS = 5  # of a descriptor
SCRATCH = [8, 8]  # bytes of a kernel's last parameters, two addresses, which are 0 here
# What changes operations on tensors of torch, or watches them, is truthy.
WATCHERS = (
    torch._C._len_torch_dispatch_stack,
    torch._C._functorch.peek_interpreter_stack,
    torch._C._get_tracing_state,
)
# What the code of torch.compile takes memory by, by the type of a device: it takes half the time of
# `torch.empty_strided`, because it asks for no dispatch mode. Of GPUs it is the current one.
TAKE: dict[str, Any] = {"cuda": getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)}
Form = Callable[[tuple[int, ...], tuple], Any]  # form(grid, arguments) launches a kernel


@cache
def native() -> Any:
    """The module of `launch.c`; None where it cannot be had."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value for name in DRIVER]
        source = Path(__file__).with_suffix(".c").read_text()
        module = compile_module_from_src(source, "launch")
        types = torch.Tensor, torch.nn.Parameter, JITFunction, tl.constexpr
        addresses = struct.pack(f"{len(DRIVER)}Q", *found)
        module.prepare(addresses, *types, WATCHERS, torch.is_grad_enabled)
    except Exception as error:  # no compiler, another or an older driver: calls take longer
        logging.getLogger(__name__).debug("kernels are launched by Triton: %s", error)
        return None
    return module


class Launcher:
    """A kernel, with its compiled forms by the kinds of its arguments.

    Args:
        kernel: of Triton or Gluon. Its parameters in do_not_specialize stay below 2^31.
        options: further ones of Triton.
            launch_pdl=True: it is launched while the kernel before it runs, and waits for that by
            gdc_wait. maxnreg: registers of a thread at the start of a program, so that more
            programs fit.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.forms: dict[tuple, Form] = {}
        # Which arguments Triton looks at only to see whether they are None.
        parameters = getattr(kernel, "params", ())
        self.unread = bytes(x.do_not_specialize for x in parameters if not x.is_constexpr)

    def __call__(
        self,
        grid: tuple[int, ...],
        arguments: tuple,
        constants: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 2,
    ) -> Form | None:
        """Launch the kernel on `grid`.

        Args:
            grid: one to three dimensions.
            arguments: the run-time parameters, in order.
            constants: the tl.constexpr parameters that follow them, in order.
            num_warps: warps of a program.
            num_stages: stages of software pipelining.

        Returns:
            what launches the kernel on other arguments of their kinds; None of a kernel that is
            simulated.
        """
        values = tuple(constants.values())
        others = (num_warps, num_stages, *values)
        if self.forms:
            form = self.forms.get(native().kinds(arguments, self.unread, others))
            if form is not None:
                form(grid, arguments)
                return form
        compiled = self.kernel[grid](
            *arguments, **constants, num_warps=num_warps, num_stages=num_stages, **self.options
        )
        if compiled is None:
            return None
        form = make_form(compiled, values)
        if native() is not None:
            self.forms[native().kinds(arguments, self.unread, others)] = form
        return form


def make_form(compiled: Any, values: tuple) -> Form:
    """What launches a compiled kernel of these constants: CUDA's driver alone; or Triton, where a
    hook is set, such as a profiler's, or this kernel, this Triton or this driver is not known well
    enough.
    """
    by_triton = partial(launch_by_triton, compiled, values)
    run, module = compiled.run, native()
    if (
        module is None
        or type(run).__name__ != "CudaLauncher"
        or getattr(run, "gsan_enabled", False)
    ):
        return by_triton
    try:
        num_warps, num_ctas, shared = compiled.packed_metadata
        if run.global_scratch_size or run.profile_scratch_size or shared > MOST_SHARED:
            return by_triton
        driver = runtime_driver.active
        descriptors = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        types = sys.modules[type(run).__module__].TMA_DTYPE_DEVICE_TO_HOST
        slots = list(slots_of(compiled.src.signature.values(), descriptors, types))
        sizes = [size for _, parameters in slots for size in parameters] + SCRATCH
        if module.sizes(compiled.function) != sizes:
            raise ValueError("it has other parameters")
        return module.Form(
            compiled.function, driver.get_current_device(), 32 * num_warps, shared, num_ctas,
            attributes_of(run, num_ctas), b"".join(slot for slot, _ in slots), len(sizes),
            driver.get_current_stream, knobs.runtime, by_triton
        )  # fmt: skip
    except (AttributeError, KeyError, ValueError, struct.error) as error:
        logging.getLogger(__name__).debug("%s is launched by Triton: %s", compiled.name, error)
        return by_triton


def attributes_of(run: Any, num_ctas: int) -> bytes:
    """What Triton's launcher sets of a launch, as CUDA's driver reads it."""
    found = []
    if run.launch_pdl:
        found.append((AFTER_PREVIOUS, 1, 0, 0))
    if run.launch_cooperative_grid:
        found.append((COOPERATIVE, 1, 0, 0))
    if num_ctas != 1:
        found += [(CLUSTER, num_ctas, 1, 1), (SPREAD, 1, 0, 0)]
    return b"".join(ATTRIBUTE.pack(*x) for x in found)


def slots_of(kinds: Iterable, descriptors: Any, types: dict) -> Iterator[tuple[bytes, list[int]]]:
    """The types of a kernel's signature: each as a slot of `launch.c`, and the bytes of the
    parameters that it has; the parts of a tuple come behind it.

    Raises:
        KeyError, ValueError, struct.error: one is none that a `Form` passes on.
    """
    for kind in kinds:
        if isinstance(kind, tuple):
            yield SLOT.pack(ord("T"), len(kind), *[0] * 8), []
            yield from slots_of(kind, descriptors, types)
        elif kind == "constexpr":
            yield SLOT.pack(ord("S"), *[0] * 9), []
        elif kind.startswith("tensordesc"):
            about = next(descriptors, None)
            if about is None or about["fp4_padded"] or about.get("is_im2col"):
                raise ValueError("a descriptor is of another kind")
            box = about["block_size"][::-1]  # the innermost dimension first, as CUDA has them
            numbers = types[about["elem_type"]], about["swizzle"], about["elem_size"]
            rest = [0] * (MOST_DIMS - len(box))
            slot = SLOT.pack(ord("D"), len(box), *numbers, *box, *rest)
            yield slot, [128, *[4] * len(box), *[8] * len(box)]
        else:
            letter = "P" if kind.startswith("*") else FORMATS[kind]
            size = 8 if letter == "P" else struct.calcsize(letter)
            yield SLOT.pack(ord(letter), *[0] * 9), [size]


def launch_by_triton(compiled: Any, values: tuple, grid: tuple[int, ...], arguments: tuple) -> None:
    """Launch a compiled kernel of these constants as Triton does, which calls hooks."""
    compiled[(*grid, 1, 1)[:3]](*described(arguments), *values)


def described(arguments: tuple) -> list:
    """Arguments of which each (box, tensor, shape, strides) became a descriptor."""
    return [x[0](x[1]) if is_boxed(x) else x for x in arguments]


def taking(size: tuple[tuple, tuple], dtype: torch.dtype, device: torch.device) -> tuple:
    """What takes memory for a tensor of this shape and these strides, a function and its arguments:
    on a GPU, the current one.
    """
    shape, strides = size
    if (take := TAKE.get(device.type)) is not None:
        return take, (tuple(shape), tuple(strides), dtype)  # it refuses a torch.Size
    return empty_strided, (shape, strides, dtype, device)


def empty_strided(*about: Any) -> torch.Tensor:
    """`torch.empty_strided` of a shape, strides, a type and a device."""
    shape, strides, dtype, device = about
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def empty(size: tuple[tuple, tuple], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Memory for a tensor of this shape and these strides."""
    function, arguments = taking(size, dtype, device)
    return function(*arguments)


def is_boxed(x: Any) -> bool:
    """Whether an argument is a `tma.Box`, a tensor, and what its descriptor has for shape and
    strides.
    """
    return type(x) is tuple and len(x) == 4 and hasattr(x[0], "steps")


class Place:
    """A tensor that an argument of a launch will be: one of those that are given to `Steps`, or
    behind them that are taken.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


PLACES = [Place(i) for i in range(12)]


class Prepared:
    """What computes requests of some shapes.

    Attributes:
        call: does so, as a version's forward or backward, for all requests of the kind.
        steps: launches the same kernels, given the tensors alone; None if it is not known how.
        final: False if there may be steps later, once all kernels are compiled.
    """

    def __init__(
        self,
        call: Callable,
        plans: Iterable["Plan"] = (),
        steps: Callable[[], tuple] | None = None,
    ) -> None:
        """Steps: called for the arguments of `Steps` if all plans have forms."""
        self.call, self.steps = call, None
        forms = [plan.form for plan in plans]
        self.final = steps is None or None not in forms
        if steps is not None and (module := native()) is not None:
            if all(type(form) is module.Form for form in forms):
                self.steps = module.Steps(*steps())

    def __call__(self, *given: Any) -> Any:
        """What `call` returns."""
        return self.call(*given)


class Plan:
    """What a kind of requests has in common: everything that a kernel is compiled for.

    Attributes:
        launcher: of the kernel.
        config: the switches of the kernel.
        constants: the tl.constexpr parameters, in order.
        boxes: how tensors are cut into boxes (`tma.Box`); what they are, the kernel's host says.
        form: what launches the kernel, None before the first launch.
    """

    def __init__(
        self, launcher: Launcher, config: Any, constants: dict[str, Any], boxes: tuple = ()
    ) -> None:
        self.launcher, self.config, self.constants, self.boxes = launcher, config, constants, boxes
        self.form: Form | None = None

    def absent(self, x: torch.Tensor) -> torch.Tensor | None:
        """The argument for a tensor that a request does not have: any tensor, x, as long as Triton
        needs a type for it, then None, which takes a launch no time.
        """
        return x if self.form is None else None

    def launch(self, grid: tuple[int, ...], arguments: tuple) -> None:
        """Launch the kernel on arguments as `Launcher.__call__` takes them, or boxed ones."""
        if self.form is None:
            self.form = self.launcher(grid, tuple(described(arguments)), self.constants)
        else:
            self.form(grid, arguments)
