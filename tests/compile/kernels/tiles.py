"""What FA1's and FA2's kernels become in the tiles that are chosen for an architecture, a row for
each kernel. See compiled.py: each architecture is compiled once.

    python -m tests.compile.kernels.tiles [sm_80 ...]

writes docs/results/compiled/tiles.json, of which `make plot` makes a table.
"""

import sys

import torch

from flash_versions.bench.document import new_document, save
from flash_versions.bench.results import RESULTS
from flash_versions.dispatch.request import make_request
from flash_versions.inspect.compiled import ARCHES, KIB, Compiled, compile_call

HEAD_DIMS = (32, 64, 96, 128, 192, 256)
VERSIONS = ("fa1", "fa2")
REGISTERS = 65_536  # of a multiprocessor
TENSOR_COLUMNS = 512  # of its tensor memory, from sm_100 on
MULTIPLY = ("forward_kernel", "backward_kernel", "dkdv_kernel", "dq_kernel")


def together(kernel: Compiled) -> int:
    """How many programs run on a multiprocessor at the same time."""
    about, tensor = ARCHES[kernel.arch], getattr(kernel.code.metadata, "tmem_size", 0) or 0
    return min(
        (about.shared_memory + KIB) // (kernel.shared + KIB),  # each takes 1 KiB besides
        REGISTERS // (32 * kernel.num_warps * (-(-kernel.registers // 8) * 8)),
        TENSOR_COLUMNS // tensor if tensor else 64,
    )


def row(version: str, head_dim: int, kernel: Compiled) -> dict:
    """What the test and the table look at."""
    constants = kernel.code.src.constants
    names = kernel.code.src.fn.arg_names
    blocks = {names[place[0]]: value for place, value in constants.items() if len(place) == 1}
    return {
        "arch": kernel.arch,
        "version": version,
        "kernel": kernel.kernel.removesuffix("_kernel"),
        "head_dim": head_dim,
        "tile": [blocks["BLOCK_Q"], blocks["BLOCK_KV"]],
        "num_warps": kernel.num_warps,
        "num_stages": kernel.code.metadata.num_stages,
        "registers": kernel.registers,
        "stack": kernel.stack,
        "spills": [loop.local_memory for loop in kernel.hot_loops],
        "instructions": [len(loop.instructions) for loop in kernel.hot_loops],
        "shared": kernel.shared,
        "programs": together(kernel),
    }


def rows(arch: str, *head_dims: str, **options) -> list[dict]:
    """The rows of an architecture."""
    found = []
    for head_dim in map(int, head_dims or HEAD_DIMS):
        q = torch.empty(1, 4096, 4, head_dim, dtype=torch.bfloat16)
        request = make_request(q, q, q, causal=True, num_splits=1, **options)
        for version in VERSIONS:
            kernels = compile_call(version, request, arch, backward=True)
            found += [row(version, head_dim, x) for x in kernels if x.kernel in MULTIPLY]
    return found


def main(arches: list[str]) -> None:
    """Write the rows of architectures to docs/results/compiled."""
    document = new_document("cpu")
    document["rows"] = [row | {"suite": "tiles"} for arch in arches for row in rows(arch)]
    save(document, RESULTS / "compiled" / "tiles.json")


if __name__ == "__main__":
    main(sys.argv[1:] or [arch for arch in ARCHES if arch != "sm_86"])  # compiled as sm_89
