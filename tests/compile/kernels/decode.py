"""What calls of decoding launch on Hopper, a row for each kernel: what test_decode.py asserts. See
compiled.py.
"""

import re

import torch

from flash_versions.dispatch.request import make_request
from flash_versions.inspect.command import Compiled, compile_call

CALLS = {  # name: (batch, queries, head_dim, options)
    "one sequence": (1, 1, 128, {}),
    "many": (64, 1, 128, {"causal": True}),
    "many, all options": (64, 8, 128, {"softcap": 30.0, "window": (4000, 20), "dropout_p": 0.1}),
}


PAGES = (None, 16, 64)  # of so many keys, the last as long as a block


def row(call: str, kernel: Compiled) -> dict:
    """What the test looks at."""
    return {
        "call": call,
        "kernel": kernel.kernel,
        "spills": kernel.assembly.spill_stores,
        "shared": kernel.shared,
        "mma_sync": kernel.counts["mma_sync"],
        "copied": re.findall(r"cp\.async\.c[ag]\.[^,]*,[^,]*, (\w+)", kernel.ptx),
        "waits": [int(n) for n in re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.ptx)],
        "loops": [loop.local_memory for loop in kernel.hot_loops],
        "dependency": re.findall(r"griddepcontrol\.(\w+)", kernel.ptx),
        "early": kernel.code.metadata.launch_pdl,
    }


def rows(part: str = "") -> list[dict]:
    """The rows of all calls; of part "shares", those of sequences with lengths of their own."""
    if part == "shares":
        return [found for size in PAGES for found in shared(size)]
    found = []
    for name, (batch, queries, head_dim, options) in CALLS.items():
        q = torch.empty(batch, queries, 32, head_dim, dtype=torch.bfloat16)
        k = torch.empty(batch, 8192, 8, head_dim, dtype=torch.bfloat16)
        found += [
            row(name, kernel) for kernel in compile_call("fa2", make_request(q, k, k, **options))
        ]
    return found


def shared(page_size: int | None) -> list[dict]:
    """The rows of a call of 16 sequences."""
    q = torch.empty(16, 1, 32, 128, dtype=torch.bfloat16)
    k = torch.empty(16, 8192, 8, 128, dtype=torch.bfloat16)
    given = {"kv_lengths": torch.zeros(16, dtype=torch.int32), "causal": True}
    if page_size is not None:
        k = k.view(-1, page_size, 8, 128)
        given["block_table"] = torch.zeros(16, 8192 // page_size, dtype=torch.int32)
    name = f"128, pages of {page_size}"
    return [row(name, kernel) for kernel in compile_call("fa2", make_request(q, k, k, **given))]
