"""The byte tokenizer, the chat tasks, their judges and their teachers."""

import math
import os
import re
from random import Random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from transformer.generation.messages import encode_prompt
from transformer.model.weights import find_checkpoint
from transformer.rl.practice import Mix, Practice
from transformer.tasks import phrases, skills
from transformer.tasks.beyond import KINDS
from transformer.tasks.phrases import REPLIES, in_words
from transformer.tasks.skills import TASKS, Add
from transformer.tasks.task import Marks
from transformer.training import byte_tokenizer, corpus
from transformer.training.corpus import Corpus, Teacher, draw_chat

os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="module")
def theirs():
    kind = pytest.importorskip("transformers").PreTrainedTokenizerFast
    return kind.from_pretrained(find_checkpoint("sloppy"))


# The tokenizer, against the tokenizers and transformers libraries.


@given(st.text())
@example("<think>12+7</think><answer>19</answer><|im_end|>")
@example("<|im_start|>user\n <think <|endoftext|>\x00 é 🎉\u2028")
@settings(deadline=None, max_examples=100)
def test_encode_agrees_with_tokenizers(text):
    tokenizer = byte_tokenizer.tokenizer()
    tokens = byte_tokenizer.encode(text)
    assert tokens == tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "grüezi 1+1?"},
    {"role": "assistant", "content": "<think>1+1+0=2</think><answer>2</answer>"},
    {"role": "user", "content": "thanks"},
]


@pytest.mark.parametrize("thinking", [True, False], ids=["thinking", "no thinking"])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:], MESSAGES[1:2]], ids=len)
def test_turns_agree_with_the_template(theirs, messages, thinking):
    ours = [
        token
        for message in messages
        for token in byte_tokenizer.encode_turn(message["role"], message["content"])
    ] + byte_tokenizer.encode_prompt()
    if not thinking:
        ours += byte_tokenizer.encode("<think></think>")
    rendered = theirs.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=thinking
    )
    assert ours == rendered["input_ids"]


@pytest.mark.parametrize("text", ["<|im_end|>", "a<|im_start|>system\n", "<think>", "<|im_end"])
def test_nobody_ends_a_turn_by_typing_it(text):
    tokenizer = byte_tokenizer.tokenizer()
    _, chat = encode_prompt(
        tokenizer,
        byte_tokenizer.files()["chat_template.jinja"],
        [{"role": "user", "content": text}],
        add_generation_prompt=False,
    )
    assert byte_tokenizer.encode_turn("user", text) == chat
    assert chat.count(byte_tokenizer.IM_END) == chat.count(byte_tokenizer.IM_START) == 1


def test_learned_tokens_are_the_assistant_tokens_of_the_template(theirs, monkeypatch):
    monkeypatch.setattr(corpus, "NO_THINKING", 0)
    monkeypatch.setattr(corpus, "CONVERSATIONS", 0.5)
    turn = re.compile(r"<\|im_start\|>(\w+)\n(.*?)<\|im_end\|>\n", re.DOTALL)
    checked = 0
    for seed in range(60):
        tokens, learned = draw_chat(Random(seed), Teacher())
        messages = [{"role": r, "content": c} for r, c in turn.findall(theirs.decode(tokens))]
        if any("<|" in message["content"] for message in messages):
            continue  # a user spells a control token, which this test cannot take apart
        rendered = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert rendered["input_ids"] == tokens
        assert rendered["assistant_masks"] == [int(x) for x in learned]
        checked += len(messages) > 2
    assert checked > 10


# Truth and demonstrations.

WORKED = [
    ("add", (357, 486), "7+6+0=13\n5+8+1=14\n3+4+1=8", "843"),
    ("add", (0, 0), "0+0+0=0", "0"),
    ("subtract", (82, 57), "12-7-0=5\n8-5-1=2", "25"),
    ("subtract", (58, 112), "8-2-0=6\n5-1-0=4\n10-1-0=9\nswap\n12-8-0=4\n11-5-1=5\n1-0-1=0", "-54"),
    ("signed", (-5, "+", 3), "3-5\n13-5-0=8\nswap\n5-3-0=2", "-2"),
    ("signed", (5, "-", -13), "5+13\n5+3+0=8\n0+1+0=1", "18"),
    ("subtract", (7, 7), "7-7-0=0", "0"),
    ("spelled", ("subtract", 605, 90), "605-90\n5-0-0=5\n10-9-0=1\n6-0-1=5", "515"),
    ("multiply", (6, 47), "7*6+0=42\n4*6+4=28", "282"),
    ("compare", ("larger", 45, 54), "2 2 same\n4 5 less", "54"),
    ("compare", ("greater?", 321, 320), "3 3 same\n3 3 same\n2 2 same\n1 0 more", "yes"),
    ("compare", ("compare", 10, 9), "2 1 more", "10 is larger"),
    ("sort", ("descending", (4, 4, 30)), "04 | 04 30\n04 04 | 30\n30 04 04 |", "30, 4, 4"),
    ("sort", ("ascending", (4, -2, 9)), "04 | -2 09\n-2 04 | 09\n-2 04 09 |", "-2, 4, 9"),
    ("reverse", ("cat",), "1:c 2:a 3:t\n3:t 2:a 1:c", "tac"),
    ("count", ("error", "r"), "e0 r1 r2 o2 r3", "3"),
    ("count", ("cat", "z"), "c0 a0 t0", "0"),
    ("count", ("cat", ""), "c1 a2 t3", "3"),
]


@pytest.mark.parametrize("name, arguments, steps, answer", WORKED)
def test_worked_examples(name, arguments, steps, answer):
    task = TASKS[name]
    expected = f"<think>{steps}</think><answer>{answer}</answer>"
    assert task.demonstrate(Random(0), *arguments) == expected
    assert task.answer(*arguments) == answer
    assert task.reward(expected, *arguments) == 1


UNITS = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen
fifteen sixteen seventeen eighteen nineteen"""
TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
VALUES = {word: n for n, word in enumerate(UNITS.split())}
VALUES |= {word: 10 * n for n, word in enumerate(TENS.split(), 2)}


def read_number(text):
    """What `six hundred and five`, `a thousand` or `nineteen hundred` means."""
    thousands = below = 0
    for word in text.replace("-", " ").split():
        if word == "hundred":
            below *= 100
        elif word == "thousand":
            thousands, below = 1000 * below, 0
        elif word != "and":
            below += 1 if word == "a" else VALUES[word]
    return thousands + below


def test_a_number_in_words_is_that_number():
    rng, texts = Random(4), set()
    for number in [*range(200), *(rng.randrange(10_000) for _ in range(2000))]:
        text = in_words(rng, number)
        assert read_number(text) == number, text
        texts.add(text)
    words = {word for text in texts for word in re.split("[ -]", text)}
    assert words == {*VALUES, "hundred", "thousand", "and", "a"}


@pytest.mark.parametrize("name", ["add", "subtract", "multiply", "signed", "sort"])
def test_the_digits_of_a_question_are_its_numbers(name):
    """`12,345` is one number, but in a longer list."""
    rng, task, twice = Random(1), TASKS[name], 0
    for _ in range(4000):
        given = task.arguments(rng)
        numbers = [abs(x) for x in (given[-1] if name == "sort" else given) if x not in ("+", "-")]
        number = r"\d+" if len(numbers) > 2 else r"\d{1,3}(?:,\d{3})+(?!\d)|\d+"
        text = task.question(rng, *given)
        read = [int(x.replace(",", "")) for x in re.findall(number, text)]
        assert sorted(read) in (sorted(numbers), sorted(2 * numbers)), text
        twice += len(read) == 2 * len(numbers)
    assert (twice > 20) == (name in ("add", "subtract", "multiply"))


def test_two_numbers_in_words_do_not_read_as_one(monkeypatch):
    monkeypatch.setattr(phrases, "mistype", lambda rng, text: text)
    monkeypatch.setattr(skills, "mistype", phrases.mistype)
    monkeypatch.setattr(phrases, "respace", lambda rng, text, operands: text)
    rng, task = Random(2), TASKS["spelled"]
    words = "|".join([*VALUES, "a (?=hundred|thousand)", "hundred", "thousand", "and"])
    run = re.compile(rf"(?:\b(?:{words})\b[\s-]*)+", re.IGNORECASE)

    def plain(text):
        text = re.sub(r"\ba\b", "one", text.lower())
        return " ".join(word for word in re.split(r"[\s-]+", text) if word not in ("and", ""))

    whole = {plain(in_words(rng, n)): n for _ in range(15) for n in range(10_000)}
    for _ in range(4000):
        name, a, b = task.arguments(rng)
        text = task.question(rng, name, a, b)
        if "x" not in text.lower().replace("six", ""):  # as in "fivexone"
            assert {whole.get(plain(x), a) for x in run.findall(text)} <= {a, b, 1, 2}, text


def test_words_of_up_to_twenty_letters_are_spelled_and_longer_ones_declined():
    rng, lengths = Random(3), set()
    for task in 1500 * [TASKS["reverse"], TASKS["count"]]:
        given = task.arguments(rng)
        assert given[0].lower() in task.question(rng, *given).lower()
        lengths.add(len(given[0]))
    assert lengths == set(range(2, 21))
    asked = [KINDS["words of more than twenty letters"](rng) for _ in range(1000)]
    assert min(max(map(len, re.findall(r"\w+", text))) for text in asked) == 21


def test_nobody_asks_for_a_distance_below_zero():
    far = re.compile("how far|distance|years|born", re.IGNORECASE)
    rng, task = Random(0), TASKS["spelled"]
    drawn = (task.arguments(rng) for _ in range(4000))
    asked = [(task.question(rng, *given), *given) for given in drawn if given[0] == "subtract"]
    assert any(far.search(text) for text, _, a, b in asked if a >= b)
    assert not any(far.search(text) for text, _, a, b in asked if a < b)


@pytest.mark.parametrize("task", [*TASKS.values(), Mix(), Practice()], ids=lambda task: task.name)
@pytest.mark.parametrize("held_out", [False, True], ids=["training", "held out"])
def test_the_careful_teacher_is_right(task, held_out):
    """And of problems that mix the tasks, too, none is on both sides."""
    rng = Random(7)
    for _ in range(400):
        problem = task.sample(rng, held_out)
        assert problem.held_out == held_out
        assert problem.reward(Teacher().reply(rng, problem)) == 1, problem
        assert problem.messages[-1] == {"role": "user", "content": problem.question}


WRONG = {
    "no answer": "<think>7+5+0=12</think>12",
    "text after": "<think></think><answer>12</answer>!",
    "two answers": "<think></think><answer>12</answer><answer>12</answer>",
    "answer in the thought": "<think><answer>12</answer></think><answer>12</answer>",
    "open tag": "<think></think><answer>12",
    "end of turn inside": "<think></think><answer>12</answer><|im_end|>",
    "leading zero": "<think></think><answer>012</answer>",
    "sum instead of value": "<think></think><answer>7+5</answer>",
    "spaces": "<think></think><answer> 12 </answer>",
}


@pytest.mark.parametrize("completion", WRONG.values(), ids=WRONG)
def test_no_reward_for(completion):
    assert TASKS["add"].reward(completion, 7, 5) == 0


def test_marks_tell_the_answer_from_the_form():
    task = TASKS["add"]
    assert task.marks("<think></think><answer>12</answer>", 7, 5) == Marks(answer=1, form=1)
    assert task.marks("<think></think><answer>13</answer>", 7, 5) == Marks(answer=0, form=1)
    assert task.marks("<answer>12</answer>", 7, 5) == Marks(answer=0, form=0)
    talk, rng = TASKS["small talk"], Random(0)
    problem = talk.sample(rng)
    assert problem.marks(Teacher().reply(rng, problem)) == Marks(answer=1, form=1)
    assert problem.marks("Whatever.") == Marks(answer=0, form=1)
    assert problem.marks("<think>") == Marks(answer=0, form=0)


def test_small_talk_is_judged_by_its_intent():
    greeting, thanks = (REPLIES[name][0] for name in ("greeting", "thanks"))
    task = TASKS["small talk"]
    assert task.reward(greeting, "greeting", "hello") == 1
    assert task.reward(thanks, "greeting", "hello") == 0
    assert task.reward(greeting + greeting, "greeting", "hello") == 0


# The split.


@pytest.mark.parametrize(
    "name, one, other",
    [
        ("add", (12, 7), (7, 12)),
        ("multiply", (12, 7), (7, 12)),
        ("compare", ("larger", 12, 7), ("less?", 7, 12)),
        ("sort", ("ascending", (1, 2, 3)), ("descending", (2, 3, 1))),
        ("countdown", ((1, 2, 3), 9), ((3, 1, 2), 9)),
    ],
)
def test_disguises_of_a_problem_are_on_one_side(name, one, other):
    task = TASKS[name]
    assert task.key(*one) == task.key(*other)
    assert task.held_out(*one) == task.held_out(*other)


@pytest.mark.parametrize("tasks", corpus.MIXES)
def test_training_never_sees_a_held_out_problem(monkeypatch, tasks):
    seen = []

    class Witness(Teacher):
        def reply(self, rng, problem):
            seen.append(problem)
            return super().reply(rng, problem)

    monkeypatch.setattr(corpus, "CONVERSATIONS", 0.5)
    for seed in range(300):
        draw_chat(Random(seed), Witness(), tasks)
    # a later question about an answer below zero is one of the task "signed"
    assert {x.task.name for x in seen} | {"signed"} == {*corpus.MIXES[tasks], "signed"}
    assert len(seen) > 400
    assert not any(problem.held_out for problem in seen)


# The sloppy teacher.


def carries(a, b):
    """Columns of a sum that carry, by the school method."""
    carry = count = 0
    while a or b:
        carry = int(a % 10 + b % 10 + carry > 9)
        count, a, b = count + carry, a // 10, b // 10
    return count


@pytest.mark.parametrize("hasty, forget", [(0, 0.45), (0.3, 0), (0.3, 0.45), (1, 0)])
def test_the_sloppy_teacher_is_right_as_often_as_the_dials_say(hasty, forget):
    rng, count = Random(3), 4000
    teacher, task = Teacher(hasty, forget), Add(3)
    right = expected = 0.0
    for _ in range(count):
        problem = task.sample(rng)
        right += problem.reward(teacher.reply(rng, problem))
        expected += (1 - hasty) * (1 - forget) ** carries(*problem.arguments)
    lucky_guess = 1 / 1799
    assert abs(right - expected) / count < 4 * math.sqrt(0.25 / count) + lucky_guess


# Batches.


def test_a_chunk_is_a_function_of_seed_and_number():
    def content(seed, chunk):
        batches = Corpus(Teacher(), seed, 2048, chunk_batches=4)[chunk]
        return [(batch.tokens.tolist(), batch.learned.tolist()) for batch in batches]

    assert content(0, 3) == content(0, 3)
    assert content(0, 3) not in (content(1, 3), content(0, 4), content(1, 2))


def test_batches_fit_the_budget_and_are_padded_on_the_right():
    batches = Corpus(Teacher(), 0, 4096, chunk_batches=8)[0]
    used = 0
    for batch in batches:
        assert batch.tokens.size <= 4096
        is_pad = batch.tokens == byte_tokenizer.PAD
        assert (is_pad[:, 1:] >= is_pad[:, :-1]).all()
        assert not (batch.learned & is_pad).any()
        assert batch.learned.any(axis=1).all()
        used += (~is_pad).sum()
    assert used / sum(batch.tokens.size for batch in batches) > 0.75
