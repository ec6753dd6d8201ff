"""A film of a running kernel: a picture for each step, a slider, and a strip for plain viewers."""

import base64
import hashlib
import io
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

import matplotlib as mpl
from IPython.display import HTML, Image, Markdown, display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image as Picture

MAX_FRAMES = 20
MAX_BYTES = 600_000
STRIP = 6  # pictures in the static strip
COLOURS = 256  # of a picture's palette
DPIS = (100, 80, 64, 48)
PLAYER = """<div id="{id}" style="max-width:{width}px">
<img alt="{alt}" style="width:100%" src="{first}">
<label>step <output>1</output> of {count}
<input type="range" min="1" max="{count}" value="1" style="width:60%"></label>
<script>(() => {{
  const film = document.getElementById("{id}"), frames = [{frames}];
  film.querySelector("input").addEventListener("input", event => {{
    film.querySelector("img").src = frames[event.target.value - 1];
    film.querySelector("output").textContent = event.target.value;
  }});
}})();</script></div>"""


def film(steps: Sequence[Any], draw: Callable[[Any], Figure], caption: str) -> None:
    """Display one picture for each step with a slider, then a strip of some of them, a caption.

    Args:
        steps: what is drawn, such as a `Recording`; of more than 20, every so many are shown.
        draw: makes a matplotlib Figure of a step; figures of one film have one size. Keep the
            limits of its axes fixed, or the film jumps.
        caption: what there is to see.

    Raises:
        ValueError: there is no step, figures differ in size, or the film is too large.
    """
    if not len(steps):
        raise ValueError("there is no step to show.")
    chosen = spread(len(steps), MAX_FRAMES)
    for dpi in DPIS:
        frames = [picture(draw(steps[index]), dpi) for index in chosen]
        encoded = [encode(frame) for frame in frames]
        player = play(encoded, frames[0].width, caption)
        if len(player) <= MAX_BYTES:
            break
    else:
        raise ValueError(
            f"the film of {len(frames)} pictures has {len(player):,} bytes, more than "
            f"{MAX_BYTES:,}; draw smaller figures or show fewer steps."
        )
    still = png(strip([frames[i] for i in spread(len(frames), STRIP)]))
    display(HTML(player))
    display(Image(still, alt=caption))
    display(Markdown(f"*{caption}*"))


def spread(count: int, limit: int) -> list[int]:
    """At most `limit` indices below `count`, evenly from the first to the last."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def picture(figure: Figure, dpi: int) -> Picture.Image:
    """A figure as pixels with a palette."""
    FigureCanvasAgg(figure)
    buffer = io.BytesIO()
    with mpl.rc_context({"savefig.bbox": None}):
        figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
    return with_palette(Picture.open(buffer).convert("RGB"))


def with_palette(image: Picture.Image) -> Picture.Image:
    """A picture with a palette in which also the colours of few pixels have a near one."""
    kind, none = Picture.Quantize.MAXCOVERAGE, Picture.Dither.NONE
    return image.quantize(COLOURS, method=kind, dither=none)


def png(image: Picture.Image) -> bytes:
    """The bytes of a PNG."""
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def encode(image: Picture.Image) -> str:
    """A picture as the address that a page can hold."""
    return f"data:image/png;base64,{base64.b64encode(png(image)).decode()}"


def play(frames: list[str], width: int, caption: str) -> str:
    """The page's piece with a slider. It fetches nothing, and its name is always the same."""
    name = f"film-{hashlib.sha256(f'{len(frames)} {caption}'.encode()).hexdigest()[:12]}"
    listed = ",".join(f'"{frame}"' for frame in frames)
    return PLAYER.format(
        id=name, width=width, alt=escape(caption), first=frames[0], count=len(frames), frames=listed
    )


def strip(frames: list[Picture.Image]) -> Picture.Image:
    """Pictures side by side, three to a row.

    Raises:
        ValueError: they differ in size.
    """
    if len({frame.size for frame in frames}) > 1:
        raise ValueError("the figures of a film must have one size.")
    width, height = frames[0].size
    columns = min(3, len(frames))
    rows = -(-len(frames) // columns)
    sheet = Picture.new("RGB", (columns * width, rows * height), "white")
    for number, frame in enumerate(frames):
        sheet.paste(frame.convert("RGB"), (number % columns * width, number // columns * height))
    return with_palette(sheet)
