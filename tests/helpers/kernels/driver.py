"""CUDA's driver without a GPU: Triton compiles, loads and launches for an H200, and what would be
launched is noted, byte for byte. CPU tensors pass as the GPU's.
"""

import ctypes
import gc
import subprocess
import tempfile
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from flash_versions.dispatch import launch
from flash_versions.dispatch.autograd import call
from flash_versions.dispatch.device import H200_SHARED_MEMORY, Properties, devices
from flash_versions.versions.tiles import tile_scheduler

H200 = Properties((9, 0), H200_SHARED_MEMORY, num_sms=132)
STREAM = 7


@cache
def folder():
    """Where libcuda.so.1 is, which every later search for it finds."""
    made = tempfile.mkdtemp()
    source, name = Path(__file__).with_name("libcuda.c"), "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", str(source), "-o", f"{made}/{name}"]
    subprocess.run(command, check=True)
    ctypes.CDLL(f"{made}/{name}", mode=ctypes.RTLD_GLOBAL)
    return made


class Noted:
    """The driver's notes."""

    def __init__(self):
        self.library = ctypes.CDLL(f"{folder()}/libcuda.so.1")
        self.used = ctypes.c_size_t.in_dll(self.library, "bytes_noted")
        self.version = ctypes.c_int.in_dll(self.library, "driver_version")
        self.when_launched = ctypes.c_void_p.in_dll(self.library, "when_launched")
        self.bytes = (ctypes.c_char * (1 << 20)).in_dll(self.library, "noted")

    def of(self, function, *arguments):
        """What a function launches."""
        self.used.value = 0
        function(*arguments)
        return self.bytes[: self.used.value]

    @contextmanager
    def told(self, function):
        """Inside, a function is called at each launch."""
        called = ctypes.CFUNCTYPE(None)(function)
        self.when_launched.value = ctypes.cast(called, ctypes.c_void_p).value
        try:
            yield
        finally:
            self.when_launched.value = None


@contextmanager
def driven(monkeypatch, version=13020):
    """Inside, the notes of a driver of a version."""
    if torch.cuda.is_available():
        pytest.skip("here is a driver")
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", folder())
    from triton.backends.nvidia import driver as nvidia

    class Driver(nvidia.CudaDriver):
        def __init__(self):
            self.utils, self.launcher_cls = nvidia.CudaUtils(), nvidia.CudaLauncher
            self.get_device_capability = lambda device: (9, 0)
            self.get_current_stream = lambda device: STREAM
            self.get_current_device = lambda: 0
            self.set_current_device = lambda device: None

    pair = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(JITFunction, "run", getattr(JITFunction.run, "__wrapped__"))  # noqa: B009
    monkeypatch.setattr(tile_scheduler.Counters, "take", lambda *given: pair)
    monkeypatch.setattr(call, "current_device", lambda: -1)
    # It refuses what the one for GPUs refuses: the two have one function that reads arguments.
    monkeypatch.setattr(launch, "TAKE", {"cpu": torch._C._dynamo.guards._empty_strided_cpu})
    monkeypatch.setattr(driver, "_active", Driver())
    notes = Noted()
    notes.version.value = version
    launch.native.cache_clear()
    try:
        with devices.assume(H200):
            yield notes
    finally:  # a simulated launch must find none of these
        for x in gc.get_objects():
            if type(x) is launch.Launcher:
                x.forms.clear()
