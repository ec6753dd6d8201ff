"""The solutions of the puzzles, compiled for sm_90."""

import importlib

from flash_versions.inspect.compiled import compiling
from flash_versions.puzzles.puzzle import PUZZLES


def rows() -> list[dict]:
    """A row for each kernel that each solution launches."""
    found = []
    for puzzle in PUZZLES.values():
        module = importlib.import_module(f"flash_versions.puzzles.{puzzle.group}.{puzzle.name}")
        [*_, inputs] = module.cases().values()
        with compiling("sm_90") as kernels:
            getattr(module, puzzle.name)(*inputs)
        for kernel in kernels:
            found.append(
                {
                    "puzzle": puzzle.name,
                    "wgmma": "wgmma.mma_async" in kernel.ptx,
                    "copies": "cp.async.bulk.tensor" in kernel.ptx,
                }
            )
    return found
