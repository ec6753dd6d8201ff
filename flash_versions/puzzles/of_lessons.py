"""Puzzles that are lessons with lines taken out: the task, what a learner writes, three hints."""

from typing import NamedTuple


class Taken(NamedTuple):
    """Statements of a function that a learner writes: all, or from one to another.

    Attributes:
        function: its name in the lesson.
        what: what the comment in their place asks for.
        first: how the first of them begins.
        last: how the last of them begins; the first one, if it is the only one.
    """

    function: str
    what: str
    first: str = ""
    last: str = ""


class OfLesson(NamedTuple):
    """A puzzle. Its cases call the version in the file, with the keys in so many splits.

    Attributes:
        lesson: the name of its file.
        task: a title, then a picture and what is asked.
        taken: what a learner writes.
        hints: each says more than the one before it.
        splits: of the keys; None for what the lesson chooses.
    """

    lesson: str
    task: str
    taken: tuple[Taken, ...]
    hints: tuple[str, ...]
    splits: int | None = None


OF_LESSONS = {
    "fa2": OfLesson(
        "fa2",
        """FlashAttention 2: divide once, after the loop.

The tensor cores do products much faster than the other units divide and take exponentials. So:

* acc is the sum of p @ v, not the average; one division by row_sum after the loop makes it one.
* 2^x is an instruction, e^x is two. With scores times scale * log2(e), exp2 gives the same p.

From here on a file is a whole version: `attention` can call it, and so can the model. Its tensors
are (batch, length, heads, head_dim), in 32 or 16 bits; sums are in fp32. Tiles come from
load_rows(x, positions, DIM, MASKED). Write the step of the softmax and the loop's body. A block is
MASKED if some query of the tile does not see all its keys: then a query sees the keys up to its
last_key, and may see none.
""",
        (
            Taken("softmax_step", "p, the new maximum, the new sum, and alpha; no inf - inf"),
            Taken("fold_block", "the tiles of k and v; scores; masked, softmax_step; the new acc"),
        ),
        (
            "p = exp2(s * scale_log2 - m) with the new maximum m. alpha = exp2(old - new maximum) "
            "repairs both what row_sum and what acc have so far.",
            "While a query has seen only -inf, m - m is inf - inf: subtract a pivot, m or 0 where "
            "m is -inf. tl.dot takes two tiles of one type, so p becomes v_tile's.",
            "new_max = tl.maximum(row_max, tl.max(s, 1) * scale_log2); the sum is alpha * row_sum "
            "+ tl.sum(p, 1); acc is tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], "
            'input_precision="ieee").',
        ),
    ),
    "causal": OfLesson(
        "fa2",
        """Causal attention: what a query does not see costs nothing.

A query sees the keys up to its own, and the last query sees all of them: with M queries and N keys,
query i sees key j if j <= i + N - M.

    M = N = 4 blocks     M = 2, N = 4 blocks     / cut: some scores are hidden
      / . . .              x x / .               x whole: no mask needed
      x / . .              x x x /               . skipped: neither loaded nor computed
      x x / .
      x x x /

Blocks before full_end are whole for every query of the tile, and those up to end are cut. With more
queries than keys the first ones see none: o = 0, lse = -inf. The check counts loads.
""",
        (
            Taken(
                "forward_kernel",
                "offset, by which a query's last key is further on than the query (without a mask, "
                "all keys are seen); last_key of each row; end and full_end, in blocks",
                "offset =",
                "full_end =",
            ),
        ),
        (
            "Query `row` sees keys up to row + kv_length - q_length, and no key is behind "
            "kv_length - 1. Without a mask, an offset of kv_length lets each query see all.",
            "The last query of the tile decides where the loop ends, the first one where blocks "
            "stop being whole. A bound of keys becomes one of blocks by tl.cdiv, or by // if the "
            "last block must be whole.",
            "end = tl.cdiv(tl.minimum(tile * BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV); "
            "full_end = tl.maximum(tl.minimum(tile * BLOCK_Q + offset + 1, kv_length), 0) // "
            "BLOCK_KV.",
        ),
    ),
    "heads": OfLesson(
        "fa2",
        """Heads, of which several share keys: grouped-query attention.

A model has H query heads and fewer heads of keys and values: query heads h * GROUP to h * GROUP +
GROUP - 1 use key head h. Nothing is copied: each program has a query tile of one head and finds the
keys of its head by addresses.

    query heads   0 1 2 | 3 4 5      H = 6, GROUP = 3
    key heads       0   |   1

A tensor is (batch, length, heads, DIM), and its strides tell how far apart two sequences are, two
rows, two heads. A head is described by its address, the stride of its rows, and its length.
""",
        (
            Taken("head_of", "the three of a head: where it starts, its rows' stride, the length"),
            Taken("forward_kernel", "the heads of k and v that this query head uses",
                  "k = head_of", "v = head_of"),
        ),
        (
            "Query head h uses key head h // GROUP.",
            "A head starts at x + sequence * strides[0] + head * strides[2]; rows are strides[1] "
            "apart. A cache can have more than 2^31 elements, so indices become 64 bits first.",
            "start = x + sequence.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[2]; "
            "k = head_of(k, k_strides, sequence, head // GROUP, kv_length), and the same for v.",
        ),
    ),
    "split_keys": OfLesson(
        "fa2",
        """Split the keys: many programs for few queries.

A model that generates has one query and thousands of keys. With a program for each query tile one
program would read them all, while the rest of the GPU idles. So a program takes a part of the keys:

    keys        block 0   block 1 | block 2   block 3 | block 4 . . .
    program           0           |         1         |       2           -> o and lse of each part

program_id(1) is the number of the part, num_programs(1) how many there are. All have equally many
blocks, as long as there are blocks. A part may be empty: its loops must then do nothing. Blocks
before full_end need no mask, in whatever part they are.
""",
        (Taken("share_of_keys", "the part of this program: (begin, full_end, end) in blocks"),),
        (
            "Each part has tl.cdiv(end, tl.num_programs(1)) blocks; the last ones may have fewer.",
            "begin = part * blocks; the part's end is begin + blocks, or the end of all if that is "
            "earlier. full_end is cut to between begin and the part's end.",
            "return begin, tl.maximum(tl.minimum(full_end, end), begin), end",
        ),
        splits=3,
    ),
    "combine": OfLesson(
        "fa2",
        """Put parts together: FlashAttention 2's reduction.

The parts of the keys have each given an attention o_i and its LSE_i. The attention over all keys is
their average, and a part weighs as much as its sum of exponentials:

    LSE = log(sum of e^LSE_i)            o = sum of e^(LSE_i - LSE) o_i

A part without keys has LSE_i = -inf and weighs nothing. If no part has keys, o = 0 and LSE = -inf.
A program has one row of o: `parts` has its o_i, and `lses` its LSE_i, one after `rows` others.
""",
        (
            Taken("combine", "load the LSEs and the parts; find the weights and their total; store "
                  "o and the LSE",
                  "part_lse =", "tl.store(lse"),
        ),
        (
            "It is a softmax of the LSEs of a row, and a sum of the parts with its weights.",
            "Load the LSEs with other=-inf where there is no split, subtract their maximum (any "
            "number if that is -inf), and take tl.exp. Where the total is 0, divide by 1.",
            "part_lse = tl.load(lses + split * rows + lse_row, mask=split < splits, "
            'other=float("-inf")); part = load_rows((parts + row * DIM, rows * DIM, splits), '
            "split, DIM); the LSE is pivot + tl.log(total).",
        ),
        splits=3,
    ),
    "dk_dv": OfLesson(
        "fa2_backward",
        """dK and dV: a program has a tile of keys and goes along the queries.

P was never stored. It comes back from the scores and the LSE, without a maximum and without a sum:

    P = exp(S - LSE)          S = scale * Q K^T
    dV = P^T dO
    dS = P * (dO V^T - delta)
    dK = scale * dS^T Q

The forward has query tiles and a loop over keys. Here it is the other way round, so that each
program adds up its own dK and dV, and two never add to the same memory. Scores are (keys, queries)
here, so P and dS are left operands as they are. Write the loop's body.
""",
        (
            Taken("probabilities", "P of unscaled scores, by exp2"),
            Taken("fold_queries", "load_queries; scores, with -inf where a query does not see a "
                  "key; P; add to dv; dS; add to dk, which the kernel scales at the end"),
        ),
        (
            "exp(x) = exp2(x * LOG2E). A query past the length has the LSE inf, so its P is 0.",
            "s = tl.dot(k_tile, q_tile.T) is (keys, queries): so the LSE of a query is "
            "row_lse[None, :], and query `row` sees the keys up to row + offset.",
            "dv = tl.dot(p.to(do_tile.dtype), do_tile, dv); ds = p * (tl.dot(v_tile, do_tile.T) - "
            "row_delta[None, :]); dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk); each with "
            'input_precision="ieee".',
        ),
    ),
    "dq": OfLesson(
        "fa2_backward",
        """dQ: a program has a tile of queries and goes along the keys, as in the forward.

    P = exp(S - LSE)          S = scale * Q K^T
    dS = P * (dO V^T - delta)
    dQ = scale * dS K

P and dS are computed a second time. That costs two products more than one kernel for everything,
and saves the additions of many programs to one dQ, whose order changes from run to run.
""",
        (Taken("fold_keys", "tiles of k and v; scores, masked; P; dS; dq without the scale"),),
        (
            "It is fold_queries with the roles swapped: q, do, lse and delta stay, k and v change.",
            "Scores are (queries, keys): s = tl.dot(q_tile, k_tile.T), and a query sees the keys "
            "up to its last_key[:, None].",
            "ds = p * (tl.dot(do_tile, v_tile.T) - row_delta[:, None]); return "
            'tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee").',
        ),
    ),
    "backward": OfLesson(
        "fa2_backward",
        """The backward of causal attention: dQ, dK and dV from what the forward has left.

Put the pieces together. The blocks that the mask hides cost nothing here either, and a mirror
helps: the keys that a query tile sees END with its last query, the queries that see a key tile
BEGIN with its first key.

           keys ->                          dK, dV of key tile 1: from the query tile on
    q    / . . .      dQ of query tile 2:       whose last query sees key tile 1
    |    x / . .      key tiles 0, 1, 2
    v    x x / .
         x x x /

Write the bounds of both kernels, and what they are given: delta and the LSE of each query. A query
that sees no key has LSE = -inf; nothing of it may reach a gradient, NaN least of all. The LSE has a
gradient, too: dlse is subtracted from delta.
""",
        (
            Taken("dkdv_kernel", "begin, the first block of queries that sees one of these keys",
                  "begin ="),
            Taken("dq_kernel", "last_key of each row, and end, in blocks of keys",
                  "last_key =", "end ="),
            Taken("backward", "delta, (batch, heads, M), fp32 and contiguous; an LSE that makes P "
                  "0 for a query that sees no key", "delta =", "lse ="),
        ),
        (
            "Query i sees key j if j <= i + offset. So the first query that sees key j is j - "
            "offset, at least 0; its block is that // BLOCK_Q.",
            "last_key = tl.minimum(row + offset, kv_length - 1), and end = tl.cdiv(tl.minimum(tile "
            "* BLOCK_Q + BLOCK_Q + offset, kv_length), BLOCK_KV).",
            "delta = (o.float() * do.float()).sum(3).transpose(1, 2) - (0 if dlse is None else "
            "dlse), 0 where lse.isinf(); lse.masked_fill(lse.isinf(), torch.inf).",
        ),
    ),
    "overlap": OfLesson(
        "fa3_hopper",
        """Two products in flight: S of the next block is issued before P V of this one is done.

Attention has two products for each block of keys, and between them the softmax, which the tensor
cores cannot do. In order, they wait while it is computed:

    tensor cores    S0 .... P0V0  S1 .... P1V1  S2 ....          in order
    other units     softmax0      softmax1      softmax2

    tensor cores    S0      S1 P0V0      S2 P1V1      P2V2       S one block ahead
    other units     softmax0      softmax1      softmax2

multiply_qk and multiply_pv issue a product and return a token. hopper.warpgroup_mma_wait(1,
deps=[token]) waits until at most 1 product is in flight, the one issued last, and returns the
result. ring.wait(stage) waits until a slot is full, ring.tile(stage) is its tile, and
ring.release(stage) says that it has been read. The check counts how often two are in flight.
""",
        (
            Taken("fold_block", "wait for K of `stage`", "rings.k.wait"),
            Taken("fold_block", "issue S of `stage`, then P V of `before` when its V is there",
                  "s_token =", "acc_token ="),
            Taken("fold_block", "take S, and release its K", "s = hopper", "rings.k.release"),
            Taken("fold_block", "take acc, release the V of `before`, and round P",
                  "acc = hopper", "p = rounded"),
        ),
        (
            "s_token = multiply_qk(q_tile, rings.k.tile(stage)) and acc_token = multiply_pv(p, "
            "rings.v.tile(before), acc) issue a product each, once the slots are full.",
            "s = hopper.warpgroup_mma_wait(1, deps=[s_token]): products end in the order in which "
            "they were issued, so with one left in flight S is there and P V may still run.",
            "A slot can be released when the product that reads it is done: K's after the first "
            "wait, the V of `before` after acc = hopper.warpgroup_mma_wait(0, deps=[acc_token]). P "
            "is an operand of P V, so p = rounded(p, rings.v.tile(stage), acc) comes last.",
        ),
    ),
    "ping_pong": OfLesson(
        "fa3_hopper",
        """Ping-pong: two warpgroups take turns at the tensor cores.

Each consumer multiplies, and then works on the result with other units. If both multiply at the
same time, both work on results at the same time, and the tensor cores wait. In turns, one
multiplies while the other works:

    consumer 0    [S0] work      [S1] work      [S2] work           [..] the tensor cores
    consumer 1         [S0] work      [S1] work      [S2] work

A named barrier orders them. pipeline.named_barrier_sync(c) waits at the barrier of consumer c until
the other one calls pipeline.named_barrier_arrive(1 - c, 2), which arrives at the barrier of the
next consumer, c. So a consumer waits for its turn, issues its products, and gives the turn away.
Who gives consumer 0 its first turn?
""",
        (
            Taken("fold_block", "wait for your turn, before the products",
                  "pipeline.named_barrier_sync"),
            Taken("fold_block", "give the turn away", "pipeline.named_barrier_arrive"),
            Taken("consume", "the first turn", "if CONSUMER == 1"),
        ),
        (
            "named_barrier_sync(CONSUMER) before the products, named_barrier_arrive(CONSUMER, 2) "
            "after them.",
            "Give the turn away as soon as the products are issued, before they are waited for.",
            "Consumer 1 arrives once before its loop, as if it had just had a turn: if CONSUMER == "
            "1: pipeline.named_barrier_arrive(CONSUMER, 2).",
        ),
    ),
    "fa3": OfLesson(
        "fa3_hopper",
        """FlashAttention 3: a producer, two consumers, and rings of K and V.

A program has 128 queries, 64 for each consumer. The producer loads Q of both and then the blocks of
K and V that the program's last query sees, the last block first; both consumers read every block.

    producer      Q  K2 V2  K1 V1  K0 V0               waits only for slots
    consumer 0    S2 softmax   [S1 P2V2] softmax   [S0 P1V1] softmax   P0V0
    consumer 1    S2 softmax      [S1 P2V2] softmax   [S0 P1V1] softmax   P0V0

Write the producer and a consumer. fold_block, which you know from `overlap`, does one block; before
the loop a consumer computes S of the last block, which is masked, and after it P V of the first.
ring.fill(slot, box, position) loads a box; rings.q.at(c, 0) is the slot of consumer c, stage.next()
the one after a stage. TMA fills what is outside of a tensor with zeros.
""",
        (
            Taken("produce", "fill the slots of Q, then stage after stage the rings of K and V"),
            Taken("consume", "take Q; the first S and its softmax; the loop of fold_block; the "
                  "last P V",
                  "q_stage, stage =", "acc = hopper"),
        ),
        (
            "The producer: rings.k.fill(stage, k, [tile.sequence, tile.head // GROUP, block * "
            "BLOCK_KV, 0]), the same for v, stage = stage.next(), for block from tile.end - 1 "
            "to 0. Q: rings.q.fill(rings.q.at(c, 0), q, [tile.sequence, tile.head, tile.query + c "
            "* ROWS, 0]).",
            "A consumer waits for a slot, multiplies, waits for the product, and releases the slot "
            "then. masked(s, tile.end - 1, last_key) hides keys of the last block.",
            "s = hopper.warpgroup_mma_wait(0, deps=[multiply_qk(q_tile, rings.k.tile(stage))]); p "
            "= rounded(p, rings.v.tile(stage), acc) before the loop; after it acc = "
            "hopper.warpgroup_mma_wait(0, deps=[multiply_pv(p, rings.v.tile(stage), acc)]).",
        ),
    ),
}  # fmt: skip
