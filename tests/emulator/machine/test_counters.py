"""Counters in memory by which programs of a grid wait for each other, and what TMA has written by
then, in the emulator.
"""

from functools import partial

import pytest
import torch

from flash_versions.dispatch.emulator import machine
from flash_versions.dispatch.emulator.machine import Deadlock, here, run_grid
from flash_versions.dispatch.emulator.ptx import elementwise
from flash_versions.dispatch.emulator.tma import TensorDescriptor, tma
from flash_versions.dispatch.emulator.values import Pointer

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
    elementwise(asm, "=r,l,r", [Pointer(counter), torch.tensor(number).int()], torch.int32, 1)


def in_turn(counter, found, stranger=0):
    """A program that appends its number when all with larger ones have."""
    program = int(here.partition.program.id)
    call(WAIT, counter, 4 * (3 - program + stranger))
    found.append(program)
    call(COUNT, counter, 1)


@pytest.mark.parametrize("resident", [1, 4])
def test_programs_take_turns(resident, monkeypatch):
    """Each of four warps counts once, and the loop goes on when the counter has changed."""
    monkeypatch.setattr(machine, "RESIDENT", resident)
    monkeypatch.setattr(machine, "begun", lambda programs: reversed(range(programs)))
    counter, found = torch.zeros(1, dtype=torch.int32), []
    run_grid(partial(in_turn, counter, found), 4, ())
    assert found == [3, 2, 1, 0] and int(counter) == 16


def test_a_turn_that_never_comes_is_a_dead_lock():
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(Deadlock, match="program 0, kernel in .*in_turn"):
        run_grid(partial(in_turn, counter, [], 1), 1, ())


class Tile:
    """A tile in shared memory."""

    def __init__(self, data):
        self.data, self.shape = data, list(data.shape)


def test_what_tma_has_read_is_in_memory_only_when_that_is_waited_for(monkeypatch):
    monkeypatch.setattr(machine, "order", machine.ORDERS["late loads"])
    memory, seen = torch.zeros(1, 4), []

    def kernel():
        descriptor = TensorDescriptor(memory, [1, 4], [4, 1], [1, 4], None)
        tma.async_atomic_add(descriptor, [0, 0], Tile(torch.ones(1, 4)))
        tma.store_wait(0)
        seen.append(memory.sum().item())
        call(COUNT, torch.zeros(1, dtype=torch.int32), 1)
        seen.append(memory.sum().item())
        tma.async_atomic_add(descriptor, [0, 0], Tile(torch.ones(1, 4)))
        tma.store_wait(0)  # the end of the warps waits for the rest

    run_grid(kernel, 1, ())
    assert seen == [0, 4] and memory.tolist() == [[2, 2, 2, 2]]


def test_tma_behind_an_acquire_needs_a_fence():
    memory, counter = torch.zeros(1, 4), torch.zeros(1, dtype=torch.int32)

    def kernel(asm):
        call(asm, counter, 0)
        descriptor = TensorDescriptor(memory, [1, 4], [4, 1], [1, 4], None)
        tma.async_atomic_add(descriptor, [0, 0], Tile(torch.ones(1, 4)))
        tma.store_wait(0)

    run_grid(partial(kernel, WAIT), 1, ())
    with pytest.raises(AssertionError, match="behind a read without fence.proxy.async"):
        run_grid(partial(kernel, WAIT.replace("fence.proxy.async.global;", "")), 1, ())
