"""FA4's roles: the table of states, and what an instrumented launch writes down."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa4.hopper import host as forward_hopper
from flash_versions.versions.fa4.hopper.config import RolesConfig
from flash_versions.versions.fa4.hopper.roles import check
from tests.benchmarks.attention.record import events, new_stamps
from tests.simulator.gluon.orders import in_turn

SMALL = RolesConfig(block_kv=64)
CONFIGS = {
    "as it is": SMALL,
    "three consumers": replace(SMALL, consumers=3, stages=3),
    "dynamic": replace(SMALL, scheduler="dynamic", stages=4),
}


@pytest.mark.parametrize("role, states, step", [
    ("loader", ["load", "claim"], "'start' to 'load'"),
    ("consumer", ["await", "score", "softmax", "drain"], "'softmax' to 'drain'"),
    ("reader", ["idle"], "reader: .* 'start' to 'idle'"),
], ids=str)  # fmt: skip
def test_what_the_table_does_not_allow(role, states, step):
    with pytest.raises(ValueError, match=step):
        check(role, states)


def request_of(M, N, heads, **options):
    q = torch.randn(1, M, heads, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, N, heads, 64, dtype=torch.bfloat16)
    return make_request(q, k, v, **options)


def recorded(request, config):
    """(o, lse, events by role for each program) of an instrumented launch."""
    stamps = new_stamps(request, config)
    o, lse, _ = forward_hopper.forward(request, config, stamps)
    return o, lse, [events(program) for program in stamps]


@in_turn("name", CONFIGS)
def test_every_role_follows_the_table(name, order):
    config = CONFIGS[name]
    request = request_of(384, 414, 1, causal=True)
    o, lse, programs = recorded(request, config)
    plain_o, plain_lse, _ = forward_hopper.forward(request, config)
    assert torch.equal(o, plain_o) and torch.equal(lse, plain_lse)
    tiles = 384 // config.block_q
    assert sum(entered(program["loader"], "claim") - 1 for program in programs) == tiles
    for program in programs:
        for role, found in program.items():
            check(role.split()[0], [event[0] for event in found])
        assert_same_work(program, config.consumers)
    scored = sum(entered(program[f"consumer {c}"], "score")
                 for program in programs for c in range(config.consumers))  # fmt: skip
    visible = torch.arange(384)[:, None] + 414 - 384 >= torch.arange(414)
    parts = [part for rows in visible.split(64) for part in rows.split(64, 1)]
    assert scored == sum(bool(part.any()) for part in parts)


def entered(events, state):
    """How often."""
    return sum(event[0] == state for event in events)


def assert_same_work(program, consumers):
    """All roles of a program worked on the same tiles and blocks."""
    assert list(program) == ["loader", "storer", *(f"consumer {c}" for c in range(consumers))]
    loaded = [event[1:3] for event in program["loader"] if event[0] == "load"]
    tiles = entered(program["loader"], "claim") - 1
    for c in range(consumers):
        consumer = program[f"consumer {c}"]
        scored = [event[1:3] for event in consumer if event[0] == "score"]
        for state in ("softmax", "correct"):
            assert [event[1:3] for event in consumer if event[0] == state] == scored
        for tile in range(tiles):  # of a causal tile it passes over the first ones, if any
            visited = [at for at in loaded if at[0] == tile]
            seen = [at for at in scored if at[0] == tile]
            assert seen and visited[-len(seen) :] == seen
        for state in ("drain", "hand over"):
            assert [event[1] for event in consumer if event[0] == state] == list(range(tiles))
    stored = [event[1:3] for event in program["storer"] if event[0] == "store"]
    assert stored == [(tile, c) for tile in range(tiles) for c in range(consumers)]
