"""The host's side of FA4's kernel for Blackwell: its switches, which calls it serves, and the
arguments of a launch. None of the switches was measured: the kernel never ran on a GPU.
"""

from dataclasses import dataclass
from typing import Any

import torch

from flash_versions.dispatch.request import Request
from flash_versions.dispatch.sizes import box_width
from flash_versions.versions.fa3.hopper.host import SIXTEEN_BITS, counters, window_constants
from flash_versions.versions.fa4.blackwell import tensor_memory
from flash_versions.versions.fa4.blackwell.tensor_memory import ROWS
from flash_versions.versions.fa4.exp2 import DEGREES
from flash_versions.versions.tiles.tma import describe_swizzled

MAX_THRESHOLD = 8.0
SCHEDULERS = ("static", "dynamic")
PORTABLE_ONLY = (
    "alibi_slopes", "sink", "cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_starts",
    "block_table", "query_starts", "query_ends",
)  # fmt: skip


@dataclass(frozen=True)
class BlackwellConfig:
    """The switches of the kernel; each is a constant at one place in it.

    Attributes:
        stages: slots of the pipeline that K and V share.
        threshold: a row is rescaled when its maximum has grown by more, in log2 units; 0 rescales
            whenever it has grown.
        eighths: eighths of the exponentials that a polynomial computes.
        degree: degree of this polynomial; None takes the smallest that rounding P hides.
        scheduler: "static" or "dynamic", see `tile_scheduler.Scheduler`.
    """

    stages: int = 4
    threshold: float = MAX_THRESHOLD
    eighths: int = 2
    degree: int | None = None
    scheduler: str = "static"

    queries = 256  # of a program's tile: two tiles of tensor memory
    heads = 1  # of a tile
    block_kv = 128

    def __post_init__(self) -> None:
        if self.stages < 3:
            raise ValueError(
                f"stages={self.stages} is not possible; 3 or more hold V of a block while the next "
                f"K and V are loaded."
            )
        if not 0 <= self.threshold <= MAX_THRESHOLD:
            raise ValueError(f"threshold={self.threshold} is not possible; 0 to 8 are.")
        if self.eighths not in range(9):
            raise ValueError(f"eighths={self.eighths} is not possible; 0 to 8 are.")
        if self.degree not in (None, 2, 3, 4, 5):
            raise ValueError(f"degree={self.degree} is not possible; 2 to 5 are.")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(
                f"scheduler={self.scheduler!r} is unknown; there are {', '.join(SCHEDULERS)}."
            )


def default_config(request: Request) -> BlackwellConfig:
    """As many slots as shared memory has room for, and both ideas on, as in the paper."""
    return BlackwellConfig(stages=4 if max(request.q.shape[3], request.v.shape[3]) > 64 else 9)


def left_to_portable(request: Request) -> str | None:
    """Why a request that is not left to FA2 (`fa3.forward.left_to_gathering`) is left to the
    portable kernel, as a sentence, or None.
    """
    q, v = request.q, request.v
    if not tensor_memory.available(q.device):
        return f"{q.device} is no sm_100 GPU (compute capability 10.0)."
    if q.dtype not in SIXTEEN_BITS:
        return f"q has dtype {q.dtype}; float16 and bfloat16 are what this kernel multiplies."
    if (head_dim := max(q.shape[3], v.shape[3])) > 128:
        return f"head_dim {head_dim} is left to the portable kernel; tensor memory holds up to 128."
    for name in PORTABLE_ONLY:
        if getattr(request, name) is not None:
            return f"{name} is left to the portable kernel."
    if request.dropout_p > 0:
        return "dropout_p is left to the portable kernel."
    return None


def tensors(request: Request, config: BlackwellConfig, o: torch.Tensor, lse: torch.Tensor) -> tuple:
    """The arguments of the kernel that are tensors. All tiles have the same columns, as K and V go
    through one pipeline: at least 64, as narrower ones are known from Hopper only.
    """
    width = max(64, box_width(max(request.q.shape[3], request.v.shape[3])))
    q_box, o_box = (describe_swizzled(x, ROWS.value, width) for x in (request.q, o))
    of_keys = (describe_swizzled(x, config.block_kv, width) for x in (request.k, request.v))
    claims = counters.take(o.device) if config.scheduler == "dynamic" else lse
    return q_box, *of_keys, o_box, lse, claims


def constants(request: Request, config: BlackwellConfig) -> dict[str, Any]:
    """The kernel's constants."""
    window = window_constants(request, config.block_kv)
    return {
        **window,
        "CUT": window["LEFT"] or window["RIGHT"] or window["EDGE"],
        "STAGES": config.stages,
        "SCHEDULER": config.scheduler,
        "THRESHOLD": config.threshold,
        "EIGHTHS": config.eighths,
        "DEGREE": config.degree or DEGREES[request.q.dtype],
    }
