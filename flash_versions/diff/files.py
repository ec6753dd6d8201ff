"""The lesson between two versions: `python -m flash_versions.diff fa1 fa2`.

A version's files bear the same names, its functions the same names in the same order, so what
differs between two of them is the idea. Docstrings are left out: they tell the same story in words.
Where one version defines what the other imports from a page that all versions share, the shared
definition stands in the place of the import. What the later version imports from the earlier one is
unchanged, so both leave it out, with all that only it needs.
"""

import argparse
import ast
import difflib
import html
import re
import sys
from collections.abc import Container, Set
from pathlib import Path

PACKAGE = Path(__file__).parent
BLOT = "\0"  # in the place of a line of a docstring
Definition = ast.FunctionDef | ast.ClassDef
DEFINITIONS = (ast.FunctionDef, ast.ClassDef)
ASSIGNED = (ast.Assign, ast.AnnAssign)
DEFINED = re.compile(r"(?:def|class) (\w+)")
COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
pre {{ font: 14px/1.4 monospace; }} .add {{ background: #dfd; }} .del {{ background: #fdd; }}
.at {{ color: #06c; }}
</style>
<h1>{title}</h1>
<pre>
{body}
</pre>
"""


def version_names() -> list[str]:
    """The versions on disk, in order."""
    return sorted(p.parent.name for p in PACKAGE.glob("fa*/forward.py"))


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
    package, _, name = (module or "").partition(".")
    path = PACKAGE / f"{name}.py"
    return path if package == PACKAGE.name and path.exists() else None


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
    page = f"{PACKAGE.name}.{old}"
    stem = name.removesuffix(".py")
    imported: set[str] = set()
    for path in (PACKAGE / new).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == f"{page}.{stem}":
                imported |= {alias.name for alias in node.names}
    counterpart, _ = parse(PACKAGE / new / name)
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
    tree, _ = parse(PACKAGE / old / name)
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
    """Unified diff of all files of a version, line by line; what it does not have it imports.

    Args:
        old: name of a version, such as "fa1".
        new: name of the version that is held against it.
        context: unchanged lines shown around a change.

    Raises:
        ValueError: there is no version of that name.
    """
    for name in (old, new):
        if name not in version_names():
            raise ValueError(
                f"there is no version {name!r}; there are {', '.join(version_names())}"
            )
    names = {p.name for p in (PACKAGE / new).glob("*.py")} - {"__init__.py"}
    found: list[str] = []
    for name in sorted(names, key=lambda name: (name != "forward.py", name)):
        before, after = PACKAGE / old / name, PACKAGE / new / name
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


def as_html(old: str, new: str, lines: list[str]) -> str:
    """The diff as a page of its own."""
    classes = {"+": "add", "-": "del", "@": "at"}
    body = "\n".join(
        f'<span class="{classes.get(line[:1], "")}">{html.escape(line)}</span>' for line in lines
    )
    return PAGE.format(title=f"From {old} to {new}", body=body)


def main(arguments: list[str] | None = None) -> int:
    """Print the diff, or write it as HTML; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.diff",
        description="what changes from one version to the next",
    )
    parser.add_argument("old", help=f"one of {', '.join(version_names())}")
    parser.add_argument("new")
    parser.add_argument("--context", type=int, default=3, help="unchanged lines around a change")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write a page instead of printing"
    )
    options = parser.parse_args(arguments)
    try:
        lines = lesson(options.old, options.new, options.context)
        if options.html:
            options.html.write_text(as_html(options.old, options.new, lines))
            return 0
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for line in lines:
        colour = COLOURS.get(line[:1], "") if sys.stdout.isatty() else ""
        sys.stdout.write(f"{colour}{line}{colour and chr(27) + '[0m'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
