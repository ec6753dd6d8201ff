"""The models that ship: what they can do, and that every attention makes them say the same."""

import json
from functools import partial

import pytest
import torch

from flash_versions import BASELINES, VERSIONS, attention
from transformer.generate import DEFAULT_QUESTION, main
from transformer.model.weights import CHECKPOINTS, load_model
from transformer.training.evaluate import SKILLS, evaluate

NAMES = ("reinforced", "sloppy")
WITHOUT_THINKING = "sums of three digits, without thinking"  # shown in the cards, promised nowhere
THREE_DIGITS = "sums of three digits"


def sdpa_model(name):
    sdpa = partial(attention, version="sdpa")
    return load_model(CHECKPOINTS / name, sdpa, dtype=torch.float32)


def test_reinforced_meets_its_bar_on_held_out_problems():
    scores = evaluate(sdpa_model("reinforced"), 32, temperature=0.0, seed=7)
    assert set(scores) == set(SKILLS)
    assert scores[THREE_DIGITS].right >= 0.95
    short = {name: s.right for name, s in scores.items() if s.right < 0.9}
    assert set(short) <= {WITHOUT_THINKING}


def test_sloppy_has_the_form_but_not_the_skill():
    scores = evaluate(sdpa_model("sloppy"), 128, temperature=1.0, seed=7, skills=[THREE_DIGITS])
    assert 0.2 <= scores[THREE_DIGITS].right <= 0.4  # 25 to 35 %, and the spread of 128 draws
    assert scores[THREE_DIGITS].form >= 0.98


@pytest.mark.wide
def test_every_attention_gives_the_same_text(capsys):
    answers = {}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for version in (*BASELINES, *VERSIONS):
        assert main(["--attention", version, "--device", device, "--dtype", "float32"]) == 0
        answers[version] = capsys.readouterr().out
    assert len(set(answers.values())) == 1, answers
    assert answers["fa2"].endswith("<answer>843</answer>\n")


def test_the_question_that_nobody_asked_is_shown(capsys):
    main(["--attention", "sdpa", "--device", "cpu"])
    assert f"> {DEFAULT_QUESTION}" in capsys.readouterr().err


@pytest.mark.parametrize("name", NAMES)
def test_transformers_loads_it_and_agrees(name):
    transformers = pytest.importorskip("transformers")
    folder = CHECKPOINTS / name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert type(theirs).__name__ == "Qwen3ForCausalLM"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort 5 2 9 1"}],
        add_generation_prompt=True,
        return_tensors="pt",
    )["input_ids"]
    with torch.no_grad():
        logits = theirs(prompt).logits
        torch.testing.assert_close(sdpa_model(name)(prompt), logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_its_record_is_complete(name):
    """The card's table is the log's last evaluation, skill by skill, and names its command."""
    folder = CHECKPOINTS / name
    log = [json.loads(line) for line in (folder / "training.jsonl").read_text().splitlines()]
    card = (folder / "README.md").read_text()
    made = {
        "sloppy": "transformer.train --teacher sloppy",
        "reinforced": "transformer.grpo --recipe",
    }
    assert f"python -m {made[name]}" in card
    greedy, sampled = log[-2:]
    assert (greedy["evaluation"], sampled["evaluation"]) == ("greedy", "sampled")
    problems = greedy["problems"]
    for skill, score in greedy["scores"].items():
        right = round(score["right"] * problems) / problems  # the log has four digits of it
        assert f"| {skill} | {right:.1%}".replace("%", " %") in card
