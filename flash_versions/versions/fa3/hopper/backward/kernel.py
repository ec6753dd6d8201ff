"""FlashAttention 3, backward, on Hopper: one kernel, five products, all of them asynchronous.

What the portable kernels waste. Two kernels compute S and dP twice, seven products in the place of
five, because no other program may add to what a program owns. And as in the forward, warps that do
all in turn leave the tensor cores idle while they compute exponentials.

What changes.
* One kernel. A program has a tile of 128 keys and adds its share of dQ to memory: TMA adds to a
  box (reduce-add, fp32). The order of the additions is the order in which programs come by, so dQ
  may differ in its last bits from run to run. With `deterministic` programs wait for their turns,
  see `deterministic.py`.
* Warp specialisation. A producer warp streams Q and dO of the queries that see these keys, with a
  row of LSE and one of delta; two consumers have 64 keys each, and dK and dV in registers.
* Transposed scores. With S^T = K Q^T, a consumer's rows are keys: P^T and dS^T are, rounded, the
  left operands of dV += P^T dO and dK += dS^T Q, straight from registers.
* Persistent programs. As many as there are SMs walk from tile to tile. The producer claims the
  next tile when it has loaded this one's last block, and its K and V come while the others still
  compute this one, if K and V have two slots. dK and dV leave through the slots of the tile's own K
  and V.
* A warpgroup for dQ, `accumulate`. dQ sums over keys, and a consumer has half of them. Both leave
  their dS, in two slots, for a third warpgroup, which does one product, dQ = dS K, and leaves it,
  in two slots, for warps that have it added to memory, the adders: nothing of that is in the
  consumers' way. In the sum, columns are exchanged, so that stores meet each bank of shared memory
  once.

One step, for block j; [..] what the tensor cores do, a column is a stretch of time:

    consumers   [S^T = K Q^T]          [dP^T = V dO^T] [dV += P^T dO]  [dK += dS^T Q]
      compute                  P = 2^(S-LSE)           dS = P (dP - delta), stored
    accumulate  [dQ_j-1 = dS K, a half of the dims] stored [the other half] stored
    TMA          Q, dO to come                           [dQ_j-1 += in memory ...

    waits           for                                             at
    consumer        the other one has done its exponentials         named_barrier_sync
    producer        both consumers have read a slot of Q and of dO  Q_EMPTY, named
    producer        dK and dV have left by a slot of K and V        k.empty v.empty
    consumer        the producer's copy has landed                  k.full v.full q.full do.full
    accumulate      the producer's copy of K has landed             k.full
    consumer        `accumulate` has read the slot of dS_j-2        ds.empty
    accumulate      both have written their part of dS_j            DS_FULL, named
    warpgroups      their own products                              warpgroup_mma_wait
    accumulate      TMA has read what its slot of dQ had before     addends.empty
    adder           `accumulate` has written a part of dQ_j         addends.full
    adder           TMA has read its slot of dQ                     tma.store_wait
    adder           with turns: its block before is in memory       turns.advance
    adder           with turns: tiles behind have added to block j  turns.advance
    consumer        `accumulate` has read K, which dK leaves by     ds.empty
    consumer        above 64 dims: both have read K and V           ALL_READ, named
    consumer        TMA has read dK and dV                          tma.store_wait
    all others      the producer has claimed a tile                 scheduler.full
    producer        all others have seen the claim before last      scheduler.empty
    producer        the kernel before has ended                     gdc_wait

Barriers. When a partition arrives at an mbarrier, Gluon makes its warps wait for each other, before
and behind. At head_dim 64, where a step is short, that is a good part of it. So what consumers tell
others they announce at named barriers (`tiles.DS_FULL`, `tiles.Q_EMPTY`), each warp for itself.
And dK, and with `early` S of the next step, are issued before dS is stored: the store, its fence
and the announcement pass while tensor cores compute.

Turns. One consumer computes exponentials and issues dV, then the other one: so they do not compute
exponentials at the same time, and the tensor cores have products of one while the other computes.
A consumer has given its turn away before it waits for the warpgroup of dQ, which may wait for an
adder, and so for other programs (`deterministic.py`): the turns close no circle of waits.

Why no warp overwrites what another still reads: before it writes a tile, it waits until the readers
have said that they are done, for dS and dQ as for all others. Slots of Q and of dO are given back
together, behind dK, the last product that reads one. With `early`, S is issued once more after the
last block, perhaps from a slot that the next tile's Q is on its way to. This S is never used.

`early`, up to head_dim 64: dP is issued before the exponentials, and S of the next step behind dK.
Elsewhere P is rounded to 16 bits before dP is computed: at head_dim 128 registers do not hold fp32
P beside dP, and between 64 and 128 that order is at least as fast.

`held`, at head_dim 64: a consumer has its rows of V and of K in registers, as left operands, and dQ
is one product, so dS is read once. Otherwise a step would take 1664 cycles of shared memory, and
1280 of the tensor cores: V, K and dQ save 128 of the former each. Not with softcap: it would spill.

Cost. Per block of 64 queries and 128 keys at head_dim 128, 2560 cycles of the tensor cores and 2944
of shared memory: of the five products only dV and dK have an operand in registers. dQ passes
through L2 in fp32, once for every 128 keys: tiles of one head are neighbours, so that it stays
there. Registers are short: dK and dV take 128 of a consumer's, and dQ is computed by halves.

Head dims up to 96 may be two panels, 64 + 32 or 64 + 16 (`panels.py`): then dK, dV and a product
with Q or dO are two. dQ is computed a panel at a time, or with 16 columns both at once.

Above head_dim 128, too, consumers divide the keys, and compute the scores of half of a block's
queries at a time: with a warpgroup for dQ up to 160 dims, and for 192 with 128 of v
(`wider/halves.py`); for 192, where registers are left for two warpgroups only, without one
(`wider/pair.py`). At 256 a program has 64 keys, and consumers divide the dims (`wider/wide.py`).

Where there are few tiles, or more under way than the L2 cache holds, programs share a tile of keys:
each has a part of the query heads of its group (`split_groups.py`). So do those of `wider`.

Before it, a kernel computes delta and clears the sum of dQ; one behind it scales and rounds dQ.
This one and the last may begin while the one before still runs (`rows.py`).

Source: Shah et al. 2024, "FlashAttention-3", arXiv:2407.08608, section 3 and appendix B.1,
whose backward has a warp for the addition of dQ, too; transposed scores as in its code. A
warpgroup for one product is FlashAttention-4's way of dividing roles (Zadouri et al. 2026,
arXiv:2603.05451).
"""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper import host as forward_hopper
from flash_versions.versions.fa3.hopper.backward.accumulate import accumulate, add, make_addends
from flash_versions.versions.fa3.hopper.backward.config import BackwardConfig, default_config
from flash_versions.versions.fa3.hopper.backward.consume import consume
from flash_versions.versions.fa3.hopper.backward.deterministic import take_turns
from flash_versions.versions.fa3.hopper.backward.host import (
    COUNTS,
    all_constants,
    num_programs,
    numbers,
    tensors,
)
from flash_versions.versions.fa3.hopper.backward.problem import KeyProblem
from flash_versions.versions.fa3.hopper.backward.rows import finish, prepare
from flash_versions.versions.fa3.hopper.backward.split_groups import Parts
from flash_versions.versions.fa3.hopper.backward.tiles import (
    Q_EMPTY,
    Q_THREADS,
    Inputs,
    load_do,
    load_q,
    make_buffers,
)
from flash_versions.versions.fa3.hopper.backward.wider.halves import (
    accumulate_and_load,
    consume_halves,
)
from flash_versions.versions.fa3.hopper.backward.wider.pair import consume_pair
from flash_versions.versions.fa3.hopper.backward.wider.wide import (
    add_wide,
    consume_wide,
    make_wide_buffers,
    produce_wide,
)
from flash_versions.versions.fa3.hopper.head_mods import HeadMods
from flash_versions.versions.fa3.hopper.intervals import KeySpans
from flash_versions.versions.fa3.hopper.panels import make_boxes, make_tiles
from flash_versions.versions.tiles.pipeline import hear_rest, meet
from flash_versions.versions.tiles.tile_scheduler import make_scheduler
from flash_versions.versions.tiles.triton_compat import as_tensors
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS


@gluon.jit
def produce(problem, buffers, scheduler, inputs, OVERLAP: gl.constexpr):
    """The producer: for each tile, load K and V, and for each head of the group Q and dO of all
    that see them. If kernels OVERLAP, the first K and V come while the kernel before still runs.
    """
    tile, round, filled = problem.turns.number(), 0, 0
    stage, kv_stage = buffers.q.at(0, 0), buffers.k.at(0, 0)
    while tile < scheduler.number:
        mine, key, kv_head, sequence, begin, end, heads, _ = problem.own(tile)
        corner = mine.kv_box(sequence, kv_head, key)
        buffers.k.fill(kv_stage, inputs.k, corner)
        buffers.v.fill(kv_stage, inputs.v, corner)
        if OVERLAP:
            if round == 0:
                gdc_wait()
        for step in range(heads * (end - begin)):
            where = mine.block_at(sequence, kv_head, step, begin, end)
            if filled >= buffers.q.STAGES:
                meet(Q_EMPTY + stage.slot, Q_THREADS)  # slots of Q and dO are empty
            load_q(buffers, inputs.q, inputs.values, stage, where)
            load_do(buffers, inputs.do, inputs.values, stage, where)
            stage = stage.next()
            filled += 1
        kv_stage = kv_stage.next()
        tile = scheduler.claim(round)
        round += 1
    hear_rest(stage, filled, Q_EMPTY, Q_THREADS)
    if OVERLAP:
        if round == 0:  # or the next kernel, which waits for this one only, might be too early
            gdc_wait()
        gdc_launch_dependents()
    scheduler.retire()


@gluon.jit(do_not_specialize=COUNTS)
def backward_kernel(
    values, q, k, v, do, dq_sum, dk_out, dv_out,
    q_second, k_second, v_second, do_second, dq_second, dk_second, dv_second,
    counters, plan, slopes, bounds, spans, turns, sums, arrivals,
    q_length, kv_length, kv_heads, batch, section, window_left, window_right,
    scale, scale_log2, cap_scale, kv_apart, slopes_batch_stride, slopes_head_stride,
    batch_lines, head_lines, spanned_blocks,
    GROUP: gl.constexpr, LEFT: gl.constexpr, RIGHT: gl.constexpr, EDGE: gl.constexpr,
    CAP: gl.constexpr, RAGGED: gl.constexpr, PACKED: gl.constexpr, ALIBI: gl.constexpr,
    SPANS: gl.constexpr, ORDERED: gl.constexpr,
    OVERLAP: gl.constexpr, PARTS: gl.constexpr, TAIL: gl.constexpr, PANELS: gl.constexpr,
    PANELS_V: gl.constexpr,
    KIND: gl.constexpr, STAGES: gl.constexpr, KV_STAGES: gl.constexpr, SCHEDULER: gl.constexpr,
    EARLY: gl.constexpr, HELD: gl.constexpr
):  # fmt: skip
    """Divide the warps of a program, as the KIND of the configuration has them.

    Tensors come as boxes, then those of second panels: of one panel they are anything, and None
    where the kind has none. Of 64 K registers, those of a thread are the last list. With 200 for
    the narrow kind's consumers (and 88 for `accumulate`), ptxas makes products wait for each other.
    """
    if OVERLAP and (KIND != "narrow" or ORDERED or SPANS):
        gdc_wait()  # the narrow kind needs at once what is made before only for turns and intervals
    BLOCK_Q: gl.constexpr = q.block_type.shape[-2]
    KEYS: gl.constexpr = k.block_type.shape[-2]
    COUNTING: gl.constexpr = 8 if KIND == "pair" else 4 if KIND == "halves" else 1
    strides = slopes_batch_stride, slopes_head_stride, 0.0, 0.0
    mods = HeadMods(slopes, slopes, *as_tensors(strides), ALIBI, False)  # type: ignore[call-arg]
    lines = as_tensors((0, batch_lines, head_lines, spanned_blocks))
    numbers = as_tensors((
        0, kv_apart, 0, 0, 0, q_length, kv_length, kv_heads, batch, section, window_left,
        window_right, scale, scale_log2, cap_scale, 0
    ))  # fmt: skip
    key_spans = KeySpans(bounds, spans, *lines, WARPGROUP_ROWS, SPANS)  # type: ignore[call-arg]
    problem = KeyProblem(  # type: ignore[call-arg]
        plan, mods, key_spans, take_turns(turns, COUNTING, ORDERED), *numbers, GROUP, PARTS, TAIL,
        LEFT, RIGHT, EDGE, CAP, RAGGED, PACKED, BLOCK_Q, KEYS
    )  # fmt: skip
    parts = Parts(sums, arrivals)
    if KIND == "wide":
        buffers = make_wide_buffers(values, q, k, v, do, dq_sum, STAGES)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume_wide, (problem, buffers, dk_out, dv_out, parts, 0)),
                (consume_wide, (problem, buffers, dk_out, dv_out, parts, 1)),
                (produce_wide, (problem, buffers, q, k, v, do, values)),
                (add_wide, (problem, buffers, dq_sum)),
            ],
            [4, 1, 1],
            [240, 24, 24],
        )
    else:
        q, k = make_boxes(q, q_second, PANELS), make_boxes(k, k_second, PANELS)
        v, do = make_boxes(v, v_second, PANELS_V), make_boxes(do, do_second, PANELS_V)
        dk_out = make_boxes(dk_out, dk_second, PANELS)
        dv_out = make_boxes(dv_out, dv_second, PANELS_V)
        dq_sum = make_boxes(dq_sum, dq_second, PANELS if KIND == "narrow" else 1)
        inputs = Inputs(q, k, v, do, values)
        buffers = make_buffers(inputs, KIND, STAGES, KV_STAGES)
    if KIND == "pair":
        dq_out = make_tiles(dq_sum, 4), dq_sum  # between, and in memory
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume_pair, (problem, buffers, inputs, dq_out, dk_out, dv_out, parts, 0)),
                (consume_pair, (problem, buffers, inputs, dq_out, dk_out, dv_out, parts, 1)),
            ],
            [4],
            [256],
        )
    elif KIND == "halves":
        dq_tiles = make_tiles(dq_sum, 2)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume_halves, (problem, buffers, dk_out, dv_out, parts, 0)),
                (consume_halves, (problem, buffers, dk_out, dv_out, parts, 1)),
                (accumulate_and_load, (problem, buffers, inputs, dq_tiles, dq_sum)),
            ],
            [4, 4],
            [224, 56],
        )
    elif KIND == "narrow":
        addends = make_addends(dq_sum, k.width())
        RECEIVERS: gl.constexpr = 5 if ORDERED else 4  # with two adders or one
        scheduler = make_scheduler(problem.num_tiles(), counters, SCHEDULER, RECEIVERS)
        fence_async_shared()
        gl.warp_specialize(
            [
                (consume, (problem, buffers, scheduler, dk_out, dv_out, parts, EARLY, HELD, 0)),
                (consume, (problem, buffers, scheduler, dk_out, dv_out, parts, EARLY, HELD, 1)),
                (accumulate, (problem, buffers, scheduler, addends, dq_sum)),
                (produce, (problem, buffers, scheduler, inputs, OVERLAP)),
                (add, (problem, scheduler, addends, dq_sum, 0)),
                (add, (problem, scheduler, addends, dq_sum, 1)),
            ],
            [4, 4, 1, 1, 1],
            [208, 72, 24, 24, 24],
        )


launch_backward = Launcher(backward_kernel, launch_pdl=True)


def left_to_portable(request: Request) -> str | None:
    """Why a request that descriptors can address is left to the portable kernels, as a sentence,
    or None.
    """
    if request.is_deterministic and request.has_intervals:
        return (
            "deterministic gradients with intervals are left to the portable kernels: which tiles "
            "of keys add to a block of dQ, and so their order, is not known beforehand."
        )
    head_dim, head_dim_v = request.q.shape[3], request.v.shape[3]
    if max(head_dim, head_dim_v) > 128 and min(head_dim, head_dim_v) <= 64:
        return (
            f"head_dim {head_dim} and {head_dim_v} of v are left to the portable kernels: above "
            f"128, both must be above 64."
        )
    return forward_hopper.left_to_portable(request)


def backward(
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: None,
    do: torch.Tensor,
    dlse: torch.Tensor | None,
    config: BackwardConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of attention on a Hopper GPU; arguments and results as those of `fa2.backward`.

    Args:
        request: one that is not `left_to_portable`, on the current GPU.
        config: the schedule; None chooses by shape.

    Raises:
        ValueError: the configuration does not fit the request.
    """
    config = config or default_config(request)
    config.check(request)
    space = prepare(request, o, lse, do, dlse, config)
    given = *tensors(request, space, config), *numbers(request, config)
    launch_backward((num_programs(request, config),), given, all_constants(request, config))
    finish(request, space, config)
    return space.dq, space.dk, space.dv, space.dsink
