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
        wrong(OUTSIDE, ("tl.load(x + index, mask=inside)", "tl.load(x + index)")),
        wrong(NEVER, ("index < length", "index < length - 1")),
        wrong(OUTSIDE, ("index < length", "index <= length")),
        wrong("clone.*PyTorch", ("    y = torch.empty_like(x)", "    return x.clone()")),
        wrong("no kernel", ("    copy_kernel[", "    return x\n    copy_kernel[")),
        wrong(TWICE, ("tl.program_id(0) * BLOCK + tl", "tl")),
        wrong("input", ("    # end", "    tl.store(x + index, 0.0, mask=inside)\n    # end")),
        wrong(f"grid|no program|{NEVER}", ("(triton.cdiv(len(x), 16),)", "(max(len(x) // 16, 1),)")),
        wrong(CONSTANT, ("BLOCK: tl.constexpr", "BLOCK")),
        wrong(CONSTANT, ("    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)", "    size = BLOCK\n    index = tl.program_id(0) * size + tl.arange(0, size)")),
        wrong("powers? of (two|2)", ("(triton.cdiv(len(x), 16),)", "(triton.cdiv(len(x), 12),)"), ("BLOCK=16", "BLOCK=12")),
        wrong("comparison", ("index < length", "0 <= index < length")),
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
        wrong(LAST, ("range(0, columns, BLOCK)", "range(0, columns // BLOCK * BLOCK, BLOCK)")),
        wrong("axis|shape", ("tl.sum(tile, 1)", "tl.sum(tile, 0)")),
        wrong(TYPE, ("total = tl.zeros((BLOCK,), tl.float32)", "total = 0.0")),
        wrong(r"\blist|append", ("    total = tl.zeros((BLOCK,), tl.float32)\n", "    total = tl.zeros((BLOCK,), tl.float32)\n    sums = []\n"), ("total += tl.sum(tile, 1)", "sums.append(tl.sum(tile, 1))"), ("    tl.store(y + row, total", "    for part in sums:\n        total += part\n    tl.store(y + row, total")),
        wrong("break", ("        column = start", "        if start >= columns:\n            break\n        column = start")),
        wrong("return", ("        column = start", "        if tl.program_id(0) * BLOCK >= rows:\n            return\n        column = start")),
        wrong(UNWRITTEN, ("    tl.store(y + row, total", "    total += tl.load(y + row, mask=row < rows, other=0.0) * 0.0\n    tl.store(y + row, total")),
    ],
    "row_softmax": [
        wrong("maximum|overflow", ("s - tl.where(largest == float(\"-inf\"), 0.0, largest)", "s")),
        wrong(INF, ("tl.where(largest == float(\"-inf\"), 0.0, largest)", "largest")),
        wrong("tl.softmax", ("    largest = tl.max(s, 0)", "    largest = tl.softmax(s)")),
        wrong(OTHER, ("other=float(\"-inf\")", "other=0.0")),
        wrong(ZERO, ("tl.where(total == 0.0, 1.0, total)", "total")),
        wrong(r"log2\(e\)|base", ("tl.exp(", "tl.exp2(")),
        wrong("softmax.*PyTorch", ("    y = torch.empty_like(x)", "    x = torch.softmax(x, 1)\n    y = torch.empty_like(x)"), ("p / tl.where(total == 0.0, 1.0, total)", "s")),
    ],
    "online_softmax": [
        wrong(RESCALE, ("l * tl.exp(m - pivot) + ", "l + ")),
        wrong("loaded", ("        new_m = tl", "        tl.load(x + row, mask=row < rows)\n        new_m = tl")),
        wrong("base|log2", ("tl.log(l)", "tl.log2(l)")),
        wrong(r"maximum|\bm\b", ("m + tl.log(l)", "tl.log(l)")),
        wrong(r"\bm\b.*(never|not).*(chang|updat|assign)|earlier blocks|`m = new_m` is missing|" + RESCALE, ("        m = new_m\n", "")),
        wrong("overflow|largest so far|maximum", ("tl.maximum(m, tl.max(s, 1))", "tl.max(s, 1)")),
        wrong(r"\bm\b.*(begin|start)|underflow|small scores|log\(0\)", ("tl.full((BLOCK,), float(\"-inf\"), tl.float32)", "tl.zeros((BLOCK,), tl.float32)")),
        wrong(TYPE, ("m = tl.full((BLOCK,), float(\"-inf\"), tl.float32)", "m = float(\"-inf\")")),
        wrong("one name|several names|multiple assign|a = b", ("    m = tl.full((BLOCK,), float(\"-inf\"), tl.float32)\n    l = tl.zeros((BLOCK,), tl.float32)", "    m = l = tl.zeros((BLOCK,), tl.float32)\n    m -= float(\"inf\")")),
    ],
    "running_average": [
        wrong(r"\bl\b|old sum", ("(alpha * l)[:, None]", "alpha[:, None]")),
        wrong(RESCALE, ("(alpha * l)[:, None]", "l[:, None]")),
        wrong(ZERO, ("tl.where(new_l == 0.0, 1.0, new_l)", "new_l")),
        wrong(r"\bK\b|at least 16", ("(triton.cdiv(s.shape[0], 16),)", "(triton.cdiv(s.shape[0], 8),)"), ("BLOCK=16", "BLOCK=8")),
    ],
    "fa1": [
        wrong(f"{LAST}|do not exist|score of 0", ("s = tl.where((key < keys)[None, :], s, float(\"-inf\"))", "s = s + 0.0")),
        wrong(OUTSIDE, ("v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)", "v_tile = tl.load(v + key[:, None] * D + dim[None, :])")),
        wrong("scale", ("tl.dot(q_tile, k_tile.T) * scale", "tl.dot(q_tile, k_tile.T)")),
        wrong("scale.*twice|twice.*scale", ("    m = tl.full", "    q_tile = q_tile * scale\n    m = tl.full")),
        wrong(RESCALE, ("(alpha * l)[:, None]", "l[:, None]")),
        wrong(MASK, ("tl.where((key < keys)[None, :]", "tl.where((key <= keys)[None, :]")),
        wrong(LAST, ("range(0, keys, BLOCK)", "range(0, keys - BLOCK + 1, BLOCK)")),
        wrong("transpos|shape|dimension", ("tl.dot(q_tile, k_tile.T)", "tl.dot(q_tile, k_tile)")),
        wrong("dtype|type", ("tl.dot(p, v_tile)", "tl.dot(p.to(tl.float16), v_tile)")),
        wrong("continue", ("        key = start +", "        if start >= keys:\n            continue\n        key = start +")),
        wrong(r"hidden.*(branch|defined|bound|associated)|(branch|defined|bound).*hidden", ("        s = tl.where((key < keys)[None, :], s,", "        if start + BLOCK > keys:\n            hidden = (key >= keys)[None, :]\n        s = tl.where(~hidden, s,")),
    ],
    "fa2": [
        wrong(RESCALE, ("alpha * row_sum + tl.sum(p, 1)", "row_sum + tl.sum(p, 1)")),
        wrong("dtype|type", ("p.to(v_tile.dtype)", "p")),
        wrong(r"log2\(e\)|base|scale|powers of", ("p = tl.exp2(", "p = tl.exp(")),
        wrong("tl.sort", ("    new_max =", "    tl.sort(s)\n    new_max =")),
    ],
    "causal": [
        wrong("loaded", ("tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV)", "tl.cdiv(kv_length, BLOCK_KV)")),
        wrong("aligned|first query|last query", ("kv_length - q_length if CAUSAL", "0 if CAUSAL")),
        wrong(f"{LAST}|diagonal|`end", ("tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length)", "tl.minimum(tile * BLOCK_Q + offset + 1, kv_length)")),
        wrong("mask|full_end|line", ("tl.minimum(tile * BLOCK_Q + offset + 1, kv_length)", "tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length)")),
    ],
    "heads": [
        wrong(r"key head|// (group|GROUP)", ("k = head_of(k, k_strides, sequence, head // GROUP", "k = head_of(k, k_strides, sequence, head % 2"), ("v = head_of(v, v_strides, sequence, head // GROUP", "v = head_of(v, v_strides, sequence, head % 2")),
        wrong(f"strides|{OUTSIDE}|{TWICE}|never stored", ("head.to(tl.int64) * strides[2]", "head.to(tl.int64) * strides[1]")),
        wrong(f"{OUTSIDE}|strides", ("return start, strides[1], length", "return start, strides[2] * 3, length")),
    ],
    "split_keys": [
        wrong(r"\bend\b|other parts?", ("tl.minimum((tl.program_id(1) + 1) * blocks, end)", "end")),
        wrong("begin|blocks", ("tl.program_id(1) * blocks, tl.minimum", "tl.program_id(1) * (blocks + 1), tl.minimum")),
        wrong("begin|full_end", ("tl.maximum(tl.minimum(full_end, end), begin)", "full_end")),
    ],
    "combine": [
        wrong(OTHER, ("mask=split < splits, other=float(\"-inf\"))", "mask=split < splits)")),
        wrong("pivot|lse", ("pivot + tl.log(total)", "tl.log(total)")),
        wrong(f"{INF}|maximum|pivot", ("tl.maximum(tl.max(part_lse, 0), -1e30)", "tl.max(part_lse, 0)")),
    ],
    "delta": [
        wrong(r"(product|multipl|comput|rounded).* (fp16|float16)|overflow", (".to(tl.float32)", "")),
        wrong("shape", ("torch.empty(o.shape[0], dtype", "torch.empty(o.shape[0], o.shape[0], dtype")),
        wrong(r"(result|stored|rounded|tensor).* (fp16|float16)|overflow|dtype", ("dtype=torch.float32", "dtype=o.dtype")),
        wrong(r"shape|pointer|\bo\b", ("row < queries", "row < o.shape[0]")),
    ],
    "dk_dv": [
        wrong("delta", (" - row_delta[None, :]", "")),
        wrong("transpos|shape", ("tl.dot(p.to(do_tile.dtype), do_tile, dv", "tl.dot(p.to(do_tile.dtype).T, do_tile, dv")),
        wrong(r"axis|as a (row|column)|broadcast|shape", ("row_lse[None, :]", "row_lse[:, None]")),
        wrong("scale", ("s * (scale * LOG2E)", "s * LOG2E")),
        wrong("offset|mask|last query", ("(row + offset)[None, :]", "row[None, :]")),
    ],
    "dq": [
        wrong("sign|wrong order", ("dp - row_delta[:, None]", "row_delta[:, None] - dp")),
        wrong("mask|last_key|seen", ("    s = tl.where(k_pos[None, :] <= last_key[:, None], s, float(\"-inf\"))\n    p = probabilities(s, row_lse[:, None], scale)\n    dp", "    p = probabilities(s, row_lse[:, None], scale)\n    dp")),
        wrong("loaded", ("    dp = tl.dot(do_tile, v_tile.T", "    v_tile += load_rows(v, k_pos, q_tile.shape[1]) * 0\n    dp = tl.dot(do_tile, v_tile.T")),
    ],
    "backward": [
        wrong("loaded", ("tl.maximum(tile * BLOCK_KV - offset, 0) // BLOCK_Q", "tile * 0")),
        wrong("begin|offset", ("tl.maximum(tile * BLOCK_KV - offset, 0)", "tl.maximum(tile * BLOCK_KV, 0)")),
        wrong("infinite|inf|LSE", ("    lse = lse.masked_fill(lse.isinf(), torch.inf)\n", "")),
        wrong("dlse|delta", (" - (0 if dlse is None else dlse)", "")),
    ],
    "ring": [
        wrong(PHASE, ("(i // 2 & 1) ^ 1)", "i // 2 & 1)")),
        wrong(PHASE, ("mbarrier.wait(full.index(slot), i // 2 & 1)", "mbarrier.wait(full.index(slot), (i // 2 & 1) ^ 1)")),
        wrong(EARLY, ("        mbarrier.wait(full.index(slot), i // 2 & 1)\n", "")),
        wrong(AGAIN, ("        mbarrier.wait(empty.index(slot), (i // 2 & 1) ^ 1)\n", "")),
        wrong("fence", ("        fence_async_shared()\n        mbarrier", "        mbarrier")),
        wrong("fence.*(barrier|init)|(barrier|init).*fence", ("    fence_async_shared()\n    gl.warp", "    gl.warp")),
        wrong(r"\d+ bytes|bytes (land|expect)", ("x.block_type.nbytes", "x.block_type.nbytes // 2")),
        wrong("counts 2", ("mbarrier.init(full.index(slot), count=1)", "mbarrier.init(full.index(slot), count=2)")),
        wrong(f"{AGAIN}|arriv\\w+ .*before", ("        total += slots.index(slot).load(layout).to(gl.float32)\n        fence_async_shared()\n        mbarrier.arrive(empty.index(slot), count=1)\n", "        fence_async_shared()\n        mbarrier.arrive(empty.index(slot), count=1)\n        total += slots.index(slot).load(layout).to(gl.float32)\n")),
        wrong(r"(never|no partition|nobody).*(arriv|releas)", ("        mbarrier.arrive(empty.index(slot), count=1)\n", "")),
        wrong("layout", ("gl.store(y + row[:, None] * 64", "row = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))\n    gl.store(y + row[:, None] * 64")),
    ],
    "producer": [
        wrong(MORE, ("mbarrier.init(empty.index(slot), count=2)", "mbarrier.init(empty.index(slot), count=1)")),
        wrong("bytes", ("a.block_type.nbytes + b.block_type.nbytes", "a.block_type.nbytes")),
        wrong(AGAIN, ("        acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive(empty.index(slot), count=1)\n", "        mbarrier.arrive(empty.index(slot), count=1)\n        acc = warpgroup_mma_wait(0, deps=[acc])\n")),
        wrong(f"{TWICE}|store to element", ("producer_kernel[(1,)]", "producer_kernel[(2,)]")),
        wrong(r"slice|rows .*(never read|both consumers)", (".slice(CONSUMER * 64, 64)", ".slice(0, 64)")),
        wrong("counts 2", ("mbarrier.init(full.index(slot), count=1)", "mbarrier.init(full.index(slot), count=2)")),
        wrong(r"coordinate|box|outside", ("load_tile(a, [0, i * 64]", "load_tile(a, [i * 64, 0]")),
        wrong(r"(consume 1|second consumer).*(still|not yet|has not)|(still|while).*consume 1", ("        mbarrier.arrive(empty.index(slot), count=1)\n", "        if CONSUMER == 0:\n            mbarrier.arrive(empty.index(slot), count=2)\n")),
        wrong(r"in flight|(not|never) waited|changes its type", ("        acc = warpgroup_mma_wait(0, deps=[acc])\n", "")),
    ],
    "overlap": [
        wrong("in flight", ("    rings.v.wait(before)\n", "    if CONSUMER == 0:\n        hopper.warpgroup_mma_wait(0, deps=[s_token])\n    rings.v.wait(before)\n")),
        wrong(IN_FLIGHT, ("hopper.warpgroup_mma_wait(1, deps=[s_token])", "hopper.warpgroup_mma_wait(2, deps=[s_token])")),
        wrong(AGAIN, ("    acc = hopper.warpgroup_mma_wait(0, deps=[acc_token])\n    rings.v.release(before)\n", "    rings.v.release(before)\n    acc = hopper.warpgroup_mma_wait(0, deps=[acc_token])\n")),
        wrong(EARLY, ("    rings.k.wait(stage)\n    pipe", "    pipe")),
    ],
    "ping_pong": [
        wrong("turn", ("    pipeline.named_barrier_sync(CONSUMER)  # wait for the turn\n", "")),
        wrong("turn", ("    pipeline.named_barrier_arrive(CONSUMER, 2)  # give the turn away\n    s = hopper.warpgroup_mma_wait(1, deps=[s_token])\n", "    s = hopper.warpgroup_mma_wait(1, deps=[s_token])\n    pipeline.named_barrier_arrive(CONSUMER, 2)\n")),
        wrong("named barrier|first turn", ("    if CONSUMER == 1:\n        pipeline.named_barrier_arrive(CONSUMER, 2)  # consumer 0 has the first turn\n", "")),
        wrong("named barrier", ("named_barrier_arrive(CONSUMER, 2)  # give", "named_barrier_arrive(1 - CONSUMER, 2)  # give")),
    ],
    "rescale": [
        wrong("rescale", ("gl.max(new_m - m, 0) > 8.0", "gl.max(new_m - m, 0) > 0.0")),
        wrong(RESCALE, ("            l = l * alpha\n", "")),
        wrong(r"rescale|\bm\b|maximum", ("            m = new_m\n            rescales += 1.0\n", "            rescales += 1.0\n        m = new_m\n")),
        wrong(r"alpha.*(branch|defined|bound)|(branch|defined|bound).*alpha", ("            acc = acc * alpha[:, None]\n            l = l * alpha\n            m = new_m\n            rescales += 1.0\n", "            m = new_m\n            rescales += 1.0\n        acc = acc * alpha[:, None]\n        l = l * alpha\n")),
        wrong(r"(if|condition).*(tensor|block|one number|scalar)|ambiguous", ("if gl.max(new_m - m, 0) > 8.0:", "if new_m - m > 8.0:")),
        wrong(TYPE, ("rescales = 0.0", "rescales = 0")),
        wrong(r"rescale|smallest|every row|gl\.max", ("gl.max(new_m - m, 0) > 8.0", "gl.min(new_m - m, 0) > 8.0")),
    ],
    "fa3": [
        wrong(EARLY, ("    rings.q.wait(q_stage)\n", "")),
        wrong(r"no load|never (filled|loaded)|fewer (tiles|loads)|no partition (fills|loads)", ("for block in range(tile.end - 1, -1, -1):", "for block in range(tile.end - 1, 0, -1):")),
        wrong("mask|keys past|behind", ("    s = masked(s, tile.end - 1, last_key)\n", "")),
        wrong(AGAIN, ("    s = hopper.warpgroup_mma_wait(0, deps=[multiply_qk(q_tile, rings.k.tile(stage))])\n    rings.k.release(stage)\n", "    token = multiply_qk(q_tile, rings.k.tile(stage))\n    rings.k.release(stage)\n    s = hopper.warpgroup_mma_wait(0, deps=[token])\n")),
    ],
}  # fmt: skip
