"""From chats to tokens, and which of them the model learns to say.

In a conversation these are the tokens of each assistant's turn, the token that ends it among them.
Nothing in a chat template says where a turn begins. So the conversation is rendered up to the turn,
as `generate` would prompt for it, up to its end, and as a whole:

    prompt     <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\n
    turn       <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello!<|im_end|>\\n
    learned                                                          Hello!<|im_end|>

Some templates render a turn in another way once others follow it: that of Qwen3 leaves out its
thinking. The whole conversation then contains text that the model never says, and each turn becomes
a document of its own instead, which ends with that turn.

So it does where the template leaves out a part of the turn, such as the thinking, or where its
prompt has more than the finished turn, such as an opened thought. The reply is then written behind
the prompt, and of the template's own turn only what stands around the reply is taken:

    reply      <think>A greeting.</think>Hello!
    turn       <|User|>Hi<|Assistant|>Hello!<|end|>
    prompt     <|User|>Hi<|Assistant|><think>
    learned                                  A greeting.</think>Hello!<|end|>
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from os.path import commonprefix
from pathlib import Path

import numpy as np

from transformer.generation.chat import (
    Message,
    Tokenizer,
    encode_marked,
    load_template,
    mark_spellings,
    render_marked,
)
from transformer.generation.messages import SIGN, check_complete, signed, texts
from transformer.model.weights import eos_token_ids
from transformer.training.tuning.chats import Chat

INSIDE_A_TAG = re.compile(r"<[^>]*$")
THOUGHT = re.compile("think|thought|reasoning", re.IGNORECASE)


@dataclass(frozen=True)
class Document:
    """Tokens that see each other.

    Attributes:
        name: of the chat that it comes from.
        tokens: (length,) int32.
        learned: (length,) bool, the tokens that count in the loss; never the first.
    """

    name: str
    tokens: np.ndarray
    learned: np.ndarray


class Encoder:
    """How a checkpoint writes chats and texts.

    Args:
        folder: of the checkpoint; only its tokenizer and its template are read.

    Raises:
        OSError, ValueError: these files are missing or damaged.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.tokenizer, self.template = Tokenizer.load(folder), load_template(folder)
        self.eos = eos_token_ids(folder, self.tokenizer.eos)

    def encode(self, chat: Chat) -> list[Document]:
        """The documents of a chat: one, unless the template needs one for each turn.

        Raises:
            ValueError: it cannot be rendered, or nothing is learned of it, by the chat's name.
        """
        try:
            return [self._text(chat)] if chat.text else self._conversation(chat)
        except ValueError as error:
            raise ValueError(f"{chat.name}: {error}") from error

    def _text(self, chat: Chat) -> Document:
        tokens = self.tokenizer.encode_plain(chat.text)
        end = self.tokenizer.eos
        tokens += [end] if end is not None else [*self.eos[:1]]
        return _document(chat, tokens, range(1, len(tokens)))

    def _conversation(self, chat: Chat) -> list[Document]:
        text, tokens = self._encoded(self._rendered(chat, chat.messages))
        learned, messages = list[int](), enumerate(chat.messages)
        turns = [i for i, message in messages if message["role"] == "assistant"]
        for turn in turns:
            message = chat.messages[turn]
            before, prompt = self._encoded(self._prompt(chat, chat.messages[:turn]))
            so_far, begun = self._encoded(self._rendered(chat, chat.messages[: turn + 1]))
            follows = text.startswith(so_far) and tokens[: len(prompt)] == prompt
            if not follows or _lost(message, so_far, before):
                return [self._turn(chat, chat.messages[: turn + 1]) for turn in turns]
            learned += self._said(tokens, len(prompt), len(commonprefix([begun, tokens])))
        return [_document(chat, tokens, learned)]

    def _turn(self, chat: Chat, messages: Sequence[Message]) -> Document:
        """A conversation of which the last turn is learned, behind the prompt of `generate`."""
        before = self._prompt(chat, messages[:-1])
        whole = self._rendered(chat, messages)
        behind = [x[len(before[0]) :] for x in whole]
        if not whole[0].startswith(before[0]) or _lost(messages[-1], whole[0], before[0]):
            behind = self._behind(chat, messages)
        _, prompt = self._encoded(before)
        _, tokens = self._encoded([x + y for x, y in zip(before, behind, strict=True)])
        if tokens[: len(prompt)] != prompt:  # a token goes over the end of the prompt
            tokens = prompt + self._encoded(behind)[1]
        return _document(chat, tokens, self._said(tokens, len(prompt), len(tokens)))

    def _behind(self, chat: Chat, messages: Sequence[Message]) -> list[str]:
        """What the model has to say behind a prompt, with the end of the turn, text and marked; the
        template shows with a sign in the place of the reply what comes before and behind it.
        """
        *history, asked, message = messages
        reply = str(message.get("content") or "").strip()
        partly = ValueError(
            f"the chat template leaves out a part of {_named(message)}, or writes it behind another"
            " prompt than that of generate"
        )
        if texts(message) not in ([], [message.get("content")]):  # thoughts apart, or calls
            raise partly
        history.append(signed(asked, SIGN.format("asked")))
        turn, _ = self._rendered(chat, [*history, {**message, "content": SIGN.format("reply")}])
        begun, found, end = turn.partition(SIGN.format("reply"))
        prompt, _ = self._rendered(chat, history, prompt=True)
        # Of both, only what stands behind the last message: a template may move what is before it.
        prompt, begun = (x.rpartition(SIGN.format("asked"))[2] for x in (prompt, begun))
        common = INSIDE_A_TAG.sub("", commonprefix([prompt, begun]))
        opened, more = (x.removeprefix(common) for x in (prompt, begun))
        if not found or (more.strip() and not opened and "</think>" in reply):
            raise partly
        if opened.strip() and reply.startswith(opened.strip()):
            reply = reply[len(opened.strip()) :]
        elif THOUGHT.search(opened) and "</" not in opened:
            raise ValueError(
                f"the prompt of the chat template ends in {opened.strip()!r:.60}, and a reply goes"
                f" on from there; begin {_named(message)} with it"
            )
        if opened:
            reply, more = reply.lstrip() if opened[-1].isspace() else reply, ""
        marked = mark_spellings(reply, self.tokenizer.control_tokens)
        return [more + reply + end, more + marked + end]

    def _said(self, tokens: list[int], start: int, end: int) -> range:
        """The tokens of a turn, by number: from `start`, the end of its prompt, to the last token
        that ends an answer.
        """
        ends = [i for i in range(start, end) if tokens[i] in self.eos]
        return range(start, ends[-1] + 1 if ends else end)

    def _prompt(self, chat: Chat, messages: Sequence[Message]) -> tuple[str, str]:
        """The prompt of `generate` for the turn that comes next; no message is missing in it."""
        found = self._rendered(chat, messages, prompt=True)
        check_complete(self.tokenizer, self.template or "", messages, tools=chat.tools or None)
        return found

    def _rendered(
        self, chat: Chat, messages: Sequence[Message], prompt: bool = False
    ) -> tuple[str, str]:
        """A conversation, perhaps with the prompt for the assistant's turn: text and marked."""
        if self.template is None:
            raise ValueError(f'{self.folder} has no chat template; it learns {{"text": "..."}}')
        return render_marked(
            self.tokenizer,
            self.template,
            messages,
            tools=chat.tools or None,
            add_generation_prompt=prompt,
        )

    def _encoded(self, rendered: Sequence[str]) -> tuple[str, list[int]]:
        """The text and the tokens of a rendering."""
        return rendered[0], encode_marked(self.tokenizer, *rendered)


def _lost(message: Message, turn: str, prompt: str) -> bool:
    """Whether a rendered turn lacks something that its message says, white space aside; a prompt
    may have the beginning of it.
    """
    written, start = _squeezed(turn), len(_squeezed(prompt))
    said = [_squeezed(text) for text in texts(message)]
    return any(text not in written[max(0, start + 1 - len(text)) :] for text in said)


def _named(message: Message) -> str:
    said = texts(message) or [""]
    return f"the assistant's message {said[0]!r:.60}"


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _document(chat: Chat, tokens: Sequence[int], learned: Sequence[int]) -> Document:
    which = np.zeros(len(tokens), bool)
    which[[*learned]] = True
    which[0] = False
    if not which.any():
        raise ValueError("no token of it would be learned")
    return Document(chat.name, np.array(tokens, np.int32), which)


def fitted(
    documents: Sequence[Document], width: int, drop_long: bool, what: str = "chat"
) -> tuple[list[Document], list[Document]]:
    """The documents, those longer than `width` cut if they are texts; and those that are left out.
    A message calls one of them `what`.

    Raises:
        ValueError: a conversation is longer, or nothing is left.
    """
    found, long = list[Document](), list[Document]()
    for document in documents:
        size = len(document.tokens)
        if size <= width:
            found.append(document)
        elif document.learned[1:].all():
            # The last token of a piece is the first of the next: each is learned once.
            found += [_cut(document, at, width) for at in range(0, size - 1, width - 1)]
        else:
            long.append(document)
    if long and not drop_long:
        more = f", and so are {len(long) - 1} others" if len(long) > 1 else ""
        raise ValueError(
            f"{long[0].name} is longer than {width} tokens: it has {len(long[0].tokens)}{more};"
            " a larger --context takes them if the model's allows it, --drop-long leaves them out"
        )
    if not found:
        raise ValueError(f"no {what} is left: all {len(long)} are longer than {width} tokens")
    return found, long


def _cut(document: Document, at: int, width: int) -> Document:
    learned = document.learned[at : at + width].copy()
    learned[0] = False
    return Document(document.name, document.tokens[at : at + width], learned)


def fingerprint(documents: Sequence[Document]) -> str:
    """Tells data apart: the beginning of a hash of all tokens and of what is learned."""
    digest = sha256()
    for part in chain.from_iterable((x.tokens, x.learned) for x in documents):
        digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    return digest.hexdigest()[:12]
