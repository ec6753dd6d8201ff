"""The solutions of the puzzles, compiled for sm_90."""

import tempfile
from pathlib import Path

from flash_versions.inspect.compiled import compiling
from flash_versions.puzzles.check import cases_of
from flash_versions.puzzles.puzzle import PUZZLES


def rows() -> list[dict]:
    """A row for each kernel that each solution launches."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for puzzle in PUZZLES.values():
            file = Path(folder, f"{puzzle.name}.py")
            file.write_text(puzzle.solution)
            [*_, case] = cases_of(puzzle).values()
            with compiling("sm_90") as kernels:
                case.load(str(file))(*case.inputs.values())
            for kernel in kernels:
                found.append(
                    {
                        "puzzle": puzzle.name,
                        "wgmma": "wgmma.mma_async" in kernel.ptx,
                        "copies": "cp.async.bulk.tensor" in kernel.ptx,
                    }
                )
    return found
