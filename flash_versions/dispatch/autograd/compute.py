"""The results and the gradients of a request: tensors are put in the form that kernels take."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import Backward, Chosen, Forward, Version

# Kernels add two positions, or a position and a side of the window, in 32 bits, and take
# `tiles.algebra.EVER`, which is 2^30, for later than every query.
MOST_ROWS = 2**30
MOST_ROWS_OF_GROUP = 2**31 - 2**16  # in 32 bits, too, with the rows that fill the last tile

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


def check_counts(request: Request) -> None:
    """Refuse more rows than the kernels count, in 32 bits.

    Raises:
        ValueError: q, k, or the query rows of a key head have too many; the sentence says which.
    """
    q_length, kv_length, group = request.q.shape[1], request.max_kv_length, request.group
    for name, rows in (("q", q_length), ("k", kv_length)):
        if rows >= MOST_ROWS:
            raise ValueError(f"{name} has {rows} rows; the kernels count up to 2^30 - 1.")
    if q_length * group >= MOST_ROWS_OF_GROUP:
        raise ValueError(
            f"q has {q_length} rows and {group} query heads to a key head; the kernels count the "
            f"rows of all these heads, up to 2^31 - 2^16 - 1."
        )


def run_forward(version: Version, request: Request) -> Results:
    """(o, lse, statistics), which is None if the version has none."""
    with devices.on_device(request.q):  # Triton launches on the current GPU
        return planned(version, request)[0](request)


def planned(
    version: Version, request: Request, kind: tuple | None = None
) -> tuple[Callable[[Request], Results], tuple | None]:
    """What computes requests with tensors like these, and their kind (`Version.kind_of`), which may
    be known. Kernels that can be prepared have computed what follows from shapes.
    """
    if kind is not None:
        return prepared(version.forward, request, kind), kind
    if version.backward is None:  # a baseline
        return version.forward, None  # type: ignore[return-value]
    q, cuts = request.q, request.cu_seqlens_q
    if request.block_table is not None or max(q.numel(), request.k.numel()) >= MOST_ROWS:
        check_counts(request)
    if not q.numel() or (cuts is not None and request.batch == 0):
        return partial(see_nothing, version), None
    forward: Any = version.forward
    aligned = in_vectors(request)
    kind = version.kind_of(aligned) if isinstance(forward, Chosen) else None
    if aligned is not request:
        found = forward.find(aligned, kind) if isinstance(forward, Chosen) else forward
        return partial(computed_in_vectors, found), None
    return prepared(forward, request, kind), kind


def prepared(computes: Any, request: Request, kind: tuple | None) -> Any:
    """What is chosen for a request of a kind, a forward or a backward, prepared for it."""
    if isinstance(computes, Chosen):
        computes = computes.find(request, kind)
    return computes.prepare(request) if hasattr(computes, "prepare") else computes


def planned_backward(version: Version, request: Request, kind: tuple | None) -> Backward | None:
    """What computes the gradients of requests with tensors like these, of a kind, prepared
    likewise; None: it is asked anew.
    """
    return None if kind is None else prepared(version.backward, request, kind)


def see_nothing(version: Version, request: Request) -> Results:
    """The results of no queries, or of queries of no sequence."""
    o, lse, statistics = empty_results(version, request)
    return o.zero_(), lse.fill_(float("-inf")), statistics


def computed_in_vectors(forward: Forward, request: Request) -> Results:
    """The results of a request whose rows have to be padded."""
    o, lse, statistics = forward(in_vectors(request))
    assert lse is not None  # only a baseline has none
    return narrowed(o, request.v), lse, statistics


def in_vectors(request: Request) -> Request:
    """The request with rows of whole 16-byte vectors and no less than a tile's 16 elements, padded
    by zeros, which change no product. 8-bit tensors stay: they are laid out anew anyway.

    With values of fewer than 16 dims, Triton 3.6 compiles a product that reads past its shared
    memory on Hopper.
    """
    if request.precision is not None or not (request.q.shape[3] % 16 or request.v.shape[3] % 16):
        return request
    q, k, v = widened(request.q), widened(request.k), widened(request.v)
    if q is request.q and k is request.k and v is request.v:
        return request
    return request._replace(q=q, k=k, v=v)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension padded as `in_vectors` says; x itself if it needs no padding."""
    dims = x.shape[3]
    missing = max(16 - dims, -dims % (16 // x.element_size()))
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def narrowed(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x without what `widened` added to `like`."""
    return x if x.shape[3] == like.shape[3] else x[..., : like.shape[3]].contiguous()


def run_backward(
    version: Version,
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor | None,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
    gradients: Backward | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv, dsink); do or dlse is None if nothing depends on o or on the LSE. Gradients:
    what `planned_backward` returned for such a request.

    Raises:
        ValueError: the request is in FP8, which has no gradients.
    """
    if request.precision is not None:
        raise ValueError(
            f"precision={request.precision!r} is forward only and a gradient of its result was "
            f"asked for; call it under torch.no_grad(), detach the result, or leave precision out."
        )
    nothing = do is None and dlse is None
    if gradients is None:  # those are of something
        nothing = nothing or o.numel() == 0 or request.k.numel() == 0 or request.batch == 0
    if nothing:
        dq, dk, dv = (x.new_zeros(x.shape) for x in (request.q, request.k, request.v))
        dsink = None if request.sink is None else torch.zeros_like(request.sink)
        if dsink is not None and dlse is not None and request.batch > 0:
            dsink += dlse.sum((0, 2))  # no key: the sink alone is the LSE
        return dq, dk, dv, dsink
    if o.is_cuda and o.get_device() != torch.cuda.current_device():
        with torch.cuda.device(o.device):
            return run_backward(version, request, o, lse, statistics, do, dlse, gradients)
    if do is None:
        do = o.new_zeros(o.shape)
    elif do.stride(-1) != 1 and do.shape[-1] > 1:
        do = do.contiguous()  # such as the gradient of a sum: one number for all
    do = do.resolve_neg()
    if dlse is not None:
        dlse = dlse.resolve_neg()
    if request.kv_starts is not None:
        request, do = without_unseeing(request, do)
    assert version.backward is not None
    if gradients is not None:
        return gradients(request, o, lse, statistics, do, dlse)
    aligned, backward = in_vectors(request), version.backward
    if isinstance(backward, Chosen):
        backward = backward.find(aligned, version.kind_of(aligned))
    if aligned is request:
        return backward(request, o, lse, statistics, do, dlse)
    dq, dk, dv, dsink = backward(aligned, widened(o), lse, statistics, widened(do), dlse)
    return narrowed(dq, request.q), narrowed(dk, request.k), narrowed(dv, request.v), dsink


def without_unseeing(request: Request, do: torch.Tensor) -> tuple[Request, torch.Tensor]:
    """The request and do with 0 in rows of queries that lie in front of their sequence's first key,
    in a batch that is padded on the left. They see no key, and what is NaN there would spread: a
    product of tiles has 0 * NaN in its sums.
    """
    starts, right = request.kv_starts, request.window_right
    if starts is None or right is None or request.cu_seqlens_q is not None:
        return request, do
    q_length, longest = request.q.shape[1], request.max_kv_length
    ends = longest if request.kv_lengths is None else request.kv_lengths.clamp(0, longest)
    first_seeing = q_length - right - (ends - starts.clamp(min=0)).clamp(min=0)
    place = torch.arange(q_length, device=do.device)
    unseeing = (place < first_seeing[:, None])[:, :, None, None]
    return request._replace(q=request.q.masked_fill(unseeing, 0.0)), do.masked_fill(unseeing, 0.0)


def empty_results(version: Version, request: Request) -> Results:
    """(o, lse, statistics) without their contents; statistics is None if the version has none."""
    q, n = request.q, version.num_statistics
    batch, q_length, heads, _ = q.shape
    o = q.new_empty((batch, q_length, heads, request.v.shape[3]), dtype=request.out_dtype)
    lse = q.new_empty((batch, heads, q_length), dtype=torch.float32)
    return o, lse, lse.new_empty((n, *lse.shape)) if n else None
