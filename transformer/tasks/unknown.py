"""Questions of all kinds that a model of this size cannot answer, made from word lists.

A model is taught to reply that it is a small demo, and to say what it can do. Patterns are those of
`phrases`; a name in square brackets is replaced by a word from its `WORDS`.
"""

import re
from random import Random

from transformer.tasks.phrases import PATTERNS, WORDS, expand

# First and last character of the scripts that gibberish is written in.
SCRIPTS = (
    *((0xA1, 0x17F), (0x391, 0x3C9), (0x410, 0x44F), (0x5D0, 0x5EA), (0x620, 0x64A)),
    *((0x905, 0x939), (0xE01, 0xE30), (0x3041, 0x3096), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3)),
    *((0x2190, 0x22FF), (0x1F300, 0x1F64F)),
)

LONGEST_WORD = 20  # letters of a word that is still reversed or counted

_slot = re.compile(r"\[(\w+)\]")


def anything(rng: Random) -> tuple[str, bool]:
    """Something that the model cannot answer, and whether it is a sentence for `dress`."""
    kind = rng.random()
    if kind < 0.68:
        question = expand(rng, rng.choice(PATTERNS["questions"]))
        return _slot.sub(lambda slot: _word(rng, slot[1]), question), True
    if kind < 0.75:
        return rng.choice(PATTERNS["foreign"]), True
    if kind < 0.80:
        return rng.choice(PATTERNS["code"]), False
    if kind < 0.82:
        return _run(rng), False
    if kind < 0.86:
        return _gibberish(rng, [chr(c) for c in range(0x20, 0x7F)]), False
    if kind < 0.90:
        first, last = rng.choice(SCRIPTS)
        return _gibberish(rng, [chr(rng.randint(first, last)) for _ in range(30)] + [" "]), False
    return " ".join(_any_word(rng) for _ in range(rng.randint(1, 12))), True


def pseudo_word(rng: Random) -> str:
    """A word in no language: syllables of one or two consonants and a vowel."""
    syllables = (
        rng.choice("bcdfghjklmnprstvwz") + rng.choice("aeiou") for _ in range(rng.randint(1, 4))
    )
    return "".join(syllables) + rng.choice(["", "", "n", "r", "s", "t", "ng", "l"])


def some_word(rng: Random) -> str:
    """A lower-case word of 2 to 12 letters, one time in six of 13 to `LONGEST_WORD`."""
    if rng.random() < 1 / 6:
        return long_word(rng, 13, LONGEST_WORD)
    kind = rng.random()
    if kind < 0.4:
        word = rng.choice(WORDS[rng.choice(("thing", "topic", "person", "adjective", "verb"))])
        return word if rng.random() < 0.7 else word + rng.choice(("s", "ing", "er", "ly", "less"))
    if kind < 0.7:
        return pseudo_word(rng)[:12]
    return _letters(rng, rng.randint(2, 12))


def long_word(rng: Random, least: int, most: int) -> str:
    """A word of so many letters: real, put together, pronounceable, or from a small alphabet."""
    length, kind = rng.randint(least, most), rng.random()
    if kind < 0.35:
        return rng.choice([word for word in WORDS["long"] if least <= len(word) <= most])
    if kind < 0.65:
        parts = (
            rng.choice(WORDS[rng.choice(("thing", "adjective", "common"))])
            if kind < 0.5
            else pseudo_word(rng)
            for _ in range(length)
        )
        return "".join(parts)[:length]
    return _letters(rng, length)


def _letters(rng: Random, count: int) -> str:
    alphabet = rng.sample("abcdefghijklmnopqrstuvwxyz", rng.choice((1, 2, 4, 8, 26)))
    return "".join(rng.choices(alphabet, k=count))


def cased(rng: Random, word: str) -> str:
    """A word in lower case, mostly, or capitalized, or in capitals."""
    return rng.choice((*8 * [word], word.capitalize(), word.upper()))


def _word(rng: Random, slot: str) -> str:
    # a word in no list, one time in ten: what the model does not know must lead to the same reply
    return pseudo_word(rng) if rng.random() < 0.1 else rng.choice(WORDS[slot])


def _any_word(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.1:
        return str(rng.randrange(1000))
    if kind < 0.2:  # keys struck at random
        return "".join(rng.choices("asdfghjklqwertyuiop;", k=rng.randint(2, 9)))
    if kind < 0.6:
        return rng.choice(WORDS["common"])
    return _word(rng, rng.choice(("thing", "topic", "adjective", "verb", "person", "place")))


def _run(rng: Random) -> str:
    """A key held down, a few in turn, or a word whose last letter is: `aaaa`, `asdasd`, `hmmm`."""
    keys = rng.choice(("abcdefghijklmnopqrstuvwxyz", "0123456789", "?!.,-+*=#"))
    unit = "".join(rng.choices(keys, k=rng.choice((1, 1, 1, 2, 3, 4))))
    times = int(2 ** rng.uniform(2, 6.5)) // len(unit) + 3
    word = rng.choice(("hm", "um", "uh", "no", "ya", "argh", "wow", "oh", "what", "lol"))
    return word + word[-1] * times if rng.random() < 0.25 else unit * times


def _gibberish(rng: Random, alphabet: list[str]) -> str:
    return "".join(rng.choices(alphabet, k=int(2 ** rng.uniform(0, 6.5)) - 1))
