"""Countdown: `Use 3, 8, 4 to make 96.` The answer is any expression that does, `(8*4)*3`.

The way has to be found, by trying. The teacher tries at random, a line for each try, and gives up
early on most problems. A student who imitates it gives up as often; one who is rewarded for right
answers may find out that patience pays.
"""

import ast
import operator
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random
from typing import Any, NamedTuple

from transformer.tasks.phrases import PATTERNS, say
from transformer.tasks.task import Task, worked

OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
LARGEST = 999  # what a line may come to

# A plain expression has no names, no dots, no other script's digits, and an end.
_plain = re.compile(r"[0-9(][0-9+*() -]{0,98}[0-9)]")
_of_node = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


class Way(NamedTuple):
    """A way to combine numbers: `8*4=32 32*3=96`, `(8*4)*3`, 96."""

    steps: str
    expression: str
    value: int


def ways(numbers: Sequence[int]) -> Iterator[Way]:
    """All ways to combine all numbers, two at a time, by + - and *.

    The smaller number is taken from the larger one, and every step comes to 1..999. What a step
    gave stands first in the next one where the order does not matter.
    """
    return _combine([(number, str(number)) for number in numbers], "")


def _combine(terms: list[tuple[int, str]], steps: str) -> Iterator[Way]:
    if len(terms) == 1:
        yield Way(steps.strip(), terms[0][1], terms[0][0])
        return
    for pair in combinations(range(len(terms)), 2):
        rest = [term for place, term in enumerate(terms) if place not in pair]
        for sign, operation in OPERATIONS.items():
            (x, left), (y, right) = (terms[place] for place in pair)
            if sign == "-" and x < y:
                (x, left), (y, right) = (y, right), (x, left)
            value = operation(x, y)
            if 0 < value <= LARGEST:
                term = value, f"{_operand(left)}{sign}{_operand(right)}"
                yield from _combine([term, *rest], f"{steps} {x}{sign}{y}={value}")


def _operand(expression: str) -> str:
    return expression if expression.isdecimal() else f"({expression})"


def evaluate(expression: str) -> tuple[int, list[int]]:
    """Value of a plain expression, and the numbers in it.

    The text is parsed, never run: at most 100 characters, of which only + - * between whole numbers
    and parentheses pass. A power such as `9**9**9**9` is refused, not worked out.

    Raises:
        ValueError: it is anything else.
    """
    if not _plain.fullmatch(expression):
        raise ValueError("not an expression of whole numbers, + - * and parentheses")
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError("not a complete expression") from error
    numbers: list[int] = []
    return _value(tree.body, numbers), numbers


def _value(node: ast.expr, numbers: list[int]) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _of_node:
        return _of_node[type(node.op)](_value(node.left, numbers), _value(node.right, numbers))
    raise ValueError(f"only + - * and whole numbers are allowed, not {type(node).__name__}")


class Countdown(Task):
    """Make a target out of three numbers of 1..50, each used exactly once, with + - and *.

    259,979 problems are different, and three numbers come to 12 different targets on average, 17 at
    most. Four numbers (`count`) come to 71 on average: too many to try in one reply.

    Args:
        count: how many numbers.
        top: the largest number.
    """

    name = "countdown"

    def __init__(self, count: int = 3, top: int = 50):
        if not (2 <= count <= 4 and top >= 1 and count * top <= LARGEST):
            raise ValueError(
                f"countdown takes 2 to 4 numbers whose sum is at most {LARGEST},"
                f" not {count} of up to {top}"
            )
        self.count, self.top = count, top

    def arguments(self, rng: Random) -> tuple:
        """Draw numbers, and one of the targets within their reach, each as likely as another."""
        numbers = tuple(rng.randint(1, self.top) for _ in range(self.count))
        return numbers, rng.choice(sorted({way.value for way in ways(numbers)}))

    def question(self, rng: Random, numbers: tuple[int, ...], target: int) -> str:
        """Ask for a way."""
        separator, last = rng.choice(((", ", ", "), (", ", " and "), (" ", " ")))
        text = separator.join(map(str, numbers[:-1])) + last + str(numbers[-1])
        return say(rng, PATTERNS["countdown"], numbers=text, target=target)

    def answer(self, numbers: tuple[int, ...], target: int) -> str:
        """Give one way of several; ValueError if there is none."""
        for way in ways(numbers):
            if way.value == target:
                return way.expression
        raise ValueError(f"{numbers} cannot make {target}")

    def right(self, answer: str, numbers: tuple[int, ...], target: int) -> bool:
        """Accept every expression of the right value that uses each number exactly once."""
        try:
            value, used = evaluate(answer)
        except ValueError:
            return False
        return value == target and Counter(used) == Counter(numbers)

    def key(self, numbers: tuple[int, ...], target: int) -> tuple:
        """The same numbers make one problem, in whatever order they are given."""
        return tuple(sorted(numbers)), target

    def demonstrate(
        self, rng: Random, *arguments: Any, patience: float = 1.0, **dials: float
    ) -> str:
        """Try one way after another in random order, `8-4=4 4*3=12 no`, until one is right.

        No try comes to the same as one before it. After each that fails the teacher goes on with
        the probability `patience`; who gives up answers with the last try, which is wrong.
        """
        numbers, target = arguments
        tries = list(ways(numbers))
        rng.shuffle(tries)
        lines, expression = [], ""
        for way in {way.value: way for way in tries}.values():
            lines.append(f"{way.steps} {'yes' if way.value == target else 'no'}")
            expression = way.expression
            if way.value == target or rng.random() >= patience:
                break
        return worked("\n".join(lines), expression)
