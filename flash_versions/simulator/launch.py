"""A launch with tensors on the CPU: each program of the grid is computed, one after the other."""

import functools
import inspect
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from flash_versions.simulator import rebind
from flash_versions.simulator.dtypes import dtype
from flash_versions.simulator.errors import AccessError, CompileError, Deadlock, say
from flash_versions.simulator.floats import as_on_a_gpu
from flash_versions.simulator.gluon.machine import run_grid
from flash_versions.simulator.gluon.tma import descriptor
from flash_versions.simulator.memory import Descriptor, Memory, pointer_to
from flash_versions.simulator.rebind import rebound
from flash_versions.simulator.source import assigned, is_constexpr_text
from flash_versions.simulator.state import Program, here
from flash_versions.simulator.values import Pointer, Tile

OPTIONS = frozenset((
    "num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid",
    "debug", "enable_fp_fusion", "warmup", "grid", "extern_libs", "instrumentation_mode",
))  # fmt: skip
OWN = str(Path(__file__).parent)


@functools.cache
def parameters_of(function: rebind.Function) -> tuple[inspect.Signature, frozenset[str]]:
    """A kernel's signature, and the names of its compile-time constants."""
    signature = inspect.signature(function.fn)
    constants = (x.name for x in signature.parameters.values() if is_constexpr_text(x.annotation))
    return signature, frozenset(constants)


def argument(x: Any, name: str, memory: Callable) -> Any:
    """What a kernel gets for what its caller passes."""
    if isinstance(x, torch.Tensor):
        return pointer_to(x, name, memory)
    if type(x).__name__ == "TensorDescriptor":
        if getattr(x, "layout", None) is not None:  # of Gluon
            return descriptor(x.base, x.shape, x.strides, x.block_shape, x.layout)
        base = pointer_to(x.base, name, memory)
        return Descriptor(base, x.shape, x.strides, x.block_shape, x.padding)
    if isinstance(x, tuple):
        values = [argument(y, name, memory) for y in x]
        return type(x)(*values) if hasattr(x, "_fields") else tuple(values)
    return assigned(rebound(x)) if isinstance(x, bool | int | float) else rebound(x)


def is_one(x: Any, name: str, kernel: Any) -> bool:
    """Whether a number is 1, which Triton makes a compile-time constant."""
    if type(x) is not int or x != 1:
        return False
    parameters = getattr(kernel, "params", ())
    return not any(p.name == name and p.do_not_specialize for p in parameters)


def launch(kernel: Any, grid: Any, arguments: tuple, named: dict[str, Any]) -> None:
    """Compute a kernel on tensors that are on the CPU.

    Raises:
        CompileError: Triton's compiler refuses the kernel.
        AccessError: it reads or writes what it must not.
        Deadlock: its partitions wait for each other.
    """
    function = rebound(kernel)
    signature, constants = parameters_of(function)
    warps = named.get("num_warps", 4)
    named = {k: v for k, v in named.items() if k in signature.parameters or k not in OPTIONS}
    try:
        bound = signature.bind(*arguments, **named)
    except TypeError as error:
        raise CompileError(f"{function.__name__}: {error}") from None
    bound.apply_defaults()
    if callable(grid):
        grid = grid(bound.arguments)
    sizes: Any = tuple(map(int, grid)) + (1,) * (3 - len(grid))
    given, memory = {}, here.memory or Memory
    for name, x in bound.arguments.items():
        constant = name in constants or is_one(x, name, kernel)
        given[name] = rebound(x) if constant else argument(x, name, memory)
    say()
    rebind.begin_launch()
    run = functools.partial(function, **given)
    outer = here.program, here.partition
    key = function, tuple(kind_of(x) for x in given.values())
    most = CHECKS if here.memory is None else SURE
    here.checking = checked.get(key, 0) < most and not here.trusts
    here.unsure[0] = False
    try:
        with as_on_a_gpu():
            if getattr(kernel, "is_gluon", bool)():
                run_grid(run, sizes, (), warps)
            else:
                here.may_be_dry = here.checking
                for number in range(math.prod(sizes)):
                    here.program, here.partition = Program(number, sizes), None
                    run()
                    here.checking = here.may_be_dry = False
        if not here.trusts:
            checked[key] = checked.get(key, 0) + 1 if here.unsure[0] else SURE
    except (CompileError, AccessError, AssertionError) as error:
        if not str(error).startswith("line "):
            error.args = (f"{place(error, function.file)}{error}",)
        raise
    except Deadlock:
        raise
    except Exception as error:
        raise CompileError(f"{place(error, function.file)}{reason(error)}") from error
    finally:
        here.program, here.partition = outer
        here.checking = here.may_be_dry = False
        here.dry = 0


CHECKS = 3  # launches that are checked where loops have too few steps to be sure, unless watched
SURE = 1 << 30
# Of kernels with kinds of arguments, how many launches were checked.
checked: dict[Any, int] = {}


def kind_of(x: Any) -> Any:
    """What the compiled code depends on."""
    if isinstance(x, Tile | Pointer):
        return x.dtype
    if isinstance(x, tuple):
        return type(x), *map(kind_of, x)
    if x is None or isinstance(x, bool | int | float | str | dtype | rebind.Function):
        return x
    return type(x)


def place(error: BaseException, file: str) -> str:
    """The line of a kernel that an error comes from, to be put before it: of the kernel's file if
    it comes from a function of this package that a kernel of somebody else calls.
    """
    found = traceback.extract_tb(error.__traceback__)
    frames = [x for x in reversed(found) if x.filename in rebind.files]
    if not file.startswith(str(Path(OWN).parent)):
        frames.sort(key=lambda x: x.filename != file)
    return f"line {frames[0].lineno} of {frames[0].name}, `{frames[0].line}`: " if frames else ""


def reason(error: Exception) -> str:
    """An error of Python, as one of the kernel's author."""
    said = str(error)
    name = said.split("'")[1] if "'" in said else "a name"
    if isinstance(error, UnboundLocalError):
        return (
            f"{name} has no value here: it is bound in a loop or in one branch of an `if` only; "
            "give it a value before"
        )
    if isinstance(error, NameError):
        return (
            f"a kernel does not know {name}; if it is a variable outside of the kernel, write "
            f"{name} = tl.constexpr(...) there, or pass it"
        )
    if isinstance(error, AttributeError):
        return said.replace("'Tile' object", "a tile").replace("'Pointer' object", "a pointer")
    return said
