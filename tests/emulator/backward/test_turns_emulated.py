"""The deterministic backward for Hopper in the emulator: every block of dQ is added up from the
last tile of keys to the first, whatever programs do at the same time.

What is recorded is what reaches memory: which program's TMA has added to which box of dQ. Which
tile of keys a program has is seen by the K that it loads.
"""

import math
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed, widened
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS, Deadlock, Load
from flash_versions.dispatch.emulator.tma import Store
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from flash_versions.versions.oracle.reference import forward
from tests.emulator.planted_bugs import WRONG, Bug, assert_found, plant
from tests.helpers.rotation import rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa4.hopper.backward")
config, problem, backward_hopper = (
    LOADED[f"fa3.hopper.backward.{name}"] for name in ("config", "problem", "kernel")
)
FAR = 2**30  # see `tiles/ragged.py`


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
def grid(request, monkeypatch):
    """Run a test with a grid, named by its parameter."""
    set_grid(request.param, monkeypatch)


def set_grid(name, monkeypatch):
    resident, begun = GRIDS[name]
    monkeypatch.setattr(gluon_machine, "RESIDENT", resident)
    monkeypatch.setattr(gluon_machine, "begun", begun)


class Recorder:
    """Watches an emulation: the tile of keys of each program, and what has added to each box."""

    def __init__(self):
        self.keys = {}  # program -> (sequence, key head, first key), of packed keys in all
        self.added = defaultdict(list)  # corner of a box -> programs

    def __call__(self, partition, what, tile, barrier, cycle):
        program = partition.program.id
        if what == "copy" and program not in self.keys and isinstance(tile, Load):
            self.keys[program] = tile.coordinates
        if what == "stored" and isinstance(tile, Store) and tile.descriptor.dtype == torch.float32:
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
    q = torch.randn(batch, M, heads, D, dtype=torch.bfloat16)
    k, v = torch.randn(2, batch, N, kv_heads, D, dtype=torch.bfloat16)
    return make_request(q, k, v, deterministic=True, **options)


def differentiate(request, schedule=None, do=None, programs=None):
    """(gradients by name, do, Recorder): with so many programs, or with one for each tile, so that
    what a program adds is what its tile adds.
    """
    schedule = schedule or config.default_config(request)
    schedule = replace(schedule, scheduler="grid" if programs is None else "dynamic")
    exact = request._replace(**{x: getattr(request, x).double() for x in "qkv"})
    o, lse, _ = forward(exact)
    o = o.to(request.q.dtype)
    do = torch.randn(o.shape).to(o.dtype) if do is None else do
    recorder = Recorder()
    gluon_machine.watcher = recorder
    try:
        with devices.assume(Properties(num_sms=programs or 1)):
            found = backward_hopper.backward(
                in_vectors(request), widened(o), lse.float(), None, widened(do), None, schedule
            )
    finally:
        gluon_machine.watcher = None
    named = zip(("dq", "dk", "dv"), found, request[:3])
    return {name: narrowed(x, like) for name, x, like in named}, do, recorder


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
    "full": (150, 500, {}),
    "full, many queries": (400, 300, {}),
    "causal": (400, 400, {"causal": True}),
    "causal, more queries": (450, 300, {"causal": True}),
    "causal, more keys": (200, 600, {"causal": True}),
    "window": (300, 500, {"window": (100, 50)}),
    "window to the left": (400, 400, {"window": (130, None)}),
    "window to the right": (300, 400, {"window": (None, 100)}),
    "sliding": (500, 500, {"causal": True, "window": (70, None)}),
    "softcap": (200, 300, {"causal": True, "softcap": 5.0}),
    "slopes, sink": (200, 300, {"alibi_slopes": torch.rand(2), "sink": torch.rand(2)}),
}


# All at head_dim 64, every second one at 256, which is another kernel; the rest is wide.
@pytest.mark.parametrize(("case", "grid", "order", "D"), [
    pytest.param(
        case, list(GRIDS)[i % len(GRIDS)], list(ORDERS)[i % len(ORDERS)], D, id=f"{D}-{case}",
        marks=pytest.mark.wide if D == 128 or D == 256 and i % 2 else (),
    )
    for i, case in enumerate(CASES) for D in (64, 128, 256)
    if D == 64 or CASES[case][0] <= 400  # what is longer shows at 64 what it is for
], indirect=["grid"])  # fmt: skip
def test_the_order_of_additions(case, grid, order, D, monkeypatch):
    """And the gradients are right."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    M, N, options = CASES[case]
    request = random_request(M, N, D=D, **options)
    gradients, do, recorder = differentiate(request)
    for name, accuracy in assess_request(gradients, request, do).items():
        assert accuracy.ok, f"{name}: {accuracy}"
    assert in_order(recorder, seen_tiles(request, 128 if D <= 128 else 64))


@pytest.mark.parametrize("seed", range(6))
def test_random_masks(seed, monkeypatch):
    """Lengths, windows and groups at random; several sequences."""
    torch.manual_seed(seed)
    M, N = torch.randint(1, 500, (2,)).tolist()
    left, right = (None if torch.rand(()) < 0.4 else int(torch.randint(0, 300, ())) for _ in "lr")
    kv_heads, group = 1 + seed % 2, 1 + seed // 2
    set_grid(list(GRIDS)[seed % len(GRIDS)], monkeypatch)
    request = random_request(
        M, N, kv_heads * group, kv_heads, batch=1 + seed % 2, window=(left, right)
    )
    gradients, do, recorder = differentiate(request)
    assert all(x.ok for x in assess_request(gradients, request, do).values())
    assert in_order(recorder, seen_tiles(request, 128))


@pytest.mark.parametrize("name", ["early, two stages", "many queries", "held", "in order"])
def test_every_schedule(name, monkeypatch):
    schedule = {
        "early, two stages": config.BackwardConfig(early=True),
        "many queries": config.BackwardConfig(block_q=128),
        "held": config.BackwardConfig(early=True, held=True, stages=3),
        "in order": config.BackwardConfig(),
    }[name]
    set_grid("three at once, shuffled", monkeypatch)
    request = random_request(300, 400, causal=True)
    gradients, do, recorder = differentiate(request, schedule)
    assert all(x.ok for x in assess_request(gradients, request, do).values())
    assert in_order(recorder, seen_tiles(request, 128, schedule.block_q))


@pytest.mark.parametrize(
    ("D", "options"), [(80, {"causal": True}), (96, {"causal": True}), (160, {}), (192, {})]
)
def test_all_parts_of_dq_have_the_order(D, options, monkeypatch):
    set_grid("three at once, shuffled", monkeypatch)
    request = random_request(200, 300, D=D, **options)
    gradients, do, recorder = differentiate(request)
    assert all(x.ok for x in assess_request(gradients, request, do).values())
    dims = {0, 64} if D < 128 else set(range(0, D, 32))
    assert {dim for _, _, _, dim in recorder.added} == dims
    assert in_order(recorder, seen_tiles(request, 128))


@pytest.mark.parametrize(("options", "D"), [
    pytest.param({}, 64, id="full-64"),
    pytest.param({"causal": True}, 64, id="causal-64"),
    pytest.param({"causal": True}, 256, id="causal-256", marks=pytest.mark.slow),
    pytest.param({}, 256, id="full-256", marks=pytest.mark.wide),
])  # fmt: skip
def test_the_same_bits(options, D, monkeypatch):
    """In every order, on every grid, and if programs walk from tile to tile: blocks of odd number,
    so that adders change places.
    """
    request, results = random_request(180, 500, heads=2, kv_heads=2, D=D, **options), []
    do = torch.randn_like(request.q)
    for programs in (None, 3, 2):
        for grid, order in zip(GRIDS, [*ORDERS.values()] * 2):
            set_grid(grid, monkeypatch)
            monkeypatch.setattr(gluon_machine, "order", order)
            results.append(differentiate(request, None, do, programs)[0])
    for result in results[1:]:
        assert all(torch.equal(result[name], results[0][name]) for name in result)


def test_without_turns_the_order_is_another(monkeypatch):
    """So that what is recorded could show it."""
    set_grid("all at once, backwards", monkeypatch)
    request = random_request(300, 600)._replace(deterministic=False)
    recorder = differentiate(request)[2]
    assert not in_order(recorder, seen_tiles(request, 128))


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


@pytest.mark.parametrize(("grid", "causal"), rotated(GRIDS, (False, True)), indirect=["grid"])
def test_packed_sequences(grid, causal, monkeypatch):
    monkeypatch.setattr(LOADED["tiles.wgmma"], "available", lambda device: True)
    q_lengths, k_lengths = LENGTHS, [100, 40, 260, 0, 150]
    q, do = torch.randn(2, sum(q_lengths), 2, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, sum(k_lengths), 1, 64, dtype=torch.bfloat16)
    bounds = [torch.tensor([0, *x]).cumsum(0).int() for x in (q_lengths, k_lengths)]
    request = make_request(
        q, k, v, causal=causal, cu_seqlens_q=bounds[0], cu_seqlens_k=bounds[1], deterministic=True
    )
    assert backward_hopper.left_to_portable(request) is None
    gradients, do, recorder = differentiate(request, do=do[None])
    assert all(x.ok for x in assess_request(gradients, request, do).values())
    assert in_order(recorder, packed_tiles(q_lengths, k_lengths, causal))


@pytest.mark.parametrize("grid", ["one by one, backwards", "eight at once"], indirect=True)
def test_rows_with_lengths_of_their_own(grid):
    lengths = [130, 0, 300, 7]
    request = random_request(100, 310, batch=4, kv_lengths=torch.tensor(lengths), window=(None, 40))
    gradients, do, recorder = differentiate(request)
    assert all(x.ok for x in assess_request(gradients, request, do).values())
    seen = {}
    for b, n in enumerate(lengths):
        one = request._replace(q=request.q[:1], k=request.k[:1, :n])
        tiles = seen_tiles(one, 128).items()
        seen |= {(b, row): {310 * b + key for key in keys} for (_, row), keys in tiles}
    assert in_order(recorder, seen)


def test_counters_may_hold_anything_before(monkeypatch):
    """The kernel that prepares a launch clears them."""
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda x, *shape, **of: new_empty(x, *shape, **of).fill_(7)
    )
    request = random_request(200, 300, causal=True)
    for programs in (None, 2):
        gradients, do, recorder = differentiate(request, programs=programs)
        assert all(x.ok for x in assess_request(gradients, request, do).values())
        assert programs or in_order(recorder, seen_tiles(request, 128))


@pytest.mark.parametrize("block_q", [64, 128])
@pytest.mark.parametrize("block_kv", [64, 128])
@pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_turns_count_the_tiles_behind(left, right, block_kv, block_q):
    """For lengths and windows at random: a tile's turn at a block is the number of later tiles that
    `blocks` gives this block to.
    """
    n, most = 5000, 12
    q_length, kv_length = torch.randint(1, 600, (2, n))
    window_left, window_right = torch.randint(0, 500, (2, n)) * torch.randint(0, 2, (2, n))
    given = {"q_length": q_length, "kv_length": kv_length}
    given |= {"window_left": window_left, "window_right": window_right}
    given = {name: gluon_emulator.Tensor(x) for name, x in given.items()}
    of = SimpleNamespace(
        **given, LEFT=left, RIGHT=right, EDGE=True, BLOCK_Q=block_q, BLOCK_KV=block_kv
    )
    KeyProblem = problem.KeyProblem
    block = torch.randint(0, 600 // block_q + 1, (n,))
    adds = []
    for tile in range(most):
        key = gluon_emulator.Tensor(torch.full((n,), tile * block_kv))
        begin, _, _, end = KeyProblem.blocks_in_window(of, key, block_kv)
        adds.append((begin.data <= block) & (block < end.data) & (key.data < kv_length))
    for tile in range(most):
        behind = sum(x.long() for x in adds[tile + 1 :]) + torch.zeros(n)
        key = gluon_emulator.Tensor(torch.full((n,), tile * block_kv))
        found = KeyProblem.tiles_behind(of, key, gluon_emulator.Tensor(block)).data
        assert (found == behind)[adds[tile]].all()
    assert torch.stack(adds).any(0).float().mean() > 0.3  # and there is something to count


PARTED = {  # a head's first tiles see few queries only with a bound on the left
    "causal": (300, 700, {"causal": True}),
    "more queries": (500, 300, {"causal": True}),
    "no mask": (200, 400, {}),
    "a bound on the left": (200, 900, {"window": (100, None)}),
    "a window": (200, 900, {"window": (150, 0)}),
    "a wide window": (200, 900, {"window": (300, 100)}),
}


def differentiate_parts(case):
    """The assessed gradients of groups of 4 in 4 parts."""
    M, N, options = PARTED[case]
    request = random_request(M, N, heads=8, kv_heads=2, **options)
    schedule = config.BackwardConfig(stages=2, parts=4)
    found, do, _ = differentiate(request, schedule)
    return assess_request(found, request, do).values()


@pytest.mark.parametrize("name", ["one by one", "one by one, backwards"])
@pytest.mark.parametrize("case", PARTED)
def test_parts_of_a_head_wait_for_no_later_ticket(case, name, monkeypatch):
    set_grid(name, monkeypatch)
    assert all(x.ok for x in differentiate_parts(case))


def test_parts_that_follow_one_another_lock_with_a_bound_on_the_left(monkeypatch):
    set_grid("one by one", monkeypatch)
    host = LOADED["fa3.hopper.backward.host"]
    monkeypatch.setattr(host, "heads_of_section", lambda request, config: 1)
    with pytest.raises(Deadlock):
        differentiate_parts("a window")


@pytest.mark.parametrize(("head_dim", "tokens", "heads", "group", "causal", "section"), [
    (64, 8192, 32, 1, False, 4),
    (64, 8192, 32, 1, True, 4),
    (128, 8192, 16, 1, False, 4),
    (128, 8192, 16, 1, True, 2),
    (128, 2048, 16, 1, True, 4),
    (128, 2048, 16, 4, True, 2),  # parts
    (256, 16384, 8, 4, True, 1),
    (256, 16384, 8, 4, False, 1),
    (192, 8192, 10, 1, False, 2),
    (192, 8192, 10, 1, True, 1),
    (128, 512, 16, 1, False, 33),  # short heads
    (128, 1024, 16, 1, False, 16),
    (128, 1024, 16, 1, True, 4),
    (128, 2048, 16, 1, False, 8),
    (256, 1024, 8, 1, False, 8),
    (64, 1024, 32, 4, False, 16),
])  # fmt: skip
def test_how_many_heads_alternate(head_dim, tokens, heads, group, causal, section):
    """Of 16384 tokens, on a GPU of 132 SMs; the parts of a head count as heads."""
    q = torch.empty(16384 // tokens, tokens, heads, head_dim, dtype=torch.bfloat16)
    k = q[:, :, : heads // group]
    request = make_request(q, k, k, causal=causal, deterministic=True)
    with devices.assume(Properties(num_sms=132)):
        assert config.heads_of_section(request, config.default_config(request)) == section


@pytest.mark.parametrize("grid", GRIDS, indirect=True)
@pytest.mark.parametrize("D", [64, 192, pytest.param(256, marks=pytest.mark.wide)])
def test_short_heads_alternate(D, grid):
    """All of them, as on a GPU that has a multiprocessor for each of their tiles."""
    request = random_request(70, 300, 6, 6, D=D)
    schedule = config.default_config(request)
    with devices.assume(Properties(num_sms=132)):
        section = config.heads_of_section(request, schedule)
    assert section == 6 > config.MOST_ALTERNATING
    gradients, do, recorder = differentiate(request, replace(schedule, section=section))
    assert all(x.ok for x in assess_request(gradients, request, do).values())
    assert in_order(recorder, seen_tiles(request, 64 if D == 256 else 128))


RUNS = {
    None: (150, 500, {}),
    "causal": (300, 300, {"causal": True}),
    "wide": (130, 250, {"D": 256}),
    "halves": (130, 500, {"D": 160}),
    "pair": (130, 500, {"D": 192}),
    "heads": (70, 300, {"heads": 4, "kv_heads": 2}),
    "few programs": (180, 600, {"heads": 1}),
}
TURN = "turn = self.tiles_behind(key, block)"
BUGS = {
    "turns are not waited for": Bug(
        "KeyProblem.take_turn", [(TURN, "turn = gl.to_tensor(0)")], WRONG
    ),
    "a turn is one too late": Bug("KeyProblem.take_turn", [(TURN, TURN + " + 1")], "dead-lock"),
    "a turn is one too early": Bug("KeyProblem.take_turn", [(TURN, TURN + " - 1")], WRONG),
    "halves: the first warps are not waited for": Bug(
        "Turns.advance", [(" * self.COUNTING", "")], WRONG, "halves"
    ),
    "both adders have the first block": Bug(
        "add", [("range(first, steps", "range(0, steps")], f"{WRONG}|dead-lock"
    ),
    "adders have the same steps of every tile": Bug(
        "add", [("first = (first + steps) % ADDERS", "pass")], f"{WRONG}|dead-lock", "few programs"
    ),
    "tiles are left out": Bug(
        "Scheduler.claim", [('if self.KIND == "dynamic":\n', "if True:\n")],
        f"{WRONG}|dead-lock", "few programs",
    ),
    "an adder takes the other one's slots": Bug(
        "add", [("gl.static_range(ADDERS)", "gl.static_range(1)")], f"{WRONG}|dead-lock"
    ),
    "both adders begin with the first slot": Bug(
        "add", [("addends.at(ADDER)", "addends.at(0)")], f"{WRONG}|dead-lock"
    ),
    "the second adder has nothing to do": Bug(
        "add", [("if ADDER < ADDERS:", "if ADDER == 0:")], "dead-lock"
    ),
    "turns take the mask for another": Bug(
        "KeyProblem.tiles_behind", [("if self.RIGHT else", "if False else")], "dead-lock", "causal"
    ),
    "a block is counted when its tile was read": Bug(
        "advance_ptx", [("cp.async.bulk.wait_group 0;", "")], WRONG
    ),
    "halves: the last block is counted when its tile was read": Bug(
        "finish_ptx", [("cp.async.bulk.wait_group 0;", "")], WRONG, "halves"
    ),
    "the last block is not counted": Bug(
        "add", [("mine.turns.finish(counter, additions)", "pass")], "dead-lock"
    ),
    "no block is counted": Bug(
        "KeyProblem.take_turn", [("additions = gl.to_tensor(1)", "pass")], "dead-lock"
    ),
    "all threads count": Bug(
        "advance_ptx", [("@!elected bra passed;", ""), ("passed:", "")], WRONG
    ),
    "a block is counted without a fence": Bug(
        "advance_ptx", [("fence.acq_rel.gpu;", "")], "without"
    ),
    "no fence for TMA": Bug(
        "advance_ptx", [("fence.proxy.async.global;", "")], "without fence.proxy"
    ),
    "the counter is read again, but not in order": Bug(
        "advance_ptx", [("ld.acquire", "ld.relaxed")], "without fence.acq_rel"
    ),
    "a turn is not waited for when it is early": Bug(
        "advance_ptx", [("@early bra again;", "")], WRONG
    ),
    "all heads have one counter": Bug(
        "Turns.counter", [("block * heads + head", "block * heads")], WRONG, "heads"
    ),
    "a program's number is no ticket": Bug(
        "Turns.number", [("return self.ticket", "return gl.program_id(0)")], "dead-lock"
    ),
    "the first tiles come first": Bug(
        "KeyProblem.locate", [("tile = tiles - 1 - tile", "pass")], "dead-lock"
    ),
    "wide: turns are not waited for": Bug(
        "KeyProblem.take_turn", [(TURN, "turn = gl.to_tensor(0)")], WRONG, "wide"
    ),
    "wide: the last block is not counted": Bug(
        "add_wide", [("problem.turns.finish(counter, additions)", "pass")], "dead-lock", "wide"
    ),
    "halves: turns are not waited for": Bug(
        "KeyProblem.take_turn", [(TURN, "turn = gl.to_tensor(0)")], WRONG, "halves"
    ),
    "pair: turns are not waited for": Bug(
        "KeyProblem.take_turn", [(TURN, "turn = gl.to_tensor(0)")], WRONG, "pair"
    ),
    "pair: one consumer is enough": Bug(
        "backward_pair_kernel", [("COUNTING=8", "COUNTING=4")], WRONG, "pair"
    ),
    "pair: the last block is not counted": Bug(
        "consume_pair", [("problem.turns.finish(state.counter, state.additions)", "pass")],
        "dead-lock", "pair",
    ),
}  # fmt: skip


def right(case, grid, monkeypatch):
    """Whether gradients and the order of a bug's run are."""
    set_grid(grid, monkeypatch)
    M, N, options = RUNS[case]
    request = random_request(M, N, **options)
    programs = 2 if case == "few programs" else None
    gradients, do, recorder = differentiate(request, programs=programs)
    within = all(x.ok for x in assess_request(gradients, request, do).values())
    if programs:  # whose additions are not those of one tile
        return within
    return within and in_order(recorder, seen_tiles(request, 64 if case == "wide" else 128))


# Programs that begin backwards, so that only tickets order them, and as many as deadlocks need.
WORST = {"a program's number is no ticket": "one by one, backwards",
         "the first tiles come first": "one by one"}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_planted_bugs_are_found(name, monkeypatch):
    plant(BUGS[name], LOADED.values(), monkeypatch)
    grid = WORST.get(name, "all at once, backwards")
    assert_found(BUGS[name], lambda: right(BUGS[name].case, grid, monkeypatch), monkeypatch)


@pytest.mark.parametrize("case", RUNS)
def test_nothing_is_found_where_no_bug_is(case, monkeypatch):
    for grid in ("one by one, backwards", "all at once, backwards"):
        assert right(case, grid, monkeypatch)
