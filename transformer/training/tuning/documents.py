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
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain
from os.path import commonprefix
from pathlib import Path

import numpy as np

from transformer.generation.chat import Message, Tokenizer, encode_chat, load_template
from transformer.model.weights import eos_token_ids
from transformer.training.tuning.chats import Chat


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
        self.eos = eos_token_ids(folder)

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
        end = self.tokenizer.token_id(self.tokenizer.special_tokens.get("eos_token", ""))
        tokens += [end] if end is not None else [*self.eos[:1]]
        return _document(chat, tokens, range(1, len(tokens)))

    def _conversation(self, chat: Chat) -> list[Document]:
        text, tokens = self._rendered(chat, chat.messages)
        learned, turns = list[int](), _turns(chat.messages)
        for turn in turns:
            so_far, begun = self._rendered(chat, chat.messages[: turn + 1])
            if not text.startswith(so_far):
                return [self._last_turn(chat, chat.messages[: turn + 1]) for turn in turns]
            learned += self._said(chat, chat.messages[:turn], begun, tokens)
        return [_document(chat, tokens, learned)]

    def _last_turn(self, chat: Chat, messages: Sequence[Message]) -> Document:
        """A conversation of which the last turn is learned."""
        _, tokens = self._rendered(chat, messages)
        return _document(chat, tokens, self._said(chat, messages[:-1], tokens, tokens))

    def _said(
        self, chat: Chat, before: Sequence[Message], begun: list[int], tokens: list[int]
    ) -> range:
        """The tokens of a turn, by number: from the prompt to the last token that ends an answer.

        Args:
            chat: whose turn it is.
            before: the messages before it.
            begun: tokens of the conversation up to the turn.
            tokens: of the conversation.
        """
        _, prompt = self._rendered(chat, before, prompt=True)
        # A prompt may end in more than the finished turn has, such as an opened thought.
        start, end = (len(commonprefix([x, tokens])) for x in (prompt, begun))
        ends = [i for i in range(start, end) if tokens[i] in self.eos]
        return range(start, ends[-1] + 1 if ends else end)

    def _rendered(
        self, chat: Chat, messages: Sequence[Message], prompt: bool = False
    ) -> tuple[str, list[int]]:
        """Text and tokens of a conversation, perhaps with the prompt for the assistant's turn."""
        if self.template is None:
            raise ValueError(f'{self.folder} has no chat template; it learns {{"text": "..."}}')
        return encode_chat(
            self.tokenizer,
            self.template,
            messages,
            tools=chat.tools or None,
            add_generation_prompt=prompt,
        )


def _turns(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def _document(chat: Chat, tokens: Sequence[int], learned: Sequence[int]) -> Document:
    which = np.zeros(len(tokens), bool)
    which[[*learned]] = True
    which[0] = False
    if not which.any():
        raise ValueError("no token of it would be learned")
    return Document(chat.name, np.array(tokens, np.int32), which)


def fitted(
    documents: Sequence[Document], width: int, drop_long: bool, what: str = "chat"
) -> list[Document]:
    """The documents, those that are too long cut if they are texts.

    Args:
        documents: of any length.
        width: the largest length.
        drop_long: leave out conversations that are longer.
        what: one of them is called in a message.

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
    return found


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
