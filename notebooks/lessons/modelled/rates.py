"""The rates of the units of one SM of a B200, and where they were published."""

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True)
class Rates:
    """Rates of an SM; the last three are assumptions.

    Attributes:
        tensor: operations of the tensor cores on bf16 numbers in a cycle.
        exponentials: of the special function unit in a cycle.
        arithmetic: fp32 additions, multiplications or multiply-adds in a cycle.
        other: other instructions of a thread in a cycle, such as maxima and conversions.
        shared_memory: bytes in a cycle that the tensor cores read.
        tensor_memory: bytes in a cycle that warps read or write.
        copies: bytes in a cycle that TMA brings to shared memory, from the L2 cache.
        latency: cycles from the request of a copy to its first byte.
        signal: cycles from an arrival at a barrier until a warp that waits for it goes on.
    """

    tensor: float = 8192
    exponentials: float = 16
    arithmetic: float = 128
    other: float = 64
    shared_memory: float = 128
    tensor_memory: float = 512
    copies: float = 64
    latency: float = 800
    signal: float = 30

    def times(self, factor: float, *names: str) -> "Rates":
        """These rates with some of them multiplied by a factor."""
        return replace(self, **{name: factor * getattr(self, name) for name in names})


B200 = Rates()
SOURCES = {
    "tensor": "Zadouri et al. 2026, FlashAttention-4: 2.25 PFLOP/s in bf16 of 148 SMs at 1.85 GHz",
    "exponentials": "Zadouri et al. 2026: 16 operations of the special function unit in a cycle",
    "arithmetic": "NVIDIA, CUDA C++ programming guide, throughput of arithmetic instructions",
    "other": "NVIDIA, CUDA C++ programming guide: comparisons, minimum and maximum, conversions",
    "shared_memory": "Zadouri et al. 2026: 128 bytes in a cycle",
    "tensor_memory": "assumed: a warp of each quarter reads or writes 4 bytes of its 32 lanes",
    "copies": "assumed",
    "latency": "assumed",
    "signal": "assumed",
}
assert set(SOURCES) == {field.name for field in fields(Rates)}
