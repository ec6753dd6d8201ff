"""Batched generation: prompts of any lengths in, answers and honest timings out.

    generate    prompts in batches, one after another; with pages, in one batch that gives its
                places again
    batch       the loop over the steps of a batch. First its prompts, padded on the left, go
                through the model into the KV cache, in chunks of bounded size
    decoding    a step: one token for each row. The only wait is for the sampled tokens, and unless
                somebody reads along, a GPU is given work for many steps ahead of it

All others, such as `Session` and the command, call `generate`; a long file does so part by part,
so that not all of its answers are in memory.

Notable: a row never depends on the rows next to it. It has a random generator, a limit and a text
of its own, and a row that has finished is no longer counted or shown.
"""

from collections.abc import Callable, Sequence

import torch

from transformer.generation.batch import Batch, EngineOptions, Kept, pad_left, refuse_below_one
from transformer.generation.chat import Tokenizer
from transformer.generation.command import out_of_memory
from transformer.generation.decoding import SampleOptions
from transformer.generation.prompt_lookup import check_prompt_lookup
from transformer.generation.row import Completion, Row
from transformer.generation.sampling import Sampling
from transformer.generation.stats import Statistics
from transformer.model.decoder import Config, Transformer

__all__ = [
    "Completion", "EngineOptions", "GREEDY", "Kept", "Statistics", "check_prompt", "generate",
    "pad_left",
]  # fmt: skip

GREEDY = Sampling(temperature=0)


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
    on_end: Callable[[int, Completion], None] | None = None,
    logprobs: bool = False,
    samples: int = 1,
    banned: Sequence[int] = (),
    at_once: int | None = None,
    kept: Kept | None = None,
    engine: EngineOptions = EngineOptions(),  # noqa: B008  (frozen)
) -> tuple[list[Completion], Statistics]:
    """Answer a batch of prompts.

    Args:
        model: on any device, in any dtype.
        tokenizer: turns tokens into the text that is streamed and searched for stop strings.
        prompts: token ids; lengths may differ.
        max_tokens: of each answer; a row also ends when it fills the model's context.
        sampling: how tokens are sampled; see row_generators for reproducible draws.
        generators: one per answer; greedy needs none. Each gives as many numbers as the
            longest answer may have tokens.
        eos: tokens that end an answer.
        stop_strings: texts that end an answer and are not part of it.
        on_text: called with (row, text) as soon as a piece of text is certain.
        on_end: called with (row, completion) as soon as an answer has ended by itself.
        logprobs: also return the log-probability of every token.
        samples: answers to each prompt, which is read once for all of them.
        banned: tokens that are never sampled: their probability is 0.
        at_once: rows that are answered at the same time; None: all. The other prompts wait: with
            pages, each takes the place of a row that has ended; else they are the next batch.
        kept: for a single prompt that continues a conversation: what the model has read of it. It
            is not read again, and what is read and said now is added. Pages keep nothing.
        engine: how the engine goes about it.

    Returns:
        `samples` completions of each prompt, in order, and the measurements. A KeyboardInterrupt
        ends the generation but not the function: rows that were not finished say "interrupted".

    Raises:
        ValueError: no prompt, an empty one, one that leaves no room in the context or holds a token
            that the model does not know; a number that is too small; options that exclude each
            other; logits that are not finite.
        MemoryError: the memory is full; the sentence says how large the cache is.
    """
    if not prompts:
        raise ValueError("there is no prompt to answer")
    for index, prompt in enumerate(prompts):
        check_prompt(model.config, prompt, f"prompt {index}")
    refuse_below_one(max_tokens=max_tokens, samples=samples, at_once=at_once)
    if "" in stop_strings:
        raise ValueError("a stop string must not be empty")
    if engine.page_size is not None and samples > 1:
        raise ValueError("samples share a prompt's keys, which pages do not: leave page_size out")
    if kept is not None and (len(prompts), samples) != (1, 1):
        raise ValueError(f"a conversation continues with one answer, not {len(prompts) * samples}")
    check_prompt_lookup(engine.prompt_lookup, sampling)
    trained, longest = model.config.trained_positions, max(map(len, prompts)) + max_tokens
    if model.kernels == "exact" and trained < min(longest, model.config.max_positions):
        raise ValueError(
            f"exact answers end at {trained} tokens, beyond which this model's rotary embedding"
            f" depends on the longest text of a batch; a prompt and max_tokens are {longest}"
        )
    limits = [min(max_tokens, model.config.max_positions - len(p)) for p in prompts]
    rows = [
        Row(samples * i + n, prompt, limit, tokenizer, eos, stop_strings)
        for i, (prompt, limit) in enumerate(zip(prompts, limits))
        for n in range(samples)
    ]
    if not sampling.greedy and len(generators) != len(rows):
        raise ValueError(f"{len(rows)} rows need as many generators, got {len(generators)}")
    places = max(samples, at_once - at_once % samples) if at_once else len(rows)
    size, measured = places if engine.page_size is None else len(rows), list[Statistics]()
    for start in range(0, len(rows), size):
        batch = Batch(
            model,
            rows[start : start + size],
            SampleOptions(sampling, banned, logprobs),
            generators,
            together=places,
            samples=samples,
            watched=on_text is not None or bool(stop_strings),
            engine=engine,
            kept=kept,
        )
        try:
            batch.run(on_text, on_end)
        except KeyboardInterrupt:
            for row in rows:
                text = row.interrupt()
                if text and on_text:
                    on_text(row.index, text)
        except (MemoryError, RuntimeError) as error:
            if not out_of_memory(error):
                raise
            raise MemoryError(batch.full_memory()) from error
        batch.keep()
        measured.append(batch.statistics())
        if rows[-1].finish_reason == "interrupted":
            break
    return [row.completion(logprobs) for row in rows], sum(measured[1:], measured[0])


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
