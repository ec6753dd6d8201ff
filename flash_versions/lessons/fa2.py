"""FlashAttention 2: spend the time on the tensor cores, and fill the GPU.

What FA1 wastes. In each block it multiplies o twice, applies the mask although the diagonal cuts
only few blocks, and multiplies each exponent by log2(e), because the hardware computes 2^x. The
ordinary floating-point units do this work, and on an A100 they are 16 times slower than the tensor
cores, which wait. With one query and a long cache, FA1 has one program for each head, and most of
the GPU is idle.

The ideas.
* Normalise once, at the end. The accumulator of the loop is not normalised; per block, only one
  multiplication of it remains, by alpha = 2^(m - m_new).
* Units of log2. The scale contains log2(e), so p = 2^(s * scale_log2 - m) is one multiply-add and
  one exp2.
* Two loops. Blocks that all queries of the tile see need no mask, not even at the loads.
* Heavy tiles first. The last queries of a causal head see the most keys, so they begin.
* Split-KV. With few queries, several programs share the keys of a tile, and `combine` makes one
  result of theirs. This is at the end of the file.

             K_0 V_0   K_1 V_1   K_2 V_2
      Q_2    [ all ]   [ all ]   [ cut ]       The loop to full_end has no mask; that to end has.
                               |         |     FA1 masks all three blocks.
                            full_end    end

Cost. Traffic and products are FA1's. Between the products, an element of a block of scores takes
a maximum, a multiply-add, an exponential and an addition, and an element of o one multiplication.

Source: Dao 2023, "FlashAttention-2: Faster Attention with Better Parallelism and Work
Partitioning", arXiv:2307.08691, Algorithm 1. Split-KV is Flash-Decoding (Dao, Haziza, Massa, Sizov
2023). `fa2_backward` has the gradients. `flash_versions/versions/fa2/forward.py` also packs the
query heads of a key head into one tile, so that K and V are read once for all of them.
"""

import torch
import triton
import triton.language as tl

FEATURES = ("causal", "grouped_heads", "kv_lengths", "num_splits")
TILES = {64: (128, 64, 8, 3), 128: (128, 128, 8, 3)}  # by head_dim, the fastest on an H200
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def head_of(x, strides, sequence, head, length):
    """A head of a (batch, length, heads, DIM) tensor: its address, the stride of rows, length."""
    start = x + sequence.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]
    return start, strides[1], length


@triton.jit
def row_pointers(x, row, DIM: tl.constexpr):
    """Where rows of a head are: pointers (rows, DIM)."""
    return x[0] + row.to(tl.int64)[:, None] * x[1] + tl.arange(0, DIM)[None, :]


@triton.jit
def load_rows(x, row, DIM: tl.constexpr, MASKED: tl.constexpr = True):
    """Rows of a head as a (rows, DIM) tile; those past the length read as 0."""
    mask = (row < x[2])[:, None] if MASKED else True  # not MASKED: no row is past it
    return tl.load(row_pointers(x, row, DIM), mask=mask, other=0.0)


@triton.jit
def softmax_step(s, row_max, row_sum, scale_log2):
    """One step of the online softmax on scores (queries, keys): (p, row_max, row_sum, alpha).

    s is unscaled, row_max scaled and in log2 units. alpha is 2^(m - m_new), by which everything
    counts less that was summed before.
    """
    new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = tl.exp2(s * scale_log2 - pivot[:, None])
    alpha = tl.exp2(row_max - pivot)
    return p, new_max, alpha * row_sum + tl.sum(p, 1), alpha


@triton.jit
def fold_block(
    j, acc, row_max, row_sum, q_tile, last_key, k, v, scale_log2,
    DIM: tl.constexpr, BLOCK_KV: tl.constexpr, MASKED: tl.constexpr
):  # fmt: skip
    """Fold block j of the keys into the state (acc, row_max, row_sum)."""
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, k_pos, DIM, MASKED)
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    if MASKED:
        s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum, scale_log2)
    v_tile = load_rows(v, k_pos, DIM, MASKED)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision="ieee")
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["q_length", "kv_length"])
def forward_kernel(
    q, k, v, o, lse, q_strides, k_strides, v_strides, o_strides, lengths, SPLIT: tl.constexpr,
    scale_log2, q_length, kv_length, heads, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each tile of queries, head and sequence."""
    place, tiles = tl.program_id(0), tl.cdiv(q_length, BLOCK_Q)
    tile = tiles - 1 - place % tiles  # the last queries see the most keys
    head, sequence = (place // tiles) % heads, place // tiles // heads
    if lengths is not None:  # this sequence has fewer keys
        kv_length = tl.maximum(tl.minimum(tl.load(lengths + sequence), kv_length), 0).to(tl.int32)
    k = head_of(k, k_strides, sequence, head // GROUP, kv_length)
    v = head_of(v, v_strides, sequence, head // GROUP, kv_length)

    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = kv_length - q_length if CAUSAL else kv_length  # the last query sees the last key
    last_key = tl.minimum(row + offset, kv_length - 1)
    end = tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV)
    full_end = tl.maximum(tl.minimum(tile * BLOCK_Q + offset + 1, kv_length), 0) // BLOCK_KV
    begin, full_end, end = share_of_keys(full_end, end) if SPLIT else (0, full_end, end)

    q_tile = load_rows(head_of(q, q_strides, sequence, head, q_length), row, DIM)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    for j in range(begin, full_end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, last_key, k, v, scale_log2, DIM, BLOCK_KV, False
        )
    for j in range(full_end, end):
        acc, row_max, row_sum = fold_block(
            j, acc, row_max, row_sum, q_tile, last_key, k, v, scale_log2, DIM, BLOCK_KV, True
        )
    row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    acc = acc * (1.0 / row_sum)[:, None]
    row_lse = (row_max + tl.log2(row_sum)) / LOG2E

    sequence += tl.program_id(1) * (tl.num_programs(0) // tiles // heads) if SPLIT else 0
    o = head_of(o, o_strides, sequence, head, q_length)
    tl.store(row_pointers(o, row, DIM), acc, mask=(row < q_length)[:, None])
    lse += (sequence.to(tl.int64) * heads + head) * q_length + row
    tl.store(lse, row_lse, mask=row < q_length)


def choose_tile(q):
    """BLOCK_Q, BLOCK_KV, warps and stages of the pipeline for q (batch, M, heads, head_dim): TILES,
    or in fp32 and on other GPUs smaller ones.
    """
    hopper = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    return TILES[q.shape[3]] if hopper and q.element_size() < 4 else (4096 // q.shape[3], 32, 8, 2)


def limits(request):
    """Why this lesson cannot serve a request, as a sentence, or None."""
    dim = request.q.shape[3]
    return None if dim in (64, 128) else f"q has head_dim {dim}; 64 and 128 work."


def forward(request):
    """Attention of a request's q (batch, M, heads, head_dim), k and v (batch, N, kv_heads,
    head_dim): o like q, and its LSE (batch, heads, M) in fp32, natural log.
    """
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, head_dim = q.shape
    block_q, block_kv, num_warps, num_stages = choose_tile(q)
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((batch, heads, q_length), dtype=torch.float32, device=q.device)
    grid = (triton.cdiv(q_length, block_q) * heads * batch,)
    grid, parts, lses = split_keys(grid, k.shape[1] // block_kv, request.num_splits, o, lse)
    forward_kernel[grid](
        q, k, v, parts, lses, *(x.stride() for x in (q, k, v, o)), request.kv_lengths, grid[1] > 1,
        request.scale * LOG2E.value, q_length, k.shape[1], heads, request.window_right == 0,
        request.group, head_dim, block_q, block_kv, num_warps=num_warps, num_stages=num_stages
    )  # fmt: skip
    combine_parts(grid[1], parts, lses, o, lse)
    return o, lse


# ---- Split-KV: what several programs make of their shares of the keys becomes one result ----
# Each split stores its part as if it was a further sequence.


@triton.jit
def share_of_keys(full_end, end):
    """The blocks of this program's split: (begin, full_end, end)."""
    blocks = tl.cdiv(end, tl.num_programs(1))
    begin, end = tl.program_id(1) * blocks, tl.minimum((tl.program_id(1) + 1) * blocks, end)
    return begin, tl.maximum(tl.minimum(full_end, end), begin), end


@triton.jit(do_not_specialize=["q_length", "splits"])
def combine(parts, lses, o, lse, q_length, heads, splits, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One program for each row of o. Part s is the attention over its share of the keys, with the
    sum of exponentials exp(lse_s): o is the mean of the parts, weighted by these sums.
    """
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0).to(tl.int64)
    sequence, query, head = row // heads // q_length, row // heads % q_length, row % heads
    lse_row = (sequence * heads + head) * q_length + query
    split = tl.arange(0, BLOCK)
    part_lse = tl.load(lses + split * rows + lse_row, mask=split < splits, other=float("-inf"))
    part = load_rows((parts + row * DIM, rows * DIM, splits), split, DIM)
    pivot = tl.maximum(tl.max(part_lse, 0), -1e30)  # not -inf where no split saw a key
    weight = tl.exp(part_lse - pivot)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(o + row * DIM + tl.arange(0, DIM), out)
    tl.store(lse + lse_row, pivot + tl.log(total))


def split_keys(grid, blocks, splits, o, lse):
    """The grid with the splits of the keys as its second axis, and where its programs write: to o
    and lse, or if there are several splits, to an o and an LSE for each.

    splits: None chooses those that give each multiprocessor (SM) of the GPU two programs. A split
    then has four blocks of keys or more, or the reduction costs too much. More than 128 are 128:
    `combine` holds a row of each at once.
    """
    sms = torch.cuda.get_device_properties(o.device).multi_processor_count if o.is_cuda else 0
    splits = min(128, splits or max(1, min(2 * sms // max(1, *grid), blocks // 4)))
    if splits > 1:  # in fp32, as the LSE is
        o, lse = (lse.new_empty((splits * len(x), *x.shape[1:])) for x in (o, lse))
    return (*grid, splits), o, lse


def combine_parts(splits, parts, lses, o, lse):
    """Fill o and lse from those of the splits, if there are several."""
    if splits > 1:
        block = triton.next_power_of_2(splits)
        combine[lse.numel(),](parts, lses, o, lse, *o.shape[1:3], splits, o.shape[3], block)


if __name__ == "__main__":
    from flash_versions.lessons.check import run

    run(__file__)
