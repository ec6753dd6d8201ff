"""Turns: programs add to dQ in a fixed order, so every run gives the same bits.

What the fast path gives up. Each tile of keys adds to the dQ of every block of queries that sees
it. A sum in fp32 depends on the order of its terms, and programs reach a block in any order.

The order. The last tile of keys adds first. A tile's turn at a block is the number of tiles behind
it that the block sees (`KeyProblem.tiles_behind`). Each block has a counter in memory. Before a
program adds to a block, it waits until the counter has reached its turn. When its addition is
complete in memory, it increments the counter.

Why no program waits forever. A program takes a ticket from a counter for each of its tiles, and
tickets give out the tiles of a head from the last to the first. A tile waits only for tiles behind
it, so only for lower tickets, which programs that have begun have taken. A program has its tiles in
the order of their tickets. So of all tiles that are not done, the one with the lowest ticket waits
for none. This holds for every order in which a GPU starts programs and for any number of them that
run at once, so a GPU may be shared.

Of a group in parts, a tile that few queries see is the first part's, with the query heads of all.
Under a causal mask those are a head's last tiles: parts may follow one another, as tiles of the
others wait for lower tickets then. With a bound on the left they may be its first tiles, too, which
wait for tiles of all parts: so parts alternate (`config.heads_of_section`).

How long programs wait. Under a causal mask, the tile behind is two blocks of queries ahead, because
it is not seen by the first two. Without a causal mask, all tiles of a head start at the first
block, and each has to follow the one behind it. So programs alternate between the heads of a
section (`config.heads_of_section`), and a head's tiles start at intervals.

What a step costs. One thread of a warp that has TMA add does this, for its block j and its block i
before:

    read the counter of block j; wait for TMA's additions to block i
    fence; counter of block i += 1
    until counter of block j == turn: read it again; fence of proxies
    TMA: dQ_j += tile

From TMA's addition to the next turn this warp only waits, at head_dim 64 for longer than a step
takes. So this warp has nothing else to do: it is an adder, and two of them alternate
(`accumulate.py`). With tiles of 64 keys there is one (`wider/wide.py`). Where registers are left
for none (`wider/halves.py`, `wider/pair.py`), each warpgroup that computes dQ counts the block
before in the next step, while the tensor cores compute. By then its addition has usually reached
memory.

There, only a thread of a warpgroup's first warp issues TMA's additions, so only it can wait for
them. All four warps count nevertheless: with control flow or data that depends on the warp, ptxas
no longer treats the loops of the kernel as uniform, and each step of the consumers has 100
instructions more. A warp increments a counter only after it has seen its own turn. So a counter
that has reached the turn times the number of warps that count includes the first warps of all tiles
behind.

Source: the semaphores of FlashAttention 2's and 3's deterministic backward; the order under a
causal mask is that of Dao-AILab/flash-attention, pull request 1893.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.tiles.triton_compat import aggregate


@gluon.constexpr_function
def finish_ptx():
    """PTX that waits until TMA's additions are in memory, and then counts them. `wait_group.read`
    would wait until TMA has read the tile, which is earlier. No fence of proxies is needed: the
    completion of what TMA does includes one.
    """
    return """{
        .reg .pred elected;
        elect.sync _|elected, -1;
        @!elected bra counted;
        cp.async.bulk.wait_group 0;
        red.release.gpu.global.add.u32 [$1], $2;
        counted:
        bar.warp.sync -1;
        mov.u32 $0, 0;
    }"""


@gluon.constexpr_function
def advance_ptx():
    """PTX that does the same for one counter, and waits until another one has reached a turn.

    The second counter is read before the wait for the additions, so that both take their time at
    once; the fence is behind both, and in front of the count. The fence of proxies is for TMA,
    which otherwise might add before the counter was read.
    """
    return """{
        .reg .pred elected, reached, early;
        .reg .b32 counted;
        elect.sync _|elected, -1;
        @!elected bra passed;
        ld.relaxed.gpu.global.u32 counted, [$3];
        cp.async.bulk.wait_group 0;
        fence.acq_rel.gpu;
        red.relaxed.gpu.global.add.u32 [$1], $2;
        setp.ge.u32 reached, counted, $4;
        @reached bra turn;
        again:
        ld.acquire.gpu.global.u32 counted, [$3];
        setp.lt.u32 early, counted, $4;
        @early bra again;
        turn:
        fence.proxy.async.global;
        passed:
        bar.warp.sync -1;
        mov.u32 $0, 0;
    }"""


@aggregate
class Turns:
    """The counters of a launch, and the ticket of a program. If not ON, programs add in any order,
    and the pointer is any.
    """

    counters: gl.tensor  # int32, 0 at the launch: tickets, then additions, see `counter`
    ticket: gl.tensor
    COUNTING: gl.constexpr  # warps of a program that count its additions to a block
    ON: gl.constexpr

    @gluon.jit
    def number(self):
        """The first, or only, tile of the program, as `KeyProblem.locate` counts them."""
        if self.ON:
            return self.ticket
        else:
            return gl.program_id(0)

    @gluon.jit
    def counter(self, block, heads, head):
        """The counter of a block of a head; blocks are counted through all sequences."""
        return self.counters + (1 + block * heads + head)

    @gluon.jit
    def advance(self, before, additions, counter, turn):
        """Count the additions to the block before, and wait until it is this program's turn at a
        block. Nothing that TMA is asked to add later comes earlier.
        """
        ASM: gl.constexpr = advance_ptx()
        counts = turn * self.COUNTING
        gl.inline_asm_elementwise(
            ASM, "=r,l,r,l,r", [before, additions, counter, counts], dtype=gl.int32, is_pure=False,
            pack=1,
        )  # fmt: skip

    @gluon.jit
    def finish(self, counter, additions):
        """Count the additions to the last block, if tiles have turns."""
        if self.ON:
            ASM: gl.constexpr = finish_ptx()
            gl.inline_asm_elementwise(
                ASM, "=r,l,r", [counter, additions], dtype=gl.int32, is_pure=False, pack=1
            )


@gluon.jit
def take_turns(counters, COUNTING: gl.constexpr, ON: gl.constexpr):
    """Take a ticket, if tiles have turns."""
    ticket = gl.to_tensor(0)
    if ON:
        ticket = gl.atomic_add(counters, 1, sem="relaxed")
    return Turns(counters, ticket, COUNTING, ON)
