"""Who competes, and how they are timed: everything that needs a GPU is faked, but for the end."""

import types
from dataclasses import replace
from functools import partial

import pytest
import torch

from flash_versions import VERSIONS
from flash_versions.bench import measure, peers, suites
from flash_versions.bench.suites import Competitor, Shape

TIMES = [1.0] * 4 + [2.0] * 2 + [50.0] * 4
SMALL = Shape(B=1, H=4, Hkv=2, M=256, N=256, D=64, causal=True)
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="fakes a GPU where there is none")


# Who competes.


def test_operations_and_bytes():
    """Two products of M x N x D, twice as many operations, half of them if causal; a backward has
    five.
    """
    shape = replace(SMALL, causal=False)
    assert shape.flops() == 4 * 4 * 256 * 256 * 64 == 2 * SMALL.flops()
    assert suites.BACKWARD_FLOPS == 5 / 2
    assert shape.kv_bytes == 2 * 256 * 2 * 64 * 2
    x = torch.zeros(4, 8)
    assert measure.nbytes((x, x.T, x[:, :3], x[0].expand(50, 8))) == x.nbytes
    assert {(s.B * s.M, s.H * s.D) for s in suites.SUITES["table"]} == {(16384, 2048)}


# Turns.


class FakeEvent:
    """An event on a clock that the calls advance."""

    clock = 0.0

    def __init__(self, enable_timing):
        self.query = lambda: False
        self.synchronize = lambda: None

    def record(self):
        self.time = FakeEvent.clock

    def elapsed_time(self, end):
        return end.time - self.time


@pytest.fixture
def clock(monkeypatch):
    """Calls that take a known time, and the log of who was called."""
    log = []
    flush = types.SimpleNamespace(zero_=lambda: log.append("flush"))
    monkeypatch.setattr(measure.torch, "empty", lambda *args, **kwargs: flush)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def run(name, milliseconds):
        log.append(name)
        FakeEvent.clock += milliseconds

    call = lambda *about: partial(run, *about)  # noqa: E731
    return types.SimpleNamespace(call=call, log=log)


def test_competitors_take_turns_with_a_cold_cache(clock):
    waited = []
    calls = {name: clock.call(name, ms) for name, ms in (("a", 1.0), ("b", 2.0), ("c", 3.0))}
    times = measure.timed(calls, rounds=9, note=waited.append)
    for name, ms in (("a", 1.0), ("b", 2.0), ("c", 3.0)):
        assert times[name] == pytest.approx([ms] * 9)
    called = clock.log[1::2]
    assert clock.log[::2] == ["flush"] * len(called) and "flush" not in called
    rounds = [called[i : i + 3] for i in range(0, len(called), 3)]
    assert len(rounds) == 9 + measure.WARM_UP
    assert all(set(names) == {"a", "b", "c"} for names in rounds)
    assert [names[0] for names in rounds[:4]] == ["a", "b", "c", "a"]
    assert waited == called


def one_of(name, error=None, factor=1):
    """A competitor that returns a multiple of q, or fails."""

    def function(q, k, v):
        if error is not None:
            raise error
        return q * factor

    return Competitor(name, function)


@pytest.fixture
def faked(monkeypatch, clock):
    """`measure` with everything that needs a GPU replaced; set .competitors."""
    state = types.SimpleNamespace(competitors=[])
    monkeypatch.setattr(measure, "competitors", lambda suite, shape: iter(state.competitors))
    monkeypatch.setattr(Shape, "inputs", lambda shape: tuple(torch.ones(1) for _ in range(4)))

    def captured(prepare):
        results, spent = prepare()(), iter([9.0] * measure.WARM_UP + TIMES)
        return lambda: clock.call("x", next(spent))(), results, 7.0

    def check(results, length, causal, q, k, v, do):
        if not torch.equal(results[0], q):
            raise ArithmeticError("wrong output: o")

    monkeypatch.setattr(measure, "captured", captured)
    monkeypatch.setattr(measure, "check", check)
    return state


def test_rows_of_a_shape(faked):
    faked.competitors = [
        one_of("good"),
        one_of("wrong", factor=2),
        one_of("refuses", ValueError("head_dim 300 is too large.\nmore")),
        one_of("breaks", KeyError("sm_90")),
        one_of("hung"),
    ]
    noted = []
    rows = measure.measure("table", SMALL, 10, noted.append, {"hung": "hung"})
    found = {row["version"]: row for row in rows}
    assert list(found) == [one.name for one in faked.competitors]
    assert found["wrong"]["reason"] == "wrong output: o"
    assert found["refuses"]["reason"] == "head_dim 300 is too large."
    assert found["breaks"]["reason"] == "KeyError: 'sm_90'"
    assert found["hung"]["reason"] == "hung" and "peak_mib" not in found["hung"]
    good = found["good"]
    assert {name for name, row in found.items() if "ms_p50" in row} == {"good"}
    assert (good["ms_p20"], good["ms_p50"], good["ms_p80"]) == pytest.approx((1.0, 2.0, 50.0))
    assert good["rounds"] == 10
    assert good["tflops"] == pytest.approx(SMALL.flops() / 2e-3 / 1e12)
    assert good["peak_mib"] == 7.0
    assert {*noted, "hung"} == set(found)


@no_gpu
@pytest.mark.parametrize("suite", ["backward", "decode", "ablation fp8", "quantize"])
def test_real_competitors_pass_the_check(suite, monkeypatch):
    """The kernels themselves, simulated and checked; only the clock is invented."""
    shape = Shape(B=2, H=2, Hkv=1, M=20, N=20, D=16, causal=True)
    if suite == "decode":
        shape = replace(shape, M=1, causal=False)

    def inputs(shape):
        rows = ((shape.M, shape.H), (shape.N, shape.Hkv), (shape.N, shape.Hkv), (shape.M, shape.H))
        return tuple(torch.randn(shape.B, n, heads, shape.D).bfloat16() for n, heads in rows)

    monkeypatch.setattr(Shape, "inputs", inputs)
    monkeypatch.setattr(peers, "free_memory", lambda device: 2**30)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(measure, "captured", lambda prepare: (None, prepare()(), 1.0))
    monkeypatch.setattr(
        measure, "timed", lambda calls, rounds, note: {n: [1.0, 1.0] for n in calls}
    )
    rows = {row["version"]: row for row in measure.measure(suite, shape, rounds=2)}
    expected = {
        "backward": [*VERSIONS, "plain"],
        "decode": [*VERSIONS, "fa2 unsplit", "plain"],
        "ablation fp8": ["fa3"],
        "quantize": [*suites.QUANTIZERS, "copy"],
    }
    for name in expected[suite]:
        assert "reason" not in rows[name] and rows[name]["ms_p50"] == 1.0, rows[name]
    if suite == "backward":
        assert rows["fa2"]["tflops"] == pytest.approx(2.5 * shape.flops() / 1e-3 / 1e12)
    if suite == "quantize":
        read = 2 * 20 * 16 * (2 + 1 + 1) * 2
        assert rows["copy"]["bytes"] == 2 * read
        assert rows["copy"]["tb_per_s"] == rows["copy"]["bytes"] / 1e9


def test_a_lost_gpu_ends_the_process_and_names_the_culprit(faked, monkeypatch):
    faked.competitors = [one_of("good"), one_of("bad", RuntimeError("illegal access"))]

    def synchronize():
        raise RuntimeError("CUDA error: illegal memory access")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    noted = []
    with pytest.raises(measure.DeviceLostError, match="bad left the GPU unusable: .*illegal acc"):
        measure.measure("table", SMALL, 10, noted.append)
    assert noted[-1] == "bad"
