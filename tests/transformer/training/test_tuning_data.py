"""Data of one's own: lines that are refused, tokens, and which of them are learned."""

import json
from dataclasses import replace

import numpy as np
import pytest

from tests.helpers.models.tiny_grpo import Count
from tests.helpers.models.tiny_model import END
from tests.transformer.generation.test_chat import TEMPLATES, byte_backend
from transformer.generation.chat import Tokenizer
from transformer.generation.messages import encode_prompt
from transformer.model.weights import find_checkpoint
from transformer.tasks.skills import TASKS
from transformer.training.tuning.chats import Chat, demonstrations, read_chats, split, with_system
from transformer.training.tuning.documents import Encoder, fitted

SHIPPED = find_checkpoint("sloppy")
USER, AGAIN = {"role": "user", "content": "Hi, 世界!"}, {"role": "user", "content": "Again?"}
SAID, LAST = (
    {"role": "assistant", "content": "<think>\nwho\n</think>\n\nHello.\nYou?"},
    {"role": "assistant", "content": "Bye 🌍"},
)
SYSTEM = {"role": "system", "content": "Be brief."}
CONVERSATIONS = {
    "one turn": (USER, LAST),
    "two turns": (USER, SAID, AGAIN, LAST),
    "the user has the last word": (USER, LAST, AGAIN),
}


@pytest.mark.parametrize("system", [(), (SYSTEM,)], ids=["", "system"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_tokens_and_mask_are_those_of_transformers(name, system):
    """The shipped template marks what is learned, so transformers can tell."""
    transformers = pytest.importorskip("transformers")
    messages = (*system, *CONVERSATIONS[name])
    theirs = transformers.AutoTokenizer.from_pretrained(SHIPPED).apply_chat_template(
        list(messages), return_dict=True, return_assistant_tokens_mask=True
    )
    [document] = Encoder(SHIPPED).encode(Chat("a chat", messages))
    assert document.tokens.tolist() == theirs["input_ids"]
    assert document.learned.astype(int).tolist() == theirs["assistant_masks"]
    assert 0 < document.learned.sum() < len(document.learned)


# The end of a turn, and whether a turn is written alike when others follow.
ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "mistral": "</s>", "qwen3": "<|im_end|>"}


def encoder_of(name):
    return encoder_with(TEMPLATES[name], ENDS[name])


def encoder_with(template, end="<|im_end|>"):
    encoder = Encoder(SHIPPED)
    encoder.tokenizer = Tokenizer(byte_backend(), {"bos_token": "<s>", "eos_token": "</s>"})
    encoder.template = template
    encoder.eos = (encoder.tokenizer.token_id(end),)
    return encoder


def said_after(encoder, document):
    """What is in front of each learned part of a document, and that part."""
    found = []
    starts = np.flatnonzero(np.diff(document.learned, prepend=False) & document.learned)
    for start in starts:
        length = np.flatnonzero(~np.append(document.learned[start:], False))[0]
        said = encoder.tokenizer.decode(document.tokens[start : start + length].tolist())
        found.append((document.tokens[:start].tolist(), said))
    return found


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", ENDS)
def test_what_is_learned_follows_the_prompt_of_generate(name, conversation):
    """Before each learned turn stands what `generate` would prompt with at that point, and the turn
    is the reply and its end.
    """
    encoder, messages = encoder_of(name), CONVERSATIONS[conversation]
    found = []
    for document in encoder.encode(Chat("a chat", messages)):
        found += said_after(encoder, document)
    turns = [i for i, x in enumerate(messages) if x["role"] == "assistant"]
    assert len(found) == len(turns)
    for turn, (before, said) in zip(turns, found):
        _, prompt = encode_prompt(encoder.tokenizer, encoder.template, messages[:turn])
        assert before == prompt
        content = messages[turn]["content"]
        assert said.endswith(content.rpartition("</think>")[2].strip() + ENDS[name])
        assert "Again" not in said and "Hi," not in said


def test_a_template_that_rewrites_earlier_turns_gives_a_document_for_each():
    """Qwen3 leaves out the thinking of earlier turns: both documents hold what the model sees."""
    messages = CONVERSATIONS["two turns"]
    assert len(Encoder(SHIPPED).encode(Chat("a chat", messages))) == 1
    first, last = encoder_of("qwen3").encode(Chat("a chat", messages))
    decode = encoder_of("qwen3").tokenizer.decode
    assert "<think>\nwho" in decode(first.tokens[first.learned].tolist())
    assert "who" not in decode(last.tokens.tolist()) and "Hello." in decode(last.tokens.tolist())


# Knows the user and the assistant, and cuts the assistant's thoughts.
CUTTING = (
    "{%- for m in messages %}{% if m.role == 'user' %}[U]{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}[A]{{ m.content.split('</think>')[-1] }}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)
CLOSING = CUTTING.replace("[A]{% endif", "[A]<think>\n</think>{% endif")  # asks for no thought
OPENING = CUTTING.replace("[A]{% endif", "[A]<think>\n{% endif")


def asked(reply, user="Hi", **more):
    return Chat(
        "a.jsonl, line 3",
        ({"role": "user", "content": user}, {"role": "assistant", "content": reply, **more}),
    )


@pytest.mark.parametrize(
    "template, reply, said",
    [
        (CUTTING, "aa", "aa"),
        (CUTTING, "<think>who</think>aa", "<think>who</think>aa"),
        (OPENING, "<think>who</think>aa", "who</think>aa"),
        (OPENING, "<think>\nwho\n</think>\n\naa", "who\n</think>\n\naa"),
        (OPENING.replace(".split('</think>')[-1]", ""), "<think>\nw</think>aa", "w</think>aa"),
        (CLOSING, "aa", "aa"),
        (OPENING.replace("[A]{{", "[A]</think>{{"), "<think>w</think>aa", "w</think>aa"),
        (OPENING, "<think><|im_end|></think>aa", "<|im_end|></think>aa"),
    ],
)
def test_what_a_template_cuts_is_learned_behind_the_prompt_of_generate(template, reply, said):
    encoder, chat = encoder_with(template), asked(reply)
    [document] = encoder.encode(chat)
    _, prompt = encode_prompt(encoder.tokenizer, template, chat.messages[:1])
    assert said_after(encoder, document) == [(prompt, said + "<|im_end|>")]
    assert (document.tokens == encoder.eos[0]).sum() == 1  # what a message spells is text


@pytest.mark.parametrize("system", [(), (SYSTEM,)], ids=["", "system"])
def test_a_system_prompt_that_only_the_prompt_has_is_learned_behind(system):
    """Mistral's template writes it in front of the last message, if that is the user's."""
    encoder, messages = encoder_of("mistral"), (*system, USER, LAST)
    [document] = encoder.encode(Chat("a chat", messages))
    _, prompt = encode_prompt(encoder.tokenizer, encoder.template, messages[:-1])
    assert said_after(encoder, document) == [(prompt, " Bye 🌍</s>")]


LAST_PART = CUTTING.replace("m.content }}", "m.content.split('</think>')[-1] }}")
PART = "leaves out the user's message 'H"
LOST = {
    "the beginning of a question": (LAST_PART, asked("aa", "H</think>i"), PART),
    "the end of a question": (CUTTING.replace("content }}", "content[:1] }}"), asked("aa"), PART),
    "a question": (CUTTING.replace("{{ m.content }}", ""), asked("aa"), PART),
    "only the thought is opened": (OPENING, asked("aa"), "begin the assistant's message 'aa'"),
    "thoughts apart": (CUTTING, asked("aa", reasoning_content="w"), "leaves out a part of the ass"),
    "no thought, said so": (OPENING.replace("[A]{{", "[A]</think>{{"), asked("aa"), "in '<think>'"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_cannot_be_learned_is_named(name):
    template, chat, reason = LOST[name]
    with pytest.raises(ValueError, match=f"^a.jsonl, line 3: .*{reason}"):
        encoder_with(template).encode(chat)


CALLING = (
    "{%- for m in messages %}{% if m.content %}[{{ m.role }}]{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or () %}[A]{{ call.type + call.function.name }}<|im_end|>"
    "{% endfor %}{% endfor %}{% if add_generation_prompt %}[A]{% endif %}"
)


def test_a_call_is_learned_and_may_precede_a_turn():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
    encoder, chat = encoder_with(CALLING), asked("", tool_calls=[call])
    [document] = encoder.encode(chat)
    assert [said for _, said in said_after(encoder, document)] == ["functionadd<|im_end|>"]
    more = (*chat.messages, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "7"})
    assert encoder.encode(replace(chat, messages=more))


@pytest.mark.parametrize("role", ["human", "User", "tool", "system"])
def test_a_message_of_a_role_that_the_template_does_not_know_is_named(role):
    # Its text is in the prompt all the same: the other message has it, too.
    chat = Chat("a.jsonl, line 3", ({"role": role, "content": "H"}, *asked("aa").messages))
    with pytest.raises(ValueError, match=f"line 3: .*nothing of the message 'H', .* is '{role}'"):
        encoder_with(CUTTING).encode(chat)


def test_a_text_is_learned_whole_and_long_ones_are_cut():
    [document] = Encoder(SHIPPED).encode(Chat("a text", text="0123456789"))
    assert document.tokens.tolist() == [*b"0123456789", END]
    assert document.learned.tolist() == [False, *[True] * 10]
    pieces, _ = fitted([document], 4, drop_long=False)
    assert max(len(x.tokens) for x in pieces) == 4
    learned = [token for x in pieces for token in x.tokens[x.learned].tolist()]
    assert learned == [*b"123456789", END]  # each once


def test_a_chat_that_is_too_long():
    documents = [
        document
        for number, said in enumerate(("short", "long" * 20, "long" * 30))
        for document in Encoder(SHIPPED).encode(
            Chat(f"a.jsonl, line {number}", (USER, {"role": "assistant", "content": said}))
        )
    ]
    with pytest.raises(
        ValueError, match="^a.jsonl, line 1 is longer than 64 tokens: it has .* 1 o"
    ):
        fitted(documents, 64, drop_long=False)
    kept, left_out = fitted(documents, 64, drop_long=True)
    assert [x.name for x in kept] == ["a.jsonl, line 0"]
    assert [x.name for x in left_out] == ["a.jsonl, line 1", "a.jsonl, line 2"]
    with pytest.raises(ValueError, match="no chat is left: all 2 are longer than 64 tokens"):
        fitted(documents[1:], 64, drop_long=True)
    with pytest.raises(ValueError, match="^no held-out chat is left"):
        fitted(documents[1:], 64, True, "held-out chat")


GOOD = json.dumps({"messages": [USER, LAST]})
BAD = {
    "{": "is not valid JSON: it is only the beginning of a value",
    '{"prompt": "a", "completion": "b"}': "it has the keys prompt, completion",
    '{"text": 3}': '"text" must be a string',
    '{"messages": "hi"}': '"messages" must be a list, not a string',
    json.dumps({"messages": [USER]}): "no message of the assistant, so it has nothing to learn",
    json.dumps({"messages": [LAST, USER]}): "begins with the assistant",
    json.dumps({"messages": [USER, LAST], "tools": "x"}): '"tools" must be a list',
}


@pytest.mark.parametrize("line", BAD, ids=list(BAD.values()))
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "chats.jsonl"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError) as raised:
        read_chats(path)
    assert str(raised.value).startswith(f"{path}, line 3")
    assert BAD[line] in str(raised.value)
    path.write_text(f"\ufeff{GOOD}\n\n{GOOD}\n")  # with a byte order mark
    assert [chat.name for chat in read_chats(path)] == [f"{path}, line {n}" for n in (1, 3)]


def test_the_split_depends_on_contents_only():
    chats = [Chat("a", (USER, {"role": "assistant", "content": str(i)})) for i in range(40)]
    held_out = [[x.messages for x in split([replace(y, name=z) for y in chats])[1]] for z in "ab"]
    assert held_out[0] == held_out[1] and len(held_out[0]) == 2
    assert [[*map(len, split(chats[:n]))] for n in (2, 1)] == [[1, 1], [1, 0]]


def test_demonstrations_are_right_and_keep_to_their_side():
    task = TASKS["add"]
    for held_out in (False, True):
        for chat in demonstrations(task, 20, seed=0, held_out=held_out):
            assert [x["role"] for x in chat.messages] == ["user", "assistant"]
            assert task.form.fullmatch(chat.messages[1]["content"])
    assert demonstrations(task, 3, 0) == demonstrations(task, 3, 0) != demonstrations(task, 3, 1)


class Wrong(type(TASKS["add"])):
    def demonstrate(self, rng, *arguments, **dials):
        return "I do not know."


def test_a_task_that_cannot_be_taught_is_refused():
    with pytest.raises(ValueError, match="task 'count' shows no reply: give it a method `answer`"):
        demonstrations(Count(), 1, 0)
    with pytest.raises(ValueError, match="'add' does not accept its own demonstration 'I do not"):
        demonstrations(Wrong(), 1, 0)


def test_a_system_prompt_is_put_before_conversations_that_have_none():
    given = [Chat("a", (USER, LAST)), Chat("b", (SYSTEM, USER, LAST)), Chat("c", text="text")]
    found = with_system(given, "Be kind.")
    assert found[0].messages[0] == {"role": "system", "content": "Be kind."}
    assert found[1:] == given[1:]
    assert with_system(given, None) == given
