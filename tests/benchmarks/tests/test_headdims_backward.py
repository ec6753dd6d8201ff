"""The candidates of the backwards' measurement, which need no GPU."""

import pytest

from tests.benchmarks.attention import headdims_backward as bench
from tests.benchmarks.attention.headdims_backward import DIMS, names


@pytest.mark.parametrize("dims", [*DIMS, (64, 64)], ids=str)
def test_the_default_is_a_candidate(dims, monkeypatch):
    everything = names(dims, causal=True)
    monkeypatch.setattr(bench, "only_defaults", True)
    few = names(dims, causal=True)
    assert few[0] == "padded" and len(few) <= 2 and set(few) <= set(everything)
    expected = {(192, 128): "halves", (160, 160): "halves", (192, 192): "pair", (96, 96): "panels"}
    assert few[-1] == expected.get(dims, few[-1])
    assert "other default" not in few or dims == (64, 64)


def test_candidates_by_name(monkeypatch):
    """The default comes along; what does not fit a shape is left out."""
    monkeypatch.setattr(bench, "only", ("pair", "pair, 2 dO"))
    assert names((192, 192), causal=True) == ["pair"]
    assert names((160, 160), causal=True) == ["halves", "pair", "pair, 2 dO"]
