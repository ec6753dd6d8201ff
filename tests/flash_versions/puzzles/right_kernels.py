"""Right files for the puzzles that are written differently from the solutions.

Each is the solution with changes (changes.py), and compiles for sm_90.
"""

from tests.flash_versions.puzzles.changes import File
from tests.flash_versions.puzzles.changes import file as right

LSE = "(m + tl.log2(l)) / 1.4426950408889634"

RIGHT: dict[str, list[File]] = {
    "copy": [
        right("programs that go on to further blocks", ("(triton.cdiv(len(x), 16),)", "(2,)"), (0, """
            for first in range(tl.program_id(0) * BLOCK, length, tl.num_programs(0) * BLOCK):
                at = first + tl.arange(0, BLOCK)
                tl.store(y + at, tl.load(x + at, mask=at < length), mask=at < length)
        """)),
        right("a smaller block by default, keywords, a grid by a function",
            ("BLOCK: tl.constexpr", "BLOCK: tl.constexpr = 8"),
            ("copy_kernel[(triton.cdiv(len(x), 16),)](x, y, len(x), BLOCK=16)",
             "copy_kernel[lambda given: (triton.cdiv(given[\"length\"], 8),)](x=x, y=y, length=x.numel())")),
        right("a constant of the module", "SIZE = tl.constexpr(16)",
            (", BLOCK: tl.constexpr", ""), ("BLOCK)", "SIZE)"), ("* BLOCK", "* SIZE"), (", BLOCK=16", "")),
        right("two halves, of a size computed from a constant", (0, """
            HALF: tl.constexpr = BLOCK // 2
            for half in tl.static_range(2):
                at = tl.program_id(0) * BLOCK + half * HALF + tl.arange(0, HALF)
                tl.store(y + at, tl.load(x + at, mask=at < length), mask=at < length)
        """)),
    ],
    "scale_rows": [
        right("the grid's axes swapped", ("row = tl.program_id(0)", "row = tl.program_id(1)"),
            ("column = tl.program_id(1)", "column = tl.program_id(0)"),
            ("(triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))",
             "(triton.cdiv(x.shape[1], 16), triton.cdiv(x.shape[0], 16))")),
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
        right("a while loop that moves a pointer",
            ("    for start in range(0, columns, BLOCK):\n", "    pointers = x + row[:, None] * columns + tl.arange(0, BLOCK)[None, :]\n    left = columns\n    while left > 0:\n"),
            ("        column = start + tl.arange(0, BLOCK)\n", ""), (0, """
            inside = (row[:, None] < rows) & (tl.arange(0, BLOCK)[None, :] < left)
            total = total + tl.sum(tl.load(pointers, mask=inside, other=0), 1)
            pointers += BLOCK
            left -= BLOCK
        """)),
        right("a reduction with a function", ("total += tl.sum(tile, 1)", "total = add(total, tl.reduce(tile, 1, add))"), '''
@triton.jit
def add(a, b):
    return a + b
'''),
    ],
    "row_softmax": [
        right("powers of 2, a reciprocal", (0, """
            inside = column < columns
            s = tl.load(x + row * columns + column, mask=inside, other=float("-inf")) * 1.4426950408889634
            p = tl.exp2(s - tl.maximum(tl.max(s), -1e30))
            total = tl.sum(p)
            tl.store(y + row * columns + column, p * (1.0 / tl.maximum(total, 1e-30)), mask=inside)
        """)),
    ],
    "online_softmax": [
        right("powers of 2", (0, """
            s = s * 1.4426950408889634
            new_m = tl.maximum(m, tl.max(s, 1))
            pivot = tl.where(new_m == float("-inf"), 0.0, new_m)
            l = l * tl.exp2(m - pivot) + tl.sum(tl.exp2(s - pivot[:, None]), 1)
            m = new_m
        """), ("m + tl.log(l)", "(m + tl.log2(l)) * 0.6931471805599453")),
        right("a state of two in a tuple, carried by the loop", ("    for start in", "    state = (m, l)\n    for start in"), (0, """
            before, l = state
            m = tl.maximum(before, tl.max(s, 1))
            pivot = tl.where(m == float("-inf"), 0.0, m)
            state = (m, l * tl.exp(before - pivot) + tl.sum(tl.exp(s - pivot[:, None]), 1))
        """), ("m + tl.log(l)", "state[0] + tl.log(state[1])")),
    ],
    "running_average": [
        right("a sum that is divided at the end", (0, """
            average = tl.dot(p, values, average * alpha[:, None])
            l = alpha * l + tl.sum(p, 1)
        """), ("dim[None, :], average, mask", "dim[None, :], average / tl.where(l == 0.0, 1.0, l)[:, None], mask")),
        right("no other for values, but where", ("mask=(key < keys)[:, None], other=0.0)", "mask=(key < keys)[:, None])\n        values = tl.where((key < keys)[:, None], values, 0.0)")),
    ],
    "fa1": [
        right("the scale goes into q, once", ("    m = tl.full", "    q_tile = q_tile * scale\n    m = tl.full"), ("tl.dot(q_tile, k_tile.T) * scale", "tl.dot(q_tile, k_tile.T)")),
        right("undefined numbers that no result sees: q past the end, k before the mask",
            ("mask=(row < queries)[:, None], other=0.0)", "mask=(row < queries)[:, None])"),
            ("k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there)")),
        right("block pointers", ("    for start in", "    k_block = tl.make_block_ptr(k, (D, keys), (1, D), (0, 0), (D, BLOCK), (0, 1))\n    v_block = tl.make_block_ptr(v, (keys, D), (D, 1), (0, 0), (BLOCK, D), (1, 0))\n    for start in"),
            ("k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "k_tile = tl.load(k_block, boundary_check=(1,), padding_option=\"zero\")"),
            ("v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "v_tile = tl.load(v_block, boundary_check=(0,), padding_option=\"zero\")\n        k_block = tl.advance(k_block, (0, BLOCK))\n        v_block = tl.advance(v_block, (BLOCK, 0))"),
            ("k_tile.T", "k_tile")),
    ],
    "fa2": [
        right("the product adds to acc itself", ("acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)", "acc = tl.dot(p.to(v_tile.dtype), v_tile, acc=acc * alpha[:, None])")),
        right("a while loop", ("    for start in range(0, keys, BLOCK):\n", "    start = 0\n    while start < keys:\n"), ("        m = new_m\n", "        m = new_m\n        start += BLOCK\n")),
        right("products in fp32, LSE by a natural logarithm", ("p.to(v_tile.dtype), v_tile", "p, v_tile.to(tl.float32)"), (LSE, "m * 0.6931471805599453 + tl.log(l)")),
        right("tensor descriptors made by the host", "from triton.tools.tensor_descriptor import TensorDescriptor", ("    scale_log2 =", "    q_box, k_box, v_box = (TensorDescriptor(x, list(x.shape), list(x.stride()), [16, x.shape[1]]) for x in (q, k, v))\n    scale_log2 ="), ("[grid](q, k, v, o", "[grid](q_box, k_box, v_box, o"),
            ("tl.load(q + row[:, None] * D + dim[None, :], mask=(row < queries)[:, None], other=0.0)", "q.load([tl.program_id(0) * BLOCK, 0])"),
            ("tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "k.load([start, 0])"), ("tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "v.load([start, 0])"), ("        there = (key < keys)[:, None]\n", "")),
    ],
    "causal": [
        right("a mask from a function, exact products, hints for the compiler", ("        s = tl.dot(q_tile, k_tile.T)", "        start = tl.multiple_of(start, BLOCK)\n        tl.static_assert(D >= 16)\n        tl.assume(keys > 0)\n        s = tl.dot(q_tile, k_tile.T, input_precision=\"ieee\", out_dtype=tl.float32)"), ("tl.where(seen & (key < keys)[None, :], s,", "tl.where(sees(row[:, None], key[None, :], queries, keys), s,"), '''
@triton.jit
def sees(i, j, queries, keys):
    return (j < keys) & (i + keys >= j + queries)
'''),
        right("a large finite number instead of -inf, p set to 0", ("tl.full((BLOCK,), float(\"-inf\"), tl.float32)", "tl.full((BLOCK,), -1e30, tl.float32)"), (1, """
            seen = (row[:, None] - key[None, :] >= queries - keys) & (key[None, :] < keys)
            new_m = tl.maximum(m, tl.max(tl.where(seen, s, -1e30), 1))
            p = tl.where(seen, tl.exp2(s - new_m[:, None]), 0.0)
            alpha = tl.exp2(m - new_m)
        """)),
        right("undefined numbers in q and k that the mask hides", ("k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there)")),
    ],
    "heads": [
        right("heads first in the grid", ("tl.program_id(0) * BLOCK", "tl.program_id(1) * BLOCK"), ("head = tl.program_id(1)", "head = tl.program_id(0)"), (2, "grid = (q.shape[1], triton.cdiv(q.shape[0], 16))")),
        right("the queries of a group of heads in one tile", ("    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    head = tl.program_id(1)\n", "    packed = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    row = packed // group\n    head = tl.program_id(1) * group + packed % group\n"), (0, """
            q += head[:, None] * q_head
            o += head[:, None] * o_head
            k += tl.program_id(1) * k_head
            v += tl.program_id(1) * v_head
        """), (2, "grid = (triton.cdiv(q.shape[0] * group, 16), k.shape[1])")),
    ],
    "split_keys": [
        right("a loop over the number of blocks", ("    for start in range(first, end, BLOCK):\n        key = start +", "    for block in range(tl.cdiv(end - first, BLOCK)):\n        key = first + block * BLOCK +")),
        right("an early return of empty parts", (0, """
            first = split * size
            end = tl.minimum(keys, first + size)
            if first >= keys:
                tl.store(o + (split * queries + row)[:, None] * D + dim[None, :], acc, mask=(row < queries)[:, None])
                tl.store(lse + split * queries + row, m, mask=row < queries)
                return
        """), ("tl.where(l == 0.0, 1.0, l)", "l")),
    ],
    "combine": [
        right("where hides NaN and what is undefined", (0, """
            there = split < splits
            each = tl.load(lses + split * queries + row, mask=there)
            each = tl.where(there, each, float("-inf"))
            largest = tl.max(each, 0)
            pivot = tl.where(largest > float("-inf"), largest, 0.0)
            weight = tl.exp(each - pivot)
            total = tl.sum(weight, 0)
            address = (split * queries + row)[:, None] * D + dim[None, :]
            tile = tl.load(parts + address, mask=there[:, None])
            tile = tl.where((weight > 0.0)[:, None], tile * weight[:, None], 0.0)
            tl.store(o + row * D + dim, tl.sum(tile, 0) / tl.where(total > 0.0, total, 1.0))
            tl.store(lse + row, pivot + tl.log(total))
        """)),
    ],
    "delta": [
        right("undefined rows that are not stored, tl.cast", (0, """
            here = (row < queries)[:, None]
            product = tl.cast(tl.load(o + address, mask=here), tl.float32) * tl.cast(tl.load(do + address, mask=here), tl.float32)
            tl.store(delta + row, tl.sum(product, axis=-1), mask=row < queries)
        """)),
        right("a query for each program", '''
@triton.jit
def delta_kernel(o, do, delta, queries, D: tl.constexpr, BLOCK: tl.constexpr):
    address = tl.program_id(0) * D + tl.arange(0, D)
    tl.store(delta + tl.program_id(0), tl.sum(tl.load(o + address).to(tl.float32) * tl.load(do + address).to(tl.float32)))
''', ("(triton.cdiv(o.shape[0], 16),)", "(len(o),)"), ("torch.empty(o.shape[0], dtype=torch.float32)", "o.new_empty((o.size(0),), dtype=torch.float32)")),
    ],
    "dk_dv": [
        right("the scale in dS, from the last queries to the first", ("range(0, queries, BLOCK)", "range((queries - 1) // BLOCK * BLOCK, -1, -BLOCK)"), ("ds = p * (", "ds = scale * p * ("), ("dk_tile * scale", "dk_tile")),
        right("undefined LSE and delta, hidden by where", ("row_lse = tl.load(lse + row, mask=here, other=float(\"inf\"))", "row_lse = tl.load(lse + row, mask=here)"), ("row_delta = tl.load(delta + row, mask=here, other=0.0)", "row_delta = tl.load(delta + row, mask=here)"),
            ("        p = tl.exp(tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None])", "        p = tl.where(here[:, None], tl.exp(tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None]), 0.0)"),
            ("ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None])", "ds = tl.where(here[:, None], p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None]), 0.0)")),
    ],
    "dq": [
        right("the scale in dS, powers of 2", ("ds = p * (", "ds = scale * p * ("), ("dq_tile * scale", "dq_tile"), ("tl.exp(tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None])", "tl.exp2((tl.dot(q_tile, k_tile.T) * scale - row_lse[:, None]) * 1.4426950408889634)")),
        right("dQ in two sums", ("    dq_tile = tl.zeros((BLOCK, D), tl.float32)\n", "    first = tl.zeros((BLOCK, D), tl.float32)\n    second = tl.zeros((BLOCK, D), tl.float32)\n"),
            ("        ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None])\n        dq_tile += tl.dot(ds, k_tile)\n", "        first = tl.dot(p * tl.dot(do_tile, v_tile.T), k_tile, first)\n        second = tl.dot(p, k_tile, second)\n"),
            ("dq_tile * scale", "(first - row_delta[:, None] * second) * scale")),
    ],
    "backward": [
        right("chosen once, after the exponential", (0, """
            s = tl.dot(q_tile, k_tile.T) * scale
            return tl.where(seen, tl.exp(s - row_lse[:, None]), 0.0)
        """)),
        right("query tiles that begin with the first query that sees a key", ("begin = first // BLOCK * BLOCK", "begin = first")),
    ],
    "ring": [
        right("three slots", ("i % 2", "i % 3"), ("i // 2", "i // 3"), ("[2]", "[3]"), ("[2, 1]", "[3, 1]"), ("static_range(2)", "static_range(3)")),
        right("the first tiles are loaded without a wait", (0, """
            if i >= 2:
                mbarrier.wait(empty.index(slot), (i // 2 - 1) & 1)
            mbarrier.expect(full.index(slot), x.block_type.nbytes)
            load_tile(x, [i * 64, 0], full.index(slot), slots.index(slot))
        """)),
        right("the last tile first, TMA by Gluon's name, another layout", "from triton.experimental.gluon.language.nvidia.hopper import tma", ("load_tile(x, [i * 64, 0]", "tma.async_copy_global_to_shared(x, [(tiles - 1 - i) * 64, 0]"), ("gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])", "gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])")),
    ],
    "producer": [
        right("three slots", ("i % 2", "i % 3"), ("i // 2", "i // 3"), ("[2] +", "[3] +"), ("[2, 1]", "[3, 1]"), ("static_range(2)", "static_range(3)")),
        right("a barrier of its own for b", ("full, empty, steps", "full, b_full, empty, steps"), ("    empty = gl.allocate", "    b_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())\n    empty = gl.allocate"),
            ("        mbarrier.init(empty", "        mbarrier.init(b_full.index(slot), count=1)\n        mbarrier.init(empty"), ("        mbarrier.expect(full.index(slot), a.block_type.nbytes + b.block_type.nbytes)\n", "        mbarrier.expect(full.index(slot), a.block_type.nbytes)\n        mbarrier.expect(b_full.index(slot), b.block_type.nbytes)\n"),
            ("[i * 64, 0], full.index", "[i * 64, 0], b_full.index"), ("        mbarrier.wait(full.index(slot), i // 2 & 1)\n", "        mbarrier.wait(full.index(slot), i // 2 & 1)\n        mbarrier.wait(b_full.index(slot), i // 2 & 1)\n")),
        right("a product stays in flight while the next is issued", ("acc = gl.zeros([64, 64], gl.float32, layout)\n", "acc = warpgroup_mma_init(gl.zeros([64, 64], gl.float32, layout))\n"), (1, """
            mbarrier.wait(full.index(slot), i // 2 & 1)
            acc = warpgroup_mma(a_tile, b_slots.index(slot), acc, is_async=True)
            if i > 0:
                warpgroup_mma_wait(1, deps=[acc])
                mbarrier.arrive(empty.index((i - 1) % 2), count=1)
        """), ("    row = CONSUMER * 64", "    acc = warpgroup_mma_wait(0, deps=[acc])\n    row = CONSUMER * 64"), "from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_init"),
    ],
    "overlap": [
        right("three slots of K and of V", ("make_pipeline(k, 2, 1)", "make_pipeline(k, 3, 1)"), ("make_pipeline(v, 2, 1)", "make_pipeline(v, 3, 1)")),
    ],
    "ping_pong": [
        right("barriers by their numbers", "from flash_versions.versions.tiles.pipeline import announce, meet", (0, """
            if CONSUMER > 0:
                announce(12, 256)
        """), (1, """
            meet(12 + CONSUMER, 256)
            s_token = multiply_qk(q_tile, k_ring.tile(stage))
            announce(13 - CONSUMER, 256)
        """)),
        right("mbarriers instead of named ones", "from triton.experimental.gluon.language.nvidia.hopper import mbarrier", "from flash_versions.versions.tiles.pipeline import make_barriers", ("(o, q_ring, k_ring, blocks,", "(o, turns, q_ring, k_ring, blocks,"),
            ("    fence_async_shared()\n", "    turns = make_barriers(2, 1)\n    fence_async_shared()\n"), ("    for _ in range(blocks):\n        k_ring.wait(stage)", "    for i in range(blocks):\n        k_ring.wait(stage)"), (0, "pass"), (1, """
            mbarrier.wait(turns.index(CONSUMER), (i & 1) ^ (1 - CONSUMER))
            s_token = multiply_qk(q_tile, k_ring.tile(stage))
            mbarrier.arrive(turns.index(1 - CONSUMER), count=1)
        """)),
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
        right("rings of three slots, V is filled first", ("make_pipeline(k, 2, 2)", "make_pipeline(k, 3, 2)"), ("make_pipeline(v, 2, 2)", "make_pipeline(v, 3, 2)"), ("        k_ring.fill(stage, k, [i * 64, 0])\n        v_ring.fill(stage, v, [i * 64, 0])\n", "        v_ring.fill(stage, v, [i * 64, 0])\n        k_ring.fill(stage, k, [i * 64, 0])\n")),
        right("K and V in one ring", ("make_pipeline(k, 2, 2)", "make_pipeline(k, 4, 2)"), ("    v_ring = make_pipeline(v, 2, 2)\n", ""), ("q_ring, k_ring, v_ring, length", "q_ring, ring, length"), ("k_ring", "ring"), ("v_ring", "ring"), ("        ring.fill(stage, v", "        stage = stage.next()\n        ring.fill(stage, v"), ("        ring.release(stage)\n        key", "        ring.release(stage)\n        stage = stage.next()\n        key")),
    ],
}  # fmt: skip
