"""For tests that share a GPU: large ones take turns, none keeps memory, a lost device is named.

A plug-in of pytest; conftest.py loads it. `--failures=FILE` writes each failure when it happens: a
long run that is ended still says what was wrong.
"""

import fcntl
import gc
import os
import tempfile
import time
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

KEPT = 2**29  # bytes that torch may keep from one test to the next
SHARE = 8 * 2**30  # bytes of the GPU for each worker: a context, and tests that are not large
WAIT = 120.0  # seconds for others to give back what a large test needs
LINES = 60  # of a failure
LOST = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--failures", metavar="FILE", help="append each failure as it happens")


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "large(gib): takes so much of the GPU's memory; one of these runs at a time"
    )
    path = config.getoption("failures")
    if path and not hasattr(config, "workerinput"):  # workers report to the main process
        config.pluginmanager.register(Failures(Path(path)))


class Failures:
    """Appends failures to a file."""

    def __init__(self, path):
        self.path = path
        path.write_text("")

    def pytest_runtest_logreport(self, report):
        if report.failed:
            tail = "\n".join(report.longreprtext.splitlines()[-LINES:])
            with self.path.open("a") as file:
                file.write(f"{report.nodeid} ({report.when}, {report.duration:.1f} s)\n{tail}\n\n")

    def pytest_collectreport(self, report):
        if report.failed:
            with self.path.open("a") as file:
                file.write(f"{report.nodeid} (collection)\n{report.longreprtext}\n\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """`-n auto` on a GPU: what its memory and the cores are enough for."""
    if not torch.cuda.is_available():
        return None
    memory = torch.cuda.get_device_properties(0).total_memory
    return max(1, min(len(os.sched_getaffinity(0)) - 2, memory // SHARE))


@pytest.hookimpl(tryfirst=True)  # xdist's own reads the groups
def pytest_collection_modifyitems(config, items):
    """Large tests are one worker's. Where several workers run, neighbours are of different kernels
    as often as not, so that not all compile the same one at the same time.
    """
    if not torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("large"):
            item.add_marker(pytest.mark.xdist_group("large"))
    if hasattr(config, "workerinput"):
        order = {path: number for number, path in enumerate(dict.fromkeys(x.path for x in items))}
        items.sort(key=lambda item: (order[item.path], zlib.crc32(item.nodeid.encode())))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Notes the test that broke the process's GPU context: nothing after it can be right."""
    report = yield
    if report.failed and torch.cuda.is_initialized() and LOST not in item.config.stash:
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            item.config.stash[LOST] = item.nodeid
    return report


@contextmanager
def turn(needed):
    """No other process is here; waits for what the others may yet give back of the memory."""
    path = Path(tempfile.gettempdir()) / f"large-tests-{os.getuid()}.lock"
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        give_back()
        until = time.monotonic() + WAIT
        while torch.cuda.mem_get_info()[0] < needed and time.monotonic() < until:
            time.sleep(0.5)
        yield


def give_back():
    """Lets other processes have what torch keeps for later."""
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def room_on_the_gpu(request):
    """What a large test needs is there, or the test is skipped; a test leaves little behind."""
    if not torch.cuda.is_available():
        yield
        return
    if lost := request.config.stash.get(LOST, None):
        pytest.fail(f"{lost} broke this process's GPU context.", pytrace=False)
    if (large := request.node.get_closest_marker("large")) is None:
        yield
    else:
        (gib,) = large.args
        total = torch.cuda.get_device_properties(0).total_memory / 2**30
        if total < gib:
            pytest.skip(f"needs {gib} GiB of GPU memory, and there are {total:.0f}")
        with turn(gib * 2**30):
            yield
            give_back()
    if LOST not in request.config.stash and torch.cuda.memory_reserved() > KEPT:
        give_back()
