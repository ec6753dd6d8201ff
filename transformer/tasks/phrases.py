"""The many ways to put a question: sentence patterns and what people do to them.

The sentences are the text files in `data`. A pattern is a sentence with alternatives in
parentheses, `(what is|what's) {a} plus {b}`, expanded at random; the operands in braces are filled
in last, so that neither capitals nor typing errors ever touch them. Every line is part of the
training data: another line, or another order of the lines, gives other draws from the same seed.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random

DATA = Path(__file__).parent / "data"


def read_sections(path: Path) -> dict[str, tuple[str, ...]]:
    """The entries of a data file, by section.

    A line `== name` opens a section, any other line is an entry. An entry in double quotes is a
    JSON string, for entries that are empty, begin or end with a space, or hold a line break.
    """
    sections: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("== "):
            entries = sections[line.removeprefix("== ")] = []
        elif line:
            entries.append(json.loads(line) if line.startswith('"') else line)
    return {name: tuple(entries) for name, entries in sections.items()}


def read_patterns() -> dict[str, tuple[str, ...]]:
    """The sections of all data files, with `<name>` replaced by its text in shorthand.txt."""
    found = {
        name: x for path in sorted(DATA.glob("*.txt")) for name, x in read_sections(path).items()
    }
    shorthand = dict(entry.split(" ", 1) for entry in found.pop("shorthand"))
    known = re.compile("|".join(map(re.escape, shorthand)))
    return {
        name: tuple(known.sub(lambda use: shorthand[use[0]], entry) for entry in entries)
        for name, entries in found.items()
    }


PATTERNS = read_patterns()


def group(name: str) -> dict[str, tuple[str, ...]]:
    """The sections `NAME: key`, by their keys."""
    prefix = f"{name}: "
    return {key.removeprefix(prefix): x for key, x in PATTERNS.items() if key.startswith(prefix)}


COMPARE, SORT, SIGNED, FOLLOW_UP = map(group, ("compare", "sort", "signed", "follow-up"))
SMALL_TALK, BARE, REPLIES = map(group, ("small talk", "bare", "reply"))
WORDS = {name: tuple(" ".join(lines).split()) for name, lines in group("words").items()}

_alternatives = re.compile(r"\(([^()]*)\)")
_operand = re.compile(r"(\{\w+\})")
_TEXTS = ("word", "letter")  # the operands that are no numbers
# What errors may touch: without its x, `9 x 5` is another question, and eighty may become eight.
_word = re.compile(r"\b(?!(?:x|km|cm|m|eighty)\b)[^\W\d_]+")


def expand(rng: Random, pattern: str) -> str:
    """One of the sentences that a pattern describes."""
    while "(" in pattern:
        pattern = _alternatives.sub(lambda group: rng.choice(group[1].split("|")), pattern)
    return pattern


def say(rng: Random, patterns: Sequence[str], **operands: object) -> str:
    """A question from one of some patterns as people type it, with its operands filled in."""
    return dress(rng, expand(rng, rng.choice(patterns)), **operands)


def dress(rng: Random, sentence: str, **operands: object) -> str:
    """A plain lower-case sentence as people type it: a polite start, an ending, capitals, typos."""
    chance = rng.random
    if chance() < 0.15:
        sentence = rng.choice(PATTERNS["leads"]) + sentence
    sentence += rng.choice(PATTERNS["tails" if chance() < 0.85 else "rare tails"])
    if chance() < 0.5:
        sentence = sentence[:1].upper() + sentence[1:]
    elif chance() < 0.06:
        sentence = _between_operands(sentence, str.upper)
    if chance() < 0.05:
        sentence = _between_operands(sentence, lambda text: mistype(rng, text))
    if chance() < 0.06:
        sentence = respace(rng, sentence, operands)
    for name, value in operands.items():
        sentence = sentence.replace("{" + name + "}", str(value))
    return sentence


def bare(rng: Random, patterns: Sequence[str]) -> str:
    """A word or two, as people type them: in lower case or not, with or without a mark."""
    text = expand(rng, rng.choice(patterns))
    text = rng.choice((text, text, text.capitalize(), text.capitalize(), text.upper()))
    if rng.random() < 0.04:
        text = mistype(rng, text)
    if rng.random() < 0.04:
        text += text[-1] * rng.randint(1, 12)
    return text + rng.choice((*4 * [""], *2 * ["!", "."], "?", "!!", "...", " :)", " !", ","))


def respace(rng: Random, sentence: str, operands: Mapping[str, object]) -> str:
    """A sentence with wide gaps, or glued to the numbers in it: `12plus9`, `whatis 5+3`.

    The gap between two operands stays, one after a comma, too, and so does one before a minus sign:
    `sort-5` may be either.
    """
    if rng.random() < 0.5:
        gap, often = rng.choice(("  ", "  ", "   ", "    ", "\t")), rng.choice((0.3, 1))
        return re.sub(" ", lambda _: gap if rng.random() < often else " ", sentence)
    parts = _operand.split(sentence)
    numbers = {"{" + x + "}": str(value) for x, value in operands.items() if x not in _TEXTS}
    values = [numbers.get(name, "") for name in parts[1::2]]
    often = rng.choice((0.5, 1))
    for i, (left, right) in enumerate(zip(["", *values], [*values, ""])):
        text = parts[2 * i]
        if text.strip() in ("", ","):
            continue
        if left[-1:].isalnum() and rng.random() < often:
            text = text.lstrip(" ")
        if right[:1].isalnum() and right[1:2] != " " and rng.random() < often:  # no "a hundred"
            text = text.rstrip(" ")
        if rng.random() < 0.4:
            text = re.sub(r"(?<=\S) (?=\S)", "", text, count=rng.choice((0, 1)))
        parts[2 * i] = text
    return "".join(parts)


def _between_operands(sentence: str, change: Callable[[str], str]) -> str:
    parts = _operand.split(sentence)
    parts[::2] = [change(part) for part in parts[::2]]
    return "".join(parts)


def mistype(rng: Random, text: str) -> str:
    """A text with one letter dropped, doubled, replaced or exchanged with the next one."""
    places = [i for word in _word.finditer(text) for i in range(*word.span())]
    if not places:
        return text
    i = rng.choice(places)
    error = rng.randrange(4)
    if error == 0:
        return text[:i] + text[i + 1 :]
    if error == 1:
        return text[:i] + text[i] + text[i:]
    if error == 2:
        return text[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + text[i + 1 :]
    return text[:i] + text[i + 1 : i + 2] + text[i] + text[i + 2 :]


def number_text(rng: Random, number: int, words: bool = True) -> str:
    """A number as people write it: mostly digits, now and then `1,234` or, up to 99, words."""
    if rng.random() > 0.05 or number < 0:
        return str(number)
    return in_words(rng, number) if words and number < 100 else f"{number:,}"


def signed_text(rng: Random, number: int) -> str:
    """A number as people write it, if below zero as `-5`, `(-5)`, `minus 5` or `negative 5`."""
    words = [f"{minus} {-number}" for minus in ("minus", "negative")]
    return str(number) if number >= 0 else rng.choice((*6 * [f"{number}"], f"({number})", *words))


def in_words(rng: Random, number: int) -> str:
    """A number up to 9999 in words: `six hundred and five`, `a thousand`, `nineteen hundred`."""
    if number < 20:
        return WORDS["units"][number]
    if number < 100:
        tens, unit = WORDS["tens"][number // 10 - 2], number % 10
        return f"{tens}{rng.choice(' -')}{WORDS['units'][unit]}" if unit else tens
    # twelve hundred, but not ten hundred
    hundreds = number < 1000 or (number // 100 % 10 and rng.random() < 0.1)
    size, name = (100, "hundred") if hundreds else (1000, "thousand")
    count, rest = divmod(number, size)
    text = f"{in_words(rng, count)} {name}"
    if text.startswith("one ") and rest < 100 and rng.random() < 0.3:
        text = f"a {name}"
    if not rest:
        return text
    link = " and " if rest < 100 and rng.random() < 0.5 else " "
    return f"{text}{link}{in_words(rng, rest)}"


def quote(rng: Random, word: str) -> str:
    """A word as somebody might set it off: bare, mostly, or in quotation marks."""
    mark = rng.choice(("", "", "", "", '"', "'"))
    return f"{mark}{word}{mark}"


def system_prompt(rng: Random) -> str | None:
    """What stands before the conversation: nothing, mostly."""
    return rng.choice(PATTERNS["system prompts"]) if rng.random() < 0.25 else None
