"""What the generate command refuses, in one sentence each."""

import json
import os
import shutil

import pytest


@pytest.mark.parametrize(
    "arguments, reason",
    [
        (["--temp", "nan"], "temperature must be 0 (greedy) or between"),
        (["-m", "0"], "--max-tokens must be at least 1, got 0"),
        (["--page-size", "16"], "--page-size needs --cache paged"),
        (["--cache", "paged"], "version 'sdpa': block_table is not possible"),
        (["--page-size", "99999999999", "--cache", "paged"], "--page-size must be below 2^31"),
        (["--lookup", "-1"], "lookup must be at least 0, got -1"),
        (["--lookup", "3", "--temp", "1"], "lookup is exact for greedy choices only"),
        (["--stop", ""], "--stop must not be empty"),
        (["--attention", "fa9"], "'fa9' is unknown; auto, "),
        (["--attention", "none.py"], "none.py is not there; python -m flash_versions.mine new"),
        (["--precision", "fp9"], "precision='fp9' is unknown"),
        (["--precision", "fp8"], "version 'sdpa': precision='fp8:block:e4m3' is not possible"),
        (["--precision", "fp8", "--dtype", "float32"], "float16 and bfloat16 are quantised"),
        (["--exact"], "attention 'sdpa' is not exact"),
        (["--exact", "--kernels", "fused"], "kernels='fused' are not exact"),
        (["--exact", "--attention", "fa1"], "batch_invariant=True is not possible"),
        (
            ["--exact", "--attention", "auto", "--precision", "fp8", "--dtype", "bfloat16"],
            "not possible with batch_invariant=True",
        ),
        (["--device", "abacus"], "--device abacus is unknown"),
        (["--nonsense"], "unrecognized arguments: --nonsense"),
        (["--chat", "-p", "x"], "--chat and --prompt exclude each other"),
        (["--chat", "--json"], "--chat and --json exclude each other"),
        (["--input", "x", "-p", "x"], "--prompt and --input exclude each other"),
        (["--input", "./x", "--output", "x"], "--output x is --input"),
        (["--output", "x"], "--output needs --input"),
        (["--input", "x", "--force"], "--force needs --output"),
        (["--input", "/no/such/file"], "/no/such/file: No such file or directory"),
        (["--input", os.devnull, "--output", "loop"], "loop: Too many levels of symbolic links"),
        (["--input", os.devnull], "has no prompts"),
        (["-p", "x" * 200], "the prompt has 2"),
        (["-p", "\udcff"], "the text is not valid UTF-8"),
        (["-p", "", "--ignore-chat-template"], "the prompt has no tokens"),
        (["--system-prompt", "x", "--ignore-chat-template"], "exclude each other"),
    ],
)
def test_bad_arguments_are_one_sentence(command, arguments, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    os.symlink("loop", "loop")
    code, out, err = command(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and reason in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "name, change, reason",
    [
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("generation_config.json", {"eos_token_id": 320}, "end-of-sequence token 320 is not"),
        ("config.json", {"vocab_size": 200}, "the tokenizer has 256 tokens but the model knows"),
        ("chat_template.jinja", "{% for %}", "chat template failed (line 1)"),
    ],
)
def test_a_damaged_checkpoint_is_one_sentence(command, folder, tmp_path, name, change, reason):
    damaged = tmp_path / "damaged"
    shutil.copytree(folder, damaged)
    path = damaged / name
    if isinstance(change, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    elif change:
        path.write_text(change)
    else:
        path.unlink()
    code, out, err = command(model=damaged)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and reason in err
    assert err.count("\n") == 1


def test_a_model_without_a_template_takes_plain_prompts(command, folder, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare, ignore=shutil.ignore_patterns("chat_template.jinja"))
    plain = command("-p", "What", model=bare)
    assert plain[:2] == command("-p", "What", "--ignore-chat-template")[:2]
    assert "note: no chat template: the prompt is used as it is\n" in plain[2]
    for arguments in (["--chat"], ["--system-prompt", "x"], ["--system-prompt", ""]):
        code, _, err = command(*arguments, model=bare)
        assert code == 2 and "has no chat template" in err
