"""The chat tasks that the shipped model learns, from sums to small talk, and a list of all tasks.

Where an answer is worked out, the steps are written so that each needs only what stands on the line
before it and in the question: a small model cannot do more in one step. Small talk is answered in
plain sentences without tags, and right if the sentence is one of those that fit.
"""

import re
from random import Random
from typing import Any

from transformer.tasks.countdown import Countdown
from transformer.tasks.phrases import (
    COMPARE,
    PATTERNS,
    REPLIES,
    SMALL_TALK,
    SORT,
    dress,
    expand,
    number_text,
    quote,
    say,
)
from transformer.tasks.task import Slip, Task
from transformer.tasks.unknown import anything, beyond, some_word


def columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of two numbers in pairs, from the right, zeros before the shorter one."""
    width = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(width)]


class Columns(Task):
    """Written arithmetic: one line per column, from the right, with what is carried."""

    def __init__(self, digits: int | None = None):
        self.digits = digits

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers of `digits` digits; by default of 1 to 4, every second pair of 3."""
        if self.digits or rng.random() < 0.5:
            lengths = [self.digits or 3] * 2
        else:
            lengths = [rng.randint(1, 4), rng.randint(1, 4)]
        return tuple(rng.randint(10 ** (n - 1) if n > 1 else 0, 10**n - 1) for n in lengths)

    def guess(self, rng: Random, *arguments: Any) -> str:
        """Name any number of about the right size."""
        size = 10 ** len(str(max(arguments)))
        return str(rng.randint(size // 5, 2 * size - 2))


class Add(Columns):
    """`57+86`: `7+6+0=13`, `5+8+1=14`: 143. The third number of a line is the carry."""

    name = "add"

    def question(self, rng: Random, a: int, b: int) -> str:
        """Ask for a sum."""
        return say(rng, PATTERNS["add"], a=number_text(rng, a), b=number_text(rng, b))

    def answer(self, a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    def key(self, a: int, b: int) -> tuple:
        """Do not tell a+b from b+a."""
        return min(a, b), max(a, b)

    def work(self, slip: Slip, a: int, b: int) -> tuple[str, str]:
        """Add column by column; a slip forgets a carry."""
        lines, result, carry = [], "", 0
        for x, y in columns(a, b):
            total = x + y + carry
            lines.append(f"{x}+{y}+{carry}={total}")
            result = str(total % 10) + result
            carry = total // 10
            if carry and slip():
                carry = 0
        return "\n".join(lines), str(int(str(carry) + result))


class Subtract(Columns):
    """`82-57`: `12-7-0=5`, `8-5-1=2`: 25. The ten of 12 is borrowed; the next line pays for it.

    When the second number is the larger one, the line `swap` exchanges them and the answer gets a
    minus sign.
    """

    name = "subtract"

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers, the larger one mostly first."""
        a, b = super().arguments(rng)
        return (a, b) if a >= b or rng.random() < 0.25 else (b, a)

    def question(self, rng: Random, a: int, b: int) -> str:
        """Ask for a difference."""
        return say(rng, PATTERNS["subtract"], a=number_text(rng, a), b=number_text(rng, b))

    def answer(self, a: int, b: int) -> str:
        """Subtract."""
        return str(a - b)

    def work(self, slip: Slip, a: int, b: int) -> tuple[str, str]:
        """Subtract column by column; a slip forgets what was borrowed."""
        lines, result, borrow = [], "", 0
        if a < b:
            lines.append("swap")
        for x, y in columns(max(a, b), min(a, b)):
            x += 10 * (x < y + borrow)
            result = str(x - y - borrow) + result
            lines.append(f"{x}-{y}-{borrow}={x - y - borrow}")
            borrow = int(x >= 10 and not slip())
        number = int(result)
        return "\n".join(lines), str(-number if a < b else number)


class Multiply(Task):
    """`47*6`: `7*6+0=42`, `4*6+4=28`: 282. One factor has a single digit, the other up to four."""

    name = "multiply"

    def arguments(self, rng: Random) -> tuple:
        """Draw factors of one digit and of one to four digits, in any order."""
        factors = [rng.randint(0, 9), rng.randrange(10 ** rng.randint(1, 4))]
        rng.shuffle(factors)
        return tuple(factors)

    def question(self, rng: Random, a: int, b: int) -> str:
        """Ask for a product."""
        return say(rng, PATTERNS["multiply"], a=number_text(rng, a), b=number_text(rng, b))

    def answer(self, a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    def key(self, a: int, b: int) -> tuple:
        """Do not tell a*b from b*a."""
        return min(a, b), max(a, b)

    def work(self, slip: Slip, a: int, b: int) -> tuple[str, str]:
        """Multiply each digit of the longer number by the other one; a slip forgets a carry."""
        lines, result, carry = [], "", 0
        for x in reversed(str(max(a, b))):
            total = int(x) * min(a, b) + carry
            lines.append(f"{x}*{min(a, b)}+{carry}={total}")
            result = str(total % 10) + result
            carry = total // 10
            if carry and slip():
                carry = 0
        return "\n".join(lines), str(int(str(carry) + result))


class Compare(Task):
    """`45` and `54`: `2 2 same` (the lengths), `4 5 less`: 54. It ends where digits differ."""

    name = "compare"

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers of up to four digits, one time in three with the same first digits."""
        a = rng.randint(0, 10 ** rng.randint(1, 4) - 1)
        b = rng.randint(0, 10 ** rng.randint(1, 4) - 1)
        if rng.random() < 0.33:
            last = 10 ** rng.randint(0, 3)
            b = a - a % last + rng.randrange(last)
        return rng.choice(tuple(COMPARE)), a, b

    def question(self, rng: Random, kind: str, a: int, b: int) -> str:
        """Ask which is larger, or whether one is."""
        return say(rng, COMPARE[kind], a=number_text(rng, a), b=number_text(rng, b))

    def answer(self, kind: str, a: int, b: int) -> str:
        """Name a number, or say yes or no."""
        if kind == "greater?":
            return "yes" if a > b else "no"
        if kind == "less?":
            return "yes" if a < b else "no"
        if a == b:
            return "they are equal"
        return {"larger": "{1}", "smaller": "{0}", "compare": "{1} is larger"}[kind].format(
            *sorted((a, b))
        )

    def key(self, kind: str, a: int, b: int) -> tuple:
        """Two numbers make one problem, whatever is asked about them."""
        return min(a, b), max(a, b)

    def work(self, slip: Slip, kind: str, a: int, b: int) -> tuple[str, str]:
        """Compare the lengths, then the digits from the left."""
        pairs = [(len(str(a)), len(str(b)))]
        if len(str(a)) == len(str(b)):
            pairs += reversed(columns(a, b))
        lines = []
        for x, y in pairs:
            lines.append(f"{x} {y} {'same' if x == y else 'more' if x > y else 'less'}")
            if x != y:
                break
        return "\n".join(lines), self.answer(kind, a, b)


class Sort(Task):
    """`3 17 9`: `3 | 17 9`, `9 | 17`, `17 |`: 3, 9, 17. Each line takes one out of the rest."""

    name = "sort"

    def arguments(self, rng: Random) -> tuple:
        """Draw 2 to 5 numbers of up to three digits and an order."""
        top = rng.choice((9, 99, 99, 99, 999))
        numbers = tuple(rng.randint(0, top) for _ in range(rng.choice((2, 3, 3, 4, 4, 5, 5))))
        return ("descending" if rng.random() < 0.3 else "ascending"), numbers

    def question(self, rng: Random, order: str, numbers: tuple[int, ...]) -> str:
        """Ask for an order."""
        separator, last = rng.choice(
            ((", ", " and "), (", ", ", "), (", ", ", "), (" ", " "), (",", ","))
        )
        text = separator.join(map(str, numbers[:-1])) + last + str(numbers[-1])
        return say(rng, SORT[order], numbers=text)

    def answer(self, order: str, numbers: tuple[int, ...]) -> str:
        """Sort."""
        return ", ".join(map(str, sorted(numbers, reverse=order == "descending")))

    def key(self, order: str, numbers: tuple[int, ...]) -> tuple:
        """The same numbers make one problem, in whatever order they are given or wanted."""
        return tuple(sorted(numbers))

    def work(self, slip: Slip, order: str, numbers: tuple[int, ...]) -> tuple[str, str]:
        """Take out the smallest, or the largest, until none is left."""
        rest, lines = list(numbers), []
        while rest:
            number = max(rest) if order == "descending" else min(rest)
            rest.remove(number)
            lines.append(" ".join(map(str, (number, "|", *rest))))
        return "\n".join(lines), self.answer(order, numbers)


class Reverse(Task):
    """`cat`: `1:c 2:a 3:t`, `3:t 2:a 1:c`: tac. The places make each letter easy to find again."""

    name = "reverse"

    def arguments(self, rng: Random) -> tuple:
        """Draw a word, or a number."""
        if rng.random() < 0.2:
            return (str(rng.randint(10, 10 ** rng.randint(2, 8) - 1)),)
        word = some_word(rng)
        return (word.capitalize() if rng.random() < 0.08 else word,)

    def question(self, rng: Random, word: str) -> str:
        """Ask for it backwards."""
        return say(rng, PATTERNS["reverse"], word=quote(rng, word))

    def answer(self, word: str) -> str:
        """Reverse."""
        return word[::-1]

    def work(self, slip: Slip, word: str) -> tuple[str, str]:
        """Number the letters and read them from the last."""
        places = [f"{i}:{letter}" for i, letter in enumerate(word, 1)]
        return " ".join(places) + "\n" + " ".join(reversed(places)), word[::-1]


class Count(Task):
    """How many r in `error`: `e0 r1 r2 o2 r3`: 3. Each letter is followed by the count so far."""

    name = "count"

    def arguments(self, rng: Random) -> tuple:
        """Draw a word and a letter, mostly one of the word."""
        word = some_word(rng)
        return word, rng.choice(word if rng.random() < 0.8 else "abcdefghijklmnopqrstuvwxyz")

    def question(self, rng: Random, word: str, letter: str) -> str:
        """Ask how often the letter stands in the word."""
        shown = letter.upper() if rng.random() < 0.1 else letter
        return say(rng, PATTERNS["count"], word=quote(rng, word), letter=quote(rng, shown))

    def answer(self, word: str, letter: str) -> str:
        """Count."""
        return str(word.count(letter))

    def work(self, slip: Slip, word: str, letter: str) -> tuple[str, str]:
        """Spell the word and keep count."""
        steps = [f"{x}{word[: i + 1].count(letter)}" for i, x in enumerate(word)]
        return " ".join(steps), str(word.count(letter))


class SmallTalk(Task):
    """Greetings, thanks, "who are you?": any of the replies to the intent is right."""

    name = "small talk"
    form = re.compile(r"(?P<answer>[^<]+)")

    def arguments(self, rng: Random) -> tuple:
        """Draw an intent and a sentence."""
        intent = rng.choice(tuple(SMALL_TALK))
        return intent, expand(rng, rng.choice(SMALL_TALK[intent]))

    def question(self, rng: Random, intent: str, text: str, sentence: bool = True) -> str:
        """Type it; what is no sentence stays as it is."""
        return dress(rng, text) if sentence else text

    def answer(self, intent: str, *rest: Any) -> str:
        """Give the first of the replies that fit."""
        return REPLIES[intent][0]

    def right(self, answer: str, intent: str, *rest: Any) -> bool:
        """Accept any of the replies that fit."""
        return answer in REPLIES[intent]

    def demonstrate(self, rng: Random, *arguments: Any, **dials: float) -> str:
        """Say any of the replies that fit; there is nothing to be hasty about."""
        return rng.choice(REPLIES[arguments[0]])


class Unknown(SmallTalk):
    """Everything else that people type. The honest reply says what the model is and can do."""

    name = "unknown"

    def arguments(self, rng: Random) -> tuple:
        """Draw a question about the world, code, gibberish, or arithmetic out of reach."""
        if rng.random() < 0.2:
            return "beyond", beyond(rng), True
        return "unknown", *anything(rng)


_tasks: tuple[Task, ...] = (
    *(Add(), Subtract(), Multiply(), Compare(), Sort(), Reverse(), Count(), SmallTalk(), Unknown()),
    Countdown(),
)
TASKS = {task.name: task for task in _tasks}
