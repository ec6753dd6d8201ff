"""The contract that every version fulfils, what no kernel can do, and the choice of tile sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import torch

from flash_versions.dispatch import interpreter
from flash_versions.dispatch.request import Request
from flash_versions.versions.tiles.rows import padded_head_dim

if TYPE_CHECKING:
    from flash_versions.versions.fp8.quantize import Quantized

# Shared memory in bytes that a program may use: on an H200; in the interpreter, without limit.
H200_SHARED_MEMORY = 232_448
UNLIMITED = 1 << 40


@dataclass(frozen=True)
class LaunchConfig:
    """Tile sizes and compiler options of one kernel launch."""

    block_q: int
    block_kv: int
    num_warps: int
    num_stages: int

    def fitted(self, head_dim: int, itemsize: int, limit: int) -> "LaunchConfig":
        """This configuration, or the next smaller one whose tiles fit `limit` bytes of shared
        memory.
        """
        config = self
        while config.shared_bytes(head_dim, itemsize) > limit:
            if config.num_stages > 2:
                config = replace(config, num_stages=config.num_stages - 1)
            elif config.block_kv > 32:
                config = replace(config, block_kv=config.block_kv // 2)
            elif config.block_q > 16:
                config = replace(config, block_q=config.block_q // 2)
            else:
                config = replace(config, num_stages=1)
                break
        return config

    def shared_bytes(self, head_dim: int, itemsize: int) -> int:
        """Shared memory of a program in bytes: a Q tile, and `num_stages` tiles of K and of V."""
        return (self.block_q + 2 * self.num_stages * self.block_kv) * head_dim * itemsize


Forward = Callable[[Request], tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
ForwardQuantized = Callable[[Request, "Quantized"], tuple[torch.Tensor, torch.Tensor, None]]
Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]]


@dataclass(frozen=True)
class Version:
    """One step of the progression, or a baseline to hold against it.

    Attributes:
        forward: `forward(request)` returns (o, lse, statistics): o (batch, M, heads, head_dim_v),
            lse fp32 natural log (batch, heads, M), statistics fp32 (num_statistics, batch, heads,
            M): what the backward needs beside the LSE, or None. Packed: batch is 1, M the total. A
            baseline may give None for the LSE, too.
        limits: `limits(request)` returns the sentence that says why this version cannot serve a
            request, or None.
        backward: `backward(request, o, lse, statistics, do, dlse)` returns (dq, dk, dv, dsink),
            dsink None without a sink; dlse may be None. None for a baseline, which autograd
            differentiates.
        num_statistics: first dimension of statistics.
        variants: the forward with one thing changed, by name: what the ablation measures.
        backward_variants: the same of the backward.
        forward_quantized: `forward_quantized(request, quantized)`, the forward of FP8 tensors that
            are quantised already, (o, lse, None); of the request's q, k and v only shapes and dtype
            are read. None for a version without FP8.
        fp8_variants: forward_quantized with one thing changed, by name.
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
    backward_variants: Mapping[str, Backward] = field(default_factory=dict)
    forward_quantized: ForwardQuantized | None = None
    fp8_variants: Mapping[str, ForwardQuantized] = field(default_factory=dict)

    def unsupported(self, request: Request) -> str | None:
        """Why this version cannot serve the request, as a sentence, or None: the one source of that
        answer.
        """
        reason = self.limits(request)
        return reason and f"version {self.name!r}: {reason}"


def kernel_limits(request: Request) -> str | None:
    """The limits that all Triton kernels of this package share."""
    q = request.q
    if request.precision is not None:
        return f"precision={request.precision!r} is not possible; it comes with version 'fa3'."
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"q has dtype {q.dtype}; float32, float16 and bfloat16 work."
    if reason := head_dim_limits(request):
        return reason
    for name in ("kv_starts", "block_table"):
        if getattr(request, name) is not None and request.needs_grad:
            return (
                f"{name} is for inference and an input requires grad; call it under "
                f"torch.no_grad(), or pass the keys without {name}."
            )
    return device_limits(q.device)


def fp8_limits(request: Request) -> str | None:
    """The limits of attention in FP8, whatever computes it."""
    precision = f"precision={request.precision!r}"
    if request.needs_grad:
        return (
            f"{precision} is forward only and an input requires grad; call it under "
            f"torch.no_grad(), or leave precision out."
        )
    for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_starts", "block_table"):
        if getattr(request, name) is not None:
            return (
                f"{name} is not possible with {precision}; give sequences of one length, or "
                f"kv_lengths, or leave precision out."
            )
    if request.dropout_p > 0:
        return f"dropout_p={request.dropout_p} is not possible with {precision}; leave one out."
    if request.num_splits not in (None, 1):
        return f"num_splits={request.num_splits} is not possible with {precision}; leave one out."
    head_dim = request.q.shape[-1]
    if "hadamard" in (request.precision or "") and head_dim not in (16, 32, 64, 128, 256):
        return (
            f"q has head_dim {head_dim}; {precision} rotates powers of two from 16 to 256: leave "
            f"hadamard out."
        )
    return head_dim_limits(request)


def head_dim_limits(request: Request) -> str | None:
    """Why the head dims of a request are too wide, as a sentence, or None."""
    for name, x in (("q", request.q), ("v", request.v)):
        if x.shape[-1] > 256:
            return f"{name} has head_dim {x.shape[-1]}; head dims up to 256 work."
    return None


@torch.compiler.assume_constant_result
def device_limits(device: torch.device) -> str | None:
    """Why the kernels cannot run on a device, as a sentence, or None."""
    if device.type not in ("cpu", "cuda"):
        return f"q is on {device}; NVIDIA GPUs and, interpreted, the CPU work."
    if interpreter.enabled():
        return None  # on a GPU the interpreter copies to the host and back: slow, and right
    if device.type == "cpu":
        return (
            "CPU tensors need Triton's interpreter, which is off; set TRITON_INTERPRET=1 before "
            "Python starts (or, without a GPU, import flash_versions before triton), or use "
            "version='sdpa'."
        )
    if (capability := compute_capability(device)) < (8, 0):
        major, minor = capability
        return f"the GPU has compute capability {major}.{minor}; 8.0 (Ampere) or later works."
    return None


@cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """A GPU's compute capability, (9, 0) for Hopper; (0, 0) of another device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def launches_overlap(device: torch.device) -> bool:
    """Whether a kernel may be launched while the one before it runs, and wait for it there."""
    return compute_capability(device) >= (9, 0) and not interpreter.enabled()


@cache
def shared_memory_limit(device: torch.device) -> int:
    """Bytes of shared memory that one program may use on the device."""
    if device.type != "cuda":
        return UNLIMITED
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


@cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 on the CPU, where the interpreter runs program after program."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def default_config(
    rows: int, request: Request, measured: Mapping[int, LaunchConfig]
) -> LaunchConfig:
    """Tile sizes for `rows` query rows in the dtype, head dims and device of a request.

    Args:
        rows: query rows that one program could work on.
        request: what is to be computed.
        measured: the fastest configuration on an H200 by head_dim, for 16-bit types; used where a
            program has as much shared memory as there and no dimension is padding. Elsewhere: what
            spills nothing.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    limit = shared_memory_limit(q.device)
    block_q = min(128, max(16, 1 << (rows - 1).bit_length()))
    if q.dtype == torch.float32:  # exact products run on the ordinary FP units and need registers
        config = LaunchConfig(min(block_q, 64 if head_dim <= 64 else 32), 32, 8, 2)
    elif block_q < 64:
        config = LaunchConfig(block_q, 64, num_warps=4, num_stages=3)
    elif H200_SHARED_MEMORY <= limit < UNLIMITED and q.shape[3] == v.shape[3] in measured:
        config = measured[head_dim]
    elif head_dim > 128:
        config = LaunchConfig(64, 64, num_warps=8, num_stages=2)
    else:
        config = LaunchConfig(block_q, 64, num_warps=8 if block_q == 128 else 4, num_stages=2)
    return config.fitted(head_dim, q.element_size(), limit)


def backward_config(request: Request, measured: Mapping[int, LaunchConfig]) -> LaunchConfig:
    """Tile sizes of the portable backward kernels; arguments as in `default_config`.

    Elsewhere than on an H200: two tiles stay and two stream past, `num_stages` deep, in the shared
    memory that there is.
    """
    q, v = request.q, request.v
    head_dim = padded_head_dim(max(q.shape[3], v.shape[3]))
    limit = shared_memory_limit(q.device)
    if limit == UNLIMITED:
        return LaunchConfig(64, 64, num_warps=4, num_stages=1)
    if q.dtype == torch.float32:
        block = 32 if head_dim <= 128 else 16
        return LaunchConfig(block, block, num_warps=8, num_stages=1)
    # What happens to the scores takes registers, too.
    plain = request.softcap is None and request.alibi_slopes is None and request.dropout_p == 0
    hopper = compute_capability(q.device) == (9, 0)
    if plain and hopper and q.shape[3] == v.shape[3] in measured:
        return measured[head_dim]
    block = 64 if head_dim <= 128 else 32
    return LaunchConfig(block, block, 8, num_stages=2 if limit > 150_000 else 1)
