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
# # FA2: the same result with less of everything else
#
# FA1 took the score matrix out of memory. What is left is a loop in which the tensor cores
# multiply for a short while and wait for ordinary arithmetic the rest of the time; and, when
# there are few queries, a GPU of which most does nothing. FlashAttention 2 has no new formula. It
# takes work away.
#
# Read [01_fa1](01_fa1.ipynb) first.

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
from unittest.mock import patch

import numpy as np
import torch
from IPython.display import Markdown
from lessons import changes, check, film, guess, instructions, measured, own_gpu, record, show
from lessons.pictures import rooflines, splits, tiles, traffic
from matplotlib.figure import Figure

from flash_versions import attention, compare
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import combine as fa2_combine
from flash_versions.versions.fa2 import forward as fa2
from flash_versions.plot.figures import HBM_TB_PER_S
from flash_versions.bench.results import rate_of, read_results, shapes
from flash_versions.versions.tiles.algebra import finalize

np.set_printoptions(precision=3, suppress=True)
document = read_results()

# %% [markdown]
# ## What FA1 wasted
#
# **Multiplications.** The loop over the blocks as the compiler leaves it for an H200: how many
# ordinary multiplications are there for one score?


# %%
def per_score(found, scores=128 * 64):
    """Instructions of each hot loop for each score of a block (128 queries, 64 keys), by name."""
    threads = 32 * found["num_warps"]
    loops = [loop["opcodes"] for loop in found["hot_loops"]]
    loops.sort(key=lambda opcodes: sum(opcodes.values()))  # the one without a mask is shorter
    return [{name: n * threads / scores for name, n in opcodes.items()} for opcodes in loops]


(fa1_loop,) = per_score(instructions("fa1", "sm_90", head_dim=64, causal=True))
print(f"multiplications for each score: {fa1_loop['FMUL']:.1f}")

# %% [markdown]
# **Masks.** A causal mask is a comparison and a selection for every score. But only blocks that
# the diagonal cuts need it; those below it are visible in full, those above are not visited.

# %%
length, block_q, block_kv = 8192, 128, 64
in_tile = block_q // block_kv
visited = sum((tile + 1) * in_tile for tile in range(length // block_q))
cut = length // block_q * in_tile
print(f"blocks visited {visited}, cut by the diagonal {cut}: {cut / visited:.1%}")

# %% [markdown]
# **The GPU.** When a model writes text, one query at a time looks at a long cache of keys. FA1
# has one program for each head. A GPU has many more multiprocessors than that, and each program
# walks the whole cache alone.

# %%
multiprocessors = 132  # of an H200
decode = {shape[4]: row for shape, row in shapes(document, "decode").items() if shape[0] == 1}
keys = max(decode)
found = decode[keys]["fa1"]
print(f"programs {found['H']}, multiprocessors {multiprocessors}")
print(
    f"{keys} keys: {found['tb_per_s']:.2f} TB/s of keys and values; an H200 can read {HBM_TB_PER_S}"
)

# %% [markdown]
# ## The ideas, by hand
#
# **Normalise once.** FA1 divides by the sum after every block, and multiplies by the old sum
# before the next. Leave both out. Carry the sum of exponentials times values as it is (`acc`) and
# divide at the very end. One correction by `alpha` remains.

# %%
scores = np.array([[1.0, 3, 2, 5], [4, 4, 0, 1], [0, 1, 2, 3], [6, 0, 2, 1]])
values = np.array([[1.0, 0], [0, 1], [2, 2], [4, -4]])

m, l, acc = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2))  # noqa: E741
for block in (slice(0, 2), slice(2, 4)):
    m_new = np.maximum(m, scores[:, block].max(1))
    alpha = np.exp(m - m_new)
    p = np.exp(scores[:, block] - m_new[:, None])
    l = alpha * l + p.sum(1)  # noqa: E741
    acc = alpha[:, None] * acc + p @ values[block]
    m = m_new
    print("alpha", alpha, "\nacc\n", acc)
o = acc / l[:, None]
truth = torch.softmax(torch.tensor(scores), -1) @ torch.tensor(values)
print("equal after the last division:", np.allclose(o, truth))

# %% [markdown]
# **Compute powers of two.** The hardware has $2^x$ and no $e^x$; $e^x = 2^{x \log_2 e}$ costs a
# multiplication for each score. But scores are multiplied by a scale in any case, $1/\sqrt{d}$.
# Put $\log_2 e$ into it, and keep the maximum in these units, too. Then `s * scale_log2 - m` is a
# single instruction, a multiply-add.

# %%
scale_log2 = np.log2(np.e)  # times 1 / sqrt(d), which is 1 here
print(np.exp2(scores[0] * scale_log2 - (scores[0] * scale_log2).max()))
print(np.exp(scores[0] - scores[0].max()))

# %% [markdown]
# **Split the keys.** Let two programs share the keys of one query. Each does the loop above on
# its own half, and knows nothing of the other. What they leave, `acc`, `m` and `l`, can be added
# when both are brought to one maximum: the online softmax step once more, with whole halves in
# the place of blocks.

# %%
halves = []
for half in (slice(0, 2), slice(2, 4)):
    s = scores[0, half]
    p = np.exp(s - s.max())
    halves.append((p @ values[half], s.max(), p.sum()))
    print("acc {}  m {}  l {:.3f}".format(*halves[-1]))
(acc_a, m_a, l_a), (acc_b, m_b, l_b) = halves
m = max(m_a, m_b)
weight_a, weight_b = np.exp(m_a - m), np.exp(m_b - m)
print("weights", weight_a, weight_b)
print("o", (weight_a * acc_a + weight_b * acc_b) / (weight_a * l_a + weight_b * l_b))
print("o over all keys", truth[0].numpy())

# %% [markdown]
# ## The kernel: what changes
#
# Red was in FA1, green is in FA2. First the softmax step: powers of two, and the scale inside.

# %%
changes("fa1", "fa2", "softmax_step")

# %% [markdown]
# Then a block of keys. `o` has become `acc`, and the two lines that normalised it are gone:
# `acc * alpha` goes into the product as what it is added to. The mask has become a question that
# the *compiler* answers, for `MASKED` is a constant. (`cap_scores`, `add_alibi`, `drop` and
# `rows_in_pages` serve options of the API. Where a call does not use them, no instruction is left
# of them.)

# %%
changes("fa1", "fa2", "fold_block")

# %% [markdown]
# One loop has become three, with the same body: with a mask on the left (only for a sliding
# window), without a mask, with a mask on the right.

# %%
changes("fa1", "fa2", "attend")

# %% [markdown]
# And the division has moved behind the loops.

# %%
show(finalize)

# %% [markdown]
# Two more things happen outside the loop. Query heads that share a key head become *rows of one
# tile*, so that K and V are read once for all of them. And causal tiles begin with the last
# queries, which see the most keys: what takes longest should not start last.

# %%
tiles.compare(causal=True, versions=("fa1", "fa2"))

# %% [markdown]
# *The numbers say in which order tiles are visited; FA2 begins at the bottom. Only tiles on the
# diagonal pay for the mask.*

# %% [markdown]
# ## Two predictions
#
# FA1 has the number of multiplications for each score that was printed above. How many has FA2's
# loop without a mask?

# %%
my_guess = None  # your guess here

# %%
compiled = instructions("fa2", ("sm_80", "sm_90", "sm_100"), head_dim=64, causal=True)
fa2_loop, fa2_masked = per_score(compiled["sm_90"])
guess(my_guess, fa2_loop["FMUL"], "multiplications for each score")

# %% [markdown]
# And: 4 query heads share one key head, one query looks at 64 keys in blocks of 16. FA1 folds 16
# blocks, 4 for each head. How many does FA2 fold?

# %%
my_guess = None  # your guess here

# %% [markdown]
# ## Watch it run
#
# The real kernels, in the interpreter.

# %%
generator = torch.Generator().manual_seed(0)
q = torch.randn(1, 1, 4, 32, generator=generator)  # (batch, length, heads, head_dim)
k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(2))
folds = {name: len(record(name, q, k, v, block_kv=16)) for name in ("fa1", "fa2")}
print("FA1 folds", folds["fa1"])
guess(my_guess, folds["fa2"], "FA2 folds")

# %% [markdown]
# A causal run of 64 queries in tiles of 16. Each frame is a step: the scores that a program has
# folded so far, and the size of each row of `acc`. Blocks on the diagonal come with a mask (white
# is $-\infty$), the others without.

# %%
q, k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(3))
steps = record("fa2", q, k, v, block_q=16, block_kv=16, causal=True)


def draw(index):
    """The score matrix after this step, and what the rows of acc have grown to."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    seen = np.full((64, 64), np.nan)
    for step in steps[: index + 1]:
        tile = 3 - step.program  # causal: the last queries first
        seen[16 * tile : 16 * tile + 16, 16 * step.j : 16 * step.j + 16] = step.after["s"]
    seen[np.isinf(seen)] = np.nan
    left.imshow(seen, vmin=-15, vmax=15, cmap="coolwarm")
    left.set(xlabel="key", ylabel="query", xticks=range(0, 65, 16), yticks=range(0, 65, 16))
    left.grid(color="0.7")
    step = steps[index]
    masked = np.isinf(step.after["s"]).any()
    figure.suptitle(f"program {step.program}, block {step.j}: {'mask' if masked else 'no mask'}")
    rows = 16 * (3 - step.program) + np.arange(16)
    for name, colour in (("before", "0.8"), ("after", "#0072B2")):
        state = getattr(step, name)
        size = np.linalg.norm(state["acc"], axis=1)
        right.barh(rows, size, color=colour, height=0.9 if name == "before" else 0.5, label=name)
    right.set(xlim=(0, 40), ylim=(rows[-1] + 0.5, rows[0] - 0.5), xlabel="|acc| of a row")
    right.legend(loc="lower right", frameon=False)
    return figure


film(
    range(len(steps)),
    draw,
    "Left, the scores computed so far: the last tile of queries comes first. Right, acc of the tile's rows: it is "
    "not normalised and grows with every key, and shrinks where a larger maximum arrives.",
)

# %% tags=["varies"]
accuracy = compare(steps.o, q, k, v, causal=True)

# %% [markdown]
# ## Split the keys, watched
#
# One query, 192 keys, 4 splits. Each split is a program of its own on the grid's second axis.

# %%
splits.ranges(blocks=12, n=4)

# %%
q = torch.randn(1, 1, 1, 32, generator=generator)
k, v = (torch.randn(1, 192, 1, 32, generator=generator) for _ in range(2))
steps = record("fa2", q, k, v, block_q=16, block_kv=16, num_splits=4)
last = {step.split: step.after for step in steps}  # the last step of each split
for split, state in last.items():
    folded = [step.j for step in steps if step.split == split]
    print(
        f"split {split}: blocks {folded}, m {state['row_max'][0]:.3f}, l {state['row_sum'][0]:.3f}"
    )

# %% [markdown]
# Take what the splits left and reduce it, two at a time, as the picture below does. The order
# does not matter. Units are log2, so weights are powers of two.

# %%
parts = [(x["acc"][0], x["row_max"][0], x["row_sum"][0]) for x in last.values()]
while len(parts) > 1:
    (acc_a, m_a, l_a), (acc_b, m_b, l_b) = parts[:2]
    m = max(m_a, m_b)
    a, b = np.exp2(m_a - m), np.exp2(m_b - m)
    parts = [*parts[2:], (a * acc_a + b * acc_b, m, a * l_a + b * l_b)]
acc, m, l = parts[0]  # noqa: E741
print("equal to what the kernel wrote:", np.allclose(acc / l, steps.o[0, 0, 0], atol=1e-6))

# %%
splits.tree(4)

# %% [markdown]
# *Each leaf is a split, each node brings two parts to one maximum and adds them.*
#
# In the package the reduction is a kernel of its own. It does not build a tree: one program for
# each row walks over the splits, a tile of them at a time, and keeps a maximum and sums as FA1 does
# for keys. Where it can, the GPU launches it while the splits are still at work; `gdc_wait` waits
# for them.

# %%
show(fa2_combine.combine_kernel, docstring=False)

# %% [markdown]
# How many splits? As many as fill the GPU, twice over; but a split gets at least four blocks, or
# the reduction costs more than it gains.

# %%
show(fa2.choose_num_splits)
for heads in (8, 32, 128):
    chosen = fa2.choose_num_splits(heads, 131072 // 64, multiprocessors)
    print(f"{heads:3} programs, 131072 keys: {chosen} splits")

# %% [markdown]
# ## What the compiler made of it
#
# Instructions for each score, of FA1's loop and of FA2's two, with a mask and without.

# %%
columns = {"FA1, H200": fa1_loop, "FA2, H200": fa2_loop, "FA2 masked, H200": fa2_masked}
for gpu, arch in (("A100", "sm_80"), ("B200", "sm_100")):
    columns[f"FA2, {gpu}"] = per_score(compiled[arch])[0]
rows = {
    "exponential (MUFU)": ("MUFU",),
    "multiplications (FMUL, FMUL2)": ("FMUL", "FMUL2"),
    "multiply-adds (FFMA)": ("FFMA",),
    "additions (FADD)": ("FADD",),
    "comparisons and selections (FSETP, ISETP, FSEL)": ("FSETP", "ISETP", "FSEL"),
    "maxima (FMNMX, FMNMX3)": ("FMNMX", "FMNMX3"),
    "all instructions": tuple({name for column in columns.values() for name in column}),
}
lines = ["| | " + " | ".join(columns) + " |", "|---" + "|--:" * len(columns) + "|"]
for label, names in rows.items():
    numbers = [sum(column.get(name, 0) for name in names) for column in columns.values()]
    lines.append(f"| {label} | " + " | ".join(f"{x:.2f}" for x in numbers) + " |")
Markdown("\n".join(lines))

# %%
saved = 1 - sum(fa2_loop.values()) / sum(fa1_loop.values())
Markdown(
    f"The loop without a mask has {saved:.0%} fewer instructions than FA1's. Of {fa1_loop['FMUL']:.1f} "
    f"multiplications {fa2_loop['FMUL']:.1f} is left, `acc * alpha`, and one multiply-add makes the exponent. The "
    f"exponentials themselves are the same number in both: there is one for each score, and no schedule can save "
    f"it. [FA4](04_fa4.ipynb) comes back to them."
)

# %% [markdown]
# The same without a compiler, counted from the schedules: what there is to do beside the products
# of the tensor cores.

# %%
traffic.ordinary_work(head_dim=64)

# %% [markdown]
# *With a causal mask, for each score that a query sees. From FA1 to FA2 most comparisons go, and
# half of the products with the accumulator; the exponentials stay.*
#
# ## What it is worth
#
# Measured on an H200, from the committed results.

# %%
measured("speedup", "From fa1 to fa2 is what this notebook is about, as a ratio.")

# %%
table = [
    row for shape, row in shapes(document, "table").items() if shape[5] == 64 and shape[3] > 1024
]
gains = [rate_of(row, "fa2") / rate_of(row, "fa1") for row in table]
long = decode[keys]
group = long["fa1"]["H"] // long["fa1"]["Hkv"]
Markdown(
    f"At head dimension 64, from 2048 keys on, FA2 is {min(gains):.2f} to {max(gains):.2f} times as fast as FA1. "
    f"With one query and {keys:,} keys, FA1 takes in keys and values at {long['fa1']['tb_per_s']:.2f} "
    f"TB/s. With the query heads packed a key is read once and not {group} times, but fewer programs "
    f"are there to wait for memory: {long['fa2 unsplit']['tb_per_s']:.2f}. With the keys split it is "
    f"{long['fa2']['tb_per_s']:.2f}, {long['fa1']['ms_p50'] / long['fa2']['ms_p50']:.0f} times as fast "
    f"as FA1, from a second axis of the grid."
)

# %%
rooflines.draw()

# %% [markdown]
# *The slope is what memory allows, the flat roof what the tensor cores do. Plain attention stands
# under the slope. A version is a line: at its left end the bytes that its programs ask for are
# counted, at its right end every number once; a left end above the slope says that the L2 cache
# answered. So memory no longer limits FA1 and FA2. The dotted line is the next limit: what can be
# reached if products and exponentials take turns. FA3 stands above it.*

# %% [markdown]
# On a GPU of your own:

# %% tags=["varies"]
own_gpu()

# %% [markdown]
# ## Backward: two passes, each writes what it owns
#
# FA1's backward had one program for each head, which read and wrote all of `dq` for each block of
# keys. FA2 cuts it in pieces that do not meet:
#
# * a small kernel computes `delta`, once for each row;
# * one program for each block of *keys* walks the queries that see it, and owns a piece of `dk`
#   and `dv`;
# * one program for each tile of *queries* walks its keys, and owns a piece of `dq`.
#
# Each program keeps what it owns in registers and writes it once. The scores are computed twice
# for that: seven products of tiles in the place of five. And the forward leaves one number for
# each row in the place of two, the LSE: $p = e^{s - \mathrm{lse}}$ needs neither `m` nor `l`.

# %%
show(fa2_backward.probabilities)
show(fa2_backward.fold_keys, docstring=False)

# %% tags=["varies"]
q, k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(3))
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
o = attention(*leaves, causal=True, version="fa2")
do = torch.randn(o.shape, generator=generator)
o.backward(do)
gradients = {f"d{name}": x.grad for name, x in zip("qkv", leaves)}
accuracy = compare(o.detach(), q, k, v, causal=True, do=do, **gradients)

# %%
shape = (2, 16, 16, 8192, 8192, 128, False)
row = shapes(document, "backward")[shape]
batch, heads, tile = shape[0], shape[1], fa2_backward.MEASURED_KV[128].block_kv
Markdown(
    f"With {batch} sequences of {shape[3]} keys and {heads} heads, that is "
    f"{batch * heads * shape[3] // tile} programs for `dk` and `dv` where FA1 had {batch * heads}. On an H200: "
    f"{rate_of(row, 'fa2'):.0f} TFLOP/s where FA1 had {rate_of(row, 'fa1'):.0f}, plain PyTorch "
    f"{rate_of(row, 'plain'):.0f}."
)

# %%
measured(
    "backward", "FA1's falls with the length: fewer sequences, fewer programs. FA2's does not."
)

# %% [markdown]
# ## Exercises
#
# **1. Write the combine step.** `acc` is (splits, rows, dim), `row_max` and `row_sum` are
# (splits, rows), in log2 units. Return `o` (rows, dim) and the LSE (rows) in natural units. Some
# splits see no key of a row (`row_max` is $-\infty$), some rows see no key at all: `o` is 0
# there, and the LSE $-\infty$.


# %%
def combine(acc, row_max, row_sum):
    """Return o, lse."""


check("combine", combine)

# %% [markdown]
# **2. Fix the missing rescale.** First see what it does: here the real kernel runs with an
# `alpha` of 1.

# %%
step = fa2.softmax_step


def without_alpha(*given):
    """The softmax step, and nothing to correct acc by."""
    p, row_max, row_sum, alpha = step(*given)
    return p, row_max, row_sum, alpha * 0 + 1


right = record("fa2", q, k, v, block_q=64, block_kv=16)
with patch.object(fa2, "softmax_step", without_alpha):
    broken = record("fa2", q, k, v, block_q=64, block_kv=16)
same = (right.o == broken.o).all(-1).flatten().nonzero().flatten()
print("rows that are still right:", *same.tolist())

# %% [markdown]
# Why these? Look at the maxima, block after block, of a row that is right and of two that are
# not.

# %%
maxima = np.stack([step.after["row_max"] for step in right])
others = [row for row in range(64) if row not in same]
for row in (int(same[0]), *others[:2]):
    print(f"row {row:2}", maxima[:, row])

# %% [markdown]
# Where the largest score is in the first block, nothing has to be corrected later. Now repair
# this loop. It is FA2's in NumPy, and one factor is missing.


# %%
def attend(q, k, v, block):
    """Attention of q (rows, dim) over k and v (keys, dim), `block` keys at a time."""
    scale_log2 = np.log2(np.e) / np.sqrt(q.shape[1])
    acc = np.zeros((len(q), v.shape[1]))
    row_max = np.full(len(q), -np.inf)
    row_sum = np.zeros(len(q))
    for first in range(0, len(k), block):
        s = q @ k[first : first + block].T
        new_max = np.maximum(row_max, s.max(1) * scale_log2)
        p = np.exp2(s * scale_log2 - new_max[:, None])
        alpha = np.exp2(row_max - new_max)
        row_sum = alpha * row_sum + p.sum(1)
        acc = acc + p @ v[first : first + block]
        row_max = new_max
    return acc / row_sum[:, None]


check("attend", attend)

# %% [markdown]
# Solutions are in [solutions/](solutions).
#
# ## Where to read on
#
# * Dao 2023, [FlashAttention-2](https://arxiv.org/abs/2307.08691): section 3.1 for the algorithm,
#   3.2 for the grid.
# * Dao, Haziza, Massa, Sizov 2023, [Flash-Decoding for long-context
#   inference](https://pytorch.org/blog/flash-decoding/): splitting the keys.
# * The original, in CUDA:
#   [csrc/flash_attn/src/flash_fwd_kernel.h](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/src/flash_fwd_kernel.h).
# * `python -m flash_versions.diff fa1 fa2` prints the whole lesson.
# * Next: [FlashAttention 3](03_fa3.ipynb). The loop is lean now, and still one thing after the
#   other.
