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
        Wrong("`clone` of PyTorch is called", "    y = torch.empty_like(x)", "    return x.clone()"),
        Wrong("no kernel stores", "    copy_kernel[", "    return x\n    copy_kernel["),
        Wrong("two programs store to element 0", "tl.program_id(0) * BLOCK + tl", "tl"),
    ],
    "scale_rows": [
        Wrong("7 x 20, columns of a matrix with 50", "row[:, None] * stride", "row[:, None] * columns"),
    ],
    "transpose": [
        Wrong("16 x 16: y[0, 1]", "column[None, :] * rows + row[:, None]",
              "row[:, None] * rows + column[None, :]"),
    ],
    "row_sum": [
        Wrong("16 x 40: y[0] is 7.5589", "other=0.0)", "other=1.0)"),
        Wrong("16 x 40: a load has 1024 elements; a tile of this puzzle has at most 256",
              "BLOCK=16)", "BLOCK=16 if x.shape[1] <= 32 else 32)"),
    ],
    "row_softmax": [
        Wrong("scores of 300: y[", "s - tl.where(largest == float(\"-inf\"), 0.0, largest)", "s"),
        Wrong("a row of -inf: y[1, 0] is nan",
              "tl.where(largest == float(\"-inf\"), 0.0, largest)", "largest"),
        Wrong("calls tl.softmax; it is for you", "    largest = tl.max(s, 0)", "    largest = tl.softmax(s)"),
    ],
    "online_softmax": [
        Wrong("rows of 40: lse[", "l * tl.exp(m - pivot) + ", "l + "),
        Wrong("elements of x are loaded; 760 are enough",
              "        new_m = tl", "        tl.load(x + row, mask=row < rows)\n        new_m = tl"),
    ],
    "running_average": [
        Wrong("19 queries, 40 keys: o[0, 0]", "(alpha * l)[:, None]", "alpha[:, None]"),
    ],
    "fa1": [
        Wrong("19 queries, 37 keys: o[0, 0]",
              "s = tl.where((key < keys)[None, :], s, float(\"-inf\"))", "s = s + 0.0"),
        Wrong("a load goes to element 592 of v",
              "v_tile = tl.load(v + key[:, None] * D + dim[None, :], mask=there, other=0.0)",
              "v_tile = tl.load(v + key[:, None] * D + dim[None, :])"),
    ],
    "fa2": [
        Wrong("has a division in the loop",
              "        m = new_m", "        acc = acc / 1.0\n        m = new_m"),
        Wrong("has tl.exp in the loop", "tl.exp2(m - new_m)", "tl.exp((m - new_m) * 0.6931471805599453)"),
        Wrong("lse[0] is", "(m + tl.log2(l)) / 1.4426950408889634", "m + tl.log2(l)"),
    ],
    "causal": [
        Wrong("the results are right, but", "tl.minimum(keys, (tl.program_id(0) + 1) * BLOCK + keys - queries)", "keys"),
        Wrong("10 queries, 50 keys", "row[:, None] + keys - queries", "row[:, None]"),
        Wrong("40 queries, 21 keys: o[", "tl.where(new_m == float(\"-inf\"), 0.0, new_m)", "new_m"),
    ],
    "heads": [
        Wrong("6 heads of queries, 2 of keys: ", "k += head // group", "k += head % 2"),
        Wrong("values with other strides: ", "v + key[:, None] * v_row", "v + key[:, None] * k_row"),
        Wrong("two programs store to element 0", "    o += head * o_head\n", ""),
    ],
    "split_keys": [
        Wrong("2 parts: o[0, 0, 0]", "end = tl.minimum(keys, first + size)", "end = keys"),
        Wrong("4 parts: o[3, 0, 0] is nan", "tl.where(l == 0.0, 1.0, l)", "l"),
    ],
    "combine": [
        Wrong("with NaN in it", "mask=(weight > 0.0)[:, None]", "mask=there[:, None]"),
        Wrong("LSEs of hundreds", "pivot = tl.where(largest == float(\"-inf\"), 0.0, largest)", "pivot = 0.0"),
    ],
    "delta": [
        Wrong("fp16, products of 10^5: delta[", ".to(tl.float32)", ""),
        Wrong("should be a tensor of shape [32], not of [32, 32]", "torch.empty(o.shape[0], dtype", "torch.empty(o.shape[0], o.shape[0], dtype"),
    ],
    "dk_dv": [
        Wrong("dk[0, 0] is", " - row_delta[:, None]", ""),
        Wrong("37 queries, 19 keys: dk[0, 0] is nan",
              "lse + row, mask=here, other=float(\"inf\")", "lse + row, mask=here, other=float(\"nan\")"),
    ],
    "dq": [
        Wrong("dq[0, 0] is", "dq_tile * scale", "dq_tile"),
        Wrong("but 1536 elements of q are loaded; 512 are enough",
              "        p = tl", "        tl.load(q + row[:, None] * D + dim[None, :], mask=here)\n        p = tl"),
    ],
    "backward": [
        Wrong("the results are right, but", "first // BLOCK * BLOCK", "0"),
        Wrong("10 queries, 50 keys", "- (keys - queries)", "- 0"),
    ],
    "ring": [
        Wrong("dead-lock, all partitions wait", "(i // 2 & 1) ^ 1)", "i // 2 & 1)"),
        Wrong("The last arrival came from program 0, consume 0, at turn", "        mbarrier.wait(full.index(slot), i // 2 & 1)\n", ""),
        Wrong("TMA fills what was read without a fence", "        fence_async_shared()\n        mbarrier", "        mbarrier"),
    ],
    "producer": [
        Wrong("which needs 1 more arrival (it counts 1)", "mbarrier.init(empty.index(slot), count=2)",
              "mbarrier.init(empty.index(slot), count=1)"),
        Wrong("programs end with loads in flight",
              "a.block_type.nbytes + b.block_type.nbytes", "a.block_type.nbytes"),
        Wrong("o[0, 0] is", "        acc = warpgroup_mma_wait(0, deps=[acc])\n        mbarrier.arrive(empty.index(slot), count=1)\n",
              "        mbarrier.arrive(empty.index(slot), count=1)\n        acc = warpgroup_mma_wait(0, deps=[acc])\n"),
        Wrong("and program 1, consume 0 store to element 0 of a tensor", "producer_kernel[(1,)]",
              "producer_kernel[(2,)]"),
    ],
    "overlap": [
        Wrong("the result is right, but two products are in flight 0 times in 1 rounds",
              "        s_token = multiply_qk(q_tile, k_ring.tile(stage))\n        v_ring.wait(before)\n",
              "        s_token = multiply_qk(q_tile, k_ring.tile(stage))\n        s = warpgroup_mma_wait(0, deps=[s_token])\n        v_ring.wait(before)\n"),
        Wrong("a product is read while it is in flight", "        s = warpgroup_mma_wait(1, deps=[s_token])\n        k",
              "        s = warpgroup_mma_wait(2, deps=[s_token])\n        k"),
    ],
    "ping_pong": [
        Wrong("the result is right, but the products come from consumers",
              "        named_barrier_sync(CONSUMER)\n", ""),
        Wrong("gives its turn away only when its product is done",
              "        named_barrier_arrive(CONSUMER, 2)\n        # end\n        s = warpgroup_mma_wait(0, deps=[s_token])\n",
              "        # end\n        s = warpgroup_mma_wait(0, deps=[s_token])\n        named_barrier_arrive(CONSUMER, 2)\n"),
    ],
    "rescale": [
        Wrong("5 blocks: rescales[0] is 5; it should be", "gl.max(new_m - m, 0) > 8.0", "gl.max(new_m - m, 0) > 0.0"),
        Wrong("o[0, 0] is", "            l = l * alpha\n", ""),
    ],
    "fa3": [
        Wrong("the result is right, but", "end = gl.minimum(length, (gl.program_id(0) + 1) * 128)", "end = length"),
        Wrong("128 queries: o[0, 0]", "key[None, :] <= row[:, None]", "key[None, :] < length"),
    ],
}  # fmt: skip
