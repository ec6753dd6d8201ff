"""FA3's forward for Hopper, simulated: the version itself chooses it on a Hopper GPU only."""

import sys
from typing import Any
from unittest.mock import patch

import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.simulator.rebind import Watcher, rebound
from flash_versions.versions.fa3.hopper import host, problem
from flash_versions.versions.tiles.ragged import box_in_sequence

HOPPER = Properties((9, 0), num_sms=2)  # so few SMs that programs walk over several tiles


def simulated(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, box: Any = box_in_sequence, **options: Any
) -> torch.Tensor:
    """What FA3's kernel for Hopper gives for these inputs, in the layout of `attention`.

    Args:
        q, k, v: 16-bit tensors on the CPU.
        box: a function of the kernel, the coordinates of boxes of K and V of packed sequences.
        options: of `attention`.
    """
    request = make_request(q, k, v, num_splits=1, **options)

    def boxes(*place: Any) -> Any:
        is_kv = sys._getframe(2).f_code.co_name == "kv_box"
        return rebound(box if is_kv else box_in_sequence)(*place)

    watcher = Watcher(box_in_sequence, boxes)
    with devices.assume(HOPPER), patch.object(problem, "box_in_sequence", watcher):
        o, _, _ = host.forward(request)
    return o[0] if q.dim() == 3 else o
