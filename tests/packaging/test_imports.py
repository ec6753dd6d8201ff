"""What a start does not wait for: modules that are imported only when they are needed."""

import subprocess
import sys

from tests.helpers import ROOT

LATE = (
    "flash_versions.simulator.launch", "flash_versions.simulator.gluon", "flash_versions.bench",
    "torch._dynamo", "torch._inductor", "matplotlib",
)  # fmt: skip


def test_a_start_imports_no_simulator_no_tool_and_no_compiler_of_torch():
    code = "import sys, flash_versions, transformer.generate; print(*sys.modules, sep='\\n')"
    run = [sys.executable, "-c", code]
    modules = subprocess.run(run, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert "transformer.generate" in modules.split()
    assert [name for name in modules.split() if name.startswith(LATE)] == []
