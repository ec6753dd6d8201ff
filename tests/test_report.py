"""Documents say what was measured, and the benchmark measures what it says."""

import json
from dataclasses import replace

import pytest
import torch

from flash_versions import bench, report

RESULTS = json.loads(report.RESULTS.read_text())


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_documents_say_what_was_measured(path):
    """Every marked block is what `python -m flash_versions.report` would write now."""
    text = path.read_text()
    assert report.BLOCK.search(text)
    assert report.filled(text, RESULTS) == text


def test_results_are_complete_and_consistent():
    assert RESULTS["schema"] == bench.SCHEMA
    assert {"gpu", "driver", "torch", "triton"} <= set(RESULTS["machine"])
    assert {row["suite"] for row in RESULTS["rows"]} == set(bench.SUITES)
    for row in RESULTS["rows"]:
        if row["suite"] == "launch":
            assert "reason" in row or row["host_us"] > 0
            continue
        shape = bench.Shape(**{key: row[key] for key in bench.Shape.__dataclass_fields__})
        assert shape in bench.SUITES[row["suite"]]
        if "reason" in row:
            continue
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        if row["suite"] != "decode":
            packed = bench.ragged_lengths(shape) if row["version"] == "fa2 packed" else None
            flops = shape.flops(packed) * (2.5 if row["pass"] == "backward" else 1)
            assert row["tflops"] == pytest.approx(flops / row["ms_p50"] / 1e9)
        else:
            assert row["tb_per_s"] == pytest.approx(shape.kv_bytes / row["ms_p50"] / 1e9)


def rate(suite, name, unit, **wanted):
    [row] = [
        row
        for row in RESULTS["rows"]
        if row["suite"] == suite
        and row["version"] == name
        and all(row[key] == value for key, value in wanted.items())
    ]
    return row[unit]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_measured_speed_of_fa2(causal):
    """The bar: 1.25 x torch's FlashAttention-2 at (2, 16, 8192, 128), and FA1 slower than FA2."""
    shape = {"B": 2, "N": 8192, "D": 128, "causal": causal}
    fa2 = rate("table", "fa2", "tflops", **shape)
    assert fa2 >= 1.25 * rate("table", "torch fa2", "tflops", **shape)
    assert fa2 > rate("table", "fa1", "tflops", **shape)


def test_measured_bandwidth_of_decoding():
    """The bar: 85 % of a device copy with a long cache, and splitting is what gets there."""
    split = rate("decode", "fa2", "tb_per_s", N=131072)
    assert split >= 0.85 * RESULTS["copy_tb_per_s"]
    assert split > 2 * rate("decode", "fa2 unsplit", "tb_per_s", N=131072)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_measured_speed_of_the_backward(causal):
    """The bar: torch's FlashAttention-2 backward at (2, 16, 8192, 128)."""
    shape = {"B": 2, "N": 8192, "D": 128, "causal": causal}
    fa2 = rate("backward", "fa2", "tflops", **shape)
    assert fa2 >= rate("backward", "torch fa2", "tflops", **shape)
    assert fa2 > rate("backward", "fa1", "tflops", **shape)


@pytest.mark.parametrize("suite", ["packed", "packed backward"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_measured_speed_of_packed_sequences(causal, suite):
    """The bar: 0.9 x the rate of a rectangle with as many rows."""
    packed = rate(suite, "fa2 packed", "tflops", causal=causal)
    assert packed >= 0.9 * rate(suite, "fa2", "tflops", causal=causal)


def test_shapes_count_what_they_should():
    shape = bench.Shape(B=2, H=16, Hkv=4, M=8192, N=8192, D=128, causal=True)
    assert shape.flops() == 2 * 2 * 2 * 16 * 8192 * 8192 * 128 / 2
    assert shape.flops([8192, 8192]) == shape.flops()
    assert shape.kv_bytes == 2 * 2 * 8192 * 4 * 128 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="refuses only without a GPU")
def test_benchmark_without_a_gpu_says_so(tmp_path, capsys):
    assert bench.main(["--out", str(tmp_path / "results.json")]) == 2
    assert capsys.readouterr().err.startswith("error: no GPU found")
    assert not list(tmp_path.iterdir())


@pytest.mark.gpu
def test_benchmark_measures_and_writes(tmp_path, monkeypatch):
    small = bench.Shape(B=1, H=4, Hkv=2, M=256, N=256, D=64, causal=True)
    monkeypatch.setitem(bench.SUITES, "table", [small])
    path = tmp_path / "new" / "results.json"
    assert bench.main(["--suite", "table", "--rounds", "10", "--out", str(path)]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert {"fa1", "fa2", "torch fa2", "cudnn"} == {row["version"] for row in rows}
    assert all(row["tflops"] > 0 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("suite", ["table", "backward"])
def test_benchmark_refuses_to_time_a_wrong_kernel(suite, monkeypatch):
    shape = bench.Shape(B=1, H=4, Hkv=2, M=256, N=256, D=64, causal=True)
    right = bench.competitors

    def wrong(*arguments):
        for one in right(*arguments):
            if one.name == "fa1":
                one = replace(one, function=lambda *x, f=one.function: f(*x) * 1.05)
            yield one

    monkeypatch.setattr(bench, "competitors", wrong)
    rows = {row["version"]: row for row in bench.measure(suite, shape, rounds=10)}
    assert "wrong output" in rows["fa1"]["reason"] and "ms_p50" not in rows["fa1"]
    assert "ms_p50" in rows["fa2"]
