"""The shipped model's tokenizer: one token per byte, and the marks of a conversation.

Ids 0..255 are the bytes themselves, so any text in any script can be written, nothing has to be
trained, and every digit is a token of its own: column arithmetic needs that. Ids from 256 are the
special tokens below, padded with reserved ones to 320, a multiple of 64. `files` gives the same
thing in the formats that Hugging Face libraries read: a byte-level BPE with an empty merge table,
and a ChatML template.

The end of a text (`<|endoftext|>`, also padding) and the end of a turn (`<|im_end|>`, where
generation stops) are two tokens: a mask made from `token != padding` cannot lose the end of a turn.
"""

import json
import re
from typing import Any

import tokenizers

from transformer.generation.chat import Tokenizer

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

# Every turn stands in the history word for word, its thinking too, as it did in training;
# `generation` marks what the model learns to say. With `enable_thinking=false` it is handed an
# empty thought and answers at once.
CHAT_TEMPLATE = r"""{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and not enable_thinking %}
        {{- '<think></think>' }}
    {%- endif %}
{%- endif %}
"""


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


def byte_characters() -> list[str]:
    """The printable character by which byte-level BPE writes each byte (GPT-2's convention).

    A byte whose Latin-1 character can be printed stands for itself; the others take the characters
    from U+0100 on, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def tokenizer() -> Tokenizer:
    """The tokenizer as `Tokenizer.load` reads it from a checkpoint."""
    backend = tokenizers.Tokenizer.from_str(files()["tokenizer.json"])
    return Tokenizer(backend, {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"})


def files() -> dict[str, str]:
    """Name and content of the files by which Hugging Face libraries load this tokenizer."""
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    content: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": token,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                # the tags belong to the reply: decoding that skips special tokens keeps them
                "special": text not in TAGS,
            }
            for text, token in SPECIAL_TOKENS.items()
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": MAX_POSITIONS,
        "clean_up_tokenization_spaces": False,
    }
    generation_config = {"do_sample": False, "eos_token_id": IM_END, "pad_token_id": PAD}
    return {
        "tokenizer.json": json.dumps(content, ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "generation_config.json": json.dumps(generation_config, indent=2) + "\n",
        "chat_template.jinja": CHAT_TEMPLATE,
    }
