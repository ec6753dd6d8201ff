"""Right files for the puzzles that are written differently from the solutions.

Each is the solution with changes (changes.py), and compiles for sm_90.
"""

from tests.flash_versions.puzzles.changes import File
from tests.flash_versions.puzzles.changes import file as right

RIGHT: dict[str, list[File]] = {
    "copy": [
        right("programs that go on to further blocks", ("(triton.cdiv(len(x), 16),)", "(2,)"), (0, """
            for first in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(y + at, tl.load(x + at, mask=at < length), mask=at < length)
        """)),
        right("a number in each program, no mask", (0, """
            tl.store(y + tl.program_id(0), tl.load(x + tl.program_id(0)))
        """), ("(triton.cdiv(len(x), 16),)", "(x.shape[0],)")),
    ],
    "scale_rows": [
        right("a grid of one axis", ("    row = tl.program_id(0)", "    across = tl.cdiv(columns, BLOCK)\n    row = tl.program_id(0) // across"),
            ("column = tl.program_id(1)", "column = tl.program_id(0) % across"),
            ("(triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))",
             "(triton.cdiv(x.shape[0], 16) * triton.cdiv(x.shape[1], 16),)")),
        right("a row for each program, a scalar factor", (0, """
            one = tl.program_id(0)
            factor = tl.load(w + one)
            for start in tl.range(0, columns, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tile = tl.load(x + one * stride + at, mask=at < columns)
                tl.store(y + one * columns + at, factor * tile, mask=at < columns)
        """), ("(triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))", "(x.shape[0],)")),
    ],
    "transpose": [
        right("the tile is transposed, too", (0, """
            there = (column < columns)[:, None] & (row < rows)[None, :]
            tl.store(y + column[:, None] * rows + row[None, :], tl.trans(tile), mask=there)
        """)),
    ],
    "row_sum": [
        right("the sum at the end", ("total = tl.zeros((BLOCK,), tl.float32)", "tiles = tl.zeros((BLOCK, BLOCK), tl.float32)"),
            ("total += tl.sum(tile, 1)", "tiles += tile"), ("tl.store(y + row, total", "tl.store(y + row, tl.sum(tiles, axis=1)")),
        right("from the last block to the first", ("range(0, columns, BLOCK)", "range((columns - 1) // BLOCK * BLOCK, -1, -BLOCK)")),
    ],
    "row_softmax": [
        right("powers of 2, a reciprocal", (0, """
            inside = column < columns
            s = tl.load(x + row * columns + column, mask=inside, other=float("-inf")) * 1.4426950408889634
            p = tl.exp2(s - tl.maximum(tl.max(s), -1e30))
            total = tl.sum(p)
            tl.store(y + row * columns + column, p * (1.0 / tl.maximum(total, 1e-30)), mask=inside)
        """)),
        right("a row of twice the size that is needed", ("triton.next_power_of_2(x.shape[1])", "2 * triton.next_power_of_2(x.shape[1])")),
    ],
    "online_softmax": [
        right("a large finite number instead of -inf", ("tl.full((BLOCK,), float(\"-inf\"), tl.float32)", "tl.full((BLOCK,), -1e30, tl.float32)"), (0, """
            new_m = tl.maximum(m, tl.max(s, 1))
            l *= tl.exp(m - new_m)
            l += tl.sum(tl.exp(s - new_m[:, None]), 1)
            m = new_m
        """)),
    ],
    "running_average": [
        right("the average moves by a part of the difference", (0, """
            block = tl.sum(p, 1)
            l = l * alpha + block
            share = tl.where(l > 0.0, 1.0 / l, 0.0)
            average += share[:, None] * (tl.dot(p, values) - average * block[:, None])
        """)),
        right("no other for values, but where", ("mask=(key < keys)[:, None], other=0.0)", "mask=(key < keys)[:, None])\n        values = tl.where((key < keys)[:, None], values, 0.0)")),
    ],
    "fa1": [
        right("the scale goes into q, once", ("    m = tl.full", "    q_tile = q_tile * scale\n    m = tl.full"), ("tl.dot(q_tile, k_tile.T) * scale", "tl.dot(q_tile, k_tile.T)")),
        right("a sum that is divided at the end", ("(average * (alpha * l)[:, None] + tl.dot(p, v_tile)) / new_l[:, None]", "average * alpha[:, None] + tl.dot(p, v_tile)"),
            ("dim[None, :], average, mask", "dim[None, :], average / l[:, None], mask")),
        right("k is loaded transposed, pointers move", ("    for start in", "    k_at = k + dim[:, None] + tl.arange(0, BLOCK)[None, :] * D\n    v_at = v + tl.arange(0, BLOCK)[:, None] * D + dim[None, :]\n    for start in"),
            ("k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "k_tile = tl.load(k_at, mask=(key < keys)[None, :], other=0.0)"),
            ("v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "v_tile = tl.load(v_at, mask=there, other=0.0)\n        k_at += BLOCK * D\n        v_at += BLOCK * D"),
            ("k_tile.T", "k_tile")),
        right("more queries than keys in a tile", ("BLOCK: tl.constexpr)", "BLOCK: tl.constexpr, ROWS: tl.constexpr)"), ("row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)"),
            ("tl.full((BLOCK,)", "tl.full((ROWS,)"), ("tl.zeros((BLOCK", "tl.zeros((ROWS"), ("triton.cdiv(q.shape[0], 16)", "triton.cdiv(q.shape[0], 512 // q.shape[1])"), ("BLOCK=16)", "BLOCK=16, ROWS=512 // q.shape[1])")),
    ],
    "fa2": [
        right("powers of e, and alpha at the end", ("p = tl.exp2(s * scale_log2 - pivot[:, None])", "p = tl.exp(s * (scale_log2 / LOG2E) - pivot[:, None] / LOG2E)"),
            ("acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=\"ieee\")", "acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile, input_precision=\"ieee\")")),
        right("k is loaded transposed", ("k_tile = load_rows(k, k_pos, DIM, MASKED)", "k_tile = tl.trans(load_rows(k, k_pos, DIM, True))"), ("k_tile.T", "k_tile")),
    ],
    "causal": [
        right("an offset between the ends, bounds by comparison", (
            "    last_key = tl.minimum(row + offset, kv_length - 1)\n", "    last_key = tl.where(row + offset < kv_length, row + offset, kv_length - 1)\n"),
            ("tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV)", "(tl.minimum((tile + 1) * BLOCK_Q + offset, kv_length) + BLOCK_KV - 1) // BLOCK_KV")),
        right("no block is taken for whole", ("tl.maximum(tl.minimum(tile * BLOCK_Q + offset + 1, kv_length), 0) // BLOCK_KV", "end * 0")),
    ],
    "heads": [
        right("indices of 64 bits from the start", ("    start = x + sequence.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]\n    return start, strides[1], length",
            "    x += sequence.to(tl.int64) * strides[0]\n    return x + tl.cast(head, tl.int64) * strides[2], strides[1], length")),
    ],
    "combine": [
        right("parts that weigh nothing are not loaded", ("    part = load_rows((parts + row * DIM, rows * DIM, splits), split, DIM)\n", ""),
            ("    total = tl.sum", "    address = ((split * rows + row) * DIM)[:, None] + tl.arange(0, DIM)[None, :]\n    part = tl.load(parts + address, mask=(weight > 0.0)[:, None], other=0.0)\n    total = tl.sum")),
    ],
    "delta": [
        right("columns in parts", (0, """
            total = tl.zeros((BLOCK,), tl.float32)
            for first in tl.static_range(0, D, 16):
                at = row[:, None] * D + first + tl.arange(0, 16)[None, :]
                here = row[:, None] < queries
                total += tl.sum(tl.load(o + at, here, 0.0).to(tl.float32) * tl.load(do + at, here, 0.0), 1)
            tl.store(delta + row, total, mask=row < queries)
        """)),
    ],
    "dk_dv": [
        right("scores (queries, keys), turned", ("s = tl.dot(k_tile, q_tile.T, input_precision=\"ieee\")", "s = tl.dot(q_tile, k_tile.T, input_precision=\"ieee\").T"),
            ("tl.exp2(s * (scale * LOG2E) - row_lse * LOG2E)", "tl.exp(s * scale - row_lse)")),
    ],
    "backward": [
        right("delta by einsum, the mask by comparison", ("(o.float() * do.float()).sum(3).transpose(1, 2)", "torch.einsum(\"bmhd,bmhd->bhm\", o.float(), do.float())"),
            ("tl.maximum(tile * BLOCK_KV - offset, 0) // BLOCK_Q", "tl.where(tile * BLOCK_KV > offset, tile * BLOCK_KV - offset, 0) // BLOCK_Q")),
    ],
    "ring": [
        right("three slots", ("i % 2", "i % 3"), ("i // 2", "i // 3"), ("[2]", "[3]"), ("[2, 1]", "[3, 1]"), ("static_range(2)", "static_range(3)")),
        right("the first tiles are loaded without a wait", (0, """
            if i >= 2:
                mbarrier.wait(empty.index(slot), (i // 2 - 1) & 1)
            mbarrier.expect(full.index(slot), x.block_type.nbytes)
            load_tile(x, [i * 64, 0], full.index(slot), slots.index(slot))
        """)),
        right("the last tile first, TMA by Gluon's name, another layout", ("import torch\n", "import torch\nfrom triton.experimental.gluon.language.nvidia.hopper import tma\n"), ("load_tile(x, [i * 64, 0]", "tma.async_copy_global_to_shared(x, [(tiles - 1 - i) * 64, 0]"), ("gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])", "gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])")),
    ],
    "producer": [
        right("an arrival for each tile", (0, """
            mbarrier.wait(empty.index(slot), (i // 2 & 1) ^ 1)
            mbarrier.expect(full.index(slot), a.block_type.nbytes)
            load_tile(a, [0, i * 64], full.index(slot), a_slots.index(slot))
            mbarrier.expect(full.index(slot), b.block_type.nbytes)
            load_tile(b, [i * 64, 0], full.index(slot), b_slots.index(slot))
        """), ("mbarrier.init(full.index(slot), count=1)", "mbarrier.init(full.index(slot), count=2)")),
        right("a barrier of its own for b", ("full, empty, steps", "full, b_full, empty, steps"), ("    empty = gl.allocate", "    b_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())\n    empty = gl.allocate"),
            ("        mbarrier.init(empty", "        mbarrier.init(b_full.index(slot), count=1)\n        mbarrier.init(empty"), ("        mbarrier.expect(full.index(slot), a.block_type.nbytes + b.block_type.nbytes)\n", "        mbarrier.expect(full.index(slot), a.block_type.nbytes)\n        mbarrier.expect(b_full.index(slot), b.block_type.nbytes)\n"),
            ("[i * 64, 0], full.index", "[i * 64, 0], b_full.index"), ("        mbarrier.wait(full.index(slot), i // 2 & 1)\n", "        mbarrier.wait(full.index(slot), i // 2 & 1)\n        mbarrier.wait(b_full.index(slot), i // 2 & 1)\n")),
        right("the product waits in its own call, a result of another layout", ("acc = warpgroup_mma(a_tile, b_slots.index(slot), acc, is_async=True)\n        acc = warpgroup_mma_wait(0, deps=[acc])\n", "acc = warpgroup_mma(a_tile, b_slots.index(slot), acc)\n"),
            ("    row = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))", "    wide: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])\n    acc = gl.convert_layout(acc, wide)\n    row = CONSUMER * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, wide))"), ("column = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))", "column = gl.arange(0, 64, layout=gl.SliceLayout(0, wide))")),
        right("a product stays in flight while the next is issued", ("acc = gl.zeros([64, 64], gl.float32, layout)\n", "acc = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout))\n"), (1, """
            mbarrier.wait(full.index(slot), i // 2 & 1)
            acc = warpgroup_mma(a_tile, b_slots.index(slot), acc, is_async=True)
            if i > 0:
                warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((i - 1) % 2), count=1)
        """), ("    row = CONSUMER * 64", "    acc = warpgroup_mma_wait(0, deps=[acc])\n    row = CONSUMER * 64"), ("import torch\n", "import torch\nfrom triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init\n")),
    ],
    "overlap": [
        right("V is waited for first", ("    rings.v.wait(before)\n", ""), ("    rings.k.wait(stage)\n    pipe", "    rings.v.wait(before)\n    rings.k.wait(stage)\n    pipe")),
    ],
    "rescale": [
        right("no branch: the new maximum is chosen", (0, """
            grows = gl.max(new_m - m, 0) > 8.0
            chosen = gl.where(grows, new_m, m)
            alpha = gl.exp2(m - chosen)
            acc *= alpha[:, None]
            l *= alpha
            m = chosen
            rescales += gl.where(grows, 1.0, 0.0)
        """)),
    ],
    "fa3": [
        right("a loop that counts up", ("    for block in range(tile.end - 1, -1, -1):\n", "    for i in range(tile.end):\n        block = tile.end - 1 - i\n")),
    ],
}  # fmt: skip
