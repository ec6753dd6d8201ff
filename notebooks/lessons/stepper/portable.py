"""Record a lesson in Triton: each statement that moves or computes a tile, as it is simulated."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

from flash_versions.simulator.state import here
from lessons.kernels.recording import array_of, config_of, make_request, number, unchecked
from lessons.stepper import source
from lessons.stepper.moved import Moved

# The statements that are steps, by function and by what they assign or call: what happens, and
# which variables it sets, under the name that the page shows.
FORWARD = {
    "q_tile": ("load Q", {"q_tile": "q"}),
    "acc": ("begin", {"acc": "acc"}),
    "row_max": ("begin", {"row_max": "m"}),
    "row_sum": ("begin", {"row_sum": "l"}),
    "tl.store(row_pointers(o, row, DIM)": ("store O", {}),
    "tl.store(lse": ("store LSE", {}),
}
STEPS: dict[str, dict[str, tuple[str, dict[str, str]]]] = {
    "forward_kernel": FORWARD,
    "fold_block": {
        "k_tile": ("load K", {"k_tile": "k"}),
        "s": ("scores", {"s": "s"}),
        "p": ("sum", {"row_max": "m", "row_sum": "l", "new_max": "m", "new_sum": "l"}),
        "v_tile": ("load V", {"v_tile": "v"}),
        "acc": ("accumulate", {"acc": "acc"}),
    },
    "softmax_step": {
        "new_max": ("maximum", {"new_max": "m"}),
        "p": ("exponentials", {"p": "p"}),
        "alpha": ("correction", {"alpha": "alpha"}),
    },
    "combine": {"tl.store(lse + lse_row": ("combine", {})},
}


class Watch(Moved):
    """The steps of a running kernel, and the bytes that it moved."""

    def __init__(self, shown: source.Shown, path: str, is_split: bool) -> None:
        super().__init__()
        self.shown, self.path, self.is_split = shown, path, is_split
        self.steps: list[dict[str, Any]] = []
        self.tile = 0
        self.pending: dict[FrameType, source.Statement | None] = {}

    def enter(self, frame: FrameType, event: str, _: Any) -> Any:
        """Python's trace function: which functions are watched line by line."""
        code = frame.f_code
        if code.co_name in STEPS and code.co_filename == self.path:
            return self.follow
        return None

    def follow(self, frame: FrameType, event: str, _: Any) -> Any:
        """A line begins, or a function returns: the statement before it is complete."""
        now = source.at(frame) if event == "line" else None
        before = self.pending.get(frame)
        if before is not None and now != before:
            self.finish(before, frame.f_locals)
        self.pending[frame] = now
        if event == "return":
            del self.pending[frame]
        return self.follow

    def finish(self, statement: source.Statement, found: dict[str, Any]) -> None:
        """Write a statement down, if it is a step."""
        step = STEPS[statement.function].get(statement.name)
        if step is None:
            return
        what, names = step
        if what == "scores":
            what = "mask" if statement.number else "scores"
        elif statement.number:  # a state that is carried on
            return
        if what == "store O" and self.is_split:
            what = "store partial"
        if what == "load Q":
            self.tile = number(found["tile"])
        program, split, _ = here.program.ids
        self.steps.append(
            {
                "what": what,
                "line": self.shown.lines[statement.line],
                "program": program,
                "split": split,
                "tile": self.tile if what != "combine" else program,
                "block": number(found["j"]) if "j" in found else None,
                "read": self.read,
                "written": self.written,
                "set": {short: array_of(found[x]) for x, short in names.items() if x in found},
            }
        )
        if statement.function == "softmax_step":
            self.steps[-1]["block"] = self.steps[-2]["block"]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Watch what runs in this context."""
        before = sys.gettrace()
        with self.counting():
            sys.settrace(self.enter)
            try:
                yield
            finally:
                sys.settrace(before)


def record(
    name: str,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    block_q: int,
    block_kv: int,
) -> dict[str, Any]:
    """Run the forward of a lesson and write down its steps.

    Args:
        name: "fa1", "fa2", or "fa2-split" with two splits of the keys.
        q: (1, M, 1, head_dim) on the CPU, 16 bits or fp32.
        k: (1, N, 1, head_dim).
        v: (1, N, 1, head_dim).
        causal: whether a query sees only keys up to its own place.
        block_q: rows of a query tile, a power of two.
        block_kv: keys of a block, a power of two.

    Returns:
        steps; o (M, head_dim) as the kernel wrote it; its lse (M,); the source that is shown.
    """
    lesson, _, split = name.partition("-")
    module = importlib.import_module(f"flash_versions.lessons.{lesson}")
    path = str(module.__file__)
    shown = source.shown(Path(path), () if split else ("share_of_keys", "combine"))
    watch = Watch(shown, path, bool(split))
    config_of(block_q, block_kv)  # refuses what is no power of two
    tiles = patch.object(module, "choose_tile", lambda q: (block_q, block_kv, 4, 1))
    request = make_request(q, k, v, causal=causal, num_splits=2 if split else None)
    with tiles, unchecked(), watch.running():
        o, lse = module.forward(request)
    for step in watch.steps:
        if step["what"] in ("store O", "combine"):
            first = step["tile"] * (1 if step["what"] == "combine" else block_q)
            rows = 1 if step["what"] == "combine" else block_q
            step["set"]["o"] = o[0, first : first + rows, 0].float().numpy()
    return {"steps": watch.steps, "o": o[0, :, 0], "lse": lse[0, 0], "source": shown.text}
