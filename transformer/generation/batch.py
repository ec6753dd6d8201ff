"""The loop of a generation: prompts in, steps launched, tokens handed out, places given again.

The host looks at the tokens of an advance while the device works on the next one. A row that has
ended stays in its place, where the device goes on with it in vain, until half of the rows have: the
others then go on by themselves. Pages are taken back, and given with the place to a row that waits.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from transformer.generation.decoding import Decoding, SampleOptions, tokens_seen
from transformer.generation.prompt_lookup import PromptLookupDecoding
from transformer.generation.row import Completion, Row
from transformer.generation.sampling import uniform_numbers
from transformer.generation.stats import (
    Statistics,
    attention_share,
    peak_memory,
    size_text,
    token_bytes,
    weight_bytes,
)
from transformer.model.cache import BranchedKVCache, KVCache
from transformer.model.decoder import Transformer
from transformer.model.kernels.startup import compiling
from transformer.model.paged_cache import PagedKVCache

PREFILL_CHUNK = 16384  # tokens of all rows in a forward: enough to keep a GPU busy
FEW_ROWS = 256  # a GPU's step takes as long for fewer
SOON = 1e-3  # seconds, of which launching and capturing a step takes more
WORTH_A_GRAPH = 16  # tokens; capturing a step takes as long as launching it a few times


@dataclass(frozen=True)
class EngineOptions:
    """How the engine goes about it. Up to rounding, no answer depends on it.

    Attributes:
        prefill_chunk: prompts are read in forwards of at most so many tokens, pads included, or of
            one token of each row: their activations take no more memory than that.
        page_size: keep keys and values in pages of so many tokens, see `paged_cache`; None: in a
            rectangle of the longest row that there may be. The attention must take a block_table.
        prompt_lookup: propose so many tokens a step by looking them up in the row's own text, see
            `prompt_lookup`; 0: none. Greedy only, without a repetition penalty.
        measure_attention: also measure its share of a step.
        shared_prefix: with several answers to each prompt, store and read its keys once for all of
            them, unless an answer may fill the context; else each answer has a copy.
        cuda_graph: on a GPU, capture a step and replay it, unless the model waits for the device.
            Its attention must not, nor depend on values there.

    Raises:
        ValueError: a number that is too small.
    """

    prefill_chunk: int = PREFILL_CHUNK
    page_size: int | None = None
    prompt_lookup: int = 0
    measure_attention: bool = False
    shared_prefix: bool = False
    cuda_graph: bool = True

    def __post_init__(self) -> None:
        refuse_below_one(prefill_chunk=self.prefill_chunk, page_size=self.page_size)
        if self.prompt_lookup < 0:
            raise ValueError(f"prompt lookup must be at least 0, got {self.prompt_lookup}")


def refuse_below_one(**counts: int | None) -> None:
    """Raise a ValueError for a count below 1, by its name; None is no count."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")


@dataclass
class Kept:
    """What the model has read of a conversation: the next prompt is read from where it differs.

    Attributes:
        tokens: those whose keys and values are in the cache.
        cache: of one row, which may hold more; None: nothing is kept.
    """

    tokens: list[int] = field(default_factory=list)
    cache: KVCache | None = None

    def move_to(self, cache: KVCache, prompt: Sequence[int]) -> int:
        """Let an empty cache begin with what it shares with a prompt, all but the prompt's last
        token at most; the number of these tokens. Nothing is kept here any more.

        They share nothing if keys turn otherwise in the longer text.
        """
        count = len(commonprefix([self.tokens, [*prompt[:-1]]]))
        if self.cache is not None and self.cache.ropes != cache.ropes:
            count = 0
        if self.cache is not None and count:
            cache.continue_from(self.cache, count)
        self.tokens, self.cache = [], None
        return count


@dataclass(eq=False)
class Batch:
    """Rows on their way through the model: those that have a place, and those that wait for one.

    Attributes:
        rows: the answers, those to one prompt in succession.
        generators: one for each row; greedy needs none.
        together: rows that are answered at the same time.
        samples: rows to each prompt.
        watched: somebody reads along, or looks for a text that ends the answer.
        kept: of the conversation before the only row, which `keep` adds to; not with pages.
    """

    model: Transformer
    rows: Sequence[Row]
    options: SampleOptions
    generators: Sequence[torch.Generator]
    together: int
    samples: int
    watched: bool
    engine: EngineOptions
    kept: Kept | None = None

    def __post_init__(self) -> None:
        engine, weight = self.engine, self.model.model.embed_tokens.weight
        self.device, self.dtype = weight.device, weight.dtype
        on_gpu = self.device.type == "cuda"
        self.places = list(self.rows[: self.together])
        self.waiting, self.together = deque(self.rows[self.together :]), len(self.places)
        self.reused = 0  # tokens of the prompt that need not be read again
        self.limit = max(row.limit for row in self.rows)
        longest = max(len(row.prompt) + row.limit for row in self.rows)
        self.capacity = min(longest + engine.prompt_lookup, self.model.config.max_positions)
        self.cuda_graph = engine.cuda_graph and on_gpu and self.limit > WORTH_A_GRAPH
        self.cuda_graph = self.cuda_graph and not self.model.waits_for_device
        self.at_a_time = 1 if self.watched or engine.prompt_lookup else steps_at_a_time(self.device)
        # Steps go on beyond a row's end before the host looks, which a fixed cache allows.
        self.fixed = self.cuda_graph or self.at_a_time > 1 or engine.page_size is not None
        self.unmeasured = engine.measure_attention
        self.attention_share: float | None = None
        self.cache: KVCache | PagedKVCache | None = None
        self.decoding: Decoding | None = None
        self.began = time.perf_counter()
        self.first_arrived: float | None = None
        self.paused = 0.0  # seconds that were spent on measuring
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)

    def run(
        self,
        on_text: Callable[[int, str], None] | None,
        on_end: Callable[[int, Completion], None] | None,
    ) -> None:
        """Go on until every row has ended; see `engine.generate` for the two callbacks."""
        with torch.no_grad():
            decoding = self.decoding = self._start()
            while running := [row for row in self.places if not row.finish_reason]:
                # What is left may be shorter: do not attend to, or run out of, more than that.
                decoding.shorten(max(row.stored for row in running))
                self._leave_ended(decoding, len(running))
                left = max(row.limit - len(row.tokens) for row in running)
                # The first token does not wait for the first step, unless kernels are compiled.
                first = self.first_arrived is None and not compiling.now
                most = 1 if not self.fixed or (first and decoding.arrives(SOON)) else 2
                while decoding.in_flight < most:
                    unasked = left - decoding.ahead
                    if unasked < 1 and decoding.in_flight:
                        break
                    self._advance(decoding, max(1, min(unasked, self.at_a_time)))
                arrived = decoding.fetch()
                compiling.end()
                self.first_arrived = self.first_arrived or time.perf_counter()
                for row, tokens, scores in arrived:
                    self._hand_out(row, tokens, scores, on_text)
                    if row.finish_reason and on_end:
                        on_end(row.index, row.completion(self.options.logprobs))
                if self.unmeasured and any(row.finish_reason for row in self.places):
                    self._measure(decoding)
                if self.engine.page_size is not None:
                    self._replace_ended(decoding)

    def _start(self) -> Decoding:
        """Read the prompts of all places, and choose the first token of each."""
        size = (self.capacity, self.device, self.dtype)
        prompts = [row.prompt for row in self.places[:: self.samples]]
        if self.engine.page_size is None:
            self.cache = KVCache(self.model.config, len(prompts), *size)
            if self.kept is not None:
                self.reused = self.kept.move_to(self.cache, prompts[0])
                prompts = [prompts[0][self.reused :]]
        else:
            self.cache = PagedKVCache(self.model.config, len(prompts), *size, self.engine.page_size)
            self.cache.allocate([len(prompt) for prompt in prompts])
        logits = prefill(self.model, self.cache, prompts, self.engine.prefill_chunk)
        if self.samples > 1 and isinstance(self.cache, KVCache):  # prompts are read once for all
            config, fits = self.model.config, self.cache.longest + self.limit <= self.capacity
            if self.engine.shared_prefix and fits and not self.engine.prompt_lookup:
                self.cache = BranchedKVCache(config, self.cache, self.samples, self.limit)
            else:
                self.cache = self.cache.repeat(self.samples)
            logits = logits.repeat_interleave(self.samples, dim=0)
        if self.fixed:
            self.cache.fix()
        seen = None
        if self.options.sampling.repetition_penalty != 1:
            seen = tokens_seen(self.places, self.model.config.vocab_size).to(self.device)
        start: Any = Decoding
        if drafts := self.engine.prompt_lookup:
            start = partial(PromptLookupDecoding, drafts=drafts)
        return start(
            self.model, self.cache, logits, self.places, self.options, at_once=self.at_a_time,
            numbers=self._numbers(self.places), seen=seen, cuda_graph=self.cuda_graph,
        )  # fmt: skip

    def _numbers(self, rows: Sequence[Row]) -> Tensor | None:
        """The random numbers of some rows; greedy needs none."""
        if self.options.sampling.greedy:
            return None
        return uniform_numbers([self.generators[row.index] for row in rows], self.limit)

    def _hand_out(
        self,
        row: Row,
        tokens: Sequence[int],
        scores: Sequence[float],
        on_text: Callable[[int, str], None] | None,
    ) -> None:
        """Give a row what a look of the host found; one by one if somebody reads along."""
        before = len(row.tokens)
        size = 1 if self.watched else len(tokens)
        for start in range(0, len(tokens), size):
            row.take(tokens[start : start + size], scores[start : start + size])
            if self.watched or row.finish_reason:
                text = row.read()
                if text and on_text:
                    on_text(row.index, text)
            if row.finish_reason:
                break
        if before:  # the first token came from the prefill
            row.steps += 1 if self.engine.prompt_lookup else len(row.tokens) - before

    def _replace_ended(self, decoding: Decoding) -> None:
        """Take the pages of rows that have ended, and read the prompts that wait for a place."""
        assert isinstance(self.cache, PagedKVCache)
        for place, row in enumerate(self.places):
            if not row.finish_reason:
                continue
            self.cache.release(place)
            if self.waiting:
                new = self.places[place] = self.waiting.popleft()
                self.cache.allocate(
                    [len(new.prompt) if i == place else 0 for i in range(len(self.places))]
                )
                cache = self.cache.row(place)
                logits = prefill(self.model, cache, [new.prompt], self.engine.prefill_chunk)
                decoding.replace(place, new, logits, self._numbers([new]))

    def _leave_ended(self, decoding: Decoding, running: int) -> None:
        """Go on with half of the rows, or half of these, if no more are running. The sizes of a
        batch are always the same ones then, for which kernels are compiled and products planned.
        """
        if self.engine.page_size is not None or self.engine.prompt_lookup:
            return
        if isinstance(self.cache, BranchedKVCache):  # whose groups are equally large
            return
        size, least = len(self.places), FEW_ROWS if self.device.type == "cuda" else 1
        while running <= size // 2 and size > least:
            size -= size // 2
        if size == len(self.places):
            return
        spare = size - running
        kept = []
        for place, row in enumerate(self.places):
            if row.finish_reason and spare:
                spare -= 1
            elif row.finish_reason:
                continue
            kept.append(place)
        decoding.keep(kept)
        self.places = [self.places[place] for place in kept]

    def _advance(self, decoding: Decoding, steps: int) -> None:
        """Launch some steps; pages that they fill are given out before."""
        if isinstance(self.cache, PagedKVCache):
            # Drafts that fail may get lost.
            ahead = decoding.ahead + steps * (1 + self.engine.prompt_lookup)
            most = [min(x.stored + ahead, len(x.prompt) + x.limit - 1) for x in self.places]
            self.cache.allocate([0 if x.finish_reason else n for x, n in zip(self.places, most)])
        decoding.advance(steps)

    def _measure(self, decoding: Decoding) -> None:
        """Measure the share of attention, once, while the rows are still in the cache."""
        assert self.cache is not None
        began = time.perf_counter()
        decoding.shorten(max(row.stored for row in self.places))  # there is room for a token
        self.attention_share = attention_share(self.model, decoding.newest, self.cache)
        self.unmeasured = False
        self.paused = time.perf_counter() - began

    def keep(self) -> None:
        """Remember what was read and said, if anything was."""
        if self.kept is not None and self.decoding is not None and isinstance(self.cache, KVCache):
            [row] = self.rows
            # Steps in vain may have written to the last slots of a full cache.
            safe = self.capacity - 1 - self.engine.prompt_lookup
            self.kept.tokens = [*row.prompt, *row.tokens][: min(row.stored, safe)]
            self.kept.cache = self.cache

    def statistics(self) -> Statistics:
        """What it cost so far."""
        ended = time.perf_counter() - self.paused
        first_arrived = self.first_arrived or ended
        steps = self.decoding.steps if self.decoding else 0
        # A step reads what is stored with its own token, which is half of the answer on average.
        stored = sum(row.steps * (len(row.prompt) + len(row.tokens) / 2) for row in self.rows)
        per_token = token_bytes(self.model.config, self.dtype)
        return Statistics(
            prompt_tokens=sum(len(x.prompt) for x in self.rows[:: self.samples]) - self.reused,
            reused_tokens=self.reused,
            prefill_seconds=first_arrived - self.began,
            generated_tokens=sum(len(row.tokens) for row in self.rows),
            decoded_tokens=sum(max(0, len(row.tokens) - 1) for row in self.rows),
            decode_seconds=ended - first_arrived,
            peak_memory=peak_memory(self.device),
            steps=steps,
            row_steps=sum(row.steps for row in self.rows),
            bytes_read=steps * weight_bytes(self.model) + int(stored * per_token),
            cache_bytes=self.cache.nbytes if self.cache else 0,
            rows=self.together,
            attention_share=self.attention_share,
        )

    def full_memory(self) -> str:
        """A sentence for a full memory: how large the cache is that was asked for."""
        per_token = token_bytes(self.model.config, self.dtype)
        if isinstance(self.cache, PagedKVCache):
            rows, size = f"{len(self.places)} rows in pages", self.cache.asked
        else:
            rows = f"{len(self.places)} rows of {self.capacity} tokens"
            size = len(self.places) * self.capacity * per_token
        weights = sum(parameter.nbytes for parameter in self.model.parameters())
        return (
            f"the memory of {self.device} is full: the cache of {rows} takes {size_text(size)},"
            f" {size_text(per_token)} for each token, beside {size_text(weights)} of weights"
        )


def prefill(
    model: Transformer, cache: KVCache | PagedKVCache, prompts: Sequence[Sequence[int]], chunk: int
) -> Tensor:
    """Read prompts behind what a cache holds, in forwards of at most `chunk` tokens of all rows,
    pads included, or of one token of each row.

    Returns:
        (B, V), the logits of each row's next token.
    """
    tokens, padding = pad_left(prompts)
    tokens = tokens.to(cache.lengths.device)
    padding = None if padding is None else padding.to(tokens.device)
    columns = max(1, chunk // len(prompts))
    for start in range(0, tokens.shape[1], columns):
        part = tokens[:, start : start + columns]
        pads = None if padding is None else (padding - start).clamp(0, part.shape[1])
        logits = model(part, cache, pads, last_only=True)
    return logits[:, -1]


def steps_at_a_time(device: torch.device) -> int:
    """Steps between two looks of the host if nobody reads along. The last ones are in vain, which
    costs a GPU less than to stand still while the host looks.
    """
    return 16 if device.type == "cuda" else 1


def pad_left(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor | None]:
    """Prompts as a (B, T) int64 batch, and the number of pads of each row, None if there is none.

    The pad's id does not matter: the model hides pads by their number.
    """
    rows = [torch.tensor(prompt) for prompt in prompts]
    batch = pad_sequence(rows, batch_first=True, padding_side="left")
    padding = batch.shape[1] - torch.tensor([*map(len, prompts)])
    return batch, padding if padding.any() else None
