"""The model's properties, and the cache against the model without one."""

from dataclasses import replace

import pytest
import torch

from tests.helpers.models import tiny_model
from tests.helpers.models.family_checkpoints import attention
from transformer.generation.engine import pad_left
from transformer.model.cache import KVCache
from transformer.model.decoder import Transformer
from transformer.model.rope import Rope

SIZES = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "max_positions": 64}
CONFIG = replace(tiny_model.CONFIG, **SIZES, num_heads=4, num_kv_heads=2)

# With every part that tells families apart, and another one in each layer.
VARIED = replace(
    CONFIG, num_layers=4, activation="gelu_tanh", norm_plus_one=True, four_norms=True,
    scaled_embeddings=True, query_pre_attn_scalar=3.0, scores_softcap=1.0, logits_softcap=2.0,
    sinks=True, layer_windows=(3, None, 1, 6),
    layer_ropes=(Rope(1e2), Rope(partial_rotary_factor=0.5), None, Rope(1e2)),
)  # fmt: skip
BOTH = pytest.mark.parametrize("config", [CONFIG, VARIED], ids=["alike", "varied"])


def make_model(config=CONFIG, attention=attention, dtype=torch.float64):
    torch.manual_seed(0)
    model = Transformer(config, attention)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 and biases of 0 would hide mistakes
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype).requires_grad_(False)


def make_cache(model, batch, capacity=CONFIG.max_positions):
    """A cache full of what must never be seen."""
    cache = KVCache(model.config, batch, capacity, dtype=next(model.parameters()).dtype)
    cache.keys_values.fill_(1e3)
    return cache


def make_tokens(batch, length, seed=0):
    return torch.randint(97, (batch, length), generator=torch.Generator().manual_seed(seed))


def assert_same(actual, expected):
    """Equal but for the order of fp64 sums."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-11)


# --- the model without a cache


def test_wanted_logits_are_those_of_all():
    """In the order of the rows, with the same gradient; none may be wanted."""
    model, tokens = make_model().requires_grad_(True), make_tokens(3, 9)
    wanted = torch.rand(3, 9, generator=torch.Generator().manual_seed(1)) < 0.5
    some, weights = model(tokens, wanted=wanted), list(model.parameters())
    assert some.shape == (wanted.sum(), 97) and wanted.any(1).all() and not wanted.all(1).any()
    everything = model(tokens)
    assert_same(some, everything[wanted])
    scale = torch.randn(some.shape, generator=torch.Generator().manual_seed(2), dtype=some.dtype)
    ours = torch.autograd.grad((some * scale).sum(), weights)
    for gradient, expected in zip(
        ours, torch.autograd.grad((everything[wanted] * scale).sum(), weights)
    ):
        assert_same(gradient, expected)
    assert model(tokens, wanted=torch.zeros_like(wanted)).shape == (0, 97)
    for unfit in (wanted[:, :5], wanted.long()):
        with pytest.raises(ValueError, match=r"wanted must be bool \(3, 9\) like the tokens, not"):
            model(tokens, wanted=unfit)


# --- the cache against the model without one


@BOTH
@pytest.mark.parametrize("chunks", [[1] * 12, [5, 1, 6]], ids=str)
def test_chunks_equal_the_whole(chunks, config):
    model, tokens = make_model(config), make_tokens(3, 12)
    cache = make_cache(model, 3)
    logits = [model(chunk, cache) for chunk in tokens.split(chunks, dim=1)]
    assert_same(torch.cat(logits, dim=1), model(tokens))
    assert cache.lengths.tolist() == [12] * 3


@BOTH
@pytest.mark.parametrize(
    ("lengths", "chunk"), [([7, 3, 1], 20), ([4, 9], 4), ([6, 2, 6, 1], 1)], ids=str
)
def test_ragged_rows_equal_each_row_alone(lengths, chunk, config):
    """Left-padded prefill in chunks (some then hold nothing but pads), then decoding."""
    model = make_model(config)
    rows = [make_tokens(1, length + 4, seed=length)[0] for length in lengths]
    prompts, padding = pad_left([row[:-4].tolist() for row in rows])
    cache = make_cache(model, len(rows))
    for start in range(0, prompts.shape[1], chunk):
        tokens = prompts[:, start : start + chunk]
        pads = (padding - start).clamp(0, tokens.shape[1])
        logits = [model(tokens, cache, pads, last_only=True)]
    logits += [model(torch.stack([row[i] for row in rows])[:, None], cache) for i in range(-4, 0)]
    assert cache.lengths.tolist() == [len(row) for row in rows]
    for row, ours in zip(rows, torch.cat(logits, dim=1)):
        assert_same(ours, model(row[None])[0, -5:])


def test_ragged_rows_can_be_extended_by_ragged_rows():
    """Conversations of several turns: pads behind keys that are already stored."""
    model = make_model()
    cache = make_cache(model, 2)
    turns = [[make_tokens(1, n, seed=n)[0] for n in pair] for pair in ((3, 6), (5, 1), (2, 4))]
    for turn in turns:
        tokens, padding = pad_left([row.tolist() for row in turn])
        logits = model(tokens, cache, padding, last_only=True)
    for row in range(2):
        whole = torch.cat([turn[row] for turn in turns])
        assert_same(logits[row], model(whole[None], last_only=True)[0])


@pytest.mark.parametrize("kept", [0, 3, 20], ids=lambda kept: f"keep {kept}")
@pytest.mark.parametrize("pads", [None, torch.tensor([0, 4])], ids=["uniform", "ragged"])
def test_truncated_cache_continues(kept, pads):
    model, tokens, other = make_model(), make_tokens(2, 8), make_tokens(2, 4, seed=1)
    cache = make_cache(model, 2)
    model(tokens, cache, pads)
    cache.truncate(kept)
    continued = model(other, cache)
    for row in range(2):
        stored = tokens[row, 0 if pads is None else pads[row] :][:kept]
        assert_same(continued[row], model(torch.cat((stored, other[row]))[None])[0, -4:])


def test_arguments_must_fit_the_model():
    model, tokens = make_model(), make_tokens(2, 3)
    cache, padding = make_cache(model, 2, capacity=6), torch.tensor([0, 1])
    model(make_tokens(2, 4), cache)
    for sentence, call in (
        ("65 tokens are more than the model's context", lambda: model(make_tokens(1, 65))),
        ("must hold 1 to 64 tokens", lambda: KVCache(CONFIG, 1, 65)),
        ("and 4 are stored: 3 more, 7 in all, do not fit", lambda: model(tokens, cache)),
        (r"int64 \(batch, length\)", lambda: model(tokens.int())),
        (r"not empty, not torch.int64 \(2, 0\)", lambda: model(tokens[:, :0])),
        ("2 rows but the cache has 3", lambda: model(tokens, make_cache(model, 3))),
        ("padding needs a cache", lambda: model(tokens, None, padding)),
        (r"padding must be \(2,\), not \(1,\)", lambda: model(tokens, cache, padding[:1])),
        ("model is on cpu but the tokens on meta", lambda: model(tokens.to("meta"))),
        ("create it with dtype=torch.float64", lambda: model(tokens, KVCache(CONFIG, 2, 8))),
        ("passes no gradients", lambda: model.requires_grad_(True)(tokens[:, :2], cache)),
    ):
        with pytest.raises(ValueError, match=sentence):
            call()
