"""Packed sequences made out of others on the device: no length is read on the host."""

from numbers import Integral
from typing import Any, NamedTuple

import torch

from flash_versions.dispatch.precision import DESCALES, is_fp8
from flash_versions.dispatch.request import check_integers
from flash_versions.versions import masks


def places_of(cu_seqlens: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row of a packed tensor: its sequence, and its place there. The sequence of rows
    behind the last one is the number of sequences.
    """
    row = torch.arange(total, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True)
    return sequence, row - cu_seqlens[sequence]


class UsedQueries(NamedTuple):
    """Queries of which each sequence uses the first few, packed: all that are used, and behind them
    the others, which belong to no sequence there and so see no key.
    """

    q: torch.Tensor
    cu_seqlens: torch.Tensor
    order: torch.Tensor
    shape: torch.Size  # (batch, M) of queries that were not packed, else (total_q,)

    @classmethod
    def of(
        cls, q: torch.Tensor, cu_seqlens_q: torch.Tensor | None, seqused_q: torch.Tensor
    ) -> "UsedQueries":
        """Of q (batch, M, heads, head_dim), or packed; seqused_q (batch,) is clamped to what there
        is.

        Raises:
            ValueError: an argument is malformed.
        """
        if q.dim() != (4 if cu_seqlens_q is None else 3):
            wanted = "(batch, length, " if cu_seqlens_q is None else "(total, "
            given = "without" if cu_seqlens_q is None else "with"
            raise ValueError(
                f"q has shape {tuple(q.shape)}; with seqused_q and {given} cu_seqlens_q it must be "
                f"{wanted}heads, head_dim)."
            )
        shape = q.shape[:-2]
        q, cu_seqlens_q = as_packed(q, cu_seqlens_q)
        check_integers("cu_seqlens_q", cu_seqlens_q, ("batch + 1",), q.device)
        check_integers("seqused_q", seqused_q, (cu_seqlens_q.shape[0] - 1,), q.device)
        sequence, place = places_of(cu_seqlens_q, q.shape[0])
        is_used = place < torch.nn.functional.pad(seqused_q, (0, 1))[sequence]
        order = (~is_used).to(torch.uint8).argsort(stable=True)
        lengths = torch.minimum(seqused_q.clamp(min=0), cu_seqlens_q.diff())
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        if is_fp8(q):  # torch selects no rows of 8-bit floats
            q = q.view(torch.int8).index_select(0, order).view(q.dtype)
        else:
            q = q.index_select(0, order)
        return cls(q, cu_seqlens, order, shape)

    def in_place(
        self, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results of these queries, for the queries as they were given."""
        places = self.order.argsort()
        out = out.index_select(0, places)
        return unpacked(out, None if lse is None else lse.index_select(1, places), self.shape)


def used_of(room: torch.Tensor, lengths: torch.Tensor | None) -> torch.Tensor:
    """How many keys each sequence uses of those for which there is room: all, or `lengths`."""
    return room if lengths is None else torch.minimum(lengths.clamp(min=0), room)


def as_packed(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (batch, length, heads, dim) as packed sequences: (total, heads, dim) and cu_seqlens; both
    as they are if x is packed already.
    """
    if cu_seqlens is not None:
        return x, cu_seqlens
    batch, length = x.shape[:2]
    return x.flatten(0, 1), torch.arange(batch + 1, device=x.device) * length


def unpacked(
    out: torch.Tensor, lse: torch.Tensor | None, shape: torch.Size
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Results of packed queries, of which there were (batch, M), or still are (total_q,)."""
    if lse is not None and len(shape) == 2:
        lse = lse.unflatten(1, shape).transpose(0, 1).contiguous()
    return out.unflatten(0, shape), lse


class Parts(NamedTuple):
    """Packed sequences, cut where chunks of keys begin: part i has the queries of cu_seqlens_q, and
    keys starts[i] .. ends[i] - 1 of its sequence, `sequence[i]`.

    The first part of a sequence has the keys of the chunks before its first query, which nobody
    sees; where there are more queries than keys, it has the queries before key 0. Each other part
    is a chunk. The queries of a part end where its keys end, so masks are those of the sequence.
    """

    sequence: torch.Tensor
    cu_seqlens_q: torch.Tensor
    starts: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of_chunks(
        cls, cu_seqlens_q: torch.Tensor, kv_lengths: torch.Tensor, size: int, total: int
    ) -> "Parts":
        """Chunks of `size` keys of sequences that have `total` queries together. Their number is
        not known on the host; behind the last one, parts are empty.
        """
        batch = kv_lengths.shape[0]
        q_lengths, kv_lengths = cu_seqlens_q.diff().long(), kv_lengths.long()
        ahead = kv_lengths - q_lengths  # the position of the first query
        first = ahead.clamp(min=0) // size
        counts = 1 + (kv_lengths + size - 1) // size - first
        until = counts.cumsum(0)
        part = torch.arange(total // size + 3 * batch, device=kv_lengths.device)
        sequence = torch.searchsorted(until, part, right=True).clamp(max=batch - 1)
        ahead, kv_lengths, q_lengths = (x[sequence] for x in (ahead, kv_lengths, q_lengths))
        part = part - (until - counts)[sequence]
        ends = (first[sequence] + part) * size
        starts = torch.where(part == 0, 0, ends - size)
        begun = torch.where(part == 0, 0, (starts - ahead).clamp(min=0))
        begun = torch.minimum(begun, q_lengths) + cu_seqlens_q[sequence]
        return cls(
            sequence,
            torch.cat((begun, cu_seqlens_q[-1:])),
            torch.minimum(starts, kv_lengths),
            torch.minimum(ends, kv_lengths),
        )


def in_chunks(
    size: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """(q, k, v, options) of a call of `attention` in which a query sees only keys of its own chunk
    of `size` keys. Sequences of one length get an interval mask; others are cut (`Parts`), and q is
    packed then.

    Raises:
        ValueError: an argument is malformed.
    """
    if not isinstance(size, Integral) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"attention_chunk={size!r} must be an integer of at least 1, or 0 for no chunks."
        )
    cu_q, cu_k, lengths, starts, table = (
        options.get(name)
        for name in ("cu_seqlens_q", "cu_seqlens_k", "kv_lengths", "kv_starts", "block_table")
    )
    if cu_k is None and table is None and k.dim() == 3:
        cu_k = cu_q
    # In FP8 there is no interval mask.
    if all(x is None for x in (cu_q, cu_k, lengths, table)) and not is_fp8(q):
        seen = masks.chunks(
            k.shape[1], size, queries=q.shape[1], causal=options["causal"], device=q.device
        )
        return q, k, v, options | seen
    is_cached = table is not None or "kv_starts" in options  # the step on a cache has it
    check_integers("cu_seqlens_q", cu_q, ("batch + 1",), q.device)
    batch = q.shape[0] if cu_q is None else cu_q.shape[0] - 1
    check_integers("cu_seqlens_k", cu_k, (batch + 1,), q.device)
    check_integers("kv_lengths", lengths, (batch,), q.device)
    check_integers("block_table", table, (batch, "pages of a row"), q.device)
    if batch == 0:
        return q, k, v, options
    if is_cached:
        if table is None:  # a row of the cache is a page
            table = torch.arange(batch, device=q.device)[:, None]
        room = torch.full((batch,), table.shape[1] * k.shape[1], device=q.device)
        lengths = used_of(used_of(room, None if cu_k is None else cu_k.diff()), lengths)
        starts = lengths * 0 if starts is None else torch.minimum(starts.clamp(min=0), lengths)
        if cu_q is None and q.shape[1] == 1:  # a query in the last chunk: its keys begin there
            before = (lengths - starts - 1).clamp(min=0) // size * size
            return q, k, v, options | {"kv_starts": starts + before}
        q, cu_q = as_packed(q, cu_q)
        parts = Parts.of_chunks(cu_q, lengths - starts, size, q.shape[0])
        first = starts[parts.sequence]
        where = {
            "cu_seqlens_k": None,
            "kv_lengths": first + parts.ends,
            "kv_starts": first + parts.starts,
            "block_table": table[parts.sequence],
        }
    else:
        q, cu_q = as_packed(q, cu_q)
        (k, in_rows), (v, _) = as_packed(k, cu_k), as_packed(v, cu_k)
        parts = Parts.of_chunks(cu_q, used_of(in_rows.diff(), lengths), size, q.shape[0])
        begun = in_rows[parts.sequence] + parts.starts
        where = {"cu_seqlens_k": torch.cat((begun, in_rows[-1:]))}
        if lengths is not None:  # behind the last part of a sequence are keys that are not used
            where["kv_lengths"] = parts.ends - parts.starts
    for name in ("alibi_slopes", *DESCALES):
        x = options.get(name)
        if isinstance(x, torch.Tensor) and x.dim() == 2:
            where[name] = x[parts.sequence]
    return q, k, v, options | where | {"cu_seqlens_q": parts.cu_seqlens_q}
