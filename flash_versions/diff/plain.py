"""A version's portable kernels, specialised to one plain call: causal or full, 16 bits, without
options, not packed, as many key heads as query heads, the keys not split.
"""

import importlib
from functools import cache
from typing import Any

from flash_versions.diff import tidy
from flash_versions.diff.files import check_version, kernels_of, version_names
from flash_versions.diff.fold import Global, Known, Record, Value, named
from flash_versions.diff.inline import Kernel, source_of
from flash_versions.diff.names import FIXED, FUNCTIONS, GIVEN, LAUNCHED, ONE_TILE

HEAD = ["import triton", "import triton.language as tl", ""]
HEAD_DIMS = range(1, 257)


@cache
def plain_kernels(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> list[Kernel]:
    """The kernels of a version in the order of their launches; arguments as of `plain_source`."""
    name, kernels = kernels_of(version, backward)
    check_version(version, version_names())
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim={head_dim} is not possible; 1 to {HEAD_DIMS[-1]} are.")
    module = importlib.import_module(name)
    try:
        return [specialise(getattr(module, kernel), causal, head_dim) for kernel in kernels]
    except (NotImplementedError, KeyError, TypeError) as error:
        which = "backward" if backward else "forward"
        raise ValueError(
            f"the {which} of {version} has no plain view ({error}); leave out --plain."
        ) from error


def specialise(kernel: Any, causal: bool, head_dim: int) -> Kernel:
    """A kernel, specialised to a plain call."""
    fixed = {**FIXED, "left": None, "right": 0 if causal else None}
    width = max(16, 1 << (head_dim - 1).bit_length())
    source = source_of(kernel.fn)

    def value(name: str) -> Value:
        if name in FUNCTIONS:
            return Global(source.names[FUNCTIONS[name]], FUNCTIONS[name])
        return Known(fixed[name]) if name in fixed else named(name)

    values: dict[str, Value] = {}
    for parameter in source.parameters:
        kind = GIVEN.get(parameter)
        if kind is None:
            values[parameter] = value(parameter)
        else:
            fields = {field: value(field) for field in source.names[kind]._fields}
            values[parameter] = Record(kind, fields)
    return Kernel(kernel, values, width, {**LAUNCHED, ONE_TILE[0]: named(ONE_TILE[1])})


def plain_source(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> str:
    """A version's portable kernels as one plain call sees them: a module that runs in their place.

    Args:
        version: such as "fa2".
        causal: whether the call is; otherwise every query sees every key.
        head_dim: elements of a row of q, k and v, 1 to 256; a tile is as wide as the next power of
            two.
        backward: the kernels of the backward in the place of the forward's.

    Raises:
        ValueError: there is no such version or head_dim, or its kernels have no plain view.
    """
    kernels = plain_kernels(version, causal, head_dim, backward)
    modules: dict[str, set[str]] = {}
    for kernel in kernels:
        for module, names in kernel.imports.items():
            modules.setdefault(module, set()).update(names)
    imports = [f"from {name} import {', '.join(sorted(modules[name]))}" for name in sorted(modules)]
    functions = plain_functions(version, causal, head_dim, backward).values()
    return "\n".join([*HEAD, *imports]) + "".join(f"\n\n\n{text}" for text in functions) + "\n"


def plain_functions(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> dict[str, str]:
    """The text of each function of `plain_source` by its name, callees first."""
    found: dict[str, str] = {}
    for kernel in plain_kernels(version, causal, head_dim, backward):
        for made in kernel.functions.values():
            parameters = [
                f"{x}: tl.constexpr" if x in made.constants else x for x in made.parameters
            ]
            lines = tidy.function(made.name, parameters, made.body, "triton.jit")
            text = "\n".join(lines)
            if found.setdefault(made.name, text) != text:
                raise ValueError(f"the kernels of {version} do not agree in {made.name}.")
    return found
