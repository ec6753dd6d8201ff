"""The engine: against transformers' generate, and with a model that says what it is told."""

import math
import signal

import pytest
import torch

from tests.helpers.models.family_checkpoints import greedy_answers
from tests.helpers.models.tiny_model import CONFIG, CONTEXT, END, PROMPTS, sdpa
from transformer.generation.decoding import Decoding
from transformer.generation.engine import GREEDY, EngineOptions, generate
from transformer.generation.row import Row
from transformer.generation.sampling import Sampling, row_generators
from transformer.model.decoder import Config, Transformer
from transformer.model.kernels.startup import compiling


@pytest.fixture(scope="module")
def oracle(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Scripted(Transformer):
    """A model that says what it is told: row b's next tokens are script[b]."""

    def __init__(self, *script: list[int], config: Config = CONFIG):
        super().__init__(config, attention=sdpa)
        self.script = script
        self.step = 0
        self.cache_lengths: list[int] = []

    def forward(self, tokens, cache=None, padding=None, last_only=False):
        cache.reserve(tokens.shape[1], padding)
        self.cache_lengths.append(cache.longest)
        numbers = cache.keys_values[0, 0, :, 0, 0, 0]  # of the rows, which may become fewer
        if self.step == 0:
            numbers.copy_(torch.arange(len(tokens)))
        logits = torch.zeros(len(tokens), 1, self.config.vocab_size)
        for row, number in enumerate(numbers.int().tolist()):
            script = self.script[number]
            logits[row, 0, script[min(self.step, len(script) - 1)]] = 9.0
        self.step += 1
        return logits


def spell(text: str) -> list[int]:
    return list(text.encode())


def run_script(tokenizer, *scripts, max_tokens=50, **options):
    """Generate from a script; returns the completions and what was streamed per row."""
    shown: list[list[str]] = [[] for _ in scripts]
    completions, _ = generate(
        Scripted(*scripts),
        tokenizer,
        [[65]] * len(scripts),
        max_tokens=max_tokens,
        eos=(END,),
        on_text=lambda row, text: shown[row].append(text),
        **options,
    )
    return completions, shown


# The engine against transformers


def test_repetition_penalty_equals_transformers(model, tokenizer, oracle):
    sampling = Sampling(temperature=0, repetition_penalty=1.3)
    for prompt in PROMPTS:
        options = {"repetition_penalty": 1.3, "eos_token_id": END}
        [expected] = greedy_answers(oracle, [prompt], 30, **options)
        [completion], _ = generate(
            model, tokenizer, [prompt], max_tokens=30, sampling=sampling, eos=(END,)
        )
        assert completion.tokens == expected


@pytest.mark.parametrize(
    "prompt, expected", [([65], [0, 1, 2, 3]), ([0, 2], [1, 3, 4, 5])], ids=["unseen", "seen"]
)
def test_padding_is_not_penalised(tokenizer, prompt, expected):
    """The first row is padded and likes token 0 best, then 1, then 2: the pad is none of them."""

    class Undecided(Scripted):
        def forward(self, *arguments, **options):
            logits = super().forward(*arguments, **options)
            logits[0] = 9.0 - torch.arange(self.config.vocab_size) / 1000
            return logits

    sampling = Sampling(temperature=0, repetition_penalty=1.3)
    [padded, _], _ = generate(
        Undecided([7], [7]), tokenizer, [prompt, [65] * 5], max_tokens=4, sampling=sampling
    )
    assert padded.tokens == expected


@pytest.mark.parametrize(("temperature", "ban"), [(0, True), (1, False), (0.7, True)])
def test_log_probabilities_equal_transformers(model, tokenizer, oracle, temperature, ban):
    """Also if what the model likes best everywhere is banned: the rest shares its probability."""

    def answers(banned):
        options = {"max_tokens": 12, "sampling": Sampling(temperature=temperature)}
        options |= {"generators": row_generators(0, len(PROMPTS)), "banned": banned}
        return generate(model, tokenizer, PROMPTS, logprobs=True, **options)[0]

    banned = sorted({token for c in answers([]) for token in c.tokens}) if ban else []
    for prompt, completion in zip(PROMPTS, answers(banned)):
        assert not {*completion.tokens} & {*banned}
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + completion.tokens])).logits[0]
        logits[:, banned] = -torch.inf
        logits = logits[len(prompt) - 1 : -1] / (temperature or 1)
        if not temperature:
            assert completion.tokens == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1)[torch.arange(12), completion.tokens]
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, rtol=1e-4, atol=1e-4
        )


# The engine with a scripted model


@pytest.mark.parametrize(
    "said, stops, text, pieces",
    [
        ("abSTOPcd", ["STOP"], "ab", ["a", "b"]), ("SSTOP", ["STOP"], "S", ["S"]),
        ("abSTcd", ["STOP"], "abSTcd", ["a", "b", "STc", "d"]), ("日本", ["本"], "日", ["日"]),
        ("abab!", ["abac", "bab!"], "a", ["a"]), ("x\n\ny", ["\n\n", "\n"], "x", ["x"]),
        ("xab", ["b", "ab"], "x", ["x"]),
    ],
)  # fmt: skip
def test_stop_strings_end_the_text_and_are_never_shown(tokenizer, said, stops, text, pieces):
    [completion], [shown] = run_script(tokenizer, [*spell(said), END], stop_strings=stops)
    assert (completion.text, shown, completion.finish_reason) == (text, pieces, "stop")
    if said == "abSTOPcd":  # what is held back is released at the limit
        [cut], [shown] = run_script(tokenizer, spell(said), stop_strings=stops, max_tokens=5)
        assert (cut.text, cut.finish_reason, shown) == ("abSTO", "length", ["a", "b", "STO"])


def test_a_row_takes_what_belongs_to_it(tokenizer):
    """A look of the host finds steps beyond a row's end and limit, which were in vain."""
    for tokens, kept, reason in (
        ([65], 1, ""),
        ([65, END, 66, END + 1], 2, "stop"),
        ([65, END + 1, END], 2, "stop"),
        ([65, 66, 67, END], 3, "length"),  # an end that no row with this limit was to say
        ([65, 66, 67], 3, "length"),
    ):
        row = Row(0, [1], 3, tokenizer, (END, END + 1), ())
        row.take(tokens, [-1.0 * n if n < kept else math.nan for n in range(len(tokens))])
        assert (row.tokens, row.finish_reason) == (tokens[:kept], reason)
        assert row.scores == [-1.0 * n for n in range(kept)]


def test_no_broken_character_is_shown_wherever_the_limit_falls(tokenizer):
    said = "aé世🌍"
    for limit in range(1, 12):
        [completion], [shown] = run_script(tokenizer, spell(said) * 2, max_tokens=limit)
        assert "\ufffd" not in completion.text and (said + said).startswith(completion.text)
        assert "".join(shown) == completion.text and len(completion.tokens) == limit
    [completion], [shown] = run_script(tokenizer, [*spell("a"), 0xE4, END])
    assert completion.text == "".join(shown) == "a\ufffd"  # bytes that are no text are marked


def test_an_interrupt_keeps_the_text_so_far(tokenizer):
    def interrupt_at_c(row, text):
        shown.append((row, text))
        if text == "c":
            signal.raise_signal(signal.SIGINT)

    shown: list[tuple[int, str]] = []
    completions, statistics = generate(
        Scripted([*spell("x"), END], spell("abcdef"), spell("12345678")),
        tokenizer,
        [[65]] * 3,
        max_tokens=50,
        eos=(END,),
        stop_strings=["234"],
        on_text=interrupt_at_c,
    )
    assert [c.finish_reason for c in completions] == ["stop", "interrupted", "interrupted"]
    assert [c.text for c in completions] == ["x", "abc", "12"]
    assert "".join(text for row, text in shown if row == 2) == "12"  # "2" was held back
    assert statistics.generated_tokens == 2 + 3 + 2


def test_a_long_row_does_not_shorten_a_short_one(tokenizer):
    """The short row may use the whole context although the long one filled it at the start."""
    script = Scripted([65], [66])
    prompts = [[65] * (CONTEXT - 4), [65] * 2]
    long, short = generate(script, tokenizer, prompts, max_tokens=1000)[0]
    assert (len(long.tokens), long.finish_reason) == (4, "length")
    assert (len(short.tokens), short.finish_reason) == (CONTEXT - 2, "length")
    # Once the long row has finished, the cache holds no more than the short one needs.
    assert script.cache_lengths[:5] == [CONTEXT - 4, CONTEXT - 3, CONTEXT - 2, CONTEXT - 1, 6]
    assert max(script.cache_lengths) <= CONTEXT


def test_rows_that_have_ended_are_left_behind(tokenizer):
    """Half of the rows go on, or a quarter, whichever are running; nothing else is lost."""
    lasting = [3, 50, 2, 20, 3, 12, 2, 12]
    batches = []
    model = Scripted(*([65] * (steps - 1) + [END] for steps in lasting))
    model.register_forward_pre_hook(lambda _, inputs: batches.append(len(inputs[0])))
    found, statistics = generate(model, tokenizer, [[1]] * 8, max_tokens=99, eos=(END,))
    assert [len(completion.tokens) for completion in found] == lasting
    assert batches == [8] * 3 + [4] * 9 + [2] * 8 + [1] * 30
    assert statistics.rows == 8 and statistics.decoded_tokens == sum(lasting) - 8


@pytest.mark.parametrize(("arrives", "compiles", "first"), [(1, 0, 1), (0, 0, 2), (1, 1, 2)])
def test_the_first_step_begins_while_the_first_token_is_on_its_way(
    tokenizer, monkeypatch, arrives, compiles, first
):
    """Or while kernels are compiled, so that none is within the answer."""
    monkeypatch.setattr(Decoding, "arrives", lambda self, seconds: arrives)
    monkeypatch.setattr(compiling, "now", compiles)
    model, calls, fetch = Transformer(CONFIG), [], Decoding.fetch
    monkeypatch.setattr(Decoding, "fetch", lambda self: calls.append("fetch") or fetch(self))
    model.register_forward_pre_hook(lambda *_: calls.append("forward"))
    generate(model, tokenizer, [[1]], max_tokens=3, engine=EngineOptions(page_size=16))
    assert calls.index("fetch") == first


@pytest.mark.parametrize(
    "prompts, options, reason",
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[1] * CONTEXT], {}, "prompt 0 has 128 tokens, which leaves no room"),
        ([[1, 320]], {}, "prompt 0 has tokens from 1 to 320 but the model knows 0 to 319"),
        ([[1]], {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ([[1]], {"sampling": Sampling(), "samples": 2}, "2 rows need as many generators, got 0"),
        ([[1]], {"banned": range(320)}, "logits for row 0 are not finite"),
        ([[1]], {"engine": EngineOptions(page_size=8), "at_once": 0}, "at_once must be at least 1"),
        ([[1]], {"engine": EngineOptions(page_size=8), "samples": 2}, "leave page_size out"),
        (
            [[1]],
            {"engine": EngineOptions(prompt_lookup=2), "sampling": Sampling()},
            "exact for greedy choices only",
        ),
    ],
)
def test_bad_arguments_are_refused(tokenizer, prompts, options, reason):
    with pytest.raises(ValueError, match=reason):
        generate(Scripted([65]), tokenizer, prompts, **{"max_tokens": 5, **options})


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
def test_logits_that_are_not_finite_are_reported(model, tokenizer, sampling):
    def spoil(_, __, logits):
        logits[1, 0, 5] = float("nan")

    options = {"max_tokens": 5, "sampling": sampling, "generators": row_generators(0, 2)}
    hook = model.register_forward_hook(spoil)
    with pytest.raises(ValueError, match="logits for row 1 are not finite"):
        generate(model, tokenizer, [[1], [1]], logprobs=True, **options)
    hook.remove()
