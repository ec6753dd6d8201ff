"""What check=True asks for: values that are in device memory, read on the host."""

import torch

from flash_versions.dispatch.precision import DESCALES
from flash_versions.dispatch.request.request import INTERVALS, Request


def check_values(request: Request) -> None:
    """Read the lengths, the block table and the scales on the host (a synchronisation) and refuse
    what would read or write out of bounds, or is no scale. Rows behind the last sequence are
    allowed.

    Raises:
        ValueError: a value is out of range; the sentence names it.
    """
    _check_descales(request)
    for name in INTERVALS:
        if (x := getattr(request, name)) is not None and x.numel():
            low, high = (int(bound) for bound in x.aminmax())
            if low < 0 or high > request.q.shape[1]:
                raise ValueError(
                    f"{name} holds {low if low < 0 else high}; queries are counted from 0 to "
                    f"{request.q.shape[1]}, their number."
                )
    _check_cu_seqlens("cu_seqlens_q", request.cu_seqlens_q, request.q.shape[1])
    paged = request.block_table is not None
    _check_cu_seqlens("cu_seqlens_k", request.cu_seqlens_k, None if paged else request.k.shape[1])
    longest = request.max_kv_length
    lengths = [longest] * request.batch
    if request.cu_seqlens_k is not None:
        lengths = request.cu_seqlens_k.diff().tolist()
    rooms = [longest] * request.batch
    if request.kv_lengths is not None:
        rooms, lengths = lengths, request.kv_lengths.tolist()
    for b, (length, room) in enumerate(zip(lengths, rooms)):
        if not 0 <= length <= room:
            raise ValueError(f"sequence {b} has {length} keys; there is room for 0 to {room}.")
    if request.kv_starts is not None:
        for b, (start, length) in enumerate(zip(request.kv_starts.tolist(), lengths)):
            if not 0 <= start <= length:
                raise ValueError(f"kv_starts[{b}]={start} must lie from 0 to {length}, its end.")
    if request.block_table is not None:
        pages, page_size = request.k.shape[:2]
        for b, (row, length) in enumerate(zip(request.block_table.tolist(), lengths)):
            used = row[: -(-length // page_size)]
            if wrong := [page for page in used if not 0 <= page < pages]:
                raise ValueError(f"block_table[{b}] has page {wrong[0]}; there are {pages} pages.")


def _check_descales(request: Request) -> None:
    for name in DESCALES:
        x = getattr(request, name)
        if x is None:
            continue
        for wrong in x[~((x > 0) & x.isfinite())].tolist():
            raise ValueError(f"{name} holds {wrong}; scales must be positive and finite.")


def _check_cu_seqlens(name: str, x: torch.Tensor | None, total: int | None) -> None:
    if x is None:
        return
    bounds = x.tolist()
    if bounds[0] != 0:
        raise ValueError(f"{name} starts with {bounds[0]}; it must start with 0.")
    if any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"{name}={bounds} must not decrease.")
    if total is not None and bounds[-1] > total:
        raise ValueError(f"{name} ends with {bounds[-1]}; the packed tensor has {total} rows.")
