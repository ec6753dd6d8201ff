"""AOTInductor packages a model with `flash_attn_func`, on the CPU, in a process of its own."""

import re
import shutil
import subprocess
import sys

import pytest

from tests.helpers import ROOT


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler, g++")
def test_a_package_loads_and_says_what_the_model_says(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.aoti", "--device", "cpu"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = re.search(r"works: the largest difference from the model is (\S+)", done.stdout)
    assert found and float(found[1]) < 1e-6
