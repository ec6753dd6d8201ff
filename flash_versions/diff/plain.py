"""Kernels as one plain call sees them: causal or full, 16 bits, without options, not packed, as
many key heads as query heads, the keys not split. Portable kernels are specialised to it and run;
Gluon kernels lose the branches that it switches off: a view to read, not a kernel to run.
"""

import ast
import importlib
import inspect
from functools import cache
from typing import Any

from flash_versions.diff import fold, tidy
from flash_versions.diff.files import Definition, check_version, kernels_of, version_names
from flash_versions.diff.fold import Code, Known, Record, Value, named
from flash_versions.diff.inline import Kernel, source_of

HEAD = ["import triton", "import triton.language as tl", ""]
HEAD_DIMS = range(1, 257)
GIVEN = {  # named tuples that kernels are given, by parameter
    "sequences": "Sequences",
    "window": "Window",
    "mods": "ScoreMods",
    "rule": "Rule",
    "queries": "QueryViews",
}
# What a plain call fixes, by parameter or field: it has no options, is not packed, has as many key
# heads as query heads, and does not split the keys.
FIXED = {
    **dict.fromkeys(("plan", "partials", "cu_seqlens_q", "cu_seqlens_k", "kv_lengths")),
    **dict.fromkeys(("kv_starts", "block_table", "block_table_stride", "PAGE_SIZE")),
    **dict.fromkeys(("cap_scale", "slopes", "slopes_head_stride", "sink", "dropout_seed")),
    **dict.fromkeys(("dropout_threshold", "dropout_rescale", "counts", "intervals")),
    **dict.fromkeys(("score_descale", "value_descale")),
    "slopes_batch_stride": 0,
    "GROUP": 1,
    "num_splits": 1,
    "SPLIT": False,
    "HAS_DLSE": False,
    # FA4's choice on a GPU where both of its tricks pay, in bf16.
    "THRESHOLD": 8.0,
    "EIGHTHS": 2,
    "DEGREE": 3,
}
LAUNCHED: dict[str, Value] = {"tl.program_id(1)": Known(0)}  # as its launch shows: one split

# What a plain call switches off and on in the kernels for Hopper, by parameter, field or function.
SWITCHES = {
    **dict.fromkeys(("FP8", "is_fp8", "CAP", "LEFT", "LATE_WAIT", "RAGGED", "SINK", "ON"), False),
    "STARTS": False,
    **dict.fromkeys(("OVERLAP", "PING_PONG"), True),
    "CONSUMERS": 2,
    "PANELS": 1,
    "THRESHOLD": 8.0,
}
IDLE = {"trace.enter"}  # calls that then do nothing
RETURNED = {"problem.scored"}  # and that return their argument


@cache
def plain_kernels(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> list[Kernel]:
    """The kernels of a version in the order of their launches; arguments as of `plain_source`."""
    name, kernels = kernels_of(version, backward)
    check_version(version, version_names())
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"head_dim={head_dim} is not possible; 1 to {HEAD_DIMS[-1]} are.")
    module = importlib.import_module(name)
    try:
        return [specialise(getattr(module, kernel), causal, head_dim) for kernel in kernels]
    except (NotImplementedError, KeyError, TypeError) as error:
        which = "backward" if backward else "forward"
        raise ValueError(
            f"the {which} of {version} has no plain view ({error}); leave out --plain."
        ) from error


def specialise(kernel: Any, causal: bool, head_dim: int) -> Kernel:
    """A kernel, specialised to a plain call."""
    fixed = {**FIXED, "left": None, "right": 0 if causal else None}
    width = max(16, 1 << (head_dim - 1).bit_length())
    source = source_of(kernel.fn)

    def value(name: str) -> Value:
        return Known(fixed[name]) if name in fixed else named(name)

    def given(parameter: str) -> Value:
        if (kind := GIVEN.get(parameter)) is None:
            return value(parameter)
        return Record(kind, {field: value(field) for field in source.names[kind]._fields})

    values = {parameter: given(parameter) for parameter in source.parameters}
    return Kernel(kernel, values, width, LAUNCHED)


def plain_source(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> str:
    """A version's portable kernels as one plain call sees them: a module that runs in their place.

    Args:
        version: such as "fa2".
        causal: whether the call is; otherwise every query sees every key.
        head_dim: elements of a row of q, k and v, 1 to 256; a tile is as wide as the next power of
            two.
        backward: the kernels of the backward in the place of the forward's.

    Raises:
        ValueError: there is no such version or head_dim, or its kernels have no plain view.
    """
    kernels = plain_kernels(version, causal, head_dim, backward)
    names = sorted({x for kernel in kernels for x in kernel.imports})
    imports = [
        f"from {module} import {', '.join(name for x, name in names if x == module)}"
        for module in dict.fromkeys(module for module, _ in names)
    ]
    functions = plain_functions(version, causal, head_dim, backward).values()
    return "\n".join([*HEAD, *imports]) + "".join(f"\n\n\n{text}" for text in functions) + "\n"


def plain_functions(
    version: str, causal: bool = True, head_dim: int = 128, backward: bool = False
) -> dict[str, str]:
    """The text of each function of `plain_source` by its name, callees first."""
    found: dict[str, str] = {}
    for kernel in plain_kernels(version, causal, head_dim, backward):
        for made in kernel.functions.values():
            parameters = [
                f"{x}: tl.constexpr" if x in made.constants else x for x in made.parameters
            ]
            lines = tidy.function(made.name, parameters, made.body, "triton.jit")
            text = "\n".join(lines)
            if found.setdefault(made.name, text) != text:
                raise ValueError(f"the kernels of {version} do not agree in {made.name}.")
    return found


class Fold(ast.NodeTransformer):
    """Takes the branches that the switches, values by the name of a parameter or field, choose."""

    def __init__(self, switches: dict[str, Any]) -> None:
        self.switches = switches

    def value(self, e: ast.expr) -> Value:
        """What the switches make of an expression."""
        match e:
            case ast.Constant(value):
                return Known(value)
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Call(func=ast.Name(id=name)):
                return Known(self.switches[name]) if name in self.switches else Code(e)
            case ast.UnaryOp(ast.Not(), operand):
                found = self.value(operand)
                return Known(not found.value) if isinstance(found, Known) else Code(e)
            case ast.BoolOp(op, values):
                return fold.both(op, [self.value(x) for x in values])
            case ast.Compare(left, [ast.Eq() | ast.Gt() as op], [right]):
                return fold.compare(op, self.value(left), self.value(right))
        return Code(e)

    def visit_If(self, node: ast.If) -> Any:
        """The branch that is taken, or both."""
        value = self.value(node.test)
        if not isinstance(value, Known):
            return self.generic_visit(node)
        taken = ast.Module(node.body if value.value else node.orelse, [])
        self.generic_visit(taken)
        return taken.body

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        """The value that is taken, or both."""
        value = self.value(node.test)
        if not isinstance(value, Known):
            return self.generic_visit(node)
        return self.visit(node.body if value.value else node.orelse)

    def visit_Expr(self, node: ast.Expr) -> Any:
        """Nothing of a docstring, nor of a call that does nothing."""
        is_idle = isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in IDLE
        is_nothing = is_idle or isinstance(node.value, ast.Constant)
        return None if is_nothing else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> Any:
        """Nothing of `x = f(x)` where f returns x."""
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) in RETURNED:
            return None
        return self.generic_visit(node)


def switched(module_name: str, kernels: tuple[str, ...], causal: bool = True) -> dict[str, str]:
    """The text of each definition that Gluon kernels of a module use there, by name.

    Args:
        module_name: such as "flash_versions.versions.fa3.hopper.forward".
        kernels: the functions to begin with.
        causal: whether the call is.
    """
    text = inspect.getsource(importlib.import_module(module_name))
    comments, tree = tidy.comments_of(text), ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt):
            node.comments = comments.get(node.lineno, [])  # type: ignore[attr-defined]
    taken = Fold({**SWITCHES, "RIGHT": causal})
    found = {x.name: taken.visit(x) for x in tree.body if isinstance(x, Definition)}
    before = None
    while before != (before := [ast.dump(x) for x in found.values()]):
        for name, node in list(found.items()):
            others = [x for other in found.values() if other is not node for x in ast.walk(other)]
            if name not in {*kernels, *mentioned(others)}:
                del found[name]
            else:
                without_unused(node, [*others, *ast.walk(node)], is_kernel=name in kernels)
    return {name: "\n".join(lines(x)) for name, x in found.items()}


def mentioned(nodes: list[ast.AST]) -> set[str]:
    """The variables and fields that code mentions."""
    names = {x.id for x in nodes if isinstance(x, ast.Name)}
    return names | {x.attr for x in nodes if isinstance(x, ast.Attribute)}


def without_unused(node: Definition, every: list[ast.AST], is_kernel: bool) -> None:
    """Take from a definition the parameters, fields and results that nothing of `every` reads, and
    the arguments for them from its calls, also from those that partitions begin with: `(function,
    (argument, ...))`. A kernel is called from outside.
    """
    if isinstance(node, ast.ClassDef):
        read = {x.attr for x in every if isinstance(x, ast.Attribute)}
        given = [ast.unparse(x.target) for x in node.body if isinstance(x, ast.AnnAssign)]
    else:
        node.body = tidy.without_dead(node.body, tidy.reads(node.body))
        read = {*tidy.reads(node.body)}
        given = [] if is_kernel else [x.arg for x in node.args.args]
        node.args.args = [x for x in node.args.args if x.arg in read]
    node.body = [
        x
        for x in node.body
        if not (isinstance(x, ast.AnnAssign) and ast.unparse(x.target) not in read)
        and not (isinstance(x, ast.FunctionDef) and x.name not in read)
    ]
    for x in every:
        match x:
            case ast.Call(func=ast.Name(id=name), args=arguments) | ast.Tuple(
                [ast.Name(id=name), ast.Tuple(arguments)]
            ) if name == node.name:
                gone = [i for i, x in enumerate(given) if x not in read]
                arguments[:] = [x for i, x in enumerate(arguments) if i not in gone]


def lines(node: Definition) -> list[str]:
    """The lines of a definition."""
    decorator = ast.unparse(node.decorator_list[0])
    if isinstance(node, ast.FunctionDef):
        parameters = map(ast.unparse, node.args.args)
        return tidy.function(node.name, parameters, node.body, decorator.split("(")[0])
    fields = [x for x in node.body if not isinstance(x, ast.FunctionDef)]
    made = [f"@{decorator}", f"class {node.name}:", *tidy.block(fields, tidy.INDENT)]
    for method in (x for x in node.body if isinstance(x, ast.FunctionDef)):
        made += ["", *(f"{tidy.INDENT}{line}" for line in lines(method))]
    return made
