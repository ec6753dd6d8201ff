"""The progression itself: one file for each step, plain and whole. Read them in this order.

    fa1  fa1_backward     tiles and an online softmax: scores never leave the chip
    fa2  fa2_backward     less work between the products; split keys
    fa3                   TMA copies tiles; heavy tiles first, among all heads
    fa3_fp8               numbers of 8 bits, with scales
    fa3_hopper            in Gluon: warps that load, warps that compute in turns
    fa4                   fewer rescales; a polynomial for some exponentials
    fa4_hopper            the same in FA3's kernel for Hopper

A lesson computes plain attention, causal or full, at head_dim 64 and 128. Each forward is a version
of `attention`, with the backward of its own file, or FA2's engine where it has none:

    attention(q, k, v, causal=True, version="lesson-fa2")
    python -m flash_versions.lessons.fa2           # is it right, and how fast?
    python -m flash_versions.diff fa1 fa2          # what changes from one file to the next

The kernels in `flash_versions.versions` have the same steps and every option of `attention`.
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from flash_versions.dispatch.version import EXPLICIT, Version
from flash_versions.versions.from_file import make_version

FORWARDS = ("fa1", "fa2", "fa3", "fa3_fp8", "fa3_hopper", "fa4", "fa4_hopper")
BACKWARDS = ("fa1", "fa2")


@cache
def load_lesson(name: str) -> Version:
    """The version of a lesson, such as "fa1": the forward of its file and the backward of the file
    beside it, if there is one. Imports both.
    """
    module, backward = import_module(f"{__name__}.{name}"), None
    if name in BACKWARDS:
        backward = import_module(f"{__name__}.{name}_backward").backward
    return make_version(version_name(name), module, str(file_of(name)), backward)


def file_of(name: str) -> Path:
    """The file of a lesson."""
    return Path(__file__).with_name(f"{name}.py")


def code_of(name: str) -> str:
    """The code of a lesson, without its docstring and the lines by which it checks itself."""
    text = file_of(name).read_text()
    lines = text.splitlines(keepends=True)[ast.parse(text).body[0].end_lineno :]
    return "".join(lines).partition("\n\nif __name__")[0]


def version_name(name: str) -> str:
    """The version of a lesson's file: "lesson-fa3-fp8" of fa3_fp8.py."""
    return f"lesson-{name.replace('_', '-')}"


def unloaded(name: str) -> Version:
    """The same version; its files are imported when it is first asked for something."""

    def ask(what: str) -> Any:
        return lambda *given: getattr(load_lesson(name), what)(*given)

    title, source = f"the lesson {name}.py", str(file_of(name))
    given = title, "", "", source, ask("forward"), ask("limits"), ask("backward")
    return Version(version_name(name), *given)


LESSONS = {version_name(name): unloaded(name) for name in FORWARDS}
EXPLICIT.update(LESSONS)
