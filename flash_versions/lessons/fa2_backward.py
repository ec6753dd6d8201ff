"""FlashAttention 2, backward: two kernels, in which no two programs write the same gradient.

`lesson-fa2` is the forward of `fa2` with the backward of this file.

What FA1 wastes. One program for each key head computes all pairs of blocks, so most of the GPU is
idle. For every pair it reads and writes a block of dQ in memory, and computes delta anew.

The ideas.
* delta_i = dO_i . O_i is computed once for each query.
* One program for each block of keys sums its dK and dV over the queries that see it, in registers.
  One program for each tile of queries sums its dQ over the keys that it sees. S and dP are computed
  twice, so there are seven products for a pair of blocks in the place of five. In return, no two
  programs add to the same number: nothing is atomic, and every run gives the same bits.

             K_0 V_0   K_1 V_1   K_2 V_2
      Q_0    [ cut ]                           dkdv_kernel: one program for each column, which
      Q_1    [ all ]   [ cut ]                 walks from the diagonal down;
      Q_2    [ all ]   [ all ]   [ cut ]       dq_kernel: one for each row, as in the forward

Cost. Seven matrix products for each pair of blocks. Every block is masked here; the kernels of
`flash_versions.versions.fa2` have loops without a mask, as the forward has.

Source: Dao 2023, "FlashAttention-2", arXiv:2307.08691, Algorithm 2. There the blocks of keys add to
dQ atomically; the second kernel in its place is what deterministic implementations do.
"""

import torch
import triton
import triton.language as tl

TILES = {64: (128, 64), 128: (64, 64)}  # BLOCK_Q, BLOCK_KV by head_dim, the fastest on an H200
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
def load_rows(x, row, DIM: tl.constexpr):
    """Rows of a head as a (rows, DIM) tile; those past the length read as 0."""
    return tl.load(row_pointers(x, row, DIM), mask=(row < x[2])[:, None], other=0.0)


@triton.jit
def queries_of(q, do, lse, delta, q_strides, do_strides, sequence, head, heads, q_length):
    """What belongs to the queries of a head: q, do, and where their lse and delta are."""
    q = head_of(q, q_strides, sequence, head, q_length)
    do = head_of(do, do_strides, sequence, head, q_length)
    first = (sequence.to(tl.int64) * heads + head) * q_length
    return q, do, lse + first, delta + first


@triton.jit
def load_queries(queries, row, DIM: tl.constexpr):
    """Tiles (rows, DIM) of q and do, and lse and delta of these rows; P is 0 past the length."""
    q, do, lse, delta = queries
    row_lse = tl.load(lse + row, mask=row < q[2], other=float("inf"))
    row_delta = tl.load(delta + row, mask=row < q[2], other=0.0)
    return load_rows(q, row, DIM), load_rows(do, row, DIM), row_lse, row_delta


@triton.jit
def probabilities(s, row_lse, scale):
    """P = exp(S - LSE) of unscaled scores and an LSE that broadcasts against them; 0 where the LSE
    is infinite.
    """
    return tl.exp2(s * (scale * LOG2E) - row_lse * LOG2E)


@triton.jit
def fold_queries(i, dk, dv, k_tile, v_tile, k_pos, queries, offset, scale, BLOCK_Q: tl.constexpr):
    """Fold block i of the queries into (dk, dv) of a block of keys, dk without the scale. Scores
    are (keys, queries): so P and dS are left operands as they are.
    """
    row = i * BLOCK_Q + tl.arange(0, BLOCK_Q)
    q_tile, do_tile, row_lse, row_delta = load_queries(queries, row, k_tile.shape[1])
    s = tl.dot(k_tile, q_tile.T, input_precision="ieee")
    s = tl.where(k_pos[:, None] <= (row + offset)[None, :], s, float("-inf"))
    p = probabilities(s, row_lse[None, :], scale)
    dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision="ieee")
    dp = tl.dot(v_tile, do_tile.T, input_precision="ieee")
    ds = p * (dp - row_delta[None, :])
    return tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee"), dv


@triton.jit(do_not_specialize=["q_length", "kv_length"])
def dkdv_kernel(
    q, k, v, do, lse, delta, dk, dv, q_strides, k_strides, v_strides, do_strides, d_strides, scale,
    q_length, kv_length, lengths, kv_heads, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each block of keys, key head and sequence. The first keys are seen by the
    most queries, so their programs begin.
    """
    place, tiles = tl.program_id(0), tl.cdiv(kv_length, BLOCK_KV)
    tile, head, sequence = place % tiles, place // tiles % kv_heads, place // tiles // kv_heads
    if lengths is not None:  # this sequence has fewer keys
        kv_length = tl.maximum(tl.minimum(tl.load(lengths + sequence), kv_length), 0).to(tl.int32)
    k_pos = tile * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(head_of(k, k_strides, sequence, head, kv_length), k_pos, DIM)
    v_tile = load_rows(head_of(v, v_strides, sequence, head, kv_length), k_pos, DIM)
    offset = kv_length - q_length if CAUSAL else kv_length  # the last query sees the last key
    begin = tl.maximum(tile * BLOCK_KV - offset, 0) // BLOCK_Q

    dk_tile = tl.zeros([BLOCK_KV, DIM], tl.float32)
    dv_tile = tl.zeros([BLOCK_KV, DIM], tl.float32)
    for member in range(head * GROUP, head * GROUP + GROUP):
        queries = queries_of(
            q, do, lse, delta, q_strides, do_strides, sequence, member, kv_heads * GROUP, q_length
        )
        for i in range(begin, tl.cdiv(q_length, BLOCK_Q)):
            dk_tile, dv_tile = fold_queries(
                i, dk_tile, dv_tile, k_tile, v_tile, k_pos, queries, offset, scale, BLOCK_Q
            )
    dk = head_of(dk, d_strides, sequence, head, kv_length)
    dv = head_of(dv, d_strides, sequence, head, kv_length)
    tl.store(row_pointers(dk, k_pos, DIM), dk_tile * scale, mask=(k_pos < kv_length)[:, None])
    tl.store(row_pointers(dv, k_pos, DIM), dv_tile, mask=(k_pos < kv_length)[:, None])


@triton.jit
def fold_keys(j, dq, queries, last_key, k, v, scale, BLOCK_KV: tl.constexpr):
    """Fold block j of the keys into dq of a tile of queries, without the scale."""
    q_tile, do_tile, row_lse, row_delta = queries
    k_pos = j * BLOCK_KV + tl.arange(0, BLOCK_KV)
    k_tile = load_rows(k, k_pos, q_tile.shape[1])
    v_tile = load_rows(v, k_pos, q_tile.shape[1])
    s = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    s = tl.where(k_pos[None, :] <= last_key[:, None], s, float("-inf"))
    p = probabilities(s, row_lse[:, None], scale)
    dp = tl.dot(do_tile, v_tile.T, input_precision="ieee")
    ds = p * (dp - row_delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["q_length", "kv_length"])
def dq_kernel(
    q, k, v, do, lse, delta, dq, q_strides, k_strides, v_strides, do_strides, d_strides, scale,
    q_length, kv_length, lengths, heads, CAUSAL: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_KV: tl.constexpr
):  # fmt: skip
    """One program for each tile of queries, head and sequence, as in the forward."""
    place, tiles = tl.program_id(0), tl.cdiv(q_length, BLOCK_Q)
    tile = tiles - 1 - place % tiles  # the last queries see the most keys
    head, sequence = (place // tiles) % heads, place // tiles // heads
    if lengths is not None:  # this sequence has fewer keys
        kv_length = tl.maximum(tl.minimum(tl.load(lengths + sequence), kv_length), 0).to(tl.int32)
    k = head_of(k, k_strides, sequence, head // GROUP, kv_length)
    v = head_of(v, v_strides, sequence, head // GROUP, kv_length)
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    offset = kv_length - q_length if CAUSAL else kv_length
    last_key = tl.minimum(row + offset, kv_length - 1)
    end = tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV)

    queries = queries_of(q, do, lse, delta, q_strides, do_strides, sequence, head, heads, q_length)
    queries = load_queries(queries, row, DIM)
    acc = tl.zeros([BLOCK_Q, DIM], tl.float32)
    for j in range(end):
        acc = fold_keys(j, acc, queries, last_key, k, v, scale, BLOCK_KV)
    dq = head_of(dq, d_strides, sequence, head, q_length)
    tl.store(row_pointers(dq, row, DIM), acc * scale, mask=(row < q_length)[:, None])


def backward(request, o, lse, do, dlse):
    """Gradients dq, dk, dv of a request's q, k and v: o (batch, M, heads, head_dim) and lse (batch,
    heads, M) are what the forward returned, do and dlse their gradients; dlse may be None.
    """
    q, k, v = request.q, request.k, request.v
    batch, q_length, heads, head_dim = q.shape
    kv_length, kv_heads = k.shape[1:3]
    hopper = not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] in (9, 10)
    block_q, block_kv = TILES[head_dim] if hopper and q.element_size() == 2 else (32, 32)
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    delta = (o.float() * do.float()).sum(3).transpose(1, 2) - (0 if dlse is None else dlse)
    delta = delta.masked_fill(lse.isinf(), 0.0).contiguous()  # no visible key: dlse may be NaN
    lse = lse.masked_fill(lse.isinf(), torch.inf)
    given = q, k, v, do, lse, delta
    strides = q.stride(), k.stride(), v.stride(), do.stride()
    sizes = request.scale, q_length, kv_length, request.kv_lengths
    constants = request.window_right == 0, request.group, head_dim, block_q, block_kv
    dkdv_kernel[triton.cdiv(kv_length, block_kv) * kv_heads * batch,](
        *given, dk, dv, *strides, dk.stride(), *sizes, kv_heads, *constants, num_stages=2
    )
    dq_kernel[triton.cdiv(q_length, block_q) * heads * batch,](
        *given, dq, *strides, dq.stride(), *sizes, heads, *constants, num_stages=2
    )
    return dq, dk, dv


if __name__ == "__main__":
    from flash_versions.lessons.check import run

    run(__file__)
