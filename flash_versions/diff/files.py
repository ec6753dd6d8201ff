"""What is read from files: all files of two versions against each other, and whole kernels.

A version's files bear the same names, its functions the same names in the same order, so what
differs between two of them is the idea. Docstrings are left out: they tell the same story in words.
Where one version defines what the other imports from a page that all versions share, the shared
definition stands in the place of the import. What the later version imports from the earlier one is
unchanged, so both leave it out, with all that only it needs.
"""

import ast
import difflib
import re
from collections.abc import Container, Set
from importlib.util import find_spec
from pathlib import Path

from flash_versions.diff.names import EXPLICIT, VERSIONS

BLOT = "\0"  # in the place of a line of a docstring
Definition = ast.FunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
ASSIGNED = (ast.Assign, ast.AnnAssign)
DEFINED = re.compile(r"(?:def|class) (\w+)")


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


def module_of(path: Path) -> str:
    """The name of the module that a file of this package is."""
    return ".".join((ROOT.name, *path.relative_to(ROOT).with_suffix("").parts))


def parse(path: Path) -> tuple[ast.Module, list[str]]:
    """A source file and its lines, those of docstrings blotted out; empty if there is none."""
    source = path.read_text() if path.exists() else ""
    lines, tree = source.splitlines(), ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            assert first.end_lineno is not None
            for number in range(first.lineno - 1, first.end_lineno):
                lines[number] = BLOT
    return tree, lines


def code_lines(path: Path, shown: Container[str] = (), hidden: Container[str] = ()) -> list[str]:
    """The lines of a source file without its docstrings; none if there is no such file. Definitions
    imported from shared pages whose names are in `shown` come before the file's own; of these, what
    bears a name in `hidden` is left out.
    """
    tree, lines = parse(path)
    for node in tree.body:
        if set(names_of(node)) and all(name in hidden for name in names_of(node)):
            blot(lines, node)
    own = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    first = first_line(own[0]) if own else len(lines)
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (page := shared_page(node.module)):
            found = definitions(page)
            for name in [alias.name for alias in node.names if alias.name in shown]:
                if name in found:
                    lines[first:first] = [*found[name], "", ""]
    return "\n".join(line for line in lines if line != BLOT).strip("\n").splitlines()


def shared_page(module: str | None) -> Path | None:
    """The file of a module of this package that belongs to no version."""
    path = path_of(module or "")
    versions = [FOLDER / name for name in version_names()]
    return path if path and not any(path.is_relative_to(x) for x in versions) else None


def names_of(node: ast.stmt) -> list[str]:
    """The names that a statement of a module defines: a function, a class, constants."""
    if isinstance(node, DEFINITIONS):
        return [node.name]
    if isinstance(node, ASSIGNED):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]
    return []


def blot(lines: list[str], node: ast.stmt) -> None:
    """Blot out a statement with the comment above it and the empty lines below it."""
    first = first_line(node) if isinstance(node, DEFINITIONS) else node.lineno - 1
    while first > 0 and lines[first - 1].startswith("#"):
        first -= 1
    assert node.end_lineno is not None
    end = node.end_lineno
    while end < len(lines) and not lines[end]:
        end += 1
    lines[first:end] = [BLOT] * (end - first)


def unchanged(old: str, new: str, name: str) -> Set[str]:
    """What a file of the old version defines and the new one goes on using: what the new version's
    files import from it, and what that needs. What the file of the same name defines anew is
    changed, unless that uses the old one, too.
    """
    page, _, stem = module_of(FOLDER / old / name).rpartition(".")
    imported: set[str] = set()
    for path in (FOLDER / new).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == f"{page}.{stem}":
                imported |= {alias.name for alias in node.names}
    counterpart, _ = parse(FOLDER / new / name)
    anew = {defined for node in counterpart.body for defined in names_of(node)}
    modules = {
        alias.asname or alias.name
        for node in counterpart.body
        if isinstance(node, ast.ImportFrom) and node.module == page
        for alias in node.names
        if alias.name == stem
    }
    used = {
        node.attr
        for node in ast.walk(counterpart)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
    }
    tree, _ = parse(FOLDER / old / name)
    nodes = {defined: node for node in tree.body for defined in names_of(node)}
    found: set[str] = set()
    pending = [*(imported - anew), *used]
    while pending:
        defined = pending.pop()
        if defined in nodes and defined not in found:
            found.add(defined)
            needed = {n.id for n in ast.walk(nodes[defined]) if isinstance(n, ast.Name)}
            pending += needed - anew
    return found


def definitions(path: Path) -> dict[str, list[str]]:
    """The lines of a file's functions and classes by name, docstrings blotted out."""
    tree, lines = parse(path)
    nodes = [node for node in tree.body if isinstance(node, DEFINITIONS)]
    return {node.name: lines[first_line(node) : node.end_lineno] for node in nodes}


def first_line(node: Definition) -> int:
    """The index of a definition's first line, decorators included."""
    return min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1


def lesson(old: str, new: str, context: int = 3) -> list[str]:
    """Unified diff of all files of a version, line by line; files that it does not have it imports.

    Args:
        old: name of a version, such as "fa1".
        new: name of the version that is held against it.
        context: unchanged lines shown around a change.

    Raises:
        ValueError: there is no version of that name.
    """
    for name in (old, new):
        check_version(name, version_names())
    paths = [p for p in (FOLDER / new).rglob("*.py") if p.name != "__init__.py"]
    names = [p.relative_to(FOLDER / new).as_posix() for p in paths]
    found: list[str] = []
    for name in sorted(names, key=lambda name: (name != "forward.py", name)):
        before, after = FOLDER / old / name, FOLDER / new / name
        marked = difflib.unified_diff(
            by_definition(code_lines(before, definitions(after), unchanged(old, new, name))),
            by_definition(code_lines(after, definitions(before))),
            f"{old}/{name}",
            f"{new}/{name}",
            lineterm="",
            n=context,
        )
        found += [re.sub(f"^(.).*{BLOT}", r"\1", line) for line in marked]
    return found


def by_definition(lines: list[str]) -> list[str]:
    """Lines marked with the definition that they belong to: a line of one function is not the same
    as an equal line of another.
    """
    marked, owner = [], ""
    for number, line in enumerate(lines):
        if line.startswith(("@", "def ", "class ")):
            owner = next(m[1] for later in lines[number:] if (m := DEFINED.match(later)))
        marked.append(f"{owner}{BLOT}{line}")
    return marked


def shown_names() -> list[str]:
    """What can be shown: the versions' portable kernels, and those for one kind of GPU."""
    return [*version_names(), *EXPLICIT]


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
    found = definitions(path) if path else {}
    kernels = tuple(x for x in found if x.endswith("_kernel"))
    if not kernels:
        raise ValueError(f"{name} has no kernel of its own for the {direction}.")
    return module, kernels


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
        imported: dict[str, tuple[str, list[str]]] = {}
        for name, (place, _) in list(sides[own].items()):
            if name in sides[other]:
                continue
            shared = where(module, name)
            if shared == place:
                del sides[own][name]
            elif path := path_of(shared):
                text = [line for line in definitions(path)[name] if line != BLOT]
                imported[name] = shared, text
        sides[other] = imported | sides[other]
    before, after = ({n: "\n".join(x) for n, (_, x) in side.items()} for side in sides)
    return before, after
