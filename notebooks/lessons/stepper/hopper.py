"""Record a lesson in Gluon: each event of its partitions in the simulator, in their order."""

import importlib
import sys
from collections import deque
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.experimental.gluon import language as gl

from flash_versions.dispatch.request import make_request
from flash_versions.simulator.gluon import machine
from flash_versions.simulator.rebind import Watcher, rebound
from lessons.kernels.recording import number, unchecked
from lessons.stepper import source
from lessons.stepper.moved import Moved

ORDER = machine.Order(seed=0, late_products=0.5, late_loads=0.5)
WARPGROUP_ROWS = BLOCK_KV = 64
CELL = 4  # rows and columns of a tile that are one cell of a picture
PARTITIONS = ("consume", "produce")
FUNCTIONS = ("fold_block", *PARTITIONS)


class Watch(Moved):
    """The events of a running kernel, and the bytes that it moved."""

    def __init__(self, shown: source.Shown) -> None:
        super().__init__()
        self.shown = shown
        self.steps: list[dict[str, Any]] = []
        self.copied: dict[int, dict[str, Any]] = {}  # by load: what its step said
        self.scored: dict[str, deque[int]] = {}  # by lane: blocks whose P V is to come
        self.products: dict[int, dict[str, Any]] = {}

    def event(self, partition: Any, what: str, tile: Any, barrier: Any, cycle: int) -> None:
        """What the simulator calls; see `machine.note`. A store is shown when it leaves."""
        if what == "stored":
            return
        if what == "landed":
            self.read += tile.bytes
            self.add({**self.copied.pop(id(tile)), "what": "landed", "set": {}})
        elif what == "done":
            product = self.products.pop(id(tile))
            found = tile.result.a
            values = {"s": mean(found)} if product["of"] == "S" else {"acc": mean(found)}
            line = self.place(partition, what)["line"]
            self.add({**product, "what": "done", "line": line, "set": values})
        else:
            step = self.place(partition, what)
            step |= self.about(step, what, tile, barrier)
            self.add(step)

    def place(self, partition: Any, what: str) -> dict[str, Any]:
        """Where a partition is: its lane, its line, the tile and the block that it works on."""
        frame = caller(sys._getframe(), FUNCTIONS)
        lane = partition.name.partition(", ")[2]
        name, _, consumer = lane.partition(" ")
        statement = source.at(frame)
        found = caller(frame, PARTITIONS).f_locals
        block = frame.f_locals.get("block", number(found["tile"].end) - 1)
        return {
            "what": what,
            "lane": "producer" if name == "produce" else f"consumer {consumer}",
            "line": self.shown.lines[statement.line] if statement else None,
            "query": number(found["tile"].query)
            + WARPGROUP_ROWS * number(found.get("CONSUMER", found.get("c", 0))),
            "block": number(block),
            "set": {},
            "frame": frame,
        }

    def about(self, step: dict[str, Any], what: str, tile: Any, barrier: Any) -> dict[str, Any]:
        """What else an event says: which barrier, which slot, which product."""
        frame: FrameType = step.pop("frame")
        lane = step["lane"]
        rings = caller(frame, PARTITIONS).f_locals["rings"]
        if barrier is not None:
            step["barrier"] = name_of(barrier, rings)
        if what == "copy":
            step["of"], _, slot = name_of(tile.barrier, rings).split()
            step["slot"] = int(slot)
            self.copied[id(tile)] = {**step, "set": {}}
        elif what == "product":
            is_scores = is_inside("multiply_qk")
            step["of"] = "S" if is_scores else "PV"
            blocks = self.scored.setdefault(lane, deque())
            if is_scores:
                blocks.append(step["block"])
            else:
                step["block"] = blocks.popleft()
            self.products[id(tile)] = {**step}
        elif what == "store":
            self.written += tile.data.nbytes
            step |= {"of": "O", "consumer": int(lane.split()[-1])}
            step["set"] = {"o": mean(tile.a.reshape(tile.shape[-2:]))}
        elif what == "softmax":
            step |= {"set": tile}
        elif what == "rescale":
            step |= {"rows": tile}
        return step

    def add(self, step: dict[str, Any]) -> None:
        """Append a step, with the bytes so far; a wait that nothing comes between was none."""
        before = self.steps[-1] if self.steps else {}
        same = all(before.get(x) == step.get(x) for x in ("lane", "barrier"))
        if step["what"] == "resume" and before.get("what") == "wait" and same:
            self.steps.pop()
            step["what"] = "pass"
        self.steps.append({**step, "read": self.read, "written": self.written})

    def softmax(self, original: Any) -> Watcher:
        """`softmax_step`, which then also is an event."""
        compute = rebound(original)

        def softmax_step(s: Any, *arguments: Any) -> Any:
            p, row_max, row_sum, alpha = compute(s, *arguments)
            rows = {"m": row_max.a, "l": row_sum.a}
            rows = {name: value[::CELL] for name, value in rows.items()}
            machine.note("softmax", {"s": mean(s.a), "p": mean(p.a), **rows})
            return p, row_max, row_sum, alpha

        return Watcher(original, softmax_step)

    def rescale(self, original: Any) -> Watcher:
        """`per_row`, which hands out by what acc is multiplied where it is rescaled."""
        compute = rebound(original)

        def per_row(x: Any, acc: Any) -> Any:
            if is_inside("fold_block"):
                machine.note("rescale", int((x.a != 1).sum()))
            return compute(x, acc)

        return Watcher(original, per_row)


def is_inside(function: str) -> bool:
    """Whether a function of this name is running."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return frame is not None


def caller(frame: FrameType | None, names: tuple[str, ...]) -> FrameType:
    """The innermost frame, from this one outwards, of a kernel's function of these names."""
    while frame is not None:
        is_kernel = frame.f_code.co_filename.endswith("_hopper.py")
        if is_kernel and frame.f_code.co_name in names:
            return frame
        frame = frame.f_back
    raise LookupError(f"no function of the kernel runs; {', '.join(names)} were looked for.")


def name_of(barrier: Any, rings: Any) -> str:
    """A barrier as the page calls it, such as "K full 0"."""
    if isinstance(barrier, str | int):
        return f"turn of consumer {int(barrier) - 8}"
    for name in ("q", "k", "v"):
        for side in ("full", "empty"):
            for i, other in enumerate(getattr(getattr(rings, name), side)):
                if other is barrier:
                    return f"{name.upper()} {side} {i}"
    raise LookupError("a barrier that the kernel does not share")


def mean(tile: np.ndarray) -> np.ndarray:
    """A tile with a cell for every 4 by 4 numbers: the mean of those that are not masked."""
    rows, columns = tile.shape
    cells = tile.reshape(rows // CELL, CELL, columns // CELL, CELL)
    seen = np.isfinite(cells)
    number = seen.sum((1, 3))
    total = np.where(seen, cells, 0).sum((1, 3))
    return np.where(number > 0, total / np.maximum(number, 1), -np.inf).astype(np.float32)


def record(
    version: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool
) -> dict[str, Any]:
    """Run the forward of a lesson for Hopper and write down its events.

    Args:
        version: "fa3" or "fa4".
        q: (1, M, 1, head_dim), 16 bits, on the CPU.
        k: (1, N, 1, head_dim).
        v: (1, N, 1, head_dim).
        causal: whether a query sees only keys up to its own place.

    Returns:
        steps; o (M, head_dim) as the kernel wrote it; its lse (M,); the source that is shown.
    """
    module = importlib.import_module(f"flash_versions.lessons.{version}_hopper")
    shown = source.shown(Path(str(module.__file__)))
    watch = Watch(shown)
    with (
        unchecked(),
        machine.using(order=ORDER, watcher=watch.event),
        patch.object(module, "BLOCK_KV", gl.constexpr(BLOCK_KV)),
        patch.dict(module.STAGES, {64: 2}),
        patch.object(module, "softmax_step", watch.softmax(module.softmax_step)),
        patch.object(module, "per_row", watch.rescale(module.per_row)),
        watch.counting(),
    ):
        o, lse = module.forward(make_request(q, k, v, causal=causal))
    return {"steps": watch.steps, "o": o[0, :, 0], "lse": lse[0, 0], "source": shown.text}
