"""What is measured: the shapes of each suite, and who competes on them.

Source of the shapes and of the FLOP count: the benchmarks of Dao-AILab/flash-attention (16k tokens,
hidden size 2048, 4 B H M N D, halved if causal; 2.5 times that for a backward pass, five products
in the place of two).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from flash_versions import VERSIONS, attention
from flash_versions.peers import PEERS
from flash_versions.request import Request, make_request
from flash_versions.version import Forward, Version

BACKWARD_FLOPS = 2.5  # times a forward's: five products in the place of two
TOKENS, HIDDEN = 16384, 2048

Tensors = tuple[torch.Tensor, ...]
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """One call of attention: batch B, H query and Hkv key heads, M queries, N keys, head_dim D."""

    B: int
    H: int
    Hkv: int
    M: int
    N: int
    D: int
    causal: bool
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"B={self.B} H={self.H} D={self.D} {mask} S={self.N}"

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """Random normal q, k, v and gradient of o on the GPU."""
        make = partial(torch.randn, device="cuda", dtype=getattr(torch, self.dtype))
        q, do = (make(self.B, self.M, self.H, self.D) for _ in range(2))
        k, v = (make(self.B, self.N, self.Hkv, self.D) for _ in range(2))
        return q, k, v, do

    def flops(self, lengths: Sequence[int] | None = None) -> float:
        """Multiplications and additions of the two matrix products of a forward; `lengths` of
        packed sequences in the place of the shape's rows.
        """
        pairs = self.B * self.M * self.N if lengths is None else sum(n * n for n in lengths)
        return 4 * self.H * pairs * self.D * (0.5 if self.causal else 1.0)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V: what decoding has to read."""
        return 2 * self.B * self.N * self.Hkv * self.D * getattr(torch, self.dtype).itemsize


def prefill(length: int, head_dim: int, causal: bool) -> Shape:
    """The shape of a length in the table: so many sequences that there are 16k tokens."""
    heads = HIDDEN // head_dim
    return Shape(TOKENS // length, heads, heads, length, length, head_dim, causal)


def table(lengths: Sequence[int], head_dims: Sequence[int]) -> list[Shape]:
    """Full and causal, every length, every head dim."""
    return [
        prefill(length, head_dim, causal)
        for head_dim in head_dims
        for causal in (False, True)
        for length in lengths
    ]


SUITES = {
    "table": table((512, 1024, 2048, 4096, 8192, 16384), (128, 64, 256)),
    "seeds": [
        Shape(B, H, H, S, S, 64, causal)
        for B, H, S in ((2, 8, 8192), (4, 16, 512))
        for causal in (False, True)
    ],
    "ablation": table((2048, 4096, 16384), (128, 64)) + table((8192,), (256,)),
    "backward": table((1024, 2048, 4096, 8192, 16384), (128, 64)) + table((8192,), (256,)),
    "decode": [Shape(1, 32, 8, 1, N, 128, False) for N in (8192, 32768, 131072)],
    "packed": [Shape(64, 16, 16, 1024, 1024, 128, causal) for causal in (False, True)],
    "packed backward": [Shape(64, 16, 16, 1024, 1024, 128, causal) for causal in (False, True)],
    "launch": [],
    "quick": [
        prefill(4096, 128, False),
        prefill(4096, 128, True),
        prefill(4096, 64, True),
        prefill(1024, 128, True),
    ],
}
ABOUT = {
    "table": "forward, 16k tokens, hidden size 2048, lengths from 512 to 16k",
    "seeds": "forward, two shapes with few heads",
    "ablation": "forward, a version against itself with one thing changed",
    "backward": "gradients, the shapes of the table from 1k on",
    "decode": "one query, grouped heads, a long cache",
    "packed": "forward, 64 sequences of different lengths in one tensor",
    "packed backward": "gradients of the same",
    "launch": "microseconds of host time of one call",
    "quick": "forward, a few shapes of the table, under a minute",
}


@dataclass(frozen=True)
class Competitor:
    """Something to measure: a function of q, k, v that returns o.

    Attributes:
        name: unique among those of a shape.
        function: what is called.
        lengths: of packed sequences; None: rows of the shape.
        of: in an ablation, the version, and `variant` what is changed in it, "" for nothing.
        compiles: whether its first call compiles something that a later process finds on disk.
    """

    name: str
    function: Function
    lengths: tuple[int, ...] | None = None
    of: str | None = None
    variant: str = ""
    compiles: bool = True

    def forward(self, q, k, v, do) -> Callable[[], Tensors]:
        """A call that returns (o,)."""
        return lambda: (self.function(q, k, v),)

    def backward(self, q, k, v, do) -> Callable[[], Tensors]:
        """A call that returns dq, dk, dv, with its forward behind it."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = self.function(*leaves)
        return partial(torch.autograd.grad, o, leaves, do, retain_graph=True)

    def row(self, suite: str, shape: Shape) -> dict[str, Any]:
        """What a row of results says before anything is measured."""
        way = "backward" if suite.endswith("backward") else "forward"
        row = {"suite": suite, "version": self.name, "pass": way, **asdict(shape)}
        return row if self.of is None else {**row, "of": self.of, "variant": self.variant}


def competitors(suite: str, shape: Shape) -> Iterator[Competitor]:
    """Everything that is measured on one shape, in the order of the tables' columns."""
    causal = shape.causal
    peers = list(PEERS)
    if suite == "ablation":
        peers = ["cudnn"]
        yield from ablated(causal)
    elif suite.startswith("packed"):
        peers = ["torch fa2", "cudnn"]
        yield from with_packed(shape)
    else:
        split = first_to_split() if suite == "decode" else None
        for name in VERSIONS:
            if name == split:
                whole = partial(attention, version=name, num_splits=1)
                yield Competitor(f"{name} unsplit", whole)
            yield Competitor(name, partial(attention, causal=causal, version=name))
    for name in peers:
        if (peer := PEERS[name]).installed():
            function = partial(peer.function, causal=causal)
            yield Competitor(name, function, compiles=peer.compiles)


def ablated(causal: bool) -> Iterator[Competitor]:
    """Versions that have variants, each followed by them."""
    for name, version in VERSIONS.items():
        if version.variants:
            yield Competitor(name, partial(forward, version.forward, causal), of=name)
        for variant, changed in version.variants.items():
            function = partial(forward, changed, causal)
            yield Competitor(f"{name} {variant}", function, of=name, variant=variant)


def with_packed(shape: Shape) -> Iterator[Competitor]:
    """Versions that take packed sequences: on the rectangle, and on the same rows cut elsewhere."""
    lengths = ragged_lengths(shape)
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device())
    for name, version in VERSIONS.items():
        if takes(version, cu_seqlens_q=bounds, cu_seqlens_k=bounds):
            yield Competitor(name, partial(attention, causal=shape.causal, version=name))
            yield Competitor(f"{name} packed", partial(packed, name, bounds, shape.causal), lengths)


def first_to_split() -> str | None:
    """The first version that can split the keys of a decoding step, whose lesson that is."""
    return next((name for name, version in VERSIONS.items() if takes(version, num_splits=2)), None)


def takes(version: Version, **asked: Any) -> bool:
    """Whether a version can do something, for what it can do at all."""
    x = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device())
    return version.unsupported(Request(x, x, x, **asked)) is None


def device() -> str:
    """Where the versions run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def forward(function: Forward, causal: bool, q, k, v) -> torch.Tensor:
    """o of a version's or a variant's forward."""
    return function(make_request(q, k, v, causal=causal))[0]


def ragged_lengths(shape: Shape) -> tuple[int, ...]:
    """As many sequences as the shape has rows, with the same total: lengths from an eighth of the
    mean to nearly twice it.
    """
    generator = torch.Generator().manual_seed(0)
    share = 0.125 + 1.75 * torch.rand(shape.B, generator=generator)
    ends = (share.cumsum(0) / share.sum() * shape.B * shape.N).round().long()
    return tuple(ends.diff(prepend=torch.tensor([0])).tolist())


def packed(version: str, bounds: torch.Tensor, causal: bool, q, k, v) -> torch.Tensor:
    """A version on the rows of q, k, v one after another, cut into other sequences."""
    rows = (x.flatten(0, 1) for x in (q, k, v))
    return attention(*rows, causal=causal, cu_seqlens_q=bounds, version=version).view(q.shape)
