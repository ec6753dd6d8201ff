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
# # Start here: attention, the memory wall, a first kernel
#
# These notebooks lead from FlashAttention 1 to FlashAttention 4, in kernels that run. You need some
# Python, some PyTorch and a little linear algebra. You need no GPU: the kernels run in Triton's
# interpreter, on the CPU, and every step in them can be looked at.
#
# This one lays the ground.
#
# 1. What attention computes, with four queries and four keys.
# 2. Why it is slow: not for its arithmetic, but for a matrix that it writes to memory.
# 3. How to read a Triton kernel: programs, blocks, pointers, masks.
# 4. The shape of the first attention kernel, and a look at it at work.
#
# Before some cells you are asked for a guess. Write it down where it says `None`, then run the cell:
# a number that you have guessed wrong stays in mind longer than one that you have read.

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
from lessons import check, film, guess, measured, own_gpu, record, show

import numpy as np
import torch
import triton
import triton.language as tl
from IPython.display import Markdown
from matplotlib.figure import Figure

from flash_versions import VERSIONS, attention, compare
from flash_versions.versions.fa1 import forward as fa1
from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS
from flash_versions.dispatch.device import H200_SHARED_MEMORY

torch.manual_seed(0)
torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown]
# ## Attention, by hand
#
# Four tokens. Each has a **query** (what it looks for), a **key** (what it offers to those who look)
# and a **value** (what it hands over). They are rows of three matrices, here with two numbers each.

# %%
q = torch.tensor([[2.0, 0], [0, 2], [1, 1], [2, 2]])
k = torch.tensor([[1.0, 0], [0, 1], [2, 0], [1, 2]])
v = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 2]])

# %% [markdown]
# The **score** of a query and a key is their dot product, divided by the square root of their length
# so that long vectors do not have larger scores: $S = Q K^T / \sqrt{d}$. One row for each query, one
# column for each key.

# %%
s = q @ k.T / k.shape[1] ** 0.5
s

# %% [markdown]
# A **softmax** of each row makes weights of the scores: positive, and together 1. The exponential of a
# large score overflows, so the largest score of the row is subtracted first. That changes nothing:
# numerator and denominator are divided by the same number.

# %%
exponentials = torch.exp(s - s.max(1, keepdim=True).values)
p = exponentials / exponentials.sum(1, keepdim=True)
p

# %% [markdown]
# The **output** of a query is the mean of all values, with these weights: $O = P V$.

# %%
o = p @ v
o

# %% [markdown]
# That is all that attention is. A language model adds one rule: a token may look at itself and at what
# came before it, and not at what comes after. Scores of later keys are set to $-\infty$, whose
# exponential is 0. This is the **causal mask**.

# %%
hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
torch.softmax(s.masked_fill(hidden, float("-inf")), 1)

# %% [markdown]
# The package computes the same with a kernel. Its tensors have four dimensions: batch, length, heads,
# head dimension. A layer of a model has many **heads**, each with queries, keys and values of its own;
# they know nothing of each other, so one is enough to understand all.

# %%
found = attention(*(x[None, :, None] for x in (q, k, v)), version="fa1")
print("by hand\n", o)
print("by the kernel\n", found[0, :, 0])

# %% [markdown]
# ## The memory wall
#
# Four tokens have 16 scores. A text has more tokens, and the score matrix has a number for *every pair*
# of them. K and V have one row for each token. Compare what they take, for one head of 128 numbers in
# 16 bits.

# %%
HEAD_DIM, BYTES = 128, 2


def score_bytes(length):
    """Bytes of the score matrix of one head."""
    return length * length * BYTES


def kv_bytes(length):
    """Bytes of K and V of one head."""
    return 2 * length * HEAD_DIM * BYTES


print(f"{'tokens':>8}  {'K and V':>12}  {'scores':>12}")
for length in (256, 1024, 4096, 16384, 65536):
    kv, scores = (f"{x(length) / 2**20:9.2f} MiB" for x in (kv_bytes, score_bytes))
    print(f"{length:8,}  {kv}  {scores}")

# %% [markdown]
# The inputs grow with the length, the scores with its square. *Before you run the next cell:* of how
# many tokens on is the score matrix larger than K and V together?

# %%
my_guess = None  # your guess here

# %%
even = next(n for n in range(1, 10**6) if score_bytes(n) > kv_bytes(n))
guess(my_guess, even, "the score matrix is larger from", "tokens on")

# %% [markdown]
# A matrix that large does not fit on the chip. A GPU has many small processors, **multiprocessors**,
# each with registers and some **shared memory** next to its arithmetic units. All else lies in the
# large memory beside the chip (HBM on big GPUs), and comes and goes over a bus that they share. The
# datasheet of an H200 says how large and how fast these are.

# %%
ridge = TENSOR_TFLOPS / HBM_TB_PER_S
Markdown(
    f"A program on a multiprocessor of an H200 has {H200_SHARED_MEMORY / 2**10:.0f} KiB of shared memory. "
    f"The tensor cores of the GPU do {TENSOR_TFLOPS:g} tera floating-point operations in a second, its memory "
    f"moves {HBM_TB_PER_S:g} terabytes. So for every byte that is moved it could do "
    f"**{ridge:.0f} operations**. A computation that does fewer waits for memory."
)

# %% [markdown]
# How many does attention do? Its two products have $4 S^2 d$ operations. Plain attention writes $S$, reads
# it for the softmax, writes $P$ and reads that again.

# %%
length = 16384
operations = 4 * length**2 * HEAD_DIM
least = 2 * kv_bytes(length)  # q, k and v are read once, o is written once
plain = least + 4 * score_bytes(length)
print(f"plain attention     {operations / plain:8,.0f} operations for a byte")
print(f"without the matrix  {operations / least:8,.0f} operations for a byte")

# %%
Markdown(
    f"With the matrix, attention does {operations / plain:.0f} operations for a byte, where the GPU "
    f"could do {ridge:.0f}: memory is the limit, and the tensor cores idle. Without it there would be "
    f"work enough. **This is FlashAttention's idea: the same result, and the matrix is never written.** "
    "It is computed a block at a time, used, and forgotten, on the chip."
)

# %% [markdown]
# What was measured on an H200 says the same. Each line is the memory that a forward needs beside its
# inputs, over the length. The longer the sequences, the fewer there are, so the number of tokens is always
# the same.

# %%
measured(
    "memory",
    "Plain PyTorch's line rises with the length: that is the score matrix. All others are flat.",
)

# %% [markdown]
# ## A first Triton kernel
#
# A **kernel** is a function that the GPU runs many times at once. In Triton, one such run is called a
# **program**. All programs run the same code; each asks for its number, `tl.program_id`, and works on its
# own piece, a **block**.
#
# Here is the smallest useful one: it adds two vectors.


# %%
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y, of n numbers each; every program adds BLOCK of them."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # which numbers are mine
    mine = index < n  # the last block may reach past the end
    a = tl.load(x + index, mask=mine, other=0.0)
    b = tl.load(y + index, mask=mine, other=0.0)
    tl.store(out + index, a + b, mask=mine)


def add(x, y, block=4):
    """x + y, by the kernel."""
    out = torch.empty_like(x)
    programs = triton.cdiv(x.numel(), block)
    add_kernel[(programs,)](x, y, out, x.numel(), BLOCK=block)
    return out


x, y = torch.arange(10.0), 100 * torch.ones(10)
add(x, y)

# %% [markdown]
# Line by line.
#
# * `x`, `y` and `out` arrive as **pointers**: the address of a tensor's first number. A kernel knows
#   nothing of shapes.
# * `tl.arange(0, BLOCK)` is a vector. Almost everything in a kernel is one: `index` holds the places of this
#   program's numbers, and `x + index` is a vector of addresses.
# * `tl.load` fetches all of them at once, `tl.store` writes all of them at once.
# * `BLOCK` is a `tl.constexpr`: known when the kernel is compiled, and a power of two.
# * `mine` is the **mask**. Ten numbers do not divide into blocks of four, and the last program must leave
#   alone what lies behind the end.
# * `add_kernel[(programs,)](...)` launches it; in the brackets stands the **grid**, how many programs there
#   are.
#
# *Guess:* how many programs does a vector of 1000 numbers need, in blocks of 128?

# %%
my_guess = None  # your guess here

# %%
guess(my_guess, triton.cdiv(1000, 128), "programs")

# %% [markdown]
# Where there is no GPU, Triton **interprets** a kernel: it runs the programs one after the other, with NumPy
# in the place of the hardware. So you may print in it.


# %%
@triton.jit
def talking_kernel(n, BLOCK: tl.constexpr):
    """What each program of add_kernel works on."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    print("program", tl.program_id(0), "index", index, "mine", index < n)


talking_kernel[(3,)](10, BLOCK=4)

# %% [markdown]
# What if the mask is forgotten? Nothing warns you. The kernel writes to whatever lies behind the vector, here
# to two numbers of its neighbour.


# %%
@triton.jit
def careless_kernel(x, y, out, BLOCK: tl.constexpr):
    """As add_kernel, without a mask."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + index, tl.load(x + index) + tl.load(y + index))


memory = torch.zeros(16)
mine, neighbour = memory[:10], memory[10:]
x, y = torch.arange(12.0), 100 * torch.ones(12)
careless_kernel[(3,)](x, y, mine, BLOCK=4)
print("mine      ", mine)
print("neighbour ", neighbour)

# %% [markdown]
# ## Tiles
#
# Attention works on matrices, and a block of a matrix is a **tile**. Memory is a line of numbers all the same:
# row $i$, column $j$ of a matrix lies at place $i \cdot \text{stride} + j$. A column of row numbers plus a row of
# column numbers gives a square of places:

# %%
rows, columns, stride = torch.arange(4, 8), torch.arange(0, 4), 10
rows[:, None] * stride + columns[None, :]

# %% [markdown]
# In a kernel, `[:, None]` and `[None, :]` do the same, and `tl.dot` multiplies tiles, on the tensor cores of a
# GPU. This kernel computes the scores: each program one tile of the matrix. The grid has two axes now.


# %%
@triton.jit
def scores_kernel(q, k, s, length, scale, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """S = scale Q K^T of q, k (length, DIM); a program for each tile of S."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dim = tl.arange(0, DIM)
    q_tile = tl.load(q + row[:, None] * DIM + dim[None, :], mask=(row < length)[:, None], other=0.0)
    k_tile = tl.load(
        k + column[:, None] * DIM + dim[None, :], mask=(column < length)[:, None], other=0.0
    )
    tile = tl.dot(q_tile, k_tile.T) * scale
    inside = (row < length)[:, None] & (column < length)[None, :]
    tl.store(s + row[:, None] * length + column[None, :], tile, mask=inside)


q, k, v = (torch.randn(12, 16) for _ in range(3))
s = torch.empty(12, 12)
scores_kernel[(3, 3)](q, k, s, 12, 16**-0.5, DIM=16, BLOCK=4)
print("the same as PyTorch, but for rounding:", torch.allclose(s, q @ k.T / 4, atol=1e-5))

# %% [markdown]
# It is also the first line of plain attention, and its last line, `tl.store`, is what FlashAttention does not do.

# %% [markdown]
# ## The shape of FA1's kernel
#
# Now you can read the real thing. It looks longer than it is: most lines say which rows and keys a program
# works on. Look for `tl.program_id`, for the tile that is loaded, for the call of `attend`, for the stores.

# %%
show(fa1.forward_kernel)

# %% [markdown]
# A program has one tile of **queries**. `load_rows` and `store_rows` are the tile arithmetic from above, with
# the mask; `block_range` says which blocks of keys the tile sees at all. The loop over them is in `attend`:

# %%
show(fa1.attend)

# %% [markdown]
# Three things travel round the loop, all on the chip: `o`, the output so far; `row_max`, the largest score so far
# of each query; `row_sum`, the sum of the exponentials so far. What happens to them in `fold_block` is the lesson
# of [the next notebook](01_fa1.ipynb). Here, only watch where the scores are.
#
# `record` runs the package's kernel in the interpreter and takes notes: one `Step` for each block of keys that a
# program folds in.

# %%
q, k, v = (torch.randn(1, 12, 1, 16) for _ in range(3))
steps = record("fa1", q, k, v, causal=True, block_q=4, block_kv=4)
for step in steps:
    print(
        f"program {step.program}, keys {4 * step.j} to {4 * step.j + 3}: s is",
        step.after["s"].shape,
    )

# %% [markdown]
# *Guess:* the scores of 12 queries and 12 keys are 144 numbers. How many of them exist at any one time, if one
# program runs after the other?

# %%
my_guess = None  # your guess here

# %%
guess(my_guess, max(step.after["s"].size for step in steps), "scores that exist at a time")


# %%
def draw(step):
    """The score matrix, of which only one tile exists."""
    figure = Figure(figsize=(3.4, 3.4), layout="constrained")
    ax = figure.subplots()
    matrix = np.full((12, 12), np.nan)
    s = step.after["s"]
    matrix[4 * step.program :, 4 * step.j :][:4, :4] = np.where(np.isinf(s), np.nan, s)
    ax.imshow(matrix, cmap="RdBu_r", vmin=-2, vmax=2)
    for edge in (3.5, 7.5):
        ax.axhline(edge, color="#bbbbbb", linewidth=0.8)
        ax.axvline(edge, color="#bbbbbb", linewidth=0.8)
    ax.set_xticks(range(0, 12, 4))
    ax.set_yticks(range(0, 12, 4))
    ax.set_xlabel("key")
    ax.set_ylabel("query")
    ax.set_title(f"program {step.program}, KV block {step.j}")
    return figure


film(
    steps,
    draw,
    "Scores that exist, one step after the other. White: never computed, forgotten, or hidden by the "
    "causal mask. Blocks above the diagonal are not visited at all.",
)

# %% [markdown]
# And the result is that of plain attention. Not bit for bit: sums are in another order, and floating-point
# numbers round. The package holds every version against attention in 64 bits, and asks that its error be no more
# than twice that of plain PyTorch.

# %% tags=["varies"]
_ = compare(steps.o, q, k, v, causal=True)

# %% [markdown]
# ## Where this leads
#
# Each version starts from what the one before it wasted.

# %%
print(*(f"{x.title}: {x.idea}\n    instead of {x.wasted}" for x in VERSIONS.values()), sep="\n")

# %% [markdown]
# What that was worth, measured on an H200 against the FlashAttention 2 that comes with PyTorch:

# %%
measured(
    "speedup",
    "How many times as fast as PyTorch's FlashAttention 2. Solid lines are the versions of this package.",
)

# %% [markdown]
# On a machine with a GPU, the next cell times all versions on it, in a minute or two, and draws them beside
# the H200.

# %% tags=["varies"]
own_gpu()

# %% [markdown]
# ## Exercises
#
# **1. A mask.** In the package, the causal mask is aligned at the *end*: of `m` queries and `n` keys, the last
# query sees the last key. (A chat with 100 tokens in its cache asks with one new query; it must see all of them.)
# Which is the last key that query `i` sees? Keys count from 0; -1 says that it sees none.


# %%
def last_key(i, m, n):
    """Number of the last key that query i of m sees, of n keys; -1 if it sees none."""
    return None  # your code here


check("last_key", last_key)

# %% [markdown]
# **2. A kernel.** Write a softmax of each row: one program for a row, and the whole row in one block. `BLOCK` is a
# power of two and the row may be shorter, so you need a mask. What do you load where there is no number?
# (Functions you need: `tl.load`, `tl.max(x, 0)`, `tl.exp`, `tl.sum(x, 0)`, `tl.store`.)


# %%
@triton.jit
def row_softmax_kernel(x, y, columns, BLOCK: tl.constexpr):
    """y = softmax of each row of x (rows, columns); one program for a row."""
    # your code here


def row_softmax(x):
    """Softmax of each row of x (rows, columns)."""
    y = torch.full_like(x, float("nan"))
    block = triton.next_power_of_2(x.shape[1])
    row_softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=block)
    return None if y.isnan().all() else y  # None: nothing was written


check("row_softmax", row_softmax)

# %% [markdown]
# Solutions are in [solutions/](solutions), each with the mistakes that the check knows.
#
# ## Where to read on
#
# * [01_fa1](01_fa1.ipynb): how a softmax is folded together block by block.
# * Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2: attention.
# * Dao et al. 2022, "FlashAttention", arXiv:2205.14135, section 2: the memory wall, and what a GPU is made of.
# * Triton's own tutorials, "Vector Addition" and "Fused Softmax", in `python/tutorials` of its repository.
# * In the package: `flash_versions/versions/tiles/rows.py` and `algebra.py` for tiles and masks, `flash_versions/dispatch/interpreter/faithful.py` for what runs
#   when there is no GPU.
