"""A version's page, from what the version says of itself: `Version`, docstrings, its lesson."""

import ast
import re
from pathlib import Path

import flash_versions
from flash_versions import BASELINES, VERSIONS, diff
from flash_versions.dispatch.version import Version

ROOT = Path(flash_versions.__file__).parents[1]
FOLDERS = ROOT / "flash_versions" / "versions"
ARXIV = re.compile(r"arXiv:(\d{4}\.\d{4,5})")
FILE_FIRST = ("forward.py", "hopper/forward.py")
HEADING = re.compile(r"^(What .*wastes\.|The ideas?\.|Cost\.|Source:)", re.MULTILINE)


def linked(text: str) -> str:
    """A text whose arXiv numbers are links."""
    return ARXIV.sub(r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def sentence(text: str) -> str:
    """With a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def as_markdown(docstring: str) -> str:
    """A module's docstring as Markdown: drawings as blocks of their own, signs as they are."""
    made: list[str] = []
    drawing = False
    for line in docstring.splitlines():
        if not drawing and line.startswith("    ") and made and not made[-1].strip():
            drawing = True
            made.append("```text")
        elif drawing and line.strip() and not line.startswith(" "):
            drawing = False
            while not made[-1].strip():
                made.pop()
            made += ["```", ""]
        made.append(line[4:] if drawing else protected(line))
    if drawing:
        made.append("```")
    return "\n".join(made)


def protected(line: str) -> str:
    """A line of prose in which nothing but code and bullets means anything to Markdown."""
    bullet, text = re.fullmatch(r"(\* |  )?(.*)", line).groups()  # type: ignore[union-attr]
    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"([\\*_<>\[\]$|])", r"\\\1", part) for part in parts[::2]]
    line = (bullet or "") + linked("".join(parts))
    return HEADING.sub(r"**\1**", line)


def first_sentence(docstring: str) -> str:
    """What a docstring says first."""
    text = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.:]) (?=[A-Z`])", text)[0].rstrip(":")


def files(name: str) -> list[Path]:
    """A version's files, its forwards first, then the files of its folder, then those below."""
    found = (path for path in (FOLDERS / name).rglob("*.py") if path.name != "__init__.py")
    return sorted(found, key=lambda path: (within(path) not in FILE_FIRST, len(path.parts), path))


def within(path: Path) -> str:
    """A file's path in its version's folder."""
    return path.relative_to(FOLDERS).as_posix().partition("/")[2]


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def place(path: Path) -> str:
    """A file's address as seen from the page."""
    return f"../../../{path.relative_to(ROOT).as_posix()}"


def file_map(name: str) -> str:
    """What each file is for."""
    rows = []
    for path in files(name):
        text = path.read_text("utf-8")
        what = first_sentence(ast.get_docstring(ast.parse(text)) or "")
        count = str(len(text.splitlines()))
        rows.append(
            [f"[{within(path)}]({place(path)})", protected(what).replace("|", "\\|"), count]
        )
    return table(["file", "what is in it", "lines"], rows)


def is_kernel(node: ast.AST) -> bool:
    """Whether a function is compiled for the GPU."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(found).split("(")[0].endswith("jit") for found in decorators)


def kernels(name: str) -> str:
    """The docstrings of all kernels, and functions of kernels, that a version defines itself."""
    made = []
    for path in files(name):
        found = [node for node in ast.parse(path.read_text("utf-8")).body if is_kernel(node)]
        if not found:
            continue
        made.append(f"### {within(path)}\n")
        for node in found:
            assert isinstance(node, ast.FunctionDef)
            parameters = ", ".join(argument.arg for argument in node.args.args)
            made.append(f"[`{node.name}`]({place(path)}#L{node.lineno})`({parameters})`\n")
            text = "\n".join(protected(x) for x in (ast.get_docstring(node) or "").splitlines())
            made.append(f":   {text.replace(chr(10), chr(10) + '    ')}\n")
    return "\n".join(made)


def figures(version: Version, before: list[Version]) -> list[tuple[str, str]]:
    """Which measured figures a version's page shows, and what to see in them."""
    found = [("speedup.svg", "Speed of the forward relative to torch's FlashAttention-2.")]
    if version.variants:
        found.append(("ablation.svg", "What each part is worth: the speed with one thing changed."))
    if version.forward_quantized is not None:
        found.append(("fp8.svg", "TFLOP/s in FP8 and in bf16, of the kernels alone."))
    if all(version.backward is not other.backward for other in before):
        found.append(("backward.svg", "TFLOP/s of the backward over the length."))
    return [pair for pair in found if (ROOT / "docs/figures/attention" / pair[0]).exists()]


def changes(name: str, before: str) -> str:
    """The difference of two lessons."""
    lines = diff.difference(before, name)
    return (
        f"These are [the]({place(diff.path_of(before))}) [lessons]({place(diff.path_of(name))}): "
        f"plain attention, without other options. `python -m flash_versions.diff {before} {name}` "
        f"prints these {diff.changed(lines)} changed lines.\n\n"
        f"```diff\n" + "\n".join(lines) + "\n```\n"
    )


def overview() -> str:
    """All versions in a table, as the first page has it."""
    rows = [
        [
            f"[{version.title}](learn/versions/{name}.md)",
            protected(version.wasted),
            protected(version.idea),
        ]
        for name, version in VERSIONS.items()
    ]
    return table(["version", "what the version before wastes", "idea"], rows)


def page(name: str, before: str | None, notebook: str | None) -> str:
    """The page of a version; `before` is the version that came before it."""
    version = VERSIONS[name]
    earlier = list(VERSIONS.values())[: list(VERSIONS).index(name)]
    where = [
        "[What runs where](../../use/where.md)",
        "[the progression with its measurements](../progression.md)",
    ]
    if notebook is not None:
        where.insert(0, f"[The walkthrough](../walkthroughs/{notebook}.ipynb)")
    docstring = ast.get_docstring(ast.parse(diff.path_of(name).read_text("utf-8"))) or ""
    baselines = ", ".join(f"`{baseline}`" for baseline in BASELINES)
    made = [
        f"# {version.title}\n",
        f"It saw wasted\n:   {sentence(version.wasted)}\n",
        f"The idea\n:   {sentence(version.idea)}\n",
        f"Source\n:   {linked(sentence(version.source))}\n",
        f"Read on\n:   {'; '.join(where)}.\n",
        f'```python\no = attention(q, k, v, causal=True, version="{name}")\n```\n',
        f"## The lesson\n\n[One plain file]({place(diff.path_of(name))}), which runs by itself:\n\n"
        f"{as_markdown(docstring)}\n",
        f"## The files\n\n{file_map(name)}",
    ]
    if before is None:
        made.append(f"It is the first version. The tests compare it with {baselines}.\n")
    else:
        made.append(f"## What changed since {VERSIONS[before].title}\n\n{changes(name, before)}")
    made.append("## Measured\n")
    made += [
        f"![{text}](../../figures/attention/{file})\n\n{text}\n"
        for file, text in figures(version, earlier)
    ]
    made.append(f"## The kernels\n\n{kernels(name)}")
    return "\n".join(made)
