"""The generate command on files of prompts, and how an interrupted file goes on."""

import io
import json
import os
import shutil
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.helpers.models.tiny_model import CONTEXT, expected_answer
from transformer.generation import answers
from transformer.generation.batch import Batch
from transformer.model.files import only_writer_of

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
    found = [json.loads(line) for line in out.splitlines()]
    assert code == 0 and "tokens/s" in err
    assert [a["text"] for a in found] == [
        expected_answer(model, tokenizer, question) for question in QUESTIONS
    ]
    assert [a.get("id") for a in found] == [0, 1, 2, 3, None]
    assert found[0]["prompt"] == "hi" and found[0]["finish_reason"] == "length"

    output = tmp_path / "answers.jsonl"
    code, nothing, _ = command("--input", questions, "--output", output)
    assert (code, nothing, output.read_text()) == (0, "", out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "questions.jsonl"]


def test_the_batch_size_and_pages_change_no_sampled_text(command, questions, tmp_path, monkeypatch):
    """Places are given to the prompts that wait; the answers stand in the order of the prompts."""
    options = ["--input", questions, "--temp", 1.2, "--seed", 3, "-m", 40, "--stop", "a"]
    _, expected, _ = command(*options)
    assert len({len(json.loads(line)["text"]) for line in expected.splitlines()}) > 2
    assert command(*options, "--batch-size", 2)[1] == expected
    options += ["--cache", "paged", "--page-size", 16, "--batch-size", 2]
    code, out, err = command(*options, "--stats", attention="reference")
    assert (code, out) == (0, expected) and "2 rows at once" in err
    output = tmp_path / "answers.jsonl"
    assert command(*options, "--output", output, attention="reference")[0] == 0
    assert output.read_text() == expected
    monkeypatch.setattr(answers, "BATCHES", 1)  # in parts, as a long file
    assert command(*options, attention="reference")[1] == expected


def interrupted_in_batch(monkeypatch, number):
    """Press Ctrl-C as the given batch begins; the batches before it are answered."""
    run, batches = Batch.run, list[int]()

    def run_or_stop(self, *callbacks):
        batches.append(len(self.rows))
        if len(batches) == number:
            raise KeyboardInterrupt
        run(self, *callbacks)

    monkeypatch.setattr(Batch, "run", run_or_stop)
    return batches


def test_an_interrupted_file_is_continued(command, questions, tmp_path, monkeypatch):
    output = tmp_path / "answers.jsonl"
    # JSON allows these three as they are, although str.splitlines takes them for ends of lines.
    lines = questions.read_text().replace('"id": 0', '"id": "\u2028\u2029\x85"')
    questions.write_text(lines, encoding="utf-8")
    given = ("--input", questions, "--batch-size", 2, "--temp", 1, "--output", output)
    assert command(*given)[0] == 0
    expected = output.read_text()
    output.unlink()
    with monkeypatch.context() as patch:
        interrupted_in_batch(patch, 2)
        code, _, err = command(*given)
        assert code == 130 and "2 of 5 answers are kept in" in err
    assert not output.exists()
    partial = tmp_path / ".answers.jsonl.partial"
    cut = '{"prompt": "cut within é'.encode()[:-1]  # as a kill leaves it
    partial.write_bytes(partial.read_bytes() + cut)
    batches = interrupted_in_batch(monkeypatch, 0)
    code, _, err = command(*given)
    assert code == 0 and "continuing after 2 of 5 answers" in err
    assert batches == [2, 1] and output.read_text() == expected and not partial.exists()


def other_lines(folder, questions):
    """The same prompts; what else the lines hold is written to the answers too."""
    questions.write_text(questions.read_text().replace('"id": 0', '"id": 9'))


def other_weights(folder, questions):
    os.utime(folder / "model.safetensors", ns=(1, 1))


@pytest.mark.parametrize(
    "change, options",
    [
        (None, ()), (other_lines, ()), (other_weights, ()), (None, ("--temp", 0.5)),
        (None, ("--seed", 5)), (None, ("--stop", "q")), (None, ("--top-k", 3)),
        (None, ("--top-p", 0.5)), (None, ("--min-p", 0.3)), (None, ("--repetition-penalty", 1.2)),
        (None, ("-m", 5)), (None, ("--dtype", "bfloat16")), (None, ("--prefill-chunk", 4)),
        (None, ("--attention", "reference")),
    ],
    ids=lambda x: x.__name__ if callable(x) else " ".join(map(str, x or ())),
)  # fmt: skip
def test_answers_of_different_runs_are_not_mixed(
    change, options, command, folder, questions, tmp_path, monkeypatch
):
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    given = ("--input", questions, "--batch-size", 2, "--output", tmp_path / "answers.jsonl")
    given += ("--temp", 1)
    with monkeypatch.context() as patch:
        interrupted_in_batch(patch, 2)
        assert command(*given, model=own)[0] == 130
    if change:
        change(own, questions)
    # Another way to name the same folder is the same run.
    code, _, err = command(*given, *options, model=own / ".." / "own")
    mixed = bool(change or options)
    assert code == 2 * mixed and ("unfinished run with other prompts or options" in err) == mixed


@pytest.mark.parametrize(
    "line, reason",
    [
        ("{", "line 2 is not valid JSON"),
        ('{"text": "x"}', "line 2 must be an object with"),
        ('{"prompt": "x", "messages": []}', 'line 2 has both "prompt" and "messages"'),
        ('{"prompt": "x", "text": "y"}', 'line 2 has a field "text", which is the name of a field'),
        ('{"prompt": 3}', 'line 2: "prompt" must be a string'),
        ('{"messages": [{"content": "x"}]}', 'line 2: message 1 has no "role"'),
        ('{"messages": [{"role": "user"}]}', 'message 1: "content" must be a string, not null'),
        ('{"messages": [{"role": "user", "content": [{"text": "x"}]}]}', "must be a string, not a"),
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


def test_what_the_chat_template_leaves_out_is_named(command, folder, tmp_path):
    own, path = tmp_path / "own", tmp_path / "in.jsonl"
    shutil.copytree(folder, own)
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    (own / "chat_template.jinja").write_text(template)
    path.write_text('{"messages": [{"role": "human", "content": "Hi"}]}\n')
    code, out, err = command("--input", path, model=own)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"{path}, line 1: the chat template writes nothing of the message 'Hi', whose" in err
    code, _, err = command("-p", "Hi", "--system-prompt", "Be kind.", model=own)
    assert code == 2 and "nothing of the message 'Be kind.', whose role is 'system'" in err
    path.write_text('{"prompt": "Hi", "tools": [{"name": "add"}]}\n')
    code, _, err = command("--input", path, model=own)
    assert code == 2 and "line 1: the chat template writes nothing of tools" in err
    (own / "chat_template.jinja").write_text(template + "{{ tools[0].name }}")
    code, _, err = command("--input", path, "--show-prompt", model=own)
    assert code == 0 and err.startswith("Hiadd\n")


def _as_list(lines):
    """A JSON document of the same objects, as a pretty printer writes it."""
    return json.dumps([json.loads(x) for x in lines.split(b"\n") if x], indent=2).encode()


def test_prompts_from_standard_input(command, questions, monkeypatch):
    _, expected, _ = command("--input", questions)
    content = questions.read_bytes()
    for given in (content, b"\xef\xbb\xbf" + content, _as_list(content)):
        stdin = io.TextIOWrapper(io.BytesIO(given), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", stdin)
        assert command("--input", "-")[:2] == (0, expected)
    monkeypatch.setattr(sys, "stdin", io.StringIO("{}\n"))
    code, _, err = command("--input", "-")
    assert code == 2 and err.startswith('error: standard input, line 1 must be an object with "')


@pytest.mark.parametrize("change", ["prompts", "seed", "nothing"])
def test_a_finished_output_is_replaced_only_by_force(change, command, questions, tmp_path):
    output = tmp_path / "answers.jsonl"
    output.touch()  # as mktemp makes it
    given = ["--input", questions, "--temp", 1, "--output", output]
    assert command(*given)[0] == 0
    finished = output.read_text()
    if change == "prompts":
        questions.write_text('{"prompt": "another"}\n')
    given += ["--seed", int(change == "seed")]
    code, out, err = command(*given)
    assert (code, out) == (2, "") and err.count("error: ") == 1
    assert f"--output {output} is not empty; --force replaces what it holds" in err
    assert output.read_text() == finished
    assert command(*given, "--force")[0] == 0
    assert (output.read_text() == finished) == (change == "nothing")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["answers.jsonl", "questions.jsonl"]


def test_a_pipe_gets_each_answer_at_once(command, questions, tmp_path, monkeypatch):
    given = ("--input", questions, "--batch-size", 2)
    _, expected, _ = command(*given)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for interrupted in (False, True):
        found: list[str] = []
        reader = threading.Thread(target=lambda to=found: to.append(pipe.read_text()), daemon=True)
        reader.start()
        if interrupted:
            interrupted_in_batch(monkeypatch, 2)
        code, out, err = command(*given, "--output", pipe)
        reader.join(10)
        assert (code, out) == (130 * interrupted, "") and "are kept" not in err
        count = 2 if interrupted else len(QUESTIONS)
        assert found[0].splitlines()[:count] == expected.splitlines()[:count]
    assert pipe.is_fifo()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["pipe", "questions.jsonl"]


@pytest.mark.parametrize(
    "given", ["--input {in} --output {full}", "--input {in}", "-p Hi", "--chat"]
)
def test_a_full_device_is_named(given, command, questions, full_device, monkeypatch):
    given = given.format(**{"in": questions, "full": full_device}).split()
    name = full_device if "--output" in given else "standard output"
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    with suppress(OSError), full_device.open("w") as full:  # which flushes what is left
        monkeypatch.setattr(sys, "stdout", full)
        code, _, err = command(*given)
        monkeypatch.undo()
        assert code == 2 and err.endswith(f"error: {name}: No space left on device\n")
    assert full_device.is_char_device() and os.listdir(full_device.parent) == [full_device.name]


def test_answers_go_where_a_link_leads(command, questions, tmp_path):
    _, expected, _ = command("--input", questions)
    link, target = tmp_path / "link", tmp_path / "folder" / "answers.jsonl"
    target.parent.mkdir()
    link.symlink_to(target)
    given = ("--input", questions, "--output", link)
    with only_writer_of(target.with_name(".answers.jsonl.partial")):
        code, out, err = command(*given)
        assert (code, out) == (2, "") and err.count("\n") == 1
        assert "another process is writing to" in err and "use another --output" in err
    assert command(*given)[0] == 0
    assert link.is_symlink() and target.read_text() == expected
    assert os.listdir(target.parent) == [target.name]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder", "link", "questions.jsonl"]
