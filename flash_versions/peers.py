"""What the versions are measured against: functions of q, k, v (batch, length, heads, head_dim)
that return o, from torch, from an installed flash-attn-4, and plain PyTorch.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[..., torch.Tensor]

# Score matrices that plain PyTorch holds at once: scores and P; with a gradient dP and dS, too.
MATRICES, MATRICES_WITH_GRADIENT = 3, 5


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        label: what tables and figures call it.
        function: `function(q, k, v, causal=...)` returns o.
        installed: whether it can be called here.
        compiles: whether its first call compiles something that a later process finds on disk.
    """

    label: str
    function: Function
    installed: Callable[[], bool] = lambda: True
    compiles: bool = False


def torch_backend(backend: SDPBackend, q, k, v, causal: bool) -> torch.Tensor:
    """torch's SDPA with one backend only."""
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return o.transpose(1, 2)


def flash_attn_4(q, k, v, causal: bool) -> torch.Tensor:
    """flash-attn-4's CuTe kernels, compiled on the first call; its cache on disk is turned on."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when imported
    from flash_attn.cute import flash_attn_func  # type: ignore[import-not-found,unused-ignore]

    result = flash_attn_func(q, k, v, causal=causal)
    return result[0] if isinstance(result, tuple) else result


def flash_attn_4_installed() -> bool:
    """Whether `flash_attn.cute` is there; it is not imported, which takes seconds."""
    try:
        return find_spec("flash_attn.cute") is not None
    except ImportError:  # of flash_attn, which may be another one's, and broken
        return False


def flash_attn_4_version() -> str:
    """Its version, "unknown" if it was unpacked without its metadata, "not installed"."""
    if not flash_attn_4_installed():
        return "not installed"
    try:
        return version("flash-attn-4")
    except PackageNotFoundError:
        return "unknown"


def plain(q, k, v, causal: bool) -> torch.Tensor:
    """Attention as three lines of PyTorch, in the tensors' dtype, every score in memory.

    Raises:
        MemoryError: the score matrix would not fit.
    """
    (batch, m, heads, head_dim), n = q.shape, k.shape[1]
    matrices = MATRICES_WITH_GRADIENT if q.requires_grad else MATRICES
    needed = matrices * batch * heads * m * n * q.element_size()
    # While a graph is captured: it has been called before, and it fits.
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and needed > (free := free_memory(q.device)):
        raise MemoryError(
            f"{matrices} score matrices take {needed / 2**30:.0f} GiB and {free / 2**30:.0f} GiB "
            "are free; a smaller batch or length works."
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = (q * head_dim**-0.5) @ k.mT
    if causal:
        hidden = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(1 + n - m)
        s.masked_fill_(hidden, -torch.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def free_memory(device: torch.device) -> int:
    """Bytes that a tensor could still take: free on the device, or held by torch and unused."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


PEERS = {
    "torch fa2": Peer("torch FA2", partial(torch_backend, SDPBackend.FLASH_ATTENTION)),
    "cudnn": Peer("cuDNN", partial(torch_backend, SDPBackend.CUDNN_ATTENTION)),
    "flash-attn-4": Peer("flash-attn-4", flash_attn_4, flash_attn_4_installed, compiles=True),
    "plain": Peer("plain PyTorch", plain),
}
