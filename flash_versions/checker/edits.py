"""Small changes of kernels, the way people err, and what is said of them.

A change of a learner's kernel after which it is right is its repair; a change of the solution after
which it gives the learner's numbers is the mistake.
"""

import ast
import difflib
import itertools
import re
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

LONGEST = 110  # characters of a piece of text that is quoted
SWAPPED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
TWINS = {"exp": "exp2", "exp2": "exp", "log": "log2", "log2": "log"}
OTHERS = ("other=0.0", "other=float('-inf')", "other=1.0")
BASE = r"exp2?|log2?|LOG2_?E|1\.44\d*|0\.69\d*"
# What is wrong, by the tokens that a repair adds (+) and takes away (-), in this order.
REASONS = {
    r".*[+-]T|.*[+-](trans|permute)": "the tile has to be transposed there",
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
        old, new, why = short(self.old), short(self.new), ""
        if explains and not self.to:
            why = reason(self.old, self.new, self.around or self.old)
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


def reason(old: str, new: str, around: str = "") -> str:
    """What is wrong with a text in the place of another one, in a line of a file, or nothing."""
    if not old or not new:
        text = (old or new) if re.search(r"scale|alpha", old or new) else ""
        old, new = (text, "") if old else ("", text)
    others = [re.findall(r"other=([^,()]+(?:\([^)]*\))?)", x) for x in (old, new)]
    if others[0] != others[1]:
        return "`other` is what counts where the mask is false, so it has to be harmless"
    before, behind = (Counter(re.findall(r"\w[\w.]*|//|[<>=]=|\S", x)) for x in (old, new))
    added, gone = (behind - before), (before - behind)
    changed = "".join(
        f"{sign}{x.rpartition('.')[2] if x[0].isalpha() else x} "
        for sign, found in (("+", added), ("-", gone))
        for x in found
        if x not in "(),[]:"
    )
    compares = re.search("[<>]", around) is not None
    if re.fullmatch(r"([+-]([<>]=?|1|\+|-) )+", changed) and compares:
        return "it is off by one: one element too many or too few counts"
    if re.fullmatch(r"([+-][01] )+", changed) or old.replace(
        "[:, None]", "[None, :]"
    ) == new.replace("[:, None]", "[None, :]"):
        return "it goes along the wrong axis, so that rows and columns are mixed up"
    if not changed and " - " in old:
        exponent = (
            ", which rescales what was summed before the wrong way" if "exp" in around else ""
        )
        return f"the operands of - are in the wrong order, so the sign is wrong{exponent}"
    if found := next((x for regex, x in REASONS.items() if re.match(regex, changed)), ""):
        return found
    return "the mask hides other elements than it should" if compares and changed else ""


# --------------------------------------------------------------- the solution's lines for others
def plain(text: str) -> tuple[list[str], dict[int, int]]:
    """A file's lines without comments and docstrings, and of each its line in the file."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.Module) and ast.get_docstring(node):
            node.body = node.body[1:] or [ast.Pass()]
    made = ast.unparse(ast.fix_missing_locations(tree))
    places = {}
    for old, new in zip(ast.walk(tree), ast.walk(ast.parse(made))):
        if isinstance(old, ast.stmt) and isinstance(new, ast.stmt):
            places[new.lineno] = old.lineno
    lines, known = made.splitlines(), 1
    return lines, {i: (known := places.get(i, known)) for i in range(1, len(lines) + 1)}


def from_solution(text: str, solution: str) -> Iterator[list[Edit]]:
    """A file with some of the solution's lines: where a line has moved, where they differ once, and
    if they differ in few places, all of them.
    """
    (own, places), (right, _) = plain(text), plain(solution)
    matcher = difflib.SequenceMatcher(None, own, right, autojunk=False)
    hunks = [x[1:] for x in matcher.get_opcodes() if x[0] != "equal"]
    parts = [
        (i + n, i + n + 1, k + n, k + n + 1)
        for i, j, k, m in hunks
        for n in range(j - i if j - i == m - k > 1 else 0)
    ]

    def edit(*chosen: tuple[int, int, int, int]) -> list[Edit]:
        lines, found = list(own), []
        for i, j, k, m in sorted(chosen, reverse=True):
            lines[i:j] = right[k:m]
        for i, j, k, m in chosen:
            beside = own[max(i - 1, 0)] if i == j else own[min(j, len(own) - 1)]
            line = places[max(i, 1) if i == j else i + 1]
            old_new = pieces(own[i:j], right[k:m])
            text = "\n".join(lines) + "\n"
            around = own[i] if i < j else right[k]
            found.append(Edit(line, *old_new, text, beside.strip(), around=around))
        return found

    for gone in hunks:
        for come in hunks:
            if gone[2] == gone[3] and come[0] == come[1] and come[0]:
                if own[gone[0] : gone[1]] == right[come[2] : come[3]]:
                    first, behind = edit(gone, come)
                    yield [first._replace(to=behind.line, beside=behind.beside)]
    for one in (*parts, *hunks):
        yield edit(one)
    if 1 < len(hunks) <= 4:
        yield edit(*hunks)


def pieces(old: list[str], new: list[str]) -> tuple[str, str]:
    """What differs between two lines, or all of several lines and of short ones."""
    a, b = "\n".join(old), "\n".join(new)
    if len(old) != 1 or len(new) != 1 or max(len(a), len(b)) < 70:
        return a, b
    try:
        [x], [y] = (ast.parse(f"{c.strip()}{' pass' * c.endswith(':')}").body for c in (a, b))
    except SyntaxError:  # of a block's first line
        return a, b
    x, y = narrowed(x, y)  # type: ignore[assignment]
    return ast.unparse(x).removesuffix("\n    pass"), ast.unparse(y).removesuffix("\n    pass")


def narrowed(a: ast.AST, b: ast.AST) -> tuple[ast.AST, ast.AST]:
    """The smallest parts of two statements that differ, with what is directly around."""
    while type(a) is type(b):
        pairs = list(zip(ast.iter_child_nodes(a), ast.iter_child_nodes(b)))
        differ = [(x, y) for x, y in pairs if ast.dump(x) != ast.dump(y)]
        if len(differ) != 1 or len(pairs) != len(list(ast.iter_child_nodes(b))):
            break
        [(x, y)] = differ
        if isinstance(x, ast.keyword):
            return x, y
        leaf = ast.Name | ast.Constant | ast.Tuple | ast.Attribute | ast.Slice
        if not isinstance(x, ast.expr) or isinstance(x, leaf) or isinstance(y, leaf):
            break
        a, b = x, y
    return a, b


# ------------------------------------------------------------------------- changes by themselves
def by_itself(text: str) -> Iterator[Edit]:
    """A file with one part of a kernel changed, the way people err or undo it; what is most likely
    comes first.
    """
    lines, places = plain(text)
    begins = list(itertools.accumulate((len(x) + 1 for x in lines), initial=0))
    own, found = "\n".join(lines) + "\n", list[tuple[int, Edit]]()
    for function in ast.walk(ast.parse(own)):
        if not isinstance(function, ast.FunctionDef) or "jit" not in "".join(
            map(ast.unparse, function.decorator_list)
        ):
            continue
        known = Known(function)
        for node in ast.walk(function):
            if isinstance(node, ast.expr):
                i, j = node.lineno, node.end_lineno or 0
                a, b = begins[i - 1] + node.col_offset, begins[j - 1] + (node.end_col_offset or 0)
                for rank, new in known.changes(node):
                    made = f"{own[:a]}({new}){own[b:]}"
                    old, around = ast.unparse(node), lines[i - 1]
                    found.append((rank, Edit(places[i], old, new, made, around=around)))
            if isinstance(node, ast.For | ast.While | ast.If):
                found += of_lines(node, lines, places, known)
    for name, twin in TWINS.items():
        if made := re.sub(rf"\.{name}\(", f".{twin}(", own):
            line = next((i for i, x in enumerate(lines, 1) if f".{name}(" in x), 0)
            if line:
                found.append((0, Edit(places[line], f"{name}", f"{twin}", made)))
    yield from (x for _, x in sorted(found, key=lambda x: x[0]))


def of_lines(
    block: ast.For | ast.While | ast.If, lines: list[str], places: dict[int, int], known: "Known"
) -> Iterator[tuple[int, Edit]]:
    """Lines of a block that move behind the next one, or are left out; what a loop has to carry."""
    body = [x for x in block.body if x.lineno == x.end_lineno]
    for one, other in zip(body, block.body[1:]):
        i, j, k = one.lineno, other.lineno, other.end_lineno or 0
        made = [*lines[: i - 1], *lines[j - 1 : k], lines[i - 1], *lines[k:]]
        beside = lines[j - 1].strip()
        text = "\n".join(made) + "\n"
        yield 2, Edit(places[i], ast.unparse(one), "", text, beside, to=places[j])
    for one in body if len(block.body) > 1 else ():
        i = one.lineno
        text = "\n".join([*lines[: i - 1], *lines[i:]]) + "\n"
        yield 3, Edit(places[i], ast.unparse(one), "", text, lines[i % len(lines)].strip())
    stored = {
        x.id for x in ast.walk(block) if isinstance(x, ast.Name) and x.ctx.__class__ is ast.Store
    }
    last = block.body[-1]
    indent = " " * last.col_offset
    for name in stored if isinstance(block, ast.For | ast.While) else ():
        old = name.partition("_")[2]
        if name.startswith("new_") and old not in stored:
            end = last.end_lineno or 0
            text = "\n".join([*lines[:end], f"{indent}{old} = {name}", *lines[end:]]) + "\n"
            beside = lines[end - 1].strip()
            yield 1, Edit(places[last.lineno], "", f"{old} = {name}", text, beside)


class Known:
    """What a kernel has that may be missing elsewhere in it.

    Attributes:
        factors: exponentials, by which a sum may be rescaled; scales; masks.
        siblings: name of a parameter -> those whose names are like it.
    """

    def __init__(self, function: ast.FunctionDef) -> None:
        nodes, names = list(ast.walk(function)), [x.arg for x in function.args.args]
        self.factors = [
            ast.unparse(x.targets[0])
            for x in nodes
            if isinstance(x, ast.Assign)
            and re.match(r"\w+\.(math\.)?exp2?\(", ast.unparse(x.value))
        ]
        self.scales = [x for x in names if "scale" in x]
        self.masks = sorted({ast.unparse(x) for x in nodes if isinstance(x, ast.Compare)})
        self.siblings = {
            x: [y for y in names if y != x and y.partition("_")[2] == x.partition("_")[2]]
            for x in names
            if "_" in x
        }

    def changes(self, node: ast.expr) -> Iterator[tuple[int, str]]:
        """What could be in the place of an expression, and how unlikely that is."""
        text = ast.unparse(node)
        match node:
            case ast.Compare(left, [op], [right]) if type(op) in SWAPPED:
                yield 0, ast.unparse(ast.Compare(left, [SWAPPED[type(op)]()], [right]))
            case ast.BinOp(left, operator, right):
                yield from self.of_operation(text, ast.unparse(left), operator, ast.unparse(right))
            case ast.Call(func, [first, *others]):
                yield from self.of_call(text, ast.unparse(func), first, others, node.keywords)
            case ast.Subscript(value, ast.Tuple([_, _])) if "None" in text:
                other = "[None, :]" if text.endswith("[:, None]") else "[:, None]"
                yield 1, f"{ast.unparse(value)}{other}"
            case ast.Name(name):
                yield from ((3, x) for x in self.siblings.get(name, ()))

    def of_operation(
        self, text: str, left: str, operator: ast.operator, right: str
    ) -> Iterator[tuple[int, str]]:
        """See `changes`."""
        match operator:
            case ast.Mult():
                for factor, rest in ((right, left), (left, right)):
                    if re.search(r"scale|alpha|exp|LOG2|1\.44|0\.69", factor):
                        yield 1, rest
                    if "scale" in factor:
                        yield 2, f"{text} * {factor}"
                        yield 1, f"{text} * 1.4426950408889634"
                if found := re.fullmatch(r"(.*) // (\w+)", left):
                    yield 2, found[1]
            case ast.Add() | ast.Sub() if right == "1":
                yield 0, left
            case ast.Add() if re.search(r"sum\(|dot\(", right):
                for factor in self.factors:
                    yield 0, f"({left}) * {factor} + {right}"
                    yield 0, f"({left}) * {factor}[:, None] + {right}"
                yield 2, right
            case ast.FloorDiv() if "head" in text:
                yield 2, f"{left} % {right}"
            case ast.Mod() if "head" in text:
                yield 1, f"{left} // {right}"
                yield 1, f"{left} // group"
            case ast.Sub():
                yield 2, f"{right} - ({left})"

    def of_call(
        self,
        text: str,
        name: str,
        first: ast.expr,
        others: list[ast.expr],
        keywords: list[ast.keyword],
    ) -> Iterator[tuple[int, str]]:
        """See `changes`."""
        short, given = name.rpartition(".")[2], [ast.unparse(x) for x in (first, *others)]
        if short in TWINS:
            yield 0, f"{name.rpartition('.')[0]}.{TWINS[short]}({text.partition('(')[2]}"
        elif short == "load" and "mask" in text:
            kept = [*given, *(ast.unparse(x) for x in keywords if x.arg != "other")]
            yield from ((0, f"{name}({', '.join((*kept, x))})") for x in OTHERS)
        elif short in ("sum", "max", "min"):
            if text[-2] in "01":
                yield 1, f"{text[:-2]}{1 - int(text[-2])})"
            yield 2, text.replace(f".{short}(", ".min(" if short == "max" else ".max(", 1)
        elif short == "dot":
            for i, x in enumerate(given[:2]):
                other = x.removesuffix(".T") if x.endswith(".T") else f"({x}).T"
                yield (
                    1,
                    text.replace(x, other, 1)
                    if i == 0
                    else text.replace(f", {x}", f", {other}", 1),
                )
            yield from ((1, f"{text} * {x}") for x in self.scales)
            for mask in self.masks:
                yield 1, f"{name[:2]}.where(({mask})[None, :], {text}, float('-inf'))"
        elif short in ("where", "maximum") and len(given) > 1:
            yield 2, given[1]
        elif short == "range" and len(given) == 3:
            yield 2, f"range({given[0]}, {given[1]} // {given[2]} * {given[2]}, {given[2]})"
