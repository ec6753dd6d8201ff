"""The contract that every version fulfils, and what no kernel can do."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.precision import GATHERED, Fp8, Quantized, is_fp8
from flash_versions.dispatch.request import INTERVALS, Request
from flash_versions.dispatch.sizes import padded_head_dim

Forward = Callable[[Request], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
ForwardQuantized = Callable[[Request, Quantized], tuple[torch.Tensor, torch.Tensor, None]]
WIDE = 256  # head dims up to this one have kernels of every version
WIDEST = 512  # and up to this one FA2's
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True, eq=False)
class Version:
    """One step of the progression, or a baseline to hold against it.

    Attributes:
        name: by which it is chosen.
        title: for people.
        wasted: what the version before it wastes.
        idea: what it does against that.
        source: the paper.
        forward: `forward(request)` returns (o, lse, statistics): o (batch, M, heads, head_dim_v),
            lse fp32 natural log (batch, heads, M), statistics fp32 (num_statistics, batch, heads,
            M): what the backward needs beside the LSE, or None. Packed: batch is 1, M the total. A
            baseline may give None for the LSE, too.
        limits: `limits(request)` returns the sentence that says why this version cannot serve a
            request, or None, whatever its lengths.
        backward: `backward(request, o, lse, statistics, do, dlse)` returns (dq, dk, dv, dsink),
            dsink None without a sink; dlse may be None. None for a baseline, which autograd
            differentiates.
        num_statistics: first dimension of statistics.
        variants: the forward with one thing changed, by name: what the ablation measures.
        forward_quantized: `forward_quantized(request, quantized)`, the forward of FP8 tensors that
            are quantised already, (o, lse, None); of the request's q, k and v only shapes and dtype
            are read. `forward` may choose a faster kernel. None for a version without FP8.
        fp8_variants: forward_quantized with one thing changed, by name.
        inexact: why its rows depend on other rows, a part of a sentence; None if it serves calls
            that ask for batch_invariant.
    """

    name: str
    title: str
    wasted: str
    idea: str
    source: str
    forward: Forward
    limits: Callable[[Request], str | None]
    backward: Backward | None = None
    num_statistics: int = 0
    variants: Mapping[str, Forward] = field(default_factory=dict)
    forward_quantized: ForwardQuantized | None = None
    fp8_variants: Mapping[str, ForwardQuantized] = field(default_factory=dict)
    inexact: str | None = "its sums follow the shape of the call"

    def unsupported(self, request: Request) -> str | None:
        """Why this version cannot serve the request, as a sentence, or None: the one source of that
        answer.
        """
        reason = self.limits(request)
        if reason is None and request.batch_invariant:
            reason = invariance_limits(request)
            if self.inexact:
                reason = (
                    f"batch_invariant=True is not possible: {self.inexact}; use 'fa2' or later."
                )
        return reason and f"version {self.name!r}: {reason}"


VERSIONS: dict[str, Version] = {}  # by name, the oldest first
BASELINES: dict[str, Version] = {}  # what autograd differentiates, to hold the versions against


EXPLICIT: dict[str, Version] = {}  # kernels that are reached by their name only


def register(versions: Iterable[Version]) -> None:
    """Make versions known by name: to `attention`, the operators, and all that shows or measures
    them.
    """
    for version in versions:
        (VERSIONS if version.backward else BASELINES)[version.name] = version


def differentiable(name: str) -> Version:
    """The version of that name, which has a backward; KeyError if there is none."""
    return VERSIONS[name] if name in VERSIONS else EXPLICIT[name]


def choose_version(name: str | Version, request: Request) -> Version:
    """The version of that name, or for "auto" the newest that supports the request; ValueError if
    there is none. A version need not be registered.
    """
    if isinstance(name, Version):
        version = name
    elif name == "auto":
        for version in reversed(VERSIONS.values()):
            if version.unsupported(request) is None:
                return version
        version = next(reversed(VERSIONS.values()))
    else:
        version = known_version(name)
    if reason := version.unsupported(request):
        raise ValueError(reason)
    return version


def known_version(name: str) -> Version:
    """The version, or the baseline, of that name.

    Raises:
        ValueError: there is none.
    """
    known = VERSIONS | BASELINES | EXPLICIT
    if isinstance(name, str) and name in known:
        return known[name]
    said = f"version={name!r} is unknown; there are {', '.join(['auto', *known])}."
    if str(name).endswith(".py"):
        said += f" A file is loaded first, by flash_versions.load_version({name!r})."
    raise ValueError(said)


def kernel_limits(request: Request) -> str | None:
    """The limits that all Triton kernels of this package share."""
    q, v = request.q, request.v
    if request.precision is not None:
        return f"precision={request.precision!r} is not possible; it comes with version 'fa3'."
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"q has dtype {q.dtype}; float32, float16 and bfloat16 work."
    if q.shape[3] > WIDEST or v.shape[3] > WIDEST:
        return head_dim_limits(request, WIDEST)
    if request.block_table is not None and request.needs_grad:
        return (
            "block_table is for inference and an input requires grad; call it under "
            "torch.no_grad(), or pass the keys without block_table."
        )
    if reason := devices.limits(q.device):
        return reason
    return wide_limits(request) if q.dtype == torch.float32 and request.needs_grad else None


def wide_limits(request: Request) -> str | None:
    """Why the tiles of a backward in fp32 do not fit into a GPU, as a sentence, or None: the
    smallest ones, of 16 rows, are two of q's and two of v's width.
    """
    q, v = request.q, request.v
    width = padded_head_dim(q.shape[3]) + padded_head_dim(v.shape[3])
    if 2 * 16 * 4 * width < devices[q.device].shared_memory:
        return None
    return (
        f"q has head_dim {q.shape[3]} and v {v.shape[3]} in {q.dtype} and an input requires grad, "
        f"for which the GPU has too little shared memory; 16 bits work, or 256 in one of them."
    )


def invariance_limits(request: Request) -> str | None:
    """What no kernel computes row by row, whatever the neighbours of a row are."""
    given: str | None = None
    if request.dropout_p > 0:
        given, why = f"dropout_p={request.dropout_p}", "its draws count the sequences of the batch"
    elif request.num_splits is not None:
        given, why = f"num_splits={request.num_splits}", "splits have a fixed size in its place"
    elif request.precision is not None and not is_fp8(request.q):
        given, why = f"precision={request.precision!r}", "a scale is that of many rows"
    elif request.precision is not None and Fp8.parse(request.precision).scales == "block":
        given, why = "a scale for each block", "a row's sum counts in the largest of all keys"
    if given is None:
        return None
    return f"{given} is not possible with batch_invariant=True: {why}; leave one of them out."


def fp8_limits(request: Request) -> str | None:
    """The limits of attention in FP8, whatever computes it."""
    precision = f"precision={request.precision!r}"
    for name in INTERVALS:
        if getattr(request, name) is not None:
            return f"{name} is not possible with {precision}; leave one of them out."
    for name in GATHERED:
        if getattr(request, name) is not None and not is_fp8(request.q):
            return (
                f"{name} is not possible with {precision} of 16-bit inputs; give q, k and v in 8 "
                f"bits with their descales, or sequences of one length, or leave precision out."
            )
    if request.gathers_fp8:
        for name, x in (("q", request.q), ("v", request.v)):
            if x.shape[-1] % 16:
                return (
                    f"{name} has head_dim {x.shape[-1]}; packed or paged sequences in 8 bits have "
                    f"multiples of 16."
                )
    if request.dropout_p > 0:
        return f"dropout_p={request.dropout_p} is not possible with {precision}; leave one out."
    if request.num_splits not in (None, 1) and not request.gathers_fp8:
        return f"num_splits={request.num_splits} is not possible with {precision}; leave one out."
    head_dim = request.q.shape[-1]
    if "hadamard" in (request.precision or "") and head_dim not in (16, 32, 64, 128, 256):
        return (
            f"q has head_dim {head_dim}; {precision} rotates powers of two from 16 to 256: leave "
            f"hadamard out."
        )
    if reason := head_dim_limits(request, WIDE):
        return f"{reason[:-1]} with {precision}."
    return None


def head_dim_limits(request: Request, widest: int) -> str | None:
    """Why the head dims of a request are too wide, as a sentence, or None."""
    q_dim, v_dim = request.q.shape[3], request.v.shape[3]
    if q_dim <= widest and v_dim <= widest:
        return None
    name, dim = ("q", q_dim) if q_dim > widest else ("v", v_dim)
    return f"{name} has head_dim {dim}; head dims up to {widest} work."
