"""A Hopper GPU that notes launches: kernels are replaced by stand-ins, and CPU tensors pass as
those of an H200.
"""

from contextlib import contextmanager

import torch

from flash_versions.dispatch.device import H200_SHARED_MEMORY, Properties, devices
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import sink
from flash_versions.versions.fa3.hopper import host as fa3_hopper
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.backward import rows as backward_rows
from flash_versions.versions.fa4.hopper import host as fa4_hopper
from flash_versions.versions.tiles import tile_scheduler, wgmma

H200 = Properties((9, 0), H200_SHARED_MEMORY, num_sms=132)
LAUNCHERS = {
    "forward": fa3_hopper.launch_forward,
    "forward of fa4": fa4_hopper.launch_forward,
    "prepare": backward_rows.launch_prepare,
    "backward": backward_hopper.launch_backward,
    "finish": backward_rows.launch_finish,
    "delta": fa2_backward.launch_delta,
    "sink": sink.launch_sink,
}


class StandIn:
    """A kernel, and its compiled forms, that note what they are launched with."""

    def __init__(self, name, launches, tell, constants=None):
        self.name, self.launches, self.tell, self.constants = name, launches, tell, constants
        self.run = None  # which no Form of CUDA's driver is made of

    def __getitem__(self, grid):
        def compile_and_run(*arguments, **constants):
            options = {constants.pop(name) for name in ("num_warps", "num_stages")}
            for name in ("launch_pdl", "maxnreg"):  # of Triton, and not of the kernel
                constants.pop(name, None)
            form = StandIn(self.name, self.launches, self.tell, (constants, options))
            form[grid](*arguments, *constants.values())
            return form

        def run(*arguments):
            """Note what the GPU would be told, in the words of `tell`."""
            size = (*grid, 1, 1)[:3]
            self.launches.append((self.name, size, self.constants, *map(self.tell, arguments)))

        return run if self.constants is not None else compile_and_run


def noted(x):
    """An argument as something to compare: of a tensor all but its address."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.stride()
    if hasattr(x, "base"):
        return [noted(x.base), *[repr(v) for k, v in vars(x).items() if k != "base"]]
    return [noted(y) for y in x] if isinstance(x, tuple) else repr(x)


@contextmanager
def noted_launches(monkeypatch, tell=noted):
    """Inside, a list of the launches, in order."""
    found = []
    for name, launcher in LAUNCHERS.items():
        monkeypatch.setattr(launcher, "kernel", StandIn(name, found, tell))
        monkeypatch.setattr(launcher, "forms", {})
    pair = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setattr(tile_scheduler.Counters, "take", lambda *given: pair)
    monkeypatch.setattr(wgmma, "available", lambda device: True)
    with devices.assume(H200):
        yield found
