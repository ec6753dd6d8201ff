"""Links into the repository: they work in the repository's own view, and on the site.

A link such as ../flash_versions/versions/fa1/forward.py leads to a page of the site that shows the
file, highlighted; one to a page of docs or to a walkthrough leads to its page; one to a folder to a
list of its files. A link to what does not exist stays unresolved, which is a warning.
"""

import html
import inspect
import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SCHEME = "repository:"
SOURCE = "_source"
LARGEST = 200_000  # bytes of a file that is shown


def folders_of(docname: str) -> list[Path]:
    """Where the links of a page start: its place in the repository; for what a page includes from
    the README, the top.
    """
    folder, _, _ = docname.rpartition("/")
    return [ROOT / "notebooks" if folder == "learn/walkthroughs" else DOCS / folder, ROOT]


def find(docname: str, target: str) -> Path | None:
    """The file or folder of the repository that a link means, relative to the top."""
    for folder in folders_of(docname):
        path = Path(os.path.normpath(folder / target))
        if path.exists() and path.is_relative_to(ROOT) and path != ROOT:
            return path.relative_to(ROOT)
    return None


def page_of(path: Path) -> str | None:
    """The page that shows a file of the repository as more than its text."""
    if path == Path("README.md"):
        return "index"
    if path.suffix == ".md" and path.parts[0] == "docs":
        return path.relative_to("docs").with_suffix("").as_posix()
    if path.suffix == ".ipynb" and path.parts[0] == "notebooks":
        return f"learn/walkthroughs/{path.stem}"
    return None


class Links(SphinxTransform):
    """Turn what MyST takes for unknown, or for a download, into links."""

    default_priority = 5

    def apply(self, **options: Any) -> None:
        """Replace the links of one page."""
        for node in list(self.document.findall(is_open_link)):
            target, _, place = node["reftarget"].partition("#")
            if node.get("refdomain") == "doc":  # a notebook, whose suffix MyST has cut off
                target, place = f"{target}.ipynb", node["reftargetid"]
            path = find(self.env.docname, target) if target else None
            if path is None:
                continue
            if (page := page_of(path)) is not None:
                new: nodes.Element = addnodes.pending_xref(
                    refdomain="doc",
                    reftarget=page,
                    reftargetid=place or None,
                    refdoc=self.env.docname,
                    reftype="myst",
                    refexplicit=node["refexplicit"],
                )
            else:
                uri = f"{SCHEME}{path.as_posix()}" + (f"#{place}" if place else "")
                new = nodes.reference("", "", internal=True, refuri=uri)
            new += [child.deepcopy() for child in node.children]
            node.replace_self(new)


def is_open_link(node: nodes.Node) -> bool:
    """Whether MyST left it open where a link of this node leads."""
    if isinstance(node, addnodes.pending_xref):
        domain, target = node.get("refdomain"), node["reftarget"]
        is_outside = domain == "doc" and target.startswith("/")
        return node.get("reftype") == "myst" and (domain is None or is_outside)
    return isinstance(node, addnodes.download_reference)


def resolve(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    """Point the links of a page to the pages that show files, and note which are needed."""
    needed = source_pages(app.env).setdefault(docname, set())
    for node in doctree.findall(nodes.reference):
        uri = node.get("refuri", "")
        if not uri.startswith(SCHEME) and not node.get("internal"):
            uri = of_output(docname, uri)  # a notebook's output is read after all transforms
        path, _, place = uri.removeprefix(SCHEME).partition("#")
        if (page := page_of(Path(path))) is not None and uri.startswith(SCHEME):
            to = app.builder.get_relative_uri(docname, page)
        elif uri.startswith(SCHEME):
            needed.add(path)
            place = place.replace("L", "L-", 1) if place.startswith("L") else place
            to = app.builder.get_relative_uri(docname, f"{SOURCE}/{path}")
        else:
            continue
        node["refuri"] = to + (f"#{place}" if place else "")


def of_output(docname: str, uri: str) -> str:
    """A link of a notebook's output, in the repository if it leads there."""
    target, _, place = uri.partition("#")
    if not target or "://" in target or (path := find(docname, target)) is None:
        return uri
    return f"{SCHEME}{path.as_posix()}" + (f"#{place}" if place else "")


def source_pages(env: BuildEnvironment) -> dict[str, set[str]]:
    """{page: the paths of the repository that it links to}; kept from build to build."""
    return vars(env).setdefault("repository_paths", {})


def forget(app: Sphinx, env: BuildEnvironment, docname: str) -> None:
    """A page is read anew."""
    source_pages(env).pop(docname, None)


def collect(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The pages that show files and folders."""
    pending = sorted(set().union(*source_pages(app.env).values(), []))
    seen: set[str] = set()
    while pending:
        name = pending.pop(0)
        path = ROOT / name
        if name in seen or not path.exists():
            continue
        seen.add(name)
        if path.is_dir():
            body, inside = folder_html(app, name)
            pending += inside
        else:
            body = file_html(path)
        title = html.escape(name)
        yield (
            f"{SOURCE}/{name}",
            {"title": title, "parents": [], "body": f"<h1>{title}</h1>{body}"},
            "page.html",
        )


def share_tree(app: Sphinx, name: str, template: str, context: dict[str, Any], _: object) -> None:
    """Make the tree of pages beside a file once for all files at one depth: it differs by where its
    links begin, and takes longer than the file.
    """
    if name.startswith(f"{SOURCE}/"):
        shared = vars(app).setdefault("repository_trees", {})
        context["toctree"] = shared.setdefault(name.count("/"), cache(context["toctree"]))


def folder_html(app: Sphinx, name: str) -> tuple[str, list[str]]:
    """A folder as a list of links, and the paths that these lead to."""
    here = f"{SOURCE}/{name}"
    paths = [
        path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / name).iterdir())
        if not path.name.startswith((".", "__"))
    ]
    items = [
        f'<li><a href="{app.builder.get_relative_uri(here, f"{SOURCE}/{path}")}">'
        f"{html.escape(Path(path).name)}</a></li>"
        for path in paths
    ]
    return f"<ul>{''.join(items)}</ul>", paths


def file_html(path: Path) -> str:
    """A file's text, highlighted, a line's number being its address: #L-10."""
    if path.stat().st_size > LARGEST:
        return f"<p>{path.stat().st_size:,} bytes: too long to be shown here.</p>"
    try:
        text = path.read_text("utf-8")
    except UnicodeDecodeError:
        return f"<p>{path.stat().st_size:,} bytes that are no text.</p>"
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(
        text, lexer, HtmlFormatter(linenos="inline", lineanchors="L", anchorlinenos=True)
    )


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Where a documented object stands, for sphinx.ext.linkcode."""
    thing: Any = sys.modules.get(info["module"])
    for name in info["fullname"].split("."):
        thing = getattr(thing, name, None)
    try:
        thing = inspect.unwrap(thing)
        path = Path(inspect.getsourcefile(thing) or "").resolve()
        line = inspect.getsourcelines(thing)[1]
    except (TypeError, OSError, ValueError):
        return None
    if not path.is_relative_to(ROOT):
        return None
    return f"{SCHEME}{path.relative_to(ROOT).as_posix()}#L{line}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.add_transform(Links)
    app.config.linkcode_resolve = linkcode_resolve
    app.connect("doctree-resolved", resolve)
    app.connect("env-purge-doc", forget)
    app.connect("html-collect-pages", collect)
    app.connect("html-page-context", share_tree, priority=400)  # before the theme reads it
    return {"parallel_read_safe": False, "parallel_write_safe": False}
