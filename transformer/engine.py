"""Batched generation: prompts of any lengths in, answers and honest timings out.

    prefill   all prompts at once, padded on the left, through the model into the KV cache
    decode    one token per row and step (see `decoding`); the only wait is for the sampled tokens,
              and unless somebody reads along, a GPU is given work for many steps ahead of it

Notable: a row never depends on the rows next to it. It has a random generator, a limit and a text
of its own, and a row that has finished is still computed (the batch keeps its shape) but no longer
counted, shown or stored past the longest row that is still running.
"""

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from transformer.cache import KVCache
from transformer.chat import IncrementalDecoder, Tokenizer
from transformer.decoding import Decoding
from transformer.model import Config, Transformer
from transformer.sampling import Sampling, uniform_numbers

GREEDY = Sampling(temperature=0)
WORTH_A_GRAPH = 16  # tokens; capturing a step takes as long as launching it a few times


@dataclass(frozen=True)
class Completion:
    """One row's answer.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: what was generated, the end-of-sequence token included: training has to see it.
        text: the same as text, without the end-of-sequence token or stop string, and without a
            character that was cut off in the middle.
        finish_reason: "stop" (end-of-sequence token or stop string), "length" or "interrupted".
        logprobs: natural-log probability of each token under the distribution that it was drawn
            from (greedy: under softmax of the logits), if asked for.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None = None


@dataclass(frozen=True)
class Statistics:
    """Measurements of one batch. Seconds are wall-clock, up to the tokens' arrival on the host.

    Attributes:
        prompt_tokens: of all rows, padding excluded.
        prefill_seconds: until the first token of every row.
        generated_tokens: of all rows; a row that has finished is not counted any more.
        decoded_tokens: the same without the first token of each row, which the prefill gave.
        decode_seconds: for the decoded tokens.
        peak_memory: bytes; on a GPU what torch allocated, on the CPU the process's resident set.
    """

    prompt_tokens: int
    prefill_seconds: float
    generated_tokens: int
    decoded_tokens: int
    decode_seconds: float
    peak_memory: int

    @property
    def prompt_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def generation_rate(self) -> float:
        """Generated tokens per second, after the first of each row."""
        return self.decoded_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def __add__(self, other: "Statistics") -> "Statistics":
        return Statistics(
            self.prompt_tokens + other.prompt_tokens,
            self.prefill_seconds + other.prefill_seconds,
            self.generated_tokens + other.generated_tokens,
            self.decoded_tokens + other.decoded_tokens,
            self.decode_seconds + other.decode_seconds,
            max(self.peak_memory, other.peak_memory),
        )


class _Row:
    """The state of one answer on the host."""

    def __init__(self, prompt: Sequence[int], limit: int, tokenizer: Tokenizer) -> None:
        self.prompt_tokens = len(prompt)
        self.limit = limit
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.text = ""
        self.finish_reason = ""  # while running
        self._decoder = IncrementalDecoder(tokenizer)
        self._read = 0  # tokens
        self._shown = 0  # characters

    @property
    def stored(self) -> int:
        """Tokens in the cache: the newest token is not there yet."""
        return self.prompt_tokens + max(0, len(self.tokens) - 1)

    def take(self, tokens: Sequence[int], logprobs: Sequence[float], eos: Sequence[int]) -> None:
        """Add tokens, up to where the row ends."""
        count = min(len(tokens), self.limit - len(self.tokens))
        ended = next((n for n, token in enumerate(tokens[:count], 1) if token in eos), 0)
        self.tokens += tokens[: ended or count]
        self.logprobs += logprobs[: ended or count]
        if ended:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"

    def read(self, eos: Sequence[int] = (), stop_strings: Sequence[str] = ()) -> str:
        """Turn new tokens into text, and return what of it can now be shown.

        A stop string ends the row with the newest token, so tokens have to be read one by one then.
        """
        tokens, self._read = self.tokens[self._read :], len(self.tokens)
        ended = self.finish_reason == "stop" and tokens[-1] in eos
        self.text += self._decoder.push(tokens[:-1] if ended else tokens)
        if ended:
            self.text += self._decoder.flush()
        # Text that may yet become a stop string is held back, so a match begins in unseen text.
        matches = [self.text.find(stop, self._shown) for stop in stop_strings]
        if found := [start for start in matches if start >= 0]:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"
        return self._show(0 if self.finish_reason else held_back(self.text, stop_strings))

    def interrupt(self) -> str:
        """Finish early, keeping the text so far."""
        if self.finish_reason:
            return ""
        self.finish_reason = "interrupted"
        return self.read()

    def _show(self, held: int) -> str:
        end = len(self.text) - held
        shown, self._shown = self.text[self._shown : end], end
        return shown


def held_back(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of the text with which one of the stop strings begins."""
    longest = max((len(stop) for stop in stop_strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stop_strings):
            return length
    return 0


def generate(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = GREEDY,
    generators: Sequence[torch.Generator] = (),
    eos: Sequence[int] = (),
    stop_strings: Sequence[str] = (),
    on_text: Callable[[int, str], None] | None = None,
    logprobs: bool = False,
    samples: int = 1,
    banned: Sequence[int] = (),
    cuda_graph: bool = True,
) -> tuple[list[Completion], Statistics]:
    """Answer a batch of prompts.

    Args:
        model: on any device, in any dtype.
        tokenizer: turns tokens into the text that is streamed and searched for stop strings.
        prompts: token ids; lengths may differ.
        max_tokens: of each answer; a row also ends when it fills the model's context.
        sampling: how tokens are chosen; see row_generators for reproducible draws.
        generators: one per answer; greedy needs none. Each gives as many numbers as the
            longest answer may have tokens.
        eos: tokens that end an answer.
        stop_strings: texts that end an answer and are not part of it.
        on_text: called with (row, text) as soon as a piece of text is certain.
        logprobs: also return the log-probability of every token.
        samples: answers to each prompt, which is read once for all of them.
        banned: tokens that are never chosen: their probability is 0.
        cuda_graph: on a GPU, capture a step and replay it. The model's attention then must not wait
            for the device, nor depend on values there.

    Returns:
        `samples` completions of each prompt, in order, and the measurements. A KeyboardInterrupt
        ends the generation but not the function: rows that were not finished say "interrupted".

    Raises:
        ValueError: no prompt, an empty one, one that leaves no room in the context or holds a token
            that the model does not know; max_tokens or samples below 1; logits that are not finite.
    """
    if not prompts:
        raise ValueError("there is no prompt to answer")
    for index, prompt in enumerate(prompts):
        check_prompt(model.config, prompt, f"prompt {index}")
    if max_tokens < 1:
        raise ValueError(f"max_tokens must be at least 1, got {max_tokens}")
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")
    if "" in stop_strings:
        raise ValueError("a stop string must not be empty")
    context = model.config.max_positions
    rows = [
        _Row(p, min(max_tokens, context - len(p)), tokenizer)
        for p in prompts
        for _ in range(samples)
    ]
    if not sampling.greedy and len(generators) != len(rows):
        raise ValueError(f"{len(rows)} rows need as many generators, got {len(generators)}")
    device = model.model.embed_tokens.weight.device
    cache = KVCache(
        model.config,
        len(prompts),
        max(row.prompt_tokens + row.limit for row in rows),
        device,
        model.model.embed_tokens.weight.dtype,
    )
    longest_limit = max(row.limit for row in rows)
    numbers = None if sampling.greedy else uniform_numbers(generators, longest_limit)
    seen = None
    if sampling.repetition_penalty != 1:
        seen = _tokens_of(prompts, model.config.vocab_size).to(device)
        seen = seen.repeat_interleave(samples, dim=0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)

    watched = on_text is not None or bool(stop_strings)
    at_a_time = 1 if watched else steps_at_a_time(device)
    cuda_graph = cuda_graph and device.type == "cuda" and longest_limit > WORTH_A_GRAPH
    started = time.perf_counter()
    first_arrived = None
    try:
        with torch.no_grad():
            tokens, padding = (x if x is None else x.to(device) for x in pad_left(prompts))
            logits = model(tokens, cache, padding, last_only=True)[:, -1]
            if samples > 1:  # the prompts have been read once for all
                cache, logits = cache.repeat(samples), logits.repeat_interleave(samples, dim=0)
            if cuda_graph or at_a_time > 1:
                cache.fix()  # also lets rows go on beyond their end
            decoding = Decoding(
                model,
                cache,
                logits,
                longest_limit,
                sampling,
                numbers=numbers,
                banned=banned,
                seen=seen,
                cuda_graph=cuda_graph,
            )
            running = rows
            while True:
                arrived = decoding.fetch()
                first_arrived = first_arrived or time.perf_counter()
                for index, row in enumerate(rows):
                    if row.finish_reason:
                        continue
                    row.take(*arrived[index], eos)
                    if watched or row.finish_reason:
                        text = row.read(eos, stop_strings)
                        if text and on_text:
                            on_text(index, text)
                still_running = [row for row in running if not row.finish_reason]
                if not still_running:
                    break
                if len(still_running) < len(running) and not cache.fixed:
                    # What is left may be shorter: do not attend to, or run out of, more than that.
                    cache.truncate(max(row.stored for row in still_running))
                running = still_running
                while decoding.in_flight < (1 if at_a_time == 1 else 2):
                    decoding.advance(min(at_a_time, longest_limit - decoding.taken))
    except KeyboardInterrupt:
        for index, row in enumerate(rows):
            text = row.interrupt()
            if text and on_text:
                on_text(index, text)
    ended = time.perf_counter()
    first_arrived = first_arrived or ended

    completions = [
        Completion(
            row.prompt_tokens,
            row.tokens,
            row.text,
            row.finish_reason,
            row.logprobs if logprobs else None,
        )
        for row in rows
    ]
    statistics = Statistics(
        prompt_tokens=sum(map(len, prompts)),
        prefill_seconds=first_arrived - started,
        generated_tokens=sum(len(row.tokens) for row in rows),
        decoded_tokens=sum(max(0, len(row.tokens) - 1) for row in rows),
        decode_seconds=ended - first_arrived,
        peak_memory=peak_memory(device),
    )
    return completions, statistics


def steps_at_a_time(device: torch.device) -> int:
    """Steps between two looks of the host if nobody reads along. The last ones are in vain, which
    costs a GPU less than to stand still while the host looks.
    """
    return 16 if device.type == "cuda" else 1


def check_prompt(config: Config, prompt: Sequence[int], name: str) -> None:
    """Refuse a prompt that the model cannot answer, with a ValueError that calls it `name`."""
    if not prompt:
        raise ValueError(f"{name} has no tokens")
    if len(prompt) >= config.max_positions:
        raise ValueError(
            f"{name} has {len(prompt)} tokens, which leaves no room for an answer in the model's"
            f" context of {config.max_positions}"
        )
    if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
        raise ValueError(
            f"{name} has tokens from {min(prompt)} to {max(prompt)} but the model knows 0 to"
            f" {config.vocab_size - 1}"
        )


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Prompts as a (B, T) int64 batch, and the number of pads of each row, None if there is none.

    The pad's id does not matter: the model hides pads by their number.
    """
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(prompt) for prompt in prompts])
    batch = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    return batch, padding if padding.any() else None


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that torch allocated on a GPU, or that the process held in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB


def _tokens_of(prompts: Sequence[Sequence[int]], vocab_size: int) -> Tensor:
    """(B, V) bool: which tokens occur in each prompt."""
    seen = torch.zeros(len(prompts), vocab_size, dtype=torch.bool)
    for row, prompt in zip(seen, prompts):
        row[list(prompt)] = True
    return seen
