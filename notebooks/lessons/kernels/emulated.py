"""FA3's forward for Hopper, run by the emulator: no interpreter of Triton knows Gluon."""

from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator
from flash_versions.dispatch.request import make_request

HOST, PROBLEM = "fa3.hopper.host", "fa3.hopper.problem"
SMS = 2  # of the GPU that is emulated, so that programs walk over several tiles


@cache
def modules() -> dict[str, ModuleType]:
    """The kernel's modules, with the emulator in the place of Triton."""
    return emulator.load(f"flash_versions.versions.{HOST}")


def box_in_sequence(first: int, length: int, head: int, row: int) -> tuple[int, ...]:
    """The coordinates of a box that ends with its sequence, as the kernel has them."""
    return modules()["tiles.ragged"].box_in_sequence(first, length, head, row)


def emulated(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    box: Callable[..., Any] = box_in_sequence,
    **options: Any,
) -> torch.Tensor:
    """What FA3's kernel for Hopper gives for these inputs, in the layout of `attention`.

    Args:
        q, k, v: 16-bit tensors on the CPU.
        box: the coordinates of boxes of K and V of packed sequences.
        options: of `attention`.
    """
    loaded = modules()
    problem = loaded[PROBLEM].QueryProblem
    request = make_request(q, k, v, num_splits=1, **options)

    def kv_box(self: Any, sequence: int, kv_head: int, key: int) -> tuple[int, ...]:
        return box(self.kv_first, self.kv_length, kv_head, key)

    with (
        patch.object(devices, "assumed", Properties(num_sms=SMS)),
        patch.object(problem, "kv_box", kv_box if request.is_ragged else problem.kv_box),
    ):
        o, _, _ = loaded[HOST].forward(request)
    return o[0] if q.dim() == 3 else o
