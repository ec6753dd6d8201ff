"""Problems from a file: lines that are refused, verifiers, sums of rewards, a run on them."""

import json
import math
import re
import shutil
from fractions import Fraction
from random import Random

import numpy as np
import pytest
import torch

from tests.helpers.models.tiny_grpo import make_trainer, options
from transformer.rl import trainer
from transformer.rl.run import read_metrics
from transformer.tasks.problems import Problems, read_line
from transformer.tasks.verifiers import as_reward, exact, number, parse_reward

ANSWERS = ["72", r"\boxed{72}", r"$\boxed{72}$", "<answer>72</answer>", "So **72**.\n#### 72", 72]
ANSWERS += [r"\boxed {72}", r"\fbox{72}", "__72__", "_72_", "<Answer>72</ANSWER>", "#### __72__."]
RIGHT_NUMBERS = [
    "72",
    "<think>9*8</think><answer>72</answer>",
    "<answer> 72.0 </answer>",
    "So \\boxed{72}.",
    "First 9, then 8.\n#### 72",
    "<think>perhaps 3</think>72",
    "3</think>It is 72",  # a template opened the thought
    "not 71, but 72",
    r"<answer>\boxed{72}</answer>",
    r"<answer>It is $\boxed{72}$.</answer>",
    r"\boxed{<answer>72</answer>}",
    r"\boxed{\boxed{72}}",
    r"#### \boxed{\text{72}}",
    "**72**",
    "<answer>**72**</answer>",
    "<answer>**72.**</answer>",
    "#### `72`",
    "<answer>*72*.</answer>",
    r"<answer>\[ \mathbf{72} \]</answer>",
    r"<answer>\(72\)</answer>",
    r"<answer>$$72$$</answer>",
]
RIGHT_NUMBERS += ["<answer>72 apples.</answer>", r"\boxed{72\,\text{ cm}^2}"]
WRONG_NUMBERS = [
    "",
    "71",
    "-72",
    "72 or 73",
    "\\boxed{71} 72",
    "<answer>71</answer> 72",
    "<answer>72 or 73</answer>",
    "<answer>72 </answer><answer>71</answer>",
    "<think>72",  # the thought does not end
    "<think>72</think>",
    "<think>3</think>71<think>72</think>",
    "0" * 200 + "72",  # too long for a number, and its end is none
]


WRONG_NUMBERS += ["<answer>72 million</answer>", "<answer>72x</answer>", r"\boxed{72\pi}"]
WRONG_NUMBERS += [r"\boxed{72 k}", "<answer>72 thousand people</answer>", "#### 72 minus one"]


@pytest.mark.parametrize("completion", RIGHT_NUMBERS + WRONG_NUMBERS)
def test_numbers(completion):
    assert number(completion, {"answer": "72"}) == (completion in RIGHT_NUMBERS)


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_with_markup_is_what_it_marks(answer):
    """Both kinds of rewards accept it as it is in the file, bare, and in other markup."""
    given = [(f"line {i}", {"prompt": f"{i}?", "answer": answer}) for i in range(2)]
    task = Problems("a.jsonl", given)
    assert [*map(str, task.terms)] == ["number"]
    for reward in ("number", "exact"):
        problem = Problems("a.jsonl", given, reward=reward).sample(Random(0))
        for reply in (str(answer), "72", r"\boxed{72}", "**72**", r"It is <answer>$72$</answer>"):
            assert problem.reward(reply) == 1, (reward, reply)
        assert problem.reward(r"\boxed{73}") == problem.reward("") == 0


@pytest.mark.parametrize("answer", ["<think>72", r"\boxed{}", "<answer> </answer>"])
def test_an_answer_that_fails_its_own_reward_is_named(answer):
    given = [*lines(), ("line 41", {"prompt": "x", "answer": answer})]
    with pytest.raises(ValueError, match="line 41: a reply that repeats the answer .* exact"):
        Problems("a", given)


def test_exact_texts():
    problem = {"answer": "New York"}
    right = ["New York", " New\nYork ", "<answer>New York</answer>", "Well: \\boxed{New York}"]
    right += [
        "***New York***",
        "```text\nNew York\n```",
        "**New York**",
        "<answer>*New York*.</answer>",
        r"\boxed{\text{New York}}",
    ]
    wrong = ["", "new york", "New York City", "It is New York", "<think>New York</think>"]
    wrong += ["**New** **York**", "$New$ $York$", "*New York", "New York."]
    assert exact("init", {"answer": "__init__"}) == 0
    assert [exact(x, problem) for x in right] == [1] * len(right)
    assert [exact(x, problem) for x in wrong] == [0] * len(wrong)
    assert exact(r"\boxed{\$1{,}000}", {"answer": "$1,000"}) == 1


def short(completion, problem):
    return len(completion) < problem["limit"]


def forgetful(completion, problem):
    return len(problem.pop("answer"))


def careless(completion, problem):
    return "much"


def broken(completion, problem):
    raise KeyError("no such word")


def leaving(completion, problem):
    raise SystemExit(3)


HERE = __name__


def lines(count=40, **more):
    return [
        (f"a.jsonl, line {i}", {"prompt": f"{i}?", "answer": str(i), "limit": 3, **more})
        for i in range(count)
    ]


def test_a_weighted_sum_of_rewards():
    task = Problems("a.jsonl", lines(), reward=f"2*number + -0.5 * {HERE}:short")
    assert [*map(str, task.terms)] == ["2.0 * number", f"-0.5 * {HERE}:short"]
    again = parse_reward(" + ".join(map(str, task.terms)))
    assert again == task.terms
    problem = task.sample(Random(0))
    right = problem.task.answer(*problem.arguments)
    assert problem.reward(f"It is {right}") == 2
    assert problem.reward("no") == -0.5
    assert problem.parts("no") == {"number": 0, f"{HERE}:short": 1}
    assert problem.marks("no").answer == 0
    assert [problem.parts(right, cut_off)["number"] for cut_off in (False, True)] == [1, 0]
    both = Problems("a.jsonl", lines(10), reward=f"{HERE}:forgetful + exact").sample(Random(0))
    assert [both.reward(x) for x in ("no", both.task.answer(*both.arguments))] == [1, 2]
    only = Problems("a.jsonl", lines(), reward=f"0.3 * {HERE}:short").sample(Random(0))
    assert only.marks("no").answer == pytest.approx(0.3)  # as far as it goes towards 1


def test_lines_of_every_kind():
    question = {"question": "How many?", "answer": "3*4 = <<3*4=12>>12\n#### 12", "id": 5}
    found = read_line("line 1", question)
    assert found.messages == ({"role": "user", "content": "How many?"},)
    assert found.fields == {**question, "prompt": "How many?", "answer": "12"}
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "3+4?"}]
    found = read_line("line 2", {"prompt": chat, "answer": 7})
    assert found.messages == tuple(chat) and found.fields["answer"] == "7"
    assert found.fields["prompt"] == "3+4?"


USER = {"role": "user", "content": "Hi"}
BAD = {
    '{"answer": "1"}': "it has the keys answer",
    '{"prompt": "a", "question": "b"}': 'must be {"prompt": "...", "answer": "..."}',
    '{"prompt": 3, "answer": "1"}': "the prompt must be a text or a list",
    '{"prompt": ["a"], "answer": "1"}': "the prompt must be a text or a list",
    '{"prompt": " ", "answer": "1"}': "must end with what the user asks",
    json.dumps({"prompt": [USER, {"role": "assistant", "content": "x"}]}): "must end with what the",
    '{"prompt": "a", "answer": null}': "the answer must be a text or a number, not None",
    '{"prompt": "a", "answer": NaN}': "the answer must be a text or a number, not nan",
    '{"prompt": "a", "answer": "so ####"}': "the answer is empty",
    '{"prompt": "a"}': 'has no "answer", which exact needs',
    "[": "is not valid JSON",
    "3": "must be a JSON object, not 3",
}


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "letters.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for _, line in lines()))
    return path


@pytest.mark.parametrize("line", BAD, ids=list(BAD.values()))
def test_a_bad_line_is_told_before_anything_is_loaded(
    file, line, tmp_path, grpo_command, monkeypatch
):
    file.write_text(f"{file.read_text()}\n{line}\n")
    monkeypatch.setattr(trainer, "find_checkpoint", None)  # calling it would raise
    code, said = grpo_command("--data", file, "--out", tmp_path / "run", "--device", "cpu")
    assert code == 2
    assert said.startswith(f"error: {file}, line 42") and BAD[line] in said
    assert not (tmp_path / "run").exists()


def test_a_text_among_numbers_is_named(file, grpo_command):
    """Otherwise one such line decides silently that all answers are compared as texts."""
    given = ["--data", file, "--out", file.parent, "--device", "cpu"]  # which holds no run
    assert "note: " not in grpo_command(*given)[1]
    file.write_text(file.read_text() + '{"prompt": "x", "answer": "7 km"}\n')
    note = f"note: {file}, line 41 has the answer '7 km', which is no number, so answers are"
    assert note in grpo_command(*given)[1]
    assert "note: " not in grpo_command(*given, "--reward", "exact")[1]


def test_answers_choose_the_verifier():
    with_text = [*lines(), ("line 41", {"prompt": "x", "answer": "seven"})]
    with pytest.raises(
        ValueError, match="line 41: the answer 'seven' is no number; --reward exact"
    ):
        Problems("a", with_text, reward="number")
    without = [(name, {"prompt": line["prompt"]}) for name, line in lines()]
    assert Problems("a", without, reward=f"{HERE}:short").lines


def test_the_split():
    task = Problems("a", lines(160))
    held_out = {x.question for x in task.draw(Random(0), 1000, held_out=True)}
    assert len(held_out) == 10 == len(task.draw(Random(0), 1000, held_out=True))
    assert len(task.draw(Random(0), 3, held_out=True)) == 3
    trained = {x.question for x in task.draw(Random(0), 5000)}
    assert len(trained) > 140 and not trained & held_out
    for problem in task.draw(Random(0), 5, held_out=True):
        assert problem.held_out and not task.sample(Random(0)).held_out
    shuffled = Problems("b", [*reversed(lines(160)), *lines(160)])
    assert {x.question for x in shuffled.draw(Random(0), 99, held_out=True)} == held_out
    with pytest.raises(ValueError, match="a has 1 different problems; two are the least"):
        Problems("a", [*lines(1), *lines(1)])
    other = Problems("a", lines(5), [("line", {"prompt": "!", "answer": "1"})])
    assert {x.question for x in other.draw(Random(0), 99, held_out=True)} == {"!"}
    assert task.fingerprint() == Problems("c", lines(160)).fingerprint()
    assert len({x.fingerprint() for x in (task, shuffled, other)}) == 3


def own(file, **changes):
    """Settings of the tiny policy on a file: the answer to each problem is a letter."""
    text = [{"prompt": "?" * (1 + i), "answer": "ab"[i % 2], "limit": 3} for i in range(20)]
    file.write_text("".join(json.dumps(line) + "\n" for line in text))
    return {"task": "letters", "data": str(file), **changes}


def test_a_run_on_a_file(tempted, file, tmp_path, grpo_command):
    reward = f"exact + 0.5 * {HERE}:short"
    given = own(file, reward=reward, steps=2, eval_every=1, system="Be brief.")
    del given["task"]
    argv = [x for x in options(tempted, **given) if not x.startswith("--task")]
    code, said = grpo_command(*argv, "--out", tmp_path / "run")
    assert code == 0, said
    metrics = read_metrics(tmp_path / "run")
    steps = [line for line in metrics if "step" in line]
    assert len(steps) == 2
    for line in steps:
        exactly, briefly = line["reward exact"], line[f"reward {HERE}:short"]
        assert line["reward"] == pytest.approx(exactly + 0.5 * briefly, abs=1e-5)
        assert line["accuracy"] == pytest.approx(exactly) and briefly > 0
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["reward"] == reward and len(config["data_content"]) == 12
    assert config["task"] == "letters"

    (tmp_path / "run/final/config.json").unlink()  # as if it were not finished
    file.write_text(file.read_text().replace('"a"', '"c"'))
    code, said = grpo_command(*argv, "--out", tmp_path / "run")
    assert code == 2 and "holds a run with another --data-content" in said


def test_a_system_prompt_is_in_every_prompt_that_has_none(tempted, file):
    chat = [{"role": "system", "content": "Mine."}, {"role": "user", "content": "x"}]
    given = own(file, system="Be brief.")
    file.write_text(file.read_text() + json.dumps({"prompt": chat, "answer": "a"}) + "\n")
    one = make_trainer(tempted, **given)
    rollouts = [*one.roll_out().rollouts, *one.evaluate()[1]]
    texts = [one.policy.tokenizer.decode(x.prompt) for x in rollouts]
    assert all(("Be brief." in text) != ("Mine." in text) for text in texts)
    with_task = make_trainer(tempted, system="Be brief.")
    [text] = {with_task.policy.tokenizer.decode(with_task.roll_out().rollouts[0].prompt)}
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>")


def test_a_prompt_that_leaves_no_room_is_told_before_the_first_step(tempted, file):
    given = own(file)
    file.write_text(file.read_text() + json.dumps({"prompt": "?" * 200, "answer": "a"}) + "\n")
    with pytest.raises(ValueError, match="line 21: the prompt '"):
        make_trainer(tempted, **given)


def test_a_model_without_a_template_takes_plain_prompts_only(tempted, file, tmp_path):
    shutil.copytree(tempted, tmp_path / "model", ignore=shutil.ignore_patterns("*.jinja"))
    make_trainer(tmp_path / "model", **own(file))
    with pytest.raises(ValueError, match="line 1: the prompt .* the model has no chat template"):
        make_trainer(tmp_path / "model", **own(file, system="Be brief."))


ONES = [1, True, 1.0, np.float32(1), np.int64(1), np.ones(1), np.bool_(True), Fraction(1)]
ONES += [torch.ones(()), torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, requires_grad=True)]
NUMBERLESS = {
    "None (NoneType)": None, "'1' (str)": "1", "b'1' (bytes)": b"1", "[1.0] (list)": [1.0],
    "nan (float)": math.nan, "inf (float)": math.inf, f"1{79 * '0'} (int)": 10**400,
    "array('1', dtype='<U1') (ndarray)": np.array("1"), "array([0., 0.]) (ndarray)": np.zeros(2),
    "tensor([[1., 0.], [0., 1.]]) (Tensor)": torch.eye(2), "tensor([]) (Tensor)": torch.ones(0),
    "1j (complex)": 1j,
}  # fmt: skip


@pytest.mark.parametrize("value", ONES, ids=lambda x: f"{x!r} {type(x).__name__}")
def test_a_reward_is_a_number_of_any_kind(value):
    reward = as_reward("mine", value)
    assert reward == 1 and type(reward) is float


@pytest.mark.parametrize("name", NUMBERLESS)
def test_what_is_no_reward_is_named(name):
    with pytest.raises(ValueError, match=re.escape(f"mine returned {name}, which is no finite")):
        as_reward("mine", NUMBERLESS[name])


@pytest.mark.parametrize(
    "name, words",
    {"careless": "returned 'much'", "broken": "no such", "leaving": r"SystemExit\(3"}.items(),
)
def test_a_reward_that_fails_names_the_completion(tempted, file, name, words):
    one = make_trainer(tempted, **own(file, reward=f"{HERE}:{name}"))
    with pytest.raises(ValueError, match=f"{words}.* for the completion"):
        one.roll_out()
