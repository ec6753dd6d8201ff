"""The rooms of both packages: who imports whom, read from the imports as they are written. The
rooms of the documents: where each page is. And how many entries a folder has.
"""

import ast
import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.helpers import ROOT

MOST_ENTRIES = 12  # of a folder, beside what Python asks for
ASKED_FOR = {"__init__.py", "__main__.py", "py.typed"}
# Where every folder's entries are counted.
COUNTED = ("flash_versions", "transformer", "tests", "notebooks", "docs")
MAKING = "versions.tiles versions.fp8 dispatch"  # what versions are made of
LABORATORY = ("bench", "diff", "inspect", "mine", "plot", "puzzles", "report", "verify")
DOORS = ("flash_versions", "flash_versions.flash_attn", "flash_versions.integrations")
# What the modules of a room may import of their own package, beside the room; "." is the package's
# own `__init__`. A room that is not here belongs to the one around it.
MAY_IMPORT = {
    "flash_versions": "dispatch versions integrations",
    "flash_versions.__main__": ". dispatch",
    "flash_versions.dispatch": "",
    "flash_versions.dispatch.interpreter": "",
    "flash_versions.dispatch.emulator": "",
    "flash_versions.dispatch.replay": "",
    "flash_versions.dispatch.request": "dispatch.precision",
    "flash_versions.versions.tiles": "dispatch",
    "flash_versions.versions.fp8": "dispatch versions.tiles",
    "flash_versions.versions.fa1": MAKING,
    "flash_versions.versions.fa2": MAKING,
    "flash_versions.versions.fa3": f"{MAKING} versions.fa2",
    "flash_versions.versions.fa4": f"{MAKING} versions.fa3",
    "flash_versions.versions.oracle": MAKING,
    "flash_versions.versions.api": "dispatch versions",
    "flash_versions.flash_attn": "dispatch versions.tiles versions.masks versions.api",
    "flash_versions.integrations": "dispatch versions.tiles versions.api",
    "flash_versions.integrations.hub": "dispatch versions.api versions.masks flash_attn",
    **dict.fromkeys(
        [f"flash_versions.{room}" for room in LABORATORY],
        f". dispatch versions flash_attn integrations {' '.join(LABORATORY)}",
    ),
    "transformer": ". model generation tasks training rl",
    "transformer.model": ".",
    "transformer.model.kernels": ".",
    "transformer.generation": ". model",
    "transformer.tasks": ".",
    "transformer.training": ". model generation tasks",
    "transformer.rl": ". model generation tasks training",
}  # fmt: skip


def find_modules(top: Path) -> dict[str, Path]:
    """The modules of both packages by name."""
    files = [*top.glob("flash_versions/**/*.py"), *top.glob("transformer/**/*.py")]
    names = (".".join(x.relative_to(top).with_suffix("").parts) for x in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files)}


@cache
def imports_in(text: str) -> list[tuple[str, bool]]:
    """The names that a text imports, `a.b` of `from a import b`, and whether at its top, in plain
    sight.
    """
    found, tree = [], ast.parse(text)
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [f"{node.module}.{x.name}" for x in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [x.value for x in node.args if isinstance(x, ast.Constant)]
        found += [(name, node in tree.body) for name in names]
    return found


def find_imports(file: Path, modules: dict[str, Path]) -> Iterator[tuple[str, bool]]:
    """The modules of the packages that a file imports, and whether in plain sight."""
    for name, plain in imports_in(file.read_text()):
        name = name if name in modules else name.rpartition(".")[0]
        if name in modules:
            yield name, plain


def is_in(name: str, rooms: list[str]) -> bool:
    """Whether a module is in one of these rooms."""
    return any(f"{name}.".startswith(f"{room}.") for room in rooms)


def may_import(name: str, other: str) -> bool:
    """Whether a module may import another."""
    room = name
    while room not in MAY_IMPORT:
        room = room.rpartition(".")[0]
    package, its_package = name.partition(".")[0], other.partition(".")[0]
    if package != its_package:  # transformer goes below the public doors for its kernels only
        below = room == "transformer.model.kernels" or is_in(other, list(DOORS[1:]))
        return package == "transformer" and (below or other == DOORS[0])
    allowed = MAY_IMPORT[room].split()
    if other == package:
        return "." in allowed
    return is_in(other, [room, *(f"{package}.{x}" for x in allowed if x != ".")])


def find_faults(top: Path) -> list[str]:
    """What is against the rules of the rooms, in sentences."""
    modules, faults = find_modules(top), []
    graph = {name: list(find_imports(file, modules)) for name, file in modules.items()}
    for name, imported in graph.items():
        for other, plain in imported:
            if not plain:
                faults.append(f"{name} imports {other} where it is not seen at the top")
            if not may_import(name, other):
                faults.append(f"{name} imports {other}")
    try:
        TopologicalSorter({x: {y for y, _ in graph[x]} - {x} for x in graph}).prepare()
    except CycleError as error:
        faults.append(f"a circle: {' <- '.join(error.args[1])}")
    for name, file in modules.items():
        if file.name != "__init__.py":
            continue
        if "." in name and "May import:" not in (
            ast.get_docstring(ast.parse(file.read_text())) or ""
        ):
            faults.append(f"{name} does not say what it may import")
    return faults


def test_the_rooms_are_as_they_should_be():
    assert not find_faults(ROOT)


IMPORT, HIDDEN = "import {}\n", "def f():\n    import {}\n"
TYPE_CHECKING = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {}\n"
PLANTED = {
    "up": ("versions/tiles/algebra.py", IMPORT, "versions.fa2.forward", "algebra imports"),
    "past the predecessor": ("versions/fa4/forward.py", IMPORT, "versions.fa2", "forward imports"),
    "a door to a version": ("flash_attn/kv_cache.py", IMPORT, "versions.fa2", "cache imports"),
    "measuring": ("versions/fa4/hopper/trace.py", IMPORT, "bench.measure", "trace imports"),
    "hidden": ("dispatch/version.py", HIDDEN, "dispatch.launch", "where it is not seen"),
    "for types": ("dispatch/version.py", TYPE_CHECKING, "dispatch.launch", "where it is not seen"),
    "by a name": ("dispatch/version.py", 'import_module("{}")\n', "dispatch.launch", "not seen"),
    "circle": ("dispatch/request/request.py", IMPORT, "dispatch.version", "a circle: "),
    "below the doors": ("../transformer/rl/loss.py", IMPORT, "dispatch.launch", "rl.loss imports"),
}  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of both packages."""
    top = tmp_path_factory.mktemp("copy")
    for package in ("flash_versions", "transformer"):
        skipped = shutil.ignore_patterns("__pycache__", "*.safetensors")
        shutil.copytree(ROOT / package, top / package, ignore=skipped)
    return top


@pytest.mark.parametrize("name", PLANTED)
def test_a_broken_rule_is_found(name, copy):
    where, line, module, expected = PLANTED[name]
    file = copy / "flash_versions" / where
    before, known = file.read_text(), find_faults(copy)
    file.write_text(before + line.format(f"flash_versions.{module}"))
    found = set(find_faults(copy)) - set(known)
    file.write_text(before)
    assert any(expected in fault for fault in found), found


def test_a_room_that_says_nothing_is_found(copy):
    (copy / "flash_versions/dispatch/interpreter/__init__.py").write_text('"""Everything."""\n')
    found = find_faults(copy)
    assert "flash_versions.dispatch.interpreter does not say what it may import" in found


def tracked() -> list[str]:
    """The files below COUNTED that git tracks, as it names them."""
    if not (ROOT / ".git").exists():
        pytest.skip("only a clone knows which files are tracked")
    command = ["git", "ls-files", "-z", *COUNTED]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.rstrip("\0").split("\0")


def full_folders(files: Iterable[str]) -> list[str]:
    """The folders of these files that have too many entries, in sentences."""
    entries = defaultdict(set)
    for file in files:
        folder, _, name = file.rpartition("/")
        while folder:
            entries[folder].add(name)
            folder, _, name = folder.rpartition("/")
    numbers = {folder: len(names - ASKED_FOR) for folder, names in sorted(entries.items())}
    return [
        f"{folder} has {number} entries; {MOST_ENTRIES} are enough"
        for folder, number in numbers.items()
        if number > MOST_ENTRIES
    ]


def test_no_folder_is_full():
    assert not full_folders(tracked())


def test_a_full_folder_is_found():
    """Files and folders are entries; what Python asks for is none."""
    files = tracked()
    assert "tests/test_rooms.py" in files
    room = "tests/benchmarks/more"
    few = [f"{room}/{name}" for name in (*ASKED_FOR, *(f"{i}.py" for i in range(MOST_ENTRIES)))]
    assert not full_folders([*files, *few])
    for one_more in ("one.py", "one/two/three.txt"):
        found = full_folders([*files, *few, f"{room}/{one_more}"])
        assert found == [f"{room} has 13 entries; 12 are enough"]


# Rooms of docs in the order of index.md, and how texts name a page from the top.
DOCUMENTS = ("learn", "use", "understand", "extend")
NAMED = re.compile(r"(?<![\w/])docs/[\w/]+\.(?:md|py)\b")


def test_a_page_is_in_the_room_of_its_caption():
    """And no room is full."""
    docs = ROOT / "docs"
    assert {path.name for path in docs.glob("*.md")} == {"index.md", "changelog.md"}
    listed = re.findall(
        r":caption: (\w+)\n:hidden:\n\n(.*?)\n```", (docs / "index.md").read_text(), re.DOTALL
    )
    assert [caption.lower() for caption, _ in listed] == list(DOCUMENTS)
    for caption, pages in listed:
        rooms = {page.split("/")[0] for page in pages.split() if page != "changelog"}
        assert rooms == {caption.lower()}
    for room in (docs / name for name in DOCUMENTS):
        assert len(list(room.iterdir())) <= MOST_ENTRIES, room


def test_pages_are_where_texts_say():
    """In comments, docstrings and messages, such as docs/learn/gpu.md."""
    folders = ("flash_versions", "transformer", "tests", "notebooks", "docs/extensions")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files += [*(ROOT / "docs").glob("[a-z]*/*.md"), ROOT / "README.md", ROOT / "CITATION.cff"]
    named = {(name, path) for path in files for name in NAMED.findall(path.read_text())}
    assert len(named) > 50
    assert {(name, path) for name, path in named if not (ROOT / name).exists()} == set()
