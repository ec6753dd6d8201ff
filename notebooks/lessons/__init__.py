"""What the notebooks are told with: sources, recorded kernels, films, predictions, exercises.

    from lessons import show, show_plain, changes, record, film, instructions
    from lessons import guess, check, checked, measured

The kernels themselves are those of `flash_versions`: nothing here computes attention. Notebooks run
in the folder `notebooks/`, where this package is found.

Kernels are simulated on the CPU, and `record` looks into them there. A cell that compiles kernels
begins with `%%needs_triton`, see `kernels/needs_triton.py`.
"""

from flash_versions.simulator.errors import unsaid
from lessons.kernels import needs_triton
from lessons.kernels.compiled import instructions, recompiled
from lessons.kernels.recording import Recording, Step, record
from lessons.kernels.source import changes, show, show_plain
from lessons.measurements import measured
from lessons.moved import bytes_moved
from lessons.pictures.films import film
from lessons.practice import puzzles
from lessons.practice.answers import check, checked, guess

unsaid.clear()  # the notebooks themselves say where kernels run
needs_triton.register()
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
    "record",
    "recompiled",
    "show",
    "show_plain",
]
