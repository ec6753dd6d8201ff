"""Blocks of queries folded by halves into dK and dV: what `halves.py` and `pair.py` share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma_wait

from flash_versions.versions.fa3.hopper.backward.tiles import (
    consumer_half,
    half_of_values,
    multiply_into,
    narrowed,
    widened,
)
from flash_versions.versions.fa3.hopper.panels import multiply_qk, zero_output
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout


@gluon.jit
def multiply_scores(buffers, stage, HALF: gl.constexpr, CONSUMER: gl.constexpr):
    """Issue S^T of a consumer's keys and half of the queries in a slot: a token to wait for."""
    q_tile = buffers.q.tile(stage)
    ROWS: gl.constexpr = q_tile.first.shape[0] // 2
    k_rows = consumer_half(buffers.k, 0, CONSUMER).pair()
    return multiply_qk(k_rows, q_tile.rows(HALF * ROWS, ROWS))


@gluon.jit
def first_sums(problem, buffers, more, CONSUMER: gl.constexpr):
    """dK, dV and S^T of the first block's first half, before the first step, when K and V have
    landed; all 0 if there is no block.
    """
    dk = zero_output(buffers.k.tile(buffers.k.at(0, 0)), False)
    dv = zero_output(buffers.v.tile(buffers.v.at(0, 0)), False)
    ROWS: gl.constexpr = problem.BLOCK_Q // 2
    stage = buffers.q.at(0, 0)
    s = gl.zeros([WARPGROUP_ROWS, ROWS], gl.float32, accumulator_layout(ROWS))
    if more:
        buffers.k.wait(buffers.k.at(0, 0))
        buffers.q.wait(stage)
        s = warpgroup_mma_wait(0, deps=[multiply_scores(buffers, stage, 0, CONSUMER)])
        buffers.v.wait(buffers.v.at(0, 0))
    return dk, dv, s


@gluon.jit
def fold_by_halves(
    sums, problem, buffers, stages, tiles, query, key, masked, more, DO_APART: gl.constexpr,
    CONSUMER: gl.constexpr
):  # fmt: skip
    """Fold a block of queries into dK and dV of a consumer's keys, one half and then the other, and
    hand its dS over.

    All that a step does, in the order in which it does it.

    Args:
        sums: dK, dV and S^T of the block's first half.
        problem: of the query head.
        buffers: what the partitions share.
        stages: of Q, of dO and of dS.
        tiles: their tiles.
        query: the block's first.
        key: the consumer's first.
        masked: not all of these keys are seen by all of these queries.
        more: the block is not the last one.
        DO_APART: slots of dO are given back by themselves; else with those of Q.
        CONSUMER: which one, 0 or 1.

    Returns:
        dK, dV and S^T of the next block's first half. After the last block the slot holds old data;
        this S is never used.
    """
    ROWS: gl.constexpr = problem.BLOCK_Q // 2
    dk, dv, s = sums
    q_stage, do_stage, ds_stage = stages
    q_block, do_block, ds_block = tiles
    ds_rows = ds_block.slice(CONSUMER * WARPGROUP_ROWS, WARPGROUP_ROWS, dim=0)
    for half in gl.static_range(2):
        q_tile, do_tile = q_block.rows(half * ROWS, ROWS), do_block.rows(half * ROWS, ROWS)
        lse = half_of_values(buffers.lse, q_stage.slot, s, half)
        p, slope = problem.probabilities(s, lse, key, query + half * ROWS, masked)
        slope = narrowed(slope, do_tile.first)
        p = narrowed(p, do_tile.first) if problem.CAP else slope
        if half == 0:
            buffers.do.wait(do_stage)
        dp_token = multiply_qk(consumer_half(buffers.v, 0, CONSUMER).pair(), do_tile)
        dv_tokens = multiply_into(dv, p, do_tile)
        dp = warpgroup_mma_wait(do_tile.PANELS, deps=[dp_token])  # dV is in flight
        if half == 0:
            buffers.ds.wait_empty(ds_stage)
        delta = half_of_values(buffers.delta, do_stage.slot, s, half)
        ds = (widened(slope) * (dp - delta[None, :])).to(q_tile.first.dtype)
        ds_rows.slice(half * ROWS, ROWS, dim=1).store(ds)
        if half == 1:
            buffers.ds.publish(ds_stage)
        dk_tokens = multiply_into(dk, ds, q_tile)
        dv = dv.wait(dv_tokens, q_tile.PANELS)
        if half == 0:
            s_token = multiply_scores(buffers, q_stage, 1, CONSUMER)
        else:
            if DO_APART:
                buffers.do.release(do_stage)
            buffers.q.wait(q_stage.next(), more)
            s_token = multiply_scores(buffers, q_stage.next(), 0, CONSUMER)
        dk = dk.wait(dk_tokens, q_tile.PANELS)
        if half == 1:
            buffers.q.release(q_stage)
        s = warpgroup_mma_wait(0, deps=[s_token])
    return dk, dv, s
