"""A target of the Makefile, run where its environment is ready: nothing is installed."""

import os
import subprocess
import sys

from tests.helpers import ROOT


def make(target, folder, extra="", **environment):
    """What `make TARGET` prints, without a GPU; `extra` is that of pyproject.toml."""
    python = folder / "venv/bin/python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / f"venv/.ready{'-' * bool(extra)}{extra}").touch()
    done = subprocess.run(
        ["make", target, f"VENV={folder / 'venv'}"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
