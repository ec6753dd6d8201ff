"""FA4's roles: the table of states, and what an instrumented launch writes down (emulated)."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.precision import Fp8
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa4.hopper.roles import (
    DONE,
    MEANING,
    ROLES,
    START,
    STATES,
    TABLE,
    check,
)
from flash_versions.versions.fp8.quantize import quantize
from tests.helpers.rotation import rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa4.hopper.host")
forward_hopper, trace = LOADED["fa4.hopper.host"], LOADED["fa4.hopper.trace"]
SMALL = LOADED["fa4.hopper.config"].RolesConfig(block_kv=64)
CONFIGS = {
    "as it is": SMALL,
    "three consumers": replace(SMALL, consumers=3, stages=3),
    "one Q": replace(SMALL, q_stages=1),
    "dynamic": replace(SMALL, scheduler="dynamic", stages=4),
    "grid": replace(SMALL, scheduler="grid"),
}


@pytest.fixture(autouse=True)
def small_hopper(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles."""
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


# ------------------------------------------------------------------------------- the table
def steps(role):
    return [(step.state, step.then) for step in TABLE if step.role == role]


def reached(start, pairs):
    """The states that can be reached from one."""
    found = {start}
    while more := {b for a, b in pairs if a in found} - found:
        found |= more
    return found


@pytest.mark.parametrize("role", ROLES)
def test_every_state_can_be_entered_and_left(role):
    states = {state for r, state in STATES if r == role}
    assert reached(START, steps(role)) == states | {START, DONE}
    assert reached(DONE, [(b, a) for a, b in steps(role)]) == states | {START, DONE}


def test_the_table_has_no_step_twice_and_every_state_a_meaning():
    assert len({step[:3] for step in TABLE}) == len(TABLE)
    assert {step.role for step in TABLE} == set(ROLES)
    named = {(step.role, state) for step in TABLE for state in (step.state, step.then)}
    assert {(r, state) for r, state in named if state not in (START, DONE)} == set(MEANING)
    assert all(MEANING.values()) and all(step.when for step in TABLE)


A_TILE = ["await", "score", "softmax", "correct", "score", "softmax", "correct", "drain",
          "hand over", "await"]  # fmt: skip


@pytest.mark.parametrize("role, states", [
    ("loader", ["claim"]),
    ("loader", ["claim", "load", "load", "claim"]),
    ("consumer", A_TILE),
    ("consumer", A_TILE + A_TILE[1:]),
    ("storer", ["idle", "store", "idle", "store", "idle"]),
], ids=str)  # fmt: skip
def test_what_the_table_allows(role, states):
    check(role, states)


@pytest.mark.parametrize("role, states, step", [
    ("loader", [], "'start' to 'done'"),
    ("loader", ["load", "claim"], "'start' to 'load'"),
    ("loader", ["claim", "load"], "'load' to 'done'"),
    ("consumer", A_TILE[:-1], "'hand over' to 'done'"),
    ("consumer", ["await", "softmax"], "'await' to 'softmax'"),
    ("consumer", ["await", "score", "softmax", "drain"], "'softmax' to 'drain'"),
    ("consumer", ["await", "store"], "'await' to 'store'"),
    ("storer", ["idle", "idle"], "'idle' to 'idle'"),
    ("reader", ["idle"], "reader: .* 'start' to 'idle'"),
], ids=str)  # fmt: skip
def test_what_it_does_not_allow(role, states, step):
    with pytest.raises(ValueError, match=step):
        check(role, states)


# ------------------------------------------------------------------------------- launches
def request_of(M, N, heads, **options):
    q = torch.randn(1, M, heads, 64, dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, N, heads, 64, dtype=torch.bfloat16)
    return make_request(q, k, v, **options)


def recorded(request, config):
    """(o, lse, events by role for each program) of an instrumented launch."""
    stamps = trace.new_stamps(request, config)
    o, lse, _ = forward_hopper.forward(request, config, stamps)
    return o, lse, [trace.events(program) for program in stamps]


@pytest.mark.parametrize(("name", "order"), rotated(CONFIGS, ORDERS))
def test_every_role_follows_the_table(name, order, monkeypatch):
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    config = CONFIGS[name]
    request = request_of(384, 414, 3, causal=True)
    o, lse, programs = recorded(request, config)
    plain_o, plain_lse, _ = forward_hopper.forward(request, config)
    assert torch.equal(o, plain_o) and torch.equal(lse, plain_lse)
    tiles = 3 * 384 // config.block_q
    assert sum(entered(program["loader"], "claim") - 1 for program in programs) == tiles
    for program in programs:
        for role, events in program.items():
            check(role.split()[0], [event[0] for event in events])
        assert_same_work(program, config.consumers)
    scored = sum(entered(program[f"consumer {c}"], "score")
                 for program in programs for c in range(config.consumers))  # fmt: skip
    visible = torch.arange(384)[:, None] + 414 - 384 >= torch.arange(414)
    parts = [part for rows in visible.split(64) for part in rows.split(64, 1)]
    assert scored == 3 * sum(bool(part.any()) for part in parts)


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


@pytest.mark.parametrize("order", ORDERS)
def test_roles_wait_for_each_other(order, monkeypatch):
    """What the barriers promise, read from the clock."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[order])
    _, _, programs = recorded(request_of(300, 330, 3), SMALL)
    for program in programs:
        when = {role: {event[:3]: event[3] for event in events} for role, events in program.items()}
        for c in range(SMALL.consumers):
            consumer = when[f"consumer {c}"]
            for (state, tile, block), cycle in consumer.items():
                if state == "score":
                    assert cycle > when["loader"]["load", tile, block]
                if state == "hand over":
                    assert cycle < when["storer"]["store", tile, c]
                if state == "await" and tile > 1:  # O of the tile before has left its buffer
                    assert cycle > when["storer"]["store", tile - 2, c]


def test_in_fp8():
    request = request_of(200, 330, 2, precision="fp8")
    quantized = quantize(request.q, request.k, request.v, Fp8())
    stamps = trace.new_stamps(request, SMALL)
    o, lse, _ = forward_hopper.forward_quantized(request, quantized, SMALL, stamps)
    plain_o, plain_lse, _ = forward_hopper.forward_quantized(request, quantized, SMALL)
    assert torch.equal(o, plain_o) and torch.equal(lse, plain_lse)
    for program in stamps:
        for role, events in trace.events(program).items():
            check(role.split()[0], [event[0] for event in events])


def test_what_has_no_room_is_left_out():
    """Time stamps of the first tile's first two blocks, none beside them."""
    request = request_of(200, 330, 3)
    room = trace.new_stamps(request, SMALL)
    stamps = room.new_zeros((*room.shape[:2], 1, 2, *room.shape[4:]))
    o, lse, _ = forward_hopper.forward(request, SMALL, stamps)
    plain_o, plain_lse, _ = forward_hopper.forward(request, SMALL)
    assert torch.equal(o, plain_o) and torch.equal(lse, plain_lse)
    _, _, programs = recorded(request, SMALL)
    for program, all_events in zip(stamps, programs, strict=True):
        for role, events in trace.events(program).items():
            inside = [event[:3] for event in all_events[role] if event[1] < 1 and event[2] < 2]
            assert sorted(event[:3] for event in events) == sorted(inside) != []


def test_a_state_that_is_entered_in_the_wrong_place_is_noticed():
    """The clock tells: two time stamps that change places are no steps of the table."""
    request = request_of(100, 200, 1)
    stamps = trace.new_stamps(request, SMALL)
    forward_hopper.forward(request, SMALL, stamps)
    score, softmax = (STATES.index(("consumer", x)) for x in ("score", "softmax"))
    consumer = stamps[0, 2, 0, 1]
    consumer[[score, softmax]] = consumer[[softmax, score]]
    events = trace.events(stamps[0])["consumer 0"]
    with pytest.raises(ValueError, match="'correct' to 'softmax'"):
        check("consumer", [event[0] for event in events])
