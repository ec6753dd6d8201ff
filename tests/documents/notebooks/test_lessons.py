"""What the notebooks are told with: recorded kernels are the kernels, films are films, answers are
judged.
"""

import io
import re

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image as Picture

import lessons
from flash_versions import VERSIONS, attention_reference
from flash_versions.diff import code_of
from lessons import measurements
from lessons.kernels import source
from lessons.kernels.recording import forward_of
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


def inputs(length=12, heads=1, dtype=torch.float32):
    """q, k, v of one sequence."""
    return [torch.randn(1, length, heads, 8).to(dtype) for _ in range(3)]


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


def test_options_of_a_version_reach_it():
    """FA4's threshold: at 0 the factor of a first block is 0, else 1."""
    q, k, v = inputs(4)
    for threshold, alpha in ((0.0, 0), (8.0, 1)):
        (step,) = lessons.record("fa4", q, k, v, threshold=threshold, **SHAPE)
        assert (step.after["alpha"] == alpha).all()


def draw(number, width=3.0):
    """A figure with a bar."""
    figure = Figure(figsize=(width, 1.5))
    figure.subplots().bar([0], [number])
    return figure


@pytest.mark.parametrize("count, frames", [(1, 1), (7, 7), (53, 20)])
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


@pytest.mark.parametrize(
    "mine, truth, verdict",
    [
        (12, 12.0, "(right)"),
        (11.5, 12.0, "(close)"),
        (24, 12.0, "(2 times too high)"),
        (12.0, 12e9, "(far too low)"),
        ("V", "V", "(right)"),
    ],
)
def test_predictions_stand_beside_the_truth(mine, truth, verdict, capsys):
    """Which is printed as soon as something was guessed."""
    answers.guess(mine, truth, "bytes read", "MiB")
    out = capsys.readouterr().out
    assert verdict in out and f"bytes read: {answers.written(truth)} MiB" in out


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
        (lambda x: None, "not solved yet, it returns None"),
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


def test_sources_are_those_of_the_package(displayed):
    """Under their file and line; without the docstring on request."""
    function = forward_of("fa1").fold_block
    for docstring in (True, False):
        lessons.show(function, docstring=docstring)
        page = displayed[-1]
        title, _, *lines = page["text/plain"].splitlines()
        path, line = re.fullmatch(r"flash_versions/(\S+), line (\d+)", title).groups()
        text = (source.ROOT / path).read_text().replace("  # fmt: skip", "")
        text = text.splitlines()[int(line) - 1 :]
        assert lines[0] == text[0] == "@triton.jit" and "def fold_block(" in lines
        kept = [x for x in text[: len(lines) + 1] if docstring or '"""' not in x]
        assert lines == kept[: len(lines)]
        assert ('"""' in page["text/plain"]) == docstring
        assert "<span" in page["text/html"]


def test_changes_are_those_of_the_lessons(displayed):
    """Without the options of the API, also of the backward."""
    for options in ({}, {"file": "backward.py"}):
        name = "fold_queries" if options else "fold_block"
        lessons.changes("fa1", "fa2", name, context=99, **options)
        lines = displayed[-1]["text/plain"].splitlines()[3:]
        for sign, version in (("-", "fa1"), ("+", "fa2")):
            text = "\n".join(code_of(version + "-backward" * bool(options)))
            kept = [line[1:].rstrip() for line in lines if line[:1] in (sign, " ")]
            assert "\n".join(kept) in text and f"def {name}(" in "\n".join(kept)
        assert "alibi" not in "".join(lines)
    lessons.changes("fa2", "fa3", "softmax_step")
    assert displayed[-1]["text/plain"] == "softmax_step has not changed"


def test_bytes_are_those_of_inputs_and_results():
    x, w = torch.randn(30, 20), torch.randn(20, 50)
    found = bytes_moved(lambda x, w: torch.softmax(x @ w.T.T, 1), x, w)
    assert found == [("mm", 4 * (600 + 1000 + 1500)), ("_softmax", 4 * (1500 + 1500))]
