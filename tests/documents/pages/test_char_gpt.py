"""docs/use/examples/char_gpt.py, run short: the same losses with our attention as with torch's."""

import re
import runpy
import sys

import pytest

from tests.helpers import ROOT

SCRIPT = ROOT / "docs/use/examples/char_gpt.py"
# Enough text for a step that the loss falls whatever the documents say, which it learns from.
SHORT = "--steps 8 --batch 8 --length 16 --width 32 --heads 2 --device cpu"


@pytest.mark.parametrize("names", ["sdpa auto", "fa1"])
def test_the_script(names, tmp_path, monkeypatch, capsys):
    plt = pytest.importorskip("matplotlib.pyplot", reason="needs matplotlib: the extra plot")
    plt.close("all")
    command = f"{SCRIPT} --attention {names} {SHORT} --out {tmp_path / 'run'}"
    monkeypatch.setattr(sys, "argv", command.split())
    runpy.run_path(str(SCRIPT), run_name="__main__")
    lines = plt.gca().get_lines()
    assert [line.get_label() for line in lines] == names.split()
    assert [x.name for x in (tmp_path / "run").iterdir()] == ["loss.png"]
    curves = [line.get_ydata() for line in lines]
    for curve in curves:
        assert len(curve) == 8 and curve[-1] < curve[0] - 0.5
        # Adam divides by the size of a gradient, so roundings grow: a thousandth of a nat at most.
        assert max(abs(a - b) for a, b in zip(curve, curves[0])) < 1e-3
    assert len(re.findall(r"loss \d\.\d{4} at first", capsys.readouterr().out)) == len(curves)
    plt.close("all")
