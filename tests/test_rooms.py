"""The rooms of both packages: who imports whom, read from the imports as they are written."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

from tests.helpers import ROOT

MAKING = "versions.tiles versions.fp8 dispatch"  # what versions are made of
LABORATORY = (
    "bench", "checker", "inspect", "mine", "plot", "puzzles", "verify",
)  # fmt: skip
DOORS = (
    "flash_versions", "flash_versions.files", "flash_versions.dispatch.extras",
    "flash_versions.flash_attn", "flash_versions.integrations",
)  # fmt: skip
# What the modules of a room may import of their own package, beside the room; "." is the package's
# own `__init__`. A room that is not here belongs to the one around it.
MAY_IMPORT = {
    "flash_versions": "dispatch versions integrations lessons simulator",
    "flash_versions.__main__": ". dispatch",
    "flash_versions.simulator": "",
    "flash_versions.files": "",
    "flash_versions.dispatch": "files",
    "flash_versions.dispatch.replay": "",
    "flash_versions.dispatch.request": "dispatch.precision",
    "flash_versions.versions.tiles": "dispatch",
    "flash_versions.versions.fp8": "dispatch versions.tiles",
    "flash_versions.versions.fa1": MAKING,
    "flash_versions.versions.fa2": MAKING,
    "flash_versions.versions.fa3": f"{MAKING} versions.fa2",
    "flash_versions.versions.fa4": f"{MAKING} versions.fa3",
    "flash_versions.versions.oracle": MAKING,
    "flash_versions.lessons": "dispatch versions",
    "flash_versions.diff": "files lessons",
    "flash_versions.lessons.check": ". dispatch lessons versions",
    "flash_versions.versions.api": "dispatch versions",
    "flash_versions.flash_attn": "dispatch versions.tiles versions.masks versions.api",
    "flash_versions.integrations": "dispatch versions.tiles versions.api",
    "flash_versions.integrations.hub": "dispatch versions.api versions.masks flash_attn",
    **dict.fromkeys(
        [f"flash_versions.{room}" for room in LABORATORY],
        ". dispatch files lessons simulator versions flash_attn integrations "
        + " ".join(LABORATORY),
    ),
    "transformer": ". model generation tasks training rl",
    "transformer.model": ".",
    "transformer.model.kernels": ".",
    "transformer.generation": ". model",
    "transformer.tasks": ".",
    "transformer.training": ". model generation tasks",
    "transformer.rl": ". model generation tasks training",
}  # fmt: skip


def find_modules() -> dict[str, Path]:
    """The modules of both packages by name."""
    files = [*ROOT.glob("flash_versions/**/*.py"), *ROOT.glob("transformer/**/*.py")]
    names = (".".join(x.relative_to(ROOT).with_suffix("").parts) for x in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files)}


def find_imports(file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the packages that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [x.name for x in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has a relative import"
            names = [f"{node.module}.{x.name}" for x in node.names]
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", None)
            constants = [x.value for x in node.args if isinstance(x, ast.Constant)]
            names = constants if called == "import_module" else []
        found |= {name if name in modules else name.rpartition(".")[0] for name in names}
    return found & set(modules)


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


def test_imports_go_one_way():
    modules = find_modules()
    graph = {name: find_imports(file, modules) for name, file in modules.items()}
    wrong = [(name, x) for name, others in graph.items() for x in others if not may_import(name, x)]
    assert not wrong
    TopologicalSorter({x: others - {x} for x, others in graph.items()}).prepare()  # no circle
