"""AOTInductor is refused where its packages are not known to load."""

import shutil

import pytest
import torch
from torch import nn

from flash_versions.dispatch.autograd import operators
from flash_versions.flash_attn import flash_attn_func


class Model(nn.Module):
    """(batch, length, 3, heads, head_dim) to (batch, length, heads, head_dim)."""

    def forward(self, x):
        return flash_attn_func(*x.unbind(2), causal=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler, g++")
def test_where_packages_are_not_known_to_load_they_are_refused(monkeypatch, tmp_path):
    """Before anything is written, and AOTInductor alone; a CPU passes for a GPU here."""
    assert operators.NOT_AHEAD_OF_TIME == ("cuda",)
    monkeypatch.setattr(operators, "NOT_AHEAD_OF_TIME", ("cpu",))
    x, package = torch.randn(1, 24, 3, 2, 16), tmp_path / "model.pt2"
    with torch.no_grad():
        exported = torch.export.export(Model(), (x,))
        with pytest.raises(RuntimeError, match="cannot be packaged by AOTInductor for a GPU"):
            torch._inductor.aoti_compile_and_package(exported, package_path=str(package))
    assert not package.exists()
