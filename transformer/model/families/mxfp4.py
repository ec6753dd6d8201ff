"""Weights in MXFP4, as gpt-oss is released: read as the bf16 weights that they encode.

A number has four bits, two of them in a byte, the earlier one in the low half; 32 numbers in
succession share a power of two. A stored tensor (experts, in, out) then is two, whose inputs come
last:

    NAME_blocks    (experts, out, in / 32, 16) uint8
    NAME_scales    (experts, out, in / 32) uint8, exponents plus 127

Source: OCP Microscaling Formats 1.0 (2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BIAS = 127  # of the exponents


@dataclass(frozen=True)
class Dequantised:
    """A tensor that two tensors encode, with the methods of an open file that has it."""

    name: str
    blocks: Any  # the open files of either
    scales: Any
    device: torch.device | str

    def get_slice(self, name: str) -> Dequantised:
        """Itself."""
        return self

    def get_shape(self) -> list[int]:
        """(experts, in, out)."""
        experts, out, groups, _ = self.blocks.get_slice(f"{self.name}_blocks").get_shape()
        return [experts, groups * 32, out]

    def get_dtype(self) -> str:
        """In safetensors' words."""
        return "BF16"

    def get_tensor(self, name: str) -> Tensor:
        """The weights in bf16, computed on the device."""
        blocks = self.blocks.get_tensor(f"{self.name}_blocks")
        scales = self.scales.get_tensor(f"{self.name}_scales")
        pairs = zip(blocks, scales, strict=True)  # one by one: indices take eight times the memory
        experts = [dequantise(*(x.to(self.device) for x in pair)) for pair in pairs]
        return torch.stack(experts).mT


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Blocks (..., groups, 16) and scales (..., groups) as bf16 (..., 32 * groups)."""
    values = torch.tensor([*MAGNITUDES, *(-x for x in MAGNITUDES)], device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    numbers = torch.ldexp(values[halves.int()], scales[..., None].int() - BIAS)
    return numbers.flatten(-2).bfloat16()  # exact: two bits of a fraction, an exponent of bf16


def with_dequantised(files: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    """Open files by the names of tensors, with one name for each two that encode one."""
    found = dict(files)
    for blocks in files:
        name = blocks.removesuffix("_blocks")
        if name == blocks or f"{name}_scales" not in files:
            continue
        parts = {kind: files[f"{name}_{kind}"] for kind in ("blocks", "scales")}
        slices = [file.get_slice(f"{name}_{kind}") for kind, file in parts.items()]
        shapes = [x.get_shape() for x in slices]
        if [x.get_dtype() for x in slices] == ["U8", "U8"] and shapes[0] == [*shapes[1], 16]:
            for kind in parts:
                del found[f"{name}_{kind}"]
            found[name] = Dequantised(name, **parts, device=device)
    return found
