"""The candidates of the backwards' measurement, which need no GPU."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.hopper.backward.config import default_config
from tests.benchmarks.attention import headdims_backward as bench
from tests.benchmarks.attention.headdims_backward import DIMS, candidates, names


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
    assert names((160, 160), causal=True) == ["halves", "pair"]


@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_candidate_can_be_checked(dims, monkeypatch):
    """Also by calls with groups of heads, whose default divides them on a GPU."""

    def divided(request):
        config = default_config(request)
        return config if config.by_halves else replace(config, parts=request.group)

    monkeypatch.setattr(bench, "only_defaults", True)
    monkeypatch.setattr(bench, "default_config", divided)
    heads = (4, dims[0]), (2, dims[0]), (2, dims[1])
    q, k, v = (torch.empty(2, 333, n, d, dtype=torch.bfloat16) for n, d in heads)
    found = candidates(make_request(q, k, v, causal=True))
    assert set(names(dims, causal=True)) <= set(found)
