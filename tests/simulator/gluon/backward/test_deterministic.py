"""The deterministic backward for Hopper on the CPU: every block of dQ is added up from the
last tile of keys to the first, whatever programs do at the same time.

What is recorded is what reaches memory: which program's TMA has added to which box of dQ. Which
tile of keys a program has is seen by the K that it loads.
"""

import math
from collections import defaultdict
from itertools import cycle
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import make_request
from flash_versions.simulator.dtypes import float32
from flash_versions.simulator.gluon.machine import ORDERS, using
from flash_versions.simulator.gluon.tma import Load, Store
from flash_versions.versions.fa3.hopper.backward import config, host
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig, default_config
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon import hopper
from tests.simulator.gluon.hopper import gpu, qkv


def shuffled(programs):
    return torch.randperm(programs).tolist()


# How many programs run at once, and in which order they begin.
GRIDS = {
    "one by one": (1, range),
    "one by one, backwards": (1, lambda programs: reversed(range(programs))),
    "three at once, shuffled": (3, shuffled),
    "eight at once": (8, range),
    "all at once, backwards": (1000, lambda programs: reversed(range(programs))),
}


@pytest.fixture
def grid(request):
    """Run a test with a grid, named by its parameter."""
    with using_grid(request.param):
        yield


def using_grid(name, **options):
    resident, begun = GRIDS[name]
    return using(resident=resident, begun=begun, **options)


class Recorder:
    """Watches a launch: the tile of keys of each program, and what has added to each box."""

    def __init__(self):
        self.keys = {}  # program -> (sequence, key head, first key), of packed keys in all
        self.added = defaultdict(list)  # corner of a box -> programs

    def __call__(self, partition, what, tile, barrier, cycle):
        program = partition.program.number
        if what == "copy" and program not in self.keys and isinstance(tile, Load):
            self.keys[program] = tile.coordinates
        if what == "stored" and isinstance(tile, Store) and tile.desc.dtype is float32:
            self.added[tuple(tile.coordinates)].append(program)

    def tiles(self):
        """{corner of a box of dQ: the first keys of the tiles that have added, in their order}."""
        return {
            corner: [first_key(self.keys[program]) for program in programs]
            for corner, programs in self.added.items()
        }


def first_key(corner):
    """The first key of a box of K; of a ragged one with the first row of its sequence."""
    if len(corner) == 4:
        return corner[2]
    far, end, _, row, _ = corner
    return end + row - far


def random_request(M, N, heads=2, kv_heads=1, D=64, batch=1, **options):
    return make_request(*qkv(M, N, heads, D, kv_heads, batch), deterministic=True, **options)


def differentiate(request, schedule=None, do=None, programs=None):
    """(gradients by name, do, Recorder): with so many programs, or with one for each tile, so that
    what a program adds is what its tile adds.
    """
    schedule = schedule or default_config(request)
    recorder, by_tile = Recorder(), patch.dict(host.SCHEDULERS, {} if programs else {True: "grid"})
    with using(watcher=recorder), devices.assume(gpu(programs or 1000)), by_tile:
        gradients, do = hopper.differentiate(request, schedule, do)
    return gradients, do, recorder


def check(request, schedule=None, seen=None, block_kv=128, block_q=64):
    """Gradients are within the budget, and dQ is added up in the order of the definition."""
    gradients, do, recorder = differentiate(request, schedule)
    assert_ok(assess_request(gradients, request, do))
    assert in_order(recorder, seen or seen_tiles(request, block_kv, block_q))
    return recorder


def in_order(recorder, seen):
    """Whether each block of dQ was added up from the last tile that it sees to the first: `seen`
    has {(sequence, row): the first keys of all tiles, in any order}, boxes of all heads and dims.
    """
    found = defaultdict(set)
    for (sequence, _, row, _), keys in recorder.tiles().items():
        found[sequence, row].add(tuple(keys))
    expected = {where: {tuple(sorted(keys, reverse=True))} for where, keys in seen.items() if keys}
    return found == expected


def seen_tiles(request, block_kv, block_q=64):
    """{(sequence, row): first keys of the tiles that add to a block of queries}: those of which one
    of its queries sees a key, by the definition of the mask. So do those whose first query would be
    in the block, but behind the last query: they add 0.
    """
    (batch, M), N = request.q.shape[:2], request.k.shape[1]
    left = math.inf if request.window_left is None else request.window_left
    right = math.inf if request.window_right is None else request.window_right
    seen = {}
    for first in range(0, M, block_q):
        query = torch.arange(first, first + block_q)[:, None] + N - M
        key = torch.arange(N)[None]
        visible = (key <= query + right) & (key >= query - left) & (query < N)
        visible |= (key == query + right) & (key % block_kv == 0) & (query >= N)
        tiles = visible.any(0).nonzero().flatten() // block_kv * block_kv
        seen |= {(b, first): set(tiles.tolist()) for b in range(batch)}
    return seen


CASES = {
    "full": (150, 300, 64, {}),
    "causal": (300, 300, 64, {"causal": True}),
    "causal, more keys": (130, 500, 64, {"causal": True}),
    "window": (300, 400, 64, {"window": (100, 50)}),
    "slopes, sink": (200, 300, 64, {"alibi_slopes": torch.rand(2), "sink": torch.rand(2)}),
    "80 dims": (200, 300, 80, {"causal": True}),
    "two panels": (200, 300, 96, {"causal": True}),
    "halves": (130, 300, 160, {}),
    "a pair": (130, 300, 192, {}),
}


@pytest.mark.parametrize(("case", "grid", "order"), list(zip(CASES, cycle(GRIDS), cycle(ORDERS))),
                         indirect=["grid", "order"])  # fmt: skip
def test_the_order_of_additions(case, grid, order):
    """And the gradients are right, with all parts of dQ."""
    M, N, D, options = CASES[case]
    recorder = check(random_request(M, N, D=D, **options), block_kv=64 if D == 256 else 128)
    dims = {dim for _, _, _, dim in recorder.added}
    assert dims == {80: {0, 64}, 96: {0, 64}, 192: set(range(0, 192, 32))}.get(D, dims)


@pytest.mark.parametrize("schedule", [BackwardConfig(early=True), BackwardConfig(block_q=128)])
def test_other_schedules(schedule):
    with using_grid("three at once, shuffled"):
        check(random_request(200, 300, causal=True), schedule, block_q=schedule.block_q)


@pytest.mark.parametrize(
    ("options", "D"), [({}, 64), pytest.param({"causal": True}, 256, marks=pytest.mark.slow)]
)
def test_the_same_bits(options, D):
    """In every order, on every grid, and if programs walk from tile to tile: blocks of odd number,
    so that adders change places.
    """
    request = random_request(180, 500 if D == 64 else 130, heads=2, kv_heads=2, D=D, **options)
    do, results = torch.randn_like(request.q), []
    grids = zip(GRIDS, cycle(ORDERS.values()), (None, 2, 3, None, 2))
    for grid, order, programs in grids:
        with using_grid(grid, order=order):
            gradients, do, _ = differentiate(request, None, do, programs)
        assert_ok(assess_request(gradients, request, do))
        results.append(gradients)
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result)


LENGTHS = [70, 0, 300, 1, 129]


def packed_tiles(q_lengths, k_lengths, causal, block_q=64):
    """`seen_tiles` of packed sequences, each of which begins at a whole block of the workspace."""
    seen, q_first, k_first = {}, 0, 0
    for i, (m, n) in enumerate(zip(q_lengths, k_lengths)):
        padded_first = (q_first + i * block_q) // block_q * block_q
        request = SimpleNamespace(
            q=torch.empty(1, m), k=torch.empty(1, n), window_left=None,
            window_right=0 if causal else None,
        )  # fmt: skip
        for (_, row), keys in seen_tiles(request, 128).items():
            seen[0, padded_first + row] = {k_first + key for key in keys}
        q_first, k_first = q_first + m, k_first + n
    return seen


@pytest.mark.parametrize(
    ("grid", "causal"), list(zip(list(GRIDS)[2:], (False, True))), indirect=["grid"]
)
def test_packed_sequences(grid, causal):
    q_lengths, k_lengths = LENGTHS, [100, 40, 260, 0, 150]
    q = torch.randn(sum(q_lengths), 2, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, sum(k_lengths), 1, 64, dtype=torch.bfloat16)
    bounds = [torch.tensor([0, *x]).cumsum(0).int() for x in (q_lengths, k_lengths)]
    request = make_request(
        q, k, v, causal=causal, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], deterministic=True
    )
    check(request, seen=packed_tiles(q_lengths, k_lengths, causal))


@pytest.mark.parametrize("grid", ["eight at once"], indirect=True)
def test_rows_with_lengths_of_their_own(grid):
    lengths = [130, 0, 300, 7]
    request = random_request(100, 310, batch=4, kv_lengths=torch.tensor(lengths), window=(None, 40))
    seen = {}
    for b, n in enumerate(lengths):
        one = request._replace(q=request.q[:1], k=request.k[:1, :n])
        tiles = seen_tiles(one, 128).items()
        seen |= {(b, row): {310 * b + key for key in keys} for (_, row), keys in tiles}
    check(request, seen=seen)


def test_counters_may_hold_anything_before(monkeypatch):
    """The kernel that prepares a launch clears them."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *shape, **of: new_empty(x, *shape, **of).fill_(7)
    )
    check(random_request(200, 300, causal=True))


@pytest.mark.parametrize(("head_dim", "tokens", "heads", "group", "causal", "section"), [
    (64, 8192, 32, 1, False, 4),
    (128, 2048, 16, 4, True, 2),  # parts
    (128, 512, 16, 1, False, 33),  # short heads
])  # fmt: skip
def test_how_many_heads_alternate(head_dim, tokens, heads, group, causal, section):
    """Of 16384 tokens, on a GPU of 132 SMs; the parts of a head count as heads."""
    q = torch.empty(16384 // tokens, tokens, heads, head_dim, dtype=torch.bfloat16)
    k = q[:, :, : heads // group]
    request = make_request(q, k, k, causal=causal, deterministic=True)
    with devices.assume(gpu(132)):
        assert config.heads_of_section(request, default_config(request)) == section
