"""What the command shows: kernels whole, or what changes from some to others.

A version's files bear the same names, its functions the same names in the same order, so what
differs between two of them is the idea. Docstrings are left out: they tell the same story in words.
"""

import ast
import difflib
import html
import re
from collections.abc import Container, Iterable, Set
from pathlib import Path

from flash_versions.diff import files
from flash_versions.diff.files import BLOT, EXPLICIT, kernels_of, parse, reachable, where
from flash_versions.diff.plain import plain_functions, plain_source, switched

ALIKE = 0.6  # of the text of two functions of different names, from which on one became the other
STARTS = re.compile(r"(?:def|class) (\w+)")
Marked = list[tuple[str, str]]  # lines, each with the definition that it belongs to
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{title}</title>
<style>
pre {{ font: 14px/1.4 monospace; overflow-x: auto; }}
.add {{ background: #dfd; }} .del {{ background: #fdd; }} .at {{ color: #06c; }}
</style>
<h1>{title}</h1>
<pre>
{body}
</pre>
"""


def kernel_source(
    name: str, plain: bool = False, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> str:
    """Kernels as text.

    Args:
        name: a version, such as "fa2", whose portable kernels are meant, or "fa3-hopper",
            "fa4-hopper".
        plain: as a plain call sees them, see `plain_source`; the kernels for Hopper without the
            branches that such a call switches off. Otherwise with every option.
        causal: of the plain call.
        head_dim: of the plain call, 1 to 256.
        backward: the kernels of the backward in the place of the forward's.

    Raises:
        ValueError: there are no such kernels, or they have no plain view.
    """
    if plain and name not in EXPLICIT:
        return plain_source(name, causal, head_dim, backward)
    module, kernels = kernels_of(name, backward)
    found = switched(module, kernels, causal) if plain else texts(reachable(module, kernels))
    return "\n\n\n".join(found.values()) + "\n"


def texts(places: dict[str, str]) -> dict[str, str]:
    """The text of each definition, by name, from the module that has it."""
    return {name: files.text_of(place, name) for name, place in places.items()}


def kernel_diff(
    old: str,
    new: str,
    plain: bool = False,
    causal: bool = True,
    head_dim: int = 128,
    backward: bool = False,
    context: int = 3,
) -> list[str]:
    """What changes from some kernels to others, as a unified diff without imports and docstrings.

    Lines are held against those of the function of the same name, or of the one that a function has
    become. What the new kernels import from the old ones is unchanged and left out, but of plain
    kernels, which are whole.

    Args:
        old: as `name` of `kernel_source`, as are the arguments below.
        new: the kernels that are held against it.
        plain: whether both are as a plain call sees them.
        causal: of the plain call.
        head_dim: of the plain call.
        backward: whether they are those of the backward.
        context: unchanged lines around a change.

    Raises:
        ValueError: there are no such kernels, or they have no plain view.
    """
    kernels = [kernels_of(name, backward) for name in (old, new)]
    if not plain:
        before, after = difference(*kernels)
    else:
        before, after = (
            switched(*found, causal)
            if name in EXPLICIT
            else plain_functions(name, causal, head_dim, backward)
            for name, found in zip((old, new), kernels, strict=True)
        )
        if old in EXPLICIT and new in EXPLICIT:
            (module, _), (place, _) = kernels
            before = {name: x for name, x in before.items() if where(place, name) != module}
    became = pairs(before, after)
    return unified(marked(before, {}), marked(after, became), old, new, context)


def marked(found: dict[str, str], became: dict[str, str]) -> Marked:
    """The lines of definitions, and those that part them."""
    return [
        (became.get(name, name), line)
        for name, text in found.items()
        for line in [*text.split("\n"), "", ""]
    ]


def plain_diff(
    old: str,
    new: str,
    causal: bool = True,
    head_dim: int = 128,
    backward: bool = False,
    context: int = 3,
) -> list[str]:
    """`kernel_diff` of plain kernels."""
    return kernel_diff(old, new, True, causal, head_dim, backward, context)


def unified(before: Marked, after: Marked, old: str, new: str, context: int) -> list[str]:
    """A unified diff: a line of one function is not the same as an equal line of another."""
    a, b = ([f"{owner}{BLOT}{line}" for owner, line in side] for side in (before, after))
    found = difflib.unified_diff(a, b, old, new, lineterm="", n=context)
    return [re.sub(f"^(.).*{BLOT}", r"\1", line) for line in found]


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
        imported: dict[str, str] = {}
        for name in [name for name in sides[own] if name not in sides[other]]:
            shared = where(module, name)
            if shared == sides[own][name]:
                del sides[own][name]
            elif shared:
                imported[name] = shared
        sides[other] = imported | sides[other]
    return texts(sides[0]), texts(sides[1])


def pairs(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Which function of the old kernels a function of the new ones was, if its name is another."""
    gone = {name: text.split() for name, text in before.items() if name not in after}
    found = {}
    for name in [name for name in after if name not in before]:
        likeness = {
            difflib.SequenceMatcher(None, old, after[name].split()).ratio(): x
            for x, old in reversed(gone.items())
        }
        if max(likeness, default=0.0) >= ALIKE:
            found[name] = likeness[max(likeness)]
            del gone[found[name]]
    return found


def lesson(old: str, new: str, context: int = 3) -> list[str]:
    """Unified diff of all files of a version, line by line; files that it does not have it imports.

    Where one version defines what the other imports from a page that all versions share, the shared
    definition replaces the import. What the later version imports from the earlier
    one is unchanged, so both leave it out, with all that only it needs.

    Args:
        old: name of a version, such as "fa1".
        new: name of the version that is held against it.
        context: unchanged lines shown around a change.

    Raises:
        ValueError: there is no version of that name.
    """
    for name in (old, new):
        files.check_version(name, files.version_names())
    paths = [p for p in (files.FOLDER / new).rglob("*.py") if p.name != "__init__.py"]
    names = [p.relative_to(files.FOLDER / new).as_posix() for p in paths]
    found: list[str] = []
    for name in sorted(names, key=lambda name: (name != "forward.py", name)):
        before, after = files.FOLDER / old / name, files.FOLDER / new / name
        found += unified(
            code_lines(before, files.definitions(after), unchanged(old, new, name)),
            code_lines(after, files.definitions(before)),
            f"{old}/{name}",
            f"{new}/{name}",
            context,
        )
    return found


def code_lines(path: Path, shown: Container[str], hidden: Set[str] = frozenset()) -> Marked:
    """The lines of a source file without its docstrings; none if there is no such file. Definitions
    imported from shared pages whose names are in `shown` come before the file's own; of these, what
    bears a name in `hidden` is left out, with the comment above it and the empty lines below it.
    """
    tree, lines = parse(path)[0], list(parse(path)[1])
    for node in tree.body:
        if (names := names_of(node)) and names <= hidden:
            first, end = files.first_line(node), node.end_lineno or 0
            while first > 0 and lines[first - 1].startswith("#"):
                first -= 1
            while end < len(lines) and not lines[end]:
                end += 1
            lines[first:end] = [BLOT] * (end - first)
    own = [files.first_line(node) for node in tree.body if isinstance(node, files.Definition)]
    first = min(own, default=len(lines))
    versions = tuple(f"{files.VERSIONS}.{name}." for name in files.version_names())
    for module, name, _ in files.imports(tree):
        page = files.path_of(module)
        if page and name in shown and not f"{module}.".startswith(versions):
            if text := files.definitions(page).get(name):
                lines[first:first] = [*text, "", ""]
    found, owner = [], ""
    lines = "\n".join(line for line in lines if line != BLOT).strip("\n").splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("@", "def ", "class ")):
            owner = next(m[1] for later in lines[number:] if (m := STARTS.match(later)))
        found.append((owner, line))
    return found


def names_of(node: ast.stmt) -> set[str]:
    """The names that a statement of a module defines: a function, a class, constants."""
    if isinstance(node, files.Definition):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        stored = (x for x in ast.walk(node) if isinstance(x, ast.Name))
        return {x.id for x in stored if isinstance(x.ctx, ast.Store)}
    return set()


def unchanged(old: str, new: str, name: str) -> set[str]:
    """What a file of the old version defines and the new one goes on using: what the new version's
    files import from it, and what that needs. What the file of the same name defines anew is
    changed, unless that uses the old one, too.
    """
    module = ".".join((files.VERSIONS, old, *Path(name).with_suffix("").parts))
    counterpart = parse(files.FOLDER / new / name)[0]
    anew = {x for node in counterpart.body for x in names_of(node)}
    every = (parse(path)[0] for path in (files.FOLDER / new).rglob("*.py"))
    pending = {x for tree in every for m, x, _ in files.imports(tree) if m == module} - anew
    aliases = {here for m, x, here in files.imports(counterpart) if f"{m}.{x}" == module}
    for node in ast.walk(counterpart):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in aliases:
            pending.add(node.attr)
    nodes = {x: node for node in parse(files.FOLDER / old / name)[0].body for x in names_of(node)}
    found: set[str] = set()
    while pending:
        if (defined := pending.pop()) in nodes.keys() - found:
            found.add(defined)
            used = {x.id for x in ast.walk(nodes[defined]) if isinstance(x, ast.Name)}
            pending |= used - anew
    return found


def changed(lines: Iterable[str]) -> int:
    """How many lines a diff adds and takes away, together, without empty ones and headings."""
    headings = ("+++", "---")
    return sum(x[:1] in "+-" and x[:3] not in headings and x[1:].strip() != "" for x in lines)


def as_html(old: str, new: str, lines: Iterable[str]) -> str:
    """A diff as a page of its own."""
    classes = {"+": "add", "-": "del", "@": "at"}
    body = "\n".join(
        f'<span class="{classes.get(line[:1], "")}">{html.escape(line)}</span>' for line in lines
    )
    return PAGE.format(title=f"From {old} to {new}", body=body)


def source_as_html(name: str, text: str) -> str:
    """Kernels as a page of their own."""
    return PAGE.format(title=name, body=html.escape(text))
