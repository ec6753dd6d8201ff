"""The kernels of FA3 and FA4 for Hopper without a GPU, as late as the rules allow."""

import math

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa4.hopper import correction
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.helpers.kernels.watch import told
from tests.simulator.gluon import hopper
from tests.simulator.gluon.hopper import (
    HOSTS,
    VERSIONS,
    attend,
    check,
    check_every_order,
    gpu,
    growing,
    qkv,
    small,
    taken,
)
from tests.simulator.gluon.orders import in_turn

by_version = pytest.mark.parametrize("version", VERSIONS)
FP16 = torch.float16
SEEN_BY_ALL = 2**20


def of_both(cases):
    """Cases of each version."""
    return [(case, version) for version in VERSIONS for case in cases]


@in_turn("case version", of_both(taken(lambda x: HOSTS["fa3"].left_to_portable(in_vectors(x)))))
def test_every_case_that_it_takes(case, version, order):
    dtype = FP16 if version == "fa3" else torch.bfloat16
    check(version, None, *case.inputs(dtype, "cpu"), **case.all_options("cpu"))


# ------------------------------------------------------------------------------- schedules
@by_version
def test_every_order(version):
    """Several tiles of each program and more blocks than slots, of which the last one is ragged;
    few keys, so that there is nothing but the ends of tiles.
    """
    check_every_order(version, small(version), *qkv(150, 330, 4, 64))
    check_every_order(version, small(version, q_stages=1), *qkv(300, 60, 4, 64))
    config = small(version, scheduler="dynamic", stages=4, late_wait=version == "fa3")
    check_every_order(version, config, *qkv(150, 330, 2, 64, kv_heads=1), causal=True)
    check_every_order(version, config, *qkv(150, 200, 4, 64), window=(70, 0))


SCHEDULES = {
    "as it is": {},
    "no turns": {"ping_pong": False},
    "one Q, dynamic": {"q_stages": 1, "scheduler": "dynamic"},
    "three consumers": {"consumers": 3, "stages": 3},
    "three consumers, dynamic": {"consumers": 3, "stages": 3, "scheduler": "dynamic"},
    "aligned tiles": {"block_kv": 128},
    "four stages": {"stages": 4},
    "one stage": {"stages": 1, "ping_pong": False},
    "grid": {"scheduler": "grid"},
}
OWN = {
    "fa3": {
        "in order": {"overlap": False},
        "late wait": {"late_wait": True, "stages": 3},
        "in order, one stage": {"overlap": False, "ping_pong": False, "stages": 1},
        "in order, three consumers": {"overlap": False, "consumers": 3},
    },
    "fa4": {
        "always rescale": {"threshold": 0.0},
        "rescale sooner": {"threshold": 4.0},
        "all by the polynomial": {"eighths": 8},
        "O in parts": {"o_columns": 64},
    },
}


@in_turn("name version", [(x, v) for v in VERSIONS for x in (SCHEDULES | OWN[v])])
def test_every_schedule(name, version, order):
    """More tiles than programs, ragged at both ends; rows without keys, a window on the left, whose
    blocks consumers pass over; D of two panels.
    """
    config = small(version, **(SCHEDULES | OWN[version])[name])
    check(version, config, *qkv(200, 330, 2, 64, kv_heads=1))
    check(version, config, *qkv(300, 200, 1, 64, batch=2), causal=True, window=(100, None))
    check(version, config, *qkv(150, 100, 1, 96), causal=True)


@pytest.mark.parametrize("programs", [1, 3])
@by_version
def test_dynamic_tiles_are_shared_out_and_the_counters_left_at_zero(version, programs, monkeypatch):
    monkeypatch.setattr(devices, "assumed", gpu(programs))
    counters = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(HOSTS["fa3"].counters, "take", lambda device: counters)
    for _ in range(2):
        config = small(version, scheduler="dynamic", stages=4)
        check(version, config, *qkv(300, 60, 3, 64), causal=True)
        assert counters.tolist() == [0, 0]


# ------------------------------------------------------------------------------- head dims
HEAD_DIMS = [  # of q and k, and of v: one panel, padded, two panels
    (128, 128), (256, 256), (192, 128), (64, 256), (256, 64), (16, 64), (64, 24), (80, 80),
    (96, 96), (160, 160), (192, 192), (128, 192), (96, 64), (66, 130),
]  # fmt: skip
CU_SEQLENS = torch.tensor([0, 70, 70, 71, 150], dtype=torch.int32)
OF_DIMS = [
    {}, {"causal": True}, {"causal": True, "cu_seqlens_q": CU_SEQLENS},
    {"window": (70, 20), "softcap": 5.0}, {"causal": True, "query_ends": torch.full((150,), 100)},
]  # fmt: skip


@in_turn("place version", of_both(range(len(HEAD_DIMS))))
def test_head_dims(place, version, order):
    inputs, options = hopper.of_dims(place, HEAD_DIMS, OF_DIMS)
    check(version, None, *inputs, **options)


@by_version
def test_what_lies_beyond_the_head_dim_is_not_read(version):
    """Of 72 dims the second panel has 8."""
    request = make_request(*qkv(100, 100, 2, 72))
    assert_ok(assess_request(attend(version, hopper.beside_others(request, 80)), request))


# ------------------------------------------------------------------------------- masks
@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize("M, N", [(256, 384), (384, 256), (250, 250), (250, 314)])
def test_causal_tiles_that_end_with_a_block(M, N, block_kv):
    """Where only a tile's first block is cut by the mask, the others are not masked."""
    for version, options in zip(VERSIONS, ({"causal": True}, {"window": (None, 128)})):
        check(version, small(version, block_kv=block_kv), *qkv(M, N, 1, 64), **options)


@in_turn("M N cut version", [
    (400, 400, False, "fa3"), (320, 192, False, "fa4"), (250, 300, True, "fa3"),
    (250, 282, True, "fa4"),
])  # fmt: skip
def test_consumers_that_end_with_a_block(M, N, cut, version, order):
    """Tiles of three consumers do not divide a block, so consumers end in different ones; but only
    the first block of each is cut, if its queries end with it.
    """
    config = small(version, consumers=3, block_kv=128)
    for options in ({"causal": True}, {"window": (None, 64)}):
        inputs = qkv(M, N, 1, 64)
        constants = HOSTS["fa3"].constants(make_request(*inputs, **options), config)
        assert (constants["CUT"], constants["UNEVEN"]) == (cut, True)
        check(version, config, *inputs, **options)


MASKS = {
    "causal": {"causal": True}, "both bounds": {"window": (70, 30)},
    "softcap": {"window": (100, 50), "softcap": 30.0},
    "packed": {"causal": True, "cu_seqlens_q": torch.tensor([0, 5, 64, 200, 201, 330]).int()},
}  # fmt: skip


@in_turn("mask version", of_both(MASKS))
def test_blocks_that_a_consumer_does_not_see(mask, version, order):
    """Their slots are given back unread; three consumers pass over more of them."""
    inputs = qkv(330, 330, 2, 64)
    for switches in ({"stages": 1}, {"consumers": 3, "stages": 3}):
        check(version, small(version, **switches), *inputs, **MASKS[mask])


@by_version
def test_a_consumer_without_rows_waits_for_a_turn(version):
    """With one slot of K, for which the consumer that has the turn waits."""
    q = torch.randn(40, 2, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 380, 2, 64, dtype=torch.bfloat16)
    ends = {"cu_seqlens_q": torch.tensor([0, 20, 40]), "cu_seqlens_k": torch.tensor([0, 190, 380])}
    check(version, small(version, stages=1), q, k, v, num_splits=1, **ends)


# ------------------------------------------------------------------------------- heads of a group
GROUPS = {
    "causal": ({"causal": True}, (4, 1), 4, {}),
    "window and sink": ({"window": (70, 20), "sink": True}, (8, 2), 4, {}),
    "softcap": ({"softcap": 3.0}, (6, 1), 2, {"consumers": 3, "stages": 3}),
    "packed": ({"causal": True, "cu_seqlens_q": [1, 71, 71, 74, 189], "sink": True}, (8, 2), 4, {}),
    "padded": ({"causal": True, "kv_lengths": [190, 3]}, (16, 1), 16, {}),
    "intervals": (
        {"causal": True, "query_ends": [60] * 60 + [150] * 90 + [SEEN_BY_ALL] * 40}, (8, 2), 4, {},
    ),
}  # fmt: skip


@in_turn("name version", of_both(GROUPS))
def test_heads_of_a_group_share_tiles(name, version, order):
    """Their queries lie one behind the other."""
    options, (heads, kv_heads), of_tile, switches = GROUPS[name]
    batch = 2 if "kv_lengths" in options or "window" in options else 1
    inputs = qkv(190, 190, heads, 96 if name == "packed" else 64, kv_heads, batch)
    options = {
        x: torch.tensor(y, dtype=torch.int32) if isinstance(y, list) else y
        for x, y in options.items()
    }
    if "sink" in options:
        options["sink"] = torch.randn(heads)
    config = small(version, heads=of_tile, scheduler="dynamic", **switches)
    check(version, config, *inputs, **options)


@pytest.mark.parametrize("switches, options, sentence", [
    ({"heads": 4}, {}, "heads=4 .* 6 query heads to a key head"),
    ({"heads": 2}, {"alibi_slopes": torch.ones(6)}, "no slope"),
    ({"tail": 0}, {}, "tail=0 is for tiles"), ({"tail": 2}, {"causal": True}, "tail=2 is for"),
    ({"heads": 3}, {}, "powers of two"),
])  # fmt: skip
def test_what_cannot_share_a_tile(switches, options, sentence):
    with pytest.raises(ValueError, match=sentence):
        check("fa3", small("fa3", **switches), *qkv(20, 20, 6, 64, kv_heads=1), **options)


# ------------------------------------------------------------------------------- FA4: rescaling
@pytest.fixture
def raised(monkeypatch):
    """The rows that were raised, (64,), of each call of `correct`."""
    found = []
    see = told(correction.correct, lambda acc, alpha: found.append(torch.tensor(alpha.a != 1)))
    monkeypatch.setattr(correction, "correct", see)
    return found


@pytest.mark.parametrize("threshold", [0.0, 4.0])
def test_every_block_raises_the_reference(threshold, raised):
    check("fa4", small("fa4", threshold=threshold), *growing(100, 300, 64, 12.0))
    if threshold > 0:
        assert len(raised) == 2 * 2 * 5  # heads, consumers, blocks
        rows = torch.stack(raised).sum(1)
        assert (rows == 0).sum() == 2 * 2  # a first block sets the reference
        assert set(rows.tolist()) == {0, 64, 100 - 64}  # the last tile ends in rows of zeros


@pytest.mark.parametrize("growth, any_raised", [(7.5, False), (8.5, True)])
def test_the_threshold_is_in_log2_units(growth, any_raised, raised):
    """From the second block on nothing grows: it is compared with what the first one set."""
    q, k, v = qkv(64, 128, 2, 64)
    q[:], k[:] = 0.0, 0.0
    q[..., 0], k[:, :64, :, 0] = 1.0, growth
    check("fa4", small("fa4"), q, k, v, scale=math.log(2))
    assert torch.stack(raised).any() == any_raised
