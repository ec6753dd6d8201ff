"""The whole code of kernels, by definition: of a version's functions and records what its kernels
use, with every option, and without the host's code.
"""

import ast

from flash_versions.diff.files import BLOT, DEFINITIONS, FOLDER, definitions, parse, path_of


def reachable(module: str, kernels: tuple[str, ...]) -> dict[str, tuple[str, list[str]]]:
    """What kernels use of their version's own package, callees first: (module, lines without the
    docstring) by name.
    """
    path = path_of(module)
    assert path is not None
    package = path.relative_to(FOLDER).parts[0]
    found: dict[str, tuple[str, list[str]]] = {}

    def visit(place: str, name: str) -> None:
        place = where(place, name)
        path = path_of(place)
        if name in found or path is None or not path.is_relative_to(FOLDER / package):
            return
        node = next(x for x in parse(path)[0].body if getattr(x, "name", None) == name)
        found[name] = place, []
        for used in ast.walk(ast.Module(getattr(node, "body", []), [])):
            if isinstance(used, ast.Name):
                visit(place, used.id)
        text = [line for line in definitions(path)[name] if line != BLOT]
        found[name] = found.pop(name)[0], text

    for kernel in kernels:
        visit(module, kernel)
    return found


def where(module: str, name: str) -> str:
    """The module that defines a function or class that another one names; "" if none here does."""
    path = path_of(module)
    if path is None:
        return ""
    for node in parse(path)[0].body:
        if isinstance(node, DEFINITIONS) and node.name == name:
            return module
        if isinstance(node, ast.ImportFrom) and name in [x.asname or x.name for x in node.names]:
            return where(node.module or "", name)
    return ""


def difference(
    old: tuple[str, tuple[str, ...]], new: tuple[str, tuple[str, ...]]
) -> tuple[dict[str, str], dict[str, str]]:
    """The definitions of two sets of kernels that are to be held against each other, by name.

    Of what one side has and the other imports, both have it; of what both have from the same place,
    neither.

    Args:
        old: a module and its kernels.
        new: those of the later version.
    """
    sides = [reachable(*old), reachable(*new)]
    for own, other, module in ((0, 1, new[0]), (1, 0, old[0])):
        for name, (place, _) in list(sides[own].items()):
            if name in sides[other]:
                continue
            shared = where(module, name)
            if shared == place:
                del sides[own][name]
            elif path := path_of(shared):
                text = [line for line in definitions(path)[name] if line != BLOT]
                sides[other][name] = shared, text
    before, after = ({n: "\n".join(x) for n, (_, x) in side.items()} for side in sides)
    return before, after
