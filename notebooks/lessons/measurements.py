"""What was measured on an H200, as it is committed."""

import matplotlib as mpl
from IPython.display import Image, display

from flash_versions.bench.results import RESULTS, read_results
from flash_versions.plot.figures import PLOTS, STYLE
from lessons.pictures.films import picture, png

DPI = 100


def measured(name: str) -> None:
    """Display a figure of docs/figures, drawn from the committed results.

    Args:
        name: such as "forward", "speedup", "ablation", "memory".

    Raises:
        ValueError: there is no such figure, or nothing was measured for it.
    """
    if name not in PLOTS:
        raise ValueError(f"there is no figure {name!r}; there are {', '.join(PLOTS)}.")
    if not RESULTS.exists():
        raise ValueError(f"{RESULTS} is missing; install from a clone with `pip install -e .`.")
    data = PLOTS[name].data(read_results())
    if data is None:
        raise ValueError(f"nothing was measured to draw {name!r} from.")
    with mpl.rc_context(STYLE):
        drawn = picture(PLOTS[name].draw(data), DPI)
    display(Image(png(drawn), alt=f"measured on an H200: {name}"))
