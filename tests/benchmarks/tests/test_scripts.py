"""The scripts that measure, made small on the CPU: what they call is right, and how they count."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import torch

from flash_versions import attention_reference
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import Accuracy
from flash_versions.versions.oracle.reference import forward
from tests.benchmarks import frame
from tests.benchmarks.attention import decode, dense, headdims_backward, packed, parts
from tests.benchmarks.training import parallel, training_step
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
    monkeypatch.setattr(frame, "captured", lambda prepare: results.append(prepare()()) or [None])
    monkeypatch.setattr(frame, "timed", lambda calls, rounds: {x: [1.0, 2.0, 3.0] for x in calls})
    return results


@pytest.fixture
def written(monkeypatch, tmp_path):
    """The rows that a script writes with these arguments."""

    def written(script, *arguments):
        out = tmp_path / "x.json"
        monkeypatch.setattr(script, "passed", lambda: 1.0)  # however old the process is
        monkeypatch.setattr(script, "new_document", lambda *_, **about: {"rows": [], **about})
        monkeypatch.setattr(sys, "argv", ["x", "--out", str(out), "--device", "cpu", *arguments])
        script.main()
        return json.loads(out.read_text())["rows"]

    return written


def test_contestants_of_packed_sequences_compute_the_same(monkeypatch, timer):
    monkeypatch.setattr(packed, "DEVICE", "cpu")
    monkeypatch.setattr(packed, "TOKENS", 8)
    monkeypatch.setattr(packed, "HEADS", 2)
    shape = packed.Shape(1, 4, 16, 2, True, (3, 5))
    rows = frame.time_all(list(packed.contestants(shape)))
    found = {(row["version"], row["pass"]): row for row in rows}
    done = [key for key, row in found.items() if "reason" not in row]
    results = dict(zip(done, timer, strict=True))
    assert len(found) == 11 and "reason" in found["flash-attn-4", "forward"]
    for way in ("forward", "backward"):
        for x, y in zip(results["fa3", way], results["portable", way]):
            torch.testing.assert_close(x, y.view_as(x), rtol=0.02, atol=0.02)
    row = found["fa3", "backward"]
    assert row["flops"] == 2.5 * found["fa3", "forward"]["flops"]
    assert row["tflops"] == pytest.approx(row["flops"] / 2e-3 / 1e12) and row["ms_p50"] == 2.0


def test_a_copy_is_what_decoding_is_held_against(monkeypatch, timer):
    monkeypatch.setattr(decode, "DEVICE", "cpu")
    rows = {row["version"]: row for row in decode.measure(decode.Shape("x", 3, 32, "uniform", 16))}
    assert all(row["of_copy"] == 1 and row["ms_p50"] == 2.0 for row in rows.values())
    assert rows["fa2"]["tb_per_s"] == pytest.approx(rows["fa2"]["bytes"] / 2e-3 / 1e12)


@pytest.mark.parametrize("number", range(4))
def test_pairs_of_dense_calls(number):
    shape = dense.Shape.drawn(number).short
    q, k = torch.zeros(1, shape.queries, 1, 1), torch.zeros(1, shape.keys, 1, 1)
    _, lse = attention_reference(q, k, k, causal=shape.causal, return_lse=True)
    assert lse.double().exp().sum().item() == pytest.approx(shape.pairs)


@pytest.mark.parametrize("kind", parts.KINDS)
def test_pairs_of_divided_groups(kind, monkeypatch):
    monkeypatch.setattr(parts, "device", "cpu")
    lengths = {"prompt": (128, 64, 64), "packed": (100, 28, 64)}.get(kind, (192,))
    shape = parts.Shape(kind, 64, 1, 1, lengths)
    request = shape.request()
    q, k, v = (torch.zeros_like(x).double() for x in request[:3])
    _, lse, _ = forward(request._replace(q=q, k=k, v=v))
    assert lse.exp().sum().item() == pytest.approx(shape.pairs * parts.GROUP, rel=0.03)


@pytest.mark.parametrize("dims", headdims_backward.DIMS, ids=str)
def test_padding_competes_with_the_default(dims):
    q, k, v = (torch.empty(1, 64, 1, d, dtype=torch.bfloat16) for d in (dims[0], *dims))
    found = headdims_backward.candidates(make_request(q, k, v, causal=True))
    powers = dims in ((128, 128), (256, 256))
    assert [*found] == (["padded"] if powers else ["padded", "default"])


def test_processes_that_check(monkeypatch, capsys):
    def run(command, **_):
        assert command[2:5] == ["tests.benchmarks.some", "--out", "none"]
        return subprocess.CompletedProcess(command, int("2" in command), "found ", "no such thing")

    monkeypatch.setattr(frame.subprocess, "run", run)
    jobs = [("--check", 1), ("--check", 2)]
    assert frame.wrong("some", jobs, 2) == jobs[1:]
    assert sorted(capsys.readouterr().out.splitlines()) == [
        "--check 1: found", "--check 2: found no such thing"
    ]  # fmt: skip
    assert frame.wrong("some", jobs, 2, until=0) == jobs
    right, over = Accuracy(1.0, 1.0, 0.0), Accuracy(3.0, 1.0, 0.0)
    assert frame.share("x", {"o": right}) == 0.5
    with pytest.raises(AssertionError, match="x: lse"):
        frame.share("x", {"o": right, "lse": over})
    assert [*frame.in_time([1, 2], time.monotonic())] == [1, 2] and not [*frame.in_time([1], 0)]


def test_ratios_are_of_tokens_per_second():
    one, two = {"step_tokens_per_second": 100.0}, {"step_tokens_per_second": 190.0}
    alone, many, lost = parallel.speed("GRPO", {1: one, 2: two, 4: {"reason": "no time was left"}})
    assert (many["step_ratio"], many["gpus"]) == (1.9, 2)
    assert "step_ratio" not in alone and "step_ratio" not in lost


def test_a_training_step(written, monkeypatch):
    """It learns; what fails is a reason."""
    monkeypatch.setattr(training_step, "TOKENS", 64)
    few = ("--tiny", "--length", "32", "--steps", "2", "--contestant", "sdpa")
    [row] = written(training_step, *few)
    assert row["rows"] == 2 and row["losses"][-1] < row["losses"][0]
    assert row["tokens_per_second"] == pytest.approx(64 / row["seconds"])
    monkeypatch.setattr(training_step, "random_model", lambda *_: 1 / 0)
    [row] = written(training_step, *few)
    assert row["reason"] == "ZeroDivisionError: division by zero"


def test_a_step_of_generation(written, monkeypatch):
    monkeypatch.setattr(generate_speed, "SHAPES", {"small": SMALL})
    monkeypatch.setattr(generate_speed, "STEPS", dict.fromkeys(generate_speed.STEPS, 4))
    monkeypatch.setattr(generate_speed, "copy_bandwidth", lambda device: 1e9)
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
