"""Documents say what was measured, and the benchmark measures what it says."""

import json
from statistics import geometric_mean

import pytest

from flash_versions.bench import peers, results, suites
from flash_versions.bench import run as bench
from flash_versions.report import documents as report
from flash_versions.report.transformer import TABLES as TRANSFORMER
from flash_versions.versions.fa4 import ablation as fa4_ablation
from tests.helpers.committed_results import RESULTS, cells, of_suite, without
from tests.helpers.synthetic_results import (
    FP8_SPEED,
    FP8_VARIANTS,
    GPUS,
    QUANTIZE_SPEED,
    SCHEMES,
    SPEED,
    VARIANTS,
    all_results,
    document,
    trace,
)

SCRIPTS = {"context parallel", "context parallel backward", "processes", "processes checks"}
SCRIPTS |= {"grpo step", "layer", "training curve", "gemm", "gemm swiglu", "norm gemm"}
SCRIPTS |= {"norm gemm swiglu", "norm gemm numerics", "generate", "backward profile"}
SCRIPTS |= {"processes of four"}
SYNTHETIC = results.merged(all_results())
# Tables whose columns are no versions.
NAMELESS = {"packed", "quantize", "fp8 accuracy", "several gpus", "backward profile", *TRANSFORMER}


@pytest.mark.parametrize("path", report.DOCUMENTS, ids=lambda path: path.name)
def test_documents_say_what_was_measured(path):
    """Every marked block is what `python -m flash_versions.report` would write now."""
    text = path.read_text()
    assert report.BLOCK.search(text)
    assert report.filled(text, RESULTS) == text


def test_every_document_with_a_table_is_looked_at():
    names = {path.name for path in report.DOCUMENTS}
    assert {"README.md", "design.md", "measuring.md", "progression.md"} <= names


def test_results_are_complete_and_consistent():
    for about in RESULTS["suites"].values():
        assert about["schema"] == bench.SCHEMA
        assert {"gpu", "driver", "torch", "triton"} <= set(about["machine"])
    suites_of_rows = {*bench.SUITES, "backward peer", "accuracy"} - {"quick"}
    assert set(RESULTS["suites"]) - SCRIPTS == suites_of_rows
    for row in RESULTS["rows"]:
        if row["suite"] in SCRIPTS:
            continue
        if row["suite"] == "launch":
            assert "reason" in row or row["host_us"] > 0
            continue
        if row["suite"] == "accuracy":
            assert row["rmse"] > 0 and row["mean"] > 0 and row["row"] > 0
            continue
        shape = suites.Shape(**{key: row[key] for key in suites.Shape.__dataclass_fields__})
        assert shape in bench.SUITES[row["suite"].removesuffix(" peer")]
        if "reason" in row:
            continue
        assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
        if row["suite"] == "quantize":
            assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["ms_p50"] / 1e9)
        elif row["suite"] != "decode":
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
    """The bars: 95 % of a device copy from 512k tokens on, no slower than cuDNN; and splitting is
    what gets there with one sequence.
    """
    shapes = {(row["B"], row["N"]) for row in RESULTS["rows"] if row["suite"] == "decode"}
    copy = RESULTS["suites"]["decode"]["copy_tb_per_s"]
    large = [(B, N) for B, N in shapes if B * N >= 2**19]
    assert len(large) == 4
    for B, N in large:
        assert rate("decode", "fa2", "tb_per_s", B=B, N=N) >= 0.95 * copy
    for B, N in ((1, 8192), (1, 131072), (16, 8192), (64, 4096)):
        fa2, cudnn = (rate("decode", name, "tb_per_s", B=B, N=N) for name in ("fa2", "cudnn"))
        assert fa2 >= cudnn
    split = rate("decode", "fa2", "tb_per_s", B=1, N=131072)
    assert split > 2 * rate("decode", "fa2 unsplit", "tb_per_s", B=1, N=131072)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_measured_speed_of_the_backward(causal):
    """The bar: torch's FlashAttention-2 backward at (2, 16, 8192, 128)."""
    shape = {"B": 2, "N": 8192, "D": 128, "causal": causal}
    fa2 = rate("backward", "fa2", "tflops", **shape)
    assert fa2 >= rate("backward", "torch fa2", "tflops", **shape)
    assert fa2 > rate("backward", "fa1", "tflops", **shape)


def backward_ratio(suite, version, peer, D):
    """The geometric mean of the ratios of two rates from 2k on, full and causal."""
    ratios = [
        results.rate_of(group, version) / results.rate_of(group, peer)
        for group in results.shapes(RESULTS, suite).values()
        if (row := results.any_row(group))["D"] == D and row["N"] >= report.LONG
    ]
    assert len(ratios) == (2 if D == 256 else 8)
    return geometric_mean(ratios)


@pytest.mark.parametrize(
    ("suite", "peer", "D", "bar"),
    [
        ("backward", "cudnn", 128, 1.1),
        ("backward", "cudnn", 64, 1.05),
        ("backward", "cudnn", 256, 0.9),
        ("backward peer", "flash-attn-4", 128, 0.95),
        ("backward peer", "flash-attn-4", 64, 0.92),
        ("backward peer", "flash-attn-4", 256, 1.1),
    ],
)
@pytest.mark.parametrize("version", ["fa3", "fa4"])
def test_measured_speed_of_the_backward_on_hopper(version, suite, peer, D, bar):
    """The bars, as a geometric mean of the ratios from 2k on, full and causal."""
    assert backward_ratio(suite, version, peer, D) >= bar


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("version", ["fa3", "fa4"])
def test_both_runs_of_the_backward_agree(version, D):
    """Ratios of one may be read beside those of the other, as docs/backward.md says."""
    runs = (backward_ratio(suite, version, "cudnn", D) for suite in ("backward", "backward peer"))
    assert next(runs) == pytest.approx(next(runs), rel=0.01)


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


@pytest.mark.parametrize("name", report.TABLES)
def test_columns_are_what_was_measured(name):
    table = report.TABLES[name](SYNTHETIC)
    header = table.splitlines()[0]
    versions = ("fa1", "fa2", "fa3")
    if "ablation" in name or name == "fp8":
        versions = ("fa3",)
    elif name == "layer":
        versions = ("fa2", "fa3", "fa4")
    elif name in NAMELESS:
        versions = ()
    for version in versions:
        assert f" {version} " in header
    for part in table.split("\n\n"):  # of an ablation, one for each version
        body = [line for line in part.splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in body}) <= 1


@pytest.mark.parametrize("name", report.TABLES)
def test_a_table_that_was_not_measured_says_so(name):
    missing = report.TABLES[name](SYNTHETIC | {"rows": []})
    command = {"several gpus": "torchrun "} | dict.fromkeys(TRANSFORMER, "python tests/")
    command = command.get(name, "python -m ")
    assert missing.startswith(f"Not measured yet: `{command}") and missing.endswith("`.\n")


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
    source = without(SYNTHETIC, lambda row: row.get("version") != "flash-attn-4")
    assert "flash-attn-4" not in report.rates(source, "table").splitlines()[0]

    def half(row):
        return row.get("version") not in ("fa3", "torch fa2") or row.get("N") != 4096

    table = report.rates(without(SYNTHETIC, half), "table")
    row = cells(table, "D=64 causal, S=4096")
    assert (row["fa3"], row["torch FA2"]) == ("-", "-")
    assert "x" not in row["fa2"] and "x" in cells(table, "D=64 causal, S=2048")["fa2"]


def test_summary_is_the_geometric_mean_of_ratios():
    rows = [dict(row) for row in SYNTHETIC["rows"]]
    for row in rows:  # the ratio is 2 and 8 x what it was, and of one length nothing is left
        if (row["suite"], row.get("version"), row.get("D")) != ("table", "fa3", 128):
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
    lacking = without(SYNTHETIC, lambda row: row.get("version") != "flash-attn-4")
    assert "to flash-attn-4" not in report.summary(lacking)


@pytest.mark.parametrize("name", ["ablation", "ablation fp8"])
def test_ablation_names_variants_and_their_ratios(name):
    fa3, fa4, _ = report.TABLES[name](SYNTHETIC).split("\n\n")
    peer, speed = ("cuDNN", 600.0) if name == "ablation" else ("cuDNN FP8", 880.0)
    row = cells(fa3, "D=256 causal, S=8192")
    assert list(row) == ["TFLOP/s, then ratios to it", "fa3", *VARIANTS, peer]
    for variant, ratio in VARIANTS.items():
        assert row[variant] == f"{ratio:.2f}"
    assert row[peer] == f"{speed / SPEED['fa3']:.2f}"
    row = cells(fa4, "D=256 causal, S=8192")
    assert list(row) == ["TFLOP/s, then ratios to it", "fa4", *VARIANTS, "fa3", peer]
    assert row["fa3"] == f"{SPEED['fa3'] / SPEED['fa4']:.2f}"
    lost = without(SYNTHETIC, lambda r: (r.get("version"), r.get("N")) != ("fa3 one stage", 8192))
    fa3, _, _ = report.TABLES[name](lost).split("\n\n")
    assert cells(fa3, "D=256 causal, S=8192")["one stage"] == "-"


def test_fp8_is_held_against_bf16_and_cudnn():
    table = report.fp8(SYNTHETIC)
    row = cells(table, "D=64 causal, S=16384")
    assert list(row)[1:4] == ["fa3", "fa3 fp8 head", "fa3 fp8 block"]
    assert list(row)[-2:] == ["cuDNN", "cuDNN FP8"]
    for variant, ratio in FP8_VARIANTS.items():
        over_cudnn = ratio * SPEED["fa4"] / FP8_SPEED["cudnn fp8"]
        assert row[f"fa4 {variant}"].endswith(f" ({ratio:.2f} x, {over_cudnn:.2f} x)")
    assert "x" not in row["fa4"] + row["cuDNN FP8"]
    assert "; bf16 and fp8, median of" in table and ", cudnn-frontend 1.18, " in table
    alone = without(SYNTHETIC, lambda row: row.get("version") != "cudnn fp8")
    assert cells(report.fp8(alone), "D=64 causal, S=4096")["fa3 fp8 head"].endswith(" (1.40 x, -)")


def test_quantisation_is_a_share_of_a_copy():
    row = cells(report.quantization(SYNTHETIC), "(2, 32, 8192, 64)")
    assert row["copy"] == "4.20"
    for name, speed in QUANTIZE_SPEED.items():
        assert name == "copy" or row[name] == f"{speed:.2f} ({speed / 4.2:.0%})"
    alone = without(SYNTHETIC, lambda row: row.get("version") != "copy")
    assert cells(report.quantization(alone), "(2, 16, 8192, 128)")["block"] == "3.40"


def test_accuracy_has_a_column_for_each_scheme():
    table = report.fp8_accuracy(SYNTHETIC)
    for measure, factor in (
        ("relative RMSE", 3),
        ("mean error", 3 / 2),
        ("mean error of a row", 3 / 4),
    ):
        row = cells(table, f"outliers, D=64: {measure}")
        assert list(row)[1:] == list(SCHEMES)
        for scheme, error in SCHEMES.items():
            assert row[scheme] == f"{error * factor:.2g}"
    missing = without(SYNTHETIC, lambda row: (row.get("scheme"), row.get("D")) != ("head", 64))
    row = cells(report.fp8_accuracy(missing), "gaussian, D=64: relative RMSE")
    assert row["head"] == "-" and row["block"] == "0.15"


@pytest.mark.parametrize("way", ["forward", "with backward"])
def test_several_gpus_are_held_against_one(way):
    table = report.several_gpus(SYNTHETIC)
    assert table.startswith("| TFLOP/s of 2 GPUs together (times one) |")
    row = cells(table, f"{way}, H=32, Hkv=8 causal, S=131072")
    assert list(row.values())[1:] == ["600", "1140 (1.90 x)", "1020 (1.70 x)"]
    assert "NVIDIA H200, " in table and ", commit abc." in table
    suite = "context parallel backward" if way == "with backward" else "context parallel"
    assert results.names(SYNTHETIC, suite) == list(GPUS)

    def wrong(row):
        return (row["suite"], row.get("version")) == (suite, "ring")

    kept = ("suite", "version", "gpus", *results.SHAPE)
    rows = [
        {key: row[key] for key in kept} | {"reason": "over its budget"} if wrong(row) else row
        for row in SYNTHETIC["rows"]
    ]
    row = cells(report.several_gpus(SYNTHETIC | {"rows": rows}), next(iter(row.values())))
    assert list(row.values())[1:] == ["600", "-", "1020 (1.70 x)"]


@pytest.mark.skipif(not of_suite("context parallel"), reason="not measured yet")
def test_measured_speed_of_a_sequence_on_two_gpus():
    """The bar: nothing over its budget, and the ring at 1.8 x one GPU."""
    for suite in ("context parallel", "context parallel backward"):
        for row in of_suite(suite):
            assert "reason" not in row and row["gpus"] == (1 if row["version"] == "1 GPU" else 2)
            if row["version"] == "ring":
                assert row["ratio"] >= 1.8


def test_peers_in_the_caption_only_where_they_ran():
    assert "flash-attn-4 4.0, " in report.provenance(SYNTHETIC, "table")
    machine = SYNTHETIC["suites"]["table"]["machine"] | {"flash-attn-4": "not installed"}
    alone = SYNTHETIC["suites"]["table"] | {"machine": machine}
    source = SYNTHETIC | {"suites": {"table": alone}}
    assert "flash-attn-4" not in report.provenance(source, "table")
    assert "cudnn-frontend" not in report.provenance(SYNTHETIC, "table")
    assert set(peers.PEERS) <= set(SPEED | FP8_SPEED)


def test_what_is_measured_twice_is_refused():
    other = document() | {"commit": "abc"}
    with pytest.raises(ValueError, match="suite 'table' is in two files of results, of commits"):
        results.merged([document(), other])
    with pytest.raises(ValueError, match="there are 2 traces, of commits abc and abc; keep one"):
        results.merged([trace(), trace()])


def test_rows_without_a_precision_are_bf16():
    rows = [{k: v for k, v in row.items() if k != "precision"} for row in SYNTHETIC["rows"]]
    old = SYNTHETIC | {"rows": rows}
    assert report.TABLES["prefill"](old) == report.TABLES["prefill"](SYNTHETIC)
    assert "; bf16, median of 30 rounds" in report.provenance(old, "table")


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
        for group in results.shapes(RESULTS, "table").values()
        if results.any_row(group)["D"] == D and results.any_row(group)["N"] >= report.LONG
    ]
    long = [group for group in groups if results.any_row(group)["causal"] == causal]
    assert float(report.mean_ratio(long, "fa3", "cudnn")) >= over_cudnn
    assert float(report.mean_ratio(groups, "fa3", "flash-attn-4")) >= over_fa4


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [{"B": 2, "N": 8192}, {"B": 4, "N": 512}], ids=str)
def test_measured_speed_of_fa3_on_small_grids(shape, causal):
    fa3, cudnn = (rate("seeds", n, "tflops", causal=causal, **shape) for n in ("fa3", "cudnn"))
    assert fa3 >= cudnn


FP8_LENGTHS = (4096, 8192, 16384)


def fp8_ratio(name, peer, head_dim, causal, length):
    shape = {"D": head_dim, "N": length, "causal": causal}
    return rate("fp8", name, "tflops", **shape) / rate("fp8", peer, "tflops", **shape)


@pytest.mark.parametrize("name", ["fa3 fp8 head", "fa4 fp8 head"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_measured_speed_of_fp8(name, causal):
    """The bars: at D=64 cuDNN's FP8 kernel and 5 %, at D=256 and 20 %, at every length."""
    for length in FP8_LENGTHS:
        assert fp8_ratio(name, "cudnn fp8", 64, causal, length) >= 1.05
        assert fp8_ratio(name, "cudnn fp8", 256, causal, length) >= 1.2
        # Twice the rate of the tensor cores is this much: exponentials do not get faster.
        assert fp8_ratio(name, name.split()[0], 128, causal, length) >= 1.15


def test_measured_speed_of_fp8_at_128():
    """The bar: cuDNN's FP8 kernel less 3 %, over the lengths, full and causal."""
    ratios = [
        fp8_ratio("fa4 fp8 head", "cudnn fp8", 128, causal, length)
        for causal in (False, True)
        for length in FP8_LENGTHS
    ]
    assert geometric_mean(ratios) >= 0.97
    assert min(ratios) >= 0.95


def test_the_default_of_fa4_is_the_fastest_setting():
    """Within 2 % over the lengths: in FP8 at D=128 a threshold would be worth that much more, and
    costs accuracy.
    """
    for suite, D in (("ablation fp8", 128), ("ablation fp8", 256), ("ablation", 256)):
        panels = results.ablation_ratios(RESULTS, suite)["fa4"]
        for mask in ("full", "causal"):
            tricks = panels[f"D={D} {mask}"]
            assert all(tricks[name] <= 1.02 for name in fa4_ablation.SWITCHES if name in tricks)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_hadamard_halves_the_error_on_outliers(head_dim):
    """The bar: with a rotation, scales of blocks have at most half the error of one per tensor at
    D=128, and less at D=64.
    """
    error = {
        row["scheme"]: row["rmse"]
        for row in RESULTS["rows"]
        if row["suite"] == "accuracy" and row["D"] == head_dim and row["distribution"] == "outliers"
    }
    assert error["tensor"] / error["block+hadamard"] >= (2.0 if head_dim == 128 else 1.7)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_measured_bandwidth_of_quantising(head_dim):
    """The bar: one pass, at 70 % of a copy."""
    block, copy = (rate("quantize", name, "tb_per_s", D=head_dim) for name in ("block", "copy"))
    assert block >= 0.7 * copy


def test_command_rewrites_the_blocks_only(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- results: seeds -->\nold\n<!-- end -->\nafter\n")
    folder = tmp_path / "results"
    folder.mkdir()
    (folder / "h200.json").write_text(json.dumps(document()))
    monkeypatch.setattr(report, "ROOT", tmp_path)
    monkeypatch.setattr(results, "RESULTS", folder)
    monkeypatch.setattr(report, "DOCUMENTS", [page])
    assert report.main() == 0
    table = report.TABLES["seeds"](SYNTHETIC)
    expected = f"before\n<!-- results: seeds -->\n{table}<!-- end -->\nafter\n"
    assert page.read_text() == expected
    assert not list(tmp_path.glob("*.tmp"))
