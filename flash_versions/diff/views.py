"""What the command shows: kernels whole, or what changes from some to others."""

import difflib
import html
import re
from collections.abc import Iterable

from flash_versions.diff import files
from flash_versions.diff.files import BLOT, kernels_of
from flash_versions.diff.names import EXPLICIT
from flash_versions.diff.plain import plain_functions, plain_source
from flash_versions.diff.switches import switched

ALIKE = 0.6  # of the text of two functions of different names, from which on one became the other
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


def kernel_source(
    name: str,
    plain: bool = False,
    causal: bool = True,
    head_dim: int = 128,
    backward: bool = False,
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
    return "\n\n\n".join(definitions(name, plain, causal, head_dim, backward).values()) + "\n"


def definitions(
    name: str, plain: bool, causal: bool, head_dim: int, backward: bool
) -> dict[str, str]:
    """The definitions of kernels by name; arguments as of `kernel_source`."""
    module, kernels = kernels_of(name, backward)
    if not plain:
        found = files.reachable(module, kernels)
        return {key: "\n".join(lines) for key, (_, lines) in found.items()}
    if name not in EXPLICIT:
        return plain_functions(name, causal, head_dim, backward)
    return switched(module, kernels, causal)


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
        old: as `name` of `kernel_source`.
        new: the kernels that are held against it.
        plain: these and the others as of `kernel_source`.
        causal: of the plain call.
        head_dim: of the plain call, 1 to 256.
        backward: the kernels of the backward in the place of the forward's.
        context: unchanged lines around a change.

    Raises:
        ValueError: there are no such kernels, or they have no plain view.
    """
    if plain:
        before, after = (definitions(x, plain, causal, head_dim, backward) for x in (old, new))
        if old in EXPLICIT and new in EXPLICIT:
            module, place = kernels_of(old, backward)[0], kernels_of(new, backward)[0]
            before = {name: x for name, x in before.items() if files.where(place, name) != module}
    else:
        before, after = files.difference(kernels_of(old, backward), kernels_of(new, backward))
    became = pairs(before, after)
    lines = difflib.unified_diff(
        marked(before, {}), marked(after, became), old, new, lineterm="", n=context
    )
    return [re.sub(f"^(.).*{BLOT}", r"\1", line) for line in lines]


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


def pairs(before: dict[str, str], after: dict[str, str]) -> dict[str, str]:
    """Which function of the old kernels a function of the new ones was, if its name is another."""
    gone = {name: text for name, text in before.items() if name not in after}
    found = {}
    for name, text in after.items():
        if name in before or not gone:
            continue
        match = difflib.SequenceMatcher
        likeness = {x: match(None, old.split(), text.split()).ratio() for x, old in gone.items()}
        best = max(likeness, key=lambda x: likeness[x])
        if likeness[best] >= ALIKE:
            found[name] = best
            del gone[best]
    return found


def marked(found: dict[str, str], became: dict[str, str]) -> list[str]:
    """The lines of functions, each marked with the function that it belongs to."""
    return [
        f"{became.get(name, name)}{BLOT}{line}"
        for name, text in found.items()
        for line in [*text.split("\n"), "", ""]
    ]


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
