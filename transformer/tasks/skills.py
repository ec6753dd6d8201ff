"""The chat tasks that a model learns here, from sums to small talk, and a list of all tasks.

Where an answer is worked out, the steps are written so that each needs only the line before it and
the question: a small model cannot do more in one step. Problems are drawn by the lengths of their
numbers: drawn by value, nine in ten of the numbers up to 9999 would have four digits.

Small talk is answered in plain sentences without tags, and right if the sentence is one of those
that fit.
"""

import re
from collections.abc import Iterable, Sequence
from itertools import permutations
from random import Random
from typing import Any

from transformer.tasks.beyond import KINDS, listed, number_of, numbers_to_sort
from transformer.tasks.countdown import Countdown
from transformer.tasks.phrases import (
    BARE,
    COMPARE,
    PATTERNS,
    REPLIES,
    SIGNED,
    SMALL_TALK,
    SORT,
    bare,
    dress,
    expand,
    in_words,
    mistype,
    number_text,
    quote,
    say,
    signed_text,
)
from transformer.tasks.task import Slip, Task
from transformer.tasks.unknown import LONGEST_WORD, anything, cased, some_word


def ask(rng: Random, name: str, numbers: Sequence[int], texts: Sequence[str]) -> str:
    """Ask for the result of an operation on two numbers, which the texts show; one time in forty in
    two ways at once. No distance is below zero, and no two numbers in words read as one.
    """
    patterns = PATTERNS[name]
    if name == "subtract" and numbers[0] >= numbers[1]:
        patterns += PATTERNS["distance"]
    if rng.random() < 0.025:
        patterns = ("".join(map(rng.choice, (patterns, PATTERNS["again"], patterns))),)
    question = say(rng, patterns, a=texts[0], b=texts[1])
    words = [pair for pair in zip(numbers, texts) if pair[1][-1].isalpha()]
    for (a, x), (b, y) in permutations(words, 2):
        link = re.search(rf"{x}((?:[\s-]|and)*){y}", question, re.IGNORECASE)
        if link and (link[1] == "-" or _continues(a, b)):
            return ask(rng, name, numbers, texts)
    return question


def _continues(a: int, b: int) -> bool:
    """Whether b may go on from a in words: `six hundred (and) five`, `twenty five hundred`."""
    zeros = len(str(a)) - len(str(a).rstrip("0"))
    sizes = ((1, 10_000), (100, 100), (1000, 1000))
    return any(a < limit and 0 < b // size < 10**zeros for size, limit in sizes)


def columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of two numbers in pairs, from the right, zeros before the shorter one."""
    width = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(width)]


def carried(slip: Slip, terms: Iterable[tuple[str, int]]) -> tuple[str, str]:
    """One line per digit, from the right: a term, plus the carry of the line before; and the number
    that the lines lead to. A slip forgets a carry.
    """
    lines, result, carry = [], "", 0
    for term, value in terms:
        total = value + carry
        lines.append(f"{term}+{carry}={total}")
        result = str(total % 10) + result
        carry = total // 10
        if carry and slip():
            carry = 0
    return "\n".join(lines), str(int(str(carry) + result))


class Operation(Task):
    """What is asked about two numbers; where it `commutes`, their order makes no other problem."""

    commutes = True

    def key(self, a: int, b: int) -> tuple:
        """Do not tell a+b from b+a."""
        return (min(a, b), max(a, b)) if self.commutes else (a, b)

    def question(self, rng: Random, a: int, b: int) -> str:
        """Ask for the result."""
        return ask(rng, self.name, (a, b), [number_text(rng, x, False) for x in (a, b)])


class Columns(Operation):
    """Written arithmetic: one line per column, from the right, with what is carried."""

    def __init__(self, digits: int | None = None):
        self.digits = digits

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers of `digits` digits; by default of 1 to 4, every second pair alike."""
        if self.digits:
            least = 10 ** (self.digits - 1) if self.digits > 1 else 0
            return rng.randint(least, 10**self.digits - 1), rng.randint(least, 10**self.digits - 1)
        if rng.random() < 0.5:
            lengths = [rng.choice((1, 2, 2, 3, 3, 3, 4, 4, 4))] * 2
        else:
            lengths = [rng.randint(1, 4), rng.randint(1, 4)]
        return tuple(number_of(rng, n) for n in lengths)

    def guess(self, rng: Random, *arguments: Any) -> str:
        """Name any number of about the right size."""
        size = 10 ** len(str(max(arguments)))
        return str(rng.randint(size // 5, 2 * size - 2))


class Add(Columns):
    """`57+86`: `7+6+0=13`, `5+8+1=14`: 143. The third number of a line is the carry."""

    name = "add"

    def answer(self, a: int, b: int) -> str:
        """Add."""
        return str(a + b)

    def work(self, slip: Slip, a: int, b: int) -> tuple[str, str]:
        """Add column by column."""
        return carried(slip, ((f"{x}+{y}", x + y) for x, y in columns(a, b)))


class Subtract(Columns):
    """`82-57`: `12-7-0=5`, `8-5-1=2`: 25. The ten of 12 is borrowed; the next line pays for it.

    If the last column has to borrow, the second number is the larger one: the line `swap` exchanges
    them, the columns are worked out again, and the answer gets a minus sign. So nothing has to be
    known before the first column.

    Args:
        digits: of both numbers; None draws the lengths.
        below: whether the answer is below zero; None draws it.
        close: whether the numbers are near each other; None draws it.
    """

    name = "subtract"
    commutes = False

    def __init__(
        self, digits: int | None = None, below: bool | None = None, close: bool | None = None
    ):
        super().__init__(digits)
        self.below, self.close = below, close

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers and their order."""
        a, b = super().arguments(rng)
        if rng.random() < 1 / 3 if self.close is None else self.close:
            b = self._near(rng, a)
        below = rng.random() < 0.5 if self.below is None else self.below
        if below and a == b:
            return self.arguments(rng)
        return (min(a, b), max(a, b)) if below else (max(a, b), min(a, b))

    def _near(self, rng: Random, number: int) -> int:
        """A number as long, with the same first digits (479, 464) or not far off (479, 509)."""
        digits = len(str(number))
        size = 10 ** rng.randint(1, max(1, digits - 1))
        if rng.random() < 0.5:
            near = number - number % size + rng.randrange(size)
        else:
            near = number - rng.randrange(size)
        return max(near, 10 ** (digits - 1) if digits > 1 else 0)

    def answer(self, a: int, b: int) -> str:
        """Subtract."""
        return str(a - b)

    def work(self, slip: Slip, a: int, b: int) -> tuple[str, str]:
        """Subtract column by column, and again with the numbers exchanged if that is below zero.

        A slip forgets what was borrowed, after the last column too.
        """
        lines, number, below = self._columns(slip, a, b)
        if not below:
            return "\n".join(lines), str(number)
        again, number, _ = self._columns(slip, b, a)
        return "\n".join([*lines, "swap", *again]), str(-number)

    def _columns(self, slip: Slip, a: int, b: int) -> tuple[list[str], int, int]:
        """The lines, the number that they lead to, and what is still borrowed at the end."""
        lines, result, borrow = [], "", 0
        for x, y in columns(a, b):
            x += 10 * (x < y + borrow)
            result = str(x - y - borrow) + result
            lines.append(f"{x}-{y}-{borrow}={x - y - borrow}")
            borrow = int(x >= 10 and not slip())
        return lines, int(result), borrow


class Restated(Task):
    """A problem that is first written as another one, which is then worked out."""

    def restated(self, *arguments: Any) -> tuple[str, Task, int, int]:
        """What is put before the answer, and the other problem."""
        raise NotImplementedError

    def held_out(self, *arguments: Any) -> bool:
        """The problem is held out if the other one is."""
        _, task, x, y = self.restated(*arguments)
        return task.held_out(x, y)

    def guess(self, rng: Random, *arguments: Any) -> str | None:
        """Guess as for the other problem."""
        _, task, x, y = self.restated(*arguments)
        return task.guess(rng, x, y)

    def work(self, slip: Slip, *arguments: Any) -> tuple[str, str]:
        """Write the other problem, and work that out."""
        minus, task, x, y = self.restated(*arguments)
        sign = {"add": "+", "subtract": "-", "multiply": "*"}[task.name]
        steps, answer = task.work(slip, x, y)
        first = f"-({x}{sign}{y})" if minus else f"{x}{sign}{y}"
        return f"{first}\n{steps}", minus + answer


class Spelled(Restated):
    """`six hundred and five plus 90`: `605+90`, and the columns of that: 695."""

    name = "spelled"

    def arguments(self, rng: Random) -> tuple:
        """Draw a sum, a difference or a product."""
        name = rng.choice(("add", "add", "subtract", "subtract", "multiply"))
        return name, *TASKS[name].arguments(rng)

    def question(self, rng: Random, name: str, a: int, b: int) -> str:
        """Ask with one number or both in words."""
        words = rng.choice(((True, True), (True, True), (True, False), (False, True)))
        texts = [in_words(rng, x) if spelled else str(x) for x, spelled in zip((a, b), words)]
        change = rng.random()
        if change < 0.2:
            texts = [text.title() if change < 0.1 else text.upper() for text in texts]
        elif change < 0.27:
            texts[0] = mistype(rng, texts[0])
        return ask(rng, name, (a, b), texts)

    def answer(self, name: str, a: int, b: int) -> str:
        """Work it out."""
        return TASKS[name].answer(a, b)

    def restated(self, name: str, a: int, b: int) -> tuple[str, Task, int, int]:
        """The same in digits."""
        return "", TASKS[name], a, b


class Signed(Restated):
    """`-5+3`: `3-5`, and the columns of that: -2. The first line has no number below zero.

    Any sum or difference of numbers, of which at least one is below zero, is one of three:
    `x+y`, `-(x+y)` or `x-y`.
    """

    name = "signed"

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers, mostly short, and whether to add or to subtract."""
        a, b = (max(1, number_of(rng, rng.choice((1, 1, 2, 2, 2, 3, 4)))) for _ in range(2))
        signs = rng.choice(((-1, 1), (-1, 1), (-1, 1), (1, -1), (-1, -1)))
        return a * signs[0], rng.choice("+-"), b * signs[1]

    def question(self, rng: Random, a: int, sign: str, b: int) -> str:
        """Ask for a sum or a difference."""
        patterns = SIGNED["add" if sign == "+" else "subtract"]
        return say(rng, patterns, a=signed_text(rng, a), b=signed_text(rng, b))

    def answer(self, a: int, sign: str, b: int) -> str:
        """Add or subtract."""
        return str(a + b if sign == "+" else a - b)

    def restated(self, a: int, sign: str, b: int) -> tuple[str, Task, int, int]:
        """The same without numbers below zero: what is put before the answer, and the problem."""
        b = b if sign == "+" else -b
        if (a < 0) == (b < 0):
            return "-" if a < 0 else "", TASKS["add"], abs(a), abs(b)
        return "", TASKS["subtract"], max(a, b), -min(a, b)


class Multiply(Operation):
    """`47*6`: `7*6+0=42`, `4*6+4=28`: 282. One factor has a single digit, the other up to four."""

    name = "multiply"

    def arguments(self, rng: Random) -> tuple:
        """Draw factors of one digit and of one to four digits, in any order."""
        factors = [rng.randint(0, 9), number_of(rng, rng.randint(1, 4))]
        rng.shuffle(factors)
        return tuple(factors)

    def answer(self, a: int, b: int) -> str:
        """Multiply."""
        return str(a * b)

    def work(self, slip: Slip, a: int, b: int) -> tuple[str, str]:
        """Multiply each digit of the longer number by the other one."""
        less, more = sorted((a, b))
        return carried(slip, ((f"{x}*{less}", int(x) * less) for x in reversed(str(more))))


class Compare(Task):
    """`45` and `54`: `2 2 same` (the lengths), `4 5 less`: 54. It ends where digits differ."""

    name = "compare"

    def arguments(self, rng: Random) -> tuple:
        """Draw two numbers of up to four digits, one time in three with the same first digits."""
        a, b = number_of(rng, rng.randint(1, 4)), number_of(rng, rng.randint(1, 4))
        kind = rng.random()
        if kind < 0.33:
            last = 10 ** rng.randint(0, len(str(a)))
            b = a - a % last + rng.randrange(last)
        elif kind < 0.6:
            b = number_of(rng, len(str(a)))
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
    """`17 3 9`: `17 | 03 09`, `03 17 | 09`, `03 09 17 |`: 3, 9, 17.

    Each line puts the number behind the bar where it belongs before the bar. All numbers get as
    many characters as the longest has, `-7 3` is `-7 03`: the first that differs then decides which
    is the smaller, and no line depends on counting digits.

    Args:
        count: how many numbers; None draws 2 to 6.
        order: "ascending" or "descending"; None draws it.
    """

    name = "sort"

    def __init__(self, count: int | None = None, order: str | None = None):
        self.count, self.order = count, order

    def arguments(self, rng: Random) -> tuple:
        """Draw an order, and numbers of up to four digits; some share their first digits."""
        order = self.order or ("descending" if rng.random() < 0.4 else "ascending")
        count = self.count or rng.choice((2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 6, 6))
        return order, numbers_to_sort(rng, count)

    def question(self, rng: Random, order: str, numbers: tuple[int, ...]) -> str:
        """Ask for an order."""
        return say(rng, SORT[order], numbers=listed(rng, numbers))

    def answer(self, order: str, numbers: tuple[int, ...]) -> str:
        """Sort."""
        return ", ".join(map(str, sorted(numbers, reverse=order == "descending")))

    def key(self, order: str, numbers: tuple[int, ...]) -> tuple:
        """The same numbers make one problem, in whatever order they are given or wanted."""
        return tuple(sorted(numbers))

    def work(self, slip: Slip, order: str, numbers: tuple[int, ...]) -> tuple[str, str]:
        """Put one number after the other where it belongs."""
        width = max(len(str(number)) for number in numbers)
        lines = []
        for i in range(1, len(numbers) + 1):
            done = sorted(numbers[:i], reverse=order == "descending")
            written = [f"{number:0{width}}" for number in (*done, *numbers[i:])]
            lines.append(" ".join((*written[:i], "|", *written[i:])))
        return "\n".join(lines), self.answer(order, numbers)


class Reverse(Task):
    """`cat`: `1:c 2:a 3:t`, `3:t 2:a 1:c`: tac. The places make each letter easy to find again."""

    name = "reverse"

    def arguments(self, rng: Random) -> tuple:
        """Draw a word, perhaps with a hyphen or digits in it, or a number."""
        kind, word = rng.random(), some_word(rng)
        if kind < 0.15:
            return (str(number_of(rng, rng.choice((*range(2, 9), rng.randint(9, LONGEST_WORD))))),)
        if kind < 0.25:
            i = rng.randint(1, len(word))
            sign = rng.choice(
                ("-", "-", "'", "_", str(rng.randrange(10)), str(rng.randrange(1000)))
            )
            word = (word[:i] + sign + word[i:])[:LONGEST_WORD]
        return (cased(rng, word),)

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
    """How many r in `Error`: `e0 r1 r2 o2 r3`: 3. Each letter is followed by the count so far.

    Without a letter, all of them count: `c1 a2 t3`: 3. Capitals count as small letters.
    """

    name = "count"

    def arguments(self, rng: Random) -> tuple:
        """Draw a word and a letter, mostly one of the word, or none."""
        word = some_word(rng)
        if rng.random() < 0.2:
            return word, ""
        return word, rng.choice(word if rng.random() < 0.8 else "abcdefghijklmnopqrstuvwxyz")

    def question(self, rng: Random, word: str, letter: str) -> str:
        """Ask how often the letter occurs in the word, or how many letters it has."""
        if not letter:
            return say(rng, PATTERNS["letters"], word=quote(rng, cased(rng, word)))
        word, letter = quote(rng, cased(rng, word)), quote(rng, cased(rng, letter))
        return say(rng, PATTERNS["count"], word=word, letter=letter)

    def answer(self, word: str, letter: str) -> str:
        """Count."""
        return str(word.count(letter) if letter else len(word))

    def work(self, slip: Slip, word: str, letter: str) -> tuple[str, str]:
        """Spell the word and keep count."""
        counts = [word[: i + 1].count(letter) if letter else i + 1 for i in range(len(word))]
        return " ".join(f"{x}{n}" for x, n in zip(word, counts)), self.answer(word, letter)


class SmallTalk(Task):
    """Greetings, thanks, "who are you?": any of the replies to the intent is right."""

    name = "small talk"
    form = re.compile(r"(?P<answer>[^<]+)")
    openers = 0.3  # share of bare openers, with which most conversations begin

    def arguments(self, rng: Random) -> tuple:
        """Draw an intent and a sentence, and whether `dress` may change it."""
        if rng.random() < self.openers:
            return "greeting", bare(rng, PATTERNS["openers"]), False
        if rng.random() < 0.2:
            intent = rng.choice(tuple(BARE))
            return intent, bare(rng, BARE[intent]), False
        intent = rng.choice(tuple(SMALL_TALK))
        return intent, expand(rng, rng.choice(SMALL_TALK[intent])), True

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
        """Draw a question about the world, code or gibberish."""
        return "unknown", *anything(rng)

    def right(self, answer: str, intent: str, *rest: Any) -> bool:
        """Accept any sentence that declines."""
        return answer in REPLIES["unknown"] or answer in REPLIES["beyond"]


class Beyond(Unknown):
    """What lies just beyond the skills, such as sums of five digits: it is declined, too.

    Args:
        kind: a name in `beyond.KINDS`; None draws it.
    """

    name = "beyond"

    def __init__(self, kind: str | None = None):
        self.kind = kind

    def arguments(self, rng: Random) -> tuple:
        """Draw a request."""
        return "beyond", KINDS[self.kind or rng.choice(tuple(KINDS))](rng), False


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *(Add(), Subtract(), Signed(), Spelled(), Multiply(), Compare(), Sort(), Reverse()),
        *(Count(), SmallTalk(), Unknown(), Beyond(), Countdown()),
    )
}
