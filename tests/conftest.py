"""Set-up for all tests: threads, NaN poisoning, a closing word on what ran."""

import gc
import os
import re
import signal
import stat
from pathlib import Path

# A shell starts what it runs in the background with SIGINT ignored. Tests send it, to this process
# and to those that they start, which inherit it.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Before NumPy loads: small matrix products are slowest on many threads.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(variable, "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# GPUS=0,1,2,3 make test-gpu: each worker of pytest-xdist has one of four GPUs.
if gpus := os.environ.get("GPUS"):
    names = gpus.split(",")
    worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")
    os.environ["CUDA_VISIBLE_DEVICES"] = names[int(worker) % len(names)]

import pytest  # noqa: E402
import torch  # noqa: E402

from flash_versions.dispatch.replay import keys, recording  # noqa: E402
from tests.helpers.kernels.overflow import check_overflow  # noqa: E402

pytest_plugins = [
    "tests.helpers.shared_gpu",
    "tests.helpers.models.tiny_model",
    "tests.helpers.models.tiny_grpo",
]

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
check_overflow()

# Of the architectures, `make test` compiles for sm_90 only, and what bfloat16 shows it does not
# repeat for float16.
REPEATED = re.compile(r"\bsm_(?!90)\d+|(?<!b)float16")


def pytest_configure(config):
    """Markers that tell what may be left out where time is short."""
    config.addinivalue_line(
        "markers",
        "slow: takes seconds, and most of what it shows others show: left to `make test-all`",
    )
    config.addinivalue_line(
        "markers", "wide: repeats for another dtype or size what a case that is not wide shows"
    )


def pytest_collection_modifyitems(config, items):
    """Kernel tests belong to the GPU where there is one; what needs one is skipped elsewhere. Tests
    that one worker has to run, one after the other, begin first, so that none is left alone at the
    end.
    """
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)
    for item in items:
        if REPEATED.search(item.nodeid.partition("::")[2]):
            item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        for item in items:
            if "device" in getattr(item, "fixturenames", ()):
                item.add_marker(pytest.mark.gpu)
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish(session):
    """What is there by now stays: millions of objects, which no later collection has to look at."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def device() -> str:
    """Where the kernels run: a GPU if there is one, else the CPU, simulated."""
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def full_device(tmp_path) -> Path:
    """A device as /dev/full, on which no write succeeds, alone in a folder."""
    path = tmp_path / "devices" / "full"
    path.parent.mkdir()
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    return path


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh floating-point memory holds NaN, so that an element nobody wrote is seen."""

    def poison(allocate):
        def allocate_poisoned(*args, **kwargs):
            x = allocate(*args, **kwargs)
            if x.is_floating_point() and not x.is_meta and type(x) is torch.Tensor:
                with torch.no_grad():
                    x.fill_(float("nan"))
            return x

        return allocate_poisoned

    monkeypatch.setattr(torch, "empty", poison(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poison(torch.empty_like))
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", poison(new_empty))
    monkeypatch.setitem(recording.KNOWN, torch.Tensor.new_empty, recording.KNOWN[new_empty])


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    """No call that was kept under the patches of another test."""
    monkeypatch.setattr(keys, "known", {})
    monkeypatch.setattr(keys, "seen", {})


@pytest.fixture(autouse=True)
def seeded():
    """The same random inputs in every run."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # which would format the stack for each kind of device that is not there
        torch.default_generator.manual_seed(0)


def pytest_terminal_summary(terminalreporter, config):
    """Say what was exercised: a suite of skips is green and proves nothing."""
    passed = terminalreporter.stats.get("passed", [])
    rooms = ("flash_versions/versions", "flash_versions/integrations", "simulator", "gpu")
    kernels = [r for r in passed if r.nodeid.startswith(tuple(f"tests/{x}/" for x in rooms))]
    if torch.cuda.is_available():
        where = f"on {torch.cuda.get_device_name()}"
    else:
        where = "simulated, no GPU found; on one, also run: make test-gpu"
    terminalreporter.write_line(f"attention kernels: {len(kernels)} tests ran {where}")
