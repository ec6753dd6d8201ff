"""What is measured: the shapes of each suite, and who competes on them.

Source of the shapes and of the FLOP count: the benchmarks of Dao-AILab/flash-attention (16k tokens,
hidden size 2048, 4 B H M N D, halved if causal; 2.5 times that for a backward pass, five products
in the place of two).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from flash_versions import VERSIONS, Fp8, attention
from flash_versions.bench.peers import PEERS
from flash_versions.dispatch.precision import Quantized
from flash_versions.dispatch.request import Request, make_request
from flash_versions.dispatch.version import Forward, ForwardQuantized
from flash_versions.versions.fp8.quantize import quantize
from flash_versions.versions.oracle.checks import is_copied, is_quantized

BACKWARD_FLOPS = 2.5  # times a forward's: five products in the place of two
TOKENS, HIDDEN = 16384, 2048
# Scales of the quantised inputs by what a competitor is called: FlashAttention-3's, and this
# package's.
FP8_INPUTS = {"fp8 head": Fp8("head"), "fp8 block": Fp8("block")}
QUANTIZERS = {
    "block": Fp8("block"),
    "block hadamard": Fp8("block", hadamard=True),
    "head": Fp8("head"),
    "tensor": Fp8("tensor"),
}

Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., Any]


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

    def flops(self) -> float:
        """Multiplications and additions of the two matrix products of a forward."""
        return 4 * self.B * self.H * self.M * self.N * self.D * (0.5 if self.causal else 1.0)

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
    "fp8": table((2048, 4096, 8192, 16384), (128, 64, 256)),
    "ablation fp8": table((2048, 4096, 16384), (128, 64)) + table((8192,), (256,)),
    "quantize": [
        Shape(2, heads, heads, 8192, 8192, head_dim, False)
        for heads, head_dim in ((16, 128), (32, 64))
    ],
    "backward": table((1024, 2048, 4096, 8192, 16384), (128, 64)) + table((8192,), (256,)),
    "decode": [
        Shape(B, 32, 8, 1, kilo * 1024, 128, False)
        for kilo, batches in {4: (64, 128), 8: (16, 64, 1), 32: (16, 1), 128: (4, 1)}.items()
        for B in batches
    ],
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
    "fp8": "forward of FP8 inputs, the kernel alone, next to bf16",
    "ablation fp8": "forward of FP8 inputs, a version against itself with one thing changed",
    "quantize": "q, k and v to FP8, as a share of a copy's bandwidth",
    "backward": "gradients, the shapes of the table from 1k on",
    "decode": "one query, grouped heads, a long cache or many sequences",
    "quick": "forward, a few shapes of the table, under a minute",
}

FIRST_TO_SPLIT = "fa2"  # the first version that splits the keys of a decoding step
FIRST_TO_ADD = "fa3"  # the version whose gradients programs add up in any order, unless told not to


@dataclass(frozen=True)
class Competitor:
    """A function of q, k, v that returns o, and how to measure it.

    Attributes:
        name: unique among those of a shape.
        function: what is called.
        of: in an ablation, the version, and `variant` what is changed in it, "" for nothing.
        precision: "bf16", or "fp8".
        prepare: makes of q, k, v what the function takes, before anything is timed: tensors in
            FP8. None: the function takes q, k, v.
        verify: `verify(results, q, k, v)` raises an ArithmeticError if the results are wrong; None:
            they are held against the error budget of attention.
    """

    name: str
    function: Function
    of: str | None = None
    variant: str = ""
    precision: str = "bf16"
    prepare: Callable[..., tuple] | None = None
    verify: Callable[..., None] | None = None

    def given(self, q, k, v) -> tuple:
        """The arguments of the function."""
        return (q, k, v) if self.prepare is None else self.prepare(q, k, v)

    def forward(self, q, k, v, do) -> Callable[[], Tensors]:
        """A call that returns (o,), or all that the function returns."""
        given = self.given(q, k, v)

        def call() -> Tensors:
            results = self.function(*given)
            return results if isinstance(results, tuple) else (results,)

        return call

    def backward(self, q, k, v, do) -> Callable[[], Tensors]:
        """A call that returns dq, dk, dv, with its forward behind it."""
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o = self.function(*leaves)
        return partial(torch.autograd.grad, o, leaves, do, retain_graph=True)

    def row(self, suite: str, shape: Shape) -> dict[str, Any]:
        """The fields of a row that are known before it is measured."""
        way = "backward" if suite.endswith("backward") else "forward"
        way = suite if suite == "quantize" else way
        row = {"suite": suite, "version": self.name, "pass": way, "precision": self.precision}
        row |= asdict(shape)
        return row if self.of is None else {**row, "of": self.of, "variant": self.variant}


def competitors(suite: str, shape: Shape) -> Iterator[Competitor]:
    """Everything that is measured on one shape, in the order of the tables' columns."""
    bf16 = tuple(name for name, peer in PEERS.items() if peer.precision == "bf16")
    made, peers = OTHERS.get(suite, (partial(in_bf16, suite), bf16))
    yield from made(shape)
    for name in peers:
        if (peer := PEERS[name]).installed():
            function = partial(peer.function, causal=shape.causal)
            prepare = in_e4m3 if peer.precision == "fp8" else None
            yield Competitor(name, function, precision=peer.precision, prepare=prepare)


def in_bf16(suite: str, shape: Shape) -> Iterator[Competitor]:
    """All versions, the first that splits a decoding step also without; of gradients those in
    order, too.
    """
    for name in VERSIONS:
        if suite == "decode" and name == FIRST_TO_SPLIT:
            yield Competitor(f"{name} unsplit", partial(attention, version=name, num_splits=1))
        yield Competitor(name, partial(attention, causal=shape.causal, version=name))
        if suite == "backward" and name == FIRST_TO_ADD:
            ordered = partial(attention, causal=shape.causal, version=name, deterministic=True)
            yield Competitor(f"{name} deterministic", ordered)


def variants(name: str, own: Any, changed: Mapping[str, Any]) -> Iterator[tuple[dict, Any]]:
    """Fields of a competitor and what is called, for a version and each of its variants."""
    for variant, function in {"": own, **changed}.items():
        yield {"name": f"{name} {variant}".rstrip(), "of": name, "variant": variant}, function


def ablated(shape: Shape) -> Iterator[Competitor]:
    """Versions that have variants, each followed by them."""
    for name, version in VERSIONS.items():
        if version.variants:
            for about, changed in variants(name, version.forward, version.variants):
                yield Competitor(function=partial(forward, changed, shape.causal), **about)


def ablated_fp8(shape: Shape) -> Iterator[Competitor]:
    """Versions that compute in FP8, each followed by its variants, on inputs scaled by heads: block
    scales add the same to all of them.
    """
    for name, version in VERSIONS.items():
        if version.forward_quantized is not None:
            for about, kernel in variants(name, version.forward_quantized, version.fp8_variants):
                yield fp8_competitor(kernel, shape, Fp8("head"), about)


def in_both_precisions(shape: Shape) -> Iterator[Competitor]:
    """Versions that compute in FP8: in bf16, and on inputs that are quantised already."""
    for name, version in VERSIONS.items():
        if version.forward_quantized is not None:
            yield Competitor(name, partial(attention, causal=shape.causal, version=name), of=name)
            for scales, how in FP8_INPUTS.items():
                about = {"name": f"{name} {scales}", "of": name, "variant": scales}
                yield fp8_competitor(version.forward_quantized, shape, how, about)


def fp8_competitor(
    kernel: ForwardQuantized, shape: Shape, how: Fp8, about: dict[str, Any]
) -> Competitor:
    """An FP8 kernel alone: what quantises its inputs is not timed."""
    prepare = partial(quantized_request, how, shape.causal)
    function = lambda *given: kernel(*given)[0]  # noqa: E731
    return Competitor(function=function, precision="fp8", prepare=prepare, **about)


def quantized_request(how: Fp8, causal: bool, q, k, v) -> tuple[Request, Quantized]:
    """The request and the quantised tensors that FP8 kernels take."""
    return make_request(q, k, v, causal=causal, precision=how), quantize(q, k, v, how)


def in_e4m3(q, k, v) -> Tensors:
    """q, k, v rounded to e4m3, the scale 1: what cuDNN takes."""
    return tuple(x.to(torch.float8_e4m3fn) for x in (q, k, v))


def quantizers(shape: Shape) -> Iterator[Competitor]:
    """Every way to quantise, and a copy of as many bytes as q, k and v have: from one tensor to
    another, in one launch.
    """
    for name, how in QUANTIZERS.items():
        function, verify = partial(quantize, how=how), partial(is_quantized, how)
        yield Competitor(name, function, precision="fp8", verify=verify)
    copy = lambda source, target: target.copy_(source)  # noqa: E731
    yield Competitor("copy", copy, prepare=for_copy, verify=is_copied)


def for_copy(q, k, v) -> Tensors:
    """The source and the target of the copy."""
    source = torch.cat([x.flatten() for x in (q, k, v)])
    return source, torch.empty_like(source)


# Suites in which others compete than all versions and peers in bf16: what makes them, the peers.
OTHERS: dict[str, tuple[Callable[[Shape], Iterator[Competitor]], tuple[str, ...]]] = {
    "ablation": (ablated, ("cudnn",)),
    "ablation fp8": (ablated_fp8, ("cudnn fp8",)),
    "fp8": (in_both_precisions, ("cudnn", "cudnn fp8")),
    "quantize": (quantizers, ()),
}


def forward(function: Forward, causal: bool, q, k, v) -> torch.Tensor:
    """o of a version's or a variant's forward."""
    return function(make_request(q, k, v, causal=causal))[0]
