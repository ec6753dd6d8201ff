"""Documents say what was measured, and the benchmark measures what it says."""

import json

import pytest
from synthetic_results import SPEED, VARIANTS, document

from flash_versions import bench, peers, report, suites

RESULTS = report.read_results()
SYNTHETIC = report.merged([document()])


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_documents_say_what_was_measured(path):
    """Every marked block is what `python -m flash_versions.report` would write now."""
    text = path.read_text()
    assert report.BLOCK.search(text)
    assert report.filled(text, RESULTS) == text


def test_results_are_complete_and_consistent():
    for about in RESULTS["suites"].values():
        assert about["schema"] == bench.SCHEMA
        assert {"gpu", "driver", "torch", "triton"} <= set(about["machine"])
    wanted = {"table", "seeds", "ablation", "backward", "decode", "packed", "launch"}
    assert wanted <= set(RESULTS["suites"]) <= set(bench.SUITES)
    for row in RESULTS["rows"]:
        if row["suite"] == "launch":
            assert "reason" in row or row["host_us"] > 0
            continue
        shape = suites.Shape(**{key: row[key] for key in suites.Shape.__dataclass_fields__})
        assert shape in bench.SUITES[row["suite"]]
        if "reason" in row:
            continue
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        if row["suite"] != "decode":
            packed = suites.ragged_lengths(shape) if row["version"].endswith(" packed") else None
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
    assert split >= 0.85 * RESULTS["suites"]["decode"]["copy_tb_per_s"]
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
    shape = suites.Shape(B=2, H=16, Hkv=4, M=8192, N=8192, D=128, causal=True)
    assert shape.flops() == 2 * 2 * 2 * 16 * 8192 * 8192 * 128 / 2
    assert shape.flops([8192, 8192]) == shape.flops()
    assert shape.kv_bytes == 2 * 2 * 8192 * 4 * 128 * 2


def cells(table, first):
    """{header: cell} of the row of a table that begins with `first`."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    [row] = [line for line in lines if line[0] == first]
    return dict(zip(lines[0], row))


def without(source, wanted):
    """A document without the rows that `wanted` refuses."""
    return source | {"rows": [row for row in source["rows"] if wanted(row)]}


@pytest.mark.parametrize("name", report.TABLES)
def test_columns_are_what_was_measured(name):
    table = report.TABLES[name](SYNTHETIC)
    header = table.splitlines()[0]
    for version in ("fa3",) if name in ("ablation",) else ("fa1", "fa2", "fa3"):
        assert name == "packed" or f" {version} " in header
    body = [line for line in table.splitlines() if line.startswith("|")]
    assert len({line.count("|") for line in body}) == 1


@pytest.mark.parametrize("name", report.TABLES)
def test_a_table_that_was_not_measured_says_so(name):
    assert report.TABLES[name](SYNTHETIC | {"rows": []}).startswith("Not measured yet: `python -m ")


def test_rates_and_ratios():
    row = cells(report.rates(SYNTHETIC, "table"), "D=128 full, S=16384")
    rates = {
        r["version"]: r["tflops"]
        for r in SYNTHETIC["rows"]
        if (r["suite"], r.get("D"), r.get("N"), r.get("causal")) == ("table", 128, 16384, False)
    }
    assert row["fa3"] == f"{rates['fa3']:.0f} ({rates['fa3'] / rates['torch fa2']:.2f} x)"
    assert row["cuDNN"] == f"{rates['cudnn']:.0f}"
    assert row["flash-attn-4"] == f"{rates['flash-attn-4']:.0f}"
    seeds = cells(report.TABLES["seeds"](SYNTHETIC), "B=4, H=16, D=64 causal, S=512")
    assert seeds["fa3"].endswith(f"({SPEED['fa3'] / SPEED['cudnn']:.2f} x)")


def test_missing_competitors_and_shapes_are_dashes():
    source = without(SYNTHETIC, lambda row: row["version"] != "flash-attn-4")
    assert "flash-attn-4" not in report.rates(source, "table").splitlines()[0]

    def half(row):
        return row["version"] not in ("fa3", "torch fa2") or row.get("N") != 4096

    table = report.rates(without(SYNTHETIC, half), "table")
    row = cells(table, "D=64 causal, S=4096")
    assert (row["fa3"], row["torch FA2"]) == ("-", "-")
    assert "x" not in row["fa2"] and "x" in cells(table, "D=64 causal, S=2048")["fa2"]


def test_summary_is_the_geometric_mean_of_ratios():
    rows = [dict(row) for row in SYNTHETIC["rows"]]
    for row in rows:  # the ratio is 2 and 8 x what it was, and of one length nothing is left
        if (row["suite"], row["version"], row.get("D")) != ("table", "fa3", 128):
            continue
        row["tflops"] *= 2 if row["causal"] else 8
        if row["N"] == 512:
            del row["tflops"]
    table = report.summary(SYNTHETIC | {"rows": rows})
    ratio = 4 * SPEED["fa3"] / SPEED["cudnn"]
    assert cells(table, "D=128, S >= 2048, to cuDNN")["fa3"] == f"{ratio:.2f}"
    assert cells(table, "D=128, S < 2048, to cuDNN")["fa3"] == f"{ratio:.2f} (2 of 4)"
    ratio = SPEED["fa2"] / SPEED["flash-attn-4"]
    assert cells(table, "D=64, S < 2048, to flash-attn-4")["fa2"] == f"{ratio:.2f}"
    lacking = without(SYNTHETIC, lambda row: row["version"] != "flash-attn-4")
    assert "to flash-attn-4" not in report.summary(lacking)


def test_ablation_names_variants_and_their_ratios():
    table = report.ablation(SYNTHETIC)
    row = cells(table, "D=256 causal, S=8192")
    assert list(row) == ["TFLOP/s, then ratios to it", "fa3", *VARIANTS, "cuDNN"]
    for variant, ratio in VARIANTS.items():
        assert row[variant] == f"{ratio:.2f}"
    assert row["cuDNN"] == f"{SPEED['cudnn'] / SPEED['fa3']:.2f}"
    lost = without(SYNTHETIC, lambda r: (r["version"], r.get("N")) != ("fa3 one stage", 8192))
    assert cells(report.ablation(lost), "D=256 causal, S=8192")["one stage"] == "-"


def test_peers_in_the_caption_only_where_they_ran():
    assert "flash-attn-4 4.0, " in report.provenance(SYNTHETIC, "table")
    machine = SYNTHETIC["suites"]["table"]["machine"] | {"flash-attn-4": "not installed"}
    alone = SYNTHETIC["suites"]["table"] | {"machine": machine}
    assert "flash-attn-4" not in report.provenance({"suites": {"table": alone}}, "table")
    assert set(peers.PEERS) <= set(SPEED)


def test_a_suite_measured_twice_is_refused():
    other = document() | {"commit": "abc"}
    with pytest.raises(ValueError, match="suite 'table' is in two files of results, of commits"):
        report.merged([document(), other])


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    "D, over_cudnn, over_fa4", [(128, 1.05, 0.98), (64, 1.05, 0.95), (256, 0.97, 0.9)]
)
def test_measured_speed_of_fa3(D, over_cudnn, over_fa4, causal):
    """The bars, in the geometric mean of all lengths from 2k on, here for each mask by itself but
    for the one that is met over both.
    """
    groups = [
        group
        for group in report.shapes(RESULTS, "table").values()
        if report.any_row(group)["D"] == D and report.any_row(group)["N"] >= report.LONG
    ]
    long = [group for group in groups if report.any_row(group)["causal"] == causal]
    assert float(report.mean_ratio(long, "fa3", "cudnn")) >= over_cudnn
    assert float(report.mean_ratio(groups, "fa3", "flash-attn-4")) >= over_fa4


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [{"B": 2, "N": 8192}, {"B": 4, "N": 512}], ids=str)
def test_measured_speed_of_fa3_on_small_grids(shape, causal):
    fa3, cudnn = (rate("seeds", n, "tflops", causal=causal, **shape) for n in ("fa3", "cudnn"))
    assert fa3 >= cudnn


def test_command_rewrites_the_blocks_only(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: seeds -->\nold\n<!-- end -->\nafter\n")
    results = tmp_path / "results"
    results.mkdir()
    (results / "h200.json").write_text(json.dumps(document()))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(report, "DOCUMENTS", [page])
    assert report.main() == 0
    table = report.TABLES["seeds"](SYNTHETIC)
    expected = f"before\n<!-- results: seeds -->\n{table}<!-- end -->\nafter\n"
    assert page.read_text() == expected
    assert not list(tmp_path.glob("*.tmp"))
