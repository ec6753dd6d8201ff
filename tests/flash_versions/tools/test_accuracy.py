"""The measurement of what FP8 costs: its inputs, its oracle, its measures, the document."""

import json

import pytest

from docs.report import attention
from flash_versions.bench.results import merged
from tests.benchmarks.attention import fp8_accuracy
from tests.benchmarks.attention.fp8_accuracy import DISTRIBUTIONS, SCHEMES

pytestmark = pytest.mark.slow


def test_document(tmp_path, monkeypatch):
    monkeypatch.setattr(fp8_accuracy, "HEAD_DIMS", (64,))
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
    assert "| gaussian, D=64 |" in attention.fp8_accuracy(merged([document]))
