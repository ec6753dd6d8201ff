"""Counters in memory by which programs of a grid wait for each other, and what TMA has written by
then.
"""

from functools import partial

import numpy as np
import pytest
import torch

from flash_versions.simulator.dtypes import float32, int32
from flash_versions.simulator.errors import AccessError, Deadlock
from flash_versions.simulator.gluon import tma
from flash_versions.simulator.gluon.machine import ORDERS, run_grid, using
from flash_versions.simulator.gluon.ptx import inline_asm_elementwise
from flash_versions.simulator.gluon.shared import Shared
from flash_versions.simulator.gluon.tma import descriptor
from flash_versions.simulator.memory import pointer_to
from flash_versions.simulator.state import here

ONE = 1, 1, 1
WAIT = """{
    .reg .pred elected, early;
    .reg .b32 counted;
    elect.sync _|elected, -1;
    @!elected bra passed;
    again:
    ld.acquire.gpu.global.u32 counted, [$1];
    setp.lt.u32 early, counted, $2;
    @early bra again;
    fence.proxy.async.global;
    passed:
    mov.u32 $0, 0;
}"""
COUNT = """{
    .reg .pred elected;
    cp.async.bulk.wait_group 0;
    elect.sync _|elected, -1;
    @elected red.release.gpu.global.add.u32 [$1], $2;
    mov.u32 $0, 0;
}"""


def call(asm, counter, number):
    arguments = [pointer_to(counter, "counter"), number]
    inline_asm_elementwise(asm, "=r,l,r", arguments, int32, is_pure=False, pack=1)


def in_turn(counter, found, stranger=0):
    """A program that appends its number when all with larger ones have."""
    program = here.program.number
    call(WAIT, counter, 4 * (3 - program + stranger))
    found.append(program)
    call(COUNT, counter, 1)


@pytest.mark.parametrize("resident", [1, 4])
def test_programs_take_turns(resident):
    """Each of four warps counts once, and the loop goes on when the counter has changed."""
    counter, found = torch.zeros(1, dtype=torch.int32), []
    with using(resident=resident, begun=lambda programs: reversed(range(programs))):
        run_grid(partial(in_turn, counter, found), (4, 1, 1), ())
    assert found == [3, 2, 1, 0] and int(counter) == 16


def test_a_turn_that_never_comes_is_a_dead_lock():
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Deadlock, match="kernel in .*in_turn"):
        run_grid(partial(in_turn, counter, [], 1), ONE, ())


def add_ones(memory):
    """Ask TMA to add a tile of ones."""
    tile = Shared(np.ones((1, 4), np.float32), float32)
    tma.async_atomic_add(descriptor(memory, [1, 4], [4, 1], [1, 4], None), [0, 0], tile)
    tma.store_wait(0)


def test_what_tma_has_read_is_in_memory_only_when_that_is_waited_for():
    memory, seen = torch.zeros(1, 4), []

    def kernel():
        add_ones(memory)
        seen.append(memory.sum().item())
        call(COUNT, torch.zeros(1, dtype=torch.int32), 1)
        seen.append(memory.sum().item())
        add_ones(memory)  # the end of the warps waits for the rest

    with using(order=ORDERS["late loads"]):
        run_grid(kernel, ONE, ())
    assert seen == [0, 4] and memory.tolist() == [[2, 2, 2, 2]]


def test_tma_behind_an_acquire_needs_a_fence():
    memory, counter = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)

    def kernel(asm):
        call(asm, counter, 0)
        add_ones(memory)

    run_grid(partial(kernel, WAIT), ONE, ())
    with pytest.raises(AccessError, match="a read of other programs without fence.proxy.async"):
        run_grid(partial(kernel, WAIT.replace("fence.proxy.async.global;", "")), ONE, ())
