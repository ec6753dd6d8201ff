"""Bugs that test_hopper_backward_emulated.py plants in FA3's backward for Hopper: a wait, a release
or a fence left out or misplaced, and tiles taken for others.
"""

from typing import NamedTuple

import torch

from tests.emulator.planted_bugs import WRONG, Bug


class Run(NamedTuple):
    """The call in which a bug shows."""

    M: int = 150
    N: int = 150
    D: int = 64
    kv_heads: int = 2  # of two query heads each
    schedule: str | None = None  # of CONFIGS; None chooses by head_dim
    dtype: torch.dtype = torch.bfloat16
    options: dict = {}
    low_scores: bool = False


# the usual ones are those of head_dim 64: S is issued early, V and K are held, and there are three
# stages
RUNS = {
    None: Run(),
    "in order": Run(schedule="as it is"),
    "in order, fp16": Run(schedule="as it is", dtype=torch.float16),
    "two slots": Run(N=600, kv_heads=1, schedule="as it is"),
    "more steps": Run(400, 400, kv_heads=1),
    "many tiles": Run(70, 600, kv_heads=2),
    "many tiles, one slot": Run(70, 600, kv_heads=2, schedule="as it is"),
    "wide": Run(D=256, kv_heads=1),
    "low scores": Run(kv_heads=1, low_scores=True),
    "causal": Run(kv_heads=1, options={"causal": True}),
    "window": Run(kv_heads=1, options={"window": (64, 10)}),
    "softcap": Run(kv_heads=1, schedule="as it is", options={"softcap": 2.0}),
    "keys without queries": Run(
        100, 600, kv_heads=1, options={"window": (100, None), "causal": True}
    ),
}
# Not among them, as what comes before says the same: the wait for K of the warpgroup of dQ (dS is
# computed with it). Nor the meeting of consumers at ALL_READ: in the emulator a box of 64 rows lies
# where these rows do, whatever its width.
# And a consumer that does not wait for its turn is right, too, if slower.
BUGS = {
    # ---- the producer
    "a slot of Q, and with it of dO, is filled before it is empty": Bug(
        "produce", [("meet(Q_EMPTY + stage.slot, Q_THREADS)  # slots", "pass  # slots")],
        "more arrivals|more threads",
    ),
    "rows of values are not counted": Bug(
        "Pipeline.load_with", [(" + values_desc.block_type.nbytes", "")], "dead-lock"
    ),
    "LSE is delta": Bug("load_q", [("head, 0, column", "head, 1, column")], WRONG),
    "delta is LSE": Bug("load_do", [("head, 1, column", "head, 0, column")], WRONG),
    "all of a group have the Q of one head": Bug(
        "KeyProblem.at_step", [("kv_head * self.GROUP + step", "kv_head + step")], WRONG
    ),
    # ---- slots of K and V
    "the next K is loaded before the slot is empty": Bug(
        "Pipeline.fill",
        [("mbarrier.wait(self.empty.index(stage.slot), stage.phase ^ 1)", "pass")],
        f"{WRONG}|more arrivals|in flight", "keys without queries",
    ),
    "slots of K are not given back": Bug(
        "give_back", [("buffers.k.release_loaded(kv_stage)", "pass")], "dead-lock", "many tiles"
    ),
    "slots of V are not given back": Bug(
        "give_back", [("buffers.v.release(kv_stage)", "pass")], "dead-lock", "many tiles"
    ),
    "slots are given back before dK and dV have left": Bug(
        "give_back", [("tma.store_wait(0)", "pass")], f"{WRONG}|in flight", "many tiles"
    ),
    "one slot: it is given back before dK and dV have left": Bug(
        "give_back", [("tma.store_wait(0)", "pass")], f"{WRONG}|in flight", "many tiles, one slot"
    ),
    "this tile's slot is given back": Bug(
        "consume", [("give_back(buffers, kv_stage.next())", "give_back(buffers, kv_stage)")],
        f"{WRONG}|dead-lock|arrivals|in flight", "many tiles",
    ),
    "a slot is given back that no tile had": Bug(
        "consume", [("if round > 0:", "if True:")], f"{WRONG}|dead-lock|arrivals", "many tiles"
    ),
    "all tiles have the K and V of the first slot": Bug(
        "consumer_half", [("slot + unknown_zero()", "unknown_zero()")], WRONG, "many tiles"
    ),
    "dQ: all tiles have the K of the first slot": Bug(
        "accumulate", [("kv_stage.slot + unknown_zero()", "unknown_zero()")], WRONG, "many tiles"
    ),
    # ---- the consumers
    "K is read before it is there": Bug(
        "first_state", [("buffers.k.wait(kv_stage)", "pass")], WRONG
    ),
    "V is read before it is there": Bug(
        "first_state", [("buffers.v.wait(kv_stage)", "pass")], WRONG
    ),
    "the first Q is read before it is there": Bug(
        "first_state", [("buffers.q.wait(stage)", "pass")], f"{WRONG}|more arrivals"
    ),
    "the first Q is waited for though none comes": Bug(
        "first_state", [("if any_query:", "if True:")], "dead-lock", "keys without queries"
    ),
    "in order: Q is read before it is there": Bug(
        "fold_queries", [("buffers.q.wait(stage)", "pass")], "more arrivals", "in order"
    ),
    "the next Q is read before it is there": Bug(
        "fold_queries",
        [("buffers.q.wait(stage.next(), more)", "pass")],
        f"more threads|more arrivals|{WRONG}",
    ),
    "a Q behind the last one is waited for": Bug(
        "fold_queries", [("stage.next(), more", "stage.next(), True")], "dead-lock"
    ),
    "the last block of every head ends the stream": Bug(
        "fold_all", [("member + 1 < heads, end, end - 1", "False, end, end - 1")], WRONG
    ),
    "no block ends the stream": Bug(
        "fold_all", [("member + 1 < heads, end, end - 1", "False, end, end")], "dead-lock"
    ),
    "dO is read before it is there": Bug(
        "fold_queries", [("buffers.do.wait(stage)", "pass")], f"{WRONG}|more arrivals"
    ),
    "in order: dO is read before it is there": Bug(
        "fold_queries", [("buffers.do.wait(stage)", "pass")], "more arrivals", "in order"
    ),
    "Q and dO are not released": Bug(
        "fold_queries",
        [("announce(Q_EMPTY + stage.slot, Q_THREADS)", "pass")],
        "produce 3 in .*meet",
    ),
    "Q is released while dK reads it": Bug(
        "fold_queries",
        [("announce(Q_EMPTY + stage.slot, Q_THREADS)", "pass"),
         ("    dv = state", "    announce(Q_EMPTY + stage.slot, Q_THREADS)\n    dv = state")],
        WRONG,
    ),
    "in order: Q is released while dK reads it": Bug(
        "fold_queries",
        [("announce(Q_EMPTY + stage.slot, Q_THREADS)", "pass"),
         ("    dv = state", "    announce(Q_EMPTY + stage.slot, Q_THREADS)\n    dv = state")],
        WRONG,
        "in order",
    ),
    "dP is read while it is in flight": Bug(
        "fold_queries", [("wait(do_tile.PANELS, deps", "wait(2, deps")], "in flight"
    ),
    "dV is read while it is in flight": Bug(
        "fold_queries", [("wait(dv_tokens, q_tile.PANELS + BEHIND)", "wait(dv_tokens, 3)")],
        "in flight",
    ),
    "dK is read while it is in flight": Bug(
        "fold_queries", [("wait(dk_tokens, BEHIND)", "wait(dk_tokens, 2)")], "in flight"
    ),
    "in order: dK is read while it is in flight": Bug(
        "fold_queries",
        [("wait(dk_tokens, BEHIND)", "wait(dk_tokens, 1)")],
        "in flight",
        "in order",
    ),
    "S is read while it is in flight": Bug(
        "fold_queries", [("wait(0, deps=[s_token])", "wait(1, deps=[s_token])")], "in flight"
    ),
    "in order: narrowed, neighbours change places": Bug(
        "conversion_ptx", [("bf16x2.f32 $0, $2, $1", "bf16x2.f32 $0, $1, $2")], WRONG, "in order"
    ),
    "in order: widened, neighbours change places": Bug(
        "conversion_ptx",
        [("shl.b32 $0, $2, 16; and.b32 $1", "shl.b32 $1, $2, 16; and.b32 $0")],
        WRONG,
        "in order",
    ),
    "fp16: narrowed, neighbours change places": Bug(
        "conversion_ptx",
        [("cvt.rn.f16x2.f32 $0, $2, $1", "cvt.rn.f16x2.f32 $0, $1, $2")],
        WRONG,
        "in order, fp16",
    ),
    "fp16: widened, neighbours change places": Bug(
        "conversion_ptx", [("{low, high}, $2", "{high, low}, $2")], WRONG, "in order, fp16"
    ),
    "in order: with softcap, dV is computed from the slope": Bug(
        "fold_queries", [("narrowed(p, do_tile.first) if problem.CAP else slope", "slope")],
        WRONG, "softcap",
    ),
    "keys past the end are not masked": Bug(
        "KeyProblem.masked", [("if self.EDGE:", "if False:")], WRONG, "low scores"
    ),
    "blocks that the diagonal cuts are not masked": Bug(
        "fold_all", [("range(begin, full_begin)", "range(begin, begin)"),
                     ("range(full_begin, full_end)", "range(begin, full_end)")], WRONG, "causal"
    ),
    "blocks that the window's left bound cuts are not masked": Bug(
        "fold_all", [("range(full_end, end)", "range(end, end)"),
                     ("range(full_begin, full_end)", "range(full_begin, end)")], WRONG, "window"
    ),
    "blocks are masked as if a consumer had all keys": Bug(
        "fold_all", [("problem.blocks(key, WARPGROUP_ROWS)", "problem.blocks(key, 1)")],
        WRONG, "causal",
    ),
    # ---- dS, from hand to hand
    "dS is announced before it is written": Bug(
        "hand_over",
        [("    fence_async_shared()\n    announce(DS_FULL + ds_stage.slot, DS_THREADS)\n", ""),
         ("    ds_tile = buffers", "    announce(DS_FULL + ds_stage.slot, DS_THREADS)\n"
          "    ds_tile = buffers")],
        "without a fence",
    ),
    "dS is announced without a fence": Bug(
        "hand_over", [("fence_async_shared()", "pass")], "without a fence"
    ),
    "dS is not announced": Bug(
        "hand_over", [("announce(DS_FULL + ds_stage.slot, DS_THREADS)", "pass")],
        "accumulate 2 in .*meet",
    ),
    "dS is overwritten while it is read": Bug(
        "fold_queries",
        [("buffers.ds.wait_empty(ds_stage)", "pass")],
        f"more threads|dead-lock|{WRONG}",
    ),
    "both consumers write the same part of dS": Bug(
        "hand_over",
        [("ds_tile.slice(CONSUMER * WARPGROUP_ROWS, WARP", "ds_tile.slice(0, WARP")],
        WRONG,
    ),
    "one part of dS is enough": Bug(
        "accumulate", [("slot, DS_THREADS", "slot, 256")], f"more threads|dead-lock|{WRONG}"
    ),
    "dS is read by two": Bug(
        "make_handover",
        [("make_barriers(STAGES, READERS)", "make_barriers(STAGES, 2)")],
        "dead-lock",
    ),
    # ---- left operands in registers
    "held: V is K": Bug("hold", [("half(buffers.v", "half(buffers.k")], WRONG),
    "held: K is V": Bug("hold", [("half(buffers.k", "half(buffers.v")], WRONG),
    "held: both consumers have the same rows of V": Bug(
        "hold", [("buffers.v, slot, CONSUMER", "buffers.v, slot, 0")], WRONG
    ),
    "held: both consumers have the same rows of K": Bug(
        "hold", [("buffers.k, slot, CONSUMER", "buffers.k, slot, 0")], WRONG
    ),
    # ---- the warpgroup of dQ
    "dS is read before it is written": Bug(
        "accumulate", [("meet(DS_FULL + ds_stage.slot, DS_THREADS)", "pass")],
        f"more threads|without a fence|dead-lock|{WRONG}",
    ),
    "dS is not released": Bug(
        "accumulate", [("buffers.ds.release(ds_stage)", "pass")], "consume 0 in .*wait_empty"
    ),
    "dS is released before its second half is read": Bug(
        "accumulate", [("if part == PARTS - 1:", "if part == 0:")],
        f"{WRONG}|without a fence", "in order",
    ),
    "dS is released while its second half is read": Bug(
        "accumulate",
        [("                if part == PARTS - 1:\n"
          "                    buffers.ds.release(ds_stage)\n", ""),
         ("                dq = warp", "                if part == PARTS - 1:\n"
          "                    buffers.ds.release(ds_stage)\n                dq = warp")],
        f"{WRONG}|without a fence", "two slots",
    ),
    "held: dS is released while it is read": Bug(
        "accumulate",
        [("                if part == PARTS - 1:\n"
          "                    buffers.ds.release(ds_stage)\n", ""),
         ("                dq = warp", "                buffers.ds.release(ds_stage)\n"
          "                dq = warp")],
        f"{WRONG}|without a fence", "more steps",
    ),
    "both halves of dQ are the first": Bug(
        "multiply_part", [("part_of_dims(k_tile, PART,", "part_of_dims(k_tile, 0,")], WRONG,
        "in order",
    ),
    "columns of dQ are not exchanged": Bug(
        "Addends.leave", [("dq = exchanged(dq)", "pass")], WRONG
    ),
    "columns of dQ are exchanged otherwise": Bug(
        "exchanged", [("(0, 1, 3, 2, 4)", "(0, 1, 4, 3, 2)")], WRONG
    ),
    # ---- the adders
    "dQ is overwritten before it is added": Bug(
        "Addends.leave", [("mbarrier.wait(self.empty.index(number), stage.phase ^ 1)", "pass")],
        f"{WRONG}|dead-lock", "two slots",
    ),
    "dQ is added without a fence": Bug(
        "Addends.leave", [("fence_async_shared()", "pass")], "without fence_async_shared"
    ),
    "dQ is not announced": Bug(
        "Addends.leave", [("mbarrier.arrive(self.full.index(number), count=1)", "pass")],
        "dead-lock",
    ),
    "dQ is added before it is there": Bug(
        "Addends.add",
        [("mbarrier.wait(self.full.index(stage.slot * self.PARTS + PART), stage.phase)", "pass")],
        "dead-lock",
    ),
    "dQ is overwritten while it leaves": Bug(
        "Addends.release",
        [("tma.store_wait(self.PARTS - 1 - part)", "pass")],
        f"{WRONG}|stores in flight",
    ),
    "the second half of dQ is overwritten while it leaves": Bug(
        "Addends.release",
        [("self.PARTS - 1 - part)", "1)")],
        f"{WRONG}|stores in flight",
        "in order",
    ),
    "slots of dQ are not given back": Bug(
        "Addends.release",
        [("mbarrier.arrive(self.empty.index(stage.slot * self.PARTS + part), count=1)", "pass")],
        "dead-lock",
    ),
    "both halves of dQ leave by one tile": Bug(
        "Addends.tile", [("stage.slot * OF_PANEL + PART % OF_PANEL", "stage.slot * OF_PANEL")],
        WRONG, "in order",
    ),
    "dQ of two blocks leaves by one tile": Bug(
        "Addends.tile", [("stage.slot * OF_PANEL + PART", "PART")], WRONG
    ),
    "the halves of dQ change places": Bug(
        "add", [("part * WIDTH", "(1 - part) * WIDTH")], WRONG, "in order"
    ),
    "dQ belongs to another head": Bug(
        "add", [("at_step(kv_head, step,", "at_step(kv_head, step % (end - begin),")], WRONG
    ),
    "dQ belongs to another block": Bug("add", [("block * mine", "begin * mine")], WRONG),
    # ---- dK and dV
    "dK leaves by a K that is read": Bug(
        "store", [("buffers.ds.wait_empty(state.ds_stage.next())", "pass")],
        f"{WRONG}|without a fence",
    ),
    "dK and dV of both consumers leave by one box": Bug(
        "store", [("kv_stage.slot * 2 + CONSUMER", "kv_stage.slot * 2")], WRONG
    ),
    "dK and dV leave by the other slot": Bug(
        "store", [("kv_stage.slot * 2", "(1 - kv_stage.slot) * 2")], f"{WRONG}|in flight",
        "many tiles",
    ),
    # ---- the consumers' turns
    "no consumer has the first turn": Bug(
        "consume", [("named_barrier_arrive(CONSUMER, 2)", "pass")], "named_barrier_sync"
    ),
    "a consumer keeps its turn": Bug(
        "fold_queries", [("named_barrier_arrive(CONSUMER, 2)", "pass")],
        "consume 1 in .*named_barrier_sync",
    ),
    "dK and dV are stored without a fence": Bug(
        "store_gradient", [("fence_async_shared()", "pass")], "without fence_async_shared"
    ),
    "the last tiles are not waited for": Bug(
        "consume", [("\n    tma.store_wait(0)\n", "\n")], "stores in flight"
    ),
    # ---- head_dim 256
    "wide: P is read before it is written": Bug(
        "fold_queries_wide", [("meet(P_DONE, CONSUMER_THREADS)", "pass")],
        f"{WRONG}|without a fence", "wide",
    ),
    "wide: dS is read before it is written": Bug(
        "fold_queries_wide", [("meet(DS_DONE, CONSUMER_THREADS)", "pass")],
        f"{WRONG}|without a fence", "wide",
    ),
    "wide: P is announced without a fence": Bug(
        "fold_queries_wide",
        [("    fence_async_shared()\n    meet(P_DONE", "    meet(P_DONE")],
        "without a fence", "wide",
    ),
    "wide: dS is announced without a fence": Bug(
        "fold_queries_wide",
        [("    fence_async_shared()\n    meet(DS_DONE", "    meet(DS_DONE")],
        "without a fence", "wide",
    ),
    "wide: Q is released while it is read": Bug(
        "fold_queries_wide",
        [("    announce(Q_READ + q_stage.slot, Q_THREADS)\n", ""),
         ("    dv = warp", "    announce(Q_READ + q_stage.slot, Q_THREADS)\n    dv = warp")],
        WRONG,
        "wide",
    ),
    "wide: dO is released while it is read": Bug(
        "fold_queries_wide",
        [("    announce(DO_READ + do_stage.slot, Q_THREADS)\n", ""),
         ("    dp = warp", "    announce(DO_READ + do_stage.slot, Q_THREADS)\n    dp = warp")],
        f"{WRONG}|without a fence",
        "wide",
    ),
    "wide: dO is overwritten while it is read": Bug(
        "produce_wide", [("meet(DO_READ + do_stage.slot, Q_THREADS)", "pass")],
        "more arrivals|more threads", "wide",
    ),
    "wide: dQ is overwritten while it leaves": Bug(
        "add_wide", [("tma.store_wait(1 - consumer)", "pass")], WRONG, "wide"
    ),
    "wide: dQ is overwritten before it is added": Bug(
        "leave_part", [("mbarrier.wait(buffers.dq_empty.index(CONSUMER), 1 - PART)", "pass")],
        f"{WRONG}|more threads|more arrivals|dead-lock|without", "wide",
    ),
    "wide: dQ is added without a fence": Bug(
        "leave_part", [("fence_async_shared()", "pass")], "without", "wide"
    ),
    "wide: dQ is added before it is written": Bug(
        "add_wide", [("meet(DQ_FULL + consumer, ADD_THREADS)", "pass")],
        f"{WRONG}|more threads|more arrivals|dead-lock|without", "wide",
    ),
    "wide: both consumers have the same dims of dQ": Bug(
        "part_of_dq", [("half_of_dims(k_tile, CONSUMER)", "half_of_dims(k_tile, 0)")], WRONG, "wide"
    ),
}  # fmt: skip
