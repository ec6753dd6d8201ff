"""What a generation cost: rates, memory, the bytes that a step reads, the share of attention.

A decoding step reads every weight and all stored keys and values once and computes next to nothing
with them, so bytes over seconds say how close it comes to the memory's bandwidth.
"""

from __future__ import annotations

import operator
import sys
import timeit
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from transformer.generation.decoding import capture_stream
from transformer.model.cache import KVCache
from transformer.model.config import Config
from transformer.model.decoder import Transformer
from transformer.model.paged_cache import PagedKVCache

MAXIMA = ("peak_memory", "cache_bytes", "rows")  # of batches one after another
ROUNDS = 5  # of a step that is timed for the share of attention


@dataclass(frozen=True)
class Statistics:
    """Measurements of one batch. Seconds are wall-clock, up to the tokens' arrival on the host.

    Attributes:
        prompt_tokens: of all rows that were read, padding excluded.
        prefill_seconds: until the first token of every row that was there at the start.
        generated_tokens: of all rows; a row that has finished is not counted any more.
        decoded_tokens: the same without the first token of each row, which the prefill gave.
        decode_seconds: for the decoded tokens.
        peak_memory: bytes; on a GPU what torch allocated, on the CPU the process's resident set.
        steps: forwards of the model for the decoded tokens; some may have been in vain.
        row_steps: forwards in which a row was running, summed over the rows.
        bytes_read: by all steps: the weights, and what running rows had in the cache.
        cache_bytes: memory for keys and values, at most.
        rows: answered at the same time, at most.
        batches: how many measurements were added up.
        attention_share: of a step's time, 0 to 1; None: not measured.
        reused_tokens: of a conversation, whose keys and values were there already.
    """

    prompt_tokens: int
    prefill_seconds: float
    generated_tokens: int
    decoded_tokens: int
    decode_seconds: float
    peak_memory: int
    steps: int = 0
    row_steps: int = 0
    bytes_read: int = 0
    cache_bytes: int = 0
    rows: int = 0
    batches: int = 1
    attention_share: float | None = None
    reused_tokens: int = 0

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return _ratio(self.prompt_tokens, self.prefill_seconds)

    @property
    def generation_rate(self) -> float:
        """Generated tokens per second, after the first of each row."""
        return _ratio(self.decoded_tokens, self.decode_seconds)

    @property
    def first_token_seconds(self) -> float:
        """Until the first token, on average over the batches."""
        return self.prefill_seconds / self.batches

    @property
    def step_seconds(self) -> float:
        """Of a step, on average."""
        return _ratio(self.decode_seconds, self.steps)

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a forward gave to a running row: 1, or more where drafts were accepted."""
        return _ratio(self.decoded_tokens, self.row_steps)

    @property
    def bandwidth(self) -> float:
        """Bytes per second that the steps read."""
        return _ratio(self.bytes_read, self.decode_seconds)

    def __add__(self, other: Statistics) -> Statistics:
        shares = [(s.attention_share, s.decode_seconds) for s in (self, other)]
        measured = [(share, seconds) for share, seconds in shares if share is not None]
        weight = sum(seconds for _, seconds in measured)
        joined = {
            name: (max if name in MAXIMA else operator.add)(value, getattr(other, name))
            for name, value in vars(self).items()
            if name != "attention_share"
        }
        share = sum(share * seconds for share, seconds in measured) / weight if weight else None
        return Statistics(**joined, attention_share=share)


def _ratio(amount: float, per: float) -> float:
    return amount / per if per else 0.0


def size_text(size: float) -> str:
    """Bytes as text, such as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB"):
        if size < 2**10:
            return f"{size:.{0 if unit == 'bytes' else 1}f} {unit}"
        size /= 2**10
    return f"{size:.1f} GiB"


def weight_bytes(model: Transformer) -> int:
    """Bytes of weights that a step reads: an embedding is looked up, unless it is the head, too; of
    the experts count those of one token, and other tokens may have others.
    """
    config, total = model.config, 0
    for name, parameter in model.named_parameters():
        experts = ".experts." in name
        share = config.experts_per_token / config.num_experts if experts else 1
        total += int(share * parameter.nbytes)
    embedding = 0 if model.config.tied_embeddings else model.model.embed_tokens.weight.nbytes
    return total - embedding


def token_bytes(config: Config, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim * dtype.itemsize


def peak_memory(device: torch.device) -> int:
    """Bytes that torch had allocated on a GPU, or the process held, at most; 0 if not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:
        return 0
    unit = 1 if sys.platform == "darwin" else 1024  # Linux counts in KiB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def attention_share(
    model: Transformer, tokens: Tensor, cache: KVCache | PagedKVCache
) -> float | None:
    """The share of a decoding step's time that attention takes, 0 to 1.

    A step's calls of the model's attention are repeated alone, on the same tensors, and timed
    against the whole step: on a GPU both as CUDA graphs, between events, so that what the host
    needs to launch kernels does not count.

    Args:
        tokens: (B, 1) int64, what the step is given.
        cache: with room for one more token; afterwards it holds what it held.

    Returns:
        The share; None if the model did not call its attention, or waits for a GPU in between.
    """
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    attend = model.attention
    lengths, longest = cache.lengths.clone(), cache.longest

    def record(*arguments: Any, **options: Any) -> Tensor:
        calls.append((arguments, options))
        return attend(*arguments, **options)

    def step() -> None:
        model(tokens, cache, last_only=True)
        cache.lengths.copy_(lengths)
        cache.longest = longest

    def attention_only() -> None:
        for arguments, options in calls:
            attend(*arguments, **options)

    with torch.no_grad():
        model.attention = record
        try:
            step()
        finally:
            model.attention = attend
        if not calls or (tokens.is_cuda and model.waits_for_device):
            return None
        return min(1.0, _seconds(attention_only, tokens.device) / _seconds(step, tokens.device))


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    """The fastest of some rounds; on a GPU, of replays as a CUDA graph."""
    if device.type != "cuda":
        return min(timeit.repeat(call, number=1, repeat=ROUNDS))
    call()  # compiles what a capture could not
    graph, stream = torch.cuda.CUDAGraph(), capture_stream(device)
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        call()
    spent = []
    for _ in range(ROUNDS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        spent.append(start.elapsed_time(end) / 1e3)
    return min(spent)
