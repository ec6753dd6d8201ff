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
    """A part of a stored tensor, and the part of a parameter that it is; ... is all of it."""

    parameter: str
    here: Index = ...
    there: Index = ...


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


def unpack(parameters: dict[str, Tensor], stored: Tensor, pieces: list[Piece]) -> None:
    """Put the pieces of a stored tensor where they belong in the parameters, which are without
    memory at first; one that is a whole parameter stays a view of the stored tensor.
    """
    for piece in pieces:
        part = stored[piece.there]
        if piece.here is ...:
            parameters[piece.parameter] = part
            continue
        if (parameter := parameters[piece.parameter]).is_meta:
            parameter = torch.empty(parameter.shape, dtype=part.dtype, device=part.device)
            parameters[piece.parameter] = parameter
        parameter[piece.here] = part


def pack(parameters: Mapping[str, Tensor], stored: Stored) -> Tensor:
    """A tensor of a file, from the parameters."""
    first, *others = stored.pieces
    whole = parameters[first.parameter][first.here]
    if not others and first.there is ...:
        return whole
    tensor = whole.new_empty(stored.shape)
    for piece in stored.pieces:
        tensor[piece.there] = parameters[piece.parameter][piece.here]
    return tensor
