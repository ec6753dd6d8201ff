"""Chats and texts of one's own, read from a file and checked, and the demonstrations of a task.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]}
    {"text": "All of this is learned."}

A line of a JSONL file is one or the other; a file whose name ends in `.txt` is one text.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from transformer.generation.chat import Message
from transformer.generation.messages import check_messages, tools_of
from transformer.model.files import read_jsonl, read_text
from transformer.tasks.problems import split_by_hash
from transformer.tasks.task import Task

FORMATS = '{"messages": [{"role": "user", "content": "..."}, ...]} or {"text": "..."}'


@dataclass(frozen=True)
class Chat:
    """A conversation, of which the assistant's words are learned, or a text, learned as a whole.

    Attributes:
        name: where it comes from, for messages.
        messages: the conversation, empty for a text.
        text: the text, empty for a conversation.
        tools: JSON schemas of the functions that the template describes to the model.
    """

    name: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()


def read_chats(path: Path) -> list[Chat]:
    """The chats of a file.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line that is no chat, by the file's name and the line's number; no line.
    """
    if path.suffix == ".txt":
        if not (text := read_text(path)).strip():
            raise ValueError(f"{path} is empty")
        return [Chat(str(path), text=text)]
    chats = [_chat(name, line) for name, line in read_jsonl(path)]
    if not chats:
        raise ValueError(f"{path} is empty; a line of it is {FORMATS}")
    return chats


def _chat(name: str, line: Mapping[str, Any]) -> Chat:
    if ("messages" in line) == ("text" in line):
        raise ValueError(f"{name} must be {FORMATS}; it has the keys {', '.join(line) or 'none'}")
    if "text" in line:
        if not isinstance(line["text"], str) or not line["text"].strip():
            raise ValueError(f'{name}: "text" must be a string that is not empty')
        return Chat(name, text=line["text"])
    messages = line["messages"]
    try:
        check_messages(messages)
        tools = tools_of(line) or ()
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise ValueError(f"{name} has no message of the assistant, so it has nothing to learn")
    if roles[0] == "assistant":
        raise ValueError(f"{name} begins with the assistant; a user's message must come before")
    return Chat(name, tuple(messages), tools=tuple(tools))


def demonstrations(task: Task, count: int, seed: int, held_out: bool = False) -> list[Chat]:
    """Problems of a task from one side of its split, with the replies that its teacher gives.

    Raises:
        ValueError: the task has no teacher, or one whose reply it does not accept.
    """
    rng, chats = Random(f"{seed} {held_out}"), []
    for number in range(1, count + 1):
        problem = task.sample(rng, held_out)
        try:
            reply = problem.task.demonstrate(rng, *problem.arguments)
        except NotImplementedError as error:
            raise ValueError(
                f"task {task.name!r} shows no reply: give it a method `answer` or `demonstrate`"
            ) from error
        if not isinstance(reply, str) or not problem.marks(reply).answer:
            raise ValueError(
                f"task {task.name!r} does not accept its own demonstration {reply!r:.200} for"
                f" {problem.question!r}, so there is nothing to teach"
            )
        messages = (*problem.messages, {"role": "assistant", "content": reply})
        chats.append(Chat(f"demonstration {number} of task {task.name!r}", messages))
    return chats


def with_system(chats: Iterable[Chat], prompt: str | None) -> list[Chat]:
    """The chats, each conversation that has no system prompt under this one."""
    if prompt is None:
        return list(chats)
    system = {"role": "system", "content": prompt}
    return [
        replace(chat, messages=(system, *chat.messages))
        if chat.messages and chat.messages[0]["role"] != "system"
        else chat
        for chat in chats
    ]


def split(chats: Sequence[Chat]) -> tuple[list[Chat], list[Chat]]:
    """What is trained on, and what is held out, see `split_by_hash`."""
    return split_by_hash(chats, lambda chat: (chat.messages, chat.text, chat.tools))
