"""A key-value cache that owns its position.

Every row of the batch is filled from slot 0 on, without gaps: a token's slot is its position, and a
row of 7 tokens beside a row of 3 needs no mask, only two lengths. A forward reserves a `Span` once
and every layer appends to that span, so lengths cannot advance twice, or in one layer only.

A batch of unequal prompts is padded on the left. Of 5 tokens of which 2 are pads, the 3 real ones
take the next slots; the pads are turned round behind them, where nothing sees them and the next
token overwrites them:

    tokens    pad  pad   a    b    c
    slots      3    4    0    1    2         length 3 afterwards

While all rows are equally long, the host knows every length: slots are slices, and the attention
needs no lengths. Once rows may differ, the lengths are known to the device only and the host keeps
an upper bound. Either way decoding never waits for the device. For a CUDA graph, which repeats what
it has seen to the letter, the cache can be fixed: every span then reaches to its end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flash_versions import merge_attention_states
from transformer.model.config import Config
from transformer.model.kernels.decode.merge import merge


class Cache:
    """How many tokens each row of a cache holds; where their keys and values lie is the subclass's.

    Args:
        config: the model's.
        batch: rows.
        capacity: tokens that each row can hold, at most the model's context.
        device: the model's.

    Attributes:
        lengths: (batch,) int32 on the device, the tokens stored in each row.
        longest: no row is longer (known to the host).
        ropes: how keys turn in each layer, which may depend on the capacity (see `rope.BY_LENGTH`).
        fixed: see `fix`.
        uniform: every row is exactly `longest` long, as far as the host knows.

    Raises:
        ValueError: more capacity than the model has positions.
    """

    def __init__(
        self, config: Config, batch: int, capacity: int, device: torch.device | str
    ) -> None:
        if not 0 < capacity <= config.max_positions:
            raise ValueError(
                f"a cache must hold 1 to {config.max_positions} tokens, the model's context,"
                f" not {capacity}"
            )
        self.capacity = capacity
        self.ropes = config.ropes_at(capacity)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.longest = 0
        self.fixed, self.uniform = False, True

    def truncate(self, length: int) -> None:
        """Forget what every row holds past its first `length` tokens; 0 empties the cache."""
        self.lengths.clamp_(max=length)
        self.longest = min(self.longest, length)
        self.fixed, self.uniform = False, self.uniform or length == 0

    def retract(self, counts: Tensor) -> None:
        """Forget the newest counts[b] tokens of each row b, (batch,) integers on the device.

        The host does not learn how many: no row is longer than before, until `truncate` says more.
        """
        self.lengths -= counts
        self.uniform = False

    def fix(self) -> None:
        """Let every forward from now on have the same shapes, whatever the lengths are.

        They are then known to the device only, and a row that is full writes over its last slots:
        a reader of it has to stop before. `truncate` ends this.
        """
        self.fixed, self.uniform, self.longest = True, False, self.capacity

    def stop_of(self, count: int) -> int:
        """No row will be longer with `count` tokens more; ValueError if they might not fit."""
        stop = self.capacity if self.fixed else self.longest + count
        if stop > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} tokens and {self.longest} are stored:"
                f" {count} more, {stop} in all, do not fit"
            )
        return stop

    def slots(self, count: int, padding: Tensor | None) -> tuple[Tensor, Tensor]:
        """Slots of the next `count` tokens of each row, int64 (batch, count), pads at the end, and
        how many of them are no pads, (batch,).
        """
        order = torch.arange(count, device=self.lengths.device)
        pads = torch.zeros_like(self.lengths) if padding is None else padding
        return self.lengths[:, None] + (order - pads[:, None]) % count, count - pads


class KVCache(Cache):
    """Keys and values of every layer, preallocated; filled by `Transformer.forward`. Arguments are
    those of `Cache`, and the model's dtype.
    """

    def __init__(
        self,
        config: Config,
        batch: int,
        capacity: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        super().__init__(config, batch, capacity, device)
        # Zeros: a value that is masked has weight 0, and 0 * NaN from fresh memory would be NaN.
        self.keys_values = torch.zeros(
            (config.num_layers, 2, batch, capacity, config.num_kv_heads, config.head_dim),
            device=device,
            dtype=dtype,
        )

    @property
    def nbytes(self) -> int:
        """Memory for keys and values."""
        return self.keys_values.untyped_storage().nbytes()

    def reserve(self, count: int, padding: Tensor | None = None) -> Span:
        """Advance every row by its share of `count` tokens and say where those tokens go.

        Args:
            count: tokens of this forward, pads included.
            padding: (batch,) int64, how many of them are pads on the left; None: no pads.

        Raises:
            ValueError: the longest row might exceed the capacity. The cache is then unchanged.
        """
        stop = self.stop_of(count)
        self.uniform = self.uniform and padding is None
        if self.fixed:
            self.lengths.clamp_(max=self.capacity - count)
        if self.uniform:
            span = self._span(slice(None), slice(self.longest, stop), stop, None)
            self.lengths += count
        else:
            added: int | Tensor = count
            if padding is None and count == 1:  # a step of decoding: fewer launches
                slots = self.lengths[:, None].long()
            else:
                slots, added = self.slots(count, padding)
            rows = torch.arange(len(self.lengths), device=self.lengths.device)[:, None]
            span = self._span(rows, slots, stop, self.lengths)
            self.lengths += added
        self.longest = stop
        return span

    def room(self, count: int) -> Span:
        """As `reserve`, for kernels that advance the lengths themselves (`kernels.embed`) and find
        the slots of the tokens by them: it launches nothing, and nothing can be appended to it.
        """
        self.longest = stop = self.stop_of(count)
        lengths = None if self.uniform else self.lengths
        return self._span(slice(0), slice(0), stop, lengths)

    def _span(
        self, rows: slice | Tensor, slots: slice | Tensor, stop: int, lengths: Tensor | None
    ) -> Span:
        return Span(self.keys_values, rows, slots, slots, self.capacity, stop, lengths)

    def repeat(self, samples: int) -> KVCache:
        """A copy with each row `samples` times in succession.

        It is for sampling a group of answers to each prompt, as GRPO does (arXiv:2402.03300): the
        prompt is read once, and every answer continues a copy of it.
        """
        repeated = copy.copy(self)
        repeated.lengths = self.lengths.repeat_interleave(samples)
        repeated.keys_values = self.keys_values.repeat_interleave(samples, dim=2)
        return repeated

    def continue_from(self, other: KVCache, count: int) -> None:
        """Begin with a copy of the first `count` tokens of another cache of as many rows, whose
        rows all have them; this one is empty.
        """
        self.keys_values[:, :, :, :count] = other.keys_values[:, :, :, :count]
        self.lengths.fill_(count)
        self.longest = count

    def keep(self, rows: Tensor) -> None:
        """Forget all but some rows, (n,) int64 on the device, ascending; they move up in place."""
        self.lengths = self.lengths[rows]
        for layer in self.keys_values:
            layer[:, : len(rows)] = layer[:, rows]
        self.keys_values = self.keys_values[:, :, : len(rows)]


class BranchedKVCache(KVCache):
    """What several rows say behind each row of another cache, whose keys all of them see: a
    prompt's keys are stored once and, in a step, read once for all of its answers.

    Args:
        prefix: the prompts, which stay as they are.
        samples: rows of this cache behind each of them, in succession.
        capacity: tokens that each row can hold beside its prefix.
    """

    def __init__(self, config: Config, prefix: KVCache, samples: int, capacity: int):
        memory, rows = prefix.keys_values, len(prefix.lengths) * samples
        super().__init__(config, rows, capacity, memory.device, memory.dtype)
        self.prefix, self.ropes = prefix, prefix.ropes
        self.starts = prefix.lengths.repeat_interleave(samples)

    def _span(
        self, rows: slice | Tensor, slots: slice | Tensor, stop: int, lengths: Tensor | None
    ) -> Span:
        places = slots
        if isinstance(slots, slice) and slots.stop:
            places = torch.arange(slots.start, slots.stop, device=self.starts.device)
        if isinstance(places, Tensor):
            places = places + self.starts[:, None].long()
        reach = self.prefix.capacity
        span = Span(self.keys_values, rows, slots, places, reach, stop, lengths)
        return replace(span, prefix=self.prefix, starts=self.starts)


@dataclass(frozen=True)
class Span:
    """Where the tokens of one forward go, in every layer alike, made by `reserve` or `room`.

    Attributes:
        layers: the cache's memory for each layer, (2, batch, capacity, kv_heads, head_dim) or in
            pages, (2, pages, page_size, kv_heads, head_dim).
        rows: indexes the batch, or the pages: everything, or (batch, 1 or tokens).
        slots: indexes the tokens of a row or of a page: a slice, or int64 (batch, tokens).
        positions: of the tokens in their rows: a slice, or int64 (batch, tokens).
        capacity: tokens that each row of the cache can hold.
        stop: no row is longer with this span filled; None: it is not needed.
        kv_lengths: (batch,) lengths with this span filled; None if all are `stop`.
        block_table: (batch, max_pages) int32, the pages of each row; None without pages.
        prefix: what all rows of a group see before their own keys, or None.
        starts: (batch,) int32, with a prefix, the positions of the rows' first slots.
    """

    layers: Sequence[Tensor] | Tensor
    rows: slice | Tensor
    slots: slice | Tensor
    positions: slice | Tensor
    capacity: int
    stop: int | None
    kv_lengths: Tensor | None
    block_table: Tensor | None = None
    prefix: KVCache | None = None
    starts: Tensor | None = None

    def attend(
        self, attention: Callable, layer: int, q: Tensor, k: Tensor, v: Tensor, **options: Any
    ) -> Tensor:
        """Attention of q (batch, tokens, heads, head_dim) to what is `stored` of a layer."""
        if self.block_table is not None:
            options["block_table"] = self.block_table
        options |= {"causal": True, "kv_lengths": self.kv_lengths}
        if self.prefix is None:
            return attention(q, k, v, **options)
        keys, values = self.prefix.keys_values[layer, :, :, : self.prefix.longest]
        together = q.reshape(len(keys), -1, *q.shape[2:])  # all that its rows ask of a prefix
        lengths = None if self.prefix.uniform else self.prefix.lengths
        of_prefix = {"causal": False, "kv_lengths": lengths, "sink": None}
        found = attention(together, keys, values, return_lse=True, **{**options, **of_prefix})
        o, lse = attention(q, k, v, return_lse=True, **options)
        if o.is_cuda:
            o, lse, prefix, lse_prefix = (x.contiguous() for x in (o, lse, *found))
            merge(o, lse, prefix, lse_prefix)
            return o
        lse_seen = found[1].unflatten(2, (-1, q.shape[1])).transpose(1, 2).reshape(lse.shape)
        return merge_attention_states(o, lse, found[0].reshape(o.shape), lse_seen)[0]

    def stored(self, layer: int) -> tuple[Tensor, Tensor]:
        """All keys and values of a layer, (batch, stop, kv_heads, head_dim), or all its pages,
        (pages, page_size, kv_heads, head_dim): views of the cache.
        """
        keys, values = self.layers[layer][:, :, : self.stop]
        return keys, values

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store k and v (batch, tokens, kv_heads, head_dim) behind those of the same layer; returns
        what is `stored` then.

        Raises:
            ValueError: another dtype than the cache's, or tensors that want a gradient.
        """
        keys, values = self.layers[layer]
        if k.dtype != keys.dtype:
            raise ValueError(
                f"the cache is {keys.dtype} but the model computes {k.dtype}: create it with"
                f" dtype={k.dtype}"
            )
        if k.requires_grad:
            raise ValueError("a cache passes no gradients on: run the model in torch.no_grad()")
        keys[self.rows, self.slots] = k
        values[self.rows, self.slots] = v
        return keys[:, : self.stop], values[:, : self.stop]
