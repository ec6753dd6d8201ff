"""`attention`: check the arguments, choose a version, run it."""

import math
from contextlib import nullcontext
from typing import Literal, overload

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
    _check(q, k, v, scale, kv_lengths, num_splits)
    request = Request(
        q,
        k,
        v,
        causal=causal,
        scale=q.shape[-1] ** -0.5 if scale is None else float(scale),
        kv_lengths=kv_lengths,
        num_splits=num_splits,
        return_lse=return_lse,
    )
    chosen = choose_version(version, request)
    if q.numel() == 0:  # no query: nothing to launch
        empty = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        batch, length, heads, _ = q.shape
        no_lse = empty.new_empty((batch, heads, length), dtype=torch.float32)
        return (empty, no_lse) if return_lse else empty
    with torch.cuda.device(q.device) if q.is_cuda else nullcontext():
        o, lse = chosen.forward(
            q,
            k,
            v,
            causal=request.causal,
            scale=request.scale,
            kv_lengths=kv_lengths,
            num_splits=num_splits,
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
    elif name in VERSIONS or name in BASELINES:
        version = {**VERSIONS, **BASELINES}[name]
    else:
        known = ", ".join(["auto", *VERSIONS, *BASELINES])
        raise ValueError(f"version={name!r} is unknown; there are {known}.")
    if reason := version.unsupported(request):
        raise ValueError(reason)
    return version


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None,
    kv_lengths: torch.Tensor | None,
    num_splits: int | None,
) -> None:
    """Refuse what no version can serve, in a sentence that names the tensor, what was given and
    what would work.
    """
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
    if scale is not None and not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale} must be a positive finite number.")
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
    if num_splits is not None and num_splits < 1:
        raise ValueError(f"num_splits={num_splits} must be at least 1, or None.")
