"""From a conversation to tokens and back: the tokenizer, the chat template, text while it streams.

A chat template is a Jinja program that comes with a checkpoint. It runs in Jinja's immutable
sandbox, with the settings and helpers that `transformers` gives it, so both render the same string.

Notable is what happens to control tokens, such as <|im_end|>, that somebody types into a message.
The template's own must become control tokens and the typed ones must stay ordinary text, but in
the rendered string they look the same. So a conversation that spells one is rendered a second time
with the first character of each spelling replaced by a stand-in. Where the two strings differ, a
message speaks, not the template; cutting the text there hides the spelling from the tokenizer:

    rendered   <|im_start|>user\\n a <|im_end|> b<|im_end|>\\n
    marked     <|im_start|>user\\n a ?|im_end|> b<|im_end|>\\n
    encoded    <|im_start|>user\\n a <  +  |im_end|> b<|im_end|>\\n

Every other conversation is encoded in one piece, exactly as `apply_chat_template` does.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Scope
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from transformer.model.files import read_json, read_text

Message = Mapping[str, Any]

SPECIAL_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
STAND_IN = "\ufdd0"  # a noncharacter: Unicode reserves it for use inside a program
MAX_RENDERED_CHARACTERS = 10_000_000


class TemplateError(ValueError):
    """The chat template is broken, refused the conversation or tried to leave the sandbox."""


class Tokenizer:
    """A checkpoint's tokenizer.json, through the `tokenizers` library.

    Attributes:
        special_tokens: {"bos_token": "<s>", ...}, the names that templates know them by.
        control_tokens: the spellings that tokenizer.json marks as special.
        vocab_size: one more than the largest id.
        trained_size: the tokens that it was trained to, without those that were added.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str]) -> None:
        # A tokenizer.json may carry the settings of whoever saved it; a prompt is never cut short.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens = dict(special_tokens)
        added = backend.get_added_tokens_decoder().values()
        self.control_tokens = tuple(token.content for token in added if token.special)
        self.trained_size = backend.get_vocab_size(with_added_tokens=False)
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @classmethod
    def load(cls, folder: str | Path) -> "Tokenizer":
        """Read tokenizer.json and the names of its special tokens from a checkpoint's folder.

        Raises:
            FileNotFoundError: there is no tokenizer.json.
            ValueError: a file cannot be understood.
        """
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise FileNotFoundError(f"{folder} has no tokenizer.json")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"{path} is not a tokenizer: {error}") from error
        config_path = Path(folder) / "tokenizer_config.json"
        config = read_json(config_path, missing_ok=True)
        special_tokens = {}
        for role in SPECIAL_ROLES:
            token = config.get(role)
            if isinstance(token, dict):  # an AddedToken, written out with its flags
                token = token.get("content")
            if token is None:
                continue
            if not isinstance(token, str):
                raise ValueError(f"{config_path}: {role} must be a string, got {token!r:.80}")
            if backend.token_to_id(token) is None:
                raise ValueError(f"{config_path}: {role} is {token!r}, which {path.name} lacks")
            special_tokens[role] = token
        return cls(backend, special_tokens)

    @property
    def eos(self) -> int | None:
        """The token that it calls eos_token; None if there is none."""
        return self.token_id(self.special_tokens.get("eos_token", ""))

    def encode(self, text: str) -> list[int]:
        """Tokens of a rendered template: control tokens are recognised, none is added.

        Raises:
            ValueError: the text has a lone surrogate, which no UTF-8 can express.
        """
        return self._backend.encode(_encodable(text), add_special_tokens=False).ids

    def encode_plain(self, text: str) -> list[int]:
        """Tokens of a text that no template saw: BOS in front if the tokenizer wants one, once."""
        tokens = self._backend.encode(_encodable(text)).ids
        bos = self.token_id(self.special_tokens.get("bos_token", ""))
        doubled = bos is not None and tokens[:2] == [bos, bos]
        return tokens[1:] if doubled else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens, control tokens spelled out; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(list(tokens), skip_special_tokens=False)

    def refuse_another(self, folder: Path, vocab_size: int) -> None:
        """Raise a ValueError if the model of a folder does not know all tokens; one that was added
        may be another model's.
        """
        if self.trained_size > vocab_size:
            raise ValueError(
                f"{folder}: the tokenizer has {self.trained_size} tokens but the model knows"
                f" {vocab_size}, so they do not belong together"
            )

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling, None if there is no such token."""
        return self._backend.token_to_id(token)


class IncrementalDecoder:
    """Decodes a few tokens at a time and never gives out a part of a character.

    A character of UTF-8 has up to four bytes, and a token may end inside one: the decoded text then
    ends in U+FFFD and is held back. More than three tokens cannot wait for one character, so the
    older ones are no UTF-8 and are given out as the U+FFFD that they are.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Given out already, but needed to decode what follows: some tokenizers drop the space in
        # front of the first token.
        self._context: list[int] = []
        self._held: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        """Take tokens and return the text that is now certain, for a single one often ''."""
        self._held += tokens
        for waiting in range(3):
            certain = len(self._held) - waiting
            text = self._decode(self._held[:certain])
            # With byte fallback, bytes that are no character yet are a U+FFFD each. If one more
            # makes the text shorter, they are a character now, which may be U+FFFD itself.
            before = self._held[: certain - 1]
            if not text.endswith(REPLACEMENT) or len(text) < len(self._decode(before)):
                return self._give_out(certain, text)
        certain = max(0, len(self._held) - 3)
        return self._give_out(certain, self._decode(self._held[:certain]))

    def flush(self) -> str:
        """The rest: an incomplete character becomes U+FFFD."""
        return self._give_out(len(self._held), self._decode(self._held))

    def _decode(self, tokens: list[int]) -> str:
        if not tokens:
            return ""
        before = self._tokenizer.decode(self._context) if self._context else ""
        return self._tokenizer.decode(self._context + tokens)[len(before) :]

    def _give_out(self, count: int, text: str) -> str:
        self._context, self._held = self._held[:count], self._held[count:]
        return text


def load_template(folder: str | Path) -> str | None:
    """The chat template of a checkpoint, None if it has none.

    chat_template.jinja comes before the "chat_template" of tokenizer_config.json, which is a string
    or a list of named templates; of these the one named "default" is taken.
    """
    path = Path(folder) / "chat_template.jinja"
    if path.exists():
        return read_text(path)
    path = Path(folder) / "tokenizer_config.json"
    template = read_json(path, missing_ok=True).get("chat_template")
    if template is None or isinstance(template, str):
        return template
    try:
        named = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError):
        named = {}
    if not named or not all(isinstance(text, str) for text in (*named, *named.values())):
        raise TemplateError(
            f"chat_template in {path} must be a string or a list of named templates,"
            f" got {template!r:.80}"
        )
    if "default" not in named:
        raise TemplateError(
            f"{path} has no chat template named 'default', only {', '.join(sorted(named))}"
        )
    return named["default"]


def render_chat(
    template: str, messages: Sequence[Message], *, now: datetime | None = None, **variables: Any
) -> str:
    """Render a conversation as `transformers` would with apply_chat_template(tokenize=False).

    Args:
        template: the Jinja source.
        messages: [{"role": ..., "content": ...}, ...]; entries that are None count as absent,
            unless the template fails without them: DeepSeek R1's asks whether a content is None.
        now: what the template takes for the time; None: the time.
        variables: what else the template should see: special tokens, enable_thinking, ...;
            add_generation_prompt (True): end with the header of an assistant's turn; tools (None):
            JSON schemas of functions that the model may call.

    Raises:
        TemplateError: no message, a message without a role, a template that does not parse, raises,
            or writes more than MAX_RENDERED_CHARACTERS. The sandbox limits a range to 100 000
            steps; it cannot stop every template that wastes time or memory.
    """
    if not messages:
        raise TemplateError("a conversation needs at least one message")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TemplateError(f"a message must be an object with a 'role', got {message!r:.80}")
    present = [{k: v for k, v in message.items() if v is not None} for message in messages]
    told: dict[str, Any] = dict.fromkeys(("tools", "documents"))
    told |= {"add_generation_prompt": True, "strftime_now": (now or datetime.now()).strftime}
    told |= variables
    try:
        return _written(template, {**told, "messages": present})
    except TemplateError:
        if present != [*messages]:
            with suppress(TemplateError):
                return _written(template, {**told, "messages": [*messages]})
        raise


def _written(template: str, variables: Mapping[str, Any]) -> str:
    """What a template writes; a TemplateError says why it fails."""
    parts: list[str] = []
    length = 0
    try:
        for part in _compile(template).generate(variables):
            parts.append(part)
            length += len(part)
            if length > MAX_RENDERED_CHARACTERS:
                raise TemplateError(f"it wrote more than {MAX_RENDERED_CHARACTERS:,} characters")
    except Exception as error:  # the template is a program of its own: it can raise anything
        line = f" (line {error.lineno})" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TemplateError(f"the chat template failed{line}: {reason}") from error
    return "".join(parts)


def render_marked(
    tokenizer: Tokenizer,
    template: str,
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    **variables: Any,
) -> tuple[str, str]:
    """The two renderings of a conversation from which `encode_marked` makes tokens; they are the
    same if no message spells a control token.

    See the module's docstring for the method and `render_chat` for the arguments; the tokenizer's
    special tokens are given to the template. Spellings that only arise when the template joins two
    strings are found as well, as long as they begin inside a message. A control token of one
    character could not be cut in two.
    """
    # Both renderings must agree on the time.
    variables = {**tokenizer.special_tokens, "now": datetime.now(), **variables}
    text = render_chat(template, messages, tools=tools, **variables)
    try:
        marked_messages, marked_tools = _map_strings(
            (list(messages), tools), lambda string: mark_spellings(string, tokenizer.control_tokens)
        )
    except RecursionError as error:
        raise TemplateError("a message or tool is nested too deeply") from error
    if (marked_messages, marked_tools) == (list(messages), tools):
        return text, text
    marked = render_chat(template, marked_messages, tools=marked_tools, **variables)
    differences = {theirs for ours, theirs in zip(text, marked) if ours != theirs}
    if len(text) != len(marked) or not differences <= {STAND_IN}:
        raise TemplateError(
            "the chat template reacts to a control token that a message spells, so the two cannot"
            " be told apart; remove the control token from the message"
        )
    return text, marked


def encode_marked(tokenizer: Tokenizer, text: str, marked: str) -> list[int]:
    """Tokens of a text, cut behind the first character of each control token that a message spells;
    there `marked` differs from it.
    """
    if text == marked:
        return tokenizer.encode(text)
    differences = [i for i, (ours, theirs) in enumerate(zip(text, marked)) if ours != theirs]
    starts = [0, *(i + 1 for i in differences)]
    pieces = [text[start:end] for start, end in zip(starts, [*starts[1:], len(text)])]
    return [token for piece in pieces for token in tokenizer.encode(piece)]


def mark_spellings(text: str, control_tokens: tuple[str, ...]) -> str:
    """Put the stand-in where a control token begins, or may begin if more text is appended."""
    openings = {token[0] for token in control_tokens}
    if openings.isdisjoint(text):  # nearly always; there may be a hundred control tokens
        return text
    tail, longest = text.rstrip(), max(map(len, control_tokens))  # templates trim

    def begins(start: int) -> bool:
        if text.startswith(control_tokens, start):
            return True
        near_the_end = len(tail) - longest < start < len(tail)
        return near_the_end and any(token.startswith(tail[start:]) for token in control_tokens)

    return "".join(
        STAND_IN if character in openings and begins(i) else character
        for i, character in enumerate(text)
    )


def _map_strings(value: Any, function: Callable[[str], str]) -> Any:
    """Rebuild nested lists, tuples and dicts with every string value (no key) mapped."""
    if isinstance(value, str):
        return function(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, function) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_map_strings(item, function) for item in value)
    return value


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's words; renders as its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> Scope:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


_environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
)
# Jinja's own filter escapes <, > and & for HTML.
_environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
_environment.globals["raise_exception"] = _raise_exception
_compile = lru_cache(_environment.from_string)


def reads_variable(template: str, name: str) -> bool:
    """Whether a template depends on a variable, such as enable_thinking; False if it is broken."""
    try:
        return name in find_undeclared_variables(_environment.parse(template))
    except jinja2.TemplateError:
        return False


def _encodable(text: str) -> str:
    """The text itself; ValueError if it came from bytes or escapes that are no Unicode text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"the text is not valid UTF-8: character {error.start} is a lone surrogate"
        ) from error
    return text
