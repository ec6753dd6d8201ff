"""The generate command: what it prints for a question and in a conversation."""

import io
import json
import re
import shutil
import signal
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import flash_versions
from flash_versions.dispatch.device import devices
from tests.helpers import ROOT
from tests.helpers.models.family_checkpoints import make_checkpoint
from tests.helpers.models.tiny_model import CONFIG, CONTEXT, END, expected_answer
from transformer.generate import DEFAULT_QUESTION
from transformer.generation import batch, session
from transformer.generation.engine import generate
from transformer.model.decoder import choose_attention
from transformer.training import byte_tokenizer


def test_the_default_question_is_answered(command, model, tokenizer):
    code, out, err = command()
    assert code == 0
    assert out == expected_answer(model, tokenizer) + "\n"
    for word in ("prompt ", "generation ", "tokens/s", "MiB", "sdpa on cpu in float32"):
        assert word in err
    assert "note: stopped after 12 tokens (--max-tokens)" in err


def test_greedy_text_is_the_same_with_every_version_of_attention(command):
    """On the device where the kernels run: a GPU, or the CPU, simulated."""
    outputs = {}
    for name in (*flash_versions.BASELINES, *flash_versions.VERSIONS, "auto"):
        options = ["-m", 8, "--device", "auto", "--dtype", "float32"]
        code, outputs[name], err = command(*options, attention=name)
        assert code == 0
        if name in flash_versions.VERSIONS:
            assert f"{name} on " in err
            assert ("slow by design" in err) == (not torch.cuda.is_available())
    assert len(set(outputs.values())) == 1, outputs


def test_a_lesson_answers_as_torch_does(command):
    options = ["-m", 4, "--device", "auto", "--dtype", "float32", "-p", "sort 5 2"]
    found = [command(*options, model="reinforced", attention=x) for x in ("lesson-fa2", "sdpa")]
    assert found[0][:2] == found[1][:2] and found[0][0] == 0 and "lesson-fa2 on" in found[0][2]


def test_only_attention_that_the_model_can_use_is_recommended(command, tmp_path):
    pytest.importorskip("transformers")
    make_checkpoint("gpt-oss", tmp_path)
    for name, text in byte_tokenizer.files().items():
        (tmp_path / name).write_text(text)
    options = ("--device", "cpu", "-m", 1)
    code, _, err = command("-p", "a", *options, model=tmp_path, attention="fa2")
    assert code == 0 and "for reading; --attention reference is faster\n" in err
    code, _, err = command("-p", "a", *options, attention="fa2")
    assert code == 0 and "for reading; --attention sdpa is faster\n" in err


def test_a_batch_in_fp8_answers_as_its_rows_alone(command, tmp_path):
    """Lengths differ, and no row is quantised with another one's keys."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": x}) + "\n" for x in ("hi", "a longer question")))
    outputs = []
    for size in (1, 2):
        options = ["--input", file, "--batch-size", size, "-m", 2, "--precision", "fp8"]
        code, out, err = command(*options, "--device", "auto", attention="auto")
        assert code == 0 and "in bfloat16 and fp8" in err
        outputs.append(out)
    assert outputs[0] == outputs[1]


def test_a_prompt_from_standard_input(command, model, tokenizer, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Grüße 🌍\n"))
    code, out, _ = command("-p", "-")
    assert (code, out) == (0, expected_answer(model, tokenizer, "Grüße 🌍") + "\n")


def test_attention_must_serve_every_layer(monkeypatch):
    """Each kind of layer is asked for, and what cannot do all of them is refused."""
    cpu, dtype = torch.device("cpu"), torch.float32
    windowed, capped, sinking = (
        replace(CONFIG, **change)
        for change in ({"layer_windows": (None, 5)}, {"scores_softcap": 30.0}, {"sinks": True})
    )
    for name in ("sdpa", "fa1"):
        assert choose_attention(name, windowed, cpu, dtype) == (name, [])
        with pytest.raises(ValueError, match=f"version '{name}': softcap is not possible"):
            choose_attention(name, capped, cpu, dtype)
    with pytest.raises(ValueError, match="version 'sdpa': sink is not possible"):
        choose_attention("sdpa", sinking, cpu, dtype)
    for config in (windowed, capped, sinking):
        assert choose_attention("auto", config, cpu, dtype)[0] in flash_versions.VERSIONS
    for config, chosen in ((windowed, "sdpa"), (capped, "reference"), (sinking, "reference")):
        assert choose_attention("auto", config, cpu, dtype, simulated=False)[0] == chosen
    # Where no kernel runs, as on a GPU that is too old:
    monkeypatch.setattr(type(devices), "simulates", False)
    name, [note] = choose_attention("auto", windowed, cpu, dtype)
    assert name == "sdpa" and "simulates these kernels" in note
    name, [note] = choose_attention("auto", capped, cpu, dtype)
    assert name == "reference" and note.startswith("attention is reference, PyTorch written out: ")


def test_a_system_prompt_and_what_the_model_sees(command, model, tokenizer, tmp_path):
    code, out, err = command("-p", "hi <|im_end|>", "--system-prompt", "Be kind.", "--show-prompt")
    assert code == 0
    assert out == expected_answer(model, tokenizer, "hi <|im_end|>", system="Be kind.") + "\n"
    assert (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi <|im_end|><|im_end|>" in err
    )
    path = tmp_path / "in.jsonl"  # a conversation with a system prompt of its own
    path.write_text('{"messages": [{"role": "system", "content": "Be quick."}]}')
    _, _, err = command("--input", path, "--system-prompt", "Be kind.", "--show-prompt")
    assert err.startswith("<|im_start|>system\nBe quick.") and "Be kind." not in err


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


@pytest.mark.parametrize(
    "error, said",
    [
        (MemoryError("the cache of 9 rows takes 8.0 GiB"), "the cache of 9 rows takes 8.0 GiB"),
        (torch.OutOfMemoryError("CUDA out of memory"), "the memory is full"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 1 b"), "the memory is full"),
    ],
    ids=["cache", "GPU", "CPU"],
)
def test_full_memory_is_one_sentence(command, monkeypatch, error, said):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(session.Session, "answer", fail)
    code, out, err = command("-p", "x")
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert err == f"error: {said}; a smaller --max-tokens or --dtype bfloat16 needs less\n"


@pytest.mark.parametrize(
    ("options", "attention", "hint"),
    [("", "fa2", "a smaller --max-tokens, --cache paged or --dtype bfloat16"),
     ("--dtype bfloat16", "fa1", "a smaller --max-tokens"),
     ("--dtype float16 --cache paged", "fa2", "a smaller --max-tokens"),
     ("--input {}", "sdpa", "a smaller --max-tokens or --batch-size or --dtype bfloat16"),
     ("--model {}", "fa2", "a smaller model")],
)  # fmt: skip
def test_only_what_the_model_can_use_is_said_to_need_less(
    command, monkeypatch, tmp_path, options, attention, hint
):
    """Each hint that is given is one that the command takes."""

    def fail(*_, **__):
        raise MemoryError

    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "hi"}\n')
    monkeypatch.setattr(session.Session, "load" if "model" in options else "answer", fail)
    code, _, err = command(*options.format(file).split(), attention=attention)
    assert code == 2 and err.endswith(f"error: the memory is full; {hint} needs less\n")
    monkeypatch.undo()
    for works in re.findall(r"--(?:cache|dtype) \w+", hint):
        assert command("-p", "a", "-m", 1, *works.split(), attention=attention)[0] == 0


# A conversation


def converse(command, monkeypatch, *lines, arguments=("--chat",)):
    def answer(prompt=""):
        if not typed:
            raise EOFError
        line = typed.pop(0)
        if line is KeyboardInterrupt:
            raise KeyboardInterrupt
        return line

    typed = list(lines)
    monkeypatch.setattr("builtins.input", answer)
    return command(*arguments)


def test_a_chat_remembers_and_forgets(command, model, tokenizer, monkeypatch):
    lines = ["hi", "and?", "/clear", "", "hi", "/exit", "never"]
    code, out, err = converse(command, monkeypatch, *lines, arguments=["--chat", "-m6"])
    first = expected_answer(model, tokenizer, "hi", 6)
    history = [("user", "hi"), ("assistant", first), ("user", "and?")]
    tokens = [token for turn in history for token in byte_tokenizer.encode_turn(*turn)]
    tokens += byte_tokenizer.encode_prompt()
    [second], _ = generate(model, tokenizer, [tokens], max_tokens=6, eos=(END,))
    assert (code, out) == (0, f"{first}\n{second.text}\n{first}\n")
    assert "/help" in err


def test_a_chat_on_a_gpu_loads_its_kernels_before_the_first_question(command, monkeypatch):
    really, load, asked = session.Session.answer, session.Session.load, []

    def watch(self, prompts, *arguments, **options):
        asked.append("kept" in options)
        return really(self, prompts, *arguments, **options)

    def typed(prompt=""):
        asked.append(prompt)
        return "hi" if asked.count("> ") == 1 else "/exit"

    _, plain, _ = converse(command, monkeypatch, "hi", arguments=["--chat", "--temp", "1"])
    on_gpu = lambda *names, **options: replace(load(*names, **options), device=torch.device("cuda"))  # noqa: E731
    monkeypatch.setattr(session.Session, "load", on_gpu)
    monkeypatch.setattr(session.Session, "answer", watch)
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", typed)
    _, out, err = command("--chat", "--temp", "1")
    assert asked == [False, "> ", True, "> "]
    assert out == plain and err.startswith("/help")


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
    assert "error: the question has" in err and "leaves no room for an answer" in err
    assert len(seen) > 2, "the chat ended with the interrupt"


@pytest.mark.parametrize("options", [(), ("--lookup", 3, "--prefill-chunk", 4), ("--no-stream",)])
def test_a_chat_reads_only_what_is_new(command, monkeypatch, options):
    """Without a stream as on a GPU, where a fixed cache takes steps in vain."""
    monkeypatch.setattr(batch, "steps_at_a_time", lambda device: 3)
    lines = [x for question in ("hi", "and?", "what?") for x in (question, "/stats")]
    said, reports = [], []
    for anew in (False, True):
        with monkeypatch.context() as patch:
            if anew:
                patch.setattr("transformer.generation.batch.Kept.move_to", lambda *_: 0)
            code, out, err = converse(command, patch, *lines, arguments=["--chat", "-m4", *options])
        assert code == 0
        said.append(out)
        counted = [line for line in err.splitlines() if line.startswith("prompt ")]
        found = [re.findall(r"(\d+) tokens[,\s]", line) for line in counted]
        reports.append([[*map(int, counts)] for counts in found])
    assert said[0] == said[1]
    kept, whole = reports
    assert [sum(counts) for counts in kept] == [sum(counts) for counts in whole]
    assert [len(counts) for counts in kept] == [1, 2, 2]
    assert all(counts[1] >= sum(before) for counts, before in zip(kept[1:], kept))


def test_a_full_context_forgets_the_oldest_turns(command, model, tokenizer, monkeypatch):
    """Of a context of 128 tokens a quarter is left for the answer."""
    asked = ["a" * 20, "b" * 20, "c" * 20, "d" * 20]
    seen: list[list[int]] = []
    answer = session.Session.answer

    def watch(self, prompts, *arguments, **options):
        seen.extend(map(list, prompts))
        return answer(self, prompts, *arguments, **options)

    monkeypatch.setattr(session.Session, "answer", watch)
    arguments = ["--chat", "-m4", "--system-prompt", "Be"]
    code, out, err = converse(command, monkeypatch, *asked, arguments=arguments)
    assert code == 0 and "error" not in err and len(seen) == 4
    assert "note: the context is full, so the " in err and " forgotten" in err
    for question, tokens in zip(asked, seen):
        assert len(tokens) <= CONTEXT - 4
        text = tokenizer.decode(tokens)
        assert text.startswith("<|im_start|>system\nBe<|im_end|>") and question in text
    assert asked[0] not in tokenizer.decode(seen[3]) and asked[2] in tokenizer.decode(seen[3])
    # What was said goes on from what is left.
    [said], _ = generate(model, tokenizer, [seen[3]], max_tokens=4, eos=(END,))
    assert out.endswith(f"{said.text}\n")


def test_a_full_chat_reads_what_is_left_once(command, monkeypatch):
    """The question behind one for which turns were forgotten reads only what is new."""
    lines = [line for question in "abcdefghi" for line in (question, "/stats")]
    arguments = ["--chat", "-m2", "--system-prompt", "Be"]
    code, _, err = converse(command, monkeypatch, *lines, arguments=arguments)
    assert code == 0 and "error" not in err
    forgot, seen = [], [0]
    for part in err.split("\nprompt ")[:-1]:
        forgot.append(" forgotten" in part)
    for read, kept in re.findall(r"^prompt +(\d+) tokens,(?:.*; (\d+) tokens)?", err, re.MULTILINE):
        if not forgot[len(seen) - 1]:
            assert int(kept or 0) >= seen[-1]
        seen.append(int(read) + int(kept or 0))
    assert len(forgot) == len(seen) - 1 == 9
    assert sum(forgot) >= 2 and (True, True) not in pairwise(forgot)


def test_thinking_is_told_to_the_template(command, folder, tmp_path):
    for options, empty in ((), False), (("--enable-thinking",), False), (("--no-thinking",), True):
        code, _, err = command("-p", "hi", "--show-prompt", *options)
        assert code == 0 and ("assistant\n<think></think>\n[" in err) == empty
    code, out, err = command("-p", "hi", "--no-thinking", "--ignore-chat-template")
    assert (code, out) == (2, "") and "and none is used" in err
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    (own / "chat_template.jinja").write_text("{{ messages[0].content }}")
    code, out, err = command("-p", "hi", "--enable-thinking", model=own)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"the chat template of {own} does not ask" in err


def test_an_option_that_changes_nothing_says_so(command):
    assert "note: without --temp, --top-k, --seed change" in command("--top-k", 3, "--seed", 1)[2]
    assert "note: without" not in command("--top-k", 3, "--temp", 1)[2]
    assert "note: without" not in command("--repetition-penalty", 1.2)[2]


def test_the_documented_lines_of_python_answer(capsys):
    page = (ROOT / "docs/use/generate.md").read_text()
    [lines] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(lines, {})
    assert capsys.readouterr().out.endswith("</think><answer>843</answer>\n")
