"""The measurement of what FP8 costs: its inputs, its oracle, its measures, the document."""

import json

import pytest
import torch

from docs.report import attention
from flash_versions import attention_reference
from flash_versions.bench import accuracy
from flash_versions.bench.accuracy import (
    DISTRIBUTIONS,
    SCHEMES,
    draw,
    errors,
    exact_attention,
)
from flash_versions.bench.results import merged
from tests.benchmarks.attention import fp8_accuracy

pytestmark = pytest.mark.slow


def test_distributions():
    generator = torch.Generator().manual_seed(1)
    drawn = {name: draw(name, (1000, 1000), generator).double() for name in DISTRIBUTIONS}
    # A variance of 1 and, in 0.1 % of the entries, of 100^2 or of 1 + 100.
    variances = {"gaussian": 1, "outliers": 0.999 + 0.001 * 100**2, "paper": 1 + 0.001 * 100}
    assert drawn["gaussian"].abs().max() < 7
    for name, variance in variances.items():
        assert drawn[name].var() == pytest.approx(variance, rel=0.15 if variance > 2 else 0.02)
    with pytest.raises(ValueError, match="distribution='uniform' is unknown; there are gaussian"):
        draw("uniform", (1,), generator)


def test_oracle_is_attention():
    q, k, v = torch.randn(3, 2, 40, 3, 16, dtype=torch.bfloat16)
    rows = torch.tensor([0, 7, 39])
    expected, _ = attention_reference(q.double(), k.double(), v.double())
    torch.testing.assert_close(exact_attention(q, k, v, rows), expected[:, rows])


def test_measures_of_known_errors():
    exact = torch.tensor([[3.0, 4.0], [6.0, -8.0]]).double()[None, :, None]
    assert errors(exact, exact) == {"rmse": 0, "mean": 0, "row": 0}
    found = errors(exact + torch.tensor([[0.5, 0.0], [0.0, 0.0]])[None, :, None], exact)
    assert found["rmse"] == pytest.approx((0.25 / 125) ** 0.5)
    assert found["mean"] == pytest.approx(0.5 / 21)
    assert found["row"] == pytest.approx(0.5 / 5 / 2)
    assert errors(exact * 1.5, exact) == {"rmse": 0.5, "mean": 0.5, "row": 0.5}


def test_document(tmp_path, monkeypatch):
    monkeypatch.setattr(accuracy, "HEAD_DIMS", (64,))
    monkeypatch.setattr(fp8_accuracy, "SIZES", {"cpu": (96, 2, 2)})
    out = tmp_path / "new" / "accuracy.json"
    monkeypatch.setattr("sys.argv", ["x", "--device", "cpu", "--out", str(out)])
    fp8_accuracy.main()
    document = json.loads(out.read_text())
    rows = {(row["distribution"], row["scheme"]): row["rmse"] for row in document["rows"]}
    assert set(rows) == {(d, s) for d in DISTRIBUTIONS for s in SCHEMES}
    for (distribution, scheme), rmse in rows.items():
        # Half an ulp of bf16; four bits fewer, and of Gaussian inputs twice half an ulp of e4m3.
        assert rmse < 2.0**-8 if scheme == "bf16" else rmse > 2.0**-7
        assert distribution != "gaussian" or rmse < 2.0**-3
    assert "| gaussian, D=64: relative RMSE |" in attention.fp8_accuracy(merged([document]))
