"""Single lines that Triton's compiler refuses, each beside one that is fine.

A row is a refused line, what the message about it has to hold, and the fine line. Each becomes the
last line of a kernel, after what HEAD loads: a vector and a matrix of floats, a vector of ints.
"""

HEAD = """
import math

import torch
import triton
import triton.language as tl

from tests.simulator.rules.kernels import *
"""
KERNEL = """

@triton.jit
def {name}(x, y, out, half, index, small, byte, n, flag, scale, nothing, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    tile = tl.load(x + cols)
    ints = tl.load(index + cols)
    matrix = tl.load(half + cols[:, None] * BLOCK + cols[None, :])
    wide, tall, fp8 = matrix.reshape(8, 32), matrix.reshape(32, 8), matrix.to(tl.float8e5)
    {line}  # here
"""
LINES = [
    # Sizes are powers of two, known at compile time.
    ("tl.arange(0, n)", "arange", "tl.arange(0, BLOCK)"),
    ("tl.arange(0, BLOCK / 2)", "arange", "tl.arange(0, BLOCK // 2)"),
    ("tl.arange(0, 48)", "arange", "tl.arange(32, 48)"),
    ("tl.arange(16, 16)", "arange", "tl.arange(16, 32)"),
    ("tl.arange(BLOCK)", "arange", "tl.arange(end=BLOCK, start=0)"),
    ("tl.zeros([BLOCK])", "zeros", "tl.zeros([BLOCK], dtype=tl.float32)"),
    ("tl.zeros([3], tl.float32)", "zeros", "tl.zeros([4], tl.float32)"),
    ("tl.zeros([n], tl.float32)", "zeros", "tl.zeros((BLOCK, 2 * BLOCK), tl.float32)"),
    ("tl.zeros([2048, 1024], tl.float32)", "zeros", "tl.zeros([1024, 1024], tl.float32)"),
    ("tl.full([BLOCK], tile, tl.float32)", "full", "tl.full([BLOCK], scale, tl.float32)"),
    ("tl.full([BLOCK], 0.5, tl.int32)", "full", "tl.full([BLOCK], 5, tl.float32)"),
    ("tl.ones([BLOCK], tl.float32)", "ones", "tl.full([BLOCK], 1.0, tl.float32)"),
    ("BLOCK: tl.constexpr = 32", "BLOCK", "WIDTH: tl.constexpr = 2 * BLOCK"),
    # Shapes.
    ("tl.reshape(tile, (4, 8))", "reshape", "tl.reshape(tile, (4, 4))"),
    ("tl.reshape(tile, (4, -1))", "reshape", "tile.reshape(4, 4)"),
    ("tl.reshape(tile, (n, 4))", "reshape", "tl.ravel(matrix)"),
    ("tl.trans(tile)", "trans", "tl.trans(matrix)"),
    ("tile.T", "", "matrix.T"),
    ("tl.permute(matrix, (0, 0))", "permute", "tl.permute(matrix, (1, 0))"),
    ("tl.permute(matrix, (0, 1, 2))", "permute", "matrix.permute(1, 0)"),
    ("tile + tl.arange(0, 32)", "32", "tile[:, None] + tl.arange(0, 32)"),
    ("tl.broadcast_to(tile[None, :], (4, 32))", "32", "tl.broadcast_to(tile[None, :], (4, 16))"),
    ("tl.sum(tile, axis=1)", "axis", "tl.sum(tile, axis=-1)"),
    ("tl.max(matrix, 2)", "axis", "tl.max(matrix, 1, return_indices=True)"),
    ("tl.cumsum(tile, 1)", "axis", "tl.cumsum(tile, 0)"),
    ("tl.sort(matrix, 0)", "sort", "tl.sort(matrix, 1)"),
    ("tl.reduce(tile, 0, lambda a, b: a + b)", "lambda", "tl.reduce(tile, 0, add)"),
    ("tl.reduce(tile, 0, plain)", "plain", "tl.associative_scan(tile, 0, add)"),
    ("tl.join(ints, tl.arange(0, 32))", "32", "tl.join(ints, cols)"),
    ("tl.split(matrix)", "split", "tl.split(tl.join(tile, tile))"),
    ("tl.expand_dims(tile, 3)", "3", "tl.expand_dims(tile, 1)"),
    ("tile[0]", "", "tile[:, None]"),
    ("tile[0:4]", "", "tile[None, :]"),
    ("tile[n]", "", "tl.sum(tl.where(cols == n, tile, 0.0))"),
    ("matrix[0, :]", "", "matrix[None, :, :]"),
    ("tile[0] = 1.0", "", "tile = tl.where(cols == 0, 1.0, tile)"),
    ("x[0]", "", "tl.load(x)"),
    ("out[0] = 1.0", "", "tl.store(out, 1.0)"),
    # Matrix products.
    ("matrix @ matrix", "tl.dot", "tl.dot(matrix, matrix)"),
    ("tl.dot(matrix, matrix.to(tl.float32))", "dot", "tl.dot(matrix, matrix.to(tl.float16))"),
    ("tl.dot(matrix, wide)", "dot", "tl.dot(wide, tall)"),
    ("tl.dot(tall, wide)", "16", "tl.dot(matrix.reshape(2, 128), matrix.reshape(128, 2))"),
    ("tl.dot(fp8, fp8)", "32", "tl.dot(fp8.reshape(8, 32), fp8.reshape(32, 8))"),
    ("tl.dot(tile, tile)", "dot", "tl.sum(tile * tile)"),
    ("tl.dot(tall.to(tl.int32), wide.to(tl.int32))", "int32", "tl.dot(wide, tall.to(wide.dtype))"),
    ("tl.dot(matrix, matrix, tile)", "dot", "tl.dot(matrix, matrix, matrix.to(tl.float32))"),
    # Types of operands.
    ("tile & 3", "", "ints & 3"),
    ("tile | tile", "", "(tile > 0) | (ints > 3)"),
    ("~tile", "", "~(tile > 0)"),
    ("not tile", "", "not tile > 0"),
    ("tile << 2", "", "ints << 2"),
    ("tile // 2", "", "ints // 2"),
    ("n // scale", "", "n / scale"),
    ("ints % tl.load(byte)", "uint8", "ints % tl.load(byte).to(tl.int32)"),
    ("ints // tl.load(byte)", "uint8", "ints / 3 + tile % scale"),
    ("tl.load(small) + 300", "300", "tl.load(small) + 100"),
    ("ints + 3_000_000_000", "3000000000", "ints.to(tl.int64) + 3_000_000_000"),
    ("tl.load(byte) * -1", "-1", "tl.load(small) * -1"),
    ("tile ** 2", "", "tile * BLOCK ** 2"),
    ("2 ** n", "", "1 << n"),
    ("tl.exp(ints)", "exp", "tl.exp(tile)"),
    ("tl.exp(2)", "exp", "tl.exp(2.0)"),
    ("tl.sqrt(matrix)", "sqrt", "tl.sqrt(matrix.to(tl.float32))"),
    ("tl.log(n)", "log", "tl.log(scale)"),
    ("tl.maximum(x, 1)", "maximum", "tl.maximum(tile, 1)"),
    ("tl.clamp(tile, 0.0)", "clamp", "tl.clamp(tile, 0.0, 1.0)"),
    ("tl.where(cols < n, x, 0.0)", "where", "tl.where(cols < n, x, x + 1)"),
    ("tl.where(cols < n, tile, tl.arange(0, 32))", "32", "tl.where(cols < n, tile, ints)"),
    ("tile.to('float16')", "float16", "tile.to(tl.float16)"),
    ("tile.to(torch.float16)", "float16", "tile.to(half.dtype.element_ty)"),
    ("tile.to(float)", "float", "tile.to(tl.int32)"),
    ("tile.to(tl.int16, bitcast=True)", "16", "tile.to(tl.int32, bitcast=True)"),
    # Pointers.
    ("x + scale", "", "x + n"),
    ("x + n / 2", "", "x + n // 2"),
    ("x * n", "", "n * n"),
    ("x + y", "", "1 + x"),
    ("x - y", "", "x - n"),
    ("n - x", "", "n - n"),
    ("-x", "", "-tile"),
    ("x & 15", "", "n & 15"),
    ("x < y", "", "n < scale"),
    ("tl.where(n > 3, x, half)", "where", "tl.where(n > 3, x, y)"),
    # Memory.
    ("tl.load(n)", "load", "tl.load(x + n)"),
    ("tl.load(tile)", "load", "tl.load(x + ints)"),
    ("tl.load(nothing)", "load", "nothing is None"),
    ("tl.load(x, mask=cols < n)", "mask", "tl.load(x, mask=n > 3)"),
    ("tl.load(x + cols, mask=tl.arange(0, 32) < n)", "32", "tl.load(x + cols, mask=cols < n)"),
    ("tl.load(x + cols, other=0.0)", "other", "tl.load(x + cols, mask=cols < n, other=0)"),
    ("tl.load(x + cols, cols < n, tl.arange(0, 32))", "32", "tl.load(x + cols, n > 3, ints)"),
    ("tl.load(x, masks=n > 1)", "masks", "tl.load(x, mask=n > 1)"),
    ("tl.load(x, cache_modifier='fast')", "fast", "tl.load(x, cache_modifier='.cg')"),
    ("tl.load(x, eviction_policy='soon')", "soon", "tl.load(x, eviction_policy='evict_last')"),
    ("tl.store(out, tile)", "store", "tl.store(out + cols, tile)"),
    ("tl.store(out)", "store", "tl.store(out, n)"),
    ("tl.store(tile, 1.0)", "store", "tl.store(out + cols, 1.0)"),
    ("tl.store(out, 1.0, mask=cols < n)", "mask", "tl.store(out, 1.0, mask=n > 3)"),
    ("tl.store(out + cols, tl.arange(0, 32))", "32", "tl.store(out + cols, ints)"),
    ("tl.store(out + cols, nothing)", "store", "tl.store(out + cols[:, None], tile[:, None])"),
    ("tl.atomic_add(tile, 1.0)", "atomic_add", "tl.atomic_add(out + cols, 1.0, mask=cols < n)"),
    ("tl.atomic_max(half, 1.0)", "atomic_max", "tl.atomic_max(index, 1)"),
    ("tl.program_id(3)", "program_id", "tl.program_id(axis=2)"),
    ("tl.program_id(n)", "program_id", "tl.num_programs(0)"),
    # Names and calls.
    ("missing", "missing", "n"),
    ("LIMIT", "LIMIT", "WARPS"),
    ("tl.arange(0, SIZES[0])", "SIZES", "tl.arange(0, WARPS)"),
    ("plain(n)", "plain", "double(n)"),
    ("tl.exponential(tile)", "exponential", "tl.exp(tile)"),
    ("tile.mean()", "mean", "tile.sum() / 16"),
    ("abs(n)", "abs", "tl.abs(n)"),
    ("sum(tile)", "sum", "tl.sum(tile)"),
    ("round(scale)", "round", "tl.floor(scale)"),
    ("float(n)", "float", "float('inf')"),
    ("int(scale)", "int", "int(3.5)"),
    ("bool(n)", "bool", "n > 0"),
    ("len(tile)", "len", "len((n, flag))"),
    ("math.sqrt(scale)", "sqrt", "tile * math.sqrt(2.0) + math.pi"),
    ("torch.exp(tile)", "exp", "max(n, flag) + min(n, 3)"),
    ("double(n, 2, 3)", "double", "double(n, 2)"),
    ("double(factor=2)", "double", "double(factor=2, a=n)"),
    ("double(n, times=2)", "times", "double(n, factor=2)"),
    ("pair_of(n)[flag]", "flag", "pair_of(n)[1]"),
    ("pair_of(n)[2]", "2", "pair_of(n)[0]"),
    ("a, b, c = pair_of(n)", "", "a, b = pair_of(n)"),
    # Conditions.
    ("n and flag", "", "n > 0 and flag > 0"),
    ("n in (1, 2)", "", "(n == 1) | (n == 2)"),
    ("1.0 if n > 10 else 0", "", "1.0 if n > 10 else 0.0"),
    ("tile if n > 3 else 0.0", "", "tile if BLOCK > 3 else 0.0"),
    ("0.0 if tile < 0 else 1.0", "", "tl.where(tile < 0, 0.0, 1.0)"),
    ("tl.static_assert(n > 3)", "static_assert", "tl.device_assert(n > 3, 'n is small')"),
    ("tl.static_assert(BLOCK == 32, f'not {BLOCK}')", "not 16", "tl.static_assert(BLOCK == 16)"),
    ("tl.device_print(f'n is {n}')", "n", "tl.device_print('n is', n)"),
    ("print(n)", "print", "print('n is', n)"),
    # Python that Triton does not have.
    ("name = 'relu'", "", "name: tl.constexpr = 'relu'"),
    ("a = b = 1.0", "", "a, b = 1.0, 2"),
    ("out.size = n", "", "n += 1"),
    ("lambda a: a", "lambda", "[n, 1]"),
    ("{'a': n}", "", "(n, 1)"),
    ("{n, 1}", "", "(n, (1, scale))"),
    ("[n + i for i in range(4)]", "", "[n + i for i in (0, 1)]"),
    ("yield n", "yield", "pass"),
    ("del tile", "del", "assert n > 3"),
    ("global LIMIT", "global", "'a text'"),
    ("import math", "import", "return"),
    ("raise ValueError('no')", "raise", "assert n > 3, 'n is small'"),
    ("with torch.no_grad(): n", "with", "n"),
]  # fmt: skip
