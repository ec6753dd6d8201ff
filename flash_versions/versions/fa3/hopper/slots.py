"""Slots of K and of V: as many of both, or fewer of V, and the order in which they are filled; and
slots that a consumer gives back unread.

At head_dim 192, shared memory holds Q and three tiles of 128 keys: two slots of K and one of V. S
of a block is issued while P V of the block before runs, so K needs two slots. V's only slot is read
until this P V is done; it is filled again while S and the softmax of a later block run. Where V has
fewer slots than K (`Schedule.V_BEHIND`), the order of the work is another:

    as many slots     K0 Q V0  K1 V1  K2 V2  K3 V3
    fewer of V        K0 Q     K1 V0  K2 V1  K3 V2  V3

* The producer loads K of a block before V of the block before. It waits until V's slot is empty,
  and K would wait with it, although K's own slot has been empty for longer.
* The producer counts V's stages apart. To carry the stage of the block before under a second name,
  `before = stage`, is wrong: when a loop begins with the same values under two names, Triton takes
  the second one for a constant. The emulator, which runs Python, cannot see that.
* The last V of a tile comes before K and Q of the next tile.
* A consumer gives V's slot back before the softmax and not after it, unless LATE_WAIT keeps the
  wait for P V behind the softmax.
* A consumer passes its turn at the tensor cores on when it has issued S, and not after P V: S of
  the other consumers runs while V is loaded.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.operands import is_fp8
from flash_versions.versions.tiles.pipeline import (
    Stage,
    named_barrier_arrive,
    named_barrier_sync,
)
from flash_versions.versions.tiles.triton_compat import aggregate


@aggregate
class Stages:
    """The stages of a block's K and V in their pipelines."""

    k: Stage
    v: Stage  # k again if V has as many slots

    @gluon.jit
    def next(self):
        """The stages of the block after this one."""
        k = self.k.next()
        if self.v.STAGES == self.k.STAGES:
            return Stages(k, k)
        elif self.v.STAGES == 1:
            return Stages(k, only_slot(self.v.next()))
        else:
            return Stages(k, self.v.next())


@gluon.jit
def first_stages(buffers):
    """The stages of the first block."""
    k = buffers.k.at(0, 0)
    if buffers.v.first.STAGES == buffers.k.first.STAGES:
        return Stages(k, k)
    else:
        return Stages(k, buffers.v.at(0, 0))


@gluon.jit
def only_slot(stage):
    """A stage of a pipeline with one slot: the slot is phase >> 1, which is 0, but the compiler
    does not know this. Otherwise it would compute where the parts of the tile are before the loop,
    keep that in 32 registers, and spill them.
    """
    phase = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [stage.phase], dtype=gl.int32, is_pure=True, pack=1
    )
    return Stage(phase >> 1, stage.phase, stage.STAGES)


@gluon.jit
def fill_values(problem, buffers, stage, v, sequence, kv_head, key):
    """Producer: load a block of V from this key on; V is stored transposed in FP8."""
    if is_fp8(v.first.dtype):
        buffers.v.fill(stage, v, [sequence, kv_head, 0, key])
    else:
        buffers.v.fill(stage, v, problem.kv_box(sequence, kv_head, key))


@gluon.jit
def pass_over(buffers, schedule, stage, blocks, CONSUMER: gl.constexpr):
    """Consumer: give back the slots of so many blocks, of which none of its rows sees a key. To
    arrive before a slot is full could count as having read what was there before.
    """
    for _ in range(blocks):
        buffers.k.wait(stage.k)
        if schedule.PING_PONG:
            named_barrier_sync(CONSUMER)
            named_barrier_arrive(CONSUMER, schedule.CONSUMERS)
        buffers.k.release(stage.k)
        buffers.v.wait(stage.v)
        buffers.v.release(stage.v)
        stage = stage.next()
    return stage
