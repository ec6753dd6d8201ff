"""Write the repository of a kernel for the Kernels Hub.

    README.md                        the card
    build/torch-universal/           pure Python, for every torch and every device
        __init__.py                  kernel.py of this room
        metadata.json
        dispatch/ versions/ ...      the modules that it imports, in the folders of this package

Imports become relative, because the `kernels` library loads a kernel under a name of its own, and
several versions of it in one process. For the same reason that name takes the place of this
package's in what all of them would share: torch's operators, and an attribute of tensors.
"""

import ast
import hashlib
import json
import shutil
import tempfile
from pathlib import Path

PACKAGE = __name__.partition(".")[0]
ROOT = Path(__file__).parents[2]  # the folder of this package
ENTRY, CARD = "integrations/hub/kernel.py", "integrations/hub/card.md"
BUILD = "build/torch-universal"
SHARED = '"{}::', "torch.ops.{}.", '"{}_plans"'  # names that the whole process knows
VERSION = 1  # of the functions' meaning, as the hub counts: a change that breaks callers is another


def file_of(module: str) -> Path | None:
    """The file of a module of this package, if there is one."""
    path = ROOT.joinpath(*module.split(".")[1:])
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if module != PACKAGE and file.is_file():
            return file
    return None


def imports(source: str) -> list[ast.ImportFrom]:
    """The statements by which a source imports from this package.

    Raises:
        ValueError: it does so by `import flash_versions`, which cannot be relative.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE:
            found.append(node)
        if isinstance(node, ast.Import) and any(
            x.name.split(".")[0] == PACKAGE for x in node.names
        ):
            raise ValueError(f"{ast.unparse(node)!r} cannot be relative; write from ... import")
    return found


def needed(entry: Path) -> list[Path]:
    """A file and all files of this package that it imports, with the folders' `__init__`."""
    found, to_do = set(), [entry]
    while to_do:
        file = to_do.pop()
        if file in found:
            continue
        found.add(file)
        folders = file.relative_to(ROOT).parents
        to_do += [ROOT / folder / "__init__.py" for folder in folders if folder != Path()]
        for node in imports(file.read_text(encoding="utf-8")):
            names = [f"{node.module}.{x.name}" for x in node.names] + [str(node.module)]
            to_do += [path for name in names if (path := file_of(name))]
    return sorted(found)


def relative(source: str, depth: int) -> str:
    """A source with relative imports, for a file that is `depth` folders below the kernel's."""
    lines = source.split("\n")
    for node in imports(source):
        absolute, rest = f"from {node.module} import", str(node.module).removeprefix(PACKAGE)
        dots = "." * (depth + 1)
        line = lines[node.lineno - 1]
        lines[node.lineno - 1] = line.replace(absolute, f"from {dots}{rest[1:]} import", 1)
    return "\n".join(lines)


def modules() -> dict[str, str]:
    """The kernel's modules, and what of them is C: path in the build folder -> source."""
    entry = ROOT / ENTRY
    made = {}
    for file in needed(entry):
        where = file.relative_to(ROOT)
        where = Path("__init__.py") if file == entry else where
        source = file.read_text(encoding="utf-8")
        made[where.as_posix()] = relative(source, len(where.parents) - 1)
        if (native := file.with_suffix(".c")).is_file():
            made[where.with_suffix(".c").as_posix()] = native.read_text(encoding="utf-8")
    return made


def write_kernel(folder: Path, name: str = "flash-versions") -> None:
    """Write the repository; what an earlier call wrote there is replaced.

    Args:
        folder: of the repository.
        name: of the kernel: lower case letters, digits and hyphens.

    Raises:
        ValueError: the name is not possible, or the folder holds something else.
        OSError: the folder cannot be written.
    """
    if not name.replace("-", "").isalnum() or name != name.lower() or not name[0].isalpha():
        raise ValueError(f"name {name!r}: lower case letters, digits and hyphens work")
    if folder.exists() and not (folder / BUILD / "metadata.json").is_file():
        raise ValueError(f"{folder} exists and holds no kernel; name a new folder")
    folder = folder.resolve()  # a link to it stays one
    sources = modules()
    digest = hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:8]
    identity = f"{name.replace('-', '_')}_{digest}"
    metadata = {
        "name": name,
        "id": identity,
        "version": VERSION,
        "license": "MIT",
        "backend": {"type": "cuda"},
        "python-depends": ["einops"],
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new, build = Path(temporary, "new"), Path(temporary, "new", BUILD)
        for path, source in sources.items():
            file = build / path
            file.parent.mkdir(parents=True, exist_ok=True)
            for name_of in SHARED:
                source = source.replace(name_of.format(PACKAGE), name_of.format(identity))
            file.write_text(source, encoding="utf-8")
        (build / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
        shutil.copy(ROOT / CARD, new / "README.md")
        if folder.exists():
            folder.rename(Path(temporary, "old"))
        new.rename(folder)
