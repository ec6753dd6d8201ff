"""The devices that calls run on: one object answers what is asked about them, so that a test or the
inspector can replace the answers at one place.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple, TypeVar

import torch
from triton.runtime.jit import JITFunction

from flash_versions.dispatch.extras import triton_missing

# Shared memory in bytes that a program may use: on an H200; in the simulator, without limit.
H200_SHARED_MEMORY = 232_448
UNLIMITED = 1 << 40
NO_SIMULATOR = (
    "{name} is on the CPU, where the package flash_versions simulates these kernels, and they are "
    "used without it; move it to a GPU, or use version='sdpa'."
)

Function = TypeVar("Function", bound=Callable)


def constant_in_compile(function: Function) -> Function:
    """Let torch.compile call a function once, while it traces, and keep the result.

    It does what `torch.compiler.assume_constant_result` does. That one imports torch's compiler,
    which takes as long as the rest of the package, also in a program that compiles nothing.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


class Properties(NamedTuple):
    """What decides which kernel runs on a device, and in which tiles.

    Attributes:
        capability: a GPU's compute capability, (9, 0) for Hopper; (0, 0) of another device.
        shared_memory: bytes of shared memory that one program may use.
        num_sms: streaming multiprocessors (SMs) of a GPU; 1 on the CPU, where the simulator runs
            program after program.
    """

    capability: tuple[int, int] = (0, 0)
    shared_memory: int = UNLIMITED
    num_sms: int = 1


class Devices:
    """The properties of the devices of this machine."""

    def __init__(self) -> None:
        self.known: dict[torch.device, Properties] = {}
        self.assumed: Properties | None = None

    @property
    def simulates(self) -> bool:
        """Whether launches with tensors on the CPU are simulated in this process."""
        return getattr(JITFunction.run, "simulates", False)

    @constant_in_compile
    def __getitem__(self, device: torch.device) -> Properties:
        """What is known of a device; inside of `assume`, what is assumed of every device. Constant
        for torch.compile, which else compiles again once a new device is known.
        """
        if self.assumed is not None:
            return self.assumed
        found = self.known.get(device)
        if found is None:
            found = self.known[device] = read_properties(device)
        return found

    def launches_overlap(self, device: torch.device) -> bool:
        """Whether a kernel may be launched while the one before it runs, and wait for it there."""
        return self[device].capability >= (9, 0)

    @constant_in_compile
    def limits(self, device: torch.device, name: str = "q") -> str | None:
        """Why kernels cannot run on the device of a tensor, in a sentence, or None."""
        if (kind := device.type) not in ("cpu", "cuda"):
            return f"{name} is on {device}; NVIDIA GPUs and, simulated, the CPU work."
        if kind == "cpu" and self.assumed is None:
            return None if self.simulates else NO_SIMULATOR.format(name=name)
        if kind == "cuda" and (sentence := triton_missing()):
            return sentence
        if (capability := self[device].capability) < (8, 0):
            major, minor = capability
            return f"the GPU has compute capability {major}.{minor}; 8.0 (Ampere) or later works."
        return None

    @contextmanager
    def assume(self, properties: Properties) -> Iterator[None]:
        """Inside, every device has these properties, whatever it is. Not for several threads: it is
        so in all of them.
        """
        before, self.assumed = self.assumed, properties
        try:
            yield
        finally:
            self.assumed = before

    def on_device(self, x: torch.Tensor) -> AbstractContextManager:
        """Triton launches on the current GPU: make it the tensor's."""
        if x.is_cuda and x.get_device() != torch.cuda.current_device():
            return torch.cuda.device(x.device)
        return nullcontext()


def read_properties(device: torch.device) -> Properties:
    """What torch says of a device."""
    if device.type != "cuda":
        return Properties()
    about = torch.cuda.get_device_properties(device)
    return Properties(
        (about.major, about.minor),
        about.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        about.multi_processor_count,
    )


devices = Devices()
