"""Differences between Triton versions. `blackwell/tensor_memory.py` has those of tensor memory."""

import math
from typing import Any, dataclass_transform

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma

GLUON_DTYPES = {
    torch.float32: gl.float32,
    torch.float16: gl.float16,
    torch.bfloat16: gl.bfloat16,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.int32: gl.int32,
}
FROM_3_8 = hasattr(tma, "async_atomic_add")
# The most columns of O in a tile with 128 keys. A thread has 240 registers: O takes one for two
# columns, S takes 64 and P 32. With 192 columns, Triton 3.8 spills under a window and 3.9
# serialises products.
MOST_DIMS_BESIDE_128_KEYS = 160 if FROM_3_8 else 192
# Whether a left operand that does not change in a loop stays in its registers. ptxas of Triton 3.9
# copies it for every product, so it takes twice as many registers (3.8 was not tried).
OPERANDS_STAY = not FROM_3_8
# Whether inline PTX takes tiles in shared memory as arguments, as their addresses.
FROM_3_9 = gl.constexpr(int(hasattr(gl, "inline_asm")))
# Triton 3.7 renamed these.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_tile = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
thread_barrier = getattr(gl, "barrier", None) or gl.thread_barrier


def add_tile_by_builder(desc, coordinates, tile, _semantic=None):
    """TMA adds a tile to a box in memory; the operation has a name only from Triton 3.8 on."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, desc.handle, coordinates, tile.handle)


add_tile = getattr(tma, "async_atomic_add", None) or builtin(add_tile_by_builder)


@builtin
def reinterpret(tile, shape, layout, _semantic=None):
    """The same bytes of shared memory as tiles of another shape."""
    shape, layout = [gl.constexpr(n).value for n in shape], gl.constexpr(layout).value
    return _semantic.memdesc_reinterpret(tile, tile.dtype, shape, layout)


@gluon.jit
def address_of(tiles):
    """Where tiles of 16-bit numbers begin in shared memory, in bytes. What they hold is lost: this
    has to come before anything is written there, and while the program is one partition.
    """
    if FROM_3_9:
        return gl.inline_asm_elementwise(
            "mov.u32 $0, $1;", "=r,r", [tiles], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return found_address(tiles)


SOUGHT = gl.constexpr(256)  # places, 1 KB apart: more than shared memory has


@gluon.jit
def found_address(tiles):
    """`address_of` by search: which word of shared memory changes with the first word of the tiles?

    Before 3.9, Triton tells a kernel no address. Tiles that TMA writes swizzled begin at a multiple
    of 1024 bytes behind the beginning of what Triton allocates, which PTX knows by its name. So one
    of the words is theirs.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    words = tiles._reinterpret(gl.int32, words_of(tiles), line).index(0)
    place = gl.arange(0, SOUGHT, layout) * 1024
    here = place >= 0
    PTX: gl.constexpr = word_ptx()
    for mark in gl.static_range(1, 3):  # two, as any word may be one of them by chance
        words.store(gl.full([SOUGHT], mark, gl.int32, layout))
        thread_barrier()
        word = gl.inline_asm_elementwise(
            PTX, "=&r,r", [place], dtype=gl.int32, is_pure=False, pack=1
        )
        here = here & (word == mark)
        thread_barrier()
    begin = gl.inline_asm_elementwise(
        "mov.u32 $0, global_smem;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
    return begin + gl.max(gl.where(here, place, 0), axis=0)


@gluon.constexpr_function
def words_of(tiles):
    """The shape of tiles as lines of SOUGHT words."""
    return [math.prod(tiles.shape) // (2 * SOUGHT), SOUGHT]


@gluon.constexpr_function
def word_ptx():
    """PTX that reads the word at a place of shared memory; the last one for places behind it."""
    return """{
        .reg .u32 last, place, begin;
        mov.u32 last, %dynamic_smem_size;
        sub.u32 last, last, 4;
        min.u32 place, $1, last;
        mov.u32 begin, global_smem;
        add.u32 place, place, begin;
        ld.volatile.shared.u32 $0, [place];
    }"""


@dataclass_transform()
def aggregate(cls: type) -> Any:
    """A record of values that a kernel passes around as one; the constructor takes the annotated
    fields in order.
    """
    if hasattr(gluon, "aggregate"):
        return gluon.aggregate(cls)
    from triton.language.core import _aggregate

    fields = cls.__annotations__

    def __init__(self, *values):
        for (name, kind), value in zip(fields.items(), values, strict=True):
            is_constant = kind is gl.constexpr and not isinstance(value, gl.constexpr)
            setattr(self, name, gl.constexpr(value) if is_constant else value)

    __init__.__triton_builtin__ = True  # type: ignore[attr-defined]
    cls.__init__ = __init__  # type: ignore[misc]
    return _aggregate(cls)
