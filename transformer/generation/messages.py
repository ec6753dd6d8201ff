"""The messages of a conversation: their form, and prompts that leave none of them out.

A chat template may write nothing of a message, because it does not know its role, and says nothing
about it. Here the conversation is rendered once more with a sign behind each message: a message is
left out if its sign is not in the rendering. What a template may cut from a message, such as the
thoughts of earlier turns, stands before the sign. A user's message is between two signs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformer.generation.chat import (
    Message,
    TemplateError,
    Tokenizer,
    encode_marked,
    reads_variable,
    render_chat,
    render_marked,
)

SIGN = "sign-5f2d9c-{}-"  # letters, digits and hyphens, which every template and JSON keep
THOUGHTS = ("reasoning_content", "thinking")  # keys of thoughts that are apart
ROLES = '"system", "user" or "assistant"'
KINDS = {dict: "an object", list: "a list", str: "a string", type(None): "null"}


def check_messages(messages: Any) -> None:
    """Refuse what is no list of messages with texts.

    Raises:
        ValueError: in a sentence, which names the message by its number.
    """
    if not isinstance(messages, list):
        raise ValueError(f'"messages" must be a list, not {kind(messages)}')
    for number, message in enumerate(messages, start=1):
        which = f"message {number}"
        if not isinstance(message, dict):
            raise ValueError(
                f'{which} must be {{"role": ..., "content": ...}}, not {message!r:.40}'
            )
        if not isinstance(message.get("role"), str):
            raise ValueError(f'{which} has no "role"; it is {ROLES}')
        content = message.get("content")
        if isinstance(content, list):
            raise ValueError(
                f'{which}: "content" must be a string, not a list; join the texts of its parts'
            )
        if not isinstance(content, str) and not message.get("tool_calls"):
            raise ValueError(f'{which}: "content" must be a string, not {kind(content)}')


def tools_of(line: Mapping[str, Any]) -> list[Any] | None:
    """The functions of a line that the template describes to the model; ValueError if it is no list
    of them. None: there are none.
    """
    tools = line.get("tools") or None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f'"tools" must be a list, not {kind(tools)}')
    return tools


def kind(value: Any) -> str:
    """What a JSON value is, for messages."""
    return KINDS.get(type(value), f"{value!r:.40}")


def encode_prompt(
    tokenizer: Tokenizer, template: str | None, messages: Sequence[Message], **variables: Any
) -> tuple[str, list[int]]:
    """Render a conversation and encode it; a message cannot smuggle in a control token, see
    `render_marked`. BOS is there if and only if the template writes it. Without a template, there
    is one message, and its content is the text as it is.

    Returns:
        The rendered text and its tokens.

    Raises:
        TemplateError: also if the template leaves out a message.
    """
    if template is None:
        text = messages[0]["content"]
        return text, tokenizer.encode_plain(text)
    text, marked = render_marked(tokenizer, template, messages, **variables)
    check_complete(tokenizer, template, messages, **variables)
    return text, encode_marked(tokenizer, text, marked)


def check_complete(
    tokenizer: Tokenizer, template: str, messages: Sequence[Message], **variables: Any
) -> None:
    """Refuse a conversation that the template can render, but not all of its messages.

    Raises:
        TemplateError: a message is left out, or a part of what the user says, or the tools.
    """
    if variables.get("tools") and not reads_variable(template, "tools"):
        raise TemplateError("the chat template writes nothing of tools; leave them out")
    given = [signed(message, SIGN.format(i)) for i, message in enumerate(messages)]
    text = render_chat(template, given, **{**tokenizer.special_tokens, **variables})
    for i, message in enumerate(messages):
        asks = message["role"] == "user"  # then it has a sign on either side
        if given[i] == message or text.count(SIGN.format(i)) > asks:
            continue
        said = f"{texts(message)[0]!r:.60}"
        if asks:
            raise TemplateError(f"the template leaves out the user's message {said} or part of it")
        raise TemplateError(
            f"the chat template writes nothing of the message {said}, whose role is"
            f" {message['role']!r}; give it a role that the template knows, such as 'user'"
        )


def texts(message: Message) -> list[str]:
    """What a message says: its content, thoughts that are apart from it, names of its calls."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    edited(message, keep, ("content", *THOUGHTS))
    return found


def signed(message: Message, sign: str) -> Message:
    """A message with a sign behind its content and the names of its calls, if it has any; and with
    one before the content of a user's message.
    """
    begin = sign if message["role"] == "user" else ""
    return edited(message, lambda text: begin + text + sign)


def edited(
    message: Message, change: Callable[[str], str], keys: Sequence[str] = ("content",)
) -> Message:
    """A message with other texts under some keys, and other names of its calls."""
    found = dict(message)
    for key in keys:
        text = message.get(key)
        if isinstance(text, str) and text.strip():
            found[key] = change(text)
        elif isinstance(text, list):
            found[key] = [_edited(part, "text", change) for part in text]
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [
            {**call, "function": _edited(function, "name", change)}
            if (function := _get(call, "function"))
            else _edited(call, "name", change)
            for call in calls
        ]
    return found


def _edited(value: Any, key: str, change: Callable[[str], str]) -> Any:
    text = _get(value, key)
    return {**value, key: change(text)} if isinstance(text, str) else value


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None
