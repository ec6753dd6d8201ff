"""Requests just beyond the skills: a model is taught to decline them instead of guessing.

Most are worded like those that it can answer and differ only in an operand: a fifth digit, a
decimal point, a seventh number. So what is declined has to be read off the operands.
"""

import re
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

from transformer.tasks.phrases import (
    COMPARE,
    PATTERNS,
    SORT,
    expand,
    group,
    in_words,
    number_text,
    quote,
    say,
    signed_text,
)
from transformer.tasks.unknown import LONGEST_WORD, cased, long_word, some_word

LONGEST = 6  # numbers that are still sorted
BLANKS = (*5 * [""], "?", "?", "_", "...", "some", "what")  # in place of an operand


def number_of(rng: Random, digits: int) -> int:
    """A number of so many digits; one in seven ends in zeros or nines, as 200 and 1999 do."""
    number = rng.randint(10 ** (digits - 1) if digits > 1 else 0, 10**digits - 1)
    if rng.random() < 1 / 7:
        size = 10 ** rng.randint(1, digits)
        number += rng.choice((0, size - 1)) - number % size
        number = max(number, 10 ** (digits - 1))
    return number


def numbers_to_sort(rng: Random, count: int) -> tuple[int, ...]:
    """Numbers of one length or of several, up to four digits; some share their first digits, and
    in one list in four some are below zero.
    """
    lengths = rng.choice(
        ((1,), (2,), (2,), (2,), (3,), (3,), (4,), (1, 2), (1, 2, 3), (1, 2, 3, 4))
    )
    numbers = [number_of(rng, rng.choice(lengths)) for _ in range(count)]
    if rng.random() < 0.25:
        size = 10 ** rng.randint(1, 2)
        numbers = [numbers[0] - numbers[0] % size + rng.randrange(size) for _ in numbers]
    if max(numbers) < 1000 and rng.random() < 0.35:  # with a sign, too, of at most four characters
        often = rng.choice((0.3, 0.5, 1))
        numbers = [-number if rng.random() < often else number for number in numbers]
    return tuple(numbers)


def listed(rng: Random, items: tuple) -> str:
    """Items in a row, as people write them."""
    alike = ((x, x) for x in (", ", ", ", " ", ",", "  ", " , ", "; "))
    separator, last = rng.choice(((", ", " and "), (", ", ", and "), *alike))
    if len(items) == 2 and last == ",":
        last = ", "  # 12,345 is one number
    text = separator.join(map(str, items[:-1])) + last + str(items[-1])
    return f"[{text}]" if separator == ", " == last and rng.random() < 0.1 else text


def _long(rng: Random) -> str:
    # five digits most often: what is next to the longest numbers that are answered
    return number_text(rng, number_of(rng, rng.choice((5, 5, 5, 6, 7, 8, 9, rng.randint(10, 30)))))


def _short(rng: Random) -> str:
    return number_text(rng, number_of(rng, rng.randint(1, 4)))


def _pair(rng: Random, draw: Callable[[Random], str]) -> dict[str, str]:
    """Two operands, at least one of them drawn by `draw`, the other perhaps an ordinary number."""
    operands = [draw(rng), draw(rng) if rng.random() < 0.6 else _short(rng)]
    rng.shuffle(operands)
    return {"a": operands[0], "b": operands[1]}


def _decimal(rng: Random) -> str:
    places = rng.choice((1, 1, 1, 2, 2, 3))
    point = "," if places < 3 and rng.random() < 0.06 else "."  # 1,234 is a whole number
    return (
        f"{number_of(rng, rng.choice((1, 1, 1, 2, 3)))}{point}{rng.randrange(10**places):0{places}}"
    )


def _in_words(rng: Random) -> str:
    return in_words(rng, number_of(rng, rng.choice((1, 2, 2, 3))))


def _two_by_two(rng: Random) -> str:
    longs = [number_of(rng, rng.choice((2, 2, 2, 3, 4))) for _ in range(2)]
    if rng.random() < 0.1:
        longs[1] = longs[0]
    a, b = (number_text(rng, max(10, number)) for number in longs)
    return say(rng, PATTERNS["multiply"], a=a, b=b)


def _comparison(rng: Random, draw: Callable[[Random], str]) -> str:
    return say(rng, COMPARE[rng.choice(tuple(COMPARE))], **_pair(rng, draw))


def _sort(rng: Random, items: tuple) -> str:
    return say(rng, SORT[rng.choice(tuple(SORT))], numbers=listed(rng, items))


def _below(rng: Random) -> str:
    return signed_text(rng, -max(1, number_of(rng, rng.choice((1, 1, 2, 2, 3)))))


def _missing(rng: Random, of: tuple[str, ...]) -> str:
    """A question that lacks a list, a word, or at least one of two numbers."""
    section = rng.choice(of)
    groups = {"compare": COMPARE, "sort": SORT}.get(section, {"": PATTERNS.get(section, ())})
    patterns = rng.choice(tuple(groups.values()))
    if section in ("reverse", "letters", "count"):
        # Hardly dressed: "please" may be the word.
        text = expand(rng, rng.choice(patterns)).replace("{word}", "").strip()
        text = text.replace("{letter}", rng.choice("abcdefghijklmnopqrstuvwxyz"))
        text = rng.choice((text, text.capitalize())) + rng.choice(("", "", "?", "?", ".", ":"))
    else:
        number = number_of(rng, rng.randint(1, 4))
        words, below = in_words(rng, number), _below(rng)
        given = rng.choice((*3 * [number_text(rng, number)], words, words, below, ""))
        a, b = rng.sample((given, rng.choice(BLANKS)), 2)
        text = say(rng, patterns, a=a, b=b, numbers=a + b)
    return re.sub(" +", " ", text).strip()


def _thousands(rng: Random) -> str:
    """A number of five or six digits in words."""
    rest = rng.choice(("", "", f" {in_words(rng, rng.randint(1, 999))}"))
    count = rng.choice((10, 10, 20, 100, rng.randint(10, 999), rng.randint(10, 999)))
    return f"{in_words(rng, count)} thousand{rest}"


def _long_sort(rng: Random) -> str:
    return _sort(rng, numbers_to_sort(rng, LONGEST + rng.choice((1, 1, 2, 2, 3, 4, 6))))


def _other_sort(rng: Random) -> str:
    draw = rng.choice((some_word, some_word, _decimal, _long, _in_words))
    items = [draw(rng) for _ in range(rng.randint(2, 6))]
    others = rng.choice((0, 0, rng.randint(1, len(items) - 1)))  # one such item is enough
    items[:others] = [_short(rng) for _ in items[:others]]
    rng.shuffle(items)
    return _sort(rng, tuple(items))


def _spelling(rng: Random, word: Callable[[Random], str], letter: Callable[[Random], str]) -> str:
    """A question about the letters of something that is no word of up to twenty letters."""
    section = rng.choice(("reverse", "letters", "count"))
    operands = {"word": quote(rng, cased(rng, word(rng))), "letter": quote(rng, letter(rng))}
    return say(rng, PATTERNS[section], **operands)


def _letter(rng: Random) -> str:
    return rng.choice("abcdefghijklmnopqrstuvwxyz")


def _phrase(rng: Random) -> str:
    return " ".join(some_word(rng) for _ in range(rng.choice((2, 2, 2, 3, 4))))


def _accented(rng: Random) -> str:
    word = some_word(rng)
    i = rng.randrange(len(word))
    return word[:i] + rng.choice("äöüéèêáàâíîóôúñçßøåæőžšłı") + word[i + 1 :]


def _substring(rng: Random) -> str:
    """How often several letters are in a word."""
    word = some_word(rng)
    i, size = rng.randrange(len(word)), rng.choice((2, 2, 3))
    part = word[i : i + size] if rng.random() < 0.7 else ""
    part = part if len(part) > 1 else rng.choice(("ss", "th", "an", "ing", "er", "le", "oo"))
    return say(rng, PATTERNS["count"], word=quote(rng, word), letter=quote(rng, part))


def _filled(rng: Random, section: str) -> str:
    """A sentence of a section, each slot filled in by itself."""
    spelled = rng.random() < 0.15
    operands: dict[str, object] = {}

    def fill(slot: re.Match[str]) -> str:
        value, name = _SLOTS[slot[1]](rng), str(len(operands))
        words = spelled and isinstance(value, int) and rng.random() < 0.8
        operands[name] = in_words(rng, value) if words else value
        return f"{{{name}}}"

    pattern = expand(rng, rng.choice(BEYOND[section]))
    return say(rng, (re.sub(r"\{(\w+)\}", fill, pattern),), **operands)


_SLOTS: dict[str, Callable[[Random], Any]] = {
    "digit": lambda rng: rng.randint(2, 9),
    "small": lambda rng: number_of(rng, rng.choice((1, 2, 2, 3))),
    "large": _short,
    "long": _long,
    "word": some_word,
    "letter": _letter,
    "year": lambda rng: f"{in_words(rng, rng.randint(13, 20))} {in_words(rng, number_of(rng, 2))}",
    "group": lambda rng: f"({_short(rng)}{rng.choice('+-*')}{_short(rng)})",
}
BEYOND = group("beyond")
KINDS: dict[str, Callable[[Random], str]] = {
    "sums of five digits": lambda rng: say(rng, PATTERNS["add"], **_pair(rng, _long)),
    "differences of five digits": lambda rng: say(rng, PATTERNS["subtract"], **_pair(rng, _long)),
    "products of two digits by two": _two_by_two,
    "products of five digits": lambda rng: say(rng, PATTERNS["multiply"], **_pair(rng, _long)),
    "sums of decimals": lambda rng: say(
        rng, PATTERNS[rng.choice(("add", "subtract", "multiply"))], **_pair(rng, _decimal)
    ),
    "comparing decimals": lambda rng: _comparison(rng, _decimal),
    "comparing five digits": lambda rng: _comparison(rng, _long),
    "sorting seven or more": _long_sort,
    "sorting words or decimals": _other_sort,
    "five digits in words": lambda rng: say(
        rng, PATTERNS[rng.choice(("add", "subtract", "multiply"))], **_pair(rng, _thousands)
    ),
    "products below zero": lambda rng: say(rng, PATTERNS["multiply"], **_pair(rng, _below)),
    "comparing below zero": lambda rng: _comparison(rng, _below),
    "a missing number": partial(
        _missing, of=("add", "subtract", "distance", "multiply", "compare")
    ),
    "a missing list or word": partial(_missing, of=("sort", "reverse", "letters", "count")),
    "words of more than twenty letters": partial(
        _spelling, word=lambda rng: long_word(rng, LONGEST_WORD + 1, 45), letter=_letter
    ),
    "several words": partial(_spelling, word=_phrase, letter=_letter),
    "accents": partial(_spelling, word=_accented, letter=_letter),
    "several letters": _substring,
    **{name: partial(_filled, section=name) for name in BEYOND},
}
