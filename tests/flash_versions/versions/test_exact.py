"""batch_invariant=True: the bits of a row do not depend on what else is in the call."""

from dataclasses import replace

import pytest
import torch

from flash_versions import VERSIONS, attention
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import make_request
from flash_versions.verify import pairs
from flash_versions.verify.pairs import LAYOUTS, PARTS, Pair, compare, draw
from flash_versions.versions.fa3.hopper import totals
from flash_versions.versions.oracle.budget import assess_request
from tests.flash_versions.versions.test_attention import LATER
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon.orders import in_every_order

EXACT = [name for name, version in VERSIONS.items() if not version.inexact]
# FA3 and FA4 run FA2's exact kernels but on Hopper; pairs drawn by lot ask them everywhere.
by_kernels = pytest.mark.parametrize(
    "version", [pytest.param(x, marks=[pytest.mark.gpu] * (x in LATER)) for x in EXACT]
)
PLAIN = Pair(
    number=0, layout="packed", part="whole", dtype="bfloat16", heads=4, kv_heads=2,
    head_dim=64, head_dim_v=64, causal=True, window=None, softcap=None, alibi=False, sink=False,
    length=150, others=(40, 133), place=1, begin=0, end=150, page=16, shared=True, backward=False
)  # fmt: skip
PARTS_OF_150 = {"whole": (0, 150), "chunk": (67, 131), "decode": (149, 150)}


def differing(version, device, **changes):
    """The results of a pair, like PLAIN but for some changes, of which bits differ."""
    found = compare(version, replace(PLAIN, **changes), device)
    assert found["elements"] > 0
    return {name for name, number in found["differ"].items() if number}


def test_one_bit_is_a_difference(device, monkeypatch):
    really, added = pairs.results, iter((0, 1))

    def spoiled(*given):
        found = really(*given)
        found["lse"].view(torch.int32)[0, 0] += next(added)
        return found

    monkeypatch.setattr(totals, "SPLIT_KEYS", totals.SPLIT_KEYS)  # it is changed
    monkeypatch.setattr(pairs, "results", spoiled)
    assert "{'lse': 1}" in pairs.outcome(True, "fa2", 0)["why"]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "documents"])
@by_kernels
def test_a_row_has_the_same_bits_wherever_it_is(version, layout, part, device):
    begin, end = PARTS_OF_150[part]
    changes = {"layout": layout, "part": part, "begin": begin, "end": end}
    assert not differing(version, device, **changes)
    assert not differing(version, device, dtype="float32", number=1, **changes)


CHANGES = {
    "documents": {"layout": "documents"},
    "window": {"window": (40, 0), "layout": "pages"},
    "bidirectional": {"causal": False, "window": (30, 20), "layout": "left"},
    "softcap": {"softcap": 5.0, "layout": "right"},
    "alibi": {"alibi": True, "layout": "left"},
    "sink": {"sink": True, "layout": "pages"},
    "two widths": {"head_dim": 96, "head_dim_v": 48},
    "a key head": {"heads": 8, "kv_heads": 1, "dtype": "float16"},
}


@pytest.mark.parametrize("name", CHANGES)
@by_kernels
def test_options_change_nothing_of_it(version, name, device):
    assert not differing(version, device, **CHANGES[name])


@pytest.mark.parametrize("layout", ["rows", "packed", "left", "right", "documents"])
@by_kernels
def test_so_have_gradients(version, layout, device):
    assert not differing(version, device, layout=layout, backward=True)
    assert not differing(version, device, layout=layout, backward=True, dtype="float32", sink=True)


@pytest.fixture
def on_hopper(monkeypatch):
    """Kernels for Hopper, simulated, with short splits."""
    monkeypatch.setattr(totals, "SPLIT_KEYS", pairs.SMALL_SPLITS)
    with devices.assume(pairs.HOPPER):
        yield "cpu"


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x != "documents"])
def test_on_hopper_decoding_is_prefill(layout, part, on_hopper):
    """In two or three splits, which a step of decoding divides over programs."""
    begin, end = PARTS_OF_150[part]
    changes = {"layout": layout, "part": part, "length": 300, "others": (40, 390)}
    changes |= {"begin": begin + 100, "end": end + 100, "head_dim": 128, "sink": layout == "left"}
    assert not differing("fa3", on_hopper, **changes)


@pytest.mark.parametrize(("head_dim", "rows"), [(64, 400), (128, 400), (128, 1)])
def test_splits_in_every_order(head_dim, rows, on_hopper):
    """Consumers with unlike numbers of splits take turns; programs merge what others have left."""
    q, k, v = torch.randn(3, 2, 400, 2, head_dim, dtype=torch.float16)
    given = {"causal": True, "window": (200, 0), "kv_lengths": torch.tensor([400, 290])}

    def compute():
        o, lse = attention(q[:, -rows:], k, v, return_lse=True, batch_invariant=True, **given)
        return {"o": o, "lse": lse}

    in_every_order(compute)


@pytest.mark.parametrize("name", CHANGES)
def test_options_on_hopper(name, on_hopper):
    assert not differing("fa4", on_hopper, **CHANGES[name])


@pytest.mark.parametrize("N", [1, 300])
def test_splits_are_within_the_error_budget(N, on_hopper):
    q, k, v = (torch.randn(2, N, h, 64, dtype=torch.float16) for h in (4, 2, 2))
    sink = torch.randn(4)
    for rows in (q, q[:, -1:]):
        given = {"causal": True, "sink": sink, "kv_lengths": torch.tensor([N, N // 2 + 1])}
        o, lse = attention(rows, k, v, return_lse=True, batch_invariant=True, **given)
        found = assess_request({"o": o, "lse": lse}, make_request(rows, k, v, **given))
        assert_ok(found)


@pytest.mark.parametrize("version", EXACT)
def test_pairs_drawn_by_lot(version, device):
    for number in range(12):
        pair = draw(number, small=True)
        assert not any(compare(version, pair, device)["differ"].values()), pair


def test_a_pair_finds_what_the_fast_kernels_round_apart(monkeypatch):
    def fast(*given, batch_invariant, **options):
        assert batch_invariant
        return attention(*given, **options)

    monkeypatch.setattr(pairs, "attention", fast)
    changes = {"part": "decode", "begin": 149, "layout": "left"}  # FA4 rescales rows together
    assert "o" in differing("fa4", "cpu", **changes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_it_is_within_the_error_budget(dtype, device):
    shapes = (9, 4), (200, 2), (200, 2)
    q, k, v = (torch.randn(2, n, h, 64, device=device, dtype=dtype) for n, h in shapes)
    o, lse = attention(q, k, v, causal=True, return_lse=True, batch_invariant=True)
    assert_ok(assess_request({"o": o, "lse": lse}, make_request(q, k, v, causal=True)))


def test_eight_bits_with_scales_of_heads(device):
    x = torch.randn(3, 1, 90, 2, 64, device=device)
    q, k, v = (part.to(torch.float8_e4m3fn) for part in x)
    scales = {name: torch.full((1, 2), 0.5, device=device) for name in DESCALES}
    options = scales | {"causal": True, "batch_invariant": True, "version": "fa3"}
    whole = attention(q, k, v, **options)
    assert torch.equal(whole[:, -1:], attention(q[:, -1:], k, v, **options))


DESCALES = "q_descale", "k_descale", "v_descale"
Q = torch.ones(1, 4, 2, 64)
HALF = Q.half()
EIGHT = Q.to(torch.float8_e4m3fn)
REFUSED = {
    "fa1": ({"version": "fa1"}, "normalises o in every block.*use 'fa2'"),
    "a baseline": ({"version": "reference"}, "sums follow the shape"),
    "dropout": ({"dropout_p": 0.1}, "dropout_p=0.1 is not possible with batch_invariant"),
    "splits": ({"num_splits": 2}, "num_splits=2 is not possible with batch_invariant"),
    "quantised in the call": ({"q": HALF, "k": HALF, "v": HALF, "precision": "fp8"}, "many rows"),
    "scales of blocks": (
        {"q": EIGHT, "k": EIGHT, "v": EIGHT, "v_descale": torch.ones(1, 2, 1)}, "each block"),
    "no flag": ({"batch_invariant": 1}, "batch_invariant=1 must be True or False"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_exact_is_refused(case):
    given, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        attention(**{"q": Q, "k": Q, "v": Q, "batch_invariant": True} | given)
