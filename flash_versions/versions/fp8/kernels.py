"""The kernels of `quantize.py`: one program reads 128 rows of one head, finds their scales and
writes them in 8 bits.

Quantising moves bytes and little else, so it is made for the memory. All of a tile is requested at
once, 16 bytes per thread and request, before anything is computed; so with two programs to a
multiprocessor 64 kB are on their way, and memory's bandwidth times its latency asks for less than
30. Programs that run side by side work on neighbouring heads, whose rows are neighbours in memory.

V is transposed on its way. A thread that reads 16 bytes of a row has eight values of one key, and
is to write values of many keys. So the rows of the tile are not taken in the order of the keys:
the rows that one thread holds are the ones whose values end up side by side (`transposed`), and
what goes through shared memory goes in words, not in bytes.
"""

import triton
import triton.language as tl

from flash_versions.dispatch.launch import Launcher
from flash_versions.versions.tiles.rows import (
    Rows,
    load_row_values,
    load_rows,
    row_pointers,
    store_row_values,
    store_rows,
)

TILE = tl.constexpr(128)  # rows of a program; blocks of rows that share a scale divide it
SMALLEST = tl.constexpr(2.0**-100)  # a block of nothing larger counts as zeros
NEIGHBOURS = tl.constexpr(8)  # rows of a tile of V that a thread holds and that end side by side
PRODUCT_DIMS = tl.constexpr(16)  # of a head_dim of 256, what one product of the rotation takes

COUNTS = ["q_length", "kv_length", "heads", "kv_heads", "q_tiles", "kv_tiles", "batch"]


@triton.jit
def largest_of(x, BLOCK: tl.constexpr):
    """The largest finite magnitude of every BLOCK rows of a tile; 0 if that is next to nothing."""
    size = tl.abs(x)
    largest = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    largest = tl.max(tl.reshape(largest, (x.shape[0] // BLOCK, BLOCK)), 1)
    return tl.where(largest >= SMALLEST, largest, 0.0)


@triton.jit
def rotation(first, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Rows first .. first + ROWS - 1 of diag(signs) @ H, all of it +-1, as bf16 (ROWS, DIM).

    H[i, j] = (-1)^(number of ones that i and j have in common), Sylvester's Hadamard matrix. The
    signs are one bit of a hash of i: the same for every call.
    """
    i = (first + tl.arange(0, ROWS)).to(tl.uint32)
    j = tl.arange(0, DIM).to(tl.uint32)
    mixed = (i + 1) * 0x9E3779B9
    mixed = (mixed ^ (mixed >> 16)) * 0x85EBCA6B
    common = i[:, None] & j[None, :]
    common = (common ^ (common >> 4)) & 15
    odd = (0x6996 >> common) ^ (mixed >> 31)[:, None]  # bit n of 0x6996: n has an odd number of 1s
    return tl.where((odd & 1) == 1, -1.0, 1.0).to(tl.bfloat16)


@triton.jit
def product_with_signs(x, signs, acc):
    """acc + x @ signs in fp32: every product is exact.

    An fp32 x is the sum of three bf16 tiles.
    """
    if x.dtype == tl.float32:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        return tl.dot(high, signs, tl.dot(middle, signs, tl.dot(low, signs, acc)))
    else:
        return tl.dot(x, signs.to(x.dtype), acc)


@triton.jit
def load_tile(view, rows, index, HADAMARD: tl.constexpr):
    """Rows of a head in fp32, 0 past the length; rotated, x @ diag(signs) @ H / sqrt(dim), if
    HADAMARD.

    The rotation is a product with a matrix of +-1 on the tensor cores, which have nothing else to
    do here. Butterflies take log2(dim) additions per value in the place of dim, but the values that
    they add lie in different threads: they would go through shared memory again and again.
    """
    if HADAMARD:
        STEP: tl.constexpr = view.PADDED if view.PADDED <= 128 else PRODUCT_DIMS
        acc = tl.zeros([index.shape[0], view.PADDED], tl.float32)
        ptrs = row_pointers(view, rows, index)[:, None] + tl.arange(0, STEP)[None, :]
        for first in tl.static_range(0, view.PADDED, STEP):
            x = tl.load(ptrs + first, mask=(index < rows.length)[:, None], other=0.0)
            acc = product_with_signs(x, rotation(first, STEP, view.PADDED), acc)
        return acc * (view.PADDED**-0.5)
    else:
        return load_rows(view, rows, index, MASKED=True).to(tl.float32)


@triton.jit
def scaled(
    x, scale, reference, rows, tile,
    BLOCK: tl.constexpr, MEASURE: tl.constexpr, WRITE: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """A tile divided by its scales, one for every BLOCK rows of the rows that are to have one.

    With MEASURE, a block's largest finite magnitude becomes LIMIT, and the scale is written down;
    else it is read. Zeros have the scale 1; where it is yet to be compared with others, and in the
    reference, a head's largest scale, 0: they have no say.
    """
    BLOCKS: tl.constexpr = x.shape[0] // BLOCK
    scales = Rows(rows.batch, rows.head, rows.first, tl.cdiv(rows.length, BLOCK))
    block = tile * BLOCKS + tl.arange(0, BLOCKS)
    if MEASURE:
        found = tl.div_rn(largest_of(x, BLOCK), LIMIT)
        if WRITE:
            if reference is not None:  # as integers, numbers that are not negative compare alike
                tl.atomic_max(reference + block * 0, found.to(tl.int32, bitcast=True))
            found = tl.where(found > 0.0, found, 1.0)
        store_row_values(scale, scales, block, found)
    else:
        found = load_row_values(scale, scales, block, 1.0)
    if WRITE:
        inverse = tl.broadcast_to(tl.div_rn(1.0, found)[:, None], (BLOCKS, BLOCK))
        x *= tl.reshape(inverse, (x.shape[0],))[:, None]
        return tl.clamp(x, -LIMIT, LIMIT, propagate_nan=tl.PropagateNan.ALL)  # infinities
    else:
        return x


@triton.jit
def quantize_rows(
    x_view, out, scale, rows, total, tile,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, HADAMARD: tl.constexpr, MEASURE: tl.constexpr,
    WRITE: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Quantise a tile of Q or K; rows past the sequence's own end, up to the total, become 0."""
    index = tile * TILE + tl.arange(0, TILE)
    x = load_tile(x_view, rows, index, HADAMARD)
    scaled_rows = Rows(rows.batch, rows.head // GROUP, rows.first, total)
    x = scaled(x, scale, None, scaled_rows, tile, BLOCK, MEASURE, WRITE, LIMIT)
    if WRITE:
        store_rows(out, Rows(rows.batch, rows.head, rows.first, total), index, x)


@triton.jit
def key_at(position):
    """Which key lies at a position of V: 16i + 8h + 2l + j at 16i + 4l + 2h + j.

    A tensor core hands the scores of 16 keys to the four threads of a row in pairs j, thread l
    getting pairs 2l + j of either half h; as the operand P it wants a thread's four side by side.
    With V's keys in this order, both are the same registers.
    """
    low, half = position // 4 % 4, position // 2 % 2
    return position // 16 * 16 + half * 8 + low * 2 + position % 2


@triton.jit
def keys_of_tile(tile):
    """Which keys the rows of a tile of V in registers are.

    Rows that are TILE / NEIGHBOURS apart belong to the same thread: they go side by side.
    """
    row, STEP = tl.arange(0, TILE), TILE // NEIGHBOURS
    return tile * TILE + key_at(row % STEP * NEIGHBOURS + row // STEP)


@triton.jit
def transposed(x):
    """A tile (rows, dims) as (dims, positions)."""
    x = tl.reshape(x, (NEIGHBOURS, TILE // NEIGHBOURS, x.shape[1]))
    x = tl.permute(x, (2, 1, 0))
    return tl.reshape(x, (x.shape[0], TILE))


@triton.jit
def store_values(out, rows, total, tile, x, DIM: tl.constexpr):
    """Write a tile of V (rows, dims) as (dims, positions) into (batch, head, dim, total rounded up
    to 16).
    """
    dim = tl.arange(0, x.shape[1])
    position = tile * TILE + tl.arange(0, TILE)
    dims = Rows(rows.batch, rows.head, rows.first, DIM)
    ptrs = row_pointers(out, dims, dim)[:, None] + position[None, :]
    mask = (dim < DIM)[:, None] & (position < tl.cdiv(total, 16) * 16)[None, :]
    tl.store(ptrs, transposed(x.to(ptrs.dtype.element_ty)), mask=mask)


@triton.jit
def quantize_values(
    v, out, scale, reference, rows, total, tile,
    BLOCK: tl.constexpr, MEASURE: tl.constexpr, WRITE: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """Quantise a tile of V and transpose it; reference points to that of its head, or is None."""
    x = load_tile(v, rows, keys_of_tile(tile), False)
    scaled_rows = Rows(rows.batch, rows.head, rows.first, total)
    x = scaled(x, scale, reference, scaled_rows, tile, BLOCK, MEASURE, WRITE, LIMIT)
    if WRITE:
        store_values(out, rows, total, tile, x, v.DIM)


@triton.jit
def place(program, heads, tiles):
    """(head, tile, sequence) of a program: neighbours read neighbouring heads."""
    return program % heads, program // heads % tiles, program // heads // tiles


@triton.jit
def rows_of_keys(sequence, head, kv_lengths, kv_length):
    """The rows of a sequence's keys: as many as kv_lengths says, clamped, or all."""
    length = kv_length
    if kv_lengths is not None:
        given = tl.load(kv_lengths + sequence)
        length = tl.minimum(tl.maximum(given, 0), kv_length).to(tl.int32)
    return Rows(sequence, head, sequence * 0, length)


@triton.jit(do_not_specialize=COUNTS)
def quantize_kernel(
    inputs, outputs, scales, reference, kv_lengths, q_length, kv_length, heads, kv_heads, q_tiles,
    kv_tiles, batch,
    GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_KEYS: tl.constexpr, HADAMARD: tl.constexpr,
    MEASURE: tl.constexpr, WRITE: tl.constexpr, FACTOR_LIMIT: tl.constexpr, LIMIT: tl.constexpr
):  # fmt: skip
    """A tile of V, K or Q for each program; V's, which take longest, come first.

    MEASURE computes the scales, WRITE writes the 8-bit tensors: both in one pass if every block has
    its own scale, else one after the other.
    """
    program = tl.program_id(0)
    of_keys = batch * kv_heads * kv_tiles
    if program < 2 * of_keys:
        head, tile, sequence = place(program % of_keys, kv_heads, kv_tiles)
        rows = rows_of_keys(sequence, head, kv_lengths, kv_length)
        if program < of_keys:
            if reference is not None:
                reference += sequence * kv_heads + head
            quantize_values(
                inputs[2], outputs[2], scales[2], reference, rows, kv_length, tile,
                BLOCK_KEYS, MEASURE, WRITE, LIMIT
            )  # fmt: skip
        else:
            quantize_rows(
                inputs[1], outputs[1], scales[1], rows, kv_length, tile,
                1, BLOCK_KEYS, HADAMARD, MEASURE, WRITE, FACTOR_LIMIT
            )  # fmt: skip
    else:
        head, tile, sequence = place(program - 2 * of_keys, heads, q_tiles)
        rows = Rows(sequence, head, sequence * 0, q_length)
        quantize_rows(
            inputs[0], outputs[0], scales[0], rows, q_length, tile,
            GROUP, BLOCK_ROWS, HADAMARD, MEASURE, WRITE, FACTOR_LIMIT
        )  # fmt: skip


launch_quantize = Launcher(quantize_kernel)


@triton.jit(do_not_specialize=["kv_length", "kv_heads", "kv_tiles"])
def transpose_kernel(v, out, kv_lengths, kv_length, kv_heads, kv_tiles):
    """Transpose a tile of values that are quantised already, as bytes."""
    head, tile, sequence = place(tl.program_id(0), kv_heads, kv_tiles)
    rows = rows_of_keys(sequence, head, kv_lengths, kv_length)
    x = load_rows(v, rows, keys_of_tile(tile), MASKED=True)
    store_values(out, rows, kv_length, tile, x, v.DIM)


launch_transpose = Launcher(transpose_kernel)
