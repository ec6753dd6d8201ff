"""FlashAttention 3, forward of few queries, on Hopper: a copy by TMA with arithmetic on top.

What the ordinary kernel wastes here. In FA2's decoding kernels the warps that compute also ask for
the keys: thousands of addresses for each block, and with pages a page number for each key. What is
under way is two blocks of a program, less at each end of a sequence, where the pipeline runs empty
and starts anew, and where rows of different lengths meet that happens several times in a share.
Small pages and small head dims cost the most.

What changes.
* A producer warp only loads. It asks for boxes by TMA, one instruction for 64 keys and 64 dims, so
  for 8 KiB, into a ring of slots that holds a block of K and a block of V in turn. Two programs
  of a multiprocessor have 64 KiB under way: more would only wait. The ring does not run empty
  where a sequence ends: the producer goes on with the next one while the consumer stores the
  results of this one.
* Each box needs one page number. The producer loads it before waiting for a slot, so both waits
  overlap. A page that is shorter than a block is a box of its own, and some boxes make a block.
* A box ends with its sequence (`tiles/ragged.py`), in a page, too: what is behind the last key
  reads as 0 and may be NaN.
* A consumer, four warps, computes with WGMMA. Its tile has 64 rows, of which the queries of a key
  head use a few. The products of the other rows are wasted, and cost nothing: a block of 64 keys at
  head_dim 128 takes the memory 1800 cycles of a multiprocessor, and its two products 512.
* Blocks are visited from the last one to the first, as in the forward: with batch_invariant a
  share is one split of a fixed size (`totals.py`), and its bits are those of a prefill.
* The shares of the work are otherwise those of `fa2/stream_k.py`, found by each program on the
  GPU. Of a sequence that is cut, the program that comes last combines the pieces (`pieces.py`),
  where FA2 launches a kernel that waits for all programs.

    program (key head, share):  find the first and the last sequence of the share

    producer                                    consumer
    for each sequence of the share:             for each sequence of the share:
        for j in the blocks that both have:         load Q tile
            look up the pages of block j            for j in the blocks that both have:
            wait for an empty slot, load K_j            wait for K_j; S = Q K_j^T; give it back
            wait for an empty slot, load V_j            mask if cut, softmax
                                                        wait for V_j; O += P V_j; give it back
                                                    store O, LSE (all of the sequence) or acc, m, l;
                                                    the last of a sequence: combine its pieces

Head dims are cut in panels of 64, the 128 bytes that are swizzled together, so that boxes of a few
rows lie in shared memory as the rows of a block do: S is a sum over panels, and O has a panel for
each of V's.

Cost. 16 KiB of shared memory for 64 query rows at head_dim 128, and partial results as in FA2. What
is fixed is a launch, three loads that wait for each other (lengths, page, keys), and at the end of
a sequence that is cut a store, a counter and a load that wait for each other.

Sources. The producer, its ring and boxes: Shah et al. 2024, arXiv:2407.08608. Shares: Osama,
Merrill, Cecka, Garland, Owens 2023, "Stream-K"; FlashInfer (Ye et al. 2025). FlashAttention's own
code for Hopper decodes over pages by TMA if a page is a whole number of blocks.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_versions.versions.fa3.fp8.pairs import softmax_step
from flash_versions.versions.fa3.hopper.decode.pieces import PANEL, Output, store_piece
from flash_versions.versions.fa3.hopper.decode.problem import DecodeProblem, KeyRows, ScoreChanges
from flash_versions.versions.tiles.pipeline import Pipeline
from flash_versions.versions.tiles.ragged import box_in_sequence
from flash_versions.versions.tiles.triton_compat import aggregate, load_tile, reinterpret
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, operand_layout

COUNTS = [
    "q_length", "kv_length", "batch", "kv_heads", "shares", "table_stride", "apart",
    "window_left", "window_right", "scale_log2", "cap_scale", "slopes_batch_stride",
    "slopes_head_stride",
]  # fmt: skip


@aggregate
class Ring:
    """Slots in shared memory that hold a block of K and a block of V in turn."""

    slots: Pipeline  # `tiles` are boxes: those of a panel lie one behind the other
    panels: gl.shared_memory_descriptor  # the same bytes as panels of blocks, (BLOCK_KV, PANEL)
    PANELS: gl.constexpr  # of a slot
    PANELS_K: gl.constexpr  # of these, those of a block of K
    PANELS_V: gl.constexpr
    BOXES: gl.constexpr  # of a panel

    @gluon.jit
    def panel(self, stage, PANEL_NUMBER: gl.constexpr):
        """A panel of the block in a slot."""
        return self.panels.index(stage.slot * self.PANELS + PANEL_NUMBER)


@gluon.jit
def make_ring(
    desc, SLOTS: gl.constexpr, PANELS: gl.constexpr, PANELS_K: gl.constexpr,
    PANELS_V: gl.constexpr, BOXES: gl.constexpr, BLOCK_KV: gl.constexpr
):  # fmt: skip
    """Allocate a ring for boxes like those of a descriptor."""
    NUMBER: gl.constexpr = SLOTS * PANELS * BOXES
    boxes = gl.allocate_shared_memory(desc.dtype, [NUMBER] + desc.block_type.shape, desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=1)
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_KV, PANEL], desc.dtype)
    panels = reinterpret(boxes, [SLOTS * PANELS, BLOCK_KV, PANEL], layout)
    slots = Pipeline(boxes, full, empty, SLOTS)
    return Ring(slots, panels, PANELS, PANELS_K, PANELS_V, BOXES)


@aggregate
class QueryRows:
    """Where the queries are, in elements."""

    start: gl.tensor
    batch_stride: gl.tensor
    row_stride: gl.tensor
    head_stride: gl.tensor
    DIM: gl.constexpr


@gluon.jit
def fill(problem, ring, stage, desc, places, PANELS: gl.constexpr):
    """Producer: when the slot is empty, start to load the boxes of a block."""
    ring.slots.wait_empty(stage)
    full = ring.slots.full.index(stage.slot)
    mbarrier.expect(full, PANELS * ring.BOXES * desc.block_type.nbytes)
    for panel in gl.static_range(PANELS):
        for box in gl.static_range(ring.BOXES):
            first, length, row = places[box]
            place = box_in_sequence(
                first, length, problem.kv_head, row, gl.to_tensor(panel * PANEL)
            )
            number = (stage.slot * ring.PANELS + panel) * ring.BOXES + box
            load_tile(desc, place, full, ring.slots.tiles.index(number))


@gluon.jit
def produce(problem, share, ring, k, v):
    """The producer: load the blocks of the share, K and V of each in turn."""
    stage = ring.slots.at(0, 0)
    sequence, start = share.sequence, share.start
    while start < share.end:
        piece = problem.piece(share, sequence, start)
        for block in range(piece.end - 1, piece.begin - 1, -1):
            # The pages are looked up before the producer waits for an empty slot.
            places = ()
            for box in gl.static_range(ring.BOXES):
                key = block * problem.BLOCK_KV + box * problem.BOX
                found = problem.keys.box(sequence, piece.first, piece.length, key, problem.BOX)
                places = places + (found,)
            fill(problem, ring, stage, k, places, ring.PANELS_K)
            stage = stage.next()
            fill(problem, ring, stage, v, places, ring.PANELS_V)
            stage = stage.next()
        sequence += 1
        start = piece.stop


@gluon.jit
def load_queries(problem, q, q_tile, sequence):
    """Copy the query rows of a sequence to shared memory, padded by zeros."""
    PANELS: gl.constexpr = q_tile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, WARPGROUP_ROWS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, PANEL, layout=gl.SliceLayout(0, layout))
    start = sequence.to(gl.int64) * q.batch_stride
    start += (row // problem.GROUP).to(gl.int64) * q.row_stride
    start += problem.heads_of(row).to(gl.int64) * q.head_stride
    loaded = ()
    for panel in gl.static_range(PANELS):
        dim = column + panel * PANEL
        mask = problem.exist(row)[:, None] & (dim < q.DIM)[None, :]
        x = gl.load(q.start + (start[:, None] + dim[None, :]), mask=mask, other=0.0)
        loaded = loaded + (x,)
    for panel in gl.static_range(PANELS):
        q_tile.index(panel).store(loaded[panel])
    fence_async_shared()


@gluon.jit
def attend_piece(problem, ring, stage, q_tile, queries, piece, row_max, row_sum):
    """Fold the blocks of a piece into the state: (acc by panels, row_max, row_sum, next stage)."""
    s_layout: gl.constexpr = accumulator_layout(problem.BLOCK_KV)
    o_layout: gl.constexpr = accumulator_layout(PANEL)
    operand: gl.constexpr = operand_layout(o_layout)
    acc = ()
    for _ in gl.static_range(ring.PANELS_V):
        acc = acc + (gl.zeros([WARPGROUP_ROWS, PANEL], gl.float32, o_layout),)
    for block in range(piece.end - 1, piece.begin - 1, -1):
        ring.slots.wait(stage)
        s = gl.zeros([WARPGROUP_ROWS, problem.BLOCK_KV], gl.float32, s_layout)
        for panel in gl.static_range(ring.PANELS_K):
            k_panel = ring.panel(stage, panel).permute((1, 0))
            s = warpgroup_mma(
                q_tile.index(panel), k_panel, s, use_acc=panel > 0, is_async=True
            )  # fmt: skip
        s = warpgroup_mma_wait(0, deps=[s])
        ring.slots.release(stage)
        stage = stage.next()
        s = problem.scored(s, queries, block)
        if (block < piece.full_begin) | (block >= piece.full_end):
            s = problem.masked(s, queries, block)
        p, row_max, row_sum, alpha = softmax_step(
            s, row_max, row_sum, problem.mods.scale_log2, 0.0, 1.0, False
        )
        p = gl.convert_layout(p.to(q_tile.dtype), operand, assert_trivial=True)
        alpha = gl.convert_layout(alpha, gl.SliceLayout(1, o_layout), assert_trivial=True)
        ring.slots.wait(stage)
        tokens = ()
        for panel in gl.static_range(ring.PANELS_V):
            rescaled = acc[panel] * alpha[:, None]
            token = warpgroup_mma(p, ring.panel(stage, panel), rescaled, is_async=True)
            tokens = tokens + (token,)
        acc = waited(tokens, ring.PANELS_V)
        ring.slots.release(stage)
        stage = stage.next()
    return acc, row_max, row_sum, stage


@gluon.jit
def waited(tokens, PANELS: gl.constexpr):
    """The results of all products that are in flight."""
    if PANELS == 1:
        return (warpgroup_mma_wait(0, deps=[tokens[0]]),)
    elif PANELS == 2:
        return warpgroup_mma_wait(0, deps=[tokens[0], tokens[1]])
    else:
        return warpgroup_mma_wait(0, deps=[tokens[0], tokens[1], tokens[2], tokens[3]])


@gluon.jit
def consume(problem, share, ring, q_tile, out, q):
    """The consumer: attend to each sequence of the share."""
    stage = ring.slots.at(0, 0)
    sequence, start = share.sequence, share.start
    while start < share.end:
        piece = problem.piece(share, sequence, start)
        load_queries(problem, q, q_tile, sequence)
        queries = problem.queries(sequence, piece.length)
        row_max, row_sum = problem.first_state(start >= share.begin)
        acc, row_max, row_sum, stage = attend_piece(
            problem, ring, stage, q_tile, queries, piece, row_max, row_sum
        )
        store_piece(
            problem, share, piece, out, sequence, start, acc, row_max, row_sum.total()
        )  # fmt: skip
        sequence += 1
        start = piece.stop


@gluon.jit(do_not_specialize=COUNTS)
def decode_kernel(
    k, v, q, o, lse, acc, row_max, row_sum, arrivals,
    lengths, starts, cuts, table, slopes, sinks,
    q_batch_stride, q_row_stride, q_head_stride,
    q_length, kv_length, batch, kv_heads, shares, table_stride, apart, window_left, window_right,
    scale_log2, cap_scale, slopes_batch_stride, slopes_head_stride,
    GROUP: gl.constexpr, DIM: gl.constexpr, DIM_V: gl.constexpr, PAGE_SIZE: gl.constexpr,
    LENGTHS: gl.constexpr, STARTS: gl.constexpr, CUTS: gl.constexpr, LEFT: gl.constexpr,
    RIGHT: gl.constexpr, CAP: gl.constexpr, ALIBI: gl.constexpr, SINK: gl.constexpr,
    BLOCK_KV: gl.constexpr, SLOTS: gl.constexpr, SLOT_PANELS: gl.constexpr, PANELS: gl.constexpr,
    PANELS_V: gl.constexpr, BATCH: gl.constexpr, SPLIT: gl.constexpr
):  # fmt: skip
    """One program per key head and share: a warp that loads and four that compute."""
    keys = KeyRows(
        lengths, starts, cuts, table, gl.to_tensor(table_stride), gl.to_tensor(apart),
        gl.to_tensor(kv_length), LENGTHS, STARTS, CUTS, PAGE_SIZE
    )  # fmt: skip
    mods = ScoreChanges(
        slopes, sinks, gl.to_tensor(slopes_batch_stride), gl.to_tensor(slopes_head_stride),
        gl.to_tensor(scale_log2), gl.to_tensor(cap_scale), CAP, ALIBI, SINK
    )  # fmt: skip
    kv_heads = gl.to_tensor(kv_heads)
    problem = DecodeProblem(
        keys, mods, gl.program_id(0) % kv_heads, gl.to_tensor(q_length), kv_heads,
        gl.to_tensor(window_left), gl.to_tensor(window_right), gl.to_tensor(shares), GROUP, LEFT,
        RIGHT, BLOCK_KV, k.block_type.shape[-2], SPLIT, SINK and SPLIT > 0
    )  # fmt: skip
    if SPLIT > 0:
        share = problem.find_split(gl.program_id(0) // kv_heads)
    else:
        share = problem.find_share(gl.program_id(0) // kv_heads, gl.to_tensor(batch), BATCH)
    BOXES: gl.constexpr = BLOCK_KV // k.block_type.shape[-2]
    ring = make_ring(k, SLOTS, SLOT_PANELS, PANELS, PANELS_V, BOXES, BLOCK_KV)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([WARPGROUP_ROWS, PANEL], k.dtype)
    q_tile = gl.allocate_shared_memory(k.dtype, [PANELS, WARPGROUP_ROWS, PANEL], q_layout)
    out = Output(o, lse, acc, row_max, row_sum, arrivals, DIM_V)
    queries = QueryRows(
        q, gl.to_tensor(q_batch_stride), gl.to_tensor(q_row_stride), gl.to_tensor(q_head_stride),
        DIM
    )  # fmt: skip
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, (problem, share, ring, q_tile, out, queries)),
            (produce, (problem, share, ring, k, v)),
        ],
        [1],
        [40],
    )
