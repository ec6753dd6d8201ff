"""Kernels of Triton and Gluon on the CPU: each program of a launch, computed by NumPy.

`kernel[grid](...)` with tensors on the CPU is simulated, with tensors on a GPU it is compiled, in
one process. The kernels are those that a GPU runs, and nothing of Triton is changed but what a
launch with tensors on the CPU does. How a launch is computed:

    launch     which launches are simulated; the programs of a grid, one after the other
    rebind     a kernel's names: Triton's modules become ours, its functions run
    source     its text, as Triton's compiler would read it; loops: what that compares as it runs
    values     tiles and pointers; dtypes: types of numbers; language: triton.language
    memory     loads, stores, atomics, descriptors; checking: the same, watched
    gluon/     partitions of warps, barriers, TMA, tensor cores, tensor memory
    standin    what can be imported as `triton` where it is not installed
"""

from importlib.util import find_spec

from flash_versions.simulator import launch as launching
from flash_versions.simulator import standin
from flash_versions.simulator.errors import AccessError, CompileError, Deadlock
from flash_versions.simulator.launch import launch, say


def install() -> None:
    """Let `kernel[grid](...)` simulate launches with tensors on the CPU; where triton is not
    installed, let kernels import what stands in for it. Calling it again changes nothing.
    """
    if find_spec("triton") is None:
        standin.install()
    else:
        launching.install()


__all__ = ["AccessError", "CompileError", "Deadlock", "install", "launch", "say"]
