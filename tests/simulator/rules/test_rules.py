"""The simulator refuses what Triton's compiler refuses, and nothing else.

The compiler is asked for each kernel of kernels.py and lines.py: its front end, for sm_90, which
needs no GPU. That is where it refuses; what passes there it compiles. The simulator has to agree,
and to name the line.
"""

import importlib.util
import re
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
import triton
from triton._C.libtriton import ir
from triton.compiler import make_backend
from triton.compiler.errors import CompilationError

from flash_versions.inspect.compiled import CompileDriver
from flash_versions.simulator import CompileError
from tests.simulator.rules.kernels import ARGUMENTS, KERNELS, Rule
from tests.simulator.rules.lines import HEAD, KERNEL, LINES, TAKEN_SINCE

VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
ARCH = 90
NAMES = {
    f"{kind}: {line}": f"{kind}_{i}"
    for i, (wrong, _, right) in enumerate(LINES)
    for kind, line in (("refused", wrong), ("fine", right))
}
FINE = {f"fine: {name}": name for name, rule in KERNELS.items() if "fine: " in rule.kernel.src}


@pytest.fixture(scope="module")
def rules(tmp_path_factory):
    """All kernels by name; those made here are in a file, as Triton reads their text."""
    path = tmp_path_factory.mktemp("rules") / "made_kernels.py"
    made = [KERNEL.format(name=x, line=line.split(": ", 1)[1]) for line, x in NAMES.items()]
    for name in FINE.values():
        text = re.sub(r"\S.*fine: ", "", KERNELS[name].kernel.src)
        made.append(f"\n\n@triton.jit\n{text}")
    path.write_text(HEAD + "".join(made))
    spec = importlib.util.spec_from_file_location("made_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = {line: Rule(getattr(module, name), refused=False) for line, name in FINE.items()}
    for line, name in NAMES.items():
        kind, i = name.split("_")
        wrong, says, _ = LINES[int(i)]
        before = TAKEN_SINCE.get(wrong, (99, 0))
        found[line] = Rule(getattr(module, name), kind == "refused", says, before)
    return KERNELS | found


@cache
def text_of(file: str) -> str:
    """The text of a file with kernels."""
    return Path(file).read_text()


def first_line(kernel, source: str) -> int | None:
    """The line of the kernel's file in which a function begins."""
    before, found, _ = text_of(kernel.fn.__code__.co_filename).partition(source)
    return before.count("\n") + 1 if found else None


def lines_to_blame(kernel) -> set[int]:
    """The lines with `# here`, of a kernel and of those functions that it calls."""
    called = [x for x in kernel.fn.__globals__.values() if isinstance(x, triton.JITFunction)]
    sources = {kernel.src, *(x.src for x in called if x.__name__ in kernel.fn.__code__.co_names)}
    return {
        start + i
        for source in sources
        if (start := first_line(kernel, source)) is not None
        for i, line in enumerate(source.splitlines())
        if "# here" in line
    }


def front_end(source, target, options, **_):
    """What triton.compile does before the first pass, and to find what it compiled before."""
    backend, context = make_backend(target), ir.context()
    options = backend.parse_options(dict(options))
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options)
    module = source.make_ir(target, options, functions, backend.get_module_map(), context)
    source.hash()
    return module


def refusal(kernel, arguments: list) -> Exception | None:
    """What the compiler says against a kernel that is called so."""
    driver = triton.runtime.driver
    previous = driver._active
    try:
        driver.set_active(CompileDriver(ARCH))
        _ = kernel.device_caches[ARCH]  # gives the kernel its own `compile`
        kernel.compile = front_end
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that something is deprecated
            kernel.warmup(*arguments, grid=(1,))
    except Exception as error:  # also AssertionError, of those that no node is named for
        return error
    finally:
        driver._active = previous
        kernel.device_caches.clear()
    return None


def blamed(kernel, error: BaseException | None) -> range | None:
    """The lines of what the compiler blames, innermost, in the kernel's file; None: nothing."""
    found = None
    while error is not None:
        if isinstance(error, CompilationError) and hasattr(error.node, "lineno"):
            if (start := first_line(kernel, error.src)) is not None:
                found = range(start + error.node.lineno - 1, start + error.node.end_lineno)
        error = error.__cause__
    return found


@pytest.mark.parametrize("name", [*KERNELS, *FINE, *NAMES])
def test_the_simulator_agrees_with_the_compiler(rules, name):
    rule = rules[name]
    arguments = [ARGUMENTS[x] for x in rule.kernel.arg_names]
    lines = lines_to_blame(rule.kernel)
    error = refusal(rule.kernel, arguments)
    assert bool(error) == (rule.refused and rule.before > VERSION), error
    if rule.refused and not error:
        pytest.skip(f"Triton {triton.__version__} compiles this")  # and the simulator may refuse
    if error and (place := blamed(rule.kernel, error)):
        assert lines & set(place), (place, error)
    given = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
    if not error:
        rule.kernel[(1,)](*given)
        return
    with pytest.raises(CompileError) as caught:
        rule.kernel[(1,)](*given)
    said = str(caught.value)
    assert lines & {int(x) for x in re.findall(r"line (\d+)", said)}, (lines, said)
    assert rule.name in said
