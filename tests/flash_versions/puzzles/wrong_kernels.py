"""Wrong solutions of the puzzles, and what a good sentence about each has to name.

Each is the solution with changes (changes.py).
"""

from tests.flash_versions.puzzles.changes import File
from tests.flash_versions.puzzles.changes import file as wrong

OUTSIDE = r"(load|store).*(goes to element|past the end|behind the end|outside)"
NEVER = r"never stored"
TWICE = r"two programs store"
OTHER = r"\bother\b"
RESCALE = r"rescale|alpha|(sum|average|acc|\bl\b).* old (maximum|m\b)|summed .*before"
INF = r"(?<!or from )-?inf (-|minus) -?inf"
ZERO = r"0 / 0|divi\w+ by (a sum of )?0|\bl is 0|sum is 0"
CONSTANT = r"constexpr|compile.time"
TYPE = r"(changes|change of) (its )?(type|shape)|is .* before the loop and"
LAST = r"last (\d+ keys|block|columns|elements)|(keys|columns|elements) .*(missing|left out)"
MASK = r"off by one|one (key|element) too (many|few)|own key"
UNWRITTEN = (
    r"(nobody|no kernel|nothing) (wrote|has written|has stored)|before it is (written|stored)"
)
PHASE = r"(wrong|other) (phase|parity)|phase .*(instead|should|never)"
EARLY = r"without waiting|(is|was|are|were) not waited|before it (is|was) (full|filled)|has landed"
AGAIN = r"without waiting|still (reads|read)|(filled|written|overwritten) (again )?(before|while)|released (before|while)"
MORE = r"counts 1\b.*(two|both|several|2 partitions)|(two|both|several|2) \w+ arrive|more arrivals than"
IN_FLIGHT = r"in flight|still (reads|read)|not done|is done"

WRONG: dict[str, list[File]] = {
    "copy": [
        wrong(OUTSIDE, ("mask=inside), mask=inside)", "mask=inside))")),
        wrong(NEVER, ("index < length", "index < length - 1")),
        wrong("clone.*PyTorch", ("    y = torch.empty_like(x)", "    return x.clone()")),
        wrong("no kernel", ("    copy_kernel[", "    return x\n    copy_kernel[")),
        wrong("input", ("    # end", "    tl.store(x + index, 0.0, mask=inside)\n    # end")),
        wrong(f"grid|no program|{NEVER}", ("(triton.cdiv(len(x), 16),)", "(max(len(x) // 16, 1),)")),
    ],
    "scale_rows": [
        wrong("stride|contiguous", ("row[:, None] * stride", "row[:, None] * columns")),
        wrong(f"{OUTSIDE}.*\\bw\\b", ("tl.load(w + row, mask=row < rows)", "tl.load(w + row)")),
        wrong(f"{NEVER}|grid", ("(triton.cdiv(x.shape[0], 16), triton.cdiv(x.shape[1], 16))", "(triton.cdiv(x.shape[1], 16), triton.cdiv(x.shape[0], 16))")),
        wrong(r"mask|past the end of (a|the) row", ("(row < rows)[:, None] & ", "(row < rows)[:, None] | ")),
        wrong(r"axis|as a (row|column)|broadcast", ("factor[:, None]", "factor[None, :]")),
    ],
    "transpose": [
        wrong("transpos", ("column[None, :] * rows + row[:, None]", "row[:, None] * rows + column[None, :]")),
        wrong("mask", ("tl.store(y + column[None, :] * rows + row[:, None], tile", "tl.store(y + column[:, None] * rows + row[None, :], tile.T")),
        wrong(f"{TWICE}|{OUTSIDE}|stride", ("column[None, :] * rows", "column[None, :] * columns")),
    ],
    "row_sum": [
        wrong(OTHER, ("other=0.0)", "other=1.0)")),
        wrong("tile.*at most", ("BLOCK=16)", "BLOCK=16 if x.shape[1] <= 32 else 32)")),
        wrong("axis|shape", ("tl.sum(tile, 1)", "tl.sum(tile, 0)")),
        wrong(r"\blist|append", ("    total = tl.zeros((BLOCK,), tl.float32)\n", "    total = tl.zeros((BLOCK,), tl.float32)\n    sums = []\n"), ("total += tl.sum(tile, 1)", "sums.append(tl.sum(tile, 1))"), ("    tl.store(y + row, total", "    for part in sums:\n        total += part\n    tl.store(y + row, total")),
        wrong("break", ("        column = start", "        if start >= columns:\n            break\n        column = start")),
        wrong("return", ("        column = start", "        if tl.program_id(0) * BLOCK >= rows:\n            return\n        column = start")),
    ],
    "row_softmax": [
        wrong("maximum|overflow", ("s - tl.where(largest == float(\"-inf\"), 0.0, largest)", "s")),
        wrong("tl.softmax", ("    largest = tl.max(s, 0)", "    largest = tl.softmax(s)")),
        wrong(ZERO, ("tl.where(total == 0.0, 1.0, total)", "total")),
        wrong(r"log2\(e\)|base", ("tl.exp(", "tl.exp2(")),
        wrong("powers? of (two|2)", ("triton.next_power_of_2(x.shape[1])", "x.shape[1]")),
        wrong("softmax.*PyTorch", ("    y = torch.empty_like(x)", "    x = torch.softmax(x, 1)\n    y = torch.empty_like(x)"), ("p / tl.where(total == 0.0, 1.0, total)", "s")),
    ],
    "online_softmax": [
        wrong(RESCALE, ("l * tl.exp(m - pivot) + ", "l + ")),
        wrong(r"maximum|\bm\b", ("m + tl.log(l)", "tl.log(l)")),
        wrong(r"\bm\b.*(never|not).*(chang|updat|assign)|earlier blocks|`m = new_m` is missing|" + RESCALE, ("        m = new_m\n", "")),
        wrong("overflow|largest so far|maximum", ("tl.maximum(m, tl.max(s, 1))", "tl.max(s, 1)")),
        wrong(r"\bm\b.*(begin|start)|underflow|small scores|log\(0\)", ("tl.full((BLOCK,), float(\"-inf\"), tl.float32)", "tl.zeros((BLOCK,), tl.float32)")),
        wrong("one name|several names|multiple assign|a = b", ("    m = tl.full((BLOCK,), float(\"-inf\"), tl.float32)\n    l = tl.zeros((BLOCK,), tl.float32)", "    m = l = tl.zeros((BLOCK,), tl.float32)\n    m -= float(\"inf\")")),
    ],
    "running_average": [
        wrong(r"\bl\b|old sum", ("(alpha * l)[:, None]", "alpha[:, None]")),
        wrong(RESCALE, ("(alpha * l)[:, None]", "l[:, None]")),
        wrong(RESCALE, ("new_l = alpha * l +", "new_l = l +")),
        wrong(ZERO, ("tl.where(new_l == 0.0, 1.0, new_l)", "new_l")),
        wrong(OTHER, ("mask=(key < keys)[:, None], other=0.0)", "mask=(key < keys)[:, None])")),
        wrong(r"\bK\b|at least 16", ("(triton.cdiv(s.shape[0], 16),)", "(triton.cdiv(s.shape[0], 8),)"), ("BLOCK=16", "BLOCK=8")),
    ],
    "fa1": [
        wrong(f"{LAST}|do not exist|score of 0", ("s = tl.where((key < keys)[None, :], s, float(\"-inf\"))", "s = s + 0.0")),
        wrong("scale.*twice|twice.*scale", ("    m = tl.full", "    q_tile = q_tile * scale\n    m = tl.full")),
        wrong(LAST, ("range(0, keys, BLOCK)", "range(0, keys - BLOCK + 1, BLOCK)")),
        wrong("transpos|shape|dimension", ("tl.dot(q_tile, k_tile.T)", "tl.dot(q_tile, k_tile)")),
        wrong("continue", ("        key = start +", "        if start >= keys:\n            continue\n        key = start +")),
        wrong(r"hidden.*(branch|defined|bound|associated)|(branch|defined|bound).*hidden", ("        s = tl.where((key < keys)[None, :], s,", "        if start + BLOCK > keys:\n            hidden = (key >= keys)[None, :]\n        s = tl.where(~hidden, s,")),
    ],
    "fa2": [
        wrong("division", ("        m = new_m", "        acc = acc / 1.0\n        m = new_m")),
        wrong("tl.exp", ("tl.exp2(m - new_m)", "tl.exp((m - new_m) * 0.6931471805599453)")),
        wrong(r"(acc|sum|rounded).* (fp16|float16)", ("acc = tl.zeros((BLOCK, D), tl.float32)", "acc = tl.zeros((BLOCK, D), tl.float16)"), ("acc = acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)", "acc = (acc * alpha[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)).to(tl.float16)")),
        wrong("LOG2_E.*(global|constexpr)|(global|constexpr).*LOG2_E", ("/ 1.4426950408889634", "/ LOG2_E")),
        wrong(f"lse.*{NEVER}|{OUTSIDE}", ("    tl.store(lse + row", "    tl.store(lse + row + queries")),
        wrong(f"lse.*({NEVER}|nothing stores)", ("    tl.store(lse + row, (m + tl.log2(l)) / 1.4426950408889634, mask=row < queries)\n", "")),
    ],
    "causal": [
        wrong("loaded", ("tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK + keys - queries)", "keys")),
        wrong("aligned|first query|last query|keys - queries", ("row[:, None] + keys - queries", "row[:, None]")),
        wrong(INF, ("tl.where(new_m == float(\"-inf\"), 0.0, new_m)", "new_m")),
        wrong(MASK, ("key[None, :] <= row", "key[None, :] < row")),
        wrong(f"{LAST}|diagonal", ("(tl.program_id(0) + 1) * BLOCK + keys", "tl.program_id(0) * BLOCK + keys")),
        wrong(r"(if|condition).*(tensor|block|one number|scalar)|ambiguous", ("        s = tl.where(seen & (key < keys)[None, :], s, float(\"-inf\"))", "        if seen:\n            s = s\n        else:\n            s = s - float(\"inf\")")),
    ],
    "heads": [
        wrong(r"key head|// group", ("k += head // group", "k += head % 2")),
        wrong(f"strides? (of|that)|k_row|{OUTSIDE}.*\\bv\\b", ("v + key[:, None] * v_row", "v + key[:, None] * k_row")),
        wrong(TWICE, ("    o += head * o_head\n", "")),
        wrong(f"{NEVER}|{OUTSIDE}|{TWICE}|grid", ("grid = (triton.cdiv(q.shape[0], 16), q.shape[1])", "grid = (q.shape[1], triton.cdiv(q.shape[0], 16))")),
        wrong(r"strides? (of|that)|contiguous|q_row|another head", ("q + row[:, None] * q_row", "q + row[:, None] * D")),
        wrong(r"key head|// group", ("    k += head // group * k_head\n    v += head // group * v_head\n", "    k += head * k_head\n    v += head * v_head\n")),
    ],
    "split_keys": [
        wrong(r"\bend\b|other parts?|first \+ size|keys of", ("end = tl.minimum(keys, first + size)", "end = keys")),
        wrong(ZERO, ("tl.where(l == 0.0, 1.0, l)", "l")),
        wrong(TWICE, ("part = split * queries + row", "part = row")),
        wrong(INF, ("end = tl.minimum(keys, first + size)", "end = first + size")),
        wrong(r"\bfirst\b|keys of|size", ("first = split * size", "first = split * BLOCK")),
    ],
    "combine": [
        wrong("NaN.*(weigh|0 \\*)|0 \\* NaN|weighs nothing", ("mask=(weight > 0.0)[:, None]", "mask=there[:, None]")),
        wrong("maximum|overflow", ("pivot = tl.where(largest == float(\"-inf\"), 0.0, largest)", "pivot = 0.0")),
        wrong(OTHER, ("mask=there, other=float(\"-inf\"))", "mask=there)")),
        wrong(INF, ("pivot = tl.where(largest == float(\"-inf\"), 0.0, largest)", "pivot = largest")),
        wrong(CONSTANT, ("tl.arange(0, SPLITS)", "tl.arange(0, splits)")),
        wrong(r"stride|address|split \* queries", ("(split * queries + row)[:, None] * D", "(split + row * splits)[:, None] * D")),
    ],
    "delta": [
        wrong(r"(product|multipl|comput|rounded).* (fp16|float16)|overflow", (".to(tl.float32)", "")),
        wrong("shape", ("torch.empty(o.shape[0], dtype", "torch.empty(o.shape[0], o.shape[0], dtype")),
        wrong(r"(result|stored|rounded|tensor).* (fp16|float16)|overflow|dtype", ("dtype=torch.float32", "dtype=o.dtype")),
        wrong(r"shape|pointer|\bo\b", ("row < queries", "row < o.shape[0]")),
    ],
    "dk_dv": [
        wrong("delta", (" - row_delta[:, None]", "")),
        wrong("scale", ("dk_tile * scale", "dk_tile")),
        wrong("scale", ("ds = p *", "ds = scale * p *")),
        wrong("transpos|shape", ("tl.dot(p.T, do_tile)", "tl.dot(p, do_tile)")),
        wrong(f"dv.*{NEVER}|dk.*stored 2 times", ("tl.store(dv + key", "tl.store(dk + key")),
        wrong(UNWRITTEN, ("    tl.store(dv + key[:, None] * D + dim[None, :], dv_tile, mask=there)", "    tl.atomic_add(dv + key[:, None] * D + dim[None, :], dv_tile, mask=there)")),
    ],
    "dq": [
        wrong("scale", ("dq_tile * scale", "dq_tile")),
        wrong("loaded", ("        p = tl", "        tl.load(q + row[:, None] * D + dim[None, :], mask=here)\n        p = tl")),
        wrong(OTHER, ("k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there)")),
        wrong("sign|negative|-1", ("tl.dot(do_tile, v_tile.T) - row_delta[:, None]", "row_delta[:, None] - tl.dot(do_tile, v_tile.T)")),
        wrong(f"{TYPE}|shape", ("dq_tile = tl.zeros((BLOCK, D), tl.float32)", "dq_tile = tl.zeros((BLOCK, BLOCK), tl.float32)")),
    ],
    "backward": [
        wrong("loaded", ("first // BLOCK * BLOCK", "0")),
        wrong("begin|queries .*(missing|left out)|keys - queries", ("- (keys - queries)", "- 0")),
        wrong(f"{NEVER}|{OUTSIDE}|grid", ("dk_dv_kernel[of_keys]", "dk_dv_kernel[of_queries]")),
        wrong(f"{INF}|inf \\* 0|0 \\* inf|LSE is -inf", ("tl.where(seen, tl.exp(tl.where(seen, s, 0.0)), 0.0)", "tl.exp(s) * seen.to(tl.float32)")),
        wrong("seen|mask|does not see", ("tl.where(seen, tl.exp(tl.where(seen, s, 0.0)), 0.0)", "tl.exp(tl.where(seen, s, 0.0))")),
        wrong("begin|queries .*(missing|left out)", ("first // BLOCK * BLOCK", "tl.cdiv(first, BLOCK) * BLOCK")),
    ],
    "ring": [
        wrong(PHASE, ("(i // 2 & 1) ^ 1)", "i // 2 & 1)")),
        wrong("fence", ("        fence_async_shared()\n        mbarrier", "        mbarrier")),
        wrong("fence.*(barrier|init)|(barrier|init).*fence", ("    fence_async_shared()\n    gl.warp", "    gl.warp")),
        wrong(r"\d+ bytes|bytes (land|expect)", ("x.block_type.nbytes", "x.block_type.nbytes // 2")),
        wrong(r"\d+ (more )?bytes|bytes (land|expect)", ("x.block_type.nbytes", "x.block_type.nbytes * 2")),
        wrong("layout", ("gl.store(y + row[:, None] * 64", "row = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))\n    gl.store(y + row[:, None] * 64")),
    ],
    "producer": [
        wrong(MORE, ("mbarrier.init(empty.index(slot), count=2)", "mbarrier.init(empty.index(slot), count=1)")),
        wrong("bytes", ("a.block_type.nbytes + b.block_type.nbytes", "a.block_type.nbytes")),
        wrong(f"{TWICE}|store to element", ("producer_kernel[(1,)]", "producer_kernel[(2,)]")),
        wrong(r"slice|rows .*(never read|both consumers)", (".slice(CONSUMER * 64, 64)", ".slice(0, 64)")),
        wrong(r"coordinate|box|outside", ("load_tile(a, [0, i * 64]", "load_tile(a, [i * 64, 0]")),
        wrong(r"(consume 1|second consumer).*(still|not yet|has not)|(still|while).*consume 1", ("        mbarrier.arrive(empty.index(slot), count=1)\n", "        if CONSUMER == 0:\n            mbarrier.arrive(empty.index(slot), count=2)\n")),
    ],
    "overlap": [
        wrong("in flight", ("        s_token = multiply_qk(q_tile, k_ring.tile(stage))\n        v_ring.wait(before)\n", "        s_token = multiply_qk(q_tile, k_ring.tile(stage))\n        s = warpgroup_mma_wait(0, deps=[s_token])\n        v_ring.wait(before)\n")),
        wrong(IN_FLIGHT, ("        s = warpgroup_mma_wait(1, deps=[s_token])\n        k", "        s = warpgroup_mma_wait(2, deps=[s_token])\n        k")),
        wrong(AGAIN, ("        acc = warpgroup_mma_wait(0, deps=[acc_token])\n        v_ring.release(before)\n", "        v_ring.release(before)\n        acc = warpgroup_mma_wait(0, deps=[acc_token])\n")),
        wrong(r"slot 1 of 1|slot.*(outside|does not exist)", ("v_ring = make_pipeline(v, 2, 1)", "v_ring = make_pipeline(v, 1, 1)")),
        wrong(r"before = stage|keep", ("    for _ in range(1, blocks):\n", "    before = stage\n    for _ in range(1, blocks):\n")),
        wrong(EARLY, ("        k_ring.wait(stage)\n        s_token", "        s_token")),
    ],
    "ping_pong": [
        wrong("never", (1, "s_token = multiply_qk(q_tile, k_ring.tile(stage))")),
        wrong("turn", ("        named_barrier_sync(CONSUMER)\n", "")),
        wrong("turn", ("        named_barrier_arrive(CONSUMER, 2)\n        # end\n        s = warpgroup_mma_wait(0, deps=[s_token])\n", "        # end\n        s = warpgroup_mma_wait(0, deps=[s_token])\n        named_barrier_arrive(CONSUMER, 2)\n")),
        wrong("named barrier|first turn", ("    if CONSUMER == 1:\n        named_barrier_arrive(CONSUMER, 2)\n", "")),
        wrong("named barrier", ("        named_barrier_arrive(CONSUMER, 2)\n        # end\n        s", "        named_barrier_arrive(1 - CONSUMER, 2)\n        # end\n        s")),
        wrong("named.barrier", ("    if CONSUMER == 1:\n        named_barrier_arrive(CONSUMER, 2)\n", "    named_barrier_arrive(CONSUMER, 2)\n")),
    ],
    "rescale": [
        wrong("rescale", ("gl.max(new_m - m, 0) > 8.0", "gl.max(new_m - m, 0) > 0.0")),
        wrong(r"rescale|\bm\b|maximum", ("            m = new_m\n            rescales += 1.0\n", "            rescales += 1.0\n        m = new_m\n")),
        wrong(r"alpha.*(branch|defined|bound)|(branch|defined|bound).*alpha", ("            acc = acc * alpha[:, None]\n            l = l * alpha\n            m = new_m\n            rescales += 1.0\n", "            m = new_m\n            rescales += 1.0\n        acc = acc * alpha[:, None]\n        l = l * alpha\n")),
        wrong(r"(if|condition).*(tensor|block|one number|scalar)|ambiguous", ("if gl.max(new_m - m, 0) > 8.0:", "if new_m - m > 8.0:")),
        wrong(TYPE, ("rescales = 0.0", "rescales = 0")),
        wrong(r"rescale|smallest|every row|gl\.max", ("gl.max(new_m - m, 0) > 8.0", "gl.min(new_m - m, 0) > 8.0")),
    ],
    "fa3": [
        wrong("copied|loaded", ("end = gl.minimum(length, (gl.program_id(0) + 1) * 128)", "end = length")),
        wrong("keys behind|mask|causal", ("key[None, :] <= row[:, None]", "key[None, :] < length")),
        wrong(r"log2\(e\)|base|scale", ("LOG2_E / 8", "1 / 8")),
        wrong(r"no load|never (filled|loaded)|fewer (tiles|loads)|no partition (fills|loads)", ("    for i in range(blocks_of(length)):\n        k_ring.fill", "    for i in range(blocks_of(length) - 1):\n        k_ring.fill")),
        wrong("store to element|two partitions store", ("gl.program_id(0) * 128 + CONSUMER * 64 + gl", "gl.program_id(0) * 128 + gl")),
        wrong("layout", ("rows: gl.constexpr = gl.SliceLayout(1, layout)", "rows: gl.constexpr = gl.SliceLayout(0, layout)")),
    ],
}  # fmt: skip
