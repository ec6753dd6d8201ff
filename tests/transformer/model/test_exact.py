"""With kernels="exact" a token's logits have the same bits whatever is beside them."""

from dataclasses import replace
from random import Random

import pytest
import torch

import flash_versions
from tests.helpers.models.tiny_model import CONFIG
from transformer.generation.batch import prefill
from transformer.generation.engine import EngineOptions, generate
from transformer.generation.session import Session
from transformer.model import exact
from transformer.model.cache import KVCache
from transformer.model.decoder import Transformer, choose_attention
from transformer.model.kernels.gate import gated
from transformer.model.kernels.norm import norm_reference, rms_norm
from transformer.model.paged_cache import PagedKVCache
from transformer.model.rope import Rope

GROUPS = {"num_heads": 4, "num_kv_heads": 2, "tied_embeddings": False, "vocab_size": 101}
FAMILIES = {
    "qwen 2": {"qk_norm": False, "qkv_bias": True, "tied_embeddings": True},
    "gemma 2": {
        "activation": "gelu_tanh",
        "norm_plus_one": True,
        "four_norms": True,
        "scaled_embeddings": True,
        "scores_softcap": 5.0,
        "logits_softcap": 3.0,
        "layer_windows": (9, None),
    },
    "experts": {"num_experts": 4, "experts_per_token": 2, "expert_size": 24},
    "gpt-oss": {"sinks": True, "swiglu_limit": 7.0, "num_experts": 4, "experts_per_token": 2,
                "expert_size": 24, "mlp_bias": True, "qk_norm": False},
}  # fmt: skip


def tiny(kernels="exact", attention=exact.attention_by_blocks, dtype=torch.float32, **changes):
    """A model with large random weights, whose sums round differently in another order."""
    torch.manual_seed(0)
    model = Transformer(replace(CONFIG, **{**GROUPS, **changes}), attention, kernels)
    for parameter in model.parameters():
        parameter.data.normal_(0.0 if parameter.dim() > 1 else 0.7, 0.25)
    return model.to(dtype).requires_grad_(False)


def differing(model, seed):
    """Elements of logits that are not those of the row alone: beside others, padded on the right
    and the left, read in chunks, from both caches, decoded alone and with drafts.
    """
    rng, config, dtype = Random(seed), model.config, model.model.embed_tokens.weight.dtype

    def drawn(count):
        return [rng.randrange(config.vocab_size) for _ in range(count)]

    rows = [drawn(rng.randint(1, 50)) for _ in range(rng.randint(2, 6))]
    more = [drawn(6) for _ in rows]
    alone = [model(torch.tensor([row + new]))[0] for row, new in zip(rows, more)]
    width = 50 + rng.randint(0, 20)
    right = torch.zeros(len(rows), width, dtype=torch.int64)
    for line, row in zip(right, rows):
        line[: len(row)] = torch.tensor(row)
    together = model(right)
    pairs = [(together[i, : len(row)], alone[i][: len(row)]) for i, row in enumerate(rows)]
    size = (config, len(rows), width + 6, "cpu", dtype)
    for cache in (KVCache(*size), PagedKVCache(*size, page_size=rng.choice((5, 16, 64)))):
        if isinstance(cache, PagedKVCache):
            cache.allocate([width + 6] * len(rows))
        last = prefill(model, cache, rows, rng.choice((3, 40, 1000)))
        pairs += [(last[i], alone[i][len(row) - 1]) for i, row in enumerate(rows)]
        if rng.random() < 0.5:
            cache.fix()
        for start, stop in ((0, 1), (1, 2), (2, 6)):  # steps, and a step with drafts
            logits = model(torch.tensor([new[start:stop] for new in more]), cache)
            for i, row in enumerate(rows):
                pairs.append((logits[i], alone[i][len(row) + start : len(row) + stop]))
    return sum(int((x != y).sum()) for x, y in pairs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_what_is_beside_them(family, dtype):
    model = tiny(dtype=dtype, **FAMILIES[family])
    assert sum(differing(model, seed) for seed in range(3)) == 0


def test_ordinary_ones_do():
    def sdpa(q, k, v, **options):
        return flash_versions.attention(q, k, v, version="reference", **options)

    assert differing(tiny("torch", sdpa), 0) > 0


def test_they_are_those_of_the_ordinary_model_up_to_rounding():
    tokens = torch.randint(101, (3, 30))
    for family in FAMILIES.values():
        model, plain = tiny(**family), tiny("torch", None, **family)
        plain.attention = exact.attention_by_blocks
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=2e-5)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(896, 100), (700, 33), (4864, 64)])
def test_products_do_not_depend_on_rows(shape, threads):
    inputs, outputs = shape
    torch.manual_seed(0)
    x, weight = torch.randn(1, inputs), torch.randn(outputs, inputs)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        expected = exact.linear(x, weight)
        for rows in (2, 15, 16, 17, 100, 333):
            assert exact.linear(x.expand(rows, -1), weight).eq(expected).all()
    finally:
        torch.set_num_threads(before)
    given = [t.bfloat16() for t in (x, weight, torch.randn(outputs), torch.randn(1, outputs))]
    x, weight, bias, residual = (t.double() for t in given)
    found, sums = exact.linear(*given).double(), x @ weight.T + bias + residual
    torch.testing.assert_close(found, sums, rtol=2**-8, atol=1e-4)  # rounded once


def test_a_machine_whose_products_depend_on_the_rows_is_refused(monkeypatch):
    monkeypatch.setattr(exact, "linear", lambda x, weight: x @ weight.T + len(x))
    with pytest.raises(ValueError, match="not possible on this CPU: its products of 31 by 7"):
        exact.check_products(31, 7)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": False, "qkv_bias": True}], ids=str)
def test_the_gpus_decoding_step_is_its_prefill(changes, monkeypatch):
    """The kernels for a GPU, simulated: the fused step against the forward layer by layer."""
    monkeypatch.setattr(exact, "by_kernels", lambda x: True)
    attend = exact.attention_of("fa2", True)
    model = tiny(attention=attend, dtype=torch.bfloat16, **changes)
    rows = [[1, 2, 3, 4, 5, 6, 7], [9, 8]]
    for cache in (KVCache, PagedKVCache):
        cache = cache(model.config, 2, 32, dtype=torch.bfloat16)
        if isinstance(cache, PagedKVCache):
            cache.allocate([32, 32])
        prefill(model, cache, rows, 4)
        logits = model(torch.tensor([[5], [6]]), cache)
        for i, token in enumerate((5, 6)):
            whole = torch.tensor([[*rows[i], token]])
            learned = model(whole)[0]  # as where there is a gradient
            with torch.no_grad():
                assert model(whole)[0].equal(learned)
            assert logits[i, 0].equal(learned[-1])


@pytest.mark.parametrize("switches", [(False, False), (True, True), (False, True)])
def test_a_kernels_norm(switches):
    torch.manual_seed(0)
    for shape in ((5, 48), (3, 2, 2500), (1, 16)):
        x, weight = (
            torch.randn(shape, requires_grad=True),
            torch.randn(shape[-1], requires_grad=True),
        )
        y, plain = rms_norm(x, weight, 1e-6, *switches), norm_reference(x, weight, 1e-6, *switches)
        torch.testing.assert_close(y, plain)
        dy = torch.randn(shape)
        ours, theirs = (torch.autograd.grad(z, (x, weight), dy) for z in (y, plain))
        torch.testing.assert_close(ours, theirs)
        assert torch.cat([rms_norm(row, weight, 1e-6, *switches) for row in x.split(1)]).equal(y)


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("shape", [(5, 48), (2, 3, 1100), (1, 16)])
def test_a_kernels_gate(shape, joined):
    torch.manual_seed(0)
    both = torch.randn(*shape[:-1], 2 * shape[-1], requires_grad=True)
    dy = torch.randn(shape)
    y = gated(both) if joined else gated(*both.chunk(2, -1))
    gate, up = both.double().chunk(2, -1)
    plain = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(y.double(), plain, rtol=1e-6, atol=1e-6)
    ours, theirs = (torch.autograd.grad(z, both, g)[0] for z, g in ((y, dy), (plain, dy.double())))
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert gated(*(x.contiguous() for x in both.detach().chunk(2, -1))).equal(y)


def test_a_model_learns_by_the_gpus_kernels_what_it_learns_without(monkeypatch):
    """The gradient of a loss of all logits, against that of torch's operations in fp64."""
    plain = tiny("torch", exact.attention_by_blocks, qkv_bias=True, qk_norm=False).double()
    monkeypatch.setattr(exact, "by_kernels", lambda x: True)
    model = tiny(qkv_bias=True, qk_norm=False)
    tokens = torch.randint(101, (2, 9))
    found = []
    for each in (model, plain):
        parameters = [*each.requires_grad_().parameters()]
        loss = each(tokens).log_softmax(-1)[..., 3].mean()
        found.append(torch.autograd.grad(loss, parameters))
    for ours, theirs in zip(*found):
        error = (ours - theirs).abs().max()
        assert error <= 1e-5 * theirs.abs().max()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"softcap": 2.0, "window": (6, 0)},
        {"sink": torch.tensor([0.3, -1.2, 0.8, 1.5])},
        {"query_ends": torch.tensor([70] * 5 + [40] * 35 + [70] * 30)},
        {"kv_lengths": torch.tensor([70, 66], dtype=torch.int32), "scale": 0.3},
    ],
    ids=lambda options: " ".join(options),
)
def test_attention_by_blocks(options):
    torch.manual_seed(0)
    q = torch.randn(2, 70, 4, 16, requires_grad=True)
    k, v = (torch.randn(2, 70, 2, 16, requires_grad=True) for _ in "kv")
    o = exact.attention_by_blocks(q, k, v, causal=True, **options)
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    given = {n: x.double() if n == "sink" else x for n, x in options.items()}
    oracle, _ = flash_versions.attention_reference(*wide, causal=True, **given)
    plain, _ = flash_versions.attention_reference(q, k, v, causal=True, **options)
    do = torch.randn_like(o)
    ours = (o, *torch.autograd.grad(o, (q, k, v), do))
    theirs = (plain, *torch.autograd.grad(plain, (q, k, v), do))
    expected = (oracle, *torch.autograd.grad(oracle, wide, do.double()))
    for one, other, right in zip(ours, theirs, expected):
        assert (one - right).abs().max() <= 2 * (other - right).abs().max() + 1e-6


def answers(session, prompts, **options):
    options = {"prefill_chunk": 1000, "cuda_graph": False, **options}
    found, _ = generate(
        session.model, session.tokenizer, prompts, max_tokens=12, eos=session.eos,
        engine=EngineOptions(**options), logprobs=True,
    )  # fmt: skip
    return [(x.tokens, x.logprobs) for x in found]


def test_answers_are_those_of_each_prompt_alone():
    session = Session.load("reinforced", exact=True, attention="blocks", device="cpu")
    prompts = [session.tokenizer.encode_plain(x) for x in ("12+30=", "7", "What is 100-99?")]
    alone = [answers(session, [prompt])[0] for prompt in prompts]
    for options in ({}, {"page_size": 7}, {"prompt_lookup": 3}, {"prefill_chunk": 4}):
        assert answers(session, prompts, **options) == alone


def test_texts_whose_angles_depend_on_the_longest_are_refused():
    rope = Rope(type="dynamic", factor=2.0, original_max_position_embeddings=16)
    model = tiny(rope=rope)
    with pytest.raises(ValueError, match="exact answers end at 16 tokens"):
        generate(model, None, [[1] * 10], max_tokens=20, eos=(0,))


def test_a_cpu_that_does_not_simulate_attends_by_blocks():
    cpu, config = torch.device("cpu"), replace(CONFIG, **GROUPS)
    chosen, _ = choose_attention("auto", config, cpu, torch.float32, simulated=False, exactly=True)
    assert chosen == "blocks"
    chosen, _ = choose_attention("auto", config, cpu, torch.float32, exactly=True)
    assert chosen in flash_versions.VERSIONS
