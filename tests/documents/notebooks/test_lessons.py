"""What the notebooks are told with: recorded kernels are the kernels, films are films, answers are
judged.
"""

import importlib
import io
import json
import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image as Picture

import lessons
from flash_versions import VERSIONS, attention_reference
from flash_versions.diff import plain_source
from flash_versions.diff.files import ROOT
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from lessons import measurements
from lessons.kernels import compiled, recording, source
from lessons.kernels.compiled import PACKAGE, instructions, recompiled
from lessons.moved import bytes_moved
from lessons.pictures import films
from lessons.practice import answers, exercises, folded

SHAPE = {"block_q": 4, "block_kv": 4}


@pytest.fixture
def displayed(monkeypatch):
    """What a cell would show: a list of display objects or of {type: text}."""
    shown = []
    for module in (films, folded, measurements, source):
        monkeypatch.setattr(module, "display", lambda item, raw=False: shown.append(item))
    return shown


def forward_of(version):
    """The module whose kernel is recorded."""
    return importlib.import_module(f"flash_versions.versions.{version}.forward")


def inputs(length=12, heads=1, dtype=torch.float32):
    """q, k, v of one sequence."""
    return [torch.randn(1, length, heads, 8).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("version", VERSIONS)
def test_recording_changes_no_bit(version, causal):
    """The same results as of a call that nobody watches, and nothing stays wrapped."""
    q, k, v = inputs(40, heads=2, dtype=torch.bfloat16)  # more rows than a decoding kernel takes
    module = forward_of(version)
    before = dict(vars(module))
    found = lessons.record(version, q, k, v, causal=causal, **SHAPE)
    assert [name for name, x in before.items() if getattr(module, name) is not x] == []
    config = LaunchConfig(4, 4, num_warps=4, num_stages=1)
    o, lse, _ = module.forward(make_request(q, k, v, causal=causal), config)
    assert torch.equal(found.o, o) and torch.equal(found.lse, lse)


@pytest.mark.parametrize("version", VERSIONS)
def test_steps_are_every_block_of_every_tile(version):
    """Of a causal call of 3 x 3 blocks those at or below the diagonal, each once."""
    q, k, v = inputs()
    steps = lessons.record(version, q, k, v, causal=True, **SHAPE)
    tiles = {}
    for step in steps:
        tiles.setdefault(step.program, []).append(step.j)
    assert sorted(map(sorted, tiles.values())) == [[0], [0, 1], [0, 1, 2]]


@pytest.mark.parametrize("version", VERSIONS)
def test_steps_hold_what_the_kernel_computes(version):
    """Every array against NumPy in fp64, from the tiles alone."""
    q, k, v = inputs()
    steps = lessons.record(version, q, k, v, **SHAPE)
    last = {}
    for step in steps:
        before, after = step.before, step.after
        scale = 8**-0.5 * (1 if version == "fa1" else np.log2(np.e))
        power = np.exp if version == "fa1" else np.exp2
        np.testing.assert_array_equal(before["k"], k[0, 4 * step.j : 4 * step.j + 4, 0])
        np.testing.assert_array_equal(before["v"], v[0, 4 * step.j : 4 * step.j + 4, 0])
        scores = before["q"].astype(float) @ before["k"].T.astype(float)
        factor = 8**-0.5 if version == "fa1" else 1
        np.testing.assert_allclose(after["s"], scores * factor, rtol=1e-5, atol=1e-6)
        p = power(scores * scale - after["row_max"][:, None])
        np.testing.assert_allclose(after["p"], p, rtol=1e-4)
        if np.isfinite(before["row_max"]).all():
            alpha = power(before["row_max"] - after["row_max"])
            np.testing.assert_allclose(after["alpha"], alpha, rtol=1e-5)
            np.testing.assert_array_equal(before["row_sum"], last[step.program]["row_sum"])
        last[step.program] = after
    truth, _ = attention_reference(q.double(), k.double(), v.double())
    for program, state in last.items():
        rows = q[0, 4 * program : 4 * program + 4, 0]
        first = next(step for step in steps if step.program == program)
        place = next(i for i in range(3) if np.array_equal(first.before["q"], q[0, 4 * i :, 0][:4]))
        o = state["o"] if "o" in state else state["acc"] / state["row_sum"][:, None]
        np.testing.assert_allclose(o, truth[0, 4 * place : 4 * place + 4, 0], rtol=1e-4, atol=1e-5)
        assert o.shape == rows.shape


def test_splits_are_told_apart():
    """By the grid's second axis."""
    q, k, v = inputs()
    steps = lessons.record("fa2", q[:, :4], k, v, num_splits=3, **SHAPE)
    assert [(step.split, step.j) for step in steps] == [(0, 0), (1, 1), (2, 2)]


def test_options_of_a_version_reach_it():
    """FA4's threshold: at 0 the factor of a first block is 0, else 1."""
    q, k, v = inputs(4)
    for threshold, alpha in ((0.0, 0), (8.0, 1)):
        (step,) = lessons.record("fa4", q, k, v, threshold=threshold, **SHAPE)
        assert (step.after["alpha"] == alpha).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tiles_are_read_in_every_dtype(dtype):
    """As numbers, not as bits."""
    q, k, v = inputs(4, dtype=dtype)
    (step,) = lessons.record("fa2", q, k, v, **SHAPE)
    for name, x in (("q", q), ("k", k), ("v", v)):
        np.testing.assert_array_equal(step.before[name], x[0, :, 0].float())


@pytest.mark.parametrize(
    "version, options, words",
    [
        ("fa9", {}, "there is no version 'fa9'"),
        ("fa1", {"block_q": 3}, "block_q=3 is not possible"),
        ("fa1", {"scale": -1.0}, "scale"),
    ],
)
def test_what_cannot_be_recorded_is_refused(version, options, words):
    """In a sentence."""
    with pytest.raises(ValueError, match=words):
        lessons.record(version, *inputs(4), **options)


def test_a_process_that_compiles_records_nothing(monkeypatch):
    """There is nothing to look into."""
    monkeypatch.setattr(recording.interpreter, "enabled", lambda: False)
    with pytest.raises(RuntimeError, match="import lessons before"):
        lessons.record("fa1", *inputs(4))


def draw(number, width=3.0):
    """A figure with a bar."""
    figure = Figure(figsize=(width, 1.5))
    figure.subplots().bar([0], [number])
    return figure


@pytest.mark.parametrize("count, frames", [(1, 1), (7, 7), (20, 20), (53, 20)])
def test_films_have_a_picture_for_each_step(displayed, count, frames):
    """At most 20, the first and the last among them; and a strip for viewers without JavaScript."""
    drawn = []
    films.film(range(count), lambda step: drawn.append(step) or draw(step), "Bars that <grow>")
    player, strip, caption = displayed
    found = re.findall(r'"data:image/png;base64,[^"]+"', player.data.split("const film")[1])
    assert len(found) == frames == len(drawn)
    assert (drawn[0], drawn[-1]) == (0, count - 1)
    assert f'max="{frames}"' in player.data and "Bars that &lt;grow&gt;" in player.data
    assert len(player.data) <= films.MAX_BYTES
    assert "http" not in player.data  # it fetches nothing
    assert "Bars that <grow>" in caption.data
    width, height = Picture.open(io.BytesIO(strip.data)).size
    columns, rows = min(3, frames), -(-min(6, frames) // 3)
    assert (width, height) == (columns * 300, rows * 150)


def test_flat_areas_keep_their_colours():
    """A map of 100 greens and two small cells of other colours stays as it was drawn."""
    shades = np.array([(0, 100 + i, 0) for i in range(100)], np.uint8).repeat(40, 0)
    drawn = np.concatenate([shades, [(0, 128, 128)] * 4, [(255, 0, 0)] * 4]).astype(np.uint8)
    drawn = drawn.reshape(-1, 8, 3)
    shown = films.with_palette(Picture.fromarray(drawn))
    assert np.array_equal(np.array(shown.convert("RGB")), drawn)


def test_rare_colours_become_their_neighbours():
    """Also one that is far from the frequent ones, where a palette does not hold all colours."""
    greys = np.arange(256, dtype=np.uint8).repeat(40)[:, None].repeat(3, 1)
    purples = np.array([(45, 0, 40 + i) for i in range(40)], np.uint8)
    drawn = np.concatenate([greys, purples])[None]
    shown = np.array(films.with_palette(Picture.fromarray(drawn)).convert("RGB"))
    assert np.abs(shown.astype(int) - drawn).max() <= 3


def test_films_are_the_same_each_time(displayed):
    """Byte for byte."""
    for _ in range(2):
        films.film(range(3), draw, "Bars")
    assert displayed[0].data == displayed[3].data
    assert displayed[1].data == displayed[4].data


@pytest.mark.parametrize(
    "steps, picture, words",
    [
        ([], draw, "no step"),
        (range(2), lambda step: draw(step, width=2.0 + step), "one size"),
    ],
)
def test_films_that_cannot_be_shown_are_refused(displayed, steps, picture, words):
    """In a sentence, before anything is shown."""
    with pytest.raises(ValueError, match=words):
        films.film(steps, picture, "caption")
    assert not displayed


def test_films_that_are_too_large_are_refused(displayed, monkeypatch):
    """After smaller pictures were tried."""
    films.film(range(3), draw, "caption")
    monkeypatch.setattr(films, "MAX_BYTES", len(displayed[0].data) - 1)
    films.film(range(3), draw, "caption")
    assert len(displayed[3].data) <= films.MAX_BYTES
    monkeypatch.setattr(films, "MAX_BYTES", 2000)
    with pytest.raises(ValueError, match="more than 2,000"):
        films.film(range(3), draw, "caption")


@pytest.mark.parametrize(
    "mine, truth, verdict",
    [
        (12, 12.0, "(right)"),
        (11.5, 12.0, "(close)"),
        (24, 12.0, "(2 times too high)"),
        (6, 12.0, "(2 times too low)"),
        (12.0, 12e9, "(far too low)"),
        (-12, 12, "(not what you said)"),
        ("K", "V", "(not what you said)"),
        ("V", "V", "(right)"),
    ],
)
def test_predictions_stand_beside_the_truth(mine, truth, verdict, capsys):
    """Which is printed as soon as something was guessed."""
    answers.guess(mine, truth, "bytes read", "MiB")
    out = capsys.readouterr().out
    assert verdict in out and f"bytes read: {answers.written(truth)} MiB" in out


def test_the_truth_is_folded_before_a_guess(displayed, capsys):
    """Neither printed nor shown by a front end without HTML."""
    answers.guess(None, 12.0, "bytes <read>", "MiB")
    assert capsys.readouterr().out == "you did not guess\n"
    (page,) = displayed
    assert "12" not in page["text/plain"]
    answer = "<details><summary>the answer</summary>bytes &lt;read&gt;: 12 MiB</details>"
    assert page["text/html"] == answer


def test_predictions_are_compared_at_the_end(displayed, monkeypatch, capsys):
    """Each once, the last guess counts, and what was not guessed is not told."""
    monkeypatch.setattr(answers, "PREDICTIONS", {})
    answers.predictions()
    assert capsys.readouterr().out == "you made 0 of 0 predictions\n"
    for mine, truth, what in (
        (None, 77, "programs"),
        (5, 10, "bytes"),
        (9, 10, "rows"),
        (21, 10, "blocks"),
        (-10, 10, "signs"),
        (0, 0.0, "zeros"),
        ("K", "V", "letters"),
        ("V", "V", "words"),
        (4.9, 10, "bytes"),
    ):
        answers.guess(mine, truth, what, "of them")
    capsys.readouterr()
    answers.predictions()
    first, second, *lines = capsys.readouterr().out.splitlines()
    assert first == "you made 7 of 8 predictions"
    assert second == "within 2 x, or right: 3 of 7"  # rows, zeros, words
    assert lines[0] == "* bytes: you said 4.9, it is 10 of them (2 times too low)"
    assert not [line for line in lines if "programs" in line or "77" in line]


@pytest.mark.parametrize(
    "value, text",
    [(7, "7"), (1234567, "1,234,567"), (0.12345, "0.1235"), (12345.678, "12,346"), (True, "True")],
)
def test_numbers_are_written_short(value, text):
    """With the digits that count."""
    assert answers.written(value) == text


@pytest.fixture
def doubling(monkeypatch, tmp_path):
    """An exercise."""
    monkeypatch.setattr(exercises, "EXERCISES", {})
    monkeypatch.setattr(folded, "SOLUTIONS", tmp_path)
    (tmp_path / "00_start").mkdir()
    (tmp_path / "00_start/doubling.py").write_text("def doubling(x):\n    return x + x\n")

    @exercises.exercise("doubling", "twice what it is", "add <it> to itself")
    def check_doubling(double):
        found = double(3)
        if found != 6:  # pytest would add words to an assert
            raise AssertionError(f"of 3 it is {found}; it should be 6")


@pytest.mark.parametrize(
    "function, verdict",
    [
        (lambda x: 2 * x, "right"),
        (lambda x: x, "wrong. of 3 it is 3; it should be 6"),
        (lambda x: x.y, "wrong. It raised AttributeError: 'int' object has no attribute 'y'"),
        (lambda x: None, "not solved yet"),
    ],
)
def test_exercises_have_three_verdicts(doubling, displayed, capsys, function, verdict):
    """And never end a notebook; help is folded, one step in the other, until it is right."""
    answers.check("doubling", function)
    assert capsys.readouterr().out == f"doubling: {verdict}\n"
    if verdict == "right":
        assert not displayed
        return
    (page,) = displayed
    assert page["text/plain"] == "A solution is in solutions/00_start/doubling.py."
    order = [r"<details><summary>first of 2", "twice", "<details><summary>second of 2"]
    order += ["add &lt;it&gt;", "<details><summary>a solution", "doubling", "</details>" * 3]
    assert re.search(".*".join(order), page["text/html"], re.DOTALL)


def test_an_exercise_that_is_not_written_is_not_wrong(doubling, capsys):
    """Also if it says so itself."""

    def double(x):
        raise NotImplementedError

    answers.check("doubling", double)
    assert "not solved yet" in capsys.readouterr().out


def test_unknown_exercises_are_refused(doubling):
    """With those that there are."""
    with pytest.raises(ValueError, match="there is no exercise 'halving'; there are doubling"):
        answers.check("halving", abs)


def test_sources_are_those_of_the_package(displayed):
    """Under their file and line; without the docstring on request."""
    function = forward_of("fa1").fold_block
    for docstring in (True, False):
        lessons.show(function, docstring=docstring)
        page = displayed[-1]
        title, _, *lines = page["text/plain"].splitlines()
        path, line = re.fullmatch(r"flash_versions/(\S+), line (\d+)", title).groups()
        text = (ROOT / path).read_text().splitlines()[int(line) - 1 :]
        assert lines[0] == text[0] == "@triton.jit" and "def fold_block(" in lines
        kept = [x for x in text[: len(lines) + 1] if docstring or '"""' not in x]
        assert lines == kept[: len(lines)]
        assert ('"""' in page["text/plain"]) == docstring
        assert "<span" in page["text/html"]


@pytest.mark.parametrize(
    "version, name, option", [("fa2", "fold_block", "mods"), ("fa3-hopper", "attend", "scored")]
)
def test_plain_sources_lead_to_the_full_ones(displayed, version, name, option):
    """What serves an option is in the fold-out only."""
    lessons.show_plain(version, name)
    page = displayed[-1]
    plain, full = page["text/html"].split("<details>")
    assert page["text/plain"].startswith(f"{version}/forward.py, as a causal call")
    assert f"def {name}(" in page["text/plain"] and option not in page["text/plain"]
    assert option not in plain and option in full
    with pytest.raises(ValueError, match="nothing"):
        lessons.show_plain(version, "nothing")


def test_changes_lead_from_one_version_to_the_next(displayed):
    """What goes is the old version's, what comes is the new one's, also where it is imported."""
    old, algebra = "versions/fa1/forward.py", "versions/tiles/algebra.py"
    for name, page in (("fold_block", "versions/fa2/forward.py"), ("softmax_step", algebra)):
        lessons.changes("fa1", "fa2", name, plain=False)
        head, *lines = displayed[-1]["text/plain"].splitlines()
        assert head == f"--- {old}" and lines[0] == f"+++ {page}"
        for sign, file in (("-", old), ("+", page)):
            marked = [line[1:] for line in lines[1:] if line[:1] == sign]
            assert marked and set(marked) <= set((ROOT / file).read_text().splitlines())
    lessons.changes("fa2", "fa3", "softmax_step", plain=False)
    assert f"has not changed: both versions use {algebra}" in displayed[-1]["text/plain"]


def test_changes_are_those_of_plain_kernels(displayed):
    """Without the options of the API, also of the backward."""
    for options in ({}, {"file": "backward.py"}):
        name = "fold_queries" if options else "fold_block"
        lessons.changes("fa1", "fa2", name, context=99, **options)
        lines = displayed[-1]["text/plain"].splitlines()[3:]
        for sign, version in (("-", "fa1"), ("+", "fa2")):
            source = plain_source(version, backward=bool(options))
            kept = [line[1:].rstrip() for line in lines if line[:1] in (sign, " ")]
            assert "\n".join(kept) in source and f"def {name}(" in "\n".join(kept)
        assert "alibi" not in "".join(lines)
    lessons.changes("fa2", "fa3", "softmax_step")
    assert displayed[-1]["text/plain"] == "softmax_step has not changed"


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("where", [("fa1", "fa9", "fold_block"), ("fa1", "fa2", "nothing")])
def test_changes_of_nothing_are_refused(where, plain):
    """In a sentence."""
    words = "there is no fa9|neither defines nor imports 'nothing'"
    if plain:
        words = "there is no version 'fa9'|plain kernels of fa1 have no 'nothing'; they have soft"
    with pytest.raises(ValueError, match=words):
        lessons.changes(*where, plain=plain)


def test_instructions_are_those_of_the_architecture(tmp_path, monkeypatch):
    """Ampere multiplies with mma.sync, Hopper with wgmma; a second answer comes from the cache."""
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    both = lessons.instructions("fa1", ("sm_80", "sm_90"), head_dim=64, causal=True)
    assert both["sm_80"]["mma_sync"] > 0 and both["sm_80"]["wgmma"] == 0
    assert both["sm_90"]["mma_sync"] == 0 and both["sm_90"]["wgmma"] > 0
    assert both["sm_80"]["registers"] <= 255 and both["sm_80"]["opcodes"]["HMMA"] > 0
    monkeypatch.setattr(compiled, "compiled", None)
    assert lessons.instructions("fa1", "sm_90", head_dim=64, causal=True) == both["sm_90"]
    with pytest.raises(ValueError, match="forward_kernel, not 'other'"):
        lessons.instructions("fa1", "sm_90", kernel="other", head_dim=64, causal=True)


def test_calls_become_options(tmp_path, monkeypatch):
    """And what the command refuses is a sentence here."""
    asked = []
    monkeypatch.setattr(compiled, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(compiled, "compiled", lambda calls: asked.append(calls) or [(2, "", "no.")])
    with pytest.raises(ValueError, match="no."):
        lessons.instructions("fa2", causal=True, softcap=None, window=(64, 0), kv_heads=2)
    end = ["--causal", "--window", "64", "0", "--kv-heads", "2"]
    assert asked == [[["fa2", "--arch", "sm_90", "--json", *end]]]
    assert not list(tmp_path.iterdir())


def test_measured_figures_are_shown(displayed):
    """As a PNG, over its caption."""
    lessons.measured("memory", "Look at this.")
    image, caption = displayed
    assert caption.data == "*Look at this.*"
    assert Picture.open(io.BytesIO(image.data)).size[0] > 300


def test_figures_that_are_not_there_are_refused():
    """With those that there are."""
    with pytest.raises(ValueError, match="no figure 'speed'; there are forward"):
        lessons.measured("speed")


def test_without_a_gpu_nothing_is_timed(displayed, monkeypatch):
    """A sentence says so."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lessons.own_gpu()
    assert "no GPU here" in displayed[0].data


def test_own_gpu_stands_beside_the_h200(displayed, monkeypatch, tmp_path):
    """What the benchmark writes as bars, the H200's rates of the same shapes as marks."""
    there = measurements.h200_shapes()
    rows = [
        row | {"suite": "quick"} for group in list(there.values())[:4] for row in group.values()
    ]

    def bench(command, **options):
        assert command[1:5] == ["-m", "flash_versions.bench", "--suite", "quick"]
        assert options["env"]["TRITON_INTERPRET"] == "0"
        document = {"machine": {"gpu": "a GPU"}, "rows": rows}
        with open(command[-1], "w") as file:
            json.dump(document, file)
        return type("Done", (), {"returncode": 0})

    figures = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measurements, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(measurements.subprocess, "run", bench)
    monkeypatch.setattr(measurements, "show_figure", lambda figure, alt: figures.append(figure))
    lessons.own_gpu()
    (figure,) = figures
    panels = [ax for ax in figure.axes if ax.patches]
    assert len(panels) == 4
    for ax, group in zip(panels, there.values()):
        rates = [row["tflops"] for row in group.values() if "tflops" in row]
        assert [bar.get_width() for bar in ax.patches] == rates
        assert [line.get_xdata()[0] for line in ax.lines] == rates


def test_a_benchmark_that_fails_is_a_sentence(displayed, monkeypatch):
    """Not the end of the notebook."""
    failed = type("Done", (), {"returncode": 2, "stderr": "error: out of memory\n"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(measurements.subprocess, "run", lambda *args, **named: failed)
    lessons.own_gpu()
    assert "out of memory" in displayed[0].data


def test_a_changed_line_is_compiled():
    """In a copy: the package stays as it is."""
    file, line = (
        "versions/fa1/forward.py",
        "o = (o * (alpha * row_sum)[:, None] + pv) * norm[:, None]",
    )
    before = (PACKAGE / file).read_text()
    same, other = (
        recompiled(file, line, new, "fa1", head_dim=64, causal=True)
        for new in (line, "o = o * alpha[:, None] + pv")
    )
    usual = instructions("fa1", head_dim=64, causal=True)
    assert same["opcodes"] == usual["opcodes"]
    assert other["opcodes"]["FMUL"] < usual["opcodes"]["FMUL"]
    assert (PACKAGE / file).read_text() == before


@pytest.mark.parametrize(
    "line, new, words",
    [
        ("o = 1", "o = 2", "has the line 'o = 1' 0 times, not once"),
        ("p, new_max, new_sum, alpha = softmax_step(s, row_max, row_sum)", "p = nothing",
         "with 'p = nothing' it does not compile: "),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_changed_is_named(line, new, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        recompiled("versions/fa1/forward.py", line, new, "fa1", head_dim=64)


def test_bytes_are_those_of_inputs_and_results():
    x, w = torch.randn(30, 20), torch.randn(20, 50)
    found = bytes_moved(lambda x, w: torch.softmax(x @ w.T.T, 1), x, w)
    assert found == [("mm", 4 * (600 + 1000 + 1500)), ("_softmax", 4 * (1500 + 1500))]
