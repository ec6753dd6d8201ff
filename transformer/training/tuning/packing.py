"""Documents packed into rows, and attention that keeps them apart.

Documents differ in length, so side by side most of a batch would be padding. Here several share a
row, one behind the other. Each token sees its own document only: attention gets the bounds of the
documents, and nothing else in a decoder looks at another token. Rotary positions go on through a
row; a score depends on the difference of two positions, which is that of the document.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

import flash_versions
from transformer.training.corpus import LENGTH_MULTIPLE, ChatBatch, pad_right
from transformer.training.tuning.documents import Document

OPEN_ROWS = 16  # in which room for a document is looked for
DENSE = ("sdpa", "fa1")  # these have no packed sequences


@dataclass(frozen=True)
class PackedBatch(ChatBatch):
    """Rows of documents.

    Attributes:
        tokens: (rows, length) int32; what follows the last document of a row means nothing.
        learned: (rows, length) bool.
        lengths: of the documents of each row.
    """

    lengths: list[list[int]]


@dataclass(frozen=True)
class Packing:
    """The batches of each epoch: `packing[epoch]`, the same for the same number, always.

    Attributes:
        documents: none longer than `width`.
        seed: of the order of the documents; None: as they come.
        width: tokens of a row.
        batch_tokens: of a batch, which has one row at least.
    """

    documents: Sequence[Document]
    seed: int | None
    width: int
    batch_tokens: int

    def rows(self, epoch: int) -> list[list[int]]:
        """Which documents share a row: each goes into the first of a few open rows with room."""
        order = [*range(len(self.documents))]
        if self.seed is not None:
            Random(f"{self.seed} {epoch}").shuffle(order)
        rows = list[list[int]]()
        room = deque[list[int]](maxlen=OPEN_ROWS)  # [tokens left, number of the row]
        for which in order:
            size = len(self.documents[which].tokens)
            place = next((x for x in room if x[0] >= size), None)
            if place is None:
                place = [self.width, len(rows)]
                room.append(place)
                rows.append([])
            place[0] -= size
            rows[place[1]].append(which)
        return rows

    def steps(self, epochs: int) -> int:
        """The number of batches of so many epochs."""
        size = self._batch_rows
        return sum(-(-len(self.rows(epoch)) // size) for epoch in range(epochs))

    @property
    def _batch_rows(self) -> int:
        return max(1, self.batch_tokens // self.width)

    def __getitem__(self, epoch: int) -> Iterator[PackedBatch]:
        rows, size = self.rows(epoch), self._batch_rows
        for at in range(0, len(rows), size):
            yield pack([[self.documents[which] for which in row] for row in rows[at : at + size]])


def pack(rows: Sequence[Sequence[Document]]) -> PackedBatch:
    """The batch of some rows of documents."""
    lengths = [[len(document.tokens) for document in row] for row in rows]
    longest = max(map(sum, lengths))
    width = longest + -longest % LENGTH_MULTIPLE
    tokens = [np.concatenate([x.tokens for x in row]) for row in rows]
    learned = [np.concatenate([x.learned for x in row]) for row in rows]
    padded = pad_right(tokens, width, np.int32), pad_right(learned, width, bool)
    return PackedBatch(*padded, lengths)


class PackedAttention:
    """Attention within the documents of packed rows, to be handed to a `Transformer`.

    `lay` says where they are, before each forward. Attention gets the rows as one packed tensor;
    where it takes none, each document becomes a padded row of its own.
    """

    def __init__(self, version: str) -> None:
        self.version = version
        self._bounds: Tensor | None = None  # (documents + 1,) int32, of all rows' documents
        self._there: Tensor | None = None  # (documents, longest) int64, places in the rows
        self._back: Tensor | None = None  # (rows * length,) int64, places among the padded

    def lay(self, lengths: Sequence[Sequence[int]], width: int, device: torch.device) -> None:
        """Say how long the documents of each row are, and how wide the rows."""
        if self.version not in DENSE:  # what is left of a row is a document, too
            sizes = [size for row in lengths for size in (*row, width - sum(row))]
            bounds = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            self._bounds = bounds.to(device)
            return
        longest = max(size for row in lengths for size in row)
        there = list[Tensor]()
        back = torch.zeros(len(lengths) * width, dtype=torch.int64)
        for i, row in enumerate(lengths):
            first = i * width
            for size in row:
                places = torch.arange(longest)
                back[first : first + size] = len(there) * longest + places[:size]
                # A causal query sees nothing behind it, so anything may pad a document.
                there.append(first + places.clamp(max=size - 1))
                first += size
        self._there, self._back = torch.stack(there).to(device), back.to(device)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, kv_lengths: None = None, **options: Any
    ) -> Tensor:
        """See `flash_versions.attention`; there is no cache."""
        rows, width = q.shape[:2]
        flat = [x.flatten(0, 1) for x in (q, k, v)]
        # A run that is taken up again ends in the same bits: also its gradients must have them.
        options |= {"version": self.version, "deterministic": True}
        if self._there is not None and self._back is not None:
            padded = (x[self._there] for x in flat)
            o = flash_versions.attention(*padded, **options).flatten(0, 1)[self._back]
        else:
            assert self._bounds is not None, "lay() comes before a forward"
            o = flash_versions.attention(*flat, cu_seqlens_q=self._bounds, **options)
        return o.unflatten(0, (rows, width))
