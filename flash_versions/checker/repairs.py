"""Changes of a learner's file into a right one, line by line, and what is said of them."""

import ast
import difflib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

MOST = 4  # places in which files may differ to be tried together
LONGEST = 200  # characters of a piece of text that is quoted
TOKEN = r"other=[^,()]+(?:\([^)]*\))?|\[:, None\]|\[None, :\]|\w[\w.]*|//|[<>=]=|\S"
BASE = r"exp2?|log2?|LOG2_?E|1\.44\d*|0\.69\d*"
# What is wrong, by the tokens that a repair adds (+) and takes away (-), in this order.
REASONS = {
    r".*other=.*": "`other` is what counts where the mask is false, so it has to be harmless",
    r"([+-]([<>]=?|1|\+|-) )+$": "it is off by one: one element too many or too few counts",
    r"([+-]([01]|\[.*?\]) )+$": (
        "it goes along the wrong axis, so that rows and columns are mixed up"
    ),
    r".*[+-](T|trans|permute) .*": "the tile has to be transposed there",
    rf".*[+-]({BASE}) .*[+-]({BASE}) .*": (
        "powers of 2 and of e are mixed: 2^x is e^(x ln 2), so one of them needs the factor log2(e)"
    ),
    r".*[+-](LOG2_?E|1\.44\d*|0\.69\d*) .*": (
        "the base is wrong: in base 2 numbers are log2(e) times those in base e"
    ),
    r".*\+\w*scale\w* .*": "the scale is forgotten",
    r".*-\w*scale\w* .*": "the scale is applied twice, or where it does not belong",
    r".*\+where .*\+== .*": "a row may have seen nothing yet, or its sum may be 0",
    r".*[+-](where|inf) .*": (
        "keys that do not exist or that a query does not see must not count: not a score of 0 but "
        "-inf, or p of 0, hides them"
    ),
    r".*[+-](alpha|exp2?) .*": "what was summed before has to be rescaled to the new maximum",
    r".*-float16 .*": "it is rounded or summed in fp16, and has to be computed in fp32",
    r".*[+-]% .*": "neighbouring query heads share a key head: head // group",
    r".*[+-]BLOCK .*": "the last block may not be full: its elements are left out, or too many are",
    r".*[+-][<>]=? .*": "the mask hides other elements than it should",
}
Change = tuple[int, int, list[str]]  # lines from one to before another one, and what they become


def repairs(text: str, solution: str, explains: bool) -> Iterator[tuple[str, str]]:
    """A file with some of a right file's lines, and how it differs, in words; the smallest changes
    come first. The texts are without comments.

    Args:
        explains: whether the words tell the reason, too.
    """
    (own, places), (right, _) = plain(text), plain(solution)
    matcher = difflib.SequenceMatcher(None, own, right, autojunk=False)
    hunks = [(i, j, right[k:m]) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]
    lines = [
        (i + n, i + n + 1, [line])
        for i, j, new in hunks
        for n, line in enumerate(new if j - i == len(new) > 1 else ())
    ]
    most = len(hunks) if len(hunks) <= MOST else 1
    several = [x for n in range(most) for x in combinations(hunks, n + 1)]
    for chosen in sorted([*((x,) for x in lines), *several], key=size):
        changed = list(own)
        for i, j, new in reversed(chosen):
            changed[i:j] = new
        words = [said_of(x, own, places, explains) for x in chosen]
        yield "\n".join(changed) + "\n", "; ".join(words)


def size(changes: tuple[Change, ...]) -> int:
    """How many lines are changed."""
    return sum(max(j - i, len(new)) for i, j, new in changes)


def plain(text: str) -> tuple[list[str], list[int]]:
    """A file's lines without comments and docstrings, and of each its line in the file."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    made = ast.unparse(ast.fix_missing_locations(tree))
    pairs = zip(ast.walk(tree), ast.walk(ast.parse(made)))
    places = {y.lineno: x.lineno for x, y in pairs if isinstance(x, ast.stmt)}  # type: ignore[attr-defined]
    lines, known = made.splitlines(), 1
    return lines, [known := places.get(i, known) for i in range(1, len(lines) + 1)]


def said_of(change: Change, own: list[str], places: list[int], explains: bool) -> str:
    """A change in words."""
    i, j, lines = change
    old, new = short(own[i:j]), short(lines)
    if not old:
        i = max(i - 1, 0)
        said = f"behind line {places[i]}, `{own[i].strip()}`, `{new}` is missing"
    elif not new:
        said = f"line {places[i]}, `{old}`, should not be there, before `{short(own[j : j + 1])}`"
    else:
        said = f"line {places[i]}: `{old}` should be `{new}`"
    why = reason(old, new) if explains else ""
    return f"{said}: {why}" if why else said


def short(lines: list[str]) -> str:
    """Lines of a file as one."""
    text = "; ".join(x.strip() for x in lines)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def reason(old: str, new: str) -> str:
    """What is wrong with a text in the place of another one, or nothing."""
    if not (old and new) and not re.search("scale|alpha", old + new):
        return ""
    before, behind = (Counter(re.findall(TOKEN, x)) for x in (old, new))
    changed = "".join(
        f"{sign}{re.sub(r'^([a-zA-Z_]+[.])+', '', x)} "
        for sign, found in (("+", behind - before), ("-", before - behind))
        for x in found
        if x not in "(),[]:"
    )
    if not changed:
        rescaled = ", and what was summed before is rescaled the wrong way" * ("exp" in old)
        said = f"the operands of - are in the wrong order, so the sign is wrong{rescaled}"
        return said * (" - " in old)
    return next((x for regex, x in REASONS.items() if re.match(regex, changed)), "")
