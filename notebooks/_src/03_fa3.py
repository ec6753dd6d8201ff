# %% [markdown]
# # FA3: load, multiply and exponentiate at the same time
#
# FA2 loads a tile, multiplies, computes exponentials and multiplies again. On a Hopper GPU three different units do
# these steps, and all three could work at the same time. FA3 changes no formula. It changes which warps do what, and
# when:
#
# * **Asynchronous copies.** One thread requests a whole tile, and a copy engine, TMA, fetches it.
# * **Asynchronous products.** A warpgroup (four warps) issues a matrix product and goes on while the tensor cores
#   compute it. The instruction is called WGMMA.
# * **Roles.** One warp only loads. The other warps only compute.
# * **Order.** With a causal mask some tiles have more work than others. FA3 starts the tiles of all heads in the order
#   of their work, most work first.
# * **8-bit numbers**, as an option. The tensor cores multiply them at twice the rate.
#
# Time: about 80 minutes. Read [02_fa2](02_fa2.ipynb) first, which explains the online softmax in the form that this
# notebook uses. [A GPU in ten words](../docs/learn/gpu.md) shows the units of a GPU. You need no GPU. Cells that begin
# with `%%needs_triton` need Linux.

# %% tags=["hide-cell"]
# %matplotlib inline
import json

import numpy as np
import torch
from IPython.display import display
from lessons import changes, check, checked, guess, instructions, measured, record
from lessons import recompiled, show, show_plain
from lessons.pictures.pipeline import attend, gantt
from lessons.pictures.scores import tiles
from lessons.pictures.scores.schedule import finish_time, starting_orders
from lessons.practice.folded import display_answer
from lessons.tables import say, table

from flash_versions.bench.results import RESULTS, ablation_ratios, read_results, shapes
from flash_versions.dispatch.precision import Fp8
from flash_versions.plot.figures import EXP2_PER_TENSOR_FLOP, TENSOR_TFLOPS
from flash_versions.versions.fp8.quantize import dequantize, quantize
from flash_versions.versions.tiles import pipeline
from flash_versions.versions.tiles.tma import describe

# %% [markdown]
# ## What FA2 wastes
#
# The cell below compiles FA2's kernel for a Hopper GPU and lists the events of its inner loop in their order.
# (Compiling needs no GPU. It takes a while the first time.) `HGMMA` is the machine instruction for a WGMMA, a product
# on the tensor cores (`smem` if both operands are in shared memory, `regs` if one is in registers), `MUFU.EX2` an
# exponential on the special function unit, `LDGSTS` a copy of 16 bytes into shared memory. `BAR.SYNC` makes warps wait
# for each other. `wait 0` waits until all products are finished. `x8` means that eight such instructions follow each
# other.

# %% tags=["hide-input"]
# %%needs_triton
fa2 = instructions("fa2", "sm_90", causal=True)


def names(found):
    """The kinds of events in the first hot loop, in their order."""
    return [name for name, _ in found["hot_loops"][0]["events"]]


def events(found):
    """The same as one line, with the number of instructions."""
    loop = found["hot_loops"][0]["events"]
    return " → ".join(f"{name} x{times}" if times > 1 else name for name, times in loop)


print(events(fa2))
order = [names(fa2).index(x) for x in ("HGMMA smem", "wait 0", "MUFU.EX2", "HGMMA regs")]
checked("fa2_in_turn", order == sorted(order))

# %% [markdown]
# Read the line from the left. The warps issue S = Q Kᵀ, **wait** for it, compute all exponentials of the tile, and then
# issue P V. While they compute the exponentials, they give the tensor cores nothing to do.

# %% [markdown]
# **Change one line.** FA2's loop at least loads ahead: `LDGSTS` copies a later block while this one is computed.
# `num_stages=3` in `the_line` asks for it. Ask for one stage, and the cell compiles FA2 with your line, in a copy of
# the package. What happens to the copies, and which warps wait now?

# %%
# %%needs_triton
the_line = "128: LaunchConfig(128, 128, num_warps=8, num_stages=3),"
my_line = the_line  # change it


def with_line(line):
    """FA2 with another line."""
    return recompiled("versions/fa2/forward.py", the_line, line, "fa2", causal=True)


changed = with_line(my_line)
print(f"copies in the code: {fa2['cp_async']} -> {changed['cp_async']}")
print(events(changed))

# %% tags=["hide-input"]
# %%needs_triton
one_stage = with_line(the_line.replace("num_stages=3", "num_stages=1"))
display_answer(
    f"{fa2['cp_async']} -> {one_stage['cp_async']} asynchronous copies: the warps load a block themselves, through "
    f"registers, and wait for it: {events(one_stage)}"
)

# %% [markdown]
# What do the turns cost? From the fixed rates of an SM follow the cycles that the products and the exponentials of one
# tile need. If they come in turns, their sum limits the speed; the next table has this limit beside the speed that FA2
# reaches on an H200.

# %% tags=["hide-input"]
results = read_results()
FLOP_PER_CYCLE = 16 / EXP2_PER_TENSOR_FLOP  # of an SM, at 16 exponentials a cycle


def tflops(version, head_dim, length=16384):
    """Measured TFLOP/s of a forward without a mask."""
    groups = shapes(results, "table").values()
    found = {(r["D"], r["N"], r["causal"]): r["tflops"] for g in groups for r in [g[version]]}
    return found[head_dim, length, False]


rows, busy = [], {}
for head_dim in (64, 128, 256):
    products = 4 * 128 * 128 * head_dim / FLOP_PER_CYCLE  # S and P V of a tile of 128 x 128
    exponentials = 128 * 128 / 16
    busy[head_dim] = products / (products + exponentials)
    rows.append(
        [head_dim, f"{products:.0f}", f"{exponentials:.0f}", f"{busy[head_dim]:.0%}",
         f"{busy[head_dim] * TENSOR_TFLOPS:.0f}", f"{tflops('fa2', head_dim):.0f}"]
    )  # fmt: skip
table(
    ["head_dim", "cycles of products, tile of 128 x 128", "cycles of exponentials",
     "tensor cores busy, at most", "TFLOP/s, at most", "TFLOP/s of FA2, measured"],
    rows,
)  # fmt: skip
say(
    f"If an SM does the two in turn, the tensor cores are busy at most {busy[64]:.0%} of the time "
    f"at head_dim 64, {busy[128]:.0%} at 128 and {busy[256]:.0%} at 256, *even if everything else "
    f"is perfect*."
)

# %% [markdown]
# FA3 keeps the two units busy at the same time. (The other remedy is to make exponentials cheaper: [FA4](04_fa4.ipynb)
# does that.)

# %% [markdown]
# ## Overlap by hand
#
# Take four queries and four keys, one key to a block. Both loops below walk from the last block of keys to the first
# one, as FA3's kernel for Hopper does: with a causal mask only the first block then needs the mask.
#
# First FA2's order of operations: S, softmax and P V of one block after the other.

# %%
torch.manual_seed(0)
q, k, v = (torch.randint(-2, 3, (4, 4)).float() for _ in range(3))


def softmax_step(s, row_max, row_sum):
    """One step of the online softmax, in powers of two: (p, row_max, row_sum, alpha)."""
    new_max = torch.maximum(row_max, s.amax(1))
    p, alpha = torch.exp2(s - new_max[:, None]), torch.exp2(row_max - new_max)
    return p, new_max, alpha * row_sum + p.sum(1), alpha


def in_order(log):
    """S, softmax, P V of one block after the other, from the last block to the first."""
    acc, row_max, row_sum = torch.zeros(4, 4), torch.full((4,), -torch.inf), torch.zeros(4)
    for j in (3, 2, 1, 0):
        s = q @ k[j : j + 1].T
        p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum)
        acc = acc * alpha[:, None] + p @ v[j : j + 1]
        log += [f"S{j}", f"softmax{j}", f"PV{j}"]
    return acc / row_sum[:, None]


log = []
expected = in_order(log)
print(" → ".join(log))
print(expected)

# %% [markdown]
# Now FA3's order. The product S of a block needs nothing from the block before it. So FA3 **issues** S of a block
# before P V of the previous block, and computes the softmax of the block while P V may still be running. P V is then
# always one block late. The first S comes before the loop, the last P V after it.


# %%
def overlapped(log):
    """S of a block and P V of the previous block are at the tensor cores together."""
    row_max, row_sum = torch.full((4,), -torch.inf), torch.zeros(4)
    s = q @ k[3:4].T
    p, row_max, row_sum, _ = softmax_step(s, row_max, row_sum)
    acc = torch.zeros(4, 4)
    log += ["S3", "softmax3"]
    for j in (2, 1, 0):
        s = q @ k[j : j + 1].T  # issued, not waited for
        in_flight = acc + p @ v[j + 1 : j + 2]  # issued, not waited for
        p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum)  # needs S only
        acc = in_flight * alpha[:, None]  # here P V is waited for
        log += [f"[S{j} PV{j + 1}]", f"softmax{j}"]
    acc = acc + p @ v[0:1]
    log += ["PV0"]
    return acc / row_sum[:, None]


log = []
found = overlapped(log)
print(" → ".join(log))
print("the same bits:", torch.equal(found, expected))
checked("same_bits", torch.equal(found, expected))

# %% [markdown]
# Both loops do the same additions and products in the same order, so their outputs have the same bits. Only the waiting
# has moved.
#
# This is the overlap **inside** a warpgroup. FA3 has a second kind of overlap, **between** warpgroups. It gives a
# program two warpgroups with 64 queries each, and they take turns: while one computes its softmax, the tensor cores
# work on the products of the other. That is *ping-pong*.
#
# ### Your prediction
#
# The kernel was measured on an H200 with both kinds of overlap and with neither (bf16, head_dim 128, 2048 tokens, no
# mask). How many times as fast is it with both?

# %%
my_guess = None  # your guess here, such as 1.5

# %%
speeds = gantt.speeds()
gain = {series: bars["both"] / bars["neither"] for series, bars in speeds.items()}
guess(my_guess, gain["measured on an H200"], "both, against neither, on an H200", "times as fast")

# %% [markdown]
# Why this much? A small timing simulator helps. It has two warpgroups, called *consumers*, that share one tensor core
# and one exponential unit. The durations were measured on an H200. The next picture shows both consumers starting in
# the same cycle.

# %% tags=["hide-input"]
display(gantt.schedules())
cycles = {name: gantt.total(gantt.simulate(name, blocks=4)) for name in gantt.VARIANTS}
checked("each_fills", cycles["both"] < min(cycles["ping-pong only"], cycles["overlap only"]))
checked("each_helps", max(cycles["ping-pong only"], cycles["overlap only"]) < cycles["neither"])

# %% [markdown]
# *Four blocks of keys for each of the two consumers, on one time axis; S3 is the product S of block 3. Without
# ping-pong the tensor core works for both consumers in turns, which gives the narrow stripes. Look at the gaps in the
# rows of the tensor core.*
#
# With neither kind of overlap both consumers issue products, and then both compute a softmax while the tensor core
# idles. Each kind of overlap alone shortens the program, and both together shorten it most. But the gain depends on how
# the consumers start. Suppose that the second one starts half a block later:

# %% tags=["hide-input"]
step, apart, gpu = speeds.values()
table(
    ["speed, divided by that of both", *gantt.VARIANTS],
    [[name, *(f"{x:.2f}" for x in series.values())] for name, series in speeds.items()],
)
checked("apart_needs_no_turns", abs(apart["overlap only"] / apart["both"] - 1) < 0.02)
checked("gpu_like_apart", all(abs(gpu[name] / apart[name] - 1) < 0.1 for name in gpu))

# %% [markdown]
# Consumers that start half a block apart already use the tensor core in turns. The H200 behaves like them: the
# simulated and the measured speeds differ by less than 10 %. So ping-pong separates consumers that run in step. For
# consumers that are already apart it adds nothing.

# %% [markdown]
# ## Asynchronous copies
#
# FA2's threads compute the address of every element that they load, and a mask for rows beyond the end. FA3 uses a
# **tensor descriptor**. It says once at which address a tensor begins, which shape and strides it has, and how large a
# **box** is. A box is the part of the tensor that one copy takes. A copy then needs only the position of the box. One
# thread requests it, TMA performs it, and elements outside of the tensor arrive as zeros. (A dimension with one
# element, here the batch, may have any stride.)

# %%
x = torch.randn(1, 6, 2, 16)  # (batch, length, heads, head_dim)
box = describe(x, rows=4)
print("shape  ", box.shape, " batch, head, row, dim")
print("strides", box.strides)
print("box    ", box.block_shape)

# %% [markdown]
# FA3 has two kernels: a *portable* one in Triton, which runs on every GPU, and one for Hopper, of which more below.
# This is the function that loads a box, in the lesson of the portable kernel; a click below it shows that of the
# package.

# %% tags=["hide-input"]
show_plain("fa3", "load_rows")

# %% [markdown]
# Now the whole portable kernel, in the simulator. There are six keys in blocks of four, so the second box ends two rows
# behind the last key.

# %%
q, k, v = (torch.randn(1, n, 1, 16) for n in (16, 6, 6))
steps = record("fa3", q, k, v, block_q=16, block_kv=4)
with np.printoptions(precision=2, suppress=True):
    print(f"block {steps[1].j} of K, its first four dims:")
    print(steps[1].before["k"][:, :4])
    print("scores of query 0 with it:", steps[1].after["s"][0])
    print("p:", steps[1].after["p"][0])
beyond = steps[1].before["k"][2:], steps[1].after["s"][:, 2:], steps[1].after["p"][:, 2:]
checked("zeros_arrive", not beyond[0].any())
checked("scores_masked", np.isneginf(beyond[1]).all() and not beyond[2].any())

# %% [markdown]
# The two rows behind the end are zeros. A key of zeros has a score of 0 and not −inf, so it would get a weight in the
# softmax. The kernel therefore masks the *scores* of this block: they become −inf, and their p is 0. The *loads* need
# no mask any more. This is what changes in the function that folds a block of keys into the state:

# %% tags=["hide-input"]
changes("fa2", "fa3", "fold_block")

# %% [markdown]
# Loads by pointers and a mask (red) have become boxes (green). The softmax, `softmax_step`, is unchanged.

# %% [markdown]
# ## The order of causal tiles
#
# With a causal mask the last tile of queries sees all keys and the first tile sees one block. The GPU gives the next
# tile to the first SM that is free. Suppose that there are 16 heads with 16 tiles each, on 132 SMs, and count time in
# blocks: an SM computes one block of keys after the other. If all SMs were busy until the end, the work would take so
# long:

# %%
HEADS, TILES, SMS = 16, 16, 132
ideal = HEADS * TILES * (TILES + 1) / 2 / SMS
print(f"{ideal:.1f} blocks")

# %% [markdown]
# ### Your prediction
#
# FA2 starts the tiles head after head, and within each head the tile with most blocks first. After how many blocks is
# the last tile done?

# %%
my_guess = None  # your guess here, in blocks

# %%
ends = {name: finish_time(order, SMS) for name, order in starting_orders(HEADS, TILES).items()}
fa1_end, fa2_end, _, fa3_end = ends.values()
guess(my_guess, fa2_end, "FA2's order", "blocks")
table(["order in which tiles start", "blocks until the last tile is done"], list(ends.items()))
checked("reversing_gains_nothing", fa1_end == fa2_end)
checked("together_gains", fa3_end < 0.7 * fa2_end)

# %% [markdown]
# With this many heads FA2's order, the longest tile of a head first, gains nothing over FA1. The tiles of the last
# heads start last, and heavy tiles are among them. While these run, most other SMs have no work left. FA3 takes the
# tiles of **all heads together**, the heaviest first. The tiles that start last are then short, and the end comes much
# earlier.
#
# ### Exercise: `causal_order`
#
# Write the order in which the tiles should begin. Tile t of a head sees t + 1 blocks.


# %%
def causal_order(heads, tiles):
    """All (head, tile) in the order in which they should begin: a list of pairs."""
    return None  # your code here


check("causal_order", causal_order)

# %% [markdown]
# In the kernel, a program has its `number` in the grid and computes from it which tile of which head it works on. The
# order takes `section` heads together, whose keys and values fit into the L2 cache, and the next ones after them. The
# function returns `head * tiles + t`. Here `t` = 0 is the *last* tile of queries, the heaviest one. This is the function
# of the lesson for Hopper; the portable lesson has the same lines in its `forward_kernel`.

# %% tags=["hide-input"]
show_plain("fa3-hopper", "heavy_first")

# %% [markdown]
# The next picture shows FA2's order and FA3's, for three heads with four tiles each on five SMs.

# %% tags=["hide-input"]
tiles.walk_order()

# %% [markdown]
# *Which SM works on which tile, and when. The letter is the head; a bar is as long as the tile has blocks.*

# %% [markdown]
# ## Pipelines and barriers, by hand
#
# The portable kernel leaves the overlap to the compiler. A kernel with warps that *only load* and warps that *only
# compute* has to say which warp waits for which. FA3's kernel for Hopper says it. It is written in **Gluon**, a
# language of the Triton project in which the author places data and barriers explicitly.
#
# Its main tool is a **barrier** in shared memory that counts arrivals. When all have arrived, its **phase** flips (0,
# 1, 0, 1, ...), and every warp that waits for the end of that phase goes on.
#
# A **pipeline** connects the producer with the consumers. It has a few slots for tiles, its *stages*. Each slot has two
# barriers. `full` flips when the copy has landed, `empty` when every consumer has read the slot. A wait names a phase,
# 0 or 1, and returns when this phase is over. A new barrier is in phase 0, so phase 1 counts as over. Here is a
# pipeline of two slots with two consumers, in Python. It loads five blocks of K, the last one first. Each role is a
# generator, and says at every `yield` what it does in one tick of time.


# %%
class Barrier:
    """Counts arrivals; its phase flips when `count` have arrived."""

    def __init__(self, count):
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self):
        self.arrived = (self.arrived + 1) % self.count
        self.phase ^= self.arrived == 0

    def is_past(self, phase):
        """Whether a wait for this phase returns. Of a new barrier, a wait for phase 1 does."""
        return self.phase != phase


SLOTS, BLOCKS, LOAD = 2, 5, 2  # a copy takes 2 ticks
full, empty = [Barrier(1) for _ in range(SLOTS)], [Barrier(2) for _ in range(SLOTS)]
landing = {}  # tick -> slot in which a copy lands then
tick = 0


def producer():
    for number in range(BLOCKS):
        slot, phase = number % SLOTS, number // SLOTS % 2
        while not empty[slot].is_past(phase ^ 1):
            yield f"wait: slot {slot} not empty"
        landing[tick + LOAD] = slot
        yield f"ask for K{BLOCKS - 1 - number}"


def consumer(ticks):
    for number in range(BLOCKS):
        slot, phase = number % SLOTS, number // SLOTS % 2
        while not full[slot].is_past(phase):
            yield f"wait for K{BLOCKS - 1 - number}"
        for _ in range(ticks):
            yield f"compute K{BLOCKS - 1 - number}"
        empty[slot].arrive()


roles = producer(), consumer(ticks=2), consumer(ticks=3)
print(f"tick  {'producer':24}{'consumer 0':14}consumer 1")
while any(said := [next(role, "") for role in roles]):
    print(f"{tick:4}  {said[0]:24}{said[1]:14}{said[2]}".rstrip())
    tick += 1
    if tick in landing:
        full[landing[tick]].arrive()

# %% [markdown]
# Consumers first wait for phase 0 of `full`, which is over when the first tile has arrived. The producer first waits
# for phase 1 of `empty`, which is over from the start: the slots are empty, and its first wait on each slot returns
# without waiting. Later it asks for a block only after both consumers have read what the slot held before.
#
# The kernel does the same. `fill` waits for the empty slot and starts the copy. The phase of a `full` barrier ends when
# all arrivals have come *and* all bytes that it was told to expect have been written. `mbarrier.expect` arrives at the
# barrier and tells it how many bytes to expect. TMA subtracts the bytes that it has written:

# %% tags=["hide-input"]
show(pipeline.Pipeline.fill)

# %% [markdown]
# ## The kernel for Hopper, line by line
#
# The producer is one warp. It asks for Q, and for the blocks of K and V that the tile sees. No line here computes with
# the data, so the producer needs few registers, and the kernel gives the others to the consumers. (A program of the
# lesson works on one tile. Those of the package's kernel are *persistent*: the producer claims one tile after the
# other.)

# %% tags=["hide-input"]
show_plain("fa3-hopper", "produce")

# %% [markdown]
# A consumer is a warpgroup with 64 queries of the tile. Its function `consume` has three parts: the first block, the
# loop, which calls `fold_block`, and the last P V.

# %% tags=["hide-input"]
show_plain("fa3-hopper", "consume", "fold_block")

# %% [markdown]
# The loop is the part that matters. The next picture shows the lines of `fold_block` beside two iterations of consumer
# 0, from the timing simulator with both kinds of overlap.

# %% tags=["hide-input"]
display(attend.beside_time())
found, _ = attend.tasks()
spans = {name: next(t for t in found if t.what == name) for name in ("PV", "softmax", "exp")}
others = [task for task in found if task.consumer == 1]
soft, exp = spans["softmax"], spans["exp"]
checked("pv_during_softmax", spans["PV"].start < soft.start < spans["PV"].end)
checked("other_during_softmax", any(t.start < exp.end and t.end > soft.start for t in others))

# %% [markdown]
# *A bar shows when a line runs. For a line that issues a product, the bar shows when the tensor cores compute this
# product. Lines without a bar take almost no time. A hatched bar is a wait. The table below has the lines with their
# numbers.*
#
# In the kernel as it is written, the softmax in line 12 begins while P V of the previous block still runs: this is the
# overlap inside a warpgroup. (The compiled kernel differs in this point; see "What the compiler made of it".) During
# the rest of line 12 the tensor cores work on the products of consumer 1: this is the overlap between warpgroups.

# %% tags=["hide-input"]
say(attend.explained())

# %% [markdown]
# The simulator runs the kernel for Hopper, too; `flash_versions/simulator/gluon` is its half for Gluon. It lets the
# roles take turns, and finishes copies and products as late as the hardware might. A kernel with a missing wait then
# computes wrong numbers, or the simulator names the access that comes too early, and the test fails.

# %% [markdown]
# ## What the compiler made of it
#
# The same call, compiled for three generations of GPUs. `spills` are registers that the compiler had to move to memory.

# %% tags=["hide-input"]
# %%needs_triton
found = instructions("fa3", ("sm_80", "sm_90", "sm_100"), causal=True)
kinds = {
    "cp_async": "copies by threads (cp.async)", "tma_loads": "copies of boxes (TMA)",
    "mma_sync": "products, Ampere's (mma.sync)", "wgmma": "products, Hopper's (wgmma)",
    "tcgen05": "products, Blackwell's (tcgen05)", "mbarriers": "barriers that count (mbarrier)",
    "ex2": "exponentials", "spill_loads": "spills, bytes",
}  # fmt: skip
table(
    ["instructions in the code", "FA2, Hopper (sm_90)", "FA3, Ampere (sm_80)",
     "FA3, Hopper (sm_90)", "FA3, Blackwell (sm_100)"],
    [[label, fa2[kind], *(one[kind] for one in found.values())] for kind, label in kinds.items()],
)  # fmt: skip
ampere, hopper, blackwell = found.values()
checked("ampere_is_fa2", ampere["cp_async"] and ampere["mma_sync"] and not ampere["tma_loads"])
checked("two_copies", hopper["wgmma"] == 2 * fa2["wgmma"] and hopper["ex2"] == 2 * fa2["ex2"])
checked("tcgen05_on_blackwell", blackwell["tcgen05"] and not blackwell["wgmma"])

# %% [markdown]
# Ampere has no TMA, and there FA3 hands the call to FA2's kernel. On Hopper it is the Gluon kernel, which has a copy of
# the code for each of its two consumers. So the numbers of products and of exponentials here are twice those of FA2. On
# Blackwell it is the portable kernel.
#
# Here is the order of events in the loop of the kernel for Hopper. In FA2's loop `HGMMA smem` is Q Kᵀ and `HGMMA regs`
# is P V, and so it is here. `BAR.ARV` is `named_barrier_arrive`.

# %% tags=["hide-input"]
# %%needs_triton
print("FA2:", events(fa2))
print("FA3:", events(hopper))
order = names(hopper)
waits, exponentials = order.index("wait 1"), order.index("MUFU.EX2")
checked("both_issued", {"HGMMA smem", "HGMMA regs"} < {*order[:waits]} and waits < exponentials)
checked("wait_moved", order.index("wait 0") < exponentials)

# %% [markdown]
# FA3 issues both products before the exponentials. One detail is different from the source. The line that waits for P V
# comes after the softmax, and in the compiled code `wait 0` comes *before* the exponentials: NVIDIA's assembler has
# moved it, as waiting earlier cannot change a result. So P V of the same warpgroup does not run during its
# exponentials; the products of the other warpgroup do. What remains of the overlap inside a warpgroup: the tensor cores
# get two products in a row from each, and have work for longer while the other one computes its softmax. The next
# measurement shows what that is worth.

# %% [markdown]
# ## What each idea is worth, measured
#
# On an H200, each idea was switched off alone, for several head dimensions and lengths. Q was in registers then, where
# these suffice; today it stays in shared memory. The programs of the package's kernel are **persistent**: one for each
# SM, which stays on the GPU and walks from tile to tile, so that it can load the next tile while it finishes this one.
#
# ### Your prediction
#
# With a causal mask the kernel's programs claim their tiles from a counter. Replace that by fixed rounds (`static`), at
# head_dim 128. What share of the speed is left?

# %%
my_guess = None  # your guess here, between 0 and 1

# %% tags=["hide-input"]
ratios = ablation_ratios(results)["fa3"]
guess(my_guess, ratios["D=128 causal"]["static"], "of FA3's speed, with fixed rounds")
chosen = {
    "no overlap": "no overlap inside a warpgroup; Q in shared memory",
    "no ping-pong": "no ping-pong",
    "neither": "neither overlap nor ping-pong; Q in shared memory",
    "late wait": "the wait for P V stays after the softmax",
    "Q in shared memory": "Q in shared memory, in two buffers",
    "static": "tiles in fixed rounds (static)",
    "portable": "the portable kernel",
}
panels = ("D=64 full", "D=128 full", "D=128 causal", "D=256 full")
defaults = {("D=256 full", "no ping-pong"), ("D=64 full", "Q in shared memory")} | {
    (panel, "static") for panel in panels if "full" in panel
}
heads = [panel.replace("D=", "head_dim ").replace("full", "no mask") for panel in panels]
table(
    ["share of FA3's speed that is left", *heads],
    [[label, *("as it was" if (p, name) in defaults else f"{ratios[p][name]:.2f}" for p in panels)]
     for name, label in chosen.items()],
)  # fmt: skip
loss = {panel: {name: 1 - ratios[panel][name] for name in chosen} for panel in panels}
checked("overlap_least_at_64", all(loss["D=64 full"]["no overlap"] < loss[p]["no overlap"] / 2
                                   for p in panels[1:]))  # fmt: skip
checked("ping_pong_little", all(loss[panel]["no ping-pong"] < 0.05 for panel in panels[:3]))
checked("late_wait_slower", all(loss[panel]["late wait"] > 0.01 for panel in panels))
checked("static_causal", loss["D=128 causal"]["static"] > 0.1)
checked("portable_slowest", all(max(loss[p], key=loss[p].get) == "portable" for p in panels))

# %% [markdown]
# "As it was" means that the kernel was already like this when it was measured.
#
# * **No overlap** costs least at head_dim 64. The kernel has *three* consumers there: while one computes its softmax,
#   two others supply products.
# * **No ping-pong** costs less than 5 % at head_dim 64 and 128. The H200's consumers are probably apart without it, as
#   the timing simulator suggests.
# * **The wait for P V after the softmax** is the order of the paper and of the source text. It is slower than the
#   compiler's order.
# * **Fixed rounds** cost more than 10 % with a causal mask. Causal tiles differ in their work, and a counter gives the
#   next tile to the program that is free. Without a mask all tiles have the same work, and fixed rounds are the
#   default.
# * **The portable kernel**, which every GPU can run, is the slowest variant in every column.

# %% tags=["hide-input"]
measured("forward")
checked("fa3_faster", all(tflops("fa3", d) > 1.2 * tflops("fa2", d) for d in (64, 128, 256)))

# %% [markdown]
# *TFLOP/s over the sequence length, on an H200.* At 16384 tokens without a mask, FA3 is at least 1.2 times as fast as
# FA2 at every head dimension.

# %% [markdown]
# ## Eight bits
#
# Tensor cores multiply 8-bit numbers twice as fast as 16-bit ones, and a tile takes half the memory. The price is
# precision. FA3 uses the format e4m3: four bits of exponent, three of fraction. Its numbers from 1 to 2 are 1, 1.125,
# 1.25 and so on, and the largest is 448. So a tensor is divided by a **scale** before it is rounded, which makes its
# largest element 448, and the scale is kept beside the tensor.
#
# ### Your prediction
#
# Some inputs have outliers, a few numbers that are much larger than the others. FA3 offers two remedies. It can use
# finer scales: one for each head, or for each block of rows, in place of one for the tensor. And it can rotate queries
# and keys, which spreads an outlier over all dimensions. Which of the two reduces the error more: `"scales"` or
# `"rotation"`?

# %%
my_guess = None  # "scales" or "rotation"

# %% tags=["hide-input"]
measured_errors = json.loads((RESULTS / "fp8/h200-accuracy.json").read_text())
error_of = {
    (row["distribution"], row["D"], row["scheme"]): row["rmse"] for row in measured_errors["rows"]
}
by_scales = error_of["paper", 128, "tensor"] / error_of["paper", 128, "block"]
by_rotation = error_of["paper", 128, "block"] / error_of["paper", 128, "block+hadamard"]
guess(my_guess, "rotation" if by_rotation > by_scales else "scales", "what reduces the error more")
say(
    f"On an H200, with the inputs of the FA3 paper (normal numbers, one in a thousand much larger), a scale for each "
    f"block in place of one for the tensor divides the error by {by_scales:.2f}. The rotation divides what is left by "
    f"{by_rotation:.2f}."
)

# %% [markdown]
# Why? e4m3 is a *floating-point* format: a small number keeps its three bits of fraction beside a large one. The
# problem is large products. Where an outlier of a query meets an outlier of a key **in the same dimension**, one
# product dominates the score. It is wrong by a few percent, and a few percent of a large score decide which key gets
# the weight.
#
# The rotation multiplies queries and keys by the same orthogonal matrix: random signs, then a Hadamard matrix, whose
# entries are all $+1/\sqrt{d}$ or $-1/\sqrt{d}$. No score changes. But the large product is now spread over all
# dimensions. Each dimension has an error of its own, and independent errors partly cancel. The next cell uses the
# package's quantiser, in the simulator.

# %%
q, k, v = (torch.randn(1, 128, 1, 64) for _ in range(3))
q[0, :, 0, 5] += 20.0  # an outlier of every query and every key, in one dimension
k[0, :, 0, 5] += 20.0
exact = (q[0, :, 0] @ k[0, :, 0].T) / 8
deviation = {}
for how in (Fp8("tensor"), Fp8("head"), Fp8("block"), Fp8("block", hadamard=True)):
    q8, k8, _ = dequantize(quantize(q, k, v, how))
    error = (q8[0, :, 0] @ k8[0, :, 0].T) / 8 - exact
    deviation[str(how)] = float(error.std())
table(
    ["scales", "standard deviation of a score's error"],
    [[f"`{name}`", f"{value:.3f}"] for name, value in deviation.items()],
)
tensor, _, blocks, rotation = deviation.values()
checked("finer_scales_little", blocks > 0.9 * tensor)
checked("rotation_much", rotation < blocks / 4)

# %% [markdown]
# Finer scales change the error of a score by less than 10 %. The rotation makes it at least four times smaller.
#
# ### Where the scales go
#
# The kernel already multiplies scores by a factor, and already computes exponents of 2. Most of the scales become part
# of these, so they cost no instruction for each score:
#
# * **The scales of Q and K** become part of the factor that takes a product to log2 units.
# * **The scale of V** multiplies the product P V of a block. (The package's kernel makes it part of the exponent of P.)
# * **A factor of 2^8** makes P larger before it is rounded: P is at most 1, and e4m3 has its full three bits of
#   fraction only for numbers from 2^-6 to 448. The sum of a row has the same factor, so it cancels at the end.
#
# V is stored transposed, with its keys in the order in which the threads have P: `in_order_of_values` moves no data.

# %% tags=["hide-input"]
changes("fa3", "fa3-fp8", "softmax_step")
changes("fa3", "fa3-fp8", "fold_block")

# %% tags=["hide-input"]
measured("fp8")
fp8 = json.loads((RESULTS / "fp8/h200-fp8.json").read_text())["rows"]
rates = {
    (row["version"], row["N"]): row["tflops"]
    for row in fp8
    if (row["suite"], row["D"], row["causal"]) == ("fp8", 128, False)
}
longest = max(length for _, length in rates)
gain = rates["fa3 fp8 head", longest] / rates["fa3", longest]
say(
    f"At head_dim 128 without a mask, FP8 is {gain:.2f} times as fast as bf16 for {longest} tokens."
)
checked("less_than_twice", 1.1 < gain < 1.8)

# %% [markdown]
# *TFLOP/s in FP8 and in 16 bits on an H200, of the attention kernel alone.* Twice the rate of products does not give
# twice the speed: at head_dim 128, products and exponentials now take equally long. What helps is a shorter softmax.
# FA4 begins there. [Attention in FP8](../docs/understand/fp8.md) says more, with the errors of all schemes.

# %% [markdown]
# ## Exercise: a pipeline of your own
#
# Write both sides of a *ring*, a pipeline of two slots, in Gluon: the warp that lets TMA copy, and the warps that read.
# The check runs your kernel in the simulator, with late copies and late reads. If all warps wait, it says which warp
# waits at which line, and for what.

# %%
# puzzle: ring

# %% [markdown]
# ## Where to read on
#
# * Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao 2024, [FlashAttention-3](https://arxiv.org/abs/2407.08608): section 3.1
#   explains roles and ping-pong, section 3.2 the overlap inside a warpgroup, section 3.3 FP8.
# * The authors' code: [hopper/](https://github.com/Dao-AILab/flash-attention/tree/main/hopper) of flash-attention,
#   `mainloop_fwd_sm90_tma_gmma_ws.hpp`.
# * Batches of sequences of different lengths, and masks for documents, shared prompts and trees, which leave out the
#   tiles that no query needs: [masks.md](../docs/use/masks.md).
# * This project: `flash_versions/versions/fa3/forward.py` and `fa3/hopper/forward.py`, whose docstrings draw the
#   schedule; `tiles/pipeline.py`; `tiles/tile_scheduler.py`; [fp8.md](../docs/understand/fp8.md); and what did not
#   work, in [log.md](../docs/understand/log.md).
# * All kernels as you saw them here: `flash_versions/lessons/fa3.py`, `fa3_hopper.py` and `fa3_fp8.py`.
# * The solution of `causal_order` is in `notebooks/solutions/03_fa3`. Next: [04_fa4](04_fa4.ipynb).
