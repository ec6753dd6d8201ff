"""Figures of products and of generation: what is drawn is what was measured."""

import pytest

from flash_versions.bench import results
from flash_versions.plot import transformer as plot_transformer
from tests.helpers.committed_results import without
from tests.helpers.synthetic_results import all_results

SYNTHETIC = results.merged(all_results())


def test_bars_are_ratios_to_the_library():
    data = plot_transformer.products_data(SYNTHETIC)
    assert list(data) == ["gemm", "norm gemm"]
    assert data["gemm"]["square 2048\n2048 x 2048 x 2048"] == {"ours": pytest.approx(0.96)}
    figure = plot_transformer.draw_products(data)
    for ax in figure.axes:
        assert [bar.get_width() for bar in ax.containers[0]] == pytest.approx([0.96, 0.96])
    lost = without(SYNTHETIC, lambda row: row.get("version") != "cuBLAS")
    assert list(plot_transformer.products_data(lost)) == ["norm gemm"]


def test_lines_are_tokens_per_second():
    data = plot_transformer.generation_data(SYNTHETIC)
    one = data["llama-3.2-1b"]
    assert one["batch"]["ours"] == [(1, 1250.0), (64, 32000.0)]
    assert one["prompt"]["transformers"] == [(512, 312.5), (4096, pytest.approx(1000 / 3.6))]
    figure = plot_transformer.draw_generation(data)
    for ax, axis in zip(figure.axes, ("batch", "prompt")):
        lines = {line.get_gid(): [*zip(*line.get_data())] for line in ax.lines}
        for case, panels in data.items():
            for who, points in panels[axis].items():
                assert lines[f"{case} {who}"] == points
                assert (ax.lines[0].get_linestyle() == "-") == (
                    ax.lines[0].get_gid()[-4:] == "ours"
                )


def test_nothing_is_drawn_of_nothing():
    nothing = SYNTHETIC | {"rows": []}
    assert plot_transformer.products_data(nothing) is None
    assert plot_transformer.generation_data(nothing) is None
