"""The versions in the place of `torch.nn.functional.scaled_dot_product_attention`.

    from flash_versions.integrations.sdpa import use_for_sdpa
    with use_for_sdpa("fa2"):
        loss = model(x).sum()   # every call of torch's attention in here runs our kernels
    loss.backward()             # and so does its backward, here or inside

Every caller of the function is reached, also through a reference of its own: torch asks a "function
mode" about every call of its functions. That costs some microseconds per torch function while the
context is open, and belongs to the thread that opened it. torch.compile works inside and around a
context, but nn.MultiheadAttention breaks the graph.
"""

from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from flash_versions.dispatch.version import known_version
from flash_versions.integrations import unit_stride
from flash_versions.versions.api import attention


def use_for_sdpa(
    version: str = "auto", otherwise: str = "raise", batch_invariant: bool = False
) -> TorchFunctionMode:
    """A context in which torch's attention runs the kernels of a version.

    Args:
        version: as in `attention`.
        otherwise: what becomes of a call that the version cannot serve, above all one with an
            attn_mask: "raise" a ValueError, or run it with "torch".
        batch_invariant: as in `attention`.

    Returns:
        A context manager; contexts nest, and the innermost counts.

    Raises:
        ValueError: an argument is unknown. In the context: the version cannot serve a call.
    """
    if version != "auto":
        known_version(version)
    if otherwise not in ("raise", "torch"):
        raise ValueError(f"otherwise={otherwise!r} is unknown; there are 'raise' and 'torch'.")
    return SdpaMode(version, otherwise, batch_invariant)


class SdpaMode(TorchFunctionMode):
    """See `use_for_sdpa`."""

    def __init__(self, version: str, otherwise: str, batch_invariant: bool):
        super().__init__()
        self.function = partial(
            scaled_dot_product_attention, version=version, batch_invariant=batch_invariant
        )
        self.otherwise = otherwise

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """torch's question about every call of a function."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self.attend(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            # torch asks about the outer function only: run its body with attention replaced.
            names = {**func.__globals__, "scaled_dot_product_attention": self.attend}
            body = FunctionType(func.__code__, names, func.__name__, func.__defaults__)
            return body(*args, **kwargs)
        return func(*args, **kwargs)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """torch's attention, by the version or, if need be and allowed, by torch."""
        with (
            torch._C.DisableTorchFunction()
        ):  # no outer context takes what this one leaves to torch
            try:
                return self.function(query, key, value, *args, **kwargs)
            except ValueError:
                if self.otherwise == "raise":
                    raise
            return F.scaled_dot_product_attention(query, key, value, *args, **kwargs)


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    version: str = "auto",
    batch_invariant: bool = False,
) -> torch.Tensor:
    """torch's function of that name by one of our versions.

    Args:
        query: (..., heads, M, head_dim). Dimensions before M may be missing, and broadcast.
        key: (..., kv_heads, N, head_dim).
        value: (..., kv_heads, N, head_dim_v).
        attn_mask: None; the kernels take no mask.
        dropout_p: as in `attention`.
        is_causal: query i sees keys j <= i, whatever M and N (top-left aligned).
        scale: as in `attention`.
        enable_gqa: heads may be a multiple of kv_heads.
        version: as in `attention`.
        batch_invariant: as in `attention`.

    Returns:
        o: (..., heads, M, head_dim_v).

    Raises:
        ValueError: the version cannot serve the call.
    """
    if attn_mask is not None:
        raise ValueError(
            f"attn_mask has shape {tuple(attn_mask.shape)}, and these kernels take no mask; use "
            f"is_causal, or use_for_sdpa(..., otherwise='torch')."
        )
    given = (query, key, value)
    tensors = [x[(None,) * (4 - x.dim())] for x in given]
    heads = [1 if enable_gqa else x.shape[-3] for x in tensors]
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in tensors))
        (shared_heads,) = torch.broadcast_shapes(*((h,) for h in heads))
    except RuntimeError as error:
        shapes = ", ".join(str(tuple(x.shape)) for x in given)
        raise ValueError(
            f"query, key and value have shapes {shapes}; their leading dimensions must broadcast, "
            f"heads too unless enable_gqa=True."
        ) from error
    q, k, v = (
        unit_stride(x.expand(*lead, -1 if enable_gqa else shared_heads, -1, -1))
        .flatten(0, -4)
        .transpose(1, 2)
        for x in tensors
    )
    q_length, kv_length = q.shape[1], k.shape[1]
    window = None
    if is_causal:
        k, v = k[:, :q_length], v[:, :q_length]  # no query sees a key after the last query
        window = (None, max(0, q_length - kv_length))
    o = attention(
        q, k, v, window=window, scale=scale, dropout_p=dropout_p, version=version,
        batch_invariant=batch_invariant
    )  # fmt: skip
    o = o.transpose(1, 2).unflatten(0, lead)
    return o[(0,) * (4 - max(x.dim() for x in given))]
