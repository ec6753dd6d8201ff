"""The calls of the equivalence suite: every feature of `attention`, at shapes that break kernels.

The tests run every version on them, and `python -m flash_versions.mine check` a kernel of yours.
"""

from dataclasses import dataclass, field
from typing import Any

import torch

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@dataclass(frozen=True)
class Case:
    """Shape and options of one call: M queries, N keys."""

    name: str
    M: int
    N: int
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int | None = None
    causal: bool = False
    batch: int = 1
    kv_lengths: tuple[int, ...] | None = None
    kv_starts: tuple[int, ...] | None = None
    alibi: tuple[int, ...] = ()
    starts: tuple[int, ...] | None = None  # the dimensions in front of the keys
    ends: tuple[int, ...] | None = None
    sink: bool = False
    options: dict = field(default_factory=dict)

    def inputs(
        self, dtype: torch.dtype, device: str
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v with a non-zero mean in v, so that an output of zeros is far from right."""
        q = torch.randn(self.batch, self.M, self.heads, self.head_dim, device=device)
        k = torch.randn(self.batch, self.N, self.kv_heads, self.head_dim, device=device)
        dim_v = self.head_dim_v or self.head_dim
        v = torch.randn(self.batch, self.N, self.kv_heads, dim_v, device=device) + 0.5
        return q.to(dtype), k.to(dtype), v.to(dtype)

    def all_options(self, device: str) -> dict[str, Any]:
        """The options of `attention`; a sink requires grad."""
        found = dict(self.options, causal=self.causal)
        if self.kv_lengths:
            found["kv_lengths"] = torch.tensor(self.kv_lengths, device=device)
        if self.kv_starts:
            found["kv_starts"] = torch.tensor(self.kv_starts, device=device)
        if self.alibi:
            found["alibi_slopes"] = torch.rand(self.alibi, device=device)
        if self.starts is not None:
            shape = (*self.starts, self.N)
            found["query_starts"] = torch.randint(self.M // 2 + 1, shape, device=device)
        if self.ends is not None:
            found["query_ends"] = torch.randint(self.M + 1, (*self.ends, self.N), device=device)
        if self.sink:
            found["sink"] = torch.randn(self.heads, device=device, requires_grad=True)
        return found


CASES = [
    Case("one query, one key", 1, 1, causal=True),
    Case("one query, many keys", 1, 200, heads=4),
    Case("full, several blocks", 150, 200),
    Case("causal, several blocks", 200, 200, causal=True),
    Case("one past a block", 129, 129, causal=True, heads=1, kv_heads=1),
    Case("exactly one block", 64, 64, causal=True),
    Case("fewer queries than keys", 40, 170, causal=True),
    Case("more queries than keys: rows without a key", 170, 40, causal=True),
    Case("no keys at all", 3, 0),
    Case("no keys at all, causal", 3, 0, causal=True),
    Case("no queries", 0, 5),
    Case("empty batch", 4, 5, batch=0),
    Case("grouped heads 8:4", 33, 70, heads=8, kv_heads=4, causal=True),
    Case("multi-query 8:1", 33, 70, heads=8, kv_heads=1, causal=True),
    Case("grouped heads 6:2, not a power of two", 50, 50, heads=6, kv_heads=2, causal=True),
    Case("head dim 1", 20, 30, head_dim=1),
    Case("head dim 24", 40, 70, head_dim=24, causal=True),
    Case("head dim 80", 40, 70, head_dim=80, causal=True),
    Case("head dim 128", 70, 100, head_dim=128, causal=True),
    Case("head dim 192", 40, 70, head_dim=192),
    Case("head dim 256", 40, 70, head_dim=256, causal=True, heads=1, kv_heads=1),
    Case("batch of 3", 20, 70, batch=3, causal=True),
    Case("large scale: nearly one-hot", 70, 70, causal=True, options={"scale": 3.0}),
    Case("tiny scale: nearly uniform", 70, 70, options={"scale": 1e-4}),
    Case("lengths per row", 20, 150, batch=4, kv_lengths=(150, 64, 1, 0)),
    Case("lengths per row, causal", 20, 150, batch=4, causal=True, kv_lengths=(150, 64, 10, 0)),
    Case("lengths per row, one query", 1, 150, batch=3, heads=4, kv_lengths=(150, 65, 1)),
    Case("lengths past the end and below 0", 5, 20, batch=2, kv_lengths=(99, -3)),
    Case("padding on the left", 70, 70, batch=4, causal=True, kv_starts=(0, 3, 66, 70)),
    Case("padding on the left, keys ahead are seen", 70, 70, batch=2, kv_starts=(5, 66),
         options={"window": (None, 3)}),
    Case("padding on both sides", 20, 150, batch=3, kv_lengths=(150, 99, 30),
         kv_starts=(64, 5, 30)),
    Case("starts behind the end and below 0", 5, 20, batch=2, kv_lengths=(7, 9),
         kv_starts=(9, -3)),
    Case("values wider than keys", 70, 90, head_dim=32, head_dim_v=64, causal=True),
    Case("values narrower than keys", 40, 70, head_dim=192, head_dim_v=128, kv_heads=1),
    Case("window to the left", 150, 150, causal=True, options={"window": (40, None)}),
    Case("window to both sides", 100, 170, options={"window": (30, 70)}),
    Case("window to the right only", 100, 170, options={"window": (None, 20)}),
    Case("window of one key", 70, 100, options={"window": (0, 0)}),
    Case("window, more queries than keys", 170, 40, options={"window": (10, 5)}),
    Case("window wider than all", 40, 70, options={"window": (1000, 1000)}),
    Case("window of grouped heads", 150, 200, heads=6, causal=True, options={"window": (50, None)}),
    Case("window, lengths per row", 20, 150, batch=3, kv_lengths=(150, 30, 0),
         options={"window": (20, 3)}),
    Case("softcap", 70, 100, causal=True, options={"softcap": 1.5}),
    Case("softcap far above the scores", 40, 70, options={"softcap": 50.0}),
    Case("ALiBi", 70, 100, heads=4, causal=True, alibi=(4,)),
    Case("ALiBi per batch row, both sides", 40, 70, batch=2, alibi=(2, 2)),
    Case("sink", 70, 100, causal=True, sink=True),
    Case("sink, rows without a key", 100, 40, causal=True, heads=4, sink=True),
    Case("dropout", 70, 100, causal=True, heads=4, batch=2, options={"dropout_p": 0.3}),
    Case("keys seen up to a query", 150, 150, causal=True, ends=()),
    Case("keys seen from a query on", 100, 170, batch=2, starts=(2,)),
    Case("intervals of queries by head, grouped", 150, 200, heads=6, batch=2, causal=True,
         starts=(), ends=(2, 2), options={"window": (90, None)}),
    Case("intervals, more queries than keys", 170, 40, starts=(), ends=(), sink=True,
         alibi=(2,), options={"softcap": 3.0, "dropout_p": 0.1}),
    Case("everything at once", 100, 130, heads=4, batch=2, causal=True, kv_lengths=(130, 70),
         alibi=(4,), sink=True, options={"window": (60, None), "softcap": 3.0, "dropout_p": 0.1}),
]  # fmt: skip
