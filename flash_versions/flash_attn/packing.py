"""Packed sequences made out of others on the device: no length is read on the host."""

from typing import NamedTuple

import torch

from flash_versions.dispatch.request import check_integers


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
        if cu_seqlens_q is None:
            cu_seqlens_q = torch.arange(shape[0] + 1, device=q.device) * shape[1]
            q = q.flatten(0, 1)
        check_integers("cu_seqlens_q", cu_seqlens_q, (None,), q.device)
        check_integers("seqused_q", seqused_q, (cu_seqlens_q.shape[0] - 1,), q.device)
        sequence, place = places_of(cu_seqlens_q, q.shape[0])
        is_used = place < torch.nn.functional.pad(seqused_q, (0, 1))[sequence]
        order = (~is_used).to(torch.uint8).argsort(stable=True)
        lengths = torch.minimum(seqused_q.clamp(min=0), cu_seqlens_q.diff())
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
        return cls(q.index_select(0, order), cu_seqlens, order, shape)

    def in_place(
        self, out: torch.Tensor, lse: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Results of these queries, for the queries as they were given."""
        places = self.order.argsort()
        out = out.index_select(0, places).unflatten(0, self.shape)
        if lse is not None:
            lse = lse.index_select(1, places)
            if len(self.shape) == 2:
                lse = lse.unflatten(1, self.shape).transpose(0, 1).contiguous()
        return out, lse
