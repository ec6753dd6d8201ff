"""The shipped model's tokenizer: one token per byte, and the marks of a conversation.

Ids 0..255 are the bytes themselves, so any text in any script can be written, nothing has to be
trained, and every digit is a token of its own: column arithmetic needs that. Ids from 256 are the
special tokens below, padded with reserved ones to 320, a multiple of 64. `files` gives the same
thing in the formats that Hugging Face libraries read: a byte-level BPE with an empty merge table,
and a ChatML template.

The end of a text (`<|endoftext|>`, also padding) and the end of a turn (`<|im_end|>`, where
generation stops) are two tokens: a mask made from `token != padding` cannot lose the end of a turn.
"""

import re

import tokenizers

from transformer.generation.chat import Tokenizer
from transformer.model.files import read_text
from transformer.model.weights import find_checkpoint, text_files

VOCAB_SIZE = 320
MAX_POSITIONS = 1024

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
RESERVED = tuple(f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - 256 - len(CONTROL) - len(TAGS)))
SPECIAL_TOKENS = {text: 256 + i for i, text in enumerate(CONTROL + TAGS + RESERVED)}

PAD = SPECIAL_TOKENS["<|endoftext|>"]
IM_START = SPECIAL_TOKENS["<|im_start|>"]
IM_END = SPECIAL_TOKENS["<|im_end|>"]

_special = re.compile("(" + "|".join(map(re.escape, SPECIAL_TOKENS)) + ")")
_tags = re.compile("(" + "|".join(map(re.escape, TAGS)) + ")")


def encode(text: str, control: bool = True) -> list[int]:
    """Tokens of a text.

    Args:
        text: a reply or a rendered chat, whose special tokens are meant as such.
        control: False for what somebody typed: control tokens are then spelt out in bytes, and only
            the tags of thinking and answering are tokens.
    """
    if "<" not in text:
        return list(text.encode())
    tokens: list[int] = []
    for i, part in enumerate((_special if control else _tags).split(text)):
        if i % 2:  # the separators stand at odd places
            tokens.append(SPECIAL_TOKENS[part])
        else:
            tokens.extend(part.encode())
    return tokens


def encode_turn(role: str, content: str) -> list[int]:
    """Tokens of one turn as the chat template renders it; no content can end its turn."""
    return [*encode_prompt(role), *encode(content, control=False), IM_END, 10]


def encode_prompt(role: str = "assistant") -> list[int]:
    """Tokens that open a turn: after them the model speaks."""
    return [IM_START, *role.encode(), 10]


def tokenizer() -> Tokenizer:
    """The tokenizer as `Tokenizer.load` reads it from a checkpoint."""
    backend = tokenizers.Tokenizer.from_str(files()["tokenizer.json"])
    return Tokenizer(backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


def files() -> dict[str, str]:
    """Name and content of the files by which Hugging Face libraries load this tokenizer.

    They are those of the checkpoints that ship. The template keeps every turn of the history word
    for word, its thinking too, as it was in training, and its `generation` tag marks what the model
    learns to say. With `enable_thinking=false` the model is handed an empty thought and answers at
    once. In tokenizer.json the tags of thinking are no special tokens, since they belong to the
    reply, and decoding that skips special tokens keeps them.
    """
    return {path.name: read_text(path) for path in text_files(find_checkpoint("sloppy"))}
