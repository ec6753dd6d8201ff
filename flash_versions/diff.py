"""The lesson between two versions: `python -m flash_versions.diff fa1 fa2`.

A version's files bear the same names, its functions the same names in the same order, so what
differs between two of them is the idea. Docstrings are left out: they tell the same story in words.
"""

import argparse
import ast
import difflib
import html
import sys
from pathlib import Path

PACKAGE = Path(__file__).parent
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


def code_lines(path: Path) -> list[str]:
    """The lines of a source file without its docstrings; none if there is no such file."""
    if not path.exists():
        return []
    source = path.read_text()
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            first = node.body[0]
            assert first.end_lineno is not None
            for number in range(first.lineno - 1, first.end_lineno):
                lines[number] = "\0"
    return "\n".join(line for line in lines if line != "\0").strip("\n").splitlines()


def lesson(old: str, new: str, context: int = 3) -> list[str]:
    """Unified diff of all files of two versions, line by line.

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
    names = {p.name for v in (old, new) for p in (PACKAGE / v).glob("*.py")} - {"__init__.py"}
    found: list[str] = []
    for name in sorted(names, key=lambda name: (name != "forward.py", name)):
        found += difflib.unified_diff(
            code_lines(PACKAGE / old / name),
            code_lines(PACKAGE / new / name),
            f"{old}/{name}",
            f"{new}/{name}",
            lineterm="",
            n=context,
        )
    return found


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
