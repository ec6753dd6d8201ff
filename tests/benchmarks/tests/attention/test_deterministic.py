"""The contestants of the deterministic backward's measurement, which need no GPU."""

import torch

from flash_versions.dispatch.request import make_request
from tests.benchmarks.attention import deterministic as bench


def test_contestants_have_sections_of_their_own(monkeypatch):
    """Each is another plan; the usual section has no second contestant."""
    x = torch.empty(8, 1024, 16, 128, dtype=torch.bfloat16)
    request = make_request(x, x[:, :, :4], x[:, :, :4], causal=True, deterministic=True)
    given = bench.Inputs(request, x, x, x)
    launched = []
    monkeypatch.setattr(bench, "inputs", lambda *_: given)
    monkeypatch.setattr(
        bench.kernel, "launch", lambda plan, *_: launched.append(plan) or (None,) * 3
    )
    named = dict(bench.contestants(0, 1024))
    sections = [x for x in named if "section" in x]
    for name in ("fa3", "fa3 deterministic", *sections):
        named[name]()()
    fast, ordered, *others = launched
    assert not fast.constants["ORDERED"] and ordered.constants["ORDERED"]
    assert len({plan.numbers for plan in (ordered, *others)}) == 1 + len(sections) == 3
