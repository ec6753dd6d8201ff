"""What one call asks for: `Request`, and `Options`, the arguments from which it is made."""

from typing import Any, NamedTuple, Self, TypedDict

import torch

from flash_versions.dispatch.precision import GATHERED, Fp8, is_fp8

Sides = tuple[int | None, int | None]  # of a window: how far a query sees to its left and right


class Fields(NamedTuple):
    """The fields of a `Request`: `api.attention`'s arguments in one form.

    q, k and v are always 4-D. Packed sequences are (1, total, heads, head_dim) with cu_seqlens_q
    (queries) and cu_seqlens_k (keys); with a block_table, k and v are (pages, page_size, kv_heads,
    head_dim) and cu_seqlens_k only gives lengths. query_starts and query_ends are (batch, kv_heads,
    N), expanded where the caller gave one for all. Causal is window_right = 0; None is no bound.
    precision is the text of an `Fp8`, or None: as the dtype says. 8-bit tensors always have one;
    times their descales they are what they stand for. deterministic may be None, torch's own
    setting: ask `is_deterministic`.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float = 1.0
    window_left: int | None = None
    window_right: int | None = None
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    sink: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    kv_lengths: torch.Tensor | None = None
    kv_starts: torch.Tensor | None = None
    block_table: torch.Tensor | None = None
    query_starts: torch.Tensor | None = None
    query_ends: torch.Tensor | None = None
    num_splits: int | None = None
    return_lse: bool = False
    precision: str | None = None
    q_descale: torch.Tensor | None = None
    k_descale: torch.Tensor | None = None
    v_descale: torch.Tensor | None = None
    deterministic: bool | None = None
    batch_invariant: bool = False


class Request(Fields):
    """What one call asks for: its fields, and what follows from them."""

    __slots__ = ()

    # To torch.compile of torch 2.10, a class with a __new__ of its own is no named tuple, whose
    # properties it could not trace.
    if torch.__version__ < "2.11":

        def __new__(cls, *arguments: Any, **named: Any) -> Self:
            """A request with these fields."""
            return super().__new__(cls, *arguments, **named)

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return self.q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    @property
    def is_ragged(self) -> bool:
        """Whether sequences have lengths of their own, which only the GPU knows."""
        packed = self.cu_seqlens_q is not None
        return packed or self.kv_lengths is not None or self.kv_starts is not None

    @property
    def has_intervals(self) -> bool:
        """Whether keys say which queries see them."""
        return self.query_starts is not None or self.query_ends is not None

    @property
    def gathers_fp8(self) -> bool:
        """Whether this is attention to 8-bit tensors whose rows have to be gathered, or are always
        gathered, so that all layouts have one kernel.
        """
        gathered = any(getattr(self, name) is not None for name in GATHERED)
        return is_fp8(self.q) and (gathered or self.batch_invariant)

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.q.shape[2] // self.k.shape[2]

    @property
    def max_kv_length(self) -> int:
        """No sequence has more keys than this; known without a look at device memory."""
        if self.block_table is not None:
            return self.block_table.shape[1] * self.k.shape[1]
        return self.k.shape[1]

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of o: that of q, bf16 for 8-bit inputs."""
        return torch.bfloat16 if is_fp8(self.q) else self.q.dtype

    @property
    def is_deterministic(self) -> bool:
        """Whether the same inputs must give the same gradients to the bit. Asked when they are
        computed, as torch's own kernels ask torch.use_deterministic_algorithms.
        """
        if self.deterministic is None:
            return torch.are_deterministic_algorithms_enabled()
        return self.deterministic

    @property
    def needs_grad(self) -> bool:
        """Whether autograd would have to run through this call."""
        wanted = self.q.requires_grad or self.k.requires_grad or self.v.requires_grad
        wanted = wanted or (self.sink is not None and self.sink.requires_grad)
        return wanted and torch.is_grad_enabled()


KINDS = Fields.__annotations__
TENSORS = tuple(x for x in KINDS if KINDS[x] in (torch.Tensor, torch.Tensor | None))
PLACES = tuple(map(Request._fields.index, TENSORS))


class Options(TypedDict, total=False):
    """The keyword arguments of `attention`, for type checkers."""

    causal: bool
    scale: float | None
    window: Sides | None
    softcap: float | None
    alibi_slopes: torch.Tensor | None
    sink: torch.Tensor | None
    dropout_p: float
    cu_seqlens_q: torch.Tensor | None
    cu_seqlens_k: torch.Tensor | None
    kv_lengths: torch.Tensor | None
    kv_starts: torch.Tensor | None
    block_table: torch.Tensor | None
    query_starts: torch.Tensor | None
    query_ends: torch.Tensor | None
    num_splits: int | None
    precision: str | Fp8 | None
    q_descale: torch.Tensor | None
    k_descale: torch.Tensor | None
    v_descale: torch.Tensor | None
    deterministic: bool | None
    batch_invariant: bool
    check: bool


INTERVALS = ("query_starts", "query_ends")
PLANS = "flash_versions_plans"  # an attribute of tensors, see `masks.plan_mask`
