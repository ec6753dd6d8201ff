"""The animation of the README: plain attention writes all scores S to memory; FlashAttention has
one tile of S on the chip, with the state m, l and o of its rows. Each counts the bytes that it
moves through memory. The scores, the state and FlashAttention's bytes are those of a recording of
FA1 (`python -m lessons.stepper`); plain attention's bytes are computed.
"""

import io
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from flash_versions.plot.figures import digest
from lessons.pictures.style import BLUE, GREEN, GREY, INK, ORANGE, SKY, VERMILION, bare, styled
from lessons.stepper.__main__ import CALLS, FOLDER, read

RECORDING = "fa1-full"
SIZE, DIM = CALLS[RECORDING].block_q, CALLS[RECORDING].head_dim  # rows of a tile; head_dim
BLOCKS = CALLS[RECORDING].queries // SIZE  # tiles of S on a side
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
    moved: int  # bytes that went through memory so far


class Film(NamedTuple):
    """What the animation shows."""

    scores: list[list[float]]
    moments: list[Moment]


@cache
def film() -> Film:
    """The recording as the animation shows it, moment by moment."""
    steps = read(FOLDER / f"{RECORDING}.js")["steps"]
    scores, moments = np.zeros((BLOCKS * SIZE, BLOCKS * SIZE)), []
    state: dict[str, np.ndarray] = {}
    for step in steps:
        found = step.get("set", {})
        state |= {x: np.array(found[x]) for x in ("m", "l", "acc") if x in found}
        tile, block = step["tile"], step.get("block")
        if step["what"] == "scores":
            rows, keys = (slice(x * SIZE, (x + 1) * SIZE) for x in (tile, block))
            scores[rows, keys] = found["s"]
        elif step["what"] == "accumulate":
            moved = step["read"] + step["written"]
            row_max, row_sum = rounded(state["m"]), rounded(state["l"])
            length = rounded(np.linalg.norm(state["acc"], axis=1))
            moments.append(Moment(tile, block, row_max, row_sum, length, moved))
        elif step["what"].startswith("store"):
            moments[-1] = moments[-1]._replace(moved=step["read"] + step["written"])
    return Film([rounded(row) for row in scores], moments)


def rounded(x: np.ndarray) -> list[float]:
    """Numbers of 4 digits behind the point."""
    return [round(float(value), 4) for value in x]


class Bytes(NamedTuple):
    """What went through memory so far, in 16-bit numbers of 2 bytes."""

    scores: int  # S and P, which plain attention writes and reads once each
    rest: int  # Q, K and V read, O and numbers of its rows written


def plain_bytes(number: int) -> Bytes:
    """Plain attention's bytes with frame `number`: it reads Q, K and V once and writes O once."""
    tile, block = divmod(number, BLOCKS)
    rows = (tile + 1) + 2 * (BLOCKS if tile else block + 1) + (tile + (block == BLOCKS - 1))
    return Bytes(4 * 2 * SIZE * SIZE * (number + 1), 2 * rows * SIZE * DIM)


def flash_bytes(number: int) -> Bytes:
    """FA1's, as recorded: no score, but it reads K and V once for every tile of queries. It writes
    m, l and the LSE of each row besides O.
    """
    return Bytes(0, film().moments[number].moved)


@styled
def draw(shown: Film, number: int) -> Figure:
    """One frame."""
    moment, scores = shown.moments[number], np.array(shown.scores)
    figure = Figure(figsize=(10.4, 4.9))
    box(figure, (0.01, 0.03, 0.335, 0.85), "HBM: the GPU's memory", VERMILION)
    box(figure, (0.355, 0.03, 0.335, 0.85), "HBM: the GPU's memory", VERMILION)
    box(figure, (0.72, 0.03, 0.27, 0.85), "chip: registers", BLUE)
    figure.text(0.178, 0.945, "plain attention", ha="center", fontsize=13, weight="bold")
    figure.text(0.672, 0.945, "FlashAttention", ha="center", fontsize=13, weight="bold")

    plain = figure.add_axes((0.065, 0.25, 0.25, 0.53))
    matrix(plain, scores)
    for other in shown.moments[number + 1 :]:
        hidden = {"facecolor": "white", "edgecolor": "#bbbbbb", "linewidth": 0.6}
        plain.add_patch(tile_of(other, **hidden))
    outline = {"fill": False, "edgecolor": INK, "linewidth": 2.2}
    plain.add_patch(tile_of(moment, **outline))
    plain.set_xlabel("keys", fontsize=9)
    plain.set_ylabel("queries", fontsize=9)
    counter(figure, 0.178, plain_bytes(number), "Q, K, V, O")

    flash = figure.add_axes((0.41, 0.25, 0.25, 0.53))
    inputs_and_output(flash, moment)
    flash.add_patch(tile_of(moment, **outline))
    flash.set_xlabel("keys; S is never stored", fontsize=9)
    flash.set_ylabel("queries", fontsize=9)
    counter(figure, 0.522, flash_bytes(number), "Q, K, V, O, m, l, LSE")

    chip(figure, shown, moment, scores)
    return figure


def box(figure: Figure, place: tuple[float, float, float, float], name: str, colour: str) -> None:
    """A memory, with its name on top."""
    x, y, width, height = place
    ax = figure.add_axes(place)
    bare(ax)
    ax.set(xlim=(0, 1), ylim=(0, 1), zorder=-1)
    ax.add_patch(Rectangle((0, 0), 1, 1, fill=False, edgecolor=colour, linewidth=2.5))
    figure.text(x + width / 2, y + height - 0.05, name, ha="center", fontsize=9, color=colour)


def counter(figure: Figure, x: float, moved: Bytes, rest: str) -> None:
    """What went through a memory so far."""
    figure.text(x, 0.115, f"S and P: {moved.scores:,} bytes moved", ha="center", fontsize=10)
    figure.text(x, 0.06, f"{rest}: {moved.rest:,} bytes moved", ha="center", fontsize=10)


def matrix(ax: Axes, scores: np.ndarray) -> None:
    """S as colours, with the lines between tiles."""
    low, high = limits(scores)
    ax.imshow(scores, cmap="cividis", vmin=low, vmax=high, interpolation="nearest", aspect="equal")
    bare(ax)
    for line in range(BLOCKS + 1):
        ax.axhline(line * SIZE - 0.5, color="#bbbbbb", linewidth=0.6)
        ax.axvline(line * SIZE - 0.5, color="#bbbbbb", linewidth=0.6)


def limits(scores: np.ndarray) -> tuple[float, float]:
    """The ends of the colours; a few large scores would leave the rest grey."""
    low, high = np.percentile(scores, (4, 96))
    return float(low), float(high)


def tile_of(moment: Moment, **look: Any) -> Rectangle:
    """The tile of a moment, on S."""
    place = (moment.block * SIZE - 0.5, moment.tile * SIZE - 0.5)
    return Rectangle(place, SIZE, SIZE, **look)


def inputs_and_output(ax: Axes, moment: Moment) -> None:
    """Q, K, V and O round the place of S, which is never stored; a step's part is coloured."""
    end = BLOCKS * SIZE
    bare(ax)
    ax.set(xlim=(-3.2, end + 2.2), ylim=(end - 0.2, -6.5), aspect="equal")
    ax.add_patch(
        Rectangle((-0.5, -0.5), end, end, fill=False, edgecolor=GREY, linestyle="--", linewidth=1)
    )
    last = moment.block == BLOCKS - 1
    for number in range(BLOCKS):
        start = number * SIZE - 0.5
        here, done = number == moment.tile, number < moment.tile or (number == moment.tile and last)
        column, row = number == moment.block, SKY if here else "white"
        for corner, size, colour in (
            ((start, -3), (SIZE, 1.8), ORANGE if column else "white"),  # K
            ((start, -5.6), (SIZE, 1.8), ORANGE if column else "white"),  # V
            ((-3, start), (1.8, SIZE), row),  # Q
            ((end + 0.2, start), (1.8, SIZE), GREEN if done else "white"),  # O
        ):
            ax.add_patch(Rectangle(corner, *size, facecolor=colour, edgecolor=GREY, linewidth=0.8))
    for x, y, name in ((-2.1, -2.1, "K"), (-2.1, -4.7, "V"), (-2.1, 1.5, "Q")):
        ax.text(x, y, name, ha="center", va="center", fontsize=9)
    ax.text(end + 1.1, -2.1, "O", ha="center", va="center", fontsize=9)


def chip(figure: Figure, shown: Film, moment: Moment, scores: np.ndarray) -> None:
    """The tile on the chip, and the state of its rows."""
    rows, columns = (slice(n * SIZE, (n + 1) * SIZE) for n in (moment.tile, moment.block))
    tile = figure.add_axes((0.735, 0.52, 0.11, 0.22))
    low, high = limits(scores)
    tile.imshow(scores[rows, columns], cmap="cividis", vmin=low, vmax=high, aspect="equal")
    bare(tile)
    tile.set_title("one tile of S", fontsize=9)
    first = rows.start
    figure.text(0.925, 0.66, f"queries {first} to {first + SIZE - 1}", ha="center", fontsize=9)
    first = columns.start
    figure.text(0.925, 0.60, f"keys {first} to {first + SIZE - 1}", ha="center", fontsize=9)
    for place, (name, colour) in enumerate((("row_max", SKY), ("row_sum", ORANGE), ("o", GREEN))):
        ends = [x for other in shown.moments for x in getattr(other, name)]
        ax = figure.add_axes((0.745 + 0.082 * place, 0.27, 0.062, 0.17))
        ax.barh(range(SIZE), getattr(moment, name), color=colour, edgecolor=INK, linewidth=0.6)
        ax.set(xlim=(min(0.0, *ends), 1.05 * max(ends)), ylim=(SIZE - 0.5, -0.5))
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(("m", "l", "|o|")[place], fontsize=10)
        ax.grid(visible=False)
    for line, text in enumerate(
        (
            "m: a row's largest score so far",
            "l: its sum of exp(score - m)",
            "|o|: length of its output so far",
        )
    ):
        figure.text(0.745, 0.195 - 0.055 * line, text, fontsize=9)


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
