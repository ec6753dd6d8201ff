"""Progress on a terminal, in a log, and not at all."""

import io
import re
import sys

import pytest

from transformer.generation.progress import Progress


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self):
        return True


@pytest.fixture
def run(monkeypatch):
    """What a run of ten steps writes that began at one of them; a step takes two seconds."""

    def run(stream, first=1, **options):
        monkeypatch.setattr(sys, "stderr", stream)
        shown = Progress(**options)
        shown.start(10)
        for step in range(first, 11):
            loss = {"loss": f"{1 / step:.2f}"} if step % 5 == 0 else None
            shown.step(step, loss, 2.0 * step)
            if step == 7:
                shown.say("held out: 3")
        shown.close()
        shown.close()
        return stream.getvalue()

    return run


def test_a_log_gets_plain_lines(run):
    assert run(io.StringIO()) == (
        "step 5/10  loss 0.20  2 s/step  00:10 left\n"
        "held out: 3\n"
        "step 10/10  loss 0.10  2 s/step  00:00 left\n"
    )


def test_a_terminal_gets_a_bar(run):
    written = run(Terminal())
    assert "\r" in written and re.search(r"step: 100%\|.*\| 10/10 \[", written)
    assert "loss=0.10" in written and written.count("held out: 3\n") == 1


def test_quiet(run):
    assert run(io.StringIO(), quiet=True) == run(Terminal(), quiet=True) == ""
