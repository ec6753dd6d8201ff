"""FlashAttention 1 to 4 as real kernels in Triton and Gluon, one idea per step.

    from flash_versions import attention
    o = attention(q, k, v, causal=True)                      # (batch, length, heads, head_dim)
    o, lse = attention(q, k, v, version="fa1", return_lse=True)
    o.sum().backward()

FlashAttention's own functions are in `flash_versions.flash_attn`, what puts this attention into
transformers and torch's scaled_dot_product_attention in `flash_versions.integrations`.

Importing the package lets Triton's kernels, of anybody, compute on tensors that are on the CPU:
they are simulated (`flash_versions.simulator`). Launches on a GPU stay as they are.
"""

import sys

# A command: the current folder comes first, and a puzzle's copy.py in it would hide Python's, which
# torch imports.
if sys.argv[:1] == ["-m"]:
    folder = sys.path.pop(0)
    import copy  # noqa: F401

    sys.path.insert(0, folder)
    del folder

from flash_versions import simulator  # noqa: E402

simulator.install()  # before anything imports triton

from flash_versions.dispatch.precision import Fp8  # noqa: E402
from flash_versions.dispatch.version import Version  # noqa: E402
from flash_versions.integrations.distributed.context_parallel import context_parallel_attention  # noqa: E402
from flash_versions.integrations.distributed.merge import merge_attention_states  # noqa: E402
from flash_versions.lessons import LESSONS  # noqa: E402
from flash_versions.versions import masks  # noqa: E402
from flash_versions.versions.api import BASELINES, VERSIONS, attention  # noqa: E402
from flash_versions.versions.from_file import load_version  # noqa: E402
from flash_versions.versions.oracle.budget import compare  # noqa: E402
from flash_versions.versions.oracle.reference import attention_reference  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "BASELINES", "Fp8", "LESSONS", "VERSIONS", "Version", "attention", "attention_reference",
    "compare", "context_parallel_attention", "load_version", "masks", "merge_attention_states",
]  # fmt: skip
