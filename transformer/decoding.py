"""The decoding step: the newest tokens in, the next ones out, without a word from the host.

    logits = model(tokens, cache)    ->    filters, draw    ->    tokens, one more column of them

All that a step reads and writes stays on the device. On a GPU it also stays at the same place and
in the same shape, so that the step can be captured in a CUDA graph and replayed: a small model's
step is a hundred kernels of a few microseconds each, and launched one by one they wait for Python
most of the time.
"""

import math
from collections import deque
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from transformer.cache import KVCache
from transformer.model import Transformer
from transformer.sampling import Sampling, sample


class Decoding:
    """What the rows of a batch have said so far.

    Args:
        model: what continues them.
        cache: the prompts', as many rows as the batch has.
        logits: (B, V), the model's for the first token of every row.
        steps: the most tokens of a row.
        sampling: how tokens are chosen.
        numbers: (B, steps), see `uniform_numbers`; greedy needs none.
        banned: tokens that are never chosen.
        seen: (B, V) bool, the tokens of each prompt, for a repetition penalty; changed in place.
        cuda_graph: replay a captured step. The cache is fixed then, and the model must not wait for
            the device.

    Attributes:
        taken: tokens that every row has, the first one among them.
    """

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        logits: Tensor,
        steps: int,
        sampling: Sampling,
        *,
        numbers: Tensor | None,
        banned: Sequence[int],
        seen: Tensor | None,
        cuda_graph: bool,
    ) -> None:
        device, rows = logits.device, len(logits)
        self.model, self.cache, self.steps, self.sampling = model, cache, steps, sampling
        self._numbers = None if numbers is None else numbers.to(device)
        self._banned = torch.tensor(banned, dtype=torch.int64, device=device) if banned else None
        self._seen = seen
        self._column = torch.zeros(1, dtype=torch.int64, device=device)  # of the next tokens
        self._newest = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(rows, steps, dtype=torch.int64, device=device)
        self._scores = torch.zeros(rows, steps, dtype=torch.float64, device=device)
        self._finite = torch.ones(rows, 1, dtype=torch.bool, device=device)
        self._with_graph = cuda_graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._sent: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self._choose(logits)
        self._send(0, 1)
        self.taken = 1

    def advance(self, count: int) -> None:
        """Add `count` tokens to every row. Launches only: nothing waits for the device."""
        for _ in range(count):
            if self._graph is not None:
                self._graph.replay()
                continue
            self._step()  # the first one also compiles kernels, which a capture could not
            if self._with_graph:
                self._graph = self._captured()
        self._send(self.taken, self.taken + count)
        self.taken += count

    @property
    def in_flight(self) -> int:
        """Advances, the first token among them, that were not fetched yet."""
        return len(self._sent)

    def fetch(self) -> list[tuple[list[int], list[float]]]:
        """The tokens and log-probabilities that the oldest advance in flight added to each row; it
        waits for that one only.

        Raises:
            ValueError: logits were not finite.
        """
        sent, arrived = self._sent.popleft()
        if arrived is not None:
            arrived.synchronize()
        found, count = sent.numpy(), sent.shape[1] // 2
        for row, finite in enumerate(found[:, -1]):
            if not finite:
                dtype = str(self.cache.keys_values.dtype).removeprefix("torch.")
                raise ValueError(
                    f"the model's logits for row {row} are not finite: the weights are broken,"
                    f" {dtype} overflows, which float32 may not, or the temperature or the"
                    " repetition penalty is too extreme"
                )
        return list(zip(found[:, :count].astype(int).tolist(), found[:, count:-1].tolist()))

    def _send(self, start: int, stop: int) -> None:
        """Let columns travel to the host, in one piece, while the device goes on."""
        columns = slice(start, stop)
        parts = [self._tokens[:, columns].double(), self._scores[:, columns], self._finite.double()]
        sent, arrived = torch.cat(parts, dim=1), None
        if sent.is_cuda:
            sent, arrived = sent.to("cpu", non_blocking=True), torch.cuda.Event()
            arrived.record()
        self._sent.append((sent, arrived))

    def _step(self) -> None:
        self._choose(self.model(self._newest, self.cache, last_only=True)[:, -1])

    def _choose(self, logits: Tensor) -> None:
        """Write the next column by its logits, (B, V)."""
        allowed = logits if self._banned is None else logits.index_fill(-1, self._banned, -math.inf)
        uniform = None
        if self._numbers is not None:
            uniform = self._numbers.index_select(1, self._column)[:, 0]
        tokens, logprobs, finite = sample(allowed, self.sampling, self._seen, uniform)
        self._newest.copy_(tokens[:, None])
        self._tokens.index_copy_(1, self._column, self._newest)
        self._scores.index_copy_(1, self._column, logprobs[:, None].double())
        self._finite &= (logits.isfinite().all(-1) & finite)[:, None]
        if self._seen is not None:
            self._seen.scatter_(1, self._newest, True)
        self._column += 1

    def _captured(self) -> torch.cuda.CUDAGraph:
        """A step as a graph; it is recorded, not run."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream = capture_stream(self._newest.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            # Other threads, as NCCL's, may go on with what a capture forbids.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._step()
            finally:
                graph.capture_end()
        current.wait_stream(stream)
        return graph


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream of all captures: cuBLAS keeps 32 MiB for every stream that it has seen."""
    return torch.cuda.Stream(device)
