"""Which loops the emulator refuses, as Triton would compile them to other ones than Python runs."""

import pytest

from flash_versions.dispatch.emulator import carried, emulator

LOOP = """
@gluon.jit
def kernel(stage, steps):
    {before}
    for i in {range}(steps):
        {begin}
        stage = stage + 1
        {end}
"""
FINE = {
    "a value of its own": ("before = stage + 0", "before = stage", ""),
    "another name": ("before = steps", "before = stage", ""),
    "behind the change": ("before = stage", "", "before = stage"),
    "first in the loop": ("", "before = stage", ""),
    "changed between": ("before = stage\n    stage = stage * 2", "before = stage", ""),
    "assigned anew": ("before = stage\n    before = before + 0", "before = stage", ""),
}


def text(before, begin, end, range="range"):
    return LOOP.format(before=before, begin=begin, end=end, range=range)


def test_a_name_that_is_not_carried_is_refused():
    with pytest.raises(ValueError, match="mine, line 6: before = stage also comes before the loop"):
        carried.check(text("before = stage", "before = stage", ""), "mine")


@pytest.mark.parametrize("parts", FINE.values(), ids=FINE)
def test_others_are_not(parts):
    carried.check(text(*parts), "mine")


def test_python_is_not_refused():
    kernel = text("before = stage", "before = stage", "")
    carried.check(kernel.replace("@gluon.jit", ""), "mine")


def test_an_unrolled_loop_carries_nothing():
    carried.check(text("before = stage", "before = stage", "", "gl.static_range"), "mine")


def test_a_file_is_read_before_it_runs(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(text("before = stage", "before = stage", ""))
    with pytest.raises(ValueError, match="mine.py, line 6: .*such as stage . 0"):
        emulator.run_file(path)
