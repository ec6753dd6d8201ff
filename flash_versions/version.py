"""The contract that every version fulfils, what no kernel can do, and the choice of tile sizes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache

import torch

from flash_versions import interpreter

# Shared memory in bytes that a program may use: on an H200; in the interpreter, without limit.
H200_SHARED_MEMORY = 232_448
UNLIMITED = 1 << 40


@dataclass(frozen=True)
class Request:
    """What one call asks for. Tensors are (batch, length, heads, head_dim); see `api.attention`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool = False
    scale: float = 1.0
    kv_lengths: torch.Tensor | None = None
    num_splits: int | None = None
    return_lse: bool = False

    @property
    def needs_grad(self) -> bool:
        """Whether autograd would have to run through this call."""
        tensors = (self.q, self.k, self.v)
        return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


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


@dataclass(frozen=True)
class Version:
    """One step of the progression, or a baseline to hold against it.

    `forward(q, k, v, *, causal, scale, kv_lengths, num_splits)` returns `(o, lse)`: o like q, lse
    fp32 natural log of shape (batch, heads, length), or None from a baseline that cannot give it.
    `limits(request)` returns the sentence that says why this version cannot serve a request, or
    None.
    """

    name: str
    title: str
    wasted: str
    idea: str
    source: str
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    limits: Callable[[Request], str | None]

    def unsupported(self, request: Request) -> str | None:
        """Why this version cannot serve the request, as a sentence, or None: the one source of that
        answer.
        """
        reason = self.limits(request)
        return reason and f"version {self.name!r}: {reason}"


def kernel_limits(request: Request) -> str | None:
    """The limits that all Triton kernels of this package share."""
    q = request.q
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"q has dtype {q.dtype}; float32, float16 and bfloat16 work."
    if q.shape[-1] > 256:
        return f"q has head_dim {q.shape[-1]}; head dims up to 256 work."
    if request.needs_grad:
        return (
            "there is no backward pass yet and an input requires grad; call it under "
            "torch.no_grad(), or train with version='sdpa'."
        )
    if q.device.type == "cpu" and not interpreter.enabled():
        return (
            "CPU tensors need Triton's interpreter, which is off; set TRITON_INTERPRET=1 before "
            "Python starts (or, without a GPU, import flash_versions before triton), or use "
            "version='sdpa'."
        )
    if q.device.type not in ("cpu", "cuda"):
        return f"q is on {q.device}; NVIDIA GPUs and, interpreted, the CPU work."
    if q.device.type == "cuda":
        if interpreter.enabled():
            return None  # the interpreter copies to the host and back: slow, and right
        major, minor = torch.cuda.get_device_capability(q.device)
        if major < 8:
            return f"the GPU has compute capability {major}.{minor}; 8.0 (Ampere) or later works."
    return None


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


def padded_head_dim(head_dim: int) -> int:
    """The tile width for a head dimension: a power of two, and at least the 16 that a tensor core
    multiplies.
    """
    return max(16, 1 << (head_dim - 1).bit_length())


def default_config(
    rows: int, x: torch.Tensor, measured: Mapping[int, LaunchConfig]
) -> LaunchConfig:
    """Tile sizes for `rows` query rows in the dtype, head_dim and device of x.

    Args:
        rows: query rows that one program could work on.
        x: the queries.
        measured: the fastest configuration on an H200 by padded head_dim, for 16-bit types; used
            where a program has as much shared memory as there and no dimension is padding.
            Elsewhere: what spills nothing.
    """
    head_dim = padded_head_dim(x.shape[-1])
    limit = shared_memory_limit(x.device)
    block_q = min(128, max(16, 1 << (rows - 1).bit_length()))
    if x.dtype == torch.float32:  # exact products run on the ordinary FP units and need registers
        config = LaunchConfig(min(block_q, 64 if head_dim <= 64 else 32), 32, 8, 2)
    elif block_q < 64:
        config = LaunchConfig(block_q, 64, num_warps=4, num_stages=3)
    elif H200_SHARED_MEMORY <= limit < UNLIMITED and x.shape[-1] in measured:
        config = measured[x.shape[-1]]
    elif head_dim > 128:
        config = LaunchConfig(64, 64, num_warps=8, num_stages=2)
    else:
        config = LaunchConfig(block_q, 64, num_warps=8 if block_q == 128 else 4, num_stages=2)
    return config.fitted(head_dim, x.element_size(), limit)
