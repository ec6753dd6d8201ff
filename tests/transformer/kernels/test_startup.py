"""The start on a GPU, as far as it can be seen without one."""

import io
import sys

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs

from flash_versions.inspect.compiled import compiling
from tests.transformer.generation.test_progress import Terminal
from transformer.model.kernels import startup


@triton.jit
def kernel(x, VALUE: tl.constexpr):
    tl.store(x, VALUE)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_compiling_is_said_once_where_it_is_done(stream, monkeypatch, tmp_path):
    """Two kernels are compiled and a third one within the answer; the next process has them."""
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    for first in (True, False):
        says = startup.Compiling()
        monkeypatch.setattr(knobs.compilation, "listener", says.listen)
        monkeypatch.setattr(sys, "stderr", stream())
        kernel.device_caches.clear()
        with compiling("sm_90"):
            for value in range(3):
                kernel[(1,)](torch.empty(16), value)
                if value == 1:
                    says.end()
        said = sys.stderr.getvalue()
        assert said.startswith(startup.NOTICE) and said.endswith("\n") if first else not said
        assert (" 2kernel [" in said) == (first and stream is Terminal)
        assert " 3kernel [" not in said  # and not the rate, such as 23.43kernel/s


def test_what_fails_early_is_left_to_where_it_is_needed(monkeypatch):
    """On a CPU nothing is begun."""
    begun = []
    monkeypatch.setattr(knobs.compilation, "listener", None)
    monkeypatch.setattr(startup, "load_compiler", lambda: begun.append("compiler"))
    monkeypatch.setattr(startup, "load_products", lambda *given: begun.append(given) or 1 / 0)
    for device in map(torch.device, ("cpu", "cuda")):
        with startup.warming_up(device, torch.bfloat16):
            assert (knobs.compilation.listener is None) == (device.type == "cpu")
    assert begun == ["compiler", (torch.device("cuda"), torch.bfloat16)]
