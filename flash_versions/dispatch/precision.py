"""What a call may ask for in FP8: how to quantise, or the scales of what is quantised."""

from collections.abc import Mapping

import torch

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def is_fp8(x: torch.Tensor) -> bool:
    """Whether a tensor holds 8-bit floats."""
    return x.dtype in FP8_DTYPES


def checked_precision(
    precision: object,
    q: torch.Tensor,
    k: torch.Tensor,
    descales: Mapping[str, torch.Tensor | None],
) -> str | None:
    """The canonical text of the precision of a call, None if it is that of 16- or 32-bit inputs.

    Args:
        precision: what the caller gave: None, a text or an `Fp8`.
        q: (batch, M, heads, head_dim), 8-bit if it is quantised already; so k.
        k: (batch, N, kv_heads, head_dim).
        descales: "q_descale", "k_descale" and "v_descale", as the caller gave them.

    Raises:
        ValueError: the precision is unknown, or does not go with the dtype; a scale is malformed.
    """
    if precision is None and not is_fp8(q) and all(x is None for x in descales.values()):
        return None
    from flash_versions.versions.fp8.quantize import (
        Fp8,  # which imports the requests that this is a part of
    )

    if precision is not None and not isinstance(precision, str | Fp8):
        raise ValueError(
            f"precision={precision!r} must be 'fp8', an Fp8, or None: as the dtype says."
        )
    if not is_fp8(q):
        for name, x in descales.items():
            if x is not None:
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
    implied = str(Fp8(_checked_descales(q, k, descales), dtype=q.dtype))
    if precision not in (None, "fp8", implied) and str(precision) != implied:
        raise ValueError(
            f"precision={str(precision)!r} says how to quantise, and q has dtype {q.dtype}, so it "
            f"is quantised; leave precision out and give q_descale, k_descale and v_descale."
        )
    return implied


def _checked_descales(
    q: torch.Tensor, k: torch.Tensor, descales: Mapping[str, torch.Tensor | None]
) -> str:
    """What shares a scale, the finest of the three: "tensor", "head" or "block"."""
    from flash_versions.versions.fp8.quantize import BLOCK_KEYS, BLOCK_ROWS

    batch, kv_heads = k.shape[0], k.shape[2]
    of_keys = (batch, kv_heads, -(-k.shape[1] // BLOCK_KEYS))
    of_queries = (batch, q.shape[2], -(-q.shape[1] // BLOCK_ROWS))
    finest = 0
    for name, x in descales.items():
        if x is None:
            continue
        if not isinstance(x, torch.Tensor):
            raise ValueError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor.")
        blocks = of_queries if name == "q_descale" else of_keys
        if x.dtype != torch.float32 or tuple(x.shape) not in ((), (1,), (batch, kv_heads), blocks):
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; it must be float32 of "
                f"shape (1,), {(batch, kv_heads)} for the key heads or {blocks} for blocks."
            )
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} requires grad, and has no gradient; call .detach() on it.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device.")
        finest = max(finest, x.dim() - 1)
    return ("tensor", "head", "block")[finest]
