"""The messages of a conversation: their form, and prompts that leave none of them out.

A chat template may write nothing of a message, because it does not know its role, and says nothing
about it. Here the conversation is rendered once more with a sign behind each message: a message is
left out if its sign is not in the rendering. What a template may cut from a message, such as the
thoughts of earlier turns, stands before the sign. A user's message is between two signs.
"""

from collections.abc import Iterator, Mapping, Sequence
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
    tokenizer: Tokenizer, template: str, messages: Sequence[Message], **variables: Any
) -> tuple[str, list[int]]:
    """Render a conversation and encode it; a message cannot smuggle in a control token, see
    `render_marked`. BOS is there if and only if the template writes it.

    Returns:
        The rendered text and its tokens.

    Raises:
        TemplateError: also if the template leaves out a message.
    """
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
        said = f"{next(texts(message))!r:.60}"
        if asks:
            raise TemplateError(f"the chat template leaves out a part of the user's message {said}")
        raise TemplateError(
            f"the chat template writes nothing of the message {said}, whose role is"
            f" {message['role']!r}; give it a role that the template knows, such as 'user'"
        )


def texts(message: Message) -> Iterator[str]:
    """What a message says: its content, thoughts that are apart from it, names of its calls."""
    for key in ("content", "reasoning_content", "thinking"):
        text = message.get(key)
        if isinstance(text, str) and text.strip():
            yield text
        elif isinstance(text, list):
            yield from (part["text"] for part in text if isinstance(_get(part, "text"), str))
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        if isinstance(name := _get(_get(call, "function") or call, "name"), str):
            yield name


def signed(message: Message, sign: str) -> Message:
    """A message with a sign behind its content and the names of its calls, if it has any; and with
    one before the content of a user's message.
    """
    found, content = dict(message), message.get("content")
    begin = sign if message["role"] == "user" else ""
    if isinstance(content, str) and content.strip():
        found["content"] = begin + content + sign
    elif isinstance(content, list):
        found["content"] = [
            {**x, "text": begin + x["text"] + sign} if isinstance(_get(x, "text"), str) else x
            for x in content
        ]
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [_signed_call(call, sign) for call in calls]
    return found


def _signed_call(call: Any, sign: str) -> Any:
    """A call with a sign behind the function's name, in either form that templates know."""
    if function := _get(call, "function"):
        return {**call, "function": _signed_call(function, sign)}
    name = _get(call, "name")
    return {**call, "name": name + sign} if isinstance(name, str) else call


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, Mapping) else None
