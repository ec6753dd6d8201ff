"""FA3's backward for Hopper without a GPU, as late as the rules allow."""

from dataclasses import replace

import pytest
import torch

from flash_versions import masks
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import make_request
from flash_versions.simulator.gluon.machine import ORDERS, using
from flash_versions.versions.fa3.hopper.backward import host
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon import hopper
from tests.simulator.gluon.hopper import BACKWARD, check_gradients, differentiate, gpu, qkv, taken
from tests.simulator.gluon.orders import in_every_order, in_turn

FP16 = torch.float16
USUAL = BackwardConfig()
EARLY = replace(USUAL, early=True)
HELD = replace(EARLY, held=True, stages=3)
SCHEDULES = {
    "as it is": USUAL,
    "early, three stages": replace(EARLY, stages=3),
    "held": HELD,
    "held, in order": replace(USUAL, held=True),
    "two slots of K": replace(EARLY, kv_stages=2),
    "many queries": replace(USUAL, block_q=128),
    "many queries, held": replace(HELD, block_q=128),
}


@in_turn("case", taken(lambda x: BACKWARD.left_to_portable(in_vectors(x))))
def test_every_case_that_it_takes(case, order):
    dtype = FP16 if case.causal else torch.bfloat16
    check_gradients(None, *case.inputs(dtype, "cpu"), **case.all_options("cpu"))


@pytest.mark.parametrize("schedule", ["as it is", "held"])
def test_every_order(schedule):
    """Several tiles of each program, ragged at both ends. Programs add to dQ as they come by; dK
    and dV have the same bits.
    """
    for inputs in (qkv(150, 150, 4, 64, kv_heads=2), qkv(70, 400, 2, 64, kv_heads=1)):
        do = torch.randn_like(inputs[0])

        def compute(inputs=inputs, do=do):
            gradients = check_gradients(SCHEDULES[schedule], *inputs, do=do)
            return {name: gradients[name] for name in ("dk", "dv")}

        in_every_order(compute)


@in_turn("name", SCHEDULES)
def test_every_schedule(name, order):
    """A group of heads; queries without keys, keys without queries."""
    schedule = SCHEDULES[name]
    check_gradients(schedule, *qkv(200, 150, 2, 64, kv_heads=1, dtype=FP16), causal=True)
    check_gradients(schedule, *qkv(100, 400, 1, 64), causal=True, window=(100, None))
    check_gradients(schedule, *qkv(70, 130, 1, 64), softcap=2.0)


@in_turn("M N", [(256, 384), (256, 256), (384, 256), (64, 128), (65, 129)])
def test_causal_tiles(M, N, order):
    check_gradients(USUAL, *qkv(M, N, 1, 64), causal=True)
    check_gradients(SCHEDULES["many queries"], *qkv(M, N, 1, 64), window=(None, 70))


@pytest.mark.parametrize("seed", range(2))
def test_tiles_without_queries_between_others(seed, monkeypatch):
    """The consumers give back the K of a tile that no query sees while the warpgroup of dQ, whose
    products are late, is at the tile before. If it waited for that K, it would hear of the next one
    and miss it: in some of many orders, a dead-lock.
    """
    monkeypatch.setattr(devices, "assumed", gpu(1))
    q_lengths, k_lengths = [200, 0, 0, 200, 0, 130], [100, 128, 128, 100, 100, 90]
    bounds = [torch.tensor([0, *x]).cumsum(0).int() for x in (q_lengths, k_lengths)]
    q = torch.randn(sum(q_lengths), 2, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, sum(k_lengths), 1, 64, dtype=torch.bfloat16)
    with using(order=ORDERS["late products"]._replace(seed=seed)):
        check_gradients(USUAL, q, k, v, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1])


def test_sections_of_heads(monkeypatch):
    """The heaviest tiles of several heads first; the last section has fewer."""
    monkeypatch.setattr(host, "heads_of_section", lambda request, config: 3)
    check_gradients(None, *qkv(100, 200, 2, 64, batch=2), causal=True)


def test_a_gradient_of_the_lse_and_one_number_for_all_of_o():
    q, k, v = qkv(200, 150, 2, 64)
    dlse = torch.randn(1, 2, 200)
    check_gradients(None, q, k, v, dlse=dlse)
    dlse[..., :50] = float("nan")  # of queries that see no key
    do = torch.ones(()).to(q.dtype).expand(q.shape)
    gradients = check_gradients(None, q, k, v, do=do, dlse=dlse.nan_to_num(0.0), causal=True)
    request = make_request(q, k, v, causal=True)
    poisoned, _ = differentiate(request, None, do, dlse)
    assert all(torch.equal(x, gradients[name]) for name, x in poisoned.items() if name != "dq")
    assert not poisoned["dq"].isnan().any() and not poisoned["dq"][:, :50].any()


def test_keys_past_the_end_add_nothing():
    """Where all scores are far below 0, 2^(0 - LSE) of a key that is not there overflows."""
    q, k, v = qkv(100, 70, 1, 64)
    check_gradients(None, q.abs() + 3, -k.abs() - 3, v)


# ------------------------------------------------------------------------------- head dims
HEAD_DIMS = [  # of q and k, and of v: one panel, two, on either side; halves, a pair, 64 keys
    (128, 128), (80, 80), (64, 128), (256, 256), (16, 64), (64, 24), (96, 96), (192, 192),
    (192, 128), (160, 160), (96, 64), (128, 192), (72, 72), (64, 96), (160, 200),
]  # fmt: skip
CU_SEQLENS = torch.tensor([0, 70, 70, 71, 150], dtype=torch.int32)
OF_DIMS = [
    {"causal": True},
    {"causal": True, "cu_seqlens_q": CU_SEQLENS},
    {"window": (50, 20), "softcap": 5.0},
    {"deterministic": True},
    {"causal": True, "alibi_slopes": torch.tensor([0.1, 0.3]), "sink": torch.tensor([1.0, -1.0])},
    masks.shared_prompt(50, [50, 20, 30]),
    {"causal": True, "deterministic": True},
]


@in_turn("place", range(len(HEAD_DIMS)))
def test_head_dims(place, order):
    inputs, options = hopper.of_dims(place, HEAD_DIMS, OF_DIMS)
    check_gradients(None, *inputs, **options)


@pytest.mark.parametrize("D", [72, 144])
def test_what_lies_beyond_the_head_dim_is_not_touched(D):
    """Of 72 dims the second panel has 8."""
    request = make_request(*qkv(100, 100, 2, D), causal=True)
    gradients, do = differentiate(hopper.beside_others(request, D + 8))
    assert_ok(assess_request(gradients, request, do))


# ------------------------------------------------------------------------------- refusals
def test_what_is_left_to_the_portable_kernels(monkeypatch):
    q, k, v = qkv(8, 8, 1, 64)
    assert "dropout" in BACKWARD.left_to_portable(make_request(q, k, v, dropout_p=0.5))
    for D, D_v, left in ((256, 256, False), (192, 128, False), (256, 64, True), (64, 256, True)):
        reason = BACKWARD.left_to_portable(make_request(*qkv(8, 8, 1, D, D_v=D_v)))
        assert (reason is not None and f"head_dim {D} and {D_v}" in reason) == left
    ends = {"causal": True, "query_ends": torch.full((8,), 8, dtype=torch.int32)}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert BACKWARD.left_to_portable(make_request(q, k, v)) is None
    assert "intervals" in BACKWARD.left_to_portable(make_request(q, k, v, **ends))
    fast = make_request(q, k, v, deterministic=False, **ends)
    assert BACKWARD.left_to_portable(fast) is None


@pytest.mark.parametrize(("D", "D_v", "options", "said"), [
    (128, 64, {"early": True, "held": True}, "held does not fit head_dim 128; use it up to 64"),
    (128, 128, {"block_kv": 64}, "block_kv=64 does not fit head_dim 128"),
    (256, 256, {}, "block_kv=128 does not fit head_dim 256"),
    (192, 192, {"halves": True, "panels": True}, "wider than the 320 of halves"),
    (256, 256, {"pair": True, "panels": True}, "wider than the 384 of a pair"),
    (64, 160, {"halves": True, "panels": True}, "halves do not fit head_dim 64 of q"),
    (64, 64, {"tail": 2}, "tail=2 is for tiles of a pair"),
    (192, 192, {"pair": True, "panels": True, "tail": 0}, "tail=0 is for tiles of a pair"),
    (64, 64, {"parts": 2}, "parts=2 must divide the 3 heads of a group"),
])  # fmt: skip
def test_a_schedule_for_another_call(D, D_v, options, said):
    with pytest.raises(ValueError, match=said):
        BackwardConfig(**options).check(make_request(*qkv(8, 8, 3, D, 1, D_v=D_v)))


@pytest.mark.parametrize(("options", "said"), [({"block_q": 32}, "block_q=32"),
    ({"block_kv": 32}, "block_kv=32"), ({"halves": True, "early": True}, "halves fit"),
    ({"block_kv": 64, "panels": True}, "panels, early and held fit"),
    ({"kv_stages": 2, "block_kv": 64}, "kv_stages=2 fits"),
    ({"stages": 3, "block_kv": 64}, "stages=3 does not fit block_kv=64; use 2."),
    ({"pair": True, "halves": True}, "either"), ({"stages": 1}, "stages=1")])  # fmt: skip
def test_schedules_that_are_not_possible(options, said):
    with pytest.raises(ValueError, match=said):
        BackwardConfig(**options)
