"""The shapes of the measurement of divided groups, which need no GPU."""

import pytest
import torch

from flash_versions.versions.oracle.reference import forward
from tests.benchmarks.attention import parts as bench
from tests.benchmarks.attention.parts import ALL, KINDS, Call, Shape, contestants, shapes, summary


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setattr(bench, "device", "cpu")


def pairs(request):
    """Pairs of a query and a key that it sees, of all rows and heads."""
    q, k = torch.zeros_like(request.q), torch.zeros_like(request.k)
    _, lse, _ = forward(request._replace(q=q.double(), k=k.double(), v=k.double()))
    return lse.exp().sum().item()


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_that_are_counted(kind):
    lengths = {"prompt": (128, 64, 64), "packed": (100, 28, 64)}.get(kind, (192,))
    shape = Shape(kind, 64, 1, 2 if kind == "prompt" else 1, lengths)
    counted = shape.pairs * shape.batch * shape.kv_heads * bench.GROUP
    assert pairs(shape.request()) == pytest.approx(counted, rel=0.03)
    if kind == "prompt":
        assert shape.request(copies=True).q.shape[:2] == (4, 192)


def test_contestants_and_summary(monkeypatch):
    monkeypatch.setattr(Call, "of", classmethod(lambda cls, request: cls(request, *[None] * 3)))
    rows = []
    for kind in KINDS:
        found = [row for row, _ in contestants(next(shapes([kind])), [1, 2, 4])]
        assert sum(row["default"] for row in found) == 1
        assert {row["parts"] for row in found} == {1, 2, 4}
        assert any(ALL in row["name"] for row in found) == (kind in ("prompt", "causal", "packed"))
        rows += [row | {"ms_p50": 2.0 / row["parts"]} for row in found]
    lines = summary(rows).splitlines()
    assert len(lines) == len(KINDS) and "1.00 x before | 1.00 x copies" in lines[0]
