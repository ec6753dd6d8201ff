"""Kernels as one plain call sees them: the source, and what changes from one version to the next."""

import difflib
import importlib
import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from flash_versions.diff import render
from flash_versions.diff.fold import Code, Known, Record, Value, named
from flash_versions.diff.inline import Kernel, source_of
from flash_versions.diff.names import (
    BACKWARD,
    FIXED,
    FORWARD,
    GIVEN,
    LAUNCHED,
    ONE_TILE,
    VERSIONS,
)

HEAD = "import triton\nimport triton.language as tl\n"


@cache
def plain_kernels(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> list[Kernel]:
    """The kernels of a version, specialised to a plain call; arguments as of `plain_source`."""
    module = importlib.import_module(f"{VERSIONS}.{version}.{'backward' if backward else 'forward'}")
    return [
        specialise(getattr(module, name), causal, head_dim)
        for name in (BACKWARD[version] if backward else FORWARD)
    ]


def specialise(kernel: Any, causal: bool, head_dim: int) -> Kernel:
    """A kernel, specialised to a plain call."""
    fixed = {**FIXED, "left": None, "right": 0 if causal else None}
    width = max(16, 1 << (head_dim - 1).bit_length())
    source = source_of(kernel.fn)

    def value(name: str) -> Value:
        return Known(fixed[name]) if name in fixed else Code(named(name).node, width=width)

    values = {}
    for p in source.parameters:
        kind = GIVEN.get(p)
        fields = source.names[kind]._fields if kind else ()
        values[p] = Record(kind, {f: value(f) for f in fields}) if kind else value(p)
    return Kernel(kernel, values, {**LAUNCHED, ONE_TILE[0]: named(ONE_TILE[1])})


def plain_source(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> str:
    """A version's portable kernels, specialised to a plain call: a module that can be run."""
    kernels = plain_kernels(version, causal, head_dim, backward)
    lines = []
    modules = {module: set[str]() for kernel in kernels for module in kernel.imports}
    for kernel in kernels:
        for module, names in kernel.imports.items():
            modules[module] |= names
    for module in sorted(modules):
        lines.append(f"from {module} import {', '.join(sorted(modules[module]))}")
    text = "\n".join([HEAD, *lines])
    return text + "".join(f"\n\n\n{x}" for x in functions(kernels).values()) + "\n"


def functions(kernels: Iterable[Kernel]) -> dict[str, str]:
    """The text of each function of some kernels by its name, callees first."""
    found: dict[str, str] = {}
    for kernel in kernels:
        for made in kernel.functions.values():
            parameters = [
                f"{x}: tl.constexpr" if x in made.constants else x for x in made.parameters
            ]
            lines = render.function(made.name, parameters, made.body, "triton.jit")
            text = "\n".join(lines)
            if found.setdefault(made.name, text) != text:
                raise ValueError(f"{made.name} is not the same in all kernels.")
    return found


def plain_diff(old: str, new: str, causal: bool = True, head_dim: int = 128, backward: bool = False, context: int = 3) -> list[str]:
    """Unified diff."""
    before, after = (by_function(functions(plain_kernels(x, causal, head_dim, backward))) for x in (old, new))
    lines = difflib.unified_diff(before, after, old, new, lineterm="", n=context)
    return [re.sub("^(.).*\0", r"\1", line) for line in lines]


def by_function(found: dict[str, str]) -> list[str]:
    return [f"{name}\0{line}" for name, text in found.items() for line in [*text.split("\n"), "", ""]]


def changed(lines: Iterable[str]) -> int:
    """How many lines a diff adds and takes away, without empty ones and its headings."""
    return sum(x[:1] in ("+", "-") and x[:3] not in ("+++", "---") and x[1:].strip() != "" for x in lines)
