# ---
# jupyter:
#   jupytext:
#     formats: ipynb,_src//py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # FA3: nobody waits
#
# FA2 does the right arithmetic in the wrong order. Load, multiply, exponentials, multiply: one
# thing after the other, on a chip whose copy engine, tensor cores and special function units could
# all work at once. FA3 changes no formula. It changes who does what, and when:
#
# * **asynchronous copies**: one thread asks for a whole tile, the copy engine (TMA) fetches it;
# * **asynchronous products**: the tensor cores multiply while the warps that asked go on (WGMMA);
# * **roles**: some warps only load, others only compute;
# * **order**: of causal tiles, the heavy ones come first;
# * and, as an option, **8-bit numbers**, which the tensor cores multiply at twice the rate.
#
# Before you start: [02_fa2](02_fa2.ipynb) has the online softmax in the form that is used here.

# %%
# On Google Colab only: fetch the package, and what it needs.
import os
import subprocess
import sys

if "google.colab" in sys.modules and not os.path.exists("lessons"):
    address = input("Address of the repository that this notebook is from: ")
    subprocess.run(["git", "clone", "--depth=1", address, "/content/repository"], check=True)
    os.chdir("/content/repository/notebooks")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--editable", "..[notebooks]"]
    subprocess.run(pip, check=True)
    sys.path[:0] = [os.getcwd(), os.path.dirname(os.getcwd())]

# %%
# %matplotlib inline
import json

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display
from lessons import changes, check, film, guess, instructions, measured, own_gpu, record, show
from lessons.exercises.notebook_03 import finish_time
from lessons.pictures import gantt, tiles
from matplotlib.figure import Figure

from flash_versions import attention, attention_reference
from flash_versions.versions.tiles import pipeline
from flash_versions.bench.accuracy import SCHEMES, errors, exact_attention
from flash_versions.bench.accuracy import draw as draw_inputs
from flash_versions.versions.tiles.tma import describe
from flash_versions.versions.fa3 import forward as fa3
from flash_versions.versions.fa3.fp8 import forward as forward_fp8
from flash_versions.versions.fa3.hopper import forward as forward_hopper
from flash_versions.plot.figures import EXP2_PER_TENSOR_FLOP, TENSOR_TFLOPS
from flash_versions.versions.fp8.quantize import dequantize, quantize
from flash_versions.dispatch.precision import Fp8
from flash_versions.bench.results import RESULTS, ablation_ratios, read_results, shapes

torch.manual_seed(0)


def table(head, rows):
    """Display rows as a table: the first column is text, the others are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


# %% [markdown]
# ## What FA2 wasted
#
# Here is the inner loop of FA2's kernel as the compiler leaves it for a Hopper GPU (compiled here,
# which needs no GPU and takes a while the first time). `HGMMA` is a product on the tensor cores,
# `MUFU.EX2` an exponential on the special function unit.

# %%
fa2 = instructions("fa2", "sm_90", causal=True)


def events(found):
    """The order of events in the first hot loop."""
    loop = found["hot_loops"][0]["events"]
    return " → ".join(f"{name} x{times}" if times > 1 else name for name, times in loop)


print(events(fa2))

# %% [markdown]
# Read it from the left. S = Q Kᵀ, **wait**, all exponentials of the tile, P V. While the
# exponentials are computed these warps have given the tensor cores nothing to do.
#
# What does that cost? The rates are the hardware's: what a multiprocessor multiplies in a cycle and
# how many exponentials it computes. The last column is what FA2 reaches on an H200, from the
# committed measurements.

# %%
results = read_results()
FLOP_PER_CYCLE = 16 / EXP2_PER_TENSOR_FLOP  # of a multiprocessor, at 16 exponentials a cycle


def tflops(version, head_dim, length=16384):
    """Measured TFLOP/s of a forward without a mask."""
    groups = shapes(results, "table").values()
    found = {(r["D"], r["N"], r["causal"]): r["tflops"] for g in groups for r in [g[version]]}
    return found[head_dim, length, False]


rows = []
for head_dim in (64, 128, 256):
    products = 4 * 128 * 128 * head_dim / FLOP_PER_CYCLE  # S and P V of a tile of 128 x 128
    exponentials = 128 * 128 / 16
    busy = products / (products + exponentials)
    rows.append(
        [f"head_dim {head_dim}", f"{products:.0f}", f"{exponentials:.0f}", f"{busy:.0%}",
         f"{busy * TENSOR_TFLOPS:.0f}", f"{tflops('fa2', head_dim):.0f}"]
    )  # fmt: skip
table(
    ["a tile of 128 x 128", "cycles of products", "of exponentials", "tensor cores busy, at most",
     "TFLOP/s, at most", "FA2, measured"],
    rows,
)  # fmt: skip

# %% [markdown]
# That is the waste: with products and exponentials in turn, the tensor cores idle for a large part
# of the time *even if everything else is perfect*. The way out is not faster arithmetic. It is to
# have two things going on at once.

# %% [markdown]
# ## The idea by hand
#
# Four queries, four keys, one key to a block, so four steps. First FA2's order.

# %%
q, k, v = (torch.randint(-2, 3, (4, 4)).float() for _ in range(3))


def softmax_step(s, row_max, row_sum):
    """One step of the online softmax, in powers of two: (p, row_max, row_sum, alpha)."""
    new_max = torch.maximum(row_max, s.amax(1))
    p, alpha = torch.exp2(s - new_max[:, None]), torch.exp2(row_max - new_max)
    return p, new_max, alpha * row_sum + p.sum(1), alpha


def in_order(log):
    """FA2: S, softmax, P V of one block after the other."""
    acc, row_max, row_sum = torch.zeros(4, 4), torch.full((4,), -torch.inf), torch.zeros(4)
    for j in range(4):
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
# Now FA3's. The product S of block j does not depend on anything that happens to block j − 1. So it
# is **issued before** P V of block j − 1, and the softmax of block j runs while P V is still at
# work. That makes P V one block late: the first S is peeled off before the loop, the last P V after
# it.


# %%
def overlapped(log):
    """FA3: S of the next block and P V of the last one are at the tensor cores together."""
    row_max, row_sum = torch.full((4,), -torch.inf), torch.zeros(4)
    s = q @ k[0:1].T
    p, row_max, row_sum, _ = softmax_step(s, row_max, row_sum)
    acc = torch.zeros(4, 4)
    log += ["S0", "softmax0"]
    for j in range(1, 4):
        s = q @ k[j : j + 1].T  # issued, not waited for
        in_flight = acc + p @ v[j - 1 : j]  # issued, not waited for
        p, row_max, row_sum, alpha = softmax_step(s, row_max, row_sum)  # needs S only
        acc = in_flight * alpha[:, None]  # here P V is waited for
        log += [f"[S{j} PV{j - 1}]", f"softmax{j}"]
    acc = acc + p @ v[3:4]
    log += ["PV3"]
    return acc / row_sum[:, None]


log = []
found = overlapped(log)
print(" → ".join(log))
print("the same bits:", torch.equal(found, expected))

# %% [markdown]
# The same additions and products in the same order for every number, so the same bits: only the
# waiting has moved. This is the overlap **inside** a group of warps (a *warpgroup*, the four warps
# that issue a product together). There is a second one, **between** groups: give a program two
# groups of warps with 64 queries each and let them take turns. While one computes its softmax, the
# other has its products at the tensor cores. That is *ping-pong*.
#
# ### Your prediction
#
# A program has two groups. How many times as fast is it with both kinds of overlap as with neither?
# (The simulator takes how long products and softmax really last from a traced launch on an H200.)

# %%
my_guess = None  # your guess here, such as 1.2

# %%
cycles = gantt.totals(blocks=16)
guess(my_guess, cycles["neither"] / cycles["both"], "both, against neither", "times as fast")
for name, total in cycles.items():
    print(f"{name:24} {total:8.0f} cycles")

# %%
gantt.schedules()

# %% [markdown]
# *Four blocks of two groups, on one time axis. Look at the gaps of the tensor cores: with neither
# overlap they are as long as a softmax; each overlap fills some of them.*

# %% [markdown]
# ## Asynchronous copies
#
# FA2's threads compute the address of every element that they load, and a mask for the last rows. A
# **tensor descriptor** says once where a tensor lies: its shape, its strides and the box that a
# copy takes. From then on a copy is three numbers, one thread asks for it, and what lies outside of
# the tensor arrives as zeros.

# %%
x = torch.randn(1, 6, 2, 16)  # (batch, length, heads, head_dim)
box = describe(x, rows=4)
print("shape  ", box.shape, " batch, head, row, dim")
print("strides", box.strides)
print("box    ", box.block_shape)

# %%
show(fa3.load_rows)

# %% [markdown]
# The kernel below runs in Triton's interpreter: the real text, executed with NumPy. Six keys in
# blocks of four: the second box reaches two rows past the end.

# %%
q, k, v = (torch.randn(1, n, 1, 16) for n in (16, 6, 6))
steps = record("fa3", q, k, v, block_q=16, block_kv=4)
with np.printoptions(precision=2, suppress=True):
    print(f"block {steps[1].j} of K, its first four dims:")
    print(steps[1].before["k"][:, :4])
    print("scores of query 0 with it:", steps[1].after["s"][0])
    print("p:", steps[1].after["p"][0])

# %% [markdown]
# Zeros would be keys like any others, with a score of 0. So the *scores* of that block are masked,
# as in FA2; the *loads* need no mask any more. This is what the change looks like in the kernel:

# %%
changes("fa2", "fa3", "fold_block")

# %% [markdown]
# Loads by pointer and mask (red) have become boxes (green), and query heads are no longer packed
# into one tile, because a box holds rows of one head. `softmax_step` is imported from the page that
# FA2 uses: unchanged.

# %% [markdown]
# ## The order of causal tiles
#
# With a causal mask the last tile of queries sees all keys and the first one a single block. Tiles
# are handed to multiprocessors as these become free. Suppose that there are 16 heads of 16 tiles,
# and a GPU of 132 multiprocessors. What the work divided by the multiprocessors comes to, in
# blocks:

# %%
HEADS, TILES, PROCESSORS = 16, 16, 132
print(f"{HEADS * TILES * (TILES + 1) / 2 / PROCESSORS:.1f}")

# %% [markdown]
# ### Your prediction
#
# FA2 sends them out head after head, the heaviest tile of each head first. How many blocks pass
# until the last one is done?

# %%
my_guess = None  # your guess here, in blocks

# %%
order = [(head, tile) for head in range(HEADS) for tile in reversed(range(TILES))]
guess(my_guess, finish_time(order, PROCESSORS), "FA2's order", "blocks")
order = [(head, tile) for tile in range(TILES) for head in range(HEADS)]
print(f"all light tiles first: {finish_time(order, PROCESSORS)} blocks")

# %% [markdown]
# The loss is the tail: among the tiles that begin last are heavy ones, and when they are done
# nearly all other multiprocessors have been idle for long. Whoever has packed a car knows the
# remedy: large pieces first.
#
# ### Exercise: `causal_order`
#
# Write the order in which the tiles should begin. Tile t of a head sees t + 1 blocks.


# %%
def causal_order(heads, tiles):
    """All (head, tile) in the order in which they should begin: a list of pairs."""
    raise NotImplementedError  # your code here


check("causal_order", causal_order)

# %% [markdown]
# This is how the kernel does it: a number in the grid is turned into a place, so that the tiles of
# a whole section of heads come in the order of their weight. (A section is as many heads as have
# their keys in the L2 cache; beyond that the order would cost more memory traffic than it saves
# time.)

# %%
show(fa3.heavy_first)

# %%
tiles.compare(causal=True, versions=("fa1", "fa2", "fa3"), blocks=6)

# %% [markdown]
# *One head; p0 is the tile that begins first, the numbers are the order of its blocks. FA1 begins
# with the light tiles, FA2 and FA3 with the heavy ones. That FA3 also lets the heads take turns
# shows only with several heads:*

# %%
tiles.walk_order()

# %% [markdown]
# *Which multiprocessor works on which tile, and when; the letter is the head, a bar is as long as
# the tile has blocks. Compare the first two. The last two are for programs that stay on the GPU and
# walk from tile to tile: dealt out in fixed rounds, or claimed from a counter by whoever is free.*

# %% [markdown]
# ## A run with every intermediate
#
# Four tiles of 16 queries, four blocks of 16 keys, causal. The film shows which tile is being
# worked on, the scores of the block, P, and the state of the rows.

# %%
q, k, v = (torch.randn(1, 64, 1, 16) for _ in range(3))
steps = record("fa3", q, k, v, causal=True, block_q=16, block_kv=16)


def draw(number):
    """One step: the map of tiles, scores, P, and the rows' maxima and sums."""
    step, figure = steps[number], Figure(figsize=(5, 3.8), layout="constrained")
    where, scores, p, state = figure.subplots(2, 2).flatten()
    visited = np.zeros((4, 4))
    for earlier in steps[: number + 1]:
        visited[3 - earlier.program, earlier.j] = 1  # the last tile of queries has number 0
    visited[3 - step.program, step.j] = 2
    where.imshow(visited, cmap="Blues", vmin=0, vmax=2, aspect="auto")
    where.set(title="tiles done", xlabel="block of keys", ylabel="tile of queries")
    scores.imshow(step.after["s"], cmap="PuOr", vmin=-12, vmax=12, aspect="auto")
    scores.set(title=f"S, block {step.j}", xticks=[], yticks=[])
    p.imshow(step.after["p"], cmap="Greens", vmin=0, vmax=1, aspect="auto")
    p.set(title="P", xticks=[], yticks=[])
    rows = np.arange(16)
    state.bar(rows - 0.2, step.after["row_max"], 0.4, label="row_max")
    state.bar(rows + 0.2, np.log2(step.after["row_sum"]), 0.4, label="log2 row_sum")
    state.set(title="state of the rows", ylim=(-4, 8), xlabel="query of the tile")
    state.legend(fontsize=6, frameon=False)
    return figure


film(
    range(len(steps)),
    draw,
    "Ten blocks are folded. The tile with the last queries comes first and takes four of them; the "
    "block on the diagonal is masked (white triangle in S, nothing in P).",
)

# %%
exact, _ = attention_reference(*(x.double() for x in (q, k, v)), causal=True)
print(f"largest difference to exact attention: {(steps.o.double() - exact).abs().max():.1e}")

# %% [markdown]
# ## Pipelines and barriers, by hand
#
# The portable kernel above leaves the overlap to the compiler. To have warps that *only load* and
# warps that *only compute* one has to say which warp waits for which. FA3's second kernel says it, in
# **Gluon**, Triton's language one floor below. Its main tool is a barrier in shared memory that
# counts arrivals. When all have arrived its **phase** flips, 0, 1, 0, 1, and every warp that waits for
# that phase goes on.
#
# A *pipeline* connects the producer with the consumers: a few slots for tiles, its *stages*, each with
# a barrier that says *full* (the copy has landed) and one that says *empty* (every consumer has read
# it). Here is a pipeline of two stages with two consumers, in Python.


# %%
class Barrier:
    """Counts arrivals; its phase flips when `count` have arrived."""

    def __init__(self, count):
        self.count, self.arrived, self.phase = count, 0, 0

    def arrive(self):
        self.arrived = (self.arrived + 1) % self.count
        self.phase ^= self.arrived == 0

    def is_past(self, phase):
        """Whether a wait for this phase is over. For phase 1 it is before anything happened."""
        return self.phase != phase


SLOTS, BLOCKS = 2, 5
LOAD, COMPUTE = 2, (3, 4)  # ticks that a copy takes, and a block: consumer 1 is slower
full, empty = [Barrier(1) for _ in range(SLOTS)], [Barrier(2) for _ in range(SLOTS)]
asked, landing = 0, {}  # blocks that the producer has asked for; tick -> slot
block, left = [0, 0], [0, 0]  # of each consumer: its block, and the ticks that it still takes
print("tick  producer                consumer 0    consumer 1")
tick = 0
while min(block) < BLOCKS:
    if tick in landing:
        full[landing[tick]].arrive()
    said = ["", "", ""]
    if asked < BLOCKS:
        slot, phase = asked % SLOTS, asked // SLOTS % 2
        said[0] = f"wait: slot {slot} not empty"
        if empty[slot].is_past(phase ^ 1):
            said[0] = f"ask for K{asked}"
            landing[tick + LOAD] = slot
            asked += 1
    for c in (0, 1):
        if not left[c] and block[c] < BLOCKS:
            said[1 + c] = f"wait for K{block[c]}"
            if full[block[c] % SLOTS].is_past(block[c] // SLOTS % 2):
                left[c] = COMPUTE[c]
        if left[c]:
            said[1 + c] = f"compute K{block[c]}"
            left[c] -= 1
            if not left[c]:
                empty[block[c] % SLOTS].arrive()
                block[c] += 1
    print(f"{tick:4}  {said[0]:24}{said[1]:14}{said[2]}".rstrip())
    tick += 1

# %% [markdown]
# A new barrier counts as "previous phase done". The producer waits for the phase *opposite* to the
# consumers', so its first wait on each slot returns at once. And it never fills a slot that a
# consumer still reads. That is all. In the kernel:

# %%
show(pipeline.Pipeline.fill)
show(forward_hopper.produce, docstring=False)

# %% [markdown]
# The producer's text contains no arithmetic on data at all, so it needs few registers, and gives
# the rest to the consumers. Here is what they do with them. Find the line that issues S of the next
# block, the line that issues P V of the block before, and the two waits.

# %%
show(forward_hopper.attend, docstring=False)

# %% [markdown]
# `named_barrier_sync` and `named_barrier_arrive` are the ping-pong: a consumer waits at its barrier,
# issues its products, and arrives at the other's barrier before its softmax.
#
# Triton's interpreter knows no Gluon, so this kernel cannot be recorded here. It is tested all the
# same without a GPU: `tests/emulator/gluon/emulator.py` runs its text on the CPU, each role in a thread of
# its own, with copies and products as late as the rules of the hardware allow. Whoever forgets a
# wait is found.

# %% [markdown]
# ## What the compiler made of it
#
# The same call, compiled for three generations.

# %%
found = instructions("fa3", ("sm_80", "sm_90", "sm_100"), causal=True)
kinds = {
    "cp_async": "copies by threads (cp.async)", "tma_loads": "copies of boxes (TMA)",
    "mma_sync": "products, Ampere's (mma.sync)", "wgmma": "products, Hopper's (wgmma)",
    "tcgen05": "products, Blackwell's (tcgen05)", "mbarriers": "barriers that count (mbarrier)",
    "ex2": "exponentials", "spill_loads": "spills, bytes",
}  # fmt: skip
table(
    ["", "FA2, sm_90", *(f"FA3, {arch}" for arch in found)],
    [[label, fa2[kind], *(one[kind] for one in found.values())] for kind, label in kinds.items()],
)

# %% [markdown]
# On Ampere (sm_80) there is no copy engine, and FA3 hands the call to FA2's kernel. On Hopper
# (sm_90) it is the explicit kernel: two consumers with a copy of the loop each. On Blackwell
# (sm_100) it is the portable kernel, whose products the compiler maps to that generation's
# instruction.
#
# The order of events in Hopper's loop:

# %%
print("FA2:", events(fa2))
print("FA3:", events(found["sm_90"]))

# %% [markdown]
# Both products are issued (`HGMMA smem` is Q Kᵀ, `HGMMA regs` is P V) before the exponentials. One
# detail is worth a second look: `wait 0`, the wait for P V, stands *before* the exponentials,
# although the source has it after them. The compiler may move it, since nothing tells it what the
# wait is for. Is that a loss? It was measured.

# %% [markdown]
# ## What each idea is worth, measured
#
# On an H200, each idea was switched off alone. Take head_dim 128 without a mask.
#
# ### Your prediction
#
# Without the overlap inside a group (ping-pong stays): what share of the full speed is left?

# %%
my_guess = None  # your guess here, between 0 and 1

# %%
ratios = ablation_ratios(results)["fa3"]
guess(my_guess, ratios["D=128 full"]["no overlap"], "of FA3's speed, without the overlap")

# %%
chosen = (
    "no overlap",
    "no ping-pong",
    "neither",
    "late wait",
    "one Q buffer",
    "static",
    "portable",
)
panels = ("D=64 full", "D=128 full", "D=128 causal", "D=256 full")
table(
    ["share of FA3's speed", *panels],
    [[name, *(f"{ratios[panel][name]:.2f}" for panel in panels)] for name in chosen],
)

# %% [markdown]
# * **Overlap** is worth most where products are the bottleneck. At head_dim 64 exponentials take as
#   long as products, and there is less to hide behind.
# * **Ping-pong** adds little once there is overlap inside a group; the next picture says why.
# * **Late wait** forces the order of the paper, the wait for P V behind the exponentials. Here it
#   is slower: the other consumer has the tensor cores anyway, and what comes after the wait is no
#   longer hidden.
# * **Static** is a fixed deal of tiles to programs. With a causal mask it is the order of tiles all
#   over again: the kernel's own choice there is a counter, from which whoever is free takes the
#   next.
# * **Portable** is the kernel that you ran above, on the GPU.

# %%
gantt.against_measured()

# %% [markdown]
# *The simulator's speed of each variant beside the measured one. Groups that start in step stay in
# step: they want the tensor cores together and leave them together, and taking turns is what
# separates them. Groups that happen to be half a block apart need no turns, and that is what the
# GPU's figures look like.*

# %%
measured("forward")

# %% [markdown]
# *TFLOP/s over the sequence length. The step from FA2 to FA3 is the one of this notebook.*

# %% [markdown]
# ## Eight bits
#
# Tensor cores multiply 8-bit numbers twice as fast, and a tile takes half the room. The price is
# precision. Of the format that is used, e4m3 (four bits of exponent, three of mantissa), here are
# the numbers around 1.

# %%
e4m3 = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
print(f"{len(e4m3)} positive numbers, from {e4m3[0]:g} to {e4m3[-1]:g}; around 1:")
print(e4m3[(e4m3 >= 1) & (e4m3 <= 2)].tolist())

# %% [markdown]
# So a tensor is divided by a **scale** that makes its largest magnitude the largest number of the
# format, and the scale is kept. By hand, on 4 x 4 numbers with one outlier, in e4m3 and, beside it,
# in int8:


# %%
def to_e4m3(x):
    """Through e4m3 and back, with one scale for all."""
    scale = x.abs().max() / 448
    return (x / scale).to(torch.float8_e4m3fn).float() * scale


def to_int8(x):
    """Through int8 and back."""
    scale = x.abs().max() / 127
    return (x / scale).round() * scale


x = torch.randn(4, 4)
x[1, 2] = 100.0
torch.set_printoptions(precision=3, sci_mode=False)
print(x, "\ne4m3:", to_e4m3(x), "\nint8:", to_int8(x), sep="\n")

# %% [markdown]
# One outlier, and in int8 everything else becomes a multiple of one coarse step. In e4m3 the small
# numbers keep their three bits: it is a *floating-point* format.

# %%
magnitude = torch.exp2(torch.linspace(-20, 0, 80 * 100))
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
for label, function in (("e4m3", to_e4m3), ("int8", to_int8)):
    error = (function(magnitude) - magnitude).abs() / magnitude
    ax.loglog(magnitude.reshape(80, 100)[:, 50], error.reshape(80, 100).amax(1), label=label)
ax.set(xlabel="magnitude, relative to the largest", ylabel="largest relative error", ylim=(1e-3, 2))
ax.set_xscale("log", base=2)
ax.legend(frameon=False)
plt.close(figure)
figure

# %% [markdown]
# *The largest relative error of a number, by how much smaller it is than the largest one that
# shares its scale. int8 is fine at the right end only. e4m3 is the same over many powers of two.*
#
# ### Your prediction
#
# FA3 offers finer scales (one for each head, or for each block of rows in the place of one for the
# tensor), and a rotation of queries and keys that spreads outliers over all dimensions. On inputs
# with outliers, which of the two reduces the error more: `"scales"` or `"rotation"`?

# %%
my_guess = None  # "scales" or "rotation"

# %%
measured_errors = json.loads((RESULTS / "h200-accuracy.json").read_text())
error_of = {
    (row["distribution"], row["D"], row["scheme"]): row["rmse"] for row in measured_errors["rows"]
}
by_scales = error_of["paper", 128, "tensor"] / error_of["paper", 128, "block"]
by_rotation = error_of["paper", 128, "block"] / error_of["paper", 128, "block+hadamard"]
guess(my_guess, "rotation" if by_rotation > by_scales else "scales", "what reduces the error more")
print(f"a scale for each block: {by_scales:.2f} times less; the rotation on top: {by_rotation:.2f}")

# %% [markdown]
# ### Why
#
# What hurts is not a small number that shares its scale with a large one. It is a large product.
# Where an outlier of a query meets one of a key **in the same dimension**, a single product makes
# the score. It is wrong by a few percent, and a few percent of a large score decide which key wins
# the softmax.
#
# The rotation multiplies queries and keys by the same orthogonal matrix: random signs, then
# Hadamard's matrix of +1 and −1. No score changes. But the large product is now spread over all
# dimensions, each with an error of its own, and errors that are independent cancel. The quantiser
# below is the package's, in the interpreter.

# %%
torch.manual_seed(1)
q, k, v = (torch.randn(1, 128, 1, 64) for _ in range(3))
q[0, :, 0, 5] += 20.0  # an outlier of every query and every key, in one dimension
k[0, :, 0, 5] += 20.0
exact = (q[0, :, 0] @ k[0, :, 0].T) / 8
rotated = {}
for how in (Fp8("tensor"), Fp8("head"), Fp8("block"), Fp8("block", hadamard=True)):
    q8, k8, _ = dequantize(quantize(q, k, v, how))
    rotated[str(how)] = q8[0, 0, 0]
    error = (q8[0, :, 0] @ k8[0, :, 0].T) / 8 - exact
    print(f"{how!s:24} error of a score: {error.std():.3f}")

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 2.2), layout="constrained", sharey=True)
for ax, (title, x) in zip(
    axes, (("a query", q[0, 0, 0]), ("the same, rotated", rotated[str(how)]))
):
    ax.bar(range(64), x.abs(), color="#0072B2")
    ax.set(title=title, xlabel="dimension")
axes[0].set_ylabel("magnitude")
plt.close(figure)
figure

# %% [markdown]
# *Left: one dimension outweighs all others. Right: after the rotation the outlier is a little of
# every dimension.*
#
# Now attention itself, by the FP8 kernel in the interpreter, against exact attention of the inputs
# before they were quantised. The inputs are the paper's: normal, with one entry in a thousand much
# larger. Beside it what was measured on an H200, on a sequence many times as long.

# %%
generator = torch.Generator().manual_seed(0)
q, k, v = (draw_inputs("paper", (1, 512, 4, 128), generator) for _ in range(3))
exact = exact_attention(q, k, v, torch.arange(512))
rows = []
for scheme, precision in SCHEMES.items():
    here = errors(attention(q, k, v, version="fa3", precision=precision), exact)["rmse"]
    row = [scheme, f"{here:.4f}", f"{error_of['paper', 128, scheme]:.4f}"]
    rows.append([*row, f"{error_of['gaussian', 128, scheme]:.4f}"])
length = measured_errors["what"]["S"]
table(
    ["relative RMS error", "here, 512 tokens", f"H200, {length} tokens", "H200, no outliers"], rows
)

# %% [markdown]
# Without outliers (last column) neither scales nor rotation do anything: there the error is that of
# three bits, and no bookkeeping removes it.
#
# ### Where the scales go
#
# Every scale goes into a number that the kernel has anyway.
#
# * Those of Q and K into the factor that takes a product to log2 units. The running maximum is kept
#   in these units, so blocks of different scales meet on one axis.
# * That of V into the **exponent** of P. The accumulator is kept in units of the head's largest
#   scale, `v_reference`, so P of a block is multiplied by `v_scale / v_reference`: one addition to
#   an exponent that is computed anyway.
# * P is at most 1, and e4m3 has its fewest bits down there, so P is multiplied by 2^8 as well.
# * The row sum counts P times 2^8, but *without* V's scale.

# %%
show(forward_fp8.softmax_step)
show(forward_fp8.fold_block, docstring=False)

# %% [markdown]
# ### Exercise: `fold_fp8`
#
# Write it down for one block, in PyTorch. The 8-bit numbers come as fp32 tensors; round P with
# `.to(torch.float8_e4m3fn).float()`.


# %%
def fold_fp8(state, s8, v8, q_scale, k_scale, v_scale, v_reference, scale_log2):
    """Fold a block of 8-bit keys and values into the state: (acc, row_max, row_sum).

    Args:
        state: acc (rows, dims), in units of v_reference; row_max (rows,), in log2 units; row_sum
            (rows,).
        s8: (rows, keys), the product of the 8-bit numbers of Q and K.
        v8: (keys, dims), the 8-bit numbers of V.
        q_scale, k_scale, v_scale: what 1 counts in the numbers of Q and of this block of K and V.
        v_reference: the largest v_scale of the head.
        scale_log2: the softmax's scale times log2(e).
    """
    acc, row_max, row_sum = state
    raise NotImplementedError  # your code here


check("fold_fp8", fold_fp8)

# %%
measured("fp8")

# %% [markdown]
# *FP8 beside 16 bits on an H200, the kernel alone. Twice the rate of products is not twice the
# speed: the products have become shorter, and all that stands between them has not.* That is where
# FA4 begins.

# %% [markdown]
# ## On your own GPU

# %% tags=["varies"]
own_gpu()

# %% [markdown]
# ## Where to read on
#
# * Shah, Bikshandi, Zhang, Thakkar, Ramani, Dao 2024,
#   [FlashAttention-3](https://arxiv.org/abs/2407.08608): section 3.1 has roles and ping-pong,
#   section 3.2 the overlap inside a group, section 3.3 FP8.
# * Upstream: [hopper/](https://github.com/Dao-AILab/flash-attention/tree/main/hopper) of
#   flash-attention, `mainloop_fwd_sm90_tma_gmma_ws.hpp`.
# * Here: `flash_versions/versions/fa3/forward.py` and `fa3/hopper/forward.py` (their docstrings draw
#   the schedule), `tiles/pipeline.py`, `tiles/tile_scheduler.py`, [fp8.md](../docs/fp8.md), and what did not
#   work in [log.md](../docs/log.md).
# * Solutions: `notebooks/solutions/causal_order.py` and `fold_fp8.py`. Next:
#   [04_fa4](04_fa4.ipynb).
