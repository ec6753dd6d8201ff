"""AOTInductor packages a model with `flash_attn_func`, on the CPU, in processes of their own."""

import re
import shutil
import signal
import subprocess
import sys

import pytest
import torch

from flash_versions.dispatch.autograd import operators
from tests.benchmarks.attention.aoti import Model, stacks, verdict
from tests.helpers import ROOT

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler, g++"
)


@needs_compiler
def test_packages_load_and_say_what_the_models_say():
    """Also in a process that did not compile them."""
    script = [sys.executable, "-m", "tests.benchmarks.attention.aoti"]
    done = subprocess.run(
        [*script, "--device", "cpu", "schema", "layer"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    found = re.findall(r"^(\w+) +(\w+) +works: (\S+) from the model$", done.stdout, re.M)
    assert [x[:2] for x in found] == [
        (case, who) for case in ("schema", "layer") for who in ("compiling", "another")
    ], done.stdout + done.stderr[-3000:]
    assert all(float(off) < 1e-6 for *_, off in found)


@needs_compiler
def test_where_it_is_not_known_to_work_it_is_refused(monkeypatch, tmp_path):
    """Before anything is written, and AOTInductor alone; a CPU passes for a GPU here."""
    assert operators.NOT_AHEAD_OF_TIME == ("cuda",)
    monkeypatch.setattr(operators, "NOT_AHEAD_OF_TIME", ("cpu",))
    model, x = Model("attention", 16).eval(), torch.randn(1, 24, 3, 2, 16)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))
        exported = torch.export.export(model, (x,))
        package = tmp_path / "model.pt2"
        with pytest.raises(RuntimeError, match="cannot be packaged by AOTInductor for a GPU"):
            torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    assert not package.exists()


@pytest.mark.parametrize("code, printed, expected", [
    (0, "export\nload\nworks: 1.0e-09 from the model\n", "works: 1.0e-09 from the model"),
    (-signal.SIGSEGV, "export\ncompile\nload\n", "died of SIGSEGV in: load"),
    (1, "", "ended with code 1 in: its imports"),
    (0, "load\n", "ended with code 0 in: load"),
    (None, "export\n", "was stopped after 250 s in: export"),
])  # fmt: skip
def test_what_became_of_a_process(code, printed, expected):
    assert verdict(code, printed) == expected


def test_the_stack_of_a_process_that_died():
    """A real one: the stacks of the thread that died, in C++ and in Python."""
    code = (
        "import faulthandler, torch, ctypes; faulthandler.enable();"
        "torch._C._set_print_stack_traces_on_fatal_signal(True); ctypes.string_at(0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert verdict(done.returncode, "load\n") == "died of SIGSEGV in: load"
    lines = stacks(f"a warning\n{done.stderr}")
    assert lines[0].startswith("SIGSEGV") and any("ffi_call" in line for line in lines)
    assert any("in string_at" in line for line in lines)
    assert stacks("Traceback\nValueError: no") == ["Traceback", "ValueError: no"]
