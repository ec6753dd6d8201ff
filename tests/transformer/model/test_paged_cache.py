"""A cache in pages: the same logits and answers, from the memory that is needed."""

from functools import partial

import pytest
import torch

import flash_versions
from tests.helpers.models.tiny_model import CONFIG, CONTEXT, PROMPTS
from tests.transformer.generation.test_decoding import LONG, answers
from transformer.generation.batch import prefill
from transformer.generation.engine import EngineOptions
from transformer.model.cache import KVCache
from transformer.model.paged_cache import PagedKVCache
from transformer.model.weights import load_model


@pytest.fixture(scope="module")
def paged_model(folder):
    """The tiny model with attention that takes pages."""
    return load_model(folder, partial(flash_versions.attention, version="reference"))


def fill(cache):
    """Let everything that nobody wrote be what must never be seen."""
    for layer, pool in enumerate(cache.pools):
        cache.pools[layer] = torch.full_like(pool, 1e3)


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 10**6), (3, 20), (200, 20)])
def test_pages_give_the_logits_of_a_rectangle(model, paged_model, page_size, chunk):
    prompts = [*PROMPTS, LONG]
    steps = torch.randint(CONFIG.vocab_size, (5, len(prompts), 1))
    paged = PagedKVCache(CONFIG, len(prompts), CONTEXT, page_size=page_size)
    paged.allocate([len(prompt) for prompt in prompts])
    fill(paged)
    rectangle = KVCache(CONFIG, len(prompts), CONTEXT)
    with torch.no_grad():
        found = [prefill(paged_model, paged, prompts, chunk)]
        expected = [prefill(model, rectangle, prompts, 10**6)]
        for number, step in enumerate(steps):
            paged.allocate([len(prompt) + number + 1 for prompt in prompts])
            found.append(paged_model(step, paged)[:, -1])
            expected.append(model(step, rectangle)[:, -1])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert paged.lengths.tolist() == rectangle.lengths.tolist()


def test_memory_is_what_is_stored(paged_model, tokenizer):
    """One row in ten is long; and what ended rows held is used again."""
    prompts = [LONG] + [[65]] * 19
    paged = EngineOptions(page_size=8)
    _, statistics = answers(paged_model, tokenizer, prompts, max_tokens=6, engine=paged, at_once=10)
    needed = CONTEXT // 8 + 9  # pages: the long row, and one for each of the others
    assert statistics.cache_bytes < 1.6 * (needed + 1) * 8 * 2 * 2 * 16 * 4
    assert statistics.cache_bytes < 0.3 * KVCache(CONFIG, 10, CONTEXT).nbytes


def test_pages_are_given_taken_back_and_given_again():
    cache = PagedKVCache(CONFIG, 3, 100, page_size=10)
    cache.allocate([25, 1, 0])
    table = cache.table.tolist()
    assert [len([page for page in row if page]) for row in table] == [3, 1, 0]
    assert len({page for row in table for page in row if page}) == 4
    cache.allocate([0, 10, 0])  # keeps what it has, and needs no more
    assert cache.table.tolist() == table and (cache.table > 0).sum() == 4
    moves, freed = cache.moves, {page for page in table[0] if page}
    cache.release(0)
    assert cache.table[0].tolist() == [0] * 10 and (cache.table > 0).sum() == 1
    cache.allocate([0, 0, 30])
    assert {*cache.table[2].tolist()} - {0} == freed and cache.moves == moves
    with pytest.raises(ValueError, match="a row of the cache holds 100 tokens, not 101"):
        cache.allocate([0, 101, 0])
    cache.reserve(98)
    with pytest.raises(ValueError, match="the cache holds 100 tokens and 98 are stored: 3 more"):
        cache.reserve(3)


def test_a_pool_that_grows_keeps_what_it_holds():
    cache = PagedKVCache(CONFIG, 2, 100, page_size=4)
    cache.allocate([4, 0])
    stored = torch.randn(2, 4, 1, CONFIG.num_kv_heads, CONFIG.head_dim)
    for layer in range(CONFIG.num_layers):
        cache.pools[layer][:, cache.table[0, 0]] = stored[:, :, 0]
    before, moves = cache.nbytes, cache.moves
    cache.allocate([4, 100])
    assert cache.moves == moves + 1 and cache.nbytes > before
    assert cache.asked == cache.nbytes
    for pool in cache.pools:
        assert torch.equal(pool[:, cache.table[0, 0]], stored[:, :, 0])
        assert pool.isfinite().all()
