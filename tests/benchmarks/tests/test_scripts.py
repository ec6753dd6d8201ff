"""The scripts that measure, made small on the CPU: what they call is right, and how they count."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from flash_versions.bench import measure
from flash_versions.versions.oracle.reference import forward
from tests.benchmarks import harness
from tests.benchmarks.attention import suites
from tests.benchmarks.training import grpo_exact, training_step
from tests.benchmarks.transformer import generate_speed
from tests.benchmarks.transformer.torch_decoder import TorchDecoder
from tests.helpers.models.random_checkpoint import TINY
from transformer.generation.engine import generate

SMALL = replace(
    TINY, vocab_size=64, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2,
    num_kv_heads=1, max_positions=256, qkv_bias=False,
)  # fmt: skip


@pytest.fixture
def timer(monkeypatch):
    """What is captured is called at once; each call takes 2 ms. The results, as captured."""
    results = []

    def captured(prepare):
        results.append(prepare()())
        return None, results[-1], 0.0

    monkeypatch.setattr(measure, "captured", captured)
    monkeypatch.setattr(measure, "timed", lambda calls, *_: {x: [1.0, 2.0, 3.0] for x in calls})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return results


@pytest.fixture
def few(monkeypatch):
    """Problems of few tokens and heads, on the CPU."""
    given = {
        "DEVICE": "cpu",
        "HEADS": 4,
        "HIDDEN": 1024,
        "TOKENS": 8,
        "FEW": 100,
        "LONG": 96,
        "MEANS": (4,) * 5,
    }
    for name, value in given.items():
        monkeypatch.setattr(suites, name, value)


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The rows that a script writes with these arguments."""

    def written(script, *arguments):
        out = tmp_path / "x.json"
        monkeypatch.setattr(harness, "passed", lambda: 1.0)  # however old the process is
        monkeypatch.setattr(script, "new_document", lambda *_, **about: {"rows": [], **about})
        monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--device", "cpu", *arguments])
        script.main()
        return json.loads(out.read_text())["rows"]

    return written


@pytest.mark.parametrize("suite", [x for x in suites.SUITES if x != "decode by TMA"])
def test_operations_are_counted(suite, few):
    """Of scores that are 0, the sum of the exponentials is the number of keys that are seen."""
    names, problem = suites.SUITES[suite]
    for name in names[:: len(names) // 4 + 1]:
        found = [call for call in next(problem(name, True)) if call.ours]
        found = [call for call in found if "copies" not in call.row.values()]  # counted as one
        for call in found:
            dims = [x.shape[3] for x in call.given.request[1:3]]
            products = (3, 2) if call.row["pass"] == "backward" else (1, 1)
            flops = 2 * call.given.pairs * sum(n * dim for n, dim in zip(products, dims))
            assert call.row["flops"] == pytest.approx(flops)
        for given in {id(call.given): call.given for call in found}.values():
            request = given.request._replace(sink=None, alibi_slopes=None)
            q, k, v = (torch.zeros_like(x[..., :1]).double() for x in request[:3])
            _, lse, _ = forward(request._replace(q=q, k=k, v=v))
            seen = lse.exp().sum().item()
            # Half of the pairs of a query and its own key do not count under a causal mask.
            assert -1e-3 < seen - given.pairs < lse.numel() / 2 + 1e-3


def test_contestants_of_packed_sequences_compute_the_same(few, timer):
    [rows] = suites.measure("packed, random", "3")
    found = {(row["version"], row["pass"]): row for row in rows}
    done = [key for key in found if "flash-attn-4" not in key]
    results = dict(zip(done, timer))
    assert len(found) == 11 and "reason" in found["flash-attn-4", "forward"]
    for way in ("forward", "backward"):
        for x, y in zip(results["fa3", way], results["portable", way]):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
    row = found["fa3", "backward"]
    assert row["flops"] == 2.5 * found["fa3", "forward"]["flops"]
    assert row["tflops"] == pytest.approx(row["flops"] / 2e-3 / 1e12) and row["ms_p50"] == 2.0


def test_a_copy_is_what_decoding_is_held_against(few, timer, monkeypatch):
    small = suites.Cache(3, 32, "uniform", 16)
    monkeypatch.setattr(suites, "caches", lambda: {"x": small})
    [rows] = suites.measure("decode by TMA", "x")
    assert all(row["of_copy"] == 1 and row["ms_p50"] == 2.0 for row in rows)
    row = rows[-1]
    assert row["version"] == "fa2"
    assert row["tb_per_s"] == pytest.approx(row["bytes"] / 2e-3 / 1e12)
    # Keys and values, 8 heads of 128 dims in 16 bits.
    assert row["bytes"] == 2 * sum(small.drawn()) * 8 * 128 * 2


def test_exact_calls_are_held_against_the_fast_one():
    rows = [{"version": "fast", "tflops": 8.0}, {"version": "512", "tflops": 6.0}, {"version": "1"}]
    assert [row.get("of_fast") for row in suites.of_peers(rows)] == [1, 0.75, None]


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_wrong_results_are_not_timed(way, few, monkeypatch):
    def reference(request):
        return forward(request)[0] * factor

    one = suites.inputs(suites.random_tensors(0, 20, 20, 2, (16, 16)), 210, causal=True)
    monkeypatch.setitem(
        suites.SUITES, "x", (["a"], lambda *_: [suites.calls({}, calls, one, [way])])
    )
    calls, factor = {"fa3": reference}, 1.0
    assert suites.check("x", "a") == {"outcome": "passed", "refused": []}
    factor = 1.1
    with pytest.raises(ArithmeticError, match="wrong output: o" if way == "forward" else "dq"):
        suites.check("x", "a")


def test_what_is_wrong_or_not_checked_is_not_timed(monkeypatch):
    answered = {"1": "passed", "2": "failed", "3": "not tried"}

    def answers(tasks, processes, command, limit, seconds):
        return ((task, {"outcome": answered[task[1]]}) for task in tasks)

    monkeypatch.setattr(suites, "answers", answers)
    assert suites.failed_checks("x", [*answered], 1.0) == ["2", "3"]


def test_a_script_ends_in_time():
    later = harness.passed() + 60
    assert [*harness.in_time([1, 2], later)] == [1, 2] and not [*harness.in_time([1], 0)]
    assert harness.attempt({}, lambda: {"a": 1}, later) == {"a": 1}
    assert "no time was left after 0 s" in harness.attempt({}, dict, 0)["reason"]


def test_a_row_takes_the_place_of_an_earlier_one(tmp_path):
    """Unless it failed."""
    document, out = {"rows": [{"x": 1, "ms": 5.0}, {"x": 2, "reason": "lost"}]}, tmp_path / "x.json"
    harness.keep(document, out, [{"x": 1, "ms": 4.0}, {"x": 3, "ms": 1.0}], place=("x",))
    harness.keep(document, out, [{"x": 1, "reason": "lost"}, {"x": 2, "ms": 2.0}], place=("x",))
    rows = json.loads(out.read_text())["rows"]
    assert rows == [{"x": 1, "ms": 4.0}, {"x": 2, "ms": 2.0}, {"x": 3, "ms": 1.0}]


def test_a_training_step(written, monkeypatch):
    """It learns; what fails is a reason."""
    monkeypatch.setattr(training_step, "TOKENS", 64)
    few = ("--tiny", "--length", "32", "--steps", "2", "--contestant", "sdpa")
    [row] = written(training_step, *few)
    assert row["rows"] == 2 and row["losses"][-1] < row["losses"][0]
    assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
    monkeypatch.setattr(training_step, "random_model", lambda *_: 1 / 0)
    [row] = written(training_step, *few)
    assert row["reason"] == "division by zero"


def test_a_step_of_generation(written, monkeypatch):
    monkeypatch.setattr(generate_speed, "SHAPES", {"small": SMALL})
    monkeypatch.setattr(generate_speed, "STEPS", dict.fromkeys(generate_speed.STEPS, 4))
    monkeypatch.setattr(generate_speed, "copy_bandwidth", lambda *_: 1e-3)
    spent = generate_speed.seconds_of
    monkeypatch.setattr(generate_speed, "seconds_of", lambda *x: (x[1] / 1000, spent(*x)[1]))
    few = ("--case", "small", "--batch", "1", "--prompt", "16", "--tokens", "4")
    [row] = written(generate_speed, *few, "--contestant", "ours")
    assert row["ms_per_step"] == pytest.approx(1.0) and len(row["said"]) == 4
    assert row["share"] == pytest.approx(row["bound_ms"] / row["ms_per_step"])


def test_the_decoder_in_torch_alone_says_what_ours_says():
    model = generate_speed.random_model(SMALL, None, torch.device("cpu"), torch.float32, "torch")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=0.5)
    prompts = torch.randint(64, (3, 9))
    completions, _ = generate(model, generate_speed.NoText(), prompts.tolist(), max_tokens=12)
    theirs = TorchDecoder(model, 3, 21)
    theirs.step = theirs.forward  # not compiled, which takes long
    assert theirs.generate(prompts, 12).tolist() == [x.tokens for x in completions]


def test_exact_grpo_is_measured(written, monkeypatch):
    """Small on the CPU, steps of both kinds by turns."""
    one = grpo_exact.layout_suite, [{"prompts": 1, "exact": True}]
    monkeypatch.setitem(grpo_exact.SUITES, "layout", one)
    for row in written(grpo_exact, "--tiny", "--rounds", "1", "--suite", "layout"):
        assert set(row["ratios"]) == {"rollout", "learn", "step"}, row
