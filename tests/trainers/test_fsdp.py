"""FSDP2 by accelerate, two processes on the CPU: every step as in one process with SDPA in fp64."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("accelerate", reason="needs accelerate: make test-trainers")

from tests.helpers import ROOT  # noqa: E402
from tests.trainers.fsdp_worker import LR, WORLD, rows_of  # noqa: E402
from tests.trainers.runs import OURS, STEPS, Steps, check, random_model  # noqa: E402

pytestmark = pytest.mark.slow


def whole_run() -> Steps:
    """The same training in one process: a step's loss is the mean over both processes' rows."""
    model, steps = random_model("sdpa", torch.float64), Steps()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for step in range(STEPS):
        rows = torch.cat([rows_of(step, rank) for rank in range(WORLD)])
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        steps.add(float(loss.detach()), model)
        optimizer.step()
        optimizer.zero_grad()
    return steps


def test_every_step_of_two_processes(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    worker = ["-m", "tests.trainers.fsdp_worker", str(tmp_path)]
    done = subprocess.run(
        [*launcher, f"--nproc-per-node={WORLD}", *worker],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = torch.load(tmp_path / "steps.pt")
    runs = {torch.float64: {"sdpa": whole_run()}}
    runs[torch.float32] = {name: Steps(*found[name]) for name in ("sdpa", OURS)}
    check(lambda implementation, dtype: runs[dtype][implementation])
