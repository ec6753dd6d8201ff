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
# # FA1: scores never leave the chip
#
# Attention is three lines of PyTorch. On a GPU they are slow, and arithmetic is not the reason:
# they write a matrix with one number for every pair of a query and a key to memory, and read it
# back. FlashAttention 1 computes the same result and never writes that matrix.
#
# After this notebook you can write its central step yourself; you will have watched the real
# kernel do it, block by block. [00_start](00_start.ipynb) says what attention is, what memory
# costs, and how to read a Triton kernel. No GPU is needed.

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
from lessons import check, film, guess, instructions, measured, own_gpu, record, show
from lessons.pictures import softmax_state, tiles, traffic

from flash_versions import attention, compare
from flash_versions.versions.fa1 import backward as fa1_backward
from flash_versions.versions.fa1 import forward as fa1
from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS
from flash_versions.bench.results import rate_of, read_results, shapes

np.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## What plain attention wastes
#
# Here are the three lines, for one head. `s` and `p` have a row for every query and a column for
# every key.


# %%
def plain(q, k, v):
    """Attention of one head: q, k, v (length, head_dim)."""
    s = q @ k.mT * q.shape[-1] ** -0.5  # written to memory
    p = torch.softmax(s, -1)  # s is read, p is written
    return p @ v  # p is read


# %% [markdown]
# Count what they move. The inputs and the output are small; the two matrices are not. The last
# two lines divide by what an H200 can do at best, according to its datasheet.

# %%
length, head_dim, size = 8192, 128, 2  # one head in bf16, 2 bytes to a number
tensors = 4 * length * head_dim * size  # q, k and v are read, o is written
matrices = 4 * length * length * size  # s is written and read, so is p
flops = 4 * length * length * head_dim  # two products, a multiplication and an addition each

arithmetic = flops / (TENSOR_TFLOPS * 1e12)
memory = (tensors + matrices) / (HBM_TB_PER_S * 1e12)
print(f"q, k, v, o        {tensors / 2**20:8.0f} MiB")
print(f"s and p           {matrices / 2**20:8.0f} MiB")
print(f"time to multiply  {arithmetic * 1e6:8.0f} microseconds")
print(f"time to move      {memory * 1e6:8.0f} microseconds")

# %%
Markdown(
    f"So {matrices / (tensors + matrices):.0%} of the traffic is a matrix that nobody asked for, and "
    f"moving it takes {memory / arithmetic:.0f} times as long as the arithmetic. The tensor cores wait."
)

# %% [markdown]
# Why not simply keep it on the chip? It does not fit: a multiprocessor has a few hundred KiB. And
# it cannot be cut up just like that: a softmax divides by a sum over *all* keys, and subtracts
# the largest of *all* scores first, so that no exponential overflows. When the first block of
# keys is there, neither is known.

# %% [markdown]
# ## The idea, by hand
#
# Take four queries, four keys, and scores that one can compute with.

# %%
scores = np.array([[1.0, 3, 2, 5], [4, 4, 0, 1], [0, 1, 2, 3], [6, 0, 2, 1]])
values = np.array([[1.0, 0], [0, 1], [2, 2], [4, -4]])

p = np.exp(scores - scores.max(1, keepdims=True))
softmax = p / p.sum(1, keepdims=True)
print("softmax\n", softmax)
print("o\n", softmax @ values)

# %% [markdown]
# Now pretend that only the first two keys have arrived. Do what can be done: take the maximum `m`
# and the sum `l` of *these*, and with them the attention `o` over these.

# %%
first = scores[:, :2]
m = first.max(1)
p = np.exp(first - m[:, None])
l = p.sum(1)  # noqa: E741
o = p @ values[:2] / l[:, None]
print("m", m)
print("l", l)
print("o\n", o)

# %% [markdown]
# The other two keys arrive. In some rows the maximum grows. Every exponential in `l` was computed
# as $e^{s - m}$ and should have been $e^{s - m_\text{new}}$: it is off by the factor $\alpha =
# e^{m - m_\text{new}}$, *the same one for all of them*. So the sum can be corrected after the
# fact, without a look at the old scores. So can `o`, which is a sum of the same exponentials with
# values behind them, divided by `l`.

# %%
second = scores[:, 2:]
m_new = np.maximum(m, second.max(1))
alpha = np.exp(m - m_new)
p = np.exp(second - m_new[:, None])
l_new = alpha * l + p.sum(1)
o_new = ((alpha * l)[:, None] * o + p @ values[2:]) / l_new[:, None]
print("m      ", m, "->", m_new)
print("alpha  ", alpha)
print("o\n", o_new)
print("equal to the softmax over all keys:", np.allclose(o_new, softmax @ values))

# %% [markdown]
# Nothing is approximate. Where the maximum did not grow, `alpha` is 1 and the old part stays as
# it is. Where it grew, the old part shrinks. This is the **online softmax**; `m`, `l` and a row
# of `o` stand for all keys that a query has seen so far.
#
# ## The kernel
#
# Here is that step in the package. `s` is a tile of scores in registers: a row for each query of
# the tile, a column for each key of the block.

# %%
show(fa1.softmax_step)

# %% [markdown]
# One line was not needed above: `pivot`. With a mask, a query may see no key of a block. Then its
# maximum is $-\infty$, and $-\infty - (-\infty)$ is not a number.
#
# Around this step stands what happens to one block of keys. There is no version before FA1 to
# hold it against, so hold it against the three lines of PyTorch:
#
# | plain | FA1, one block of keys |
# |---|---|
# | `s = q @ k.mT * scale` | `s = tl.dot(q_tile, k_tile.T) * scale` |
# | `p = softmax(s)` | `p, new_max, new_sum, alpha = softmax_step(s, row_max, row_sum)` |
# | `o = p @ v` | `pv = tl.dot(p, v_tile)`, and `o` is corrected and added to |

# %%
show(fa1.fold_block)

# %% [markdown]
# A loop folds one block after another, and a program does that for one tile of queries. The
# programs of all tiles run side by side on the GPU's multiprocessors.

# %%
show(fa1.attend, docstring=False)

# %% [markdown]
# The picture shows the score matrix, cut into tiles, each with the number of its turn. The
# paper's loop goes over keys outside and queries inside, and so reads and writes `o` again and
# again. The kernel here has the queries outside: `o` stays in registers and is written once.

# %%
tiles.compare(causal=True, versions=("paper", "fa1"))

# %% [markdown]
# *p0 to p5 are programs: each works through its row of tiles from left to right. Tiles above the
# diagonal, which a causal mask hides in full, are never visited.*

# %% [markdown]
# ## Two predictions
#
# Guess before you run the next cells; write a number in the place of `None`.
#
# Every program reads the keys and values that its queries see. So how many times is a key asked
# for in all, with 8192 queries in the tiles that FA1 takes on an H200?

# %%
block_q = fa1.MEASURED[head_dim].block_q
print("queries of a tile:", block_q)
my_guess = None  # your guess here

# %%
guess(my_guess, length // block_q, "times that each key is asked for")
counted = {name: traffic.count(name, length, head_dim) for name in ("plain", "fa1")}
print(f"FA1's programs ask for       {counted['fa1'].asked / 2**20:4.0f} MiB")
print(f"with each number once it is  {counted['fa1'].least / 2**20:4.0f} MiB")
print(f"plain attention moves        {counted['plain'].asked / 2**20:4.0f} MiB")

# %% [markdown]
# Does that not come to as much as plain attention moves? The programs *ask* for it. But those of
# one head run at the same time and ask for the same keys, which are few enough to stay in the
# GPU's L2 cache. So memory itself sees each of them about once. The scores of plain attention, of
# all heads, are far too many for a cache. And the larger the tile of queries, the less is asked
# for: that is why tiles are as large as the registers allow.
#
# Second prediction: 64 queries look at 256 keys with random scores, in 8 blocks of 32. In how
# many of the 8 blocks does the maximum of a row grow, on average over the rows?

# %%
my_guess = None  # your guess here

# %% [markdown]
# ## Watch it run
#
# `record` runs the package's kernel in Triton's interpreter, which executes each operation on a
# tile with NumPy. It keeps what the kernel had in its registers before and after each block.

# %%
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, n, 1, 32, generator=generator) for n in (64, 256, 256))
steps = record("fa1", q, k, v, block_q=64, block_kv=32)
grown = np.stack([step.after["row_max"] > step.before["row_max"] for step in steps])
guess(my_guess, float(grown.sum(0).mean()), "blocks in which the maximum grows")

# %% [markdown]
# Few: among random scores, a new one is the largest so far more and more rarely. FA1 corrects `o`
# in every block all the same. Keep this in mind; [FA4](04_fa4.ipynb) makes something of it.

# %%
film(
    softmax_state.frames(steps),
    softmax_state.frame,
    "The state of four queries, block after block: the maximum climbs in ever rarer steps, the sum "
    "drops where it does, and o settles.",
)

# %% [markdown]
# The kernel's docstring says that `o` is at every moment the attention over the keys seen so far.
# Hold it to that: after each block, against a softmax over the first keys.

# %%
s = (q[0, :, 0] @ k[0, :, 0].T * 32**-0.5).double()
for step in steps:
    seen = 32 * (step.j + 1)
    truth = torch.softmax(s[:, :seen], -1) @ v[0, :seen, 0].double()
    right = np.allclose(step.after["o"], truth, atol=1e-5)
    print(f"after {seen:3} keys, o is the attention over them: {right}")

# %% [markdown]
# With a causal mask, query 0 sees one key and query 63 sees 64. Here with four tiles of 16
# queries: which blocks does each visit?

# %%
q, k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(3))
steps = record("fa1", q, k, v, block_q=16, block_kv=16, causal=True)
for program in range(4):
    print(f"program {program} visits blocks", *[s.j for s in steps if s.program == program])

# %% tags=["varies"]
accuracy = compare(steps.o, q, k, v, causal=True)

# %% [markdown]
# This is the package's own verdict: the error against 64-bit arithmetic, and the most that is
# allowed, twice the error of plain PyTorch and the rounding of the result.
#
# ## What the compiler made of it
#
# The interpreter shows what a kernel computes, not what it costs. For that, compile it; no GPU is
# needed for this either. These are the instructions of the loop over the blocks, for each score
# in it: on an A100 (sm_80), an H200 (sm_90) and a B200 (sm_100).


# %%
def per_score(found, scores=128 * 64):
    """Instructions of the hot loop by name, for each score of its block: 128 queries, 64 keys."""
    threads = 32 * found["num_warps"]
    (loop,) = found["hot_loops"]
    return {name: count * threads / scores for name, count in loop["opcodes"].items()}


def table(columns, rows, digits):
    """Columns {name: {row: number}} as a table; a row is a label and the names that it sums up."""
    lines = ["| | " + " | ".join(columns) + " |", "|---" + "|--:" * len(columns) + "|"]
    for label, *names in rows:
        numbers = [sum(column.get(name, 0) for name in names) for column in columns.values()]
        lines.append(f"| {label} | " + " | ".join(f"{x:,.{digits}f}" for x in numbers) + " |")
    return Markdown("\n".join(lines))


compiled = instructions("fa1", ("sm_80", "sm_90", "sm_100"), head_dim=64, causal=True)
compiled = dict(zip(("A100", "H200", "B200"), compiled.values()))
loops = {gpu: per_score(found) for gpu, found in compiled.items()}
table(
    loops,
    [
        ("exponential (MUFU)", "MUFU"),
        ("multiplications (FMUL, FMUL2)", "FMUL", "FMUL2"),
        ("multiply-adds (FFMA)", "FFMA"),
        ("additions (FADD)", "FADD"),
        ("comparisons and selections (FSETP, ISETP, FSEL)", "FSETP", "ISETP", "FSEL"),
        ("maxima (FMNMX, FMNMX3)", "FMNMX", "FMNMX3"),
    ],
    digits=2,
)

# %%
Markdown(
    f"One exponential for each score is needed. But {loops['H200']['FMUL']:.1f} multiplications? One is "
    "the scale; one turns $e^x$ into $2^x$, which is all that the hardware has; two stand round each "
    "exponential in case its result is tiny; and two correct `o`, which here has as many numbers as the "
    "tile has scores. The products of the tensor cores hardly show in such a list: one instruction stands "
    "for thousands of multiplications. **These ordinary instructions are what FA2 will save.**"
)

# %%
table(
    compiled,
    [
        ("registers of a thread", "registers"),
        ("bytes spilled from them", "spill_stores"),
        ("shared memory of a program, bytes", "shared"),
        ("products by mma.sync, the A100's way", "mma_sync"),
        ("products by wgmma, Hopper's", "wgmma"),
        ("products by tcgen05, Blackwell's", "tcgen05"),
    ],
    digits=0,
)

# %% [markdown]
# The same source, three ways to multiply; and nothing is spilled: the whole state fits in
# registers.
#
# ## What it is worth
#
# First counted, which any laptop can do: bytes and arithmetic against the length, with a causal
# mask.

# %%
traffic.against_length(causal=True)

# %% [markdown]
# *Left: what programs ask for, and (green) what they need at the least. What lies between the two
# is the L2 cache's to answer; plain attention's line has no such help. Middle: the work that each
# byte brings. Right: half of plain attention's products are of scores that the mask hides; with
# tiles only those on the diagonal are.*
#
# What an H200 measured, from the committed results:

# %%
measured("memory", "Plain PyTorch's matrices grow with the length; what FA1 takes does not.")

# %%
measured(
    "forward", "FA1 against plain PyTorch is this notebook; the lines above are those to come."
)

# %%
document = read_results()
row = shapes(document, "table")[(2, 16, 16, 8192, 8192, 128, False)]
Markdown(
    f"At 8192 keys and head dimension 128, plain PyTorch takes {row['plain']['peak_mib']:,.0f} MiB beside its "
    f"inputs and FA1 {row['fa1']['peak_mib']:,.0f}. FA1 is {rate_of(row, 'fa1') / rate_of(row, 'plain'):.1f} "
    f"times as fast, and about as fast as torch's own FlashAttention-2 kernel "
    f"({rate_of(row, 'fa1'):.0f} and {rate_of(row, 'torch fa2'):.0f} TFLOP/s). But the GPU could do "
    f"{TENSOR_TFLOPS:.0f}."
)

# %% [markdown]
# On a GPU of your own, this cell measures it and draws it beside the H200:

# %% tags=["varies"]
own_gpu()

# %% [markdown]
# ## Backward, in short
#
# Training needs gradients, and their formulas need `p`, the very matrix that was never written.
# Plain PyTorch keeps it from the forward. FA1 keeps two numbers for each query, `m` and `l`, and
# *computes each tile of `p` again* when it needs it: $p = e^{s - m} / l$. Arithmetic is cheap
# here, memory is not.

# %%
kept = length * length * size
statistics = 2 * length * 4
print(f"kept by plain attention  {kept / 2**20:8.2f} MiB for one head")
print(f"kept by FA1              {statistics / 2**20:8.2f} MiB")

# %% [markdown]
# By hand, with the scores from above. The only surprise is `delta`: the softmax's gradient needs
# a sum over all keys, which one tile does not have; but it equals a product of two rows that
# every tile has, $\sum_k p_k \, (dO \cdot v_k) = dO \cdot o$.

# %%
s = torch.tensor(scores, requires_grad=True)
x = torch.tensor(values, requires_grad=True)
o = torch.softmax(s, -1) @ x
do = torch.tensor([[1.0, 2], [0, 1], [1, 1], [-1, 3]], dtype=torch.double)
o.backward(do)  # autograd's answer

m = torch.tensor(scores).max(1).values  # all that the forward kept, beside o
l = torch.exp(torch.tensor(scores) - m[:, None]).sum(1)  # noqa: E741
p = torch.exp(torch.tensor(scores) - m[:, None]) / l[:, None]  # p, again
delta = (do * o.detach()).sum(1)
dp = do @ torch.tensor(values).T
ds = p * (dp - delta[:, None])
print("dv is right:", torch.allclose(p.T @ do, x.grad))
print("ds is right:", torch.allclose(ds, s.grad))

# %% [markdown]
# The kernel does this for one block of keys and one block of queries. `dk` and `dv` belong to the
# keys and stay in registers; `dq` is loaded, added to, and stored.

# %%
show(fa1_backward.probabilities, docstring=False)
show(fa1_backward.fold_queries, docstring=False)

# %% tags=["varies"]
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
o = attention(*leaves, causal=True, version="fa1")
do = torch.randn(o.shape, generator=generator)
o.backward(do)
gradients = {f"d{name}": x.grad for name, x in zip("qkv", leaves)}
accuracy = compare(o.detach(), q, k, v, causal=True, do=do, **gradients)

# %%
multiprocessors = 132  # of an H200
row = shapes(document, "backward")[(2, 16, 16, 8192, 8192, 128, False)]
Markdown(
    f"Right, but slow: {rate_of(row, 'fa1'):.0f} TFLOP/s where plain PyTorch has "
    f"{rate_of(row, 'plain'):.0f} on an H200. The paper's schedule has one program for each head. In this "
    f"measurement that is {2 * 16} programs on {multiprocessors} multiprocessors, and each of them reads and "
    f"writes all of `dq` once for each block of keys. Memory is saved, the GPU is not filled. That is the "
    f"next version's business."
)

# %% [markdown]
# ## Exercises
#
# **1. Write the rescale step.** The state of a tile is `o` (rows, dim), `row_max` and `row_sum`
# (rows). Fold a block in: scores `s` (rows, keys), values `v` (keys, dim). Return the three, new.
# `o` stays normalised, as in FA1. Mind the row that has seen no key yet.


# %%
def fold(o, row_max, row_sum, s, v):
    """Return o, row_max, row_sum."""


check("fold", fold)

# %% [markdown]
# **2. Break the mask.** Leave `mask_scores` out of the kernel and leave its loop as it is. Some
# rows of a causal result change and others do not. This cell does it to the real kernel:

# %%
right = record("fa1", q, k, v, block_q=16, block_kv=16, causal=True).o
with patch.object(fa1, "mask_scores", lambda s, *_: s):
    broken = record("fa1", q, k, v, block_q=16, block_kv=16, causal=True).o
same = (right == broken).all(-1).flatten().nonzero().flatten()
print("rows that are still right:", *same.tolist())

# %% [markdown]
# Why these? Write down which rows change, for any length and any tiles; the check asks the
# kernel. The length is a multiple of both sizes, so no block reaches past the last key.


# %%
def rows_that_change(length, block_q, block_kv):
    """Return the numbers of the rows whose result changes."""


check("rows_that_change", rows_that_change)

# %% [markdown]
# Solutions are in [solutions/](solutions).
#
# ## Where to read on
#
# * Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135): Algorithm 1 is the
#   forward, Algorithm 4 and appendix B the backward, section 3.2 counts bytes.
# * Milakov and Gimelshein 2018, [Online normalizer calculation for
#   softmax](https://arxiv.org/abs/1805.02867): the trick with `alpha`, before there was
#   FlashAttention.
# * The first release, in CUDA:
#   [fmha_fprop_kernel_1xN.h](https://github.com/Dao-AILab/flash-attention/blob/v1.0.9/csrc/flash_attn/src/fmha_fprop_kernel_1xN.h).
# * [flash_versions/versions/fa1](../flash_versions/versions/fa1): the two files of this notebook, whole.
# * Next: [FlashAttention 2](02_fa2.ipynb) does the same with less of everything else.
