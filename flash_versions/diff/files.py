"""The versions' files: their definitions as text, and which of them a kernel uses."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

VERSIONS = "flash_versions.versions"  # its sub-packages fa1, fa2, ... are the versions
# The kernels for one kind of GPU: the modules of their forward and backward. The portable ones are
# in a version's modules `forward` and `backward`.
EXPLICIT = {
    "fa3-hopper": (f"{VERSIONS}.fa3.hopper.forward", f"{VERSIONS}.fa3.hopper.backward.kernel"),
    "fa4-hopper": (f"{VERSIONS}.fa4.hopper.forward", f"{VERSIONS}.fa4.hopper.backward"),
}
BLOT = "\0"  # in the place of a line of a docstring
Definition = ast.FunctionDef | ast.ClassDef


def folder_of(package: str) -> Path:
    """The folder of a package."""
    spec = find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


ROOT = folder_of(VERSIONS.partition(".")[0])  # the folder of this package
FOLDER = folder_of(VERSIONS)  # that in which each version has a folder


def version_names() -> list[str]:
    """The versions on disk, in order."""
    return sorted(p.parent.name for p in FOLDER.glob("fa*/forward.py"))


def shown_names() -> list[str]:
    """What can be shown: the versions' portable kernels, and those for one kind of GPU."""
    return [*version_names(), *EXPLICIT]


def check_version(name: str, known: list[str]) -> None:
    """Refuse a name that is not among those that are known.

    Raises:
        ValueError: says which names there are.
    """
    if name not in known:
        raise ValueError(f"there is no version {name!r}; there are {', '.join(known)}")


def path_of(module: str) -> Path | None:
    """The file of a module of this package, if there is one."""
    parts = module.split(".")
    path = ROOT.joinpath(*parts[1:]).with_suffix(".py")
    return path if parts[0] == ROOT.name and path.exists() else None


@cache
def parse(path: Path) -> tuple[ast.Module, list[str]]:
    """A source file and its lines, those of docstrings blotted out; empty if there is none."""
    source = path.read_text() if path.exists() else ""
    lines, tree = source.splitlines(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | Definition) and ast.get_docstring(node):
            end = node.body[0].end_lineno or 0
            first = node.body[0].lineno - 1
            lines[first:end] = [BLOT] * (end - first)
    return tree, lines


@cache
def definitions(path: Path) -> dict[str, list[str]]:
    """The lines of a file's functions and classes by name, without docstrings."""
    tree, lines = parse(path)
    nodes = [node for node in tree.body if isinstance(node, Definition)]
    return {
        node.name: [x for x in lines[first_line(node) : node.end_lineno] if x != BLOT]
        for node in nodes
    }


def first_line(node: ast.stmt) -> int:
    """The index of a statement's first line, decorators included."""
    return min(x.lineno for x in [node, *getattr(node, "decorator_list", [])]) - 1


@cache
def imports(tree: ast.Module) -> list[tuple[str, str, str]]:
    """What a file imports from modules: (module, name there, name here)."""
    return [
        (node.module or "", alias.name, alias.asname or alias.name)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]


@cache
def where(module: str, name: str) -> str:
    """The module that defines a function or class that another one names; "" if none here does."""
    path = path_of(module)
    if path is None or name in definitions(path):
        return module if path else ""
    return next((where(x, name) for x, _, here in imports(parse(path)[0]) if here == name), "")


def kernels_of(name: str, backward: bool = False) -> tuple[str, tuple[str, ...]]:
    """The module of some kernels and their names, in the order of the file.

    Args:
        name: one of `shown_names()`.
        backward: those of the backward.

    Raises:
        ValueError: there are none.
    """
    check_version(name, shown_names())
    direction = "backward" if backward else "forward"
    module = EXPLICIT[name][backward] if name in EXPLICIT else f"{VERSIONS}.{name}.{direction}"
    path = path_of(module)
    kernels = tuple(x for x in definitions(path) if x.endswith("_kernel")) if path else ()
    if not kernels:
        raise ValueError(f"{name} has no kernel of its own for the {direction}.")
    return module, kernels


def reachable(module: str, kernels: tuple[str, ...]) -> dict[str, str]:
    """What kernels use of their version's own package, callees first: modules by name."""
    package = ".".join(module.split(".")[:3])  # flash_versions.versions.fa3
    found: dict[str, str] = {}

    def visit(place: str, name: str) -> None:
        path = path_of(place := where(place, name))
        if name in found or path is None or not place.startswith(f"{package}."):
            return
        found[name] = place
        node = next(x for x in parse(path)[0].body if getattr(x, "name", None) == name)
        assert isinstance(node, Definition)
        for used in ast.walk(ast.Module(node.body, [])):
            if isinstance(used, ast.Name):
                visit(place, used.id)
        found[name] = found.pop(name)  # behind what it uses

    for kernel in kernels:
        visit(module, kernel)
    return found


def text_of(place: str, name: str) -> str:
    """The text of a definition of a module."""
    path = path_of(place)
    assert path is not None
    return "\n".join(definitions(path)[name])
