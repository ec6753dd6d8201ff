"""The request for a call, checked by what is known without reading device memory."""

from numbers import Integral, Real
from typing import Any

import numpy as np
import torch

from flash_versions.dispatch.precision import Fp8, checked_precision
from flash_versions.dispatch.request.request import PLANS, Request, Sides
from flash_versions.dispatch.request.values import check_values

INTEGERS = (torch.int32, torch.int64)


def make_request(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Sides | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    kv_lengths: torch.Tensor | None = None,
    kv_starts: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    query_starts: torch.Tensor | None = None,
    query_ends: torch.Tensor | None = None,
    num_splits: int | None = None,
    return_lse: bool = False,
    precision: str | Fp8 | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    deterministic: bool | None = None,
    batch_invariant: bool = False,
    check: bool = False,
) -> Request:
    """The request for a call of `attention`, whose docstring explains the options.

    Raises:
        ValueError: an argument is malformed; the sentence names it, what was given and what would
            work.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checked_tensor(name, x)
    if cu_seqlens_k is None and block_table is None and k.dim() == 3:
        cu_seqlens_k = cu_seqlens_q
    q, k, v = in_autocast_dtype(q, k, v)
    packed = cu_seqlens_k is not None and block_table is None
    q = _four_dims("q", q, cu_seqlens_q is not None)
    k, v = _four_dims("k", k, packed), _four_dims("v", v, packed)
    q, k, v = q.resolve_neg(), k.resolve_neg(), v.resolve_neg()
    check_qkv(q, k, v)
    # What is a default needs no check.
    left = right = None
    if window is not None:
        left, right = _checked_window("window", window)
    if causal is True or (causal is not False and _checked_flag("causal", causal)):
        right = 0 if right is None else min(right, 0)
    scale = q.shape[3] ** -0.5 if scale is None else _checked_positive("scale", scale)
    if softcap is not None:
        softcap = _checked_positive("softcap", softcap)
        if not 2.0**-100 <= scale / softcap <= 2.0**100:
            raise ValueError(f"scale={scale!r} and softcap={softcap!r} are too far apart for fp32.")
    seed = None
    if type(dropout_p) is not float or dropout_p != 0.0:
        dropout_p = _checked_probability("dropout_p", dropout_p)
        if dropout_p:  # from torch's generator, left on the device: no synchronisation
            seed = torch.randint(2**62, (1,), dtype=torch.int64, device=q.device)
    if num_splits is not None:
        num_splits = _checked_count("num_splits", num_splits)
    if return_lse is not False:
        return_lse = _checked_flag("return_lse", return_lse)
    if deterministic is not None:
        deterministic = _checked_flag("deterministic", deterministic, "True, False or None")
    if batch_invariant is not False:
        batch_invariant = _checked_flag("batch_invariant", batch_invariant)
    if query_starts is not None or query_ends is not None:
        others = {
            "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "kv_lengths": kv_lengths,
            "kv_starts": kv_starts, "block_table": block_table,
        }  # fmt: skip
        query_starts = of_each_key("query_starts", query_starts, others, k)
        query_ends = of_each_key("query_ends", query_ends, others, k)
    if (
        precision is not None
        or q.element_size() == 1
        or not (q_descale is k_descale is v_descale is None)
    ):
        descales = {"q_descale": q_descale, "k_descale": k_descale, "v_descale": v_descale}
        for name, descale in descales.items():
            if descale is not None:
                checked_tensor(name, descale)
        about = {"kv_starts": kv_starts, "cu_seqlens_q": cu_seqlens_q, **descales}
        about |= {"cu_seqlens_k": cu_seqlens_k, "block_table": block_table}
        precision = checked_precision(precision, q, k, about)
    alibi_slopes, sink, cuts, kv_lengths, kv_starts, block_table = map(
        _contiguous, (alibi_slopes, sink, cu_seqlens_q, kv_lengths, kv_starts, block_table)
    )
    cuts_k = cuts if cu_seqlens_k is cu_seqlens_q else _contiguous(cu_seqlens_k)
    request = Request(
        q, k, v, scale, left, right, softcap, alibi_slopes, sink, dropout_p, seed, cuts, cuts_k,
        kv_lengths, kv_starts, block_table, query_starts, query_ends, num_splits, return_lse,
        precision, q_descale, k_descale, v_descale, deterministic, batch_invariant
    )  # fmt: skip
    check_together(request)
    if check is not False and _checked_flag("check", check):
        check_values(request)
    return request


def check_together(request: Request) -> None:
    """Refuse what says where sequences lie, or changes scores, if it does not fit q and k."""
    _check_lengths(request)
    _check_score_tensors(request)


def in_autocast_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Under torch.autocast, the tensors in its dtype, as torch's own attention does; else as they
    are. float64 stays.
    """
    kind = tensors[0].device.type
    if kind not in ("cpu", "cuda") or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    castable = (torch.float32, torch.float16, torch.bfloat16)
    return tuple(x.to(dtype) if x.dtype in castable else x for x in tensors)


def _contiguous(x: Any) -> Any:
    # What is no dense tensor is refused below, by name.
    dense = isinstance(x, torch.Tensor) and x.layout == torch.strided and not x.is_nested
    return x.resolve_neg().contiguous() if dense else x


def _checked_flag(name: str, value: object, possible: str = "True or False") -> bool:
    if not isinstance(value, bool | np.bool_):
        raise ValueError(f"{name}={value!r} must be {possible}.")
    return bool(value)


def _checked_positive(name: str, value: object) -> float:
    # The kernels compute in fp32: what is 0 or infinite there is refused here.
    if (
        isinstance(value, bool)
        or not isinstance(value, Real)
        or not 2.0**-100 <= float(value) <= 2.0**100
    ):
        raise ValueError(f"{name}={value!r} must be a positive finite number, 2^-100 to 2^100.")
    return float(value)


def _checked_probability(name: str, value: object) -> float:
    if not isinstance(value, Real) or not 0.0 <= float(value) < 1.0:
        raise ValueError(f"{name}={value!r} must be a probability of at least 0 and below 1.")
    return float(value)


def _checked_count(name: str, value: object) -> int:
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1, or None.")
    return int(value)


def _checked_window(name: str, window: object) -> Sides:
    if not isinstance(window, tuple | list) or len(window) != 2:
        raise ValueError(f"{name}={window!r} must be a pair (left, right), or None.")
    left, right = window
    for side in (left, right):
        whole = isinstance(side, int | torch.SymInt | np.integer) and not isinstance(side, bool)
        if side is not None and not (whole and 0 <= side < 2**30):
            raise ValueError(
                f"{name}={window!r} must hold whole numbers from 0 to 2^30 - 1, or None for "
                f"unlimited."
            )
    left, right = (int(side) if isinstance(side, np.integer) else side for side in (left, right))
    return left, right


def checked_tensor(name: str, x: object) -> torch.Tensor:
    """x; ValueError if it is no tensor, or one without strides, which kernels find elements by."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} is a {type(x).__name__}; it must be a torch.Tensor.")
    if x.is_nested:
        raise ValueError(
            f"{name} is a nested tensor; nested_attention in flash_versions.integrations.nested "
            f"takes jagged ones."
        )
    if x.layout != torch.strided:
        raise ValueError(
            f"{name} has the layout {x.layout} and must be dense; call {name}.to_dense()."
        )
    return x


def other_device(name: str, x: torch.Tensor, device: torch.device) -> ValueError:
    """The error of a tensor that is not on q's device."""
    return ValueError(f"{name} is on {x.device}, q is on {device}; use one device.")


def _four_dims(name: str, x: torch.Tensor, packed: bool) -> torch.Tensor:
    wanted = "(total, heads, head_dim)" if packed else "(batch, length, heads, head_dim)"
    if x.dim() != (3 if packed else 4):
        why = " for packed sequences" if packed else ""
        if x.dim() == 3 and not packed:
            why = "; packed sequences come with cu_seqlens_q"
        raise ValueError(f"{name} has shape {tuple(x.shape)}; it must be {wanted}{why}.")
    return x.unsqueeze(0) if packed else x


def check_qkv(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Refuse q, k and v that do not go together."""
    dtype, device = q.dtype, q.device
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} has dtype {x.dtype}; it must be a float dtype.")
        if x.dtype != dtype:
            raise ValueError(f"{name} has dtype {x.dtype}, q has {dtype}; use one dtype.")
        if x.device != device:
            raise other_device(name, x, device)
        if x.stride(3) != 1 and x.shape[3] > 1:
            raise ValueError(
                f"{name} has stride {x.stride(3)} in its last dimension, which must be contiguous "
                f"(stride 1); call {name}.contiguous()."
            )
    _, _, heads, head_dim = q.shape
    batch, kv_length, kv_heads, k_dim = k.shape
    v_batch, v_length, v_heads, v_dim = v.shape
    if batch != v_batch or kv_length != v_length or kv_heads != v_heads:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; they may differ in the last "
            f"dimension only."
        )
    if k_dim != head_dim:
        raise ValueError(f"q has head_dim {head_dim} and k {k_dim}; they must be equal.")
    if head_dim == 0 or v_dim == 0 or heads == 0:
        raise ValueError(
            f"q has shape {tuple(q.shape)}, v {tuple(v.shape)}; heads and head_dim must be at "
            f"least 1."
        )
    if kv_heads == 0 or heads % kv_heads != 0:
        reason = f"q has {heads} heads, which must be a multiple of k's {kv_heads}."
        if kv_length and q.shape[1] % kv_length == 0:
            reason += (
                " Shapes are (batch, length, heads, head_dim): if the heads come first, as in "
                "torch's scaled_dot_product_attention, call .transpose(1, 2)."
            )
        raise ValueError(reason)


def _check_lengths(request: Request) -> None:
    """Shapes and types of what says where the sequences lie, and which of them go together."""
    q, k = request.q, request.k
    check_integers("cu_seqlens_q", request.cu_seqlens_q, ("batch + 1",), q.device)
    if request.cu_seqlens_q is not None and request.cu_seqlens_q.shape[0] == 0:
        raise ValueError("cu_seqlens_q is empty; it must hold at least the 0 that it starts with.")
    batch = request.batch
    paged = request.block_table is not None
    if request.cu_seqlens_k is not None and request.cu_seqlens_q is None and not paged:
        raise ValueError("cu_seqlens_k was given for a q that is not packed; give cu_seqlens_q.")
    for name, shape in (
        ("cu_seqlens_k", (batch + 1,)),
        ("kv_lengths", (batch,)),
        ("kv_starts", (batch,)),
        ("block_table", (batch, "pages of a row")),
    ):
        if (x := getattr(request, name)) is not None:
            check_integers(name, x, shape, q.device)
    if request.cu_seqlens_k is not None and not paged:
        if request.kv_starts is not None:
            raise ValueError(
                "kv_starts was given for packed keys; cu_seqlens says where each sequence's keys "
                "begin, so leave kv_starts out."
            )
    elif k.shape[0] != batch and not paged:
        raise ValueError(
            f"q has {request.batch} sequences and k has shape {tuple(request.k.shape)}; the batch "
            f"must be equal."
        )


def of_each_key(
    name: str, x: Any, others: dict[str, torch.Tensor | None], k: torch.Tensor
) -> torch.Tensor | None:
    """An end of each key's interval of queries, as (batch, kv_heads, N); none of the others may be
    given beside it.
    """
    if x is None:
        return None
    for other, given in others.items():
        if given is not None:
            raise ValueError(
                f"{other} and {name} were both given; intervals already say which queries see each "
                f"key, so leave one of them out (query_ends of 0: no query sees the key)."
            )
    batch, n, kv_heads, _ = k.shape
    x = checked_tensor(name, x)
    if tuple(x.shape) not in [(n,), (batch, n), (batch, kv_heads, n)] or x.dtype not in INTEGERS:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; it must be int32 or int64 of "
            f"shape ({n},), ({batch}, {n}) or ({batch}, {kv_heads}, {n}): a number for each key."
        )
    if x.device != k.device:
        raise other_device(name, x, k.device)
    return for_each_head(x, batch, kv_heads)


def for_each_head(x: torch.Tensor, batch: int, kv_heads: int) -> torch.Tensor:
    """An end of each key's interval of queries, (N,), (batch, N) or (batch, kv_heads, N), as
    (batch, kv_heads, N), with the plans of its mask.
    """
    plans = getattr(x, PLANS, None)
    if x.stride(-1) != 1 and x.shape[-1] > 1:  # a copy, which does not know when x changes
        x, plans = x.contiguous(), None
    found = (x[:, None] if x.dim() == 2 else x).expand(batch, kv_heads, x.shape[-1])
    if plans is not None:
        setattr(found, PLANS, plans)
    return found


def check_integers(
    name: str, x: object, shape: tuple[int | str, ...], device: torch.device
) -> None:
    """Refuse an x that is neither None nor an int32 or int64 tensor of this shape on this device; a
    dimension with a name may have any size.
    """
    if x is None:
        return
    x = checked_tensor(name, x)
    fits = x.dim() == len(shape)
    for wanted, n in zip(shape, x.shape):
        fits = fits and (isinstance(wanted, str) or wanted == n)
    if not fits or x.dtype not in INTEGERS:
        reason = (
            f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; it must be int32 or int64 of "
            f"shape ({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})."
        )
        if name == "kv_lengths" and x.dtype == torch.bool:
            reason += " Of a mask that is True for the first keys of each row, that is mask.sum(1)."
        raise ValueError(reason)
    if x.device != device:
        raise other_device(name, x, device)


def _check_score_tensors(request: Request) -> None:
    """Shapes and types of what changes the scores."""
    heads, batch = request.q.shape[2], request.batch
    for name, x, shapes in (
        ("alibi_slopes", request.alibi_slopes, [(heads,), (batch, heads)]),
        ("sink", request.sink, [(heads,)]),
    ):
        if x is None:
            continue
        x = checked_tensor(name, x)
        if tuple(x.shape) not in shapes or not x.is_floating_point():
            wanted = " or ".join(str(shape) for shape in shapes)
            raise ValueError(
                f"{name} has shape {tuple(x.shape)} and dtype {x.dtype}; it must be a float tensor "
                f"of shape {wanted}."
            )
        if x.device != request.q.device:
            raise other_device(name, x, request.q.device)
    slopes = request.alibi_slopes
    if slopes is not None and slopes.requires_grad and torch.is_grad_enabled():
        raise ValueError("alibi_slopes requires grad, and has no gradient; call .detach() on it.")
