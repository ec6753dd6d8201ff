"""Every family of checkpoints against transformers: logits, bf16, greedy answers, files."""

import functools
import json

import pytest
import torch

from flash_versions.versions.oracle.budget import Accuracy
from tests.helpers.models.family_checkpoints import (
    CHECKPOINTS,
    EAGER,
    FAMILIES,
    WINDOW,
    Numbers,
    as_transformers_4,
    assert_same_logits,
    attention,
    greedy_answers,
    make_checkpoint,
    make_tokens,
)
from transformer.generation.engine import generate
from transformer.model.cache import KVCache
from transformer.model.weights import load_config, load_model, save_model

HALF_ULP = 2.0**-9  # one rounding to bf16, relative
# Families whose norms, experts, multipliers or scalings round at a place of their own.
ROUNDED = ("qwen 3", "olmo 3", "gemma 3", "gpt-oss", "qwen 3 moe", "granite", "phi 4 mini")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """name -> (folder of a sharded checkpoint, the model in it), made once."""
    pytest.importorskip("transformers")

    @functools.cache
    def make(name):
        folder = tmp_path_factory.mktemp("checkpoint")
        return folder, make_checkpoint(name, folder)

    return make


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_checkpoint_is_the_same_model_to_transformers(theirs, name, tmp_path):
    """Its logits; its config.json as transformers 4 wrote it; what we write."""
    transformers = pytest.importorskip("transformers")
    folder, model = theirs(name)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    ours = load_model(folder, attention)
    assert_same_logits(ours, model)

    config = json.loads((folder / "config.json").read_text())
    older = as_transformers_4(config)
    (tmp_path / "config.json").write_text(json.dumps(older))
    assert load_config(tmp_path) == load_config(folder)

    save_model(ours, tmp_path, torch.float32, config)
    assert load_config(tmp_path) == load_config(folder)
    again, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, output_loading_info=True, **EAGER
    )
    assert not any(report.values()), report
    assert_same_logits(load_model(tmp_path, attention), again, lengths=[40])


def assert_within_budget(actual, plain, exact, experts=False):
    """The largest and the mean error of logits in bf16: twice that of plain PyTorch, a rounding.

    Where two experts score alike to a rounding, each implementation takes its own, and a few
    tokens are far off: of a model with experts, it is the token in the middle that counts.
    """
    sizes = [(actual - exact).abs(), (plain - exact).abs(), HALF_ULP * exact.abs()]
    for of_token, of_all in ((torch.amax, torch.amax), (torch.mean, torch.mean)):
        over = torch.median if experts else of_all
        accuracy = Accuracy(*(over(of_token(x, dim=-1)).item() for x in sizes))
        assert accuracy.ok, f"{of_token.__name__}: {accuracy}"


@pytest.mark.parametrize("name", ROUNDED)
def test_bf16_is_as_accurate_as_transformers(theirs, name):
    """Both are compared with the fp64 model; ours may have twice their error, and its rounding."""
    folder, model = theirs(name)
    tokens = make_tokens(100, batch=4)
    load = functools.partial(type(model).from_pretrained, folder, **EAGER)
    ours = load_model(folder, attention, dtype=torch.bfloat16)
    with torch.no_grad():
        exact = load(dtype=torch.float64)(tokens).logits
        plain = load(dtype=torch.bfloat16)(tokens).logits
        actual = ours(tokens)
    assert actual.dtype == torch.bfloat16
    assert_within_budget(actual, plain, exact)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_answers_are_those_of_transformers(theirs, name):
    """Token for token, alone and beside shorter and longer prompts, past the end of a window."""
    folder, model = theirs(name)
    prompts = [make_tokens(length, batch=1)[0].tolist() for length in (3, WINDOW + 9, 1, 30)]
    ours = load_model(folder, attention)

    def answers(prompts):
        found, _ = generate(ours, Numbers(), prompts, max_tokens=16)
        return [completion.tokens for completion in found]

    expected = greedy_answers(model, prompts, 16, eos_token_id=None)
    assert answers(prompts) == expected
    assert answers(prompts[1:2]) == expected[1:2]
    assert sum(len(set(answer)) for answer in expected) > 20  # they do not say one thing only


# On a GPU


@pytest.fixture
def on_gpu(theirs):
    """name -> the model in bf16 there; each layer takes the newest version that can run it."""
    return lambda name: load_model(theirs(name)[0], None, "cuda", torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_bf16_on_a_gpu_is_as_accurate_as_transformers(theirs, on_gpu, name):
    """Prompts of 90 and 67 tokens, padded, then ten single tokens, which read the cache."""
    folder, model = theirs(name)
    ours, tokens = on_gpu(name), make_tokens(100)
    pads = torch.tensor([0, 23])
    cache = KVCache(ours.config, 2, 128, "cuda", torch.bfloat16)
    prompts = torch.stack([row.roll(int(n)) for row, n in zip(tokens[:, :90], pads)]).cuda()
    rows = [tokens[0], torch.cat((tokens[1, : 90 - 23], tokens[1, 90:]))]
    # Up to the cache's capacity, by which positions are encoded if they are so by length.
    texts = [torch.nn.functional.pad(row, (0, 128 - len(row)))[None] for row in rows]
    with torch.no_grad():
        found = [ours(prompts, cache, pads.cuda(), last_only=True)]
        found += [ours(tokens[:, i : i + 1].cuda(), cache) for i in range(90, 100)]
        actual = torch.cat(found, dim=1).cpu()
        load = functools.partial(type(model).from_pretrained, folder, **EAGER)
        exact, plain = (
            torch.cat([other(x).logits[:, n - 11 : n] for x, n in zip(texts, map(len, rows))])
            for other in (load(dtype=torch.float64), load(dtype=torch.bfloat16))
        )
    assert_within_budget(actual, plain, exact, experts=ours.config.num_experts > 0)
