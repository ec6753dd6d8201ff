"""`attention`: check the arguments, choose a version, run it."""

from contextlib import nullcontext
from numbers import Integral, Real
from typing import Literal, overload

import numpy as np
import torch

from flash_versions import fa1, fa2
from flash_versions.reference import REFERENCE, SDPA
from flash_versions.version import Request, Version

VERSIONS: dict[str, Version] = {module.VERSION.name: module.VERSION for module in (fa1, fa2)}
BASELINES: dict[str, Version] = {version.name: version for version in (REFERENCE, SDPA)}


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    version: str = ...,
    num_splits: int | None = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    version: str = ...,
    num_splits: int | None = ...,
    return_lse: Literal[True],
) -> tuple[torch.Tensor, torch.Tensor]: ...


@overload
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = ...,
    scale: float | None = ...,
    kv_lengths: torch.Tensor | None = ...,
    version: str = ...,
    num_splits: int | None = ...,
    return_lse: bool = ...,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    kv_lengths: torch.Tensor | None = None,
    version: str = "auto",
    num_splits: int | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention; `reference.attention_reference` is the specification.

    Args:
        q: (batch, M, heads, head_dim), float32, float16 or bfloat16. Any strides, but the last
            dimension's must be 1.
        k: (batch, N, kv_heads, head_dim). heads is a multiple of kv_heads: query heads h*g ..
            h*g+g-1 use key head h.
        v: like k.
        causal: query i sees keys j <= i + N - M: the last query sees the last key (bottom-right
            aligned).
        scale: positive factor on the scores; None means head_dim ** -0.5.
        kv_lengths: (batch,) int32 or int64 on q's device: row b sees only its first kv_lengths[b]
            keys, and causal aligns to kv_lengths[b] in the place of N. Values are not read on the
            host: they are clamped to 0 .. N.
        version: a name in VERSIONS or BASELINES, or "auto": the newest version that takes these
            inputs.
        num_splits: FA2's split-KV: ranges into which the keys are split; None lets the version
            choose.
        return_lse: also return the log-sum-exp of the scaled scores.

    Returns:
        o: (batch, M, heads, head_dim) in q's dtype; 0 for a query that sees no key. With
        return_lse, (o, lse): lse is fp32, natural log, (batch, heads, M); -inf for a query that
        sees no key.

    Raises:
        ValueError: an argument is malformed, or the version does not support what was asked for.
    """
    _check_tensors(q, k, v, kv_lengths)
    request = Request(
        q.resolve_neg(),
        k.resolve_neg(),
        v.resolve_neg(),
        causal=_checked_flag("causal", causal),
        scale=q.shape[-1] ** -0.5 if scale is None else _checked_scale(scale),
        kv_lengths=None if kv_lengths is None else kv_lengths.contiguous(),
        num_splits=None if num_splits is None else _checked_count("num_splits", num_splits),
        return_lse=_checked_flag("return_lse", return_lse),
    )
    chosen = choose_version(version, request)
    if q.numel() == 0 and chosen.name in VERSIONS:  # no query: nothing to launch
        batch, length, heads, _ = q.shape
        no_lse = q.new_empty((batch, heads, length), dtype=torch.float32)
        return (q.new_empty(q.shape), no_lse) if return_lse else q.new_empty(q.shape)
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        o, lse = chosen.forward(
            request.q,
            request.k,
            request.v,
            causal=request.causal,
            scale=request.scale,
            kv_lengths=request.kv_lengths,
            num_splits=request.num_splits,
        )
    if not return_lse:
        return o
    assert lse is not None
    return o, lse


def choose_version(name: str, request: Request) -> Version:
    """The version of that name, or for "auto" the newest that supports the request; ValueError if
    there is none.
    """
    if name == "auto":
        for version in reversed(VERSIONS.values()):
            if version.unsupported(request) is None:
                return version
        version = next(reversed(VERSIONS.values()))
    elif isinstance(name, str) and (name in VERSIONS or name in BASELINES):
        version = {**VERSIONS, **BASELINES}[name]
    else:
        known = ", ".join(["auto", *VERSIONS, *BASELINES])
        raise ValueError(f"version={name!r} is unknown; there are {known}.")
    if reason := version.unsupported(request):
        raise ValueError(reason)
    return version


def _checked_flag(name: str, value: object) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be True or False.")
    return bool(value)


def _checked_scale(value: object) -> float:
    # The kernels compute in fp32: what is 0 or infinite there is refused here.
    if not isinstance(value, Real) or not 2.0**-100 <= float(value) <= 2.0**100:
        raise ValueError(f"scale={value!r} must be a positive finite number, 2^-100 to 2^100.")
    return float(value)


def _checked_count(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1, or None.")
    return int(value)


def _check_tensors(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    kv_lengths: torch.Tensor | None,
) -> None:
    """Refuse what no version can serve, in a sentence that names the tensor, what was given and
    what would work.
    """
    for name, x in (("q", q), ("k", k), ("v", v), ("kv_lengths", kv_lengths)):
        if not isinstance(x, torch.Tensor) and not (name == "kv_lengths" and x is None):
            raise ValueError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor.")
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}; it must be (batch, length, heads, head_dim)."
            )
        if not x.is_floating_point() or x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype}, q has {q.dtype}; use one float dtype.")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device}, q is on {q.device}; use one device.")
        if x.shape[3] > 1 and x.stride(3) != 1:
            raise ValueError(
                f"{name} has stride {x.stride(3)} in its last dimension, which must be contiguous "
                f"(stride 1); call {name}.contiguous()."
            )
    batch, _, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    if k.shape != v.shape:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they must be the same."
        )
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, k {tuple(k.shape)}; batch and head_dim must be equal."
        )
    if head_dim == 0 or heads == 0:
        raise ValueError(f"q has shape {tuple(q.shape)}; heads and head_dim must be at least 1.")
    if kv_heads == 0 or heads % kv_heads != 0:
        raise ValueError(f"q has {heads} heads, which must be a multiple of k's {kv_heads}.")
    if kv_lengths is not None:
        if kv_lengths.shape != (batch,) or kv_lengths.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"kv_lengths has shape {tuple(kv_lengths.shape)} and dtype {kv_lengths.dtype}; it "
                f"must be int32 or int64 of shape ({batch},), one length per batch row."
            )
        if kv_lengths.device != q.device:
            raise ValueError(
                f"kv_lengths is on {kv_lengths.device}, q is on {q.device}; use one device."
            )
