"""The measurement of generation, made small: its contestants, failures and added rows."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from tests.benchmarks.transformer import generate_speed
from tests.helpers.models.random_checkpoint import QWEN
from transformer.model.config import Config

TINY = Config(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=256,
    norm_eps=1e-5,
    rope=QWEN.rope,
    tied_embeddings=True,
)
FEW = ["--device", "cpu", "--case", "tiny", "--batch", "1", "--prompt", "16", "--tokens", "4"]


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    """One small model, few steps, and a memory bandwidth that takes no time to measure."""
    monkeypatch.setattr(generate_speed, "SHAPES", {"tiny": TINY})
    monkeypatch.setattr(generate_speed, "STEPS", dict.fromkeys(generate_speed.STEPS, 4))
    monkeypatch.setattr(generate_speed, "copy_bandwidth", lambda device: 1e9)
    monkeypatch.setattr(generate_speed, "new_document", document)
    monkeypatch.setattr(generate_speed, "passed", lambda: 1.0)  # however old the process is
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def document(device, libraries, **about):
    """A document of another day in each run."""
    document.days = getattr(document, "days", 0) + 1
    return {"date": f"day {document.days}", "commit": f"{document.days}", **about, "rows": []}


def measured(monkeypatch, out, *arguments):
    """The document that the command writes, and its rows by contestant. A token takes
    a millisecond, however busy this machine is.
    """
    seconds_of = generate_speed.seconds_of
    steady = lambda call, tokens, *about: (tokens / 1000, seconds_of(call, tokens, *about)[1])  # noqa: E731
    monkeypatch.setattr(generate_speed, "seconds_of", steady)
    monkeypatch.setattr(sys, "argv", ["generate_speed", "--out", str(out), *FEW, *arguments])
    generate_speed.main()
    found = json.loads(out.read_text())
    return found, {row["contestant"]: row for row in found["rows"]}


def test_all_contestants_say_the_same(monkeypatch, tmp_path):
    """With the same weights, the compiled one as well; every row has its times."""
    found, rows = measured(monkeypatch, tmp_path / "x.json")
    assert [*rows] == ["ours", "torch compiled", "transformers compiled", "transformers"]
    assert [row.get("reason") for row in rows.values()] == [None] * 4
    assert len({tuple(row["said"]) for row in rows.values()}) == 1
    for row in rows.values():
        assert row["ms_per_step"] == pytest.approx(row["bound_ms"] / row["share"])
    [ratios] = found["ratios"].values()
    assert {*ratios} == {"torch compiled", "transformers compiled", "transformers"}


def test_the_compiled_contestant_is_what_its_name_says(monkeypatch):
    """A static cache and CUDA graphs are asked for; the longest call comes first, since a cache
    that grew afterwards would compile the step again.
    """
    asked, calls = {}, []
    monkeypatch.setattr(generate_speed, "transformers", lambda *args, **more: asked.update(more))
    generate_speed.transformers_compiled(None, None)
    assert asked["cache_implementation"] == "static"
    assert asked["compile_config"].mode == "reduce-overhead"
    generate_speed.warm_up(calls.append, "transformers compiled", (1, 64, 320))
    assert calls == [320, 64, 1]


def test_a_failure_is_a_reason_and_the_others_go_on(monkeypatch, tmp_path):
    def fails(model, prompts):
        raise RuntimeError("no compiler here")

    monkeypatch.setitem(generate_speed.CALLS, "transformers compiled", fails)
    names = ["ours", "transformers compiled", "transformers"]
    found, rows = measured(monkeypatch, tmp_path / "x.json", "--contestant", *names)
    assert rows["transformers compiled"]["reason"] == "RuntimeError: no compiler here"
    assert "ms_per_step" in rows["ours"] and "ms_per_step" in rows["transformers"]
    [ratios] = found["ratios"].values()
    assert {*ratios} == {"transformers"}


def test_added_rows_replace_their_own_kind_and_keep_the_others(monkeypatch, tmp_path):
    """An earlier row says of which commit it is. What fails, or gets no time, replaces no time."""
    out = tmp_path / "x.json"
    before, first = measured(monkeypatch, out, "--contestant", "ours", "transformers")
    after, second = measured(monkeypatch, out, "--add", "--contestant", "ours")
    assert len(after["rows"]) == 2 and "commit" not in second["ours"]
    kept = first["transformers"] | {"date": before["date"], "commit": before["commit"]}
    assert second["transformers"] == kept
    _, third = measured(monkeypatch, out, "--add", "--seconds", "0")
    assert third["ours"] == second["ours"] | {"date": after["date"], "commit": after["commit"]}
    assert third["transformers"] == kept
    assert third["transformers compiled"]["reason"] == "no time was left after 0 s"


def test_a_context_that_is_too_short_is_left_out():
    """The prompt, the answer and the further steps of the one that takes the fewest must fit."""
    args = generate_speed.parser("", seconds=1.0).parse_args(["--out", "x"])
    args.prompt, args.batch, args.tokens = [16, 250], [1], 4
    args.contestant = [*generate_speed.CALLS]
    turns = [*generate_speed.turns(args, replace(TINY, max_positions=256))]
    assert turns == [(1, 16, name) for name in generate_speed.CALLS]
