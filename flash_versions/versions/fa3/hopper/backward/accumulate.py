"""The warpgroup that computes dQ in FA3's backward for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from flash_versions.versions.fa3.hopper.backward.tiles import (
    DS_FULL,
    DS_THREADS,
    add_dq,
    multiply_dq,
    part_of_dims,
)
from flash_versions.versions.tiles.pipeline import meet
from flash_versions.versions.tiles.wgmma import unknown_zero


@gluon.jit
def multiply_part(ds_tile, k_tile, dq_sum, PART: gl.constexpr):
    """Issue a part of dQ = dS K, of the dims that a box of `dq_sum` has: a token to wait for."""
    if dq_sum.PANELS == 2:
        return multiply_dq(ds_tile, k_tile.panel(PART))
    else:
        return multiply_dq(ds_tile, part_of_dims(k_tile, PART, dq_sum.first.block_type.shape[3]))


@gluon.jit
def accumulate(problem, buffers, dq_sum):
    """The warpgroup of dQ: of each block, dQ = dS K, all dims or a part of them at a time, as the
    boxes of `dq_sum` are. If the second panel has 16 dims, registers suffice for both products at
    once: the first one is stored while the second one is computed.
    """
    WIDTH: gl.constexpr = dq_sum.first.block_type.shape[3]
    k_stage = buffers.k.at(0, 0)
    DIM_PARTS: gl.constexpr = 2 if dq_sum.PANELS == 2 else buffers.k.tile(k_stage).width() // WIDTH
    AHEAD: gl.constexpr = dq_sum.PANELS == 2 and dq_sum.second.block_type.shape[3] == 16
    problem, key, kv_head, sequence, begin, end, heads, _ = problem.own()
    ds_stage = buffers.ds.at(0, 0)
    counter, additions = problem.turns.counters, gl.to_tensor(0)  # of the block before
    buffers.k.wait(k_stage, begin < end)
    for member in range(heads):
        head = kv_head * problem.GROUP + member
        for block in range(begin, end):
            meet(DS_FULL + ds_stage.slot, DS_THREADS)
            ds_tile = buffers.ds.tile(ds_stage)
            k_tile = buffers.k.tile(buffers.k.at(unknown_zero(), 0))
            dq_token = multiply_part(ds_tile, k_tile, dq_sum, 0)
            if AHEAD:
                ahead_token = multiply_part(ds_tile, k_tile, dq_sum, 1)
            counter, additions = problem.take_turn(counter, additions, sequence, head, key, block)
            for part in gl.static_range(DIM_PARTS):
                if part > 0:
                    if AHEAD:
                        dq_token = ahead_token
                    else:
                        dq_token = multiply_part(ds_tile, k_tile, dq_sum, part)
                dq = warpgroup_mma_wait(1 if AHEAD and part == 0 else 0, deps=[dq_token])
                if part == DIM_PARTS - 1:
                    buffers.ds.release(ds_stage)
                row = problem.padded_first + block * problem.BLOCK_Q
                corner = [sequence, head, row, part * WIDTH]
                slot = ds_stage.slot if DIM_PARTS == 1 else part // dq_sum.PANELS
                add_dq(dq, buffers.dq.panel(part).index(slot), dq_sum.panel(part), corner)
            ds_stage = ds_stage.next()
    problem.turns.finish(counter, additions)
    tma.store_wait(0)
