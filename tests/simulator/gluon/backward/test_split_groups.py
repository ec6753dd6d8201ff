"""Groups divided over programs in FA3's backward for Hopper, on the CPU: the parts of a tile
meet in memory, and the one that comes last adds them up.
"""

from dataclasses import replace

import pytest
import torch
from triton.experimental.gluon import language as gl

from flash_versions import masks
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import make_request
from flash_versions.simulator.gluon.machine import ORDERS
from flash_versions.versions.fa3.hopper.backward import problem, rows
from flash_versions.versions.fa3.hopper.backward.config import default_config
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon.backward.test_deterministic import GRIDS, using_grid
from tests.simulator.gluon.hopper import differentiate, gpu, qkv, requested
from tests.simulator.gluon.orders import in_turn

new_meeting = rows.new_meeting


def stale_meeting(*given):
    """`rows.new_meeting`, in memory that others have used."""
    sums, arrivals = new_meeting(*given)
    if sums is not None:
        sums.fill_(float("nan"))
        arrivals.fill_(7)
    return sums, arrivals


@pytest.fixture(autouse=True)
def four_programs(monkeypatch):
    """Programs walk from tile to tile, in stale memory."""
    monkeypatch.setattr(devices, "assumed", gpu(4))
    monkeypatch.setattr(rows, "new_meeting", stale_meeting)


def check(parts, request, do=None):
    """The gradients, within the budget."""
    config = replace(default_config(in_vectors(request)), parts=parts)
    found, do = differentiate(request, config, do)
    assert_ok(assess_request(found, request, do))
    return found


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_every_order(options, monkeypatch):
    """Tiles that are all divided, and some; then as many programs have nothing to do. Whichever
    part is the last one, it adds the parts up in their order.
    """
    monkeypatch.setattr(problem, "LEAST_STEPS", gl.constexpr(6))
    request = make_request(*qkv(200, 140, 4, 64, kv_heads=2), **options)
    do, results = torch.randn_like(request.q), []
    for order, grid in zip(ORDERS.values(), list(GRIDS)[1:]):
        with using_grid(grid, order=order):
            results.append(check(2, request, do))
    for result in results[1:]:
        assert torch.equal(result["dk"], results[0]["dk"])
        assert torch.equal(result["dv"], results[0]["dv"])


GROUPS = [  # (query heads, parts, dims, causal)
    (3, 3, (128, 128), True), (4, 2, (96, 96), False), (4, 4, (64, 128), False),
    (8, 8, (64, 64), True), (2, 2, (256, 256), False), (4, 2, (192, 192), True),
    (4, 2, (160, 160), True),
]  # fmt: skip


@in_turn("heads parts dims causal", GROUPS)
def test_groups(heads, parts, dims, causal, order):
    """Under a causal mask, tiles that few queries see may not be divided."""
    inputs = qkv(200, 140, heads, dims[0], kv_heads=1, D_v=dims[1])
    check(parts, make_request(*inputs, causal=causal))


MASKS = {
    "documents": (masks.documents([70, 1, 0, 150, 64, 15]), 12),
    "no key is seen": ({"query_ends": torch.zeros(300, dtype=torch.int32)}, 12),
    "heads of their own": (
        {
            "causal": True,
            "query_starts": torch.randint(150, (1, 300)),
            "query_ends": torch.randint(301, (1, 2, 300)),
        },
        1,
    ),
    "packed": ({"cu_seqlens_q": torch.tensor([3, 3, 180, 181, 290]), "causal": True}, 12),
    "packed, in turns": (
        {"cu_seqlens_q": torch.tensor([3, 3, 180, 181, 290]), "deterministic": True}, 1,
    ),
    "lengths": ({"kv_lengths": torch.tensor([250]), "sink": torch.zeros(4)}, 1),
    "starts": ({"kv_starts": torch.tensor([100]), "window": (70, 10)}, 1),
}  # fmt: skip


@in_turn("name", MASKS)
def test_masks(name, order, monkeypatch):
    """Also where tiles of a single step are divided."""
    options, least = MASKS[name]
    monkeypatch.setattr(problem, "LEAST_STEPS", gl.constexpr(least))
    check(2, requested(*qkv(300, 300, 4, 64, kv_heads=2), **options))


@pytest.mark.parametrize(
    ("grid", "options"), list(zip(list(GRIDS)[1:], [{"causal": True}, {"window": (100, 30)}]))
)
def test_turns(grid, options, monkeypatch):
    """With additions to dQ in turns, no program waits forever, and all gradients have the bits of
    another grid. Under a causal mask, the last tile is left to the first part.
    """
    monkeypatch.setattr(problem, "LEAST_STEPS", gl.constexpr(6))
    request = make_request(*qkv(200, 260, 4, 64, kv_heads=2), deterministic=True, **options)
    do = torch.randn_like(request.q)
    with using_grid("one by one"):
        expected = check(2, request, do)
    with using_grid(grid):
        found = check(2, request, do)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


CAUSAL, PROMPT = {"causal": True}, masks.shared_prompt(2048, [256] * 16)
CHOSEN = [  # (head_dim, queries, heads, key heads, options, parts)
    (128, 2048, 16, 4, CAUSAL, 4), (128, 8192, 32, 8, CAUSAL, 2), (128, 4096, 16, 4, {}, 1),
    (128, 512, 6, 2, {}, 3), (128, 8192, 16, 16, CAUSAL, 1), (128, 6144, 16, 4, PROMPT, 2),
    (256, 2048, 32, 8, CAUSAL, 2), (256, 8192, 32, 8, CAUSAL, 1), (192, 512, 16, 4, CAUSAL, 4),
]  # fmt: skip


@pytest.mark.parametrize(("head_dim", "tokens", "heads", "kv_heads", "options", "parts"), CHOSEN)
def test_what_is_chosen(head_dim, tokens, heads, kv_heads, options, parts):
    """On a GPU of 132 SMs; one with a single SM divides nothing."""
    q = torch.empty(1, tokens, heads, head_dim, dtype=torch.bfloat16)
    k = q[:, :, :kv_heads]
    request = make_request(q, k, k, **options)
    for sms, expected in ((1, 1), (132, parts)):
        with devices.assume(gpu(sms)):
            assert default_config(request).parts == expected
