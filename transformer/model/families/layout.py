"""How the parameters of the model lie in the files of a family, where they are not one tensor each.

A stored tensor is made of pieces, each a part of a parameter. Reading and writing both follow the
same list: stored[there] = parameter[here].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from types import EllipsisType

import torch
from torch import Tensor

Index = EllipsisType | int | slice | tuple[int | slice, ...]

# The projections that Phi-3 stores one under the other -> the name of the whole.
JOINED = {
    "q_proj": "qkv_proj",
    "k_proj": "qkv_proj",
    "v_proj": "qkv_proj",
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


@dataclass(frozen=True)
class Piece:
    """A part of a stored tensor, and the part of a parameter that it is; ... is all of it.

    `swapped` says that it is stored with its last two dimensions swapped.
    """

    parameter: str
    here: Index = ...
    there: Index = ...
    swapped: bool = False


@dataclass
class Stored:
    """A tensor of a file: its shape, and what it is made of."""

    shape: list[int]
    pieces: list[Piece] = field(default_factory=list)


Shapes = Mapping[str, list[int]]  # of the parameters, by their names
Layout = dict[str, Stored]  # by the names of stored tensors


def one_by_one(shapes: Shapes) -> Layout:
    """Most families: each parameter is a tensor of the same name."""
    return {name: Stored(shape, [Piece(name)]) for name, shape in shapes.items()}


def joined_projections(shapes: Shapes) -> Layout:
    """Phi-3: the projections that read the same are one tensor, in the model's order."""
    layout: Layout = {}
    for name, shape in shapes.items():
        *above, module, kind = f".{name}".split(".")  # a norm has no module above it
        if module not in JOINED:
            layout[name] = Stored(shape, [Piece(name)])
            continue
        whole = ".".join([*above, JOINED[module], kind])[1:]
        stored = layout.setdefault(whole, Stored([0, *shape[1:]]))
        start = stored.shape[0]
        stored.shape[0] += shape[0]
        stored.pieces.append(Piece(name, there=slice(start, stored.shape[0])))
    return layout


def experts_apart(room: str, gate: str, up: str, down: str) -> Callable[[Shapes], Layout]:
    """Mixtures whose experts are tensors of their own.

    Args:
        room: what the feed-forward is called.
        gate, up, down: what an expert's projections are called.
    """

    def layout_of(shapes: Shapes) -> Layout:
        layout: Layout = {}
        for name, shape in shapes.items():
            above, experts, projection = name.replace(".mlp.", f".{room}.").partition(".experts.")
            if not experts:
                within = ".gate." in name or ".experts." in name  # a dense layer keeps its names
                layout[above if within else name] = Stored(shape, [Piece(name)])
                continue
            half = shape[1] // 2
            parts = {down: slice(None)}
            if projection == "gate_up_proj":
                parts = {gate: slice(half), up: slice(half, None)}
            for expert, (part, rows) in product(range(shape[0]), parts.items()):
                stored = Stored([shape[1] // len(parts), shape[2]], [Piece(name, (expert, rows))])
                layout[f"{above}.experts.{expert}.{part}.weight"] = stored
        return layout

    return layout_of


def experts_together(shapes: Shapes) -> Layout:
    """gpt-oss: all experts in one tensor, inputs first; gate and up take turns."""
    layout: Layout = {}
    whole, even, odd = slice(None), slice(0, None, 2), slice(1, None, 2)
    for name, shape in shapes.items():
        _, experts, projection = name.partition(".experts.")
        if not experts:
            layout[name.replace(".mlp.gate.", ".mlp.router.")] = Stored(shape, [Piece(name)])
            continue
        swapped = len(shape) == 3  # biases have nothing to swap
        stored = Stored([shape[0], shape[2], shape[1]] if swapped else shape)
        layout[name] = stored
        if not projection.startswith("gate_up"):
            stored.pieces.append(Piece(name, swapped=swapped))
            continue
        half = shape[1] // 2
        for rows, turns in ((slice(half), even), (slice(half, None), odd)):
            there = (whole, whole, turns) if swapped else (whole, turns)
            stored.pieces.append(Piece(name, (whole, rows), there, swapped))
    return layout


def unpack(parameters: dict[str, Tensor], stored: Tensor, pieces: list[Piece]) -> None:
    """Put the pieces of a stored tensor where they belong in the parameters, which are without
    memory at first; rows that are a whole parameter stay a view of the stored tensor.
    """
    for piece in pieces:
        part = stored[piece.there].mT if piece.swapped else stored[piece.there]
        if piece.here is ...:
            parameters[piece.parameter] = part.contiguous()
            continue
        if (parameter := parameters[piece.parameter]).is_meta:
            parameter = torch.empty(parameter.shape, dtype=part.dtype, device=part.device)
            parameters[piece.parameter] = parameter
        parameter[piece.here] = part


def pack(parameters: Mapping[str, Tensor], stored: Stored) -> Tensor:
    """A tensor of a file, from the parameters."""
    parts = [(x, parameters[x.parameter][x.here]) for x in stored.pieces]
    parts = [(x, part.mT if x.swapped else part) for x, part in parts]
    if parts[0][0].there is ...:
        return parts[0][1]
    tensor = parts[0][1].new_empty(stored.shape)
    for piece, part in parts:
        tensor[piece.there] = part
    return tensor
