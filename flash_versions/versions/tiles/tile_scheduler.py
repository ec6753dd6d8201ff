"""Schedulers that hand out tiles to persistent programs, and their counters in memory."""

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.runtime import driver

from flash_versions.dispatch.replay.recording import make_lasting
from flash_versions.versions.tiles.triton_compat import aggregate


@gluon.constexpr_function
def claims(kind):
    """Whether programs claim tiles from a counter."""
    return kind in ("dynamic", "tickets")


@aggregate
class Scheduler:
    """Hands out the tiles 0 .. number - 1 to programs, round after round.

    "grid": a program for each tile; the hardware starts one where another has ended.
    "static": of n persistent programs, p takes tiles p, 2n - 1 - p, 2n + p, ...: back and forth, so
        that where tiles get lighter, the program with the heaviest tile of one round has the
        lightest of the next.
    "dynamic": the producer of a persistent program claims its next tile from a counter in memory,
        long before its consumers are done with this one, and leaves it for them in one of two
        slots.
    "tickets": as "dynamic", but tiles are handed out in the order in which programs begin: a
        program takes its first tile from the counter, too, before there is a scheduler. The
        host, or a kernel before, sets the counter to 0.
    """

    number: gl.tensor
    counters: gl.tensor  # pointer to int32, 0 at the launch: tiles claimed, programs retired
    claimed: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    KIND: gl.constexpr

    @gluon.jit
    def claim(self, round):
        """Producer: the tile of the round after this one; `number` or more if there is none."""
        if claims(self.KIND):
            tile = gl.atomic_add(self.counters, 1)
            if self.KIND == "dynamic":
                tile += gl.num_programs(0)
            slot = round & 1
            mbarrier.wait(self.empty.index(slot), ((round >> 1) & 1) ^ 1)
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            self.claimed.index(slot).store(gl.full([1], tile, gl.int32, layout))
            mbarrier.arrive(self.full.index(slot), count=1)
            return tile
        else:
            return self.following(round)

    @gluon.jit
    def receive(self, round):
        """Consumer: what the producer has claimed in this round."""
        if claims(self.KIND):
            slot = round & 1
            mbarrier.wait(self.full.index(slot), (round >> 1) & 1)
            layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
            tile = gl.max(self.claimed.index(slot).load(layout), axis=0)
            mbarrier.arrive(self.empty.index(slot), count=1)
            return tile
        else:
            return self.following(round)

    @gluon.jit
    def following(self, round):
        """The tile of the round after this one, where the round decides it."""
        if self.KIND == "grid":
            return self.number
        else:
            programs, program = gl.num_programs(0), gl.program_id(0)
            backwards = (round & 1) == 0
            position = gl.where(backwards, programs - 1 - program, program)
            return (round + 1) * programs + position

    @gluon.jit
    def retire(self):
        """Producer, when there is no tile left: the last program leaves the counters at 0."""
        if self.KIND == "dynamic":
            if gl.atomic_add(self.counters + 1, 1) == gl.num_programs(0) - 1:
                gl.store(self.counters, 0)
                gl.store(self.counters + 1, 0)


@gluon.jit
def make_scheduler(number, counters, KIND: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate a scheduler for so many tiles."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    claimed = gl.allocate_shared_memory(gl.int32, [2, 1], layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    if claims(KIND):  # the other kinds have no barriers
        for slot in gl.static_range(2):
            mbarrier.init(full.index(slot), count=1)
            mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Scheduler(gl.to_tensor(number), counters, claimed, full, empty, KIND)


@gluon.jit
def find_piece(number, whole, PARTS: gl.constexpr):
    """(tile, piece) of a program's number, where PARTS programs share each tile from number `whole`
    on: pieces are counted from 0, and a program with a whole tile has a piece below 0.
    """
    piece = number - whole
    return gl.where(piece < 0, number, whole + piece // PARTS), piece


@gluon.jit
def blocks_of_piece(begin, end, piece, PARTS: gl.constexpr):
    """(begin, end) of a piece's share of the blocks of its tile."""
    part, blocks = piece % PARTS, end - begin
    first, last = begin + blocks * part // PARTS, begin + blocks * (part + 1) // PARTS
    return gl.where(piece < 0, begin, first), gl.where(piece < 0, end, last)


class Counters:
    """Sets of counters for launches, 0 before and after each.

    Launches of one stream come one after the other and share a set. A launch that is captured in a
    graph gets a set for itself, as the graph may be replayed in any stream; if no set is left, one
    that the graph itself clears at every replay, which takes two microseconds.

    Args:
        numbers: counters of a set; a dynamic scheduler needs two.
        launches: how many sets there are.
    """

    SECTOR = 8  # int32: counters of two launches share no sector of memory

    def __init__(self, numbers: int = 2, launches: int = 4096) -> None:
        self.numbers, self.launches = numbers, launches
        self.free: dict[torch.device, list[torch.Tensor]] = {}
        self.of_stream: dict[tuple[torch.device, int], torch.Tensor] = {}

    def take(self, device: torch.device, least: int = 0) -> torch.Tensor:
        """A set for the next launch in the current stream, int32 on the device; a new one, cleared
        for this launch, if it needs `least` counters and a set has fewer.
        """
        if device.type != "cuda" or least > self.numbers:
            return torch.zeros(max(least, self.numbers), dtype=torch.int32, device=device)
        if torch.cuda.is_current_stream_capturing():
            free = self.free.get(device)
            if free:
                return free.pop()
            return torch.zeros(self.numbers, dtype=torch.int32, device=device)
        key = (device, driver.active.get_current_stream(device.index))
        if key not in self.of_stream:
            if not self.free.get(device):
                apart = -(-self.numbers // self.SECTOR) * self.SECTOR
                made = torch.zeros((self.launches, apart), dtype=torch.int32, device=device)
                torch.cuda.current_stream(device).synchronize()  # other streams may use them
                self.free[device] = list(made[:, : self.numbers])
            mine = self.of_stream[key] = self.free[device].pop()
            make_lasting(mine)
        return self.of_stream[key]
