"""The results and the gradients of a request: tensors are put in the form that kernels take."""

import torch

from flash_versions.dispatch.replay.keys import current_device
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import Version

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
    if version.backward is None:  # a baseline
        return version.forward(request)  # type: ignore[return-value]
    q, cuts = request.q, request.cu_seqlens_q
    check_counts(request)
    if not q.numel() or (cuts is not None and request.batch == 0):
        o, lse, statistics = empty_results(version, request)
        return o.zero_(), lse.fill_(float("-inf")), statistics
    if q.is_cuda and q.get_device() != current_device():
        with torch.cuda.device(q.device):  # Triton launches on the current GPU
            return run_forward(version, request)
    aligned = in_vectors(request)
    o, found, statistics = version.forward(aligned)
    assert found is not None  # only a baseline has none
    return narrowed(o, request.v), found, statistics


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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv, dsink); do or dlse is None if nothing depends on o or on the LSE.

    Raises:
        ValueError: the request is in FP8, which has no gradients.
    """
    if request.precision is not None:
        raise ValueError(
            f"precision={request.precision!r} is forward only and a gradient of its result was "
            f"asked for; call it under torch.no_grad(), detach the result, or leave precision out."
        )
    nothing = 0 in (o.numel(), request.k.numel(), request.batch)
    if nothing or (do is None and dlse is None):
        dq, dk, dv = (x.new_zeros(x.shape) for x in (request.q, request.k, request.v))
        dsink = None if request.sink is None else torch.zeros_like(request.sink)
        if dsink is not None and dlse is not None and request.batch > 0:
            dsink += dlse.sum((0, 2))  # no key: the sink alone is the LSE
        return dq, dk, dv, dsink
    if o.is_cuda and o.get_device() != current_device():
        with torch.cuda.device(o.device):
            return run_backward(version, request, o, lse, statistics, do, dlse)
    if do is None:
        do = o.new_zeros(o.shape)
    elif do.stride(3) != 1 and do.shape[3] > 1:
        do = do.contiguous()  # such as the gradient of a sum: one number for all
    do = do.resolve_neg()
    if dlse is not None:
        dlse = dlse.resolve_neg()
    if request.kv_starts is not None:
        request, do = without_unseeing(request, do)
    assert version.backward is not None
    aligned, backward = in_vectors(request), version.backward
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
