"""Compile what a call would launch, for a GPU that need not be there.

Triton's compiler needs no GPU, but its launcher asks a driver what to compile for. `compiling`
answers for it, and for the properties of the device, and keeps each kernel in the place of
launching it: everything else is the real host code, so what is inspected is what a GPU would run.
"""

import contextlib
import io
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import EXPLICIT, Forward, Version
from flash_versions.inspect.sass import HotLoop, disassemble, find_hot_loops, parse
from flash_versions.versions.api import VERSIONS
from flash_versions.versions.fp8.quantize import prepare
from flash_versions.versions.from_file import load_version

KIB = 1024
GROUP = 4  # warps that get their registers together


@dataclass(frozen=True)
class Arch:
    """A GPU architecture: shared memory in bytes that a program may use, and the streaming
    multiprocessors (SMs) of a GPU that has it.
    """

    capability: int
    shared_memory: int
    num_sms: int
    example: str


ARCHES = {
    "sm_80": Arch(80, 163 * KIB, 108, "A100"),
    "sm_86": Arch(86, 99 * KIB, 84, "RTX A6000"),
    "sm_89": Arch(89, 99 * KIB, 142, "L40S"),
    "sm_90": Arch(90, 227 * KIB, 132, "H100, H200"),
    "sm_100": Arch(100, 227 * KIB, 148, "B200"),
    "sm_120": Arch(120, 99 * KIB, 188, "RTX PRO 6000"),
}
COUNTED = {  # kinds of instructions: how a table names them, and what they are in PTX
    "wgmma": ("wgmma", r"wgmma\.mma_async"),
    "tcgen05": ("tcgen05.mma", r"tcgen05\.mma"),
    "mma_sync": ("mma.sync", r"\bmma\.sync"),
    "tma_loads": ("TMA loads", r"cp\.async\.bulk\.tensor\.\dd\.shared"),
    "tma_stores": ("TMA stores", r"cp\.(?:reduce\.)?async\.bulk\.tensor\.\dd\.global"),
    "cp_async": ("cp.async", r"cp\.async\.c[ag]\."),
    "mbarriers": ("mbarrier", r"mbarrier\.(?:init|arrive|try_wait|test_wait)"),
    "ex2": ("ex2.approx", r"ex2\.approx"),
    "barriers": ("barriers", r"\b(?:bar|barrier)\.(?:cta\.)?(?:sync|arrive|red)"),
}


@dataclass(frozen=True)
class Assembly:
    """What ptxas says about a kernel.

    Attributes:
        registers: of a thread; of a kernel with setmaxnreg those at its start.
        stack: bytes, where spilled registers go.
        spill_stores: bytes of registers written to local memory, and read back as `spill_loads`:
            counted once, however often the instruction runs.
        serialised: the warnings that wgmma instructions run one after the other.
        injected: the messages that ptxas put in a wait, or the like, where the source has none.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    serialised: list[str]
    injected: list[str]

    @classmethod
    def of_log(cls, log: str) -> "Assembly":
        """Read from the output of `ptxas -v`; a kernel's functions are added up."""
        used = re.search(r"Used (\d+) registers", log)
        sizes = re.findall(
            r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", log
        )
        if used is None or not sizes:
            raise RuntimeError(f"ptxas does not tell what the kernel spills: {log.strip()!r}.")
        stack, stores, loads = (sum(map(int, column)) for column in zip(*sizes))
        messages = re.findall(r"\(C75\d\d\).*", log)
        serialised = [message for message in messages if "serialized" in message]
        injected = [message for message in messages if "injected" in message]
        return cls(int(used[1]), stack, stores, loads, serialised, injected)


class Role(NamedTuple):
    """A partition of a program's warps.

    Attributes:
        function: what they run.
        warps: how many they are.
        registers: of a thread; the first role has those that the others leave.
    """

    function: str
    warps: int
    registers: int


@dataclass(frozen=True)
class Compiled:
    """A kernel as the compiler left it.

    Attributes:
        kernel: the name of the kernel function.
        module: the module that defines it.
        arch: a name in ARCHES.
        code: Triton's own record of the compilation.
    """

    kernel: str
    module: str
    arch: str
    code: Any

    @property
    def ttgir(self) -> str:
        """Triton's intermediate representation for GPUs."""
        return self.code.asm["ttgir"]

    @property
    def ptx(self) -> str:
        """NVIDIA's portable assembly."""
        return self.code.asm["ptx"]

    @cached_property
    def sass(self) -> str:
        """What the GPU executes."""
        return disassemble(self.code.asm["cubin"])

    @property
    def num_warps(self) -> int:
        """Warps of a program, those of a specialised kernel's partitions included."""
        return self.code.metadata.num_warps

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return self.code.metadata.shared

    @property
    def registers(self) -> int:
        """Registers per thread."""
        return self.assembly.registers

    @property
    def stack(self) -> int:
        """Bytes of stack: registers that were spilled."""
        return self.assembly.stack

    @property
    def roles(self) -> list[Role]:
        """The roles of a warp-specialised kernel; none of a kernel whose warps all do the same."""
        requested = re.search(r"requestedRegisters = array<i32: ([\d, ]+)>", self.ttgir)
        if requested is None:
            return []
        wanted = [int(number) for number in requested[1].split(",")]
        partitions = re.findall(r"^ *partition\d+\(.*num_warps\((\d+)\)", self.ttgir, re.M)
        warps = [int(n) for n in partitions]
        lists = re.findall(r"warp_specialize\(\s*\[(.*?)\n\s*\],", self.code.src.fn.src, re.DOTALL)
        named = [re.findall(r"\((\w+), \(", functions) for functions in lists]
        names = next(found for found in named if len(found) == len(warps) + 1)
        rest = -sum(warps) % GROUP  # warps that fill up the last group
        taken = sum(n * many for n, many in zip(warps, wanted)) + rest * wanted[-1]
        first = self.num_warps - sum(warps) - rest
        left = (self.num_warps * self.registers - taken) // first // 8 * 8
        return [Role(*role) for role in zip(names, [first, *warps], [left, *wanted])]

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many instructions of each kind are in the PTX; the kinds are those of COUNTED."""
        return {name: len(re.findall(pattern, self.ptx)) for name, (_, pattern) in COUNTED.items()}

    @cached_property
    def assembly(self) -> Assembly:
        """What ptxas says, which Triton does not show: it assembles a second time."""
        target = GPUTarget("cuda", ARCHES[self.arch].capability, 32)
        metadata, log = self.code.metadata, io.StringIO()
        with triton.knobs.nvidia.scope(), contextlib.redirect_stdout(log):
            triton.knobs.nvidia.dump_ptxas_log = True
            make_backend(target).make_cubin(self.ptx, {}, metadata, target.arch)
        return Assembly.of_log(log.getvalue())

    @property
    def serialised(self) -> list[str]:
        """The compiler's warnings that wgmma instructions run one after the other."""
        return self.assembly.serialised

    @cached_property
    def opcodes(self) -> Counter[str]:
        """How many instructions of each opcode are in the SASS, modifiers left off."""
        return Counter(instruction.name for instruction in parse(self.sass)[0])

    @cached_property
    def hot_loops(self) -> list[HotLoop]:
        """The innermost loops of the SASS that multiply matrices."""
        return find_hot_loops(self.sass)

    def summary(self) -> dict[str, Any]:
        """All of it as numbers, lists and strings, for JSON."""
        return {
            "kernel": self.kernel,
            "module": self.module,
            "arch": self.arch,
            "num_warps": self.num_warps,
            "shared": self.shared,
            **asdict(self.assembly),
            "roles": [role._asdict() for role in self.roles],
            "counts": self.counts,
            "instructions": self.opcodes.total(),
            "opcodes": dict(self.opcodes.most_common()),
            "hot_loops": [
                {
                    "instructions": len(loop.instructions),
                    "opcodes": dict(loop.opcodes.most_common()),
                    "local_memory": loop.local_memory,
                    "events": [list(event) for event in loop.events],
                }
                for loop in self.hot_loops
            ],
        }


class CompileDriver(CudaDriver):
    """A CUDA driver of a given compute capability that can compile for it and never launch, on a
    machine without a GPU, too: it loads nothing of CUDA.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.get_current_stream = lambda device=None: 0
        # Kernels remember what they compiled for each device: every capability is another.
        self.get_current_device = lambda: capability
        self.set_current_device = lambda device: None

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


@contextlib.contextmanager
def compiling(arch: str = "sm_90") -> Iterator[list[Compiled]]:
    """Inside, what this package launches is compiled for `arch`, kept in the list, and not run.

    Tensors are on the CPU and stand for tensors of such a GPU; results are left as allocated. For
    one thread, as everything in the process is told of this GPU.

    Raises:
        ValueError: there is no such architecture.
    """
    if arch not in ARCHES:
        raise ValueError(f"arch={arch!r} is unknown; there are {', '.join(ARCHES)}.")
    about = ARCHES[arch]
    found: list[Compiled] = []

    def compile_launch(launcher: Launcher, *args: Any, **options: Any) -> None:
        new = Launcher(launcher.kernel, **launcher.options)  # one that has compiled nothing yet
        launch(new, *args, **options)

    def compile_only(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_for(*args: Any, **options: Any) -> None:
            code = kernel.warmup(*args, grid=grid, **options)
            if all(code.hash != other.code.hash for other in found):
                found.append(Compiled(kernel.__name__, kernel.__module__, arch, code))

        return compile_for

    capability = divmod(about.capability, 10)
    properties = Properties(capability, about.shared_memory, about.num_sms)
    driver, launch = triton.runtime.driver, Launcher.__call__
    previous = driver._active
    try:
        driver.set_active(CompileDriver(about.capability))
        Launcher.__call__ = compile_launch  # type: ignore[method-assign, assignment]
        JITFunction.__getitem__ = compile_only  # also of kernels that are launched without one
        with devices.assume(properties):
            yield found
    finally:
        Launcher.__call__ = launch  # type: ignore[method-assign]
        del JITFunction.__getitem__  # it is inherited again
        driver._active = previous


def compile_call(
    chosen: str | Version,
    request: Request,
    arch: str = "sm_90",
    *,
    variant: str | None = None,
    backward: bool = False,
) -> list[Compiled]:
    """Compile what one call of a version launches, each kernel once, in the order of the launches.

    Args:
        chosen: a version, or its name in VERSIONS.
        request: the call; its tensors are on the CPU, their values do not matter.
        arch: a name in ARCHES.
        variant: a name in the version's variants, in FP8 its fp8_variants, in the place of its own
            forward.
        backward: then also what the backward launches.

    Raises:
        ValueError: there is no such version, variant or architecture, the version cannot serve the
            request, or there is no such backward.
    """
    chosen = find_version(chosen)
    forward = find_forward(chosen, variant, request.precision)
    if backward and request.precision is not None:
        raise ValueError(f"precision={request.precision!r} is forward only; leave backward out.")
    with compiling(arch) as found:
        if reason := chosen.unsupported(request):
            raise ValueError(reason)
        if backward and chosen.backward is None:
            raise ValueError(f"version {chosen.name!r} has no backward of its own.")
        o, lse, statistics = forward(request)
        if backward and chosen.backward is not None:
            chosen.backward(request, o, lse, statistics, torch.empty_like(o), lse)
    return found


def last_line(error: BaseException) -> str:
    """What the compiler says against a kernel: its innermost reason comes last."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


def find_version(chosen: str | Version) -> Version:
    """A version by name, or from a file; ValueError if there is none."""
    if isinstance(chosen, Version):
        return chosen
    if chosen.endswith(".py"):
        return load_version(chosen)
    known = VERSIONS | EXPLICIT
    if chosen not in known:
        raise ValueError(f"version={chosen!r} is unknown; there are {', '.join(known)}.")
    return known[chosen]


def find_forward(chosen: Version, variant: str | None, precision: str | None = None) -> Forward:
    """A version's forward, or one of its variants for calls of that precision; ValueError if there
    is none of that name.
    """
    if variant is None:
        return chosen.forward
    known = chosen.variants if precision is None else chosen.fp8_variants
    if variant not in known:
        raise ValueError(
            f"variant={variant!r} of {chosen.name!r} is unknown; there are: "
            f"{', '.join(known) or 'none'}."
        )
    if precision is None:
        return chosen.variants[variant]
    kernel = chosen.fp8_variants[variant]
    return lambda request: kernel(request, prepare(request))
