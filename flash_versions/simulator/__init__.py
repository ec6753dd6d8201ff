"""Kernels of Triton and Gluon on the CPU: each program of a launch, computed by NumPy.

`kernel[grid](...)` with tensors on the CPU is simulated, with tensors on a GPU it is compiled, in
one process. The kernels are those that a GPU runs, and nothing of Triton is changed but what a
launch with tensors on the CPU does. How a launch is computed:

    entry      which launches are simulated
    launch     the programs of a grid, one after the other
    rebind     a kernel's names: Triton's modules become ours, its functions run
    source     its text, as Triton's compiler would read it; loops: what that compares as it runs
    values     tiles and pointers; dtypes: types of numbers; language: triton.language
    memory     loads, stores, atomics, descriptors; checking: the same, watched
    gluon/     partitions of warps, barriers, TMA, tensor cores, tensor memory
    standin    what can be imported as `triton` where it is not installed
"""

from flash_versions.simulator.entry import install
from flash_versions.simulator.errors import AccessError, CompileError, Deadlock, say

__all__ = ["AccessError", "CompileError", "Deadlock", "install", "say"]
