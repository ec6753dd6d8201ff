"""What calls of attention launch, by name: of each kernel its summary and a little more. See
compiled.py: each of CALLS is compiled in a process of its own.
"""

from dataclasses import dataclass, field

import torch

from flash_versions import VERSIONS
from flash_versions.dispatch.request import Request, make_request
from flash_versions.flash_attn import kv_cache
from flash_versions.inspect.command import Compiled, compile_call, compiling
from flash_versions.versions.fa3.hopper.backward import kernel
from tests.compile.compiled import unused_barriers

INT32 = torch.zeros(2, dtype=torch.int32)
CAUSAL = {"causal": True}
SCORES = {"window": (100, 20), "softcap": 30.0}
CUT = CAUSAL | {"kv_lengths": INT32[:1], "sink": torch.empty(4)}
PACKED = CAUSAL | {"cu_seqlens_q": INT32}
INTERVALS = CAUSAL | {"query_ends": torch.zeros(512, dtype=torch.int32)}
PAGES = {"kv_lengths": INT32[:1], "block_table": INT32[None]}
LENGTHS = CAUSAL | {"num_splits": None, "kv_lengths": torch.zeros(16, dtype=torch.int32)}
TABLE = LENGTHS | {"block_table": torch.zeros(16, 128, dtype=torch.int32)}
EXACT = CAUSAL | {"num_splits": None, "batch_invariant": True}
LINEAR = {"alibi_slopes": torch.empty(4), "dropout_p": 0.1}


@dataclass(frozen=True)
class Call:
    """A call of a version: `shape` is queries, keys (of a page, if there are pages), heads, key
    heads.
    """

    version: str
    head_dim: int = 128
    options: dict = field(default_factory=lambda: CAUSAL)
    shape: tuple[int, int, int, int] = (512, 512, 4, 4)
    head_dim_v: int | None = None
    dtype: torch.dtype = torch.bfloat16
    backward: bool = False
    variant: str | None = None
    batch: int = 1
    pages: int | None = None

    def request(self) -> Request:
        """A request of uninitialised tensors."""
        queries, keys, heads, kv_heads = self.shape
        q = torch.empty(self.batch, queries, heads, self.head_dim, dtype=self.dtype)
        k = q.new_empty(self.pages or self.batch, keys, kv_heads, self.head_dim)
        v = k.new_empty(*k.shape[:3], self.head_dim_v or self.head_dim)
        if "cu_seqlens_q" in self.options:
            q, k, v = q[0], k[0], v[0]
        return make_request(q, k, v, **({"num_splits": 1} | self.options))

    def compile(self, arch: str) -> list[Compiled]:
        """Each kernel that is launched."""
        return compile_call(
            self.version, self.request(), arch, variant=self.variant, backward=self.backward
        )


@dataclass(frozen=True)
class Gradients(Call):
    """The backward for Hopper alone."""

    version: str = "fa3"

    def compile(self, arch: str) -> list[Compiled]:
        """The kernels of the backward."""
        request = self.request()
        o = torch.empty_like(request.q[..., :1]).expand(*request.q.shape[:3], request.v.shape[3])
        o, lse = o.contiguous(), torch.empty(1, request.q.shape[2], request.q.shape[1])
        given = request, o, lse, None, torch.empty_like(o), lse, None
        with compiling(arch) as found:
            kernel.backward(*given)
        return found


class Append:
    """The kernel that appends to a KV cache, with everything that it can do."""

    def compile(self, arch: str) -> list[Compiled]:
        """The one kernel."""
        cache = torch.empty(4, 16, 2, 128, dtype=torch.bfloat16)
        new = torch.empty(1, 3, 2, 128, dtype=torch.bfloat16)
        tables = torch.empty(2, 64, 64)
        where = INT32[:1], INT32[:1], INT32[None]
        with compiling(arch) as found:
            kv_cache.append_op._init_fn(cache, cache, new, new, *where, *tables, True)
        return found


LONG = (1, 4096, 32, 8)
DECODED = (1, 64, 32, 8)
CALLS: dict[str, dict[str, Call | Append]] = {
    "portable": {
        "fa1": Call("fa1", backward=True),
        "fa2": Call("fa2", backward=True),
        "fa2, fp32": Call("fa2", dtype=torch.float32),
        "fa2, scores": Call("fa2", 64, SCORES | LINEAR, (512, 512, 4, 2)),
        "fa2, splits": Call("fa2", shape=LONG, options={"num_splits": 4}),
        "append": Append(),
    },
    "hopper": {
        "fa3": Call("fa3", shape=(500, 700, 4, 4)),
        "fa3, scores": Call("fa3", 64, SCORES, (512, 512, 4, 2)),
        "fa3, backward": Gradients(),
        "fa4": Call("fa4", options={}, variant="both, 2/8"),
        "decode": Call("fa3", options=TABLE, shape=DECODED, batch=16, pages=2048),
        "exact": Call("fa3", options=EXACT | {"sink": torch.empty(8)}, shape=(500, 4100, 8, 2)),
        "exact decode": Call("fa3", options=TABLE | EXACT, shape=DECODED, batch=16, pages=2048),
        "exact decode, 64": Call("fa3", 64, TABLE | EXACT, DECODED, batch=16, pages=2048),
    },
    "options": {
        "fa2, packed": Call("fa2", options=PACKED, shape=(512, 512, 4, 2), backward=True),
        "fa2, intervals": Call("fa2", options=INTERVALS, shape=(512, 512, 4, 2)),
        "fa2, pages": Call("fa2", 64, PAGES),
        "fa3, 256": Call("fa3", 256),
        "fa3, 160": Call("fa3", 160, dtype=torch.float16),
        "fa3, 192 by 128": Call("fa3", 192, head_dim_v=128),
        "fa3, cut": Call("fa3", options=CUT),
        "decode, rows": Call("fa3", 64, LENGTHS, (1, 8192, 32, 8), batch=16),
        "fa3, packed": Call("fa3", options=PACKED, shape=(512, 512, 4, 2)),
        "fa3, intervals": Call("fa3", options=INTERVALS, shape=(512, 512, 4, 2)),
        "fa4, packed": Call("fa4", options=PACKED, shape=(512, 512, 4, 2)),
    },
    "fp8": {
        "fp8, heads": Call("fa3", options={"precision": "fp8:head"}),
        "fp8, blocks": Call("fa3", options={"precision": "fp8:block:hadamard"}),
        "fp8, fa4": Call("fa4", options={"precision": "fp8:head"}),
    },
    "gradients": {
        "256": Gradients(head_dim=256, shape=(500, 700, 8, 4)),
        "192 by 128": Gradients(head_dim=192, head_dim_v=128),
        "in turns": Gradients(options=CAUSAL | {"deterministic": True}),
    },
    "elsewhere": {name: Call(name, backward=name in ("fa1", "fa2")) for name in VERSIONS}
    | {"fp8": Call("fa3", options=CAUSAL | {"precision": "fp8:block"})},
}  # fmt: skip


def rows(arch: str, group: str) -> dict[str, list[dict]]:
    """What the tests look at, of each call of a group."""
    return {
        name: [
            kernel.summary()
            | {
                "unused_barriers": unused_barriers(kernel.ttgir),
                "early": kernel.code.metadata.launch_pdl,
            }
            for kernel in call.compile(arch)
        ]
        for name, call in CALLS[group].items()
        if arch != "sm_80" or name != "fp8"
    }
