"""Mistakes that people make in the puzzles: what to replace in a solution, and what the check says."""

from typing import NamedTuple


class Wrong(NamedTuple):
    """A wrong solution: in which text `old` is `new`, and a part of what has to be said of it."""

    said: str
    old: str
    new: str


WRONG = {
    "copy": [
        Wrong("a store goes to element 1 of the tensor of shape [1]",
              "mask=inside), mask=inside)", "mask=inside))"),
        Wrong("a load goes to element 1 of x, which has 1",
              "tl.load(x + index, mask=inside)", "tl.load(x + index)"),
        Wrong("y[31] is never stored", "index < length", "index < length - 1"),
        Wrong("calls `clone` of PyTorch", "    y = torch.empty_like(x)", "    return x.clone()"),
        Wrong("no kernel stores", "    copy_kernel[", "    return x\n    copy_kernel["),
        Wrong("two programs store to element 0", "tl.program_id(0) * BLOCK + tl", "tl"),
    ],
    "scale_rows": [
        Wrong("7 x 20, columns of a matrix with 50", "row[:, None] * stride", "row[:, None] * columns"),
        Wrong("19 x 35: a store goes to element",
              "factor[:, None], mask=inside)", "factor[:, None], mask=(column < columns)[None, :])"),
        Wrong("a load goes to element 19 of w", "tl.load(w + row, mask=row < rows)", "tl.load(w + row)"),
        Wrong("32 x 16: y[0, 1] is", "factor[:, None]", "factor[None, :]"),
        Wrong("calls `diag` of PyTorch", "    y = torch.empty(x.shape)", "    y = torch.diag(w) @ x"),
    ],
    "transpose": [
        Wrong("16 x 16: y[0, 1]", "column[None, :] * rows + row[:, None]",
              "row[:, None] * rows + column[None, :]"),
        Wrong("32 x 16: two programs store to element 16", "column[None, :] * rows + row[:, None]",
              "column[None, :] * columns + row[:, None]"),
        Wrong("a store goes to element", "tile, mask=inside)", "tile)"),
        Wrong("no kernel stores anything", "    y = torch.empty(x.shape[1], x.shape[0])", "    return x.T"),
    ],
    "row_sum": [
        Wrong("16 x 40: y[0] is 7.5589", "other=0.0)", "other=1.0)"),
        Wrong("16 x 32: y[0]", "total += tl.sum", "total = tl.sum"),
        Wrong("16 x 32: y[0]", "tl.sum(tile, 1)", "tl.sum(tile, 0)"),
        Wrong("a load goes to element", "mask=inside, other=0.0)", "mask=(row < rows)[:, None], other=0.0)"),
        Wrong("16 x 40: a load has 1024 elements; a tile of this puzzle has at most 256",
              "BLOCK=16)", "BLOCK=16 if x.shape[1] <= 32 else 32)"),
    ],
    "row_softmax": [
        Wrong("scores of 300: y[", "s - tl.where(largest == float(\"-inf\"), 0.0, largest)", "s"),
        Wrong("a row of -inf: y[1, 0] is nan",
              "tl.where(largest == float(\"-inf\"), 0.0, largest)", "largest"),
        Wrong("rows of 13, in a block of 16: y[0, 0]", "other=float(\"-inf\"))", "other=0.0)"),
        Wrong("16: two programs store to element 13", "total), mask=inside)", "total))"),
        Wrong("calls tl.softmax; it is for you", "    largest = tl.max(s, 0)", "    largest = tl.softmax(s)"),
        Wrong("calls `softmax` of PyTorch", "    y = torch.empty_like(x)", "    y = torch.softmax(x, 1)"),
    ],
    "online_softmax": [
        Wrong("rows of 40: lse[", "l * tl.exp(m - pivot) + ", "l + "),
        Wrong("scores that fall: lse[0] is", "tl.maximum(m, tl.max(s, 1))", "tl.max(s, 1)"),
        Wrong("one with nothing else: lse[2] is nan",
              "tl.where(new_m == float(\"-inf\"), 0.0, new_m)", "new_m"),
        Wrong("scores that grow: lse[0] is inf",
              "tl.maximum(m, tl.max(s, 1))", "tl.zeros((BLOCK,), tl.float32)"),
        Wrong("elements of x are loaded; 760 are enough",
              "        new_m = tl", "        tl.load(x + row, mask=row < rows)\n        new_m = tl"),
    ],
    "running_average": [
        Wrong("19 queries, 40 keys: o[0, 0]", "(alpha * l)[:, None]", "alpha[:, None]"),
        Wrong("19 queries, 40 keys: o[0, 0]", "(alpha * l)[:, None]", "l[:, None]"),
        Wrong("o[0, 0]", "average * (alpha", "0.0 * average * (alpha"),
        Wrong("one that sees none: o[2, 0] is nan", "tl.where(new_l == 0.0, 1.0, new_l)", "new_l"),
    ],
    "fa1": [
        Wrong("19 queries, 37 keys: o[0, 0]",
              "s = tl.where((key < keys)[None, :], s, float(\"-inf\"))", "s = s + 0.0"),
        Wrong("32 queries, 32 keys: o[0, 0]", "k_tile.T) * scale", "k_tile.T)"),
        Wrong("a load goes to element 592 of v",
              "v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)",
              "v_tile = tl.load(v + key[:, None] * D + dim[None, :])"),
        Wrong("32 queries, 32 keys: o[0, 0]", "tl.exp(m - new_m)", "1.0"),
        Wrong("calls `matmul` of PyTorch", "fa1_kernel[grid](q, k,", "fa1_kernel[grid](q @ k.T, k,"),
    ],
    "fa2": [
        Wrong("has a division in the loop",
              "        m = new_m", "        acc = acc / 1.0\n        m = new_m"),
        Wrong("has tl.exp in the loop", "tl.exp2(m - new_m)", "tl.exp((m - new_m) * 0.6931471805599453)"),
        Wrong("lse[0] is", "(m + tl.log2(l)) / 1.4426950408889634", "m + tl.log2(l)"),
        Wrong("o[0, 0] is", "acc / l[:, None]", "acc"),
        Wrong("o[0, 0] is", "acc * alpha[:, None] + ", "acc + "),
    ],
    "causal": [
        Wrong("the results are right, but", "tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK + keys - queries)", "keys"),
        Wrong("10 queries, 50 keys", "row[:, None] + keys - queries", "row[:, None]"),
        Wrong("48 queries, 48 keys: o[0, 0] is 0", "(tl.program_id(0) + 1) * BLOCK", "tl.program_id(0) * BLOCK"),
        Wrong("40 queries, 21 keys: o[", "tl.where(new_m == float(\"-inf\"), 0.0, new_m)", "new_m"),
    ],
    "heads": [
        Wrong("6 heads of queries, 2 of keys: ", "k += head // group", "k += head % 2"),
        Wrong("values with other strides: ", "v + key[:, None] * v_row", "v + key[:, None] * k_row"),
        Wrong("two programs store to element 0", "    o += head * o_head\n", ""),
        Wrong("o[0, 1, 0] is never stored", "(triton.cdiv(q.shape[0], 16), q.shape[1])",
              "(triton.cdiv(q.shape[0], 16), 1)"),
        Wrong("calls `repeat_interleave` of PyTorch", "    o = torch.empty(q.shape)",
              "    k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)\n    o = torch.empty(q.shape)"),
    ],
    "split_keys": [
        Wrong("2 parts: o[0, 0, 0]", "end = tl.minimum(keys, first + size)", "end = keys"),
        Wrong("two programs store to element 0", "part = split * queries + row", "part = row"),
        Wrong("1 queries, 70 keys, 3 parts: ", "split * queries + row", "split * BLOCK + row"),
        Wrong("4 parts: o[3, 0, 0] is nan", "tl.where(l == 0.0, 1.0, l)", "l"),
    ],
    "combine": [
        Wrong("o[0, 0]", "tile * weight[:, None]", "tile * (1.0 / splits)"),
        Wrong("with NaN in it", "mask=(weight > 0.0)[:, None]", "mask=there[:, None]"),
        Wrong("a query without keys: o[2, 0] is nan",
              "tl.where(largest == float(\"-inf\"), 0.0, largest)", "largest"),
        Wrong("LSEs of hundreds", "pivot = tl.where(largest == float(\"-inf\"), 0.0, largest)", "pivot = 0.0"),
    ],
    "delta": [
        Wrong("fp16, products of 10^5: delta[", ".to(tl.float32)", ""),
        Wrong("21 queries, head_dim 32: a load", "tl.load(o + address, mask=here, other=0.0)", "tl.load(o + address)"),
        Wrong("delta[0] is", "o_tile * do_tile", "o_tile + do_tile"),
        Wrong("should be a tensor of shape [32], not of [32, 32]", "torch.empty(o.shape[0], dtype", "torch.empty(o.shape[0], o.shape[0], dtype"),
    ],
    "dk_dv": [
        Wrong("dk[0, 0] is", "dk_tile * scale", "dk_tile"),
        Wrong("dv[0, 0] is", "tl.dot(p.T, do_tile)", "tl.dot(p, do_tile)"),
        Wrong("dk[0, 0] is", " - row_delta[:, None]", ""),
        Wrong("37 queries, 19 keys: a load goes to element 37 of lse",
              "lse + row, mask=here, other=float(\"inf\")", "lse + row"),
        Wrong("37 queries, 19 keys: dk[0, 0] is nan",
              "lse + row, mask=here, other=float(\"inf\")", "lse + row, mask=here, other=float(\"nan\")"),
    ],
    "dq": [
        Wrong("dq[0, 0] is", "dq_tile * scale", "dq_tile"),
        Wrong("dq[0, 0] is", "tl.dot(ds, k_tile)", "tl.dot(ds, v_tile)"),
        Wrong("19 queries, 37 keys: a load goes to element 592 of k",
              "k_tile = tl.load(k + key[:, None] * D + dim[None, :], mask=there, other=0.0)",
              "k_tile = tl.load(k + key[:, None] * D + dim[None, :])"),
        Wrong("but 1536 elements of q are loaded; 512 are enough",
              "        p = tl", "        tl.load(q + row[:, None] * D + dim[None, :], mask=here)\n        p = tl"),
    ],
    "backward": [
        Wrong("the results are right, but", "first // BLOCK * BLOCK", "0"),
        Wrong("the results are right, but",
              "tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK + keys - queries)", "keys"),
        Wrong("10 queries, 50 keys", "- (keys - queries)", "- 0"),
        Wrong("40 queries, 21 keys: dq[16, 0] is nan",
              "tl.where(seen, tl.exp(tl.where(seen, s, 0.0)), 0.0)", "tl.exp(s) * seen.to(tl.float32)"),
        Wrong("dq[0, 0] is nan", "    delta_kernel[of_queries](o, do, delta, queries, **sizes)\n", ""),
    ],
}  # fmt: skip
