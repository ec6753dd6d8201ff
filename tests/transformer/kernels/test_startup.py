"""The start on a GPU, as far as it can be seen without one."""

import io
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from flash_versions.inspect.compiled import compiling as compiling_for
from tests.transformer.generation.test_progress import Terminal
from transformer.model.kernels import startup


@triton.jit
def one_kernel(x):
    tl.store(x, 1.0)


@triton.jit
def other_kernel(x):
    tl.store(x, 2.0)


def started(stream, monkeypatch) -> str:
    """What a process says that compiles what it does not find in the cache."""
    compiling = startup.Compiling()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(knobs.compilation, "listener", compiling.listen)
    with compiling_for("sm_90"):
        for kernel in (one_kernel, other_kernel):
            kernel.device_caches.clear()  # as in a new process
            kernel[(1,)](torch.empty(16))
    compiling.end()
    return stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_compiling_is_said_once_and_only_where_it_is_done(stream, monkeypatch, tmp_path):
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    said = started(stream(), monkeypatch)
    assert said.count(startup.NOTICE) == 1
    assert ("2kernel" in said) == (stream is Terminal) and said.endswith("\n")
    assert started(stream(), monkeypatch) == ""


def test_nothing_is_said_within_an_answer():
    compiling = startup.Compiling()
    compiling.end()
    compiling.listen(cache_hit=False)
    assert not compiling.said and compiling.bar is None


def test_what_fails_ahead_is_left_to_the_one_who_needs_it(monkeypatch):
    """Here there is no GPU; on a CPU nothing is begun."""
    begun = []
    monkeypatch.setattr(knobs.compilation, "listener", None)
    monkeypatch.setattr(startup, "load_compiler", lambda: begun.append("compiler"))
    monkeypatch.setattr(startup, "load_products", lambda *given: begun.append(given) or 1 / 0)
    for device in map(torch.device, ("cpu", "cuda")):
        with startup.warming_up(device, torch.bfloat16):
            assert (knobs.compilation.listener is None) == (device.type == "cpu")
    assert begun == ["compiler", (torch.device("cuda"), torch.bfloat16)]
