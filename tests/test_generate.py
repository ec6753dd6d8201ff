"""Generation against transformers' generate, and the command: its text, its files, its refusals."""

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import flash_versions
from flash_versions import interpreter
from transformer import byte_tokenizer, session
from transformer.chat import Tokenizer
from transformer.engine import GREEDY, Statistics, generate, held_back
from transformer.generate import DEFAULT_QUESTION, main
from transformer.model import Config, Transformer
from transformer.sampling import Sampling, row_generators
from transformer.weights import load_model, save_model

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CONTEXT = 128
CONFIG = Config(
    vocab_size=byte_tokenizer.VOCAB_SIZE,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=CONTEXT,
    tied_embeddings=True,
    qk_norm=True,
)
PROMPTS = [[72, 105], [87, 104, 97, 116, 32, 105, 115, 63], [256], list(range(40, 60))]
END = byte_tokenizer.IM_END


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A checkpoint with random weights, large enough that greedy text does not settle at once."""
    folder = tmp_path_factory.mktemp("checkpoint")
    torch.manual_seed(1)
    model = Transformer(CONFIG, attention=sdpa)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    save_model(model, folder, torch.float32)
    for name, text in byte_tokenizer.files().items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def sdpa(q, k, v, **options):
    return flash_versions.attention(q, k, v, version="sdpa", **options)


@pytest.fixture(scope="module")
def model(folder) -> Transformer:
    return load_model(folder, attention=sdpa)


@pytest.fixture(scope="module")
def tokenizer(folder) -> Tokenizer:
    return Tokenizer.load(folder)


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
        logits = torch.zeros(len(tokens), 1, self.config.vocab_size)
        for row, script in enumerate(self.script):
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


def hf_generate(oracle, prompts, **options):
    longest = max(map(len, prompts))
    pad = byte_tokenizer.PAD
    batch = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    output = oracle.generate(
        batch,
        attention_mask=mask,
        do_sample=False,
        max_new_tokens=30,
        pad_token_id=pad,
        **options,
    )
    return output[:, longest:].tolist()


def until(tokens: list[int], eos: set[int]) -> list[int]:
    """Tokens up to and including the first end."""
    ends = [i for i, token in enumerate(tokens) if token in eos]
    return tokens[: ends[0] + 1] if ends else tokens


def test_greedy_equals_transformers_on_a_ragged_batch(model, tokenizer, oracle):
    expected = hf_generate(oracle, PROMPTS, eos_token_id=END)
    assert len({token for row in expected for token in row}) > 10, "the model says nothing"
    completions, _ = generate(model, tokenizer, PROMPTS, max_tokens=30, eos=(END,))
    assert [c.tokens for c in completions] == [until(row, {END}) for row in expected]


def test_every_eos_of_a_list_ends_a_row(model, tokenizer, oracle):
    free = hf_generate(oracle, PROMPTS, eos_token_id=END)
    ends = {free[0][3], free[1][9]}  # tokens that these rows will certainly say
    expected = [until(row, ends) for row in free]
    completions, _ = generate(model, tokenizer, PROMPTS, max_tokens=30, eos=tuple(ends))
    assert [c.tokens for c in completions] == expected
    assert [c.finish_reason == "stop" for c in completions] == [row[-1] in ends for row in expected]
    assert len(set(map(len, expected))) > 1


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_repetition_penalty_equals_transformers(model, tokenizer, oracle, prompt):
    [expected] = hf_generate(oracle, [prompt], repetition_penalty=1.3, eos_token_id=END)
    sampling = Sampling(temperature=0, repetition_penalty=1.3)
    [completion], _ = generate(
        model, tokenizer, [prompt], max_tokens=30, sampling=sampling, eos=(END,)
    )
    assert completion.tokens == until(expected, {END})


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


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(), Sampling(temperature=0.7)], ids=["greedy", "T=1", "T=0.7"]
)
def test_log_probabilities_equal_transformers(model, tokenizer, oracle, sampling):
    completions, _ = generate(
        model,
        tokenizer,
        PROMPTS,
        max_tokens=12,
        sampling=sampling,
        generators=row_generators(0, len(PROMPTS)),
        logprobs=True,
    )
    for prompt, completion in zip(PROMPTS, completions):
        with torch.no_grad():
            logits = oracle(torch.tensor([prompt + completion.tokens])).logits[0]
        scores = (logits[len(prompt) - 1 : -1] / (sampling.temperature or 1)).log_softmax(-1)
        expected = scores[torch.arange(12), completion.tokens]
        assert completion.logprobs is not None
        torch.testing.assert_close(
            torch.tensor(completion.logprobs), expected, rtol=1e-4, atol=1e-4
        )


def test_a_row_does_not_depend_on_its_batch_mates(model, tokenizer):
    sampling = Sampling(temperature=1.2, top_p=0.9)
    options = {"max_tokens": 20, "sampling": sampling, "eos": (END,)}
    together, _ = generate(model, tokenizer, PROMPTS, generators=row_generators(5, 4), **options)
    for row, prompt in enumerate(PROMPTS):
        own = row_generators(5, 1, first=row)
        [alone], _ = generate(model, tokenizer, [prompt], generators=own, **options)
        assert alone == together[row]


# The engine with a scripted model


def test_the_end_token_is_kept_and_not_shown(tokenizer):
    [completion], [shown] = run_script(tokenizer, [*spell("yes"), END, *spell("no")])
    assert completion.tokens == [*spell("yes"), END]
    assert completion.text == "".join(shown) == "yes"
    assert completion.finish_reason == "stop"
    assert shown == ["y", "e", "s"]


@pytest.mark.parametrize(
    "said, stops, text, pieces",
    [
        ("abSTOPcd", ["STOP"], "ab", ["a", "b"]),
        ("abSTcd", ["STOP"], "abSTcd", ["a", "b", "STc", "d"]),
        ("SSTOP", ["STOP"], "S", ["S"]),
        ("abab!", ["abac", "bab!"], "a", ["a"]),
        ("x\n\ny", ["\n\n", "\n"], "x", ["x"]),
        ("ab", ["abc"], "ab", ["ab"]),
        ("日本", ["本"], "日", ["日"]),
        ("STOP", ["STOP"], "", []),
        ("xab", ["b", "ab"], "x", ["x"]),
    ],
)
def test_stop_strings_end_the_text_and_are_never_shown(tokenizer, said, stops, text, pieces):
    [completion], [shown] = run_script(tokenizer, [*spell(said), END], stop_strings=stops)
    assert completion.text == text
    assert shown == pieces
    assert completion.finish_reason == "stop"


def test_held_back_text_is_released_at_the_limit(tokenizer):
    [completion], [shown] = run_script(
        tokenizer, spell("aSTOP"), stop_strings=["STOP"], max_tokens=4
    )
    assert (completion.text, completion.finish_reason) == ("aSTO", "length")
    assert shown == ["a", "STO"]


@pytest.mark.parametrize(
    "text, stops, held",
    [("ab", ["abc"], 2), ("xab", ["abc", "b!"], 2), ("ab", ["x"], 0), ("", ["x"], 0), ("a", [], 0)],
)
def test_held_back(text, stops, held):
    assert held_back(text, stops) == held


@pytest.mark.parametrize("limit", range(1, 12))
def test_no_broken_character_is_shown_wherever_the_limit_falls(tokenizer, limit):
    said = "aé世🌍"
    [completion], [shown] = run_script(tokenizer, spell(said) * 2, max_tokens=limit)
    assert "\ufffd" not in completion.text
    assert (said + said).startswith(completion.text)
    assert "".join(shown) == completion.text
    assert len(completion.tokens) == limit


def test_bytes_that_are_no_text_are_marked_when_the_answer_ends(tokenizer):
    [completion], [shown] = run_script(tokenizer, [*spell("a"), 0xE4, END])
    assert completion.text == "".join(shown) == "a\ufffd"


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


def test_an_interrupt_before_the_first_token(tokenizer):
    class Impatient(Scripted):
        def forward(self, *_, **__):
            raise KeyboardInterrupt

    [completion], _ = generate(Impatient([65]), tokenizer, [[65]], max_tokens=5)
    assert (completion.text, completion.tokens) == ("", [])
    assert completion.finish_reason == "interrupted"


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


def test_a_finished_long_row_leaves_the_others_as_they_are(model, tokenizer):
    prompts = [list(range(CONTEXT - 4)), PROMPTS[1], PROMPTS[3]]
    together, _ = generate(model, tokenizer, prompts, max_tokens=40)
    assert [len(c.tokens) for c in together] == [4, 40, 40]
    for prompt, completion in zip(prompts, together):
        [alone], _ = generate(model, tokenizer, [prompt], max_tokens=40)
        assert alone.tokens == completion.tokens


def test_statistics_count_running_rows_only(tokenizer):
    model = Scripted([65, END], [65, 65, 65, END])
    _, statistics = generate(model, tokenizer, [[1, 2, 3], [1]], max_tokens=9, eos=(END,))
    assert statistics.prompt_tokens == 4
    assert statistics.generated_tokens == 6
    assert statistics.decoded_tokens == 4
    assert statistics.prefill_seconds > 0 and statistics.decode_seconds > 0
    assert 2**20 < statistics.peak_memory < 2**40


def test_rates():
    statistics = Statistics(10, 2.0, 9, 8, 4.0, 5) + Statistics(10, 3.0, 1, 0, 0.0, 7)
    assert statistics == Statistics(20, 5.0, 10, 8, 4.0, 7)
    assert (statistics.prompt_rate, statistics.generation_rate) == (4.0, 2.0)
    assert Statistics(1, 0.0, 0, 0, 0.0, 0).generation_rate == 0


@pytest.mark.parametrize(
    "prompts, options, reason",
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 has no tokens"),
        ([[1] * CONTEXT], {}, "prompt 0 has 128 tokens, which leaves no room"),
        ([[1, 320]], {}, "prompt 0 has tokens from 1 to 320 but the model knows 0 to 319"),
        ([[-1]], {}, "prompt 0 has tokens from -1"),
        ([[1]], {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ([[1]], {"stop_strings": [""]}, "a stop string must not be empty"),
        ([[1]], {"sampling": Sampling()}, "1 rows need as many generators, got 0"),
    ],
)
def test_bad_arguments_are_refused(tokenizer, prompts, options, reason):
    with pytest.raises(ValueError, match=reason):
        generate(Scripted([65]), tokenizer, prompts, **{"max_tokens": 5, **options})


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "sampled"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_reported(tokenizer, sampling, value):
    class Broken(Scripted):
        def forward(self, *arguments, **options):
            logits = super().forward(*arguments, **options)
            logits[1, 0, 5] = value
            return logits

    with pytest.raises(ValueError, match="logits for row 1 are not finite"):
        generate(
            Broken([65], [65]),
            tokenizer,
            [[1], [1]],
            max_tokens=5,
            sampling=sampling,
            generators=row_generators(0, 2),
            logprobs=True,
        )


# The command


@pytest.fixture
def command(folder, capsys):
    """Run the command in this process with the tiny model; returns (code, stdout, stderr)."""

    def run(*arguments, model: str | Path | None = folder, attention: str = "sdpa"):
        options = [] if model is None else ["--model", str(model)]
        options += ["--device", "cpu", "--attention", attention, "-m", "12"]
        code = main([*options, *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def expected_answer(model, tokenizer, prompt=DEFAULT_QUESTION, max_tokens=12, system=None):
    """What the command must print for a prompt, through the byte tokenizer's own encoder."""
    turns = [] if system is None else [("system", system)]
    turns.append(("user", prompt))
    tokens = [token for turn in turns for token in byte_tokenizer.encode_turn(*turn)]
    tokens += byte_tokenizer.encode_prompt()
    [completion], _ = generate(model, tokenizer, [tokens], max_tokens=max_tokens, eos=(END,))
    return completion.text


def test_the_default_question_is_answered(command, model, tokenizer):
    code, out, err = command()
    assert code == 0
    assert out == expected_answer(model, tokenizer) + "\n"
    for word in ("prompt ", "generation ", "tokens/s", "MiB", "sdpa on cpu in float32"):
        assert word in err
    assert "note: stopped after 12 tokens (--max-tokens)" in err


def test_a_bare_name_means_a_shipped_checkpoint(command, folder, model, tokenizer, monkeypatch):
    monkeypatch.setattr(session, "CHECKPOINTS", folder.parent)
    for arguments in (["--model", folder.name], ["--model", f"{folder}/"]):
        code, out, _ = command(*arguments, model=None)
        assert (code, out) == (0, expected_answer(model, tokenizer) + "\n")
    code, _, err = command(model="nosuch")
    assert code == 2
    assert err.startswith("error: there is no checkpoint folder 'nosuch'; shipped by name: ")
    assert folder.name in err


def test_greedy_text_is_the_same_with_every_version_of_attention(command):
    """On the device where the kernels run: a GPU, or the CPU through the interpreter."""
    outputs = {}
    for name in (*flash_versions.BASELINES, *flash_versions.VERSIONS, "auto"):
        options = ["-m", 8, "--device", "auto", "--dtype", "float32"]
        code, outputs[name], err = command(*options, attention=name)
        assert code == 0
        if name in flash_versions.VERSIONS:
            assert f"{name} on " in err
            assert ("slow by design" in err) == interpreter.enabled()
    assert len(set(outputs.values())) == 1, outputs


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(command, dtype):
    code, out, err = command("--dtype", dtype)
    assert code == 0 and out and f"in {dtype}" in err


def test_a_prompt_from_standard_input(command, model, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Grüße 🌍\n"))
    code, out, _ = command("-p", "-")
    assert (code, out) == (0, expected_answer(model, tokenizer, "Grüße 🌍") + "\n")


def test_a_system_prompt_and_what_the_model_sees(command, model, tokenizer):
    code, out, err = command("-p", "hi <|im_end|>", "--system-prompt", "Be kind.", "--show-prompt")
    assert code == 0
    assert out == expected_answer(model, tokenizer, "hi <|im_end|>", system="Be kind.") + "\n"
    assert (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>" in err
    )


def test_ignoring_the_template(command, model, tokenizer):
    code, out, _ = command("-p", "What is", "--ignore-chat-template")
    [completion], _ = generate(model, tokenizer, [spell("What is")], max_tokens=12, eos=(END,))
    assert (code, out) == (0, completion.text + "\n")


def test_json_and_no_stream_give_the_same_text(command, model, tokenizer):
    text = expected_answer(model, tokenizer)
    assert command("--no-stream")[1] == text + "\n"
    code, out, err = command("--json")
    result = json.loads(out)
    assert (code, err, result["text"]) == (0, "", text)
    assert result["prompt"] == DEFAULT_QUESTION
    assert (result["finish_reason"], result["generated_tokens"]) == ("length", 12)
    assert result["attention"] == "sdpa" and result["generation_rate"] > 0


def test_a_seed_repeats_and_seeds_differ(command):
    texts = [command("--temp", 1.5, "--seed", seed)[1] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_stop_strings_end_the_answer(command, model, tokenizer):
    text = expected_answer(model, tokenizer)
    stop = text[4:6]
    code, out, err = command("--stop", "never said", "--stop", stop)
    assert (code, out) == (0, text[: text.index(stop)] + "\n")
    assert "note" not in err


def test_a_full_context_is_explained(command):
    _, _, err = command("-p", "x" * (CONTEXT - 50), "-m", 1000)
    assert "tokens: the model's context of 128 is full" in err


def test_an_interrupted_answer_keeps_its_text(command, model, tokenizer, monkeypatch):
    written: list[str] = []

    def interrupt(self, text):
        written.append(text)
        if len(written) == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("transformer.generate.stream", interrupt)
    code, out, err = command()
    assert (code, out) == (130, "\n")
    assert expected_answer(model, tokenizer).startswith("".join(written))
    assert "note: interrupted" in err


def test_thoughts_are_dimmed_on_a_terminal_only(capsys, monkeypatch):
    from transformer.generate import stream

    stream(0, "<think>1</think>")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    stream(0, "<think>2</think>")
    assert capsys.readouterr().out == "<think>1</think>\x1b[2m<think>2</think>\x1b[22m"


# Files of prompts


QUESTIONS = ["hi", "What is 1+1?", "ü" * 20, "a", "b" * 30]


@pytest.fixture
def questions(tmp_path) -> Path:
    path = tmp_path / "questions.jsonl"
    lines = [{"prompt": q, "id": i} for i, q in enumerate(QUESTIONS[:-1])]
    lines.append({"messages": [{"role": "user", "content": QUESTIONS[-1]}]})
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    return path


def test_a_file_is_answered_as_a_ragged_batch(command, model, tokenizer, questions, tmp_path):
    code, out, err = command("--input", questions)
    answers = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "tokens/s" in err
    assert [a["text"] for a in answers] == [
        expected_answer(model, tokenizer, question) for question in QUESTIONS
    ]
    assert [a.get("id") for a in answers] == [0, 1, 2, 3, None]
    assert answers[0]["prompt"] == "hi" and answers[0]["finish_reason"] == "length"

    output = tmp_path / "answers.jsonl"
    code, nothing, _ = command("--input", questions, "--output", output)
    assert (code, nothing, output.read_text()) == (0, "", out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "questions.jsonl"]


def test_sampled_text_does_not_depend_on_the_batch_size(command, questions):
    options = ["--input", questions, "--temp", 1.2, "--seed", 3]
    outputs = {command(*options, "--batch-size", size)[1] for size in (1, 2, 5, 16)}
    assert len(outputs) == 1
    texts = [json.loads(line)["text"] for line in outputs.pop().splitlines()]
    assert len(set(texts)) == len(texts)


def killed_in_batch(monkeypatch, number, kill):
    """Let the given batch end by `kill`; the batches before it are answered."""
    answer = session.Session.answer
    batches: list[int] = []

    def answer_or_die(self, prompts, generators, on_text=None):
        batches.append(len(prompts))
        completions, statistics = answer(self, prompts, generators, on_text)
        return (
            (kill(completions), statistics) if len(batches) == number else (completions, statistics)
        )

    monkeypatch.setattr(session.Session, "answer", answer_or_die)
    return batches


def interrupt(completions):
    return [replace(c, finish_reason="interrupted") for c in completions]


def die(completions):
    raise SystemExit  # like a kill, nothing catches it


@pytest.mark.parametrize("kill", [interrupt, die])
def test_an_interrupted_file_is_continued(kill, command, questions, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    given = ("--input", questions, "--batch-size", 2, "--temp", 1, "--output", output)
    assert command(*given)[0] == 0
    expected = output.read_text()
    output.unlink()
    with monkeypatch.context() as patch:
        killed_in_batch(patch, 2, kill)
        if kill is die:
            with pytest.raises(SystemExit):
                command(*given)
        else:
            code, _, err = command(*given)
            assert code == 130 and "2 of 5 answers are kept in" in err
    assert not output.exists()
    partial = tmp_path / ".answers.jsonl.partial"
    partial.write_text(partial.read_text() + '{"prompt": "cut o')
    batches = killed_in_batch(monkeypatch, 0, kill)
    code, _, err = command(*given)
    assert code == 0 and "continuing after 2 of 5 answers" in err
    assert batches == [2, 1]
    assert output.read_text() == expected
    assert not partial.exists()


def test_answers_of_different_runs_are_not_mixed(command, questions, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    given = ("--input", questions, "--batch-size", 2, "--output", output)
    with monkeypatch.context() as patch:
        killed_in_batch(patch, 2, interrupt)
        assert command(*given)[0] == 130
    code, _, err = command(*given, "--temp", 0.5)
    assert code == 2 and "unfinished run with other prompts or options" in err


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "line 2 is not valid JSON"),
        ("[1]", "line 2 must be an object with"),
        ('{"text": "x"}', "line 2 must be an object with"),
        ('{"prompt": "x", "messages": []}', "line 2 must be an object with"),
        ('{"prompt": 3}', 'line 2: "prompt" must be a string'),
        ('{"messages": "x"}', 'line 2: "messages" must be a list'),
        ('{"messages": []}', "line 2: a conversation needs at least one message"),
        ('{"messages": [{"content": "x"}]}', "line 2: a message must be an object with a 'role'"),
        ('{"messages": [{"role": "user"}]}', "line 2: the chat template failed"),
        ('{"prompt": "\\ud800"}', "line 2: the text is not valid UTF-8"),
        (json.dumps({"prompt": "x" * CONTEXT}), "line 2: the prompt has"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_written(command, tmp_path, line, reason):
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    code, out, err = command("--input", path, "--output", output)
    assert (code, out) == (2, "") and not output.exists()
    assert reason in err and err.count("\n") == 1


def test_a_file_that_is_no_text_is_refused(command, tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "\xfc"}')
    code, out, err = command("--input", path)
    assert (code, out) == (2, "") and "latin.jsonl is not UTF-8 text" in err


def test_a_failed_write_loses_nothing(command, questions, tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("the disk is full")

    output = tmp_path / "answers.jsonl"
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        code, _, err = command("--input", questions, "--output", output)
    assert (code, err) == (2, "error: the disk is full\n")
    assert not output.exists()
    code, _, err = command("--input", questions, "--output", output)
    assert (code, err) == (0, "continuing after 5 of 5 answers\n")
    assert len(output.read_text().splitlines()) == 5
    assert {path.name for path in tmp_path.iterdir()} == {"questions.jsonl", "answers.jsonl"}


# A conversation


def converse(command, monkeypatch, *lines, arguments=()):
    def answer(prompt=""):
        if not typed:
            raise EOFError
        line = typed.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    typed = list(lines)
    monkeypatch.setattr("builtins.input", answer)
    return command("--chat", *arguments)


def test_a_chat_remembers_and_forgets(command, model, tokenizer, monkeypatch):
    code, out, err = converse(
        command, monkeypatch, "hi", "and?", "/clear", "", "hi", "/exit", "never", arguments=["-m6"]
    )
    first = expected_answer(model, tokenizer, "hi", 6)
    history = [("user", "hi"), ("assistant", first), ("user", "and?")]
    tokens = [token for turn in history for token in byte_tokenizer.encode_turn(*turn)]
    tokens += byte_tokenizer.encode_prompt()
    [second], _ = generate(model, tokenizer, [tokens], max_tokens=6, eos=(END,))
    assert (code, out) == (0, f"{first}\n{second.text}\n{first}\n")
    assert "/help" in err


def test_the_commands_of_a_chat(command, monkeypatch):
    lines = ["/stats", "/nonsense", "/help", "hi", "/stats", KeyboardInterrupt]
    code, _, err = converse(command, monkeypatch, *lines)
    assert code == 0
    assert "nothing has been answered yet" in err
    assert "there is no command /nonsense" in err
    assert err.count("/clear") == 3  # at the start, for the unknown command and for /help
    assert err.count("tokens/s") == 2
    assert "/exit leaves the chat" in err


def test_a_chat_survives_an_interrupt_and_a_full_context(command, monkeypatch):
    seen: list[str] = []

    def interrupt_once(row, text):
        seen.append(text)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("transformer.generate.stream", interrupt_once)
    code, _, err = converse(command, monkeypatch, "hi", "x" * 200, "and?")
    assert code == 0
    assert "note: interrupted" in err
    assert "error: the conversation has" in err and "/clear starts a new one" in err
    assert len(seen) > 2, "the chat ended with the interrupt"


# Refusals


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--temp", "nan"], "temperature must be a finite number"),
        (["--temp", "-1"], "temperature must be a finite number"),
        (["--temp", "warm"], "invalid float value: 'warm'"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--min-p", "2"], "min_p must be between 0 and 1"),
        (["--top-k", "-1"], "top_k must be a whole number"),
        (["--repetition-penalty", "0"], "repetition_penalty must be"),
        (["-m", "0"], "--max-tokens must be at least 1, got 0"),
        (["--batch-size", "0"], "--batch-size must be at least 1, got 0"),
        (["--stop", ""], "--stop must not be empty"),
        (["--attention", "fa9"], "invalid choice: 'fa9'"),
        (["--dtype", "int8"], "invalid choice: 'int8'"),
        (["--device", "abacus"], "--device abacus is unknown"),
        (["--device", "meta"], "--device meta is not supported"),
        (["--device", "cuda:99"], "--device cuda:99 is not there"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--chat", "-p", "x"], "--chat and --prompt exclude each other"),
        (["--input", "x", "-p", "x"], "--prompt and --input exclude each other"),
        (["--output", "x"], "--output needs --input"),
        (["--input", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["--input", __file__, "--output", "/no/such/folder/x"], "does not exist"),
        (["--input", __file__, "--output", "/"], "--output / is a folder"),
        (["--input", os.devnull], "has no prompts"),
        (["-p", "x" * 200], "the prompt has 2"),
        (["-p", "\udcff"], "the text is not valid UTF-8"),
        (["-p", "", "--ignore-chat-template"], "the prompt has no tokens"),
        (["--system-prompt", "x", "--ignore-chat-template"], "exclude each other"),
    ],
)
def test_bad_arguments_are_one_sentence(command, arguments, reason):
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and reason in err
    assert err.count("\n") == 1


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def edit_config(**changes):
    def edit(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return edit


def replace_template(text: str):
    return lambda folder: (folder / "chat_template.jinja").write_text(text)


def remove(name: str):
    return lambda folder: (folder / name).unlink()


@pytest.mark.parametrize(
    "damage, reason",
    [
        (truncate, "model.safetensors"),
        (remove("model.safetensors"), "model.safetensors"),
        (remove("config.json"), "config.json"),
        (remove("tokenizer.json"), "tokenizer.json"),
        (edit_config(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
        (edit_config(rope_scaling={"rope_type": "spiral", "factor": 2.0}), "spiral"),
        (edit_config(num_hidden_layers=3), "missing"),
        (edit_config(num_hidden_layers=1), "unexpected"),
        (edit_config(num_attention_heads=3, num_key_value_heads=2), "multiple"),
        (edit_config(vocab_size=300), "the tokenizer has 320 tokens but the model knows 300"),
        (replace_template("{{ raise_exception('no such role') }}"), "no such role"),
        (replace_template("{{ ''.__class__.__mro__ }}"), "chat template failed"),
        (replace_template("{% for %}"), "chat template failed (line 1)"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(command, folder, tmp_path, damage, reason):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    damage(damaged)
    code, out, err = command(model=damaged)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and reason in err
    assert err.count("\n") == 1


def test_a_model_without_a_template_takes_plain_prompts(command, folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("chat_template.jinja"))
    plain = command("-p", "What", model=bare)
    assert plain[:2] == command("-p", "What", "--ignore-chat-template")[:2]
    for arguments in (["--chat"], ["--system-prompt", "x"]):
        code, _, err = command(*arguments, model=bare)
        assert code == 2 and "has no chat template" in err


def test_the_command_in_a_process_of_its_own(folder, model, tokenizer):
    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "transformer.generate", "--device", "cpu", *arguments],
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=120,
        )

    good = run("--model", str(folder), "--attention", "sdpa", "-m", "5")
    assert good.returncode == 0
    assert good.stdout == expected_answer(model, tokenizer, max_tokens=5) + "\n"
    bad = run("--model", "/no/such/folder")
    assert (bad.returncode, bad.stdout) == (2, "")
    assert bad.stderr.splitlines()[-1].startswith("error: there is no checkpoint folder")
    assert "Traceback" not in bad.stderr
