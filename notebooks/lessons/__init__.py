"""What the notebooks are told with: sources, recorded kernels, films, predictions, exercises.

    from lessons import show, show_plain, changes, record, film, instructions
    from lessons import guess, predictions, check, checked, measured, own_gpu

The kernels themselves are those of `flash_versions`: nothing here computes attention. Notebooks run
in the folder `notebooks/`, where this package is found.

Importing it turns Triton's interpreter on, also where there is a GPU, because `record` looks into
running kernels. That only works before triton is imported, so this import comes first.
"""

import os
import sys

if "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from lessons.build.claims import checked  # noqa: E402
from lessons.kernels.compiled import instructions, recompiled  # noqa: E402
from lessons.kernels.recording import Recording, Step, record  # noqa: E402
from lessons.kernels.source import changes, show, show_plain  # noqa: E402
from lessons.measurements import measured, own_gpu  # noqa: E402
from lessons.moved import bytes_moved  # noqa: E402
from lessons.pictures.films import film  # noqa: E402
from lessons.practice import puzzles  # noqa: E402
from lessons.practice.answers import check, guess, predictions  # noqa: E402

puzzles.register()

__all__ = [
    "Recording",
    "Step",
    "bytes_moved",
    "changes",
    "check",
    "checked",
    "film",
    "guess",
    "instructions",
    "measured",
    "own_gpu",
    "predictions",
    "record",
    "recompiled",
    "show",
    "show_plain",
]
