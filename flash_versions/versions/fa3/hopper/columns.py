"""P V of as many columns as V has, where those are no power of two.

Gluon's tiles are powers of two wide, and so are its products. A WGMMA instruction takes any
multiple of 8 columns. So V and O of 65 to 112 dims are tiles of 128 columns, which TMA fills with 0
behind the last dim and cuts off there, and the product is inline PTX that multiplies the columns
that there are, in multiples of 16:

    O[:, :96] += P V[:, :96]        one m64n96k16 for every 16 keys

An accumulator of 64 rows and 96 columns has no type in Gluon: it goes through the PTX in parts of
16 columns. Parts are joined to a tile of 128 columns behind the product and taken out of it before
the next one; columns that no product computes are constants, 0. All that names registers and leaves
no instruction.

As two panels (`panels.py`), 96 would be 64 + 32, and a product of 32 columns takes the tensor cores
about as long as one of 64. K needs none of this: S is a sum over its dims in steps of 16, and its
panels cost one step more at most.

A descriptor of 64 bits tells the tensor cores where V is. Shared memory has V in columns of 64
dims, which are 128 bytes of a key, swizzled. In such a column, eight keys take 1024 bytes:

    bits    0 ..13  address / 16
           16 ..29  bytes from one column of 64 dims to the next, / 16
           32 ..45  bytes from eight keys to the next eight, / 16
           62, 63   1: swizzled in 128 bytes

Sources: the PTX manual on wgmma's matrix descriptors and on the registers of its operands.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flash_versions.versions.fa3.hopper import panels
from flash_versions.versions.fa3.hopper.panels import joined, parts_of
from flash_versions.versions.tiles.triton_compat import address_of, aggregate
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout

PART = gl.constexpr(16)  # columns of an accumulator, and keys of an instruction
NUMBERS = gl.constexpr(8)  # of a part that a thread has
ROW_BYTES = 128  # of a key in a column of 64 dims


@aggregate
class Columns:
    """What is multiplied of V's tiles."""

    address: gl.tensor  # of V's first slot in shared memory
    NUMBER: gl.constexpr  # columns; 0: all of a tile, by Gluon's own product


@gluon.jit
def make_columns(v_pipeline, NUMBER: gl.constexpr):
    """To be called before there are partitions, and before any slot is filled."""
    if NUMBER == 0:
        return Columns(gl.to_tensor(0), NUMBER)
    else:
        return Columns(address_of(v_pipeline.first.tiles), NUMBER)


@gluon.jit
def multiply_pv(p, buffers, stage, acc):
    """Issue acc + P V, of a P from `panels.rounded` and V of a stage: what `wait_pv` waits for."""
    tile = buffers.v.tile(stage)
    NUMBER: gl.constexpr = buffers.columns.NUMBER
    if NUMBER == 0:
        return panels.multiply_pv(p, tile, acc)
    else:
        KEYS: gl.constexpr = tile.first.shape[0]
        SLOT_BYTES: gl.constexpr = KEYS * tile.first.shape[1] * 2
        PTX: gl.constexpr = product_ptx(NUMBER, KEYS, tile.first.dtype)
        CONSTRAINTS: gl.constexpr = product_constraints(NUMBER, KEYS)
        DTYPES: gl.constexpr = product_dtypes(NUMBER)
        sums = parts_of(acc.first, PART)[: NUMBER // PART]
        p = gl.convert_layout(p, accumulator_layout(KEYS), assert_trivial=True)
        address = gl.full([WARPGROUP_ROWS, PART], SLOT_BYTES, gl.int32, accumulator_layout(PART))
        address = address * stage.slot + buffers.columns.address
        return gl.inline_asm_elementwise(
            PTX, CONSTRAINTS, sums + parts_of(p, PART) + (address,), dtype=DTYPES, is_pure=False,
            pack=NUMBERS,
        )  # fmt: skip


@gluon.jit
def wait_pv(buffers, acc, tokens):
    """The sums that `multiply_pv` issued."""
    if buffers.columns.NUMBER == 0:
        return acc.wait(tokens)
    else:
        sums = warpgroup_mma_wait(0, deps=tokens)
        first = joined(sums, acc.first.shape[1] // PART)
        first = gl.convert_layout(first, acc.first.type.layout, assert_trivial=True)
        return panels.Output(first, acc.second, acc.PANELS)


@gluon.constexpr_function
def registers(columns, keys):
    """32-bit registers of a thread: (of the sums, of P)."""
    return columns // 2, keys // 4


@gluon.constexpr_function
def product_ptx(columns, keys, dtype):
    """PTX that issues a product. Arguments: the sums, which are the results as well; P, packed in
    pairs; the address of V's slot, as often as a part has numbers.
    """
    sums, left = registers(columns, keys)
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    results = ", ".join(f"${i}" for i in range(sums))
    lines = [
        "{ .reg .b64 tile; .reg .b32 low; .reg .pred add;",
        "setp.eq.u32 add, 0, 0;",
        f"shr.u32 low, ${2 * sums + left}, 4;",
        f"or.b32 low, low, {keys * ROW_BYTES >> 4 << 16};",
        f"mov.b64 tile, {{low, {8 * ROW_BYTES >> 4 | 1 << 30}}};",
        "wgmma.fence.sync.aligned;",
    ]
    for first in range(2 * sums, 2 * sums + left, 4):
        p = ", ".join(f"${first + i}" for i in range(4))
        lines += [
            f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.{kind}.{kind}"
            f" {{{results}}}, {{{p}}}, tile, add, 1, 1, 1;",
            f"add.s64 tile, tile, {16 * ROW_BYTES >> 4};",
        ]
    return " ".join([*lines, "wgmma.commit_group.sync.aligned; }"])


@gluon.constexpr_function
def product_constraints(columns, keys):
    """The constraints of `product_ptx`: results in the registers of the sums."""
    sums, left = registers(columns, keys)
    same = [str(i) for i in range(sums)]
    return ",".join(["=f"] * sums + same + ["r"] * (left + NUMBERS.value))


@gluon.constexpr_function
def product_dtypes(columns):
    """The types of the results."""
    return (gl.float32,) * (columns // PART.value)
