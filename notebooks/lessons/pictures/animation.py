"""The animation above the fold of the README: S visited tile by tile, m, l and o beside it, and
plain attention's S in memory for contrast. The numbers are computed, with NumPy, as they are shown.
"""

import io
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from flash_versions.plot.figures import digest
from lessons.pictures.style import BLUE, GREEN, INK, ORANGE, PALE, SKY, VERMILION, bare, styled

BLOCKS, SIZE, DIM = 6, 4, 4  # tiles of S on a side; rows of a tile; head_dim
DPI = 80
MILLISECONDS, LAST = 260, 2600  # a frame is shown, the last one
COLOURS = 96  # of the palette


class Moment(NamedTuple):
    """After KV block `block` was folded into query tile `tile`."""

    tile: int
    block: int
    row_max: list[float]
    row_sum: list[float]
    o: list[float]  # length of each row's output so far


class Film(NamedTuple):
    """What the animation shows."""

    scores: list[list[float]]
    moments: list[Moment]


def inputs(seed: int = 5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random q, k and v of one head, (rows, head_dim)."""
    random = np.random.default_rng(seed)
    q, k, v = (random.normal(size=(BLOCKS * SIZE, DIM)) for _ in range(3))
    return 1.1 * q, 1.1 * k, v


def film() -> Film:
    """Attention of `inputs` by the online softmax, moment by moment."""
    q, k, v = inputs()
    scores = q @ k.T / np.sqrt(DIM)
    moments = []
    for tile in range(BLOCKS):
        rows = slice(tile * SIZE, (tile + 1) * SIZE)
        row_max, row_sum, acc = np.full(SIZE, -np.inf), np.zeros(SIZE), np.zeros((SIZE, DIM))
        for block in range(BLOCKS):
            keys = slice(block * SIZE, (block + 1) * SIZE)
            s = scores[rows, keys]
            new = np.maximum(row_max, s.max(1))
            p, alpha = np.exp(s - new[:, None]), np.exp(row_max - new)
            row_max, row_sum = new, alpha * row_sum + p.sum(1)
            acc = alpha[:, None] * acc + p @ v[keys]
            o = np.linalg.norm(acc / row_sum[:, None], axis=1)
            moments.append(Moment(tile, block, *(rounded(x) for x in (row_max, row_sum, o))))
    return Film([rounded(row) for row in scores], moments)


def rounded(x: np.ndarray) -> list[float]:
    """Numbers that are the same on every machine."""
    return [round(float(value), 4) for value in x]


@styled
def draw(shown: Film, number: int) -> Figure:
    """One frame."""
    moment, scores = shown.moments[number], np.array(shown.scores)
    figure = Figure(figsize=(9.4, 3.7))
    plain = figure.add_axes((0.015, 0.14, 0.29, 0.72))
    flash = figure.add_axes((0.345, 0.14, 0.29, 0.72))
    matrix(plain, scores)
    matrix(flash, scores)
    plain.set_title("plain attention: S in memory", fontsize=10)
    flash.set_title("FlashAttention: a tile on the chip", fontsize=10)
    for other in shown.moments[number + 1 :]:
        cover(plain, other, "white")
    for other in shown.moments:
        if other is not moment:
            cover(flash, other, PALE if other in shown.moments[:number] else "white")
    for ax in (plain, flash):
        corner = (moment.block * SIZE - 0.5, moment.tile * SIZE - 0.5)
        ax.add_patch(Rectangle(corner, SIZE, SIZE, fill=False, edgecolor=INK, linewidth=2.2))
    written = (number + 1) * SIZE * SIZE
    caption(plain, f"scores in memory: {written}", VERMILION)
    done = (number + 1) // BLOCKS * SIZE
    caption(flash, f"scores in memory: 0, rows of O written: {done}", BLUE)
    limits = [
        np.array([getattr(m, name) for m in shown.moments]) for name in ("row_max", "row_sum")
    ]
    panels: list[tuple[str, list[float], str, Any]] = [
        ("m", moment.row_max, SKY, limits[0].max()),
        ("l", moment.row_sum, ORANGE, limits[1].max()),
        ("|o|", moment.o, GREEN, max(max(m.o) for m in shown.moments)),
    ]
    for place, (name, values, colour, high) in enumerate(panels):
        ax = figure.add_axes((0.695 + 0.1 * place, 0.14, 0.08, 0.72))
        ax.barh(range(SIZE), values, color=colour, edgecolor=INK, linewidth=0.6)
        ax.set_xlim(min(0.0, limits[0].min() if name == "m" else 0.0), 1.05 * float(high))
        ax.set_ylim(SIZE - 0.5, -0.5)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(name, fontsize=10)
        ax.grid(visible=False)
    first = moment.tile * SIZE
    figure.text(
        0.835, 0.045, f"state of query rows {first} to {first + SIZE - 1}", ha="center", fontsize=9
    )
    return figure


def matrix(ax: Axes, scores: np.ndarray) -> None:
    """S as colours, with the lines between tiles."""
    low, high = np.percentile(scores, (4, 96))  # a few large ones would leave the rest grey
    ax.imshow(scores, cmap="cividis", vmin=low, vmax=high, interpolation="nearest", aspect="equal")
    bare(ax)
    for line in range(BLOCKS + 1):
        ax.axhline(line * SIZE - 0.5, color="#bbbbbb", linewidth=0.6)
        ax.axvline(line * SIZE - 0.5, color="#bbbbbb", linewidth=0.6)


def cover(ax: Axes, moment: Moment, colour: str) -> None:
    """Hide a tile of S."""
    place = (moment.block * SIZE - 0.5, moment.tile * SIZE - 0.5)
    ax.add_patch(Rectangle(place, SIZE, SIZE, facecolor=colour, edgecolor="#bbbbbb", linewidth=0.6))


def caption(ax: Axes, text: str, colour: str) -> None:
    """A line below a matrix."""
    ax.text(0.5, -0.09, text, transform=ax.transAxes, ha="center", fontsize=10, color=colour)


def pixels(figure: Figure) -> Image.Image:
    """A figure as an image."""
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())


def gif() -> bytes:
    """The animation as a GIF, whose comment names a digest of what it shows."""
    shown = film()
    frames = [pixels(draw(shown, number)) for number in range(len(shown.moments))]
    palette = frames[-1].quantize(COLOURS, dither=Image.Dither.NONE)
    small = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame in frames]
    buffer = io.BytesIO()
    small[0].save(
        buffer,
        format="gif",
        save_all=True,
        append_images=small[1:],
        duration=[MILLISECONDS] * (len(small) - 1) + [LAST],
        loop=0,
        optimize=False,
        comment=digest(shown).encode(),
    )
    return buffer.getvalue()
