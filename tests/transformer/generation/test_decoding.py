"""Decoding: however the engine goes about it, answers are the same; a cache of fixed shape, a CUDA
graph.
"""

from functools import partial

import pytest
import torch

import flash_versions
from tests.helpers.models.tiny_model import CONFIG, CONTEXT, END, PROMPTS, assert_same_answers
from transformer.generation import batch
from transformer.generation.engine import GREEDY, EngineOptions, generate, pad_left
from transformer.generation.sampling import Sampling, row_generators
from transformer.model.cache import KVCache
from transformer.model.weights import load_model

LONG = list(range(CONTEXT - 6))  # leaves room for six tokens
REPEATING = [65, 66, 67, 68] * 6
MANY = [*PROMPTS, LONG, REPEATING, *[[7 + i] * (1 + 5 * i) for i in range(6)]]
ALIKE = [REPEATING, REPEATING[::-1], *[LONG[i : i + 24] for i in range(0, 96, 12)]]
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(),
    "penalised": Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.3),
}
# What else the engine is told: options of `generate`, steps between two looks of the host, whether
# the cache is fixed, as on a GPU, and whether prompts are of one length.
OTHERS = {"samples": 1, "at_once": None, "steps": 1, "fixed": False, "alike": False}
WAYS = [  # how a token is sampled, and options of the engine and others
    ("greedy", {"steps": 3}),
    ("sampled", {"steps": 100}),
    ("penalised", {"steps": 3}),
    ("sampled", {"prefill_chunk": 1}),
    ("greedy", {"prefill_chunk": 90}),
    ("sampled", {"at_once": 3}),
    ("penalised", {"samples": 3}),
    ("sampled", {"samples": 2, "at_once": 5, "steps": 16}),
    ("sampled", {"samples": 3, "shared_prefix": True, "alike": True}),
    ("greedy", {"prompt_lookup": 1}),
    ("greedy", {"prompt_lookup": 8, "alike": True}),
    ("greedy", {"prompt_lookup": 3, "fixed": True}),
    ("greedy", {"page_size": 8}),
    ("penalised", {"page_size": 8, "at_once": 3}),
    ("penalised", {"page_size": 8, "at_once": 2, "steps": 16}),
    ("greedy", {"page_size": 4, "at_once": 2, "prompt_lookup": 3}),
]


def answers(model, tokenizer, prompts=MANY, sampling=GREEDY, **options):
    """Completions of each prompt, of many lengths."""
    options = {"max_tokens": 30, "eos": (END, *range(20)), "logprobs": True, "samples": 1} | options
    if not sampling.greedy:
        options["generators"] = row_generators(3, options["samples"] * len(prompts))
    return generate(model, tokenizer, prompts, sampling=sampling, **options)


@pytest.mark.parametrize(("sampling", "way"), WAYS, ids=str)
def test_no_answer_depends_on_how_the_engine_goes_about_it(
    monkeypatch, folder, model, tokenizer, sampling, way
):
    """Chunks may hold pads only, rows take each other's places, a look finds steps beyond a row's
    end, drafts may end in pages that a row does not have.
    """
    samples, at_once, steps, fixed, alike = (way.get(*other) for other in OTHERS.items())
    engine = EngineOptions(**{name: way[name] for name in way.keys() - OTHERS.keys()})
    prompts, sampling = ALIKE if alike else MANY, SAMPLINGS[sampling]
    copies = [prompt for prompt in prompts for _ in range(samples)]
    expected, counted = answers(model, tokenizer, copies, sampling)
    if engine.page_size or engine.shared_prefix:
        model = load_model(folder, partial(flash_versions.attention, version="reference"))
    monkeypatch.setattr(batch, "steps_at_a_time", lambda device: steps)
    if fixed:
        monkeypatch.setattr(
            batch.Batch, "fixed", property(lambda self: True, lambda *_: None), raising=False
        )
    forwards, shown, ended = [], [""] * len(copies), {}

    def show(row, text):
        shown[row] += text

    hook = model.register_forward_pre_hook(lambda _, given: forwards.append(given[0].shape))
    options = {"samples": samples, "at_once": at_once, "engine": engine}
    options |= {"on_end": ended.__setitem__, "on_text": show if steps == 1 else None}
    found, statistics = answers(model, tokenizer, prompts, sampling, **options)
    hook.remove()
    assert len({len(completion.tokens) for completion in expected}) > 2
    assert_same_answers(found, expected, 1e-4 if engine.page_size else 1e-5)
    assert [ended[row] for row in range(len(copies))] == found
    assert steps > 1 or shown == [completion.text for completion in expected]
    rows = (at_once or len(copies)) // samples * samples
    first = prompts[: rows // samples]  # each is read once
    width = max(1, engine.prefill_chunk // len(first))
    assert forwards[0] == (len(first), min(max(map(len, first)), width))
    assert statistics.rows == rows
    assert statistics.batches == (1 if engine.page_size else -(-len(copies) // rows))
    assert statistics.prompt_tokens == sum(map(len, prompts))
    assert statistics.generated_tokens == counted.generated_tokens
    assert (statistics.tokens_per_forward > 1) == (engine.prompt_lookup > 0)


def test_a_fixed_cache_gives_the_same_logits(model):
    """Whatever the lengths; and what a full row does after its end disturbs nobody."""
    tokens, padding = pad_left([*PROMPTS, LONG])
    free, fixed = (KVCache(CONFIG, len(tokens), CONTEXT) for _ in range(2))
    step = torch.tensor([[65], [66], [67], [68], [69]])
    with torch.no_grad():
        for cache in (free, fixed):
            model(tokens, cache, padding, last_only=True)
        fixed.fix()
        for number in range(10):
            found = model(step, fixed, last_only=True)
            if number == 6:  # the long row is full
                free.truncate(free.longest - 6)
            expected = model(step, free, last_only=True)
            rows = slice(None) if number < 6 else slice(0, 4)
            torch.testing.assert_close(found[rows], expected[rows], rtol=1e-5, atol=1e-5)
            assert found.isfinite().all()
    assert fixed.lengths.tolist()[-1] == CONTEXT
    fixed.truncate(2)
    assert not fixed.fixed and fixed.longest == 2 and fixed.lengths.tolist() == [2] * 5


@pytest.mark.parametrize("fixed", [False, True], ids=["free", "fixed"])
def test_kept_rows_go_on_as_if_the_others_were_there(model, fixed):
    tokens, padding = pad_left(PROMPTS)
    all_rows, some = (KVCache(model.config, len(tokens), CONTEXT) for _ in range(2))
    kept = torch.tensor([0, 2, 3])
    steps = torch.randint(0, 256, (2, len(tokens), 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for cache in (all_rows, some):
            model(tokens, cache, padding, last_only=True)
            if fixed:
                cache.fix()
        size = some.nbytes
        some.keep(kept)
        for step in steps:
            expected = model(step, all_rows, last_only=True)[kept]
            found = model(step[kept], some, last_only=True)
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(some.lengths, all_rows.lengths[kept]) and some.nbytes == size


# On a GPU


@pytest.fixture(scope="module")
def on_gpu(folder):
    """Load the checkpoint there, with a version of attention."""
    return lambda version, dtype=torch.float32: load_model(
        folder, partial(flash_versions.attention, version=version), torch.device("cuda"), dtype
    )


ON_GPU = [
    *[(version, sampling, {}) for version in ("sdpa", "fa2", "fa3") for sampling in SAMPLINGS],
    # Pages so small that the pool grows while a captured step is replayed.
    *[("fa2", x, {"page_size": 4, "at_once": n}) for x in SAMPLINGS for n in (None, 3)],
    *[(version, "greedy", {"prompt_lookup": 4}) for version in ("sdpa", "fa3")],
]


@pytest.mark.gpu
@pytest.mark.parametrize(("version", "sampling", "way"), ON_GPU, ids=str)
def test_a_graph_says_what_launches_say(on_gpu, tokenizer, version, sampling, way):
    """Also while rows come and go."""
    model, sampling = on_gpu(version), SAMPLINGS[sampling]
    plain = EngineOptions(cuda_graph=False)
    expected, _ = answers(model, tokenizer, sampling=sampling, engine=plain)
    told = {name: way[name] for name in way.keys() - OTHERS.keys()}
    options = {"sampling": sampling, "at_once": way.get("at_once")}
    for cuda_graph in (False, True):
        engine = EngineOptions(**told, cuda_graph=cuda_graph)
        found, statistics = answers(model, tokenizer, engine=engine, **options)
        assert_same_answers(found, expected, 1e-4)
        assert (statistics.tokens_per_forward > 1) == (engine.prompt_lookup > 0)


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["fa2", "fa3"])
def test_a_step_is_replayed_and_not_launched(on_gpu, tokenizer, version):
    """The model is called for the prompt, for a step, and for the capture of one."""
    model, calls = on_gpu(version, torch.bfloat16), []
    model.register_forward_pre_hook(lambda _, inputs: calls.append(tuple(inputs[0].shape)))
    options = {"sampling": Sampling(), "samples": 2, "max_tokens": 100, "eos": (END,)}
    completions, _ = answers(model, tokenizer, PROMPTS, **options)
    assert max(len(completion.tokens) for completion in completions) > 50
    assert calls == [(4, 20), (8, 1), (8, 1)]
