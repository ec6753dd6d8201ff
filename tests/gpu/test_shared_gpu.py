"""The plug-in for tests that share a GPU: failures are written at once, large tests take turns."""

import multiprocessing
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import ROOT, shared_gpu

pytestmark = pytest.mark.slow

FAILING = """
import pytest

@pytest.mark.parametrize("number", range(4))
def test_fails(number):
    assert number % 2, f"number {number} is even"
"""
# A file of its own: on a GPU, workers run the tests of a file in another order.
WATCHING = """
from pathlib import Path
from time import monotonic, sleep

def test_the_file_is_there_while_others_run():
    until = monotonic() + 30  # a worker's failures are written by another process
    while "number 2 is even" not in Path("failures").read_text():
        assert monotonic() < until
        sleep(0.01)
"""


FAKE = """
from types import SimpleNamespace
import torch

def lost():
    raise RuntimeError("CUDA error: an illegal memory access was encountered")

torch.cuda.is_available = torch.cuda.is_initialized = lambda: True
torch.cuda.get_device_properties = lambda device: SimpleNamespace(total_memory=10 * 2**30)
torch.cuda.mem_get_info = lambda: (9 * 2**30, 10 * 2**30)
torch.cuda.memory_reserved = lambda: 2**30
torch.cuda.empty_cache = lambda: print("given back")
torch.cuda.synchronize = lambda: None
"""
ON_A_GPU = """
import fake
import pytest
import torch

@pytest.mark.large(8)
def test_fits():
    pass

@pytest.mark.large(16)
def test_does_not_fit():
    pass

def test_another():
    pass
"""
LOSING = """
import fake
import torch

def test_accesses_what_is_not_there():
    torch.cuda.synchronize = fake.lost
    fake.lost()

def test_after_it():
    pass
"""

by_workers = pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="alone", marks=pytest.mark.wide),
        pytest.param(("-n", "1", "--dist", "loadgroup"), id="a worker"),
    ],
)


def run(folder, *options, **files):
    """What pytest says of a folder of tests, with the plug-in."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    paths = [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]
    options = ("-q", "-rs", "-p", "tests.helpers.shared_gpu", "--failures=failures", *options)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        text=True,
    )
    return done.stdout + done.stderr


@pytest.mark.wide
@by_workers
def test_a_failure_is_written_when_it_happens(tmp_path, workers):
    (tmp_path / "failures").write_text("of an earlier run")
    said = run(tmp_path, *workers, test_it=FAILING, test_later=WATCHING)
    assert "2 failed, 3 passed" in said, said
    written = (tmp_path / "failures").read_text()
    assert "test_it.py::test_fails[0] (call, " in written and "earlier" not in written
    assert written.count("is even\n") == 2 and "number 1" not in written


@pytest.mark.wide
@by_workers
def test_a_large_test_has_room_or_is_skipped(tmp_path, workers):
    said = run(tmp_path, *workers, fake=FAKE, test_it=ON_A_GPU)
    assert "2 passed, 1 skipped" in said, said
    assert "needs 16 GiB of GPU memory, and there are 10" in said


@pytest.mark.wide
def test_what_follows_a_lost_gpu_says_so(tmp_path):
    said = run(tmp_path, fake=FAKE, test_it=LOSING)
    assert "1 failed, 1 error" in said, said
    lost = "test_it.py::test_accesses_what_is_not_there broke this process's GPU context."
    assert lost in (tmp_path / "failures").read_text()


def hold(queue):
    """A process that has its turn for a moment."""
    torch.cuda.mem_get_info = lambda: (1, 1)
    with shared_gpu.turn(1):
        queue.put(("begins", os.getpid()))
        time.sleep(0.3)
        queue.put(("ends", os.getpid()))


def test_turns_do_not_overlap():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=hold, args=(queue,)) for _ in range(2)]
    for process in processes:
        process.start()
    events = [queue.get(timeout=60) for _ in range(4)]
    for process in processes:
        process.join()
    assert [what for what, _ in events] == ["begins", "ends"] * 2
    assert events[0][1] == events[1][1] != events[2][1]


@pytest.mark.parametrize(("cores", "gib", "workers"), [(16, 140, 14), (64, 80, 10), (2, 6, 1)])
def test_workers_are_what_cores_and_memory_are_enough_for(monkeypatch, cores, gib, workers):
    about = SimpleNamespace(total_memory=gib * 2**30)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: about)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    assert shared_gpu.pytest_xdist_auto_num_workers(None) == workers


def test_no_worker_is_counted_without_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert shared_gpu.pytest_xdist_auto_num_workers(None) is None
