"""The random dense shapes that are measured, which need no GPU."""

from collections import Counter

import pytest
import torch

from flash_versions import attention_reference
from tests.benchmarks.attention import dense as bench
from tests.benchmarks.attention.dense import GROUPS, HEAD_DIMS, SHAPES, Shape, contestants, summary

DRAWN = [Shape.drawn(number) for number in range(SHAPES)]


def test_every_kind_comes_up_equally_often():
    for name, kinds in {"head_dim": HEAD_DIMS, "group": GROUPS, "causal": (True, False)}.items():
        found = Counter(getattr(shape, name) for shape in DRAWN)
        assert set(found) == set(kinds) and len(set(found.values())) == 1
    assert all(bench.SHORTEST <= shape.queries <= shape.keys <= bench.LONGEST for shape in DRAWN)
    assert all(shape.heads % shape.group == 0 for shape in DRAWN)
    assert sum(shape.queries < shape.keys for shape in DRAWN) >= 5


@pytest.mark.parametrize("shape", DRAWN[:4], ids=lambda shape: str(shape.number))
def test_pairs_that_are_counted(shape):
    shape = shape.short
    assert shape.keys < 2048
    q, k = torch.zeros(1, shape.queries, 1, 1), torch.zeros(1, shape.keys, 1, 1)
    _, lse = attention_reference(q, k, k, causal=shape.causal, return_lse=True)
    assert lse.double().exp().sum().item() == pytest.approx(shape.pairs)


def test_contestants_and_summary():
    rows = []
    for shape in DRAWN[:8]:
        found = [row for row, _ in contestants(shape)]
        unequal = shape.causal and shape.queries < shape.keys
        assert ("cudnn" in {row["version"] for row in found}) == (not unequal)
        assert [row["version"] for row in found].count("fa3") == 2
        rows += found
    speed = {"fa3": 500.0, "fa4": 450.0, "cudnn": 400.0}
    rows = [row | {"tflops": speed[row["version"]]} for row in rows if row["version"] in speed]
    lines = summary(rows).splitlines()
    assert lines[-2:] == [
        f"{which}: 1.25 of the better peer, none below 1.25" for which in ("forward", "backward")
    ]
