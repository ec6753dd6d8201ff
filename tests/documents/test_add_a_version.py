"""The reader's version of docs/add_a_version.md, added to a copy of the package as the page says:
the suite, the benchmark, the diff, the tables and the plots pick it up by its name.
"""

import ast
import json
import os
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT

NAME = "fa2_pairs"
SCRIPT = ROOT / "docs/examples/add.sh"
CASES = [
    "float32-one query, many keys",
    "float32-grouped heads 8:4",
    "float32-more queries than keys: rows without a key",
    "bfloat16-causal, several blocks",
    "float16-everything at once",
]
ASKED = """
import json
import flash_versions
from flash_versions import VERSIONS, diff
from flash_versions.bench import suites
from flash_versions.plot.figures import PLOTS
from tests.flash_versions.versions import test_attention
from tests.helpers.committed_results import RESULTS
from transformer import generate

shape = suites.SUITES["quick"][0]
measured = [one.name for one in suites.competitors("table", shape)]
rows = [{**row, "version": "fa2_pairs"} for row in RESULTS["rows"] if row.get("version") == "fa2"]
panels = PLOTS["forward"].data(RESULTS | {"rows": RESULTS["rows"] + rows})
figure = PLOTS["forward"].draw(panels)
print(json.dumps({
    "file": flash_versions.__file__,
    "versions": list(VERSIONS),
    "bench": measured,
    "cases": [case.id for case in test_attention.EVERYTHING],
    "diff": diff.lesson("fa2", "fa2_pairs"),
    "attentions": list(generate.ATTENTIONS),
    "lines": sorted({line.get_gid() for axis in figure.axes for line in axis.lines}),
    "labels": sorted({text.get_text() for axis in figure.axes for text in axis.texts}),
}))
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """A copy of the repository's code to which the page's commands added the version."""
    top = tmp_path_factory.mktemp("copy")
    without = shutil.ignore_patterns("__pycache__", "checkpoints")
    for name in ("flash_versions", "transformer", "tests", "docs/examples", "docs/results"):
        shutil.copytree(ROOT / name, top / name, ignore=without)
    shutil.copy(ROOT / "pyproject.toml", top)
    subprocess.run(["bash", "-e", SCRIPT], cwd=top, check=True)
    return top


def python(top, *arguments):
    """Run Python on the copy: its output, and how it ended."""
    environment = {**os.environ, "PYTHONPATH": str(top), "CUDA_VISIBLE_DEVICES": ""}
    for name in ("TRITON_INTERPRET", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=top, env=environment, capture_output=True, text=True
    )
    return done.stdout + done.stderr, done.returncode


def suite(top, *cases):
    """Run cases of the copy's equivalence suite."""
    chosen = [
        f"tests/flash_versions/versions/test_attention.py::test_equivalence[{NAME}-{case}]"
        for case in cases
    ]
    return python(top, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen)


def code_lines(path):
    """The lines of a file that are neither docstring nor import nor comment nor empty."""
    source, lines = path.read_text(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):  # its body's statements come by themselves
            lines |= set(range(node.lineno, node.body[0].lineno))
        elif isinstance(node, ast.stmt) and not isinstance(node, ast.Import | ast.ImportFrom):
            is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            lines |= set() if is_text else set(range(node.lineno, node.end_lineno + 1))
    return len(lines)


def test_its_kernel_is_about_sixty_lines():
    assert 50 < code_lines(ROOT / f"docs/examples/{NAME}/forward.py") < 70


@pytest.fixture(scope="module")
def asked(copy):
    """What the parts of the package say that iterate over the versions."""
    output, code = python(copy, "-c", ASKED)
    assert code == 0, output
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    assert found["file"].startswith(str(copy))
    return found


def test_the_package_knows_it(asked):
    assert asked["versions"].index(NAME) == asked["versions"].index("fa2") + 1
    for where in ("bench", "attentions", "lines", "labels"):
        assert NAME in asked[where], where


def test_its_diff_is_its_lesson(asked):
    text = "\n".join(asked["diff"])
    assert "+def join(acc_a, max_a, sum_a, acc_b, max_b, sum_b):" in text
    assert "def fold_block" not in text  # imported: unchanged


def test_the_suite_has_its_cases(asked):
    of = {name: [x for x in asked["cases"] if x.startswith(f"{name}-")] for name in (NAME, "fa2")}
    assert len(of[NAME]) == len(of["fa2"]) > 100
    assert {f"{NAME}-{case}" for case in CASES} <= set(of[NAME])


def test_its_cases_pass(copy):
    """Some of them; forward, and backward where a case has one of its own."""
    output, code = suite(copy, *CASES)
    assert code == 0 and f"{len(CASES)} passed" in output, output[-3000:]


def test_the_suite_sees_a_mistake_in_it(copy, tmp_path):
    """The two results added without bringing them to one maximum."""
    broken = tmp_path / "broken"
    shutil.copytree(copy, broken)
    path = broken / f"flash_versions/versions/{NAME}/forward.py"
    right = "acc = acc_a * alpha[:, None] + acc_b * beta[:, None]"
    assert right in path.read_text()
    path.write_text(path.read_text().replace(right, "acc = acc_a + acc_b"))
    output, code = suite(broken, "bfloat16-causal, several blocks")
    assert code == 1 and "1 failed" in output and "OVER its budget" in output, output[-2000:]
