"""Slots of Q, K and V: how V is loaded, and how consumers give slots back, read or unread."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.operands import is_fp8
from flash_versions.versions.tiles.pipeline import named_barrier_arrive, named_barrier_sync


@gluon.jit
def fill_values(problem, buffers, stage, v, sequence, kv_head, block):
    """Producer: load a block of V, which is stored transposed in FP8."""
    key = block * problem.BLOCK_KV
    if is_fp8(v.first.dtype):
        buffers.v.fill(stage, v, [sequence, kv_head, 0, key])
    else:
        buffers.v.fill(stage, v, problem.kv_box(sequence, kv_head, key))


@gluon.jit
def pass_over(buffers, schedule, stage, blocks, CONSUMER: gl.constexpr):
    """Consumer: give back the slots of so many blocks, of which none of its rows sees a key: the
    stage behind them.

    To arrive before a slot is full could count as having read what was there before. K's slot comes
    before the turn, because the consumer that has the turn may be waiting for it.
    """
    for _ in range(blocks):
        buffers.k.wait(stage)
        buffers.k.release(stage)
        if schedule.PING_PONG:
            named_barrier_sync(CONSUMER)
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)
        buffers.v.wait(stage)
        buffers.v.release(stage)
        stage = stage.next()
    return stage
