"""A Hopper GPU that notes launches: kernels are replaced by stand-ins, and CPU tensors pass as
those of an H200.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import torch

from flash_versions.dispatch import launch
from flash_versions.dispatch.device import H200_SHARED_MEMORY, Properties, devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.replay import keys, recording
from flash_versions.dispatch.replay.tape import Tape
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa3.hopper import host as fa3_hopper
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.backward import rows as backward_rows
from flash_versions.versions.fa4.hopper import host as fa4_hopper
from flash_versions.versions.tiles import tile_scheduler, wgmma

STREAM = 7
H200 = Properties((9, 0), H200_SHARED_MEMORY, num_sms=132)
LAUNCHERS = {
    "forward": fa3_hopper.launch_forward,
    "forward of fa4": fa4_hopper.launch_forward,
    "prepare": backward_rows.launch_prepare,
    "backward": backward_hopper.launch_backward,
    "finish": backward_rows.launch_finish,
    "delta": fa2_backward.launch_delta,
    "sink": fa2_backward.launch_sink,
}


class StandIn:
    """A kernel, and its compiled forms, that note what they are launched with."""

    def __init__(self, name, launches, tell, constants=None):
        self.name, self.launches, self.tell, self.constants = name, launches, tell, constants
        self.function = self.packed_metadata = None

    def __getitem__(self, grid):
        def run(*arguments, **constants):
            options = {constants.pop(name) for name in ("num_warps", "num_stages")}
            for name in ("launch_pdl", "maxnreg"):  # of Triton, and not of the kernel
                constants.pop(name, None)
            form = StandIn(self.name, self.launches, self.tell, (constants, options))
            form.note(grid, (*arguments, *constants.values()))
            return form

        return run

    def run(self, x, y, z, stream, function, metadata, about, enter, leave, *arguments):
        self.note((x, y, z), arguments)

    def note(self, grid, arguments):
        """What the GPU would be told, in the words of `tell`."""
        grid = (*grid, 1, 1)[:3]
        self.launches.append((self.name, grid, self.constants, *map(self.tell, arguments)))


class TapeOf(Tape):
    """A tape, and the function that it is given at each call."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def __call__(self, tensors, stream):
        return super().__call__(self.function, tensors, stream)


def noted(x):
    """An argument as something to compare: of a tensor all but its address."""
    if isinstance(x, torch.Tensor):
        return x.dtype, x.shape, x.stride()
    if hasattr(x, "base"):
        return [noted(x.base), *[repr(v) for k, v in vars(x).items() if k != "base"]]
    return [noted(y) for y in x] if isinstance(x, tuple) else repr(x)


def on_a_gpu(monkeypatch):
    """CPU tensors pass as those of the current GPU, in a stream in which tapes are played."""
    monkeypatch.setattr(keys, "place_of", lambda x: (0, STREAM))
    monkeypatch.setattr(keys, "current_device", lambda: 0)
    monkeypatch.setattr(keys, "current_stream", lambda device: STREAM)
    monkeypatch.setattr(keys, "is_capturing", lambda: False)


def launched(monkeypatch):
    """What is launched from now on: a list of (launcher, constants), which grows."""
    launch, found = Launcher.__call__, []

    def noting(launcher, grid, arguments, constants, *options):
        found.append((launcher, constants))
        return launch(launcher, grid, arguments, constants, *options)

    monkeypatch.setattr(Launcher, "__call__", noting)
    return found


@contextmanager
def noted_launches(monkeypatch, tell=noted):
    """Inside, a list of the launches, in order."""
    found = []
    for name, launcher in LAUNCHERS.items():
        monkeypatch.setattr(launcher, "kernel", StandIn(name, found, tell))
        monkeypatch.setattr(launcher, "compiled", {})
    driver = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(launch, "runtime_driver", SimpleNamespace(active=driver))
    pair = torch.zeros(2, dtype=torch.int32)
    monkeypatch.setitem(recording.lasting, pair.data_ptr(), pair)
    monkeypatch.setattr(tile_scheduler.Counters, "take", lambda *given: pair)
    monkeypatch.setattr(wgmma, "available", lambda device: True)
    with devices.assume(H200):
        yield found
