"""Small changes of kernels, the way people err, and what is said of them.

A change of a learner's file after which it is right is its repair; a change of the solution after
which it gives the learner's numbers is the mistake.
"""

import ast
import difflib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from time import process_time
from typing import NamedTuple

LONGEST = 110  # characters of a piece of text that is quoted
BASE = r"exp2?|log2?|LOG2_?E|1\.44\d*|0\.69\d*"
# What is wrong, by the tokens that a repair adds (+) and takes away (-), in this order.
REASONS = {
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
    r".*[+-](//|%) .*[+-](//|%) .*": "neighbouring query heads share a key head: head // group",
}


class Edit(NamedTuple):
    """A change.

    Attributes:
        line: of the file before it; beside: the text of the line before or behind it.
        old, new: what is changed into what, of one line as much as is needed.
        text: the file that has the change.
        to: the line behind which a line has to move.
        around: the whole line.
    """

    line: int
    old: str
    new: str
    text: str
    beside: str = ""
    to: int = 0
    around: str = ""

    def said(self, explains: bool = True) -> str:
        """The change in words, with the reason."""
        old, new = short(self.old), short(self.new)
        why = reason(self.old, self.new, self.around) if explains and not self.to else ""
        if self.to:
            said = f"line {self.line}, `{old}`, belongs behind line {self.to}, `{self.beside}`"
        elif not self.old:
            said = f"behind line {self.line}, `{self.beside}`, `{new}` is missing"
        elif not self.new:
            said = f"line {self.line}, `{old}`, should not be there, before `{self.beside}`"
        else:
            said = f"line {self.line}: `{old}` should be `{new}`"
        return f"{said}: {why}" if why else said


def short(text: str) -> str:
    """A piece of a file on a line."""
    text = "; ".join(x.strip() for x in text.splitlines())
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} ..."


def reason(old: str, new: str, around: str) -> str:
    """What is wrong with a text in the place of another one, in a line of a file, or nothing."""
    if not old or not new:
        text = (old or new) if re.search(r"scale|alpha", old or new) else ""
        old, new = (text, "") if old else ("", text)
    others = [re.findall(r"other=([^,()]+(?:\([^)]*\))?)", x) for x in (old, new)]
    if others[0] != others[1]:
        return "`other` is what counts where the mask is false, so it has to be harmless"
    before, behind = (Counter(re.findall(r"\w[\w.]*|//|[<>=]=|\S", x)) for x in (old, new))
    changed = "".join(
        f"{sign}{x.rpartition('.')[2] if x[0].isalpha() else x} "
        for sign, found in (("+", behind - before), ("-", before - behind))
        for x in found
        if x not in "(),[]:"
    )
    compares = re.search("[<>]", around) is not None
    if re.fullmatch(r"([+-]([<>]=?|1|\+|-) )+", changed) and compares:
        return "it is off by one: one element too many or too few counts"
    turned = [x.replace("[:, None]", "[None, :]") for x in (old, new)]
    if re.fullmatch(r"([+-][01] )+", changed) or turned[0] == turned[1]:
        return "it goes along the wrong axis, so that rows and columns are mixed up"
    if not changed and " - " in old:
        further = ", and what was summed before is rescaled the wrong way" * ("exp" in around)
        return f"the operands of - are in the wrong order, so the sign is wrong{further}"
    if found := next((x for regex, x in REASONS.items() if re.match(regex, changed)), ""):
        return found
    return "the mask hides other elements than it should" if compares and changed else ""


def first_right(
    edits: Iterable[list[Edit]], is_right: Callable[[Path], bool], end: float
) -> list[Edit] | None:
    """The first changes after which a file is right, or None, also if there is no more time.

    Args:
        is_right: of a file.
        end: the `process_time` when the search ends.
    """
    with TemporaryDirectory() as folder:
        for number, found in enumerate(edits):
            if process_time() > end:
                return None
            file = Path(folder, f"edit_{number}.py")
            file.write_text(found[0].text)
            if is_right(file):
                return found
    return None


# --------------------------------------------------------------- the solution's lines for others
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


def edit(own: list[str], places: list[int], at: tuple[int, int], new: list[str], text: str) -> Edit:
    """The change of some lines; text is the file that has it, maybe with others."""
    i, j = at
    beside = own[max(i - 1, 0)] if i == j else own[min(j, len(own) - 1)]
    line = places[max(i - 1, 0) if i == j else i]
    around = own[i] if i < j else new[0]
    return Edit(line, *pieces(own[i:j], new), text, beside.strip(), around=around)


def from_solution(text: str, solution: str) -> Iterator[list[Edit]]:
    """A file with some of the solution's lines: where a line has moved, where they differ once, and
    if they differ in few places, all of them.
    """
    (own, places), (right, _) = plain(text), plain(solution)
    matcher = difflib.SequenceMatcher(None, own, right, autojunk=False)
    hunks = [((i, j), right[k:m]) for tag, i, j, k, m in matcher.get_opcodes() if tag != "equal"]
    parts = [
        ((i + n, i + n + 1), [line])
        for (i, j), new in hunks
        for n, line in enumerate(new if j - i == len(new) > 1 else ())
    ]

    def edits(*chosen: tuple[tuple[int, int], list[str]]) -> list[Edit]:
        lines = list(own)
        for (i, j), new in sorted(chosen, reverse=True):
            lines[i:j] = new
        return [edit(own, places, at, new, "\n".join(lines) + "\n") for at, new in chosen]

    for (i, j), new in hunks:
        for (k, m), other in hunks:
            if not new and k == m > 0 and other == own[i:j]:
                first, behind = edits(((i, j), new), ((k, m), other))
                yield [first._replace(to=behind.line, beside=behind.beside)]
    for one in (*parts, *hunks):
        yield edits(one)
    if 1 < len(hunks) <= 4:
        yield edits(*hunks)


def pieces(old: list[str], new: list[str]) -> tuple[str, str]:
    """What differs between two lines, or all of several lines and of short ones."""
    a, b = "\n".join(old), "\n".join(new)
    if len(old) != 1 or len(new) != 1 or max(len(a), len(b)) < 70:
        return a, b
    try:
        [x], [y] = (ast.parse(f"{c.strip()}{' pass' * c.endswith(':')}").body for c in (a, b))
    except SyntaxError:  # of a block's first line
        return a, b
    first, second = (ast.unparse(z).removesuffix("\n    pass") for z in narrowed(x, y))
    return first, second


def narrowed(a: ast.AST, b: ast.AST) -> tuple[ast.AST, ast.AST]:
    """The smallest parts of two statements that differ, with what is directly around."""
    leaf = ast.Name | ast.Constant | ast.Tuple | ast.Attribute | ast.Slice
    while type(a) is type(b):
        pairs = list(zip(ast.iter_child_nodes(a), ast.iter_child_nodes(b)))
        differ = [(x, y) for x, y in pairs if ast.dump(x) != ast.dump(y)]
        if len(differ) != 1 or len(pairs) != len(list(ast.iter_child_nodes(b))):
            break
        [(x, y)] = differ
        if isinstance(x, ast.keyword):
            return x, y
        if not isinstance(x, ast.expr) or isinstance(x, leaf) or isinstance(y, leaf):
            break
        a, b = x, y
    return a, b


# ------------------------------------------------------------------------- changes by themselves
def rules(kernel: str) -> Iterator[tuple[str, str]]:
    """What is changed in a line of a kernel, and into what; what is most likely comes first."""
    scales = sorted(set(re.findall(r"\b\w*scale\w*\b", kernel)))
    call = r"\((?:[^()]|\([^()]*\))*\)"  # with calls in its arguments
    yield from ((r"<=", "<"), (r"<(?!=)", "<="), (r">=", ">"), (r">(?!=)", ">="))
    yield r" [+-] 1\b", ""
    for other in ("other=0.0", "other=float('-inf')", "other=1.0"):
        yield r"other=[^,()]+(\([^)]*\))?", other
        yield rf"(load\((?:[^()=]|{call})*mask=(?:[^(),=]|{call}| )*)\)", rf"\1, {other})"
    for factor in dict.fromkeys(re.findall(r"(\w+) = \w+\.(?:math\.)?exp2?\(", kernel)):
        for by in (factor, f"{factor}[:, None]"):
            yield r"= (\w.*?) \+ (?=\w+\.(?:sum|dot)\()", rf"= (\1) * {by} + "
            yield r"(\w+) \+= ", rf"\1 = \1 * {by} + "
            yield r", (acc\w*)(?=[,)])", rf", \1 * {by}"
    for name, twin in (("exp", "exp2"), ("log", "log2")):
        yield from ((rf"\b{twin}\(", f"{name}("), (rf"\b{name}\(", f"{twin}("))
    yield from ((r" \* \(?\w*scale\w*\)?", ""), (r"\w*scale\w* \* ", ""))
    yield from ((rf" \* (alpha\w*|\w+\.exp2?{call})(\[:, None\])?", ""), (r"alpha \* ", ""))
    yield from ((r" [*/] (1\.44\d*|0\.69\d*|LOG2_?E)", ""), (r"\.T\b", ""))
    yield from ((r"\[:, None\]", "[None, :]"), (r"\[None, :\]", "[:, None]"))
    yield from ((r"dot\((\w+)\b", r"dot(\1.T"), (r"dot\(([\w.]+), (\w+)\b", r"dot(\1, \2.T"))
    yield from ((r"(sum|max)\((.*), 1\)", r"\1(\2, 0)"), (r"(sum|max)\((.*), 0\)", r"\1(\2, 1)"))
    for scale in scales:
        yield from ((rf"(dot{call})", rf"\1 * {scale}"), (rf"\b({scale})\b", r"(\1 * 1.44269504)"))
        yield rf"\b({scale})\b", r"(\1 * \1)"
    for mask in sorted(set(re.findall(r"\w+ < \w+", kernel))):
        yield rf"(\w+\.dot{call})", rf"tl.where(({mask})[None, :], \1, float('-inf'))"
    yield from ((r"(head\w*) // (\w+)", r"\1 % \2"), (r"(head\w*) % \w+", r"\1 // group"))
    yield from ((r"\w+\.where\(.*?, (\w+), .*\)", r"\1"), (r"\w+\.maximum\(\w+, (.*)\)", r"\1"))
    yield from ((r"\.max\(", ".min("), (r"\.min\(", ".max("), (r"(\w+) // (\w+) \* \2", r"\1"))
    yield r"range\((.+), (\w+), (\w+)\)", r"range(\1, \2 // \3 * \3, \3)"
    operand = rf"\w[\w.]*(?:{call})?(?:\[[^]]*\])?"
    yield rf"({operand}) - ({operand})", r"\2 - \1"
    for one, other in re.findall(r"\b([a-z]+)(?=_(row|head)\b)", kernel):
        yield from ((rf"\b{x}_{other}\b", f"{one}_{other}") for x in "qkvo" if x != one)


def by_itself(text: str) -> Iterator[list[Edit]]:
    """A file with one line of a kernel changed, the way people err or undo it."""
    own, places = plain(text)

    def changed(at: tuple[int, int], new: list[str]) -> list[Edit]:
        made = [*own[: at[0]], *new, *own[at[1] :]]
        return [edit(own, places, at, new, "\n".join(made) + "\n")]

    spans = [
        range(x.lineno, x.end_lineno or 0)
        for x in ast.parse("\n".join(own)).body
        if isinstance(x, ast.FunctionDef) and "jit" in "".join(map(ast.unparse, x.decorator_list))
    ]
    inside = [i for span in spans for i in span]
    for old, new in rules("\n".join(own[i] for i in inside)):
        for i in inside:
            for match in re.finditer(old, own[i]):
                a, b = match.span()
                yield changed((i, i + 1), [f"{own[i][:a]}{match.expand(new)}{own[i][b:]}"])
    for i in inside[:-1]:
        indents = [len(x) - len(x.lstrip()) for x in own[i : i + 2]]
        if indents[0] == indents[1] and " = " in own[i]:
            [one] = changed((i, i + 2), [own[i + 1], own[i]])
            yield [one._replace(old=own[i], to=places[i + 1], beside=own[i + 1].strip())]
        if (found := re.match(r"(\s+)new_(\w+) = ", own[i])) and f"{found[2]} = new" not in text:
            last = next(j for j in range(i, len(own)) if not own[j].startswith(found[1]))
            yield changed((last, last), [f"{found[1]}{found[2]} = new_{found[2]}"])
