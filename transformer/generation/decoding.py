"""The decoding step: the newest tokens in, the next ones out, without a word from the host.

    logits = model(tokens, cache)    ->    filters, draw    ->    tokens, one more column of them

All that a step reads and writes stays on the device. On a GPU it also stays at the same place and
in the same shape, so that the step can be captured in a CUDA graph and replayed: a small model's
step is a hundred kernels of a few microseconds each, and launched one by one they wait for Python
most of the time.
"""

import math
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer.generation.row import Row
from transformer.generation.sampling import Sampling, sample, token_mask
from transformer.model.cache import KVCache
from transformer.model.decoder import Transformer
from transformer.model.kernels.decode.sample import Draws, Record, sample_into
from transformer.model.kernels.logprobs import logprobs_of
from transformer.model.paged_cache import PagedKVCache

Arrived = list[tuple[Row, list[int], list[float]]]  # tokens and scores that a row was given


@dataclass(frozen=True)
class SampleOptions:
    """How tokens are sampled, for all rows.

    Attributes:
        sampling: the filters.
        banned: tokens that are never sampled.
        logprobs: whether scores are log-probabilities, see `sampling.sample`.
    """

    sampling: Sampling
    banned: Sequence[int] = ()
    logprobs: bool = True


class Decoding:
    """What the rows of a batch have said so far.

    Args:
        cache: the prompts', as many rows as the batch has.
        logits: (B, V), the model's for the first token of every row.
        rows: whose tokens they are; `fetch` hands tokens out with them.
        at_once: the most steps of an advance.
        numbers: (B, most tokens of a row), see `uniform_numbers`; greedy needs none.
        seen: (B, V) bool, the tokens of each prompt, for a repetition penalty; changed in place.
        cuda_graph: replay a captured step. The cache is fixed then, and the model must not wait for
            the device.

    Attributes:
        newest: (B, 1) int64, the tokens that the next step is given.
        steps: forwards of the model so far.
        ahead: the most tokens that a row may have more than was fetched.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache | PagedKVCache,
        logits: Tensor,
        rows: Sequence[Row],
        options: SampleOptions,
        *,
        at_once: int,
        numbers: Tensor | None,
        seen: Tensor | None,
        cuda_graph: bool,
    ) -> None:
        device, count = logits.device, len(logits)
        self.model, self.cache, self.rows, self.options = model, cache, list(rows), options
        self.steps = self.ahead = 0
        self._numbers = None if numbers is None else numbers.to(device)
        self._banned = token_mask(tuple(options.banned), logits.shape[-1], device)
        self._seen = seen
        self._drawn = torch.zeros(count, 1, dtype=torch.int64, device=device)  # numbers of each row
        self._column = torch.zeros(count, 1, dtype=torch.int64, device=device)  # of next tokens
        self.newest = torch.zeros(count, 1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(count, at_once, dtype=torch.int64, device=device)
        self._scores = torch.zeros(count, at_once, dtype=torch.float32, device=device)
        self._with_graph = cuda_graph
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._outgrown: list[dict[int, torch.cuda.CUDAGraph]] = []  # may still be running
        self._moves = 0  # of the cache's memory, that the graphs know of
        self._sent: deque[tuple[list[Row], int, Tensor, torch.cuda.Event | None]] = deque()
        self._sample_next(logits)
        self._send(self.rows, 1, self._tokens[:, :1], self._scores[:, :1])

    @property
    def in_flight(self) -> int:
        """What was sent and not fetched yet."""
        return len(self._sent)

    def arrives(self, seconds: float) -> bool:
        """Whether the oldest in flight is there, or is there within so many seconds."""
        arrived, end = self._sent[0][-1], time.perf_counter() + seconds
        while not (there := arrived is None or arrived.query()) and time.perf_counter() < end:
            pass
        return there

    def advance(self, count: int) -> None:
        """Add `count` tokens to every row. Launches only: nothing waits for the device."""
        self._column.zero_()
        for _ in range(count):
            self._run(1)
        self._send(self.rows, count, self._tokens[:, :count], self._scores[:, :count])

    def replace(self, index: int, row: Row, logits: Tensor, numbers: Tensor | None) -> None:
        """Let another row go on in the place of one that has ended; its prompt is in the cache. Its
        logits (1, V) are those for the first token, its numbers (1, most tokens of a row).
        """
        self.rows = [*self.rows]  # what is in flight belongs to the old ones
        self.rows[index] = row
        uniform = None
        if self._numbers is not None and numbers is not None:
            self._numbers[index] = numbers[0]
            uniform = self._numbers[index, :1]
        seen = None
        if self._seen is not None:
            seen = self._seen[index : index + 1]
            seen.copy_(tokens_seen([row], seen.shape[1]))
        token, score = self._sample(logits, seen, uniform)
        self.newest[index] = token
        self._drawn[index] = 1
        if seen is not None:
            seen.scatter_(1, token[:, None], True)
        self._send([row], 1, token[:, None], score[:, None])

    def keep(self, places: Sequence[int]) -> None:
        """Go on with the rows of some places only; what is in flight still arrives for all."""
        assert isinstance(self.cache, KVCache)
        index = torch.tensor(places)
        if self.newest.is_cuda:  # from ordinary memory it would wait for what is in flight
            index = index.pin_memory().to(self.newest.device, non_blocking=True)
        self.rows = [self.rows[place] for place in places]
        self.cache.keep(index)
        self._drawn, self._column, self.newest = (
            x[index] for x in (self._drawn, self._column, self.newest)
        )
        self._tokens, self._scores = self._tokens[index], self._scores[index]
        self._numbers = None if self._numbers is None else self._numbers[index]
        self._seen = None if self._seen is None else self._seen[index]
        self._outgrown.append(self._graphs)
        self._graphs = {}

    def fetch(self) -> Arrived:
        """What the oldest advance in flight gave to each row that is still running; it waits for
        that one only.
        """
        rows, ahead, sent, arrived = self._sent.popleft()
        if arrived is not None:
            arrived.synchronize()
        self.ahead -= ahead
        running = [place for place, row in enumerate(rows) if not row.finish_reason]
        return self._read([rows[place] for place in running], sent.numpy()[running])

    def shorten(self, longest: int) -> None:
        """Tell the cache that no running row has more than so many tokens stored."""
        if not self.cache.fixed:
            self.cache.truncate(longest)

    def _read(self, rows: list[Row], sent: np.ndarray) -> Arrived:
        """Undo `_send`."""
        count = sent.shape[1] // 2
        tokens = sent[:, :count].astype(int).tolist()
        return list(zip(rows, tokens, sent[:, count:].tolist()))

    def _send(self, rows: list[Row], count: int, *columns: Tensor) -> None:
        """Let columns (rows, n), such as tokens and scores, travel to the host in one piece while
        the device goes on; they are up to `count` tokens of a row.
        """
        sent, arrived = torch.cat([column.double() for column in columns], dim=1), None
        if sent.is_cuda:
            sent, arrived = sent.to("cpu", non_blocking=True), torch.cuda.Event()
            arrived.record()
        self._sent.append((rows, count, sent, arrived))
        self.ahead += count

    def _run(self, count: int) -> None:
        """A step on so many tokens of each row: captured, if a graph of it may be."""
        self.steps += 1
        moves = getattr(self.cache, "moves", 0)
        if moves != self._moves:
            if self._graphs:
                torch.cuda.synchronize()  # what is replayed must not be destroyed
            self._graphs, self._moves = {}, moves
        if graph := self._graphs.get(count):
            graph.replay()
            return
        self._step(count)  # the first one also compiles kernels, which a capture could not
        if self._with_graph:
            self._graphs[count] = self._captured(count)

    def _step(self, count: int) -> None:
        self._sample_next(self.model(self.newest, self.cache, last_only=True)[:, -1])

    def _sample_next(self, logits: Tensor) -> None:
        """Write the next column by its logits, (B, V)."""
        sampling = self.options.sampling
        if sampling.unfiltered and logits.is_cuda:
            record = Record(self._tokens, self._scores, self.newest, self._column)
            draws = None
            if not sampling.greedy:
                assert self._numbers is not None
                draws = Draws(self._numbers, self._drawn, sampling.temperature)
            sample_into(logits, record, draws, self._banned)
            if draws is not None and self.model.kernels == "exact":
                scores = self._exact_scores(logits, self.newest[:, 0])
                self._scores.scatter_(1, self._column - 1, scores[:, None])
            return
        uniform = None
        if self._numbers is not None:
            uniform = self._numbers.gather(1, self._drawn)[:, 0]
        tokens, scores = self._sample(logits, self._seen, uniform)
        self.newest.copy_(tokens[:, None])
        self._tokens.scatter_(1, self._column, self.newest)
        self._scores.scatter_(1, self._column, scores[:, None])
        if self._seen is not None:
            self._seen.scatter_(1, self.newest, True)
        self._column += 1
        if self._numbers is not None:
            self._drawn += 1
            self._drawn.clamp_(max=self._numbers.shape[1] - 1)  # steps in vain need none

    def _sample(
        self, logits: Tensor, seen: Tensor | None, uniform: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens and scores by logits (B, V), see `sampling.sample`."""
        if self._banned is not None:
            logits = logits.masked_fill(self._banned, -math.inf)
        sampling = self.options.sampling
        tokens, scores = sample(logits, sampling, seen, uniform, self.options.logprobs)
        drawn = logits.is_cuda and sampling.unfiltered and not sampling.greedy
        if drawn and self.model.kernels == "exact":
            scores = self._exact_scores(logits, tokens)
        return tokens, scores

    def _exact_scores(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """Log-probabilities by the kernel of the trainer."""
        temperature = self.options.sampling.temperature
        return logprobs_of(logits.contiguous(), tokens, temperature, self._banned)[0]

    def _captured(self, count: int) -> torch.cuda.CUDAGraph:
        """A step as a graph; it is recorded, not run."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = capture_stream(self.newest.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Other threads, as NCCL's, may go on with what a capture forbids.
            pool, _ = capture_pool(self.newest.device)
            graph.capture_begin(pool, "thread_local")
            try:
                self._step(count)
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph


def tokens_seen(rows: Sequence[Row], vocab_size: int) -> Tensor:
    """(B, V) bool: which tokens occur in each row's prompt."""
    seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool)
    for line, row in zip(seen, rows):
        line[list(row.prompt)] = True
    return seen


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream(device)


@cache
def capture_pool(device: torch.device) -> tuple[Any, torch.cuda.CUDAGraph]:
    """The memory of all captures, and an empty graph that keeps it.

    A graph that has memory of its own leaves it to nobody: each answer would add some, until the
    GPU is full. No two graphs are replayed at the same time, so one may take what another used.
    """
    pool, keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The CUDA Graph is empty")
        with torch.cuda.graph(
            keeper, pool, capture_stream(device), capture_error_mode="thread_local"
        ):
            pass
    return pool, keeper
