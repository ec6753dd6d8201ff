"""What a call may ask for in FP8: how to quantise, or the scales of what is quantised already."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

BLOCK_ROWS = 64  # queries that share a scale
BLOCK_KEYS = 128  # keys that share a scale
SCALES = ("tensor", "head", "block")
DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Fp8:
    """How precision="fp8" quantises.

    Attributes:
        scales: which values share one: those of a "tensor", of a "head" (of a key head, queries of
            its group of heads together) or of a "block" of BLOCK_ROWS queries or BLOCK_KEYS keys.
        hadamard: rotate q and k, which spreads outliers; head_dim a power of two, 16 to 256.
        dtype: torch.float8_e4m3fn, or torch.float8_e5m2 with less precision and a wider range.
    """

    scales: str = "block"
    hadamard: bool = False
    dtype: torch.dtype = torch.float8_e4m3fn

    def __post_init__(self) -> None:
        if self.scales not in SCALES:
            raise ValueError(f"scales={self.scales!r} is unknown; there are {', '.join(SCALES)}.")
        if not isinstance(self.hadamard, bool):
            raise ValueError(f"hadamard={self.hadamard!r} must be True or False.")
        if self.dtype not in NAMES:
            raise ValueError(
                f"dtype={self.dtype} has no kernel; there are {', '.join(map(str, NAMES))}."
            )

    def __str__(self) -> str:
        text = f"fp8:{self.scales}:{NAMES[self.dtype]}"
        return f"{text}:hadamard" if self.hadamard else text

    @classmethod
    def parse(cls, text: str) -> "Fp8":
        """The inverse of str; what is left out has its default: "fp8", "fp8:head".

        Raises:
            ValueError: the text is no such name.
        """
        first, *parts = text.split(":") if isinstance(text, str) else [""]
        options: dict[str, Any] = {}
        for part in parts:
            if part in SCALES:
                option: dict[str, Any] = {"scales": part}
            elif part in DTYPES:
                option = {"dtype": DTYPES[part]}
            else:
                option = {"hadamard": True} if part == "hadamard" else {}
            if not option or option.keys() & options.keys():
                first = ""
            options |= option
        if first != "fp8":
            raise ValueError(
                f"precision={text!r} is unknown; write 'fp8', or more of "
                f"'fp8:{'|'.join(SCALES)}:{'|'.join(DTYPES)}:hadamard'."
            )
        return cls(**options)


class Quantized(NamedTuple):
    """What an FP8 kernel works on: value = fp8 * scale.

    D16 is head_dim and N16 the number of keys N, rounded up to multiples of 16 by zeros. blocks are
    ceil(M / BLOCK_ROWS) or ceil(N / BLOCK_KEYS).

    Attributes:
        q: (batch, M, heads, D16), the last dimension contiguous. If `quantize` made it, no sum of
            its products with k exceeds half of fp16's largest number.
        k: (batch, N, kv_heads, D16), the last dimension contiguous.
        v: (batch, kv_heads, head_dim_v, N16), contiguous, keys in the order of `key_order`.
        q_scale: fp32 (batch, kv_heads, 1), shared by a group of heads, or (batch, heads, blocks);
            like all scales positive, and of any strides.
        k_scale: fp32 (batch, kv_heads, 1 or blocks).
        v_scale: fp32 (batch, kv_heads, 1 or blocks).
        v_reference: fp32 (batch, kv_heads), the largest v_scale of a head, in whose units
            accumulators are kept. Of blocks: of those that hold anything but zeros, 0 if none does.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    q_scale: torch.Tensor
    k_scale: torch.Tensor
    v_scale: torch.Tensor
    v_reference: torch.Tensor


# With any of these, 8-bit rows are gathered one by one.
GATHERED = ("cu_seqlens_q", "cu_seqlens_k", "kv_starts", "block_table")
# With any of these, 8-bit tensors are left to the portable kernel.
PORTABLE = ("alibi_slopes", "sink", "softcap", "kv_lengths")
DESCALES = ("q_descale", "k_descale", "v_descale")


def is_fp8(x: torch.Tensor) -> bool:
    """Whether a tensor holds 8-bit floats."""
    return x.dtype in NAMES


def checked_precision(
    precision: object, q: torch.Tensor, k: torch.Tensor, asked: Mapping[str, Any]
) -> str | None:
    """The canonical text of the precision of a call, None if it is that of 16- or 32-bit inputs.

    Args:
        precision: what the caller gave: None, a text or an `Fp8`.
        q: (batch, M, heads, head_dim), 8-bit if it is quantised already; so k.
        k: (batch, N, kv_heads, head_dim).
        asked: the options of the call, as the caller gave them.

    Raises:
        ValueError: the precision is unknown, or does not go with the dtype; a scale is malformed.
    """
    descales = {name: asked[name] for name in DESCALES if asked[name] is not None}
    if precision is None and not descales and not is_fp8(q):
        return None
    if precision is not None and not isinstance(precision, str | Fp8):
        raise ValueError(
            f"precision={precision!r} must be 'fp8', an Fp8, or None: as the dtype says."
        )
    if not is_fp8(q):
        for name in descales:
            raise ValueError(
                f"{name} was given and q has dtype {q.dtype}; it is the scale of tensors that "
                f"are quantised to 8 bits."
            )
        how = Fp8.parse(precision) if isinstance(precision, str) else precision
        if q.dtype not in (torch.float16, torch.bfloat16):
            raise ValueError(
                f"precision={precision!r} was given for a q of dtype {q.dtype}; float16 and "
                f"bfloat16 are quantised, or leave precision out."
            )
        return str(how)
    if isinstance(precision, str):
        Fp8.parse(precision)  # or it is unknown
    implied = str(Fp8(_checked_descales(q, k, descales, asked), dtype=q.dtype))
    if precision not in (None, "fp8", implied) and str(precision) != implied:
        raise ValueError(
            f"precision={str(precision)!r} says how to quantise, and q has dtype {q.dtype}, so it "
            f"is quantised; leave precision out and give q_descale, k_descale and v_descale."
        )
    return implied


def _checked_descales(
    q: torch.Tensor, k: torch.Tensor, descales: Mapping[str, Any], asked: Mapping[str, Any]
) -> str:
    """What shares a scale, the finest of the three: "tensor", "head" or "block". Blocks are those
    of tensors whose rows are sequences of one length.
    """
    in_rows = all(asked[name] is None for name in GATHERED)
    cu_seqlens_q, kv_heads = asked["cu_seqlens_q"], k.shape[2]
    batch = q.shape[0]
    if isinstance(cu_seqlens_q, torch.Tensor) and cu_seqlens_q.dim() == 1:
        batch = cu_seqlens_q.shape[0] - 1
    of_keys = (batch, kv_heads, -(-k.shape[1] // BLOCK_KEYS))
    of_queries = (batch, q.shape[2], -(-q.shape[1] // BLOCK_ROWS))
    finest = 0
    for name, x in descales.items():
        blocks = of_queries if name == "q_descale" else of_keys
        fits = tuple(x.shape) in ((), (1,), (batch, kv_heads)) or (in_rows and x.shape == blocks)
        if x.dtype != torch.float32 or not fits:
            of_blocks = f" or {blocks} for blocks" if in_rows else ""
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; it must be float32 of "
                f"shape (1,), {(batch, kv_heads)} for the key heads{of_blocks}."
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and has no gradient; call .detach() on it.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device.")
        finest = max(finest, min(x.dim(), 3) - 1)
    return SCALES[finest]
