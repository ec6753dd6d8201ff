"""A key-value cache in pages: memory by what is stored, not by rows times the longest row.

A page holds the keys and values of `page_size` tokens of one row. A row's pages lie anywhere in the
pool; the block table says where:

    row 0   page 3  page 1                 slot 300 of row 0 is slot 44 of page 1
    row 1   page 5
    row 2   page 2  page 6  page 4
    free    7, 8                           page 0 is for what nobody reads

The host gives out pages before a forward needs them (`allocate`) and takes them back when a row has
ended (`release`); the device only follows the table, which stays in one place and in one shape, so
a CUDA graph of a step goes on while rows grow, end and are replaced. When no page is free the pool
grows, which moves it: `moves` counts how often, and a graph from before must not be replayed.

Pads and rows that have ended write to page 0. Source: Kwon et al. 2023, PagedAttention,
arXiv:2309.06180.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor

from transformer.model.cache import Cache, Span
from transformer.model.config import Config

PAGE_SIZE = 256  # tokens
GROWTH = 1.25  # of the pool, when it is too small


class PagedKVCache(Cache):
    """Keys and values of every layer in pages; filled by `Transformer.forward` like `KVCache`.

    Args:
        config, batch, device: see `Cache`.
        capacity: tokens that each row can hold, at most the model's context. They take no memory
            before `allocate`.
        dtype: the model's.
        page_size: tokens of a page.

    Attributes:
        moves: how often the pool has moved.
        asked: bytes of the pool that was asked for last, also if the memory did not have them.

    Raises:
        ValueError: more capacity than the model has positions.
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        page_size: int = PAGE_SIZE,
    ):
        super().__init__(config, batch, capacity, device)
        self.page_size = page_size
        self.moves = self.asked = 0
        # Host and device have a table each; entries without a page are page 0.
        self._table = torch.zeros(batch, -(-capacity // page_size), dtype=torch.int32)
        self.table = self._table.to(device, copy=True)
        self._pages: list[list[int]] = [[] for _ in range(batch)]
        self._free: list[int] = []
        # A tensor for each layer, so that growing takes the memory of one layer twice, not of all.
        # Zeros: a value that is masked has weight 0, and 0 * NaN from fresh memory would be NaN.
        shape = (2, 1, page_size, config.num_kv_heads, config.head_dim)
        self.pools = [
            torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)
        ]

    @property
    def nbytes(self) -> int:
        """Memory for keys and values."""
        return sum(pool.nbytes for pool in self.pools)

    def allocate(self, lengths: Sequence[int]) -> None:
        """Give row b pages for its first lengths[b] tokens; a row keeps what it has.

        Whatever a forward writes beyond a row's pages is lost, as pads may be.

        Raises:
            ValueError: more tokens than a row can hold.
        """
        if max(lengths) > self.capacity:
            raise ValueError(f"a row of the cache holds {self.capacity} tokens, not {max(lengths)}")
        missing = [
            max(0, -(-length // self.page_size) - len(pages))
            for length, pages in zip(lengths, self._pages, strict=True)
        ]
        if not any(missing):
            return
        self._grow(sum(missing) - len(self._free))
        for row, count in enumerate(missing):
            pages = self._pages[row]
            for _ in range(count):
                pages.append(self._free.pop())
                self._table[row, len(pages) - 1] = pages[-1]
        self.table.copy_(self._table)

    def release(self, row: int) -> None:
        """Empty a row and take its pages back."""
        self.lengths[row] = 0
        if self._pages[row]:
            self._free += reversed(self._pages[row])
            self._pages[row] = []
            self._table[row] = 0
            self.table.copy_(self._table)

    def row(self, row: int) -> PagedKVCache:
        """One empty row as a cache of its own, in the same memory; `allocate` belongs to the whole.

        A prompt is read into it while the other rows wait.
        """
        alone = copy.copy(self)
        alone.lengths, alone.table = self.lengths[row : row + 1], self.table[row : row + 1]
        alone.longest, alone.fixed = 0, False
        return alone

    def reserve(self, count: int, padding: Tensor | None = None) -> Span:
        """As `KVCache.reserve`; the rows' pages are given out already."""
        stop = self.stop_of(count)
        self.lengths.clamp_(max=self.capacity - count)  # a row that has ended goes on counting
        slots, added = self.slots(count, padding)
        table = self._table_of(stop)
        pages = table.gather(1, slots // self.page_size)
        self.lengths += added
        self.longest = stop
        return self._span(pages, slots % self.page_size, slots, table)

    def room(self, count: int) -> Span:
        """As `KVCache.room`."""
        self.longest = stop = self.stop_of(count)
        none = self.lengths.new_empty(0)
        return self._span(none, none, none, self._table_of(stop))

    def _span(self, pages: Tensor, offsets: Tensor, slots: Tensor, table: Tensor) -> Span:
        layers = self.pools
        return Span(layers, pages, offsets, slots, self.capacity, None, self.lengths, table)

    def _table_of(self, stop: int) -> Tensor:
        """The pages of rows that are not longer."""
        return self.table[:, : -(-stop // self.page_size)].contiguous()

    def _grow(self, missing: int) -> None:
        """Let the pool have so many pages more, or some more than that."""
        if missing <= 0:
            return
        old = self.pools[0].shape[1]
        new = max(old + missing, int(old * GROWTH))
        self.moves += 1
        self.asked = self.nbytes // old * new
        for layer, pool in enumerate(self.pools):
            grown = pool.new_zeros((2, new, *pool.shape[2:]))
            grown[:, :old] = pool
            self.pools[layer] = grown
        self._free = [*range(new - 1, old - 1, -1), *self._free]
