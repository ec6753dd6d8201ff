"""Curves of GRPO runs: what is drawn, of one run and of several."""

import shutil
from pathlib import Path

from matplotlib.figure import Figure

from transformer.rl import curves
from transformer.rl.run import read_metrics

PNG = b"\x89PNG\r\n\x1a\n"


def drawn_lines(monkeypatch, folders: list[Path], path: Path) -> dict[str, list]:
    """Title of a panel -> (label, x, y) of its lines."""
    figures = []

    class Kept(Figure):
        def __init__(self, *arguments, **keywords):
            super().__init__(*arguments, **keywords)
            figures.append(self)

    monkeypatch.setattr("matplotlib.figure.Figure", Kept)
    curves.draw(folders, path)
    [figure] = figures
    return {
        axis.get_title(): [
            (line.get_label(), list(line.get_xdata()), list(line.get_ydata()))
            for line in axis.lines
        ]
        for axis in figure.axes
    }


def test_panels_hold_what_was_measured(finished_run, tmp_path, monkeypatch):
    lines = [{**line, "pass@1": 0.5} for line in read_metrics(finished_run)]  # of two k
    monkeypatch.setattr(curves, "read_metrics", lambda folder: lines)
    panels = drawn_lines(monkeypatch, [finished_run], tmp_path / "one.png")
    assert (tmp_path / "one.png").read_bytes().startswith(PNG)
    for metric, title in curves.PANELS:
        expected = [line[metric] for line in lines if metric in line and "step" in line]
        (_, x, y), *marks = panels[title]
        assert len(marks) == (metric == "reward")
        assert (x, y) == ([1, 2, 3], expected)
    evaluations = [line for line in lines if "evaluation" in line]
    held_out = {label: (x, y) for label, x, y in panels["right answers to held-out problems"]}
    for key in ("greedy", "sampled", "pass@1", "pass@2"):
        assert held_out[key] == ([0, 2, 3], [line[key] for line in evaluations])
    _, (label, *points) = panels["reward of the rollouts"]
    assert label == "held-out"
    assert points == [[0, 2, 3], [line["reward"] for line in evaluations]]


def test_the_plot_command(grpo_command, finished_run, tmp_path):
    other, torn = (shutil.copytree(finished_run, tmp_path / name) for name in ("other", "torn"))
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"step": 4, "rew')  # the process was killed
    code, err = grpo_command("plot", finished_run, other, torn, "--out", tmp_path / "plot.png")
    assert (code, err) == (0, f"wrote {tmp_path / 'plot.png'}\n")
    assert (tmp_path / "plot.png").read_bytes().startswith(PNG)
    code, err = grpo_command("plot", finished_run, "--out", tmp_path / "plot.poem")
    assert code == 2 and err.startswith("error: ") and "poem" in err
    (torn / "metrics.jsonl").write_text("rubbish\n")
    code, err = grpo_command("plot", torn, "--out", tmp_path / "plot.png")
    assert code == 2
    assert err.startswith(f"error: {torn / 'metrics.jsonl'}, line 1 is not valid JSON")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
