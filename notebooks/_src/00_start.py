# %% [markdown]
# # Start here: attention, the memory wall, a first kernel
#
# Attention is the part of a language model that lets each token look at the others. FlashAttention computes it with the
# same result as plain PyTorch code, and its later versions are several times as fast on a GPU. These notebooks lead
# from FlashAttention 1 to FlashAttention 4, in kernels that run. You need some Python, some PyTorch and a little linear
# algebra. You need no GPU: a simulator runs the kernels on the CPU, and lets you look at every step.
#
# This notebook takes about 40 minutes. After it you know
#
# 1. what attention computes, from an example with four queries and four keys;
# 2. why plain attention is slow: it moves a large matrix to memory and back;
# 3. how to read a Triton kernel: programs, blocks, pointers, masks;
# 4. how the kernel of FlashAttention 1 is structured, and what it does at each step.
#
# Some cells ask you for a guess first. Write your guess in the place of `None`, then run the cell. You will remember a
# number better if you have guessed it before. Until you guess, the answer is folded; a click shows it. Calls of
# `checked` in the code test whether the text is still true; you can skip them.

# %% tags=["hide-cell"]
# %matplotlib inline
from lessons import check, checked, film, guess, measured, record, show_plain
from lessons.pictures.memory import gpu

import numpy as np
import torch
import triton
import triton.language as tl
from IPython.display import Markdown
from matplotlib.figure import Figure

from flash_versions import VERSIONS, attention, compare
from flash_versions.bench.results import rate_of, read_results, shapes
from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS
from flash_versions.dispatch.device import H200_SHARED_MEMORY

torch.manual_seed(0)
torch.set_printoptions(precision=3, sci_mode=False)

# %% [markdown]
# ## Attention, by hand
#
# Take four tokens. Each token has a **query** (what it looks for), a **key** (what others find it by) and a **value**
# (what it hands over). The matrices $Q$, $K$ and $V$ have one row for each token, here with two numbers. The number of
# elements of a row is called **head_dim**, in formulas $d$.

# %%
q = torch.tensor([[2.0, 0], [0, 2], [1, 1], [2, 2]])
k = torch.tensor([[1.0, 0], [0, 1], [2, 0], [1, 2]])
v = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 2]])

# %% [markdown]
# The **score** of a query and a key is their dot product, divided by $\sqrt{d}$. Without this division, scores would
# grow with head_dim. All scores together are the matrix $S = Q K^T / \sqrt{d}$, with a row for each query and a column
# for each key.

# %%
s = q @ k.T / k.shape[1] ** 0.5
s

# %% [markdown]
# A **softmax** turns each row of scores into weights: positive numbers whose sum is 1. A query's weight for a key is
# the exponential of their score, divided by the sum of the query's exponentials. The exponential of a large score
# overflows, so a query's largest score is subtracted first. This does not change the weights, because it divides the
# numerator and the denominator by the same number. The matrix of weights is called $P$.

# %%
exponentials = torch.exp(s - s.max(1, keepdim=True).values)
p = exponentials / exponentials.sum(1, keepdim=True)
p

# %% [markdown]
# The **output** of a query is the mean of all values, with the query's row of $P$ as weights: $O = P V$.

# %%
o = p @ v
o

# %% [markdown]
# This is all that attention computes. A language model adds one rule: a token may look at itself and at earlier tokens,
# and not at later ones. The scores of later keys are set to $-\infty$, and their weights become 0. This is the **causal
# mask**. With it, all weights above the diagonal are 0.

# %%
hidden = torch.ones(4, 4, dtype=torch.bool).triu(1)
weights = torch.softmax(s.masked_fill(hidden, float("-inf")), 1)
checked("masked_weights", (weights[hidden] == 0).all() and (weights[~hidden] > 0).all())
weights

# %% [markdown]
# The package of this project, `flash_versions`, computes attention with one *kernel*, a function that runs on the GPU.
# Its tensors have four dimensions: batch, length, heads and head_dim. A layer of a model has several **heads**. Each
# head has its own queries, keys and values and does not see those of other heads, so one head is enough to understand
# attention. The kernel's result is the same as the result by hand.

# %%
found = attention(*(x[None, :, None] for x in (q, k, v)), version="fa1")
print("by hand\n", o)
print("by the kernel\n", found[0, :, 0])
checked("kernel_agrees", torch.allclose(found[0, :, 0], o, atol=1e-5))

# %% [markdown]
# ## The memory wall
#
# Four tokens have 16 scores. A text of $N$ tokens has $N^2$ scores, one for *every pair* of tokens, while $K$ and $V$
# have $N$ rows each. The next cell compares their sizes, for one head with head_dim 128 and 2 bytes for each number.

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
# $K$ and $V$ grow with the number of tokens, the score matrix with its square. *Guess before you run the next cell:*
# what is the smallest number of tokens for which the score matrix is larger than $K$ and $V$ together?

# %%
my_guess = None  # your guess here

# %%
first_larger = next(n for n in range(1, 10**6) if score_bytes(n) > kv_bytes(n))
guess(my_guess, first_larger, "the score matrix is larger from", "tokens on")

# %% [markdown]
# The score matrix of a long text does not fit on the chip of a GPU. The next picture shows the parts of an H200, on
# which everything in these notebooks was measured. [A GPU in ten words](../docs/learn/gpu.md) explains every part. For
# now, three of them matter:
#
# * An **SM** (streaming multiprocessor) is one of the many processors of a GPU. Each has **registers** and **shared
#   memory**: fast, and small.
# * The **tensor cores** of an SM multiply matrices. They do nearly all arithmetic of attention.
# * **HBM** is the memory beside the chip. It is large, and all SMs share the connection to it.

# %% tags=["hide-input"]
gpu.draw()

# %% tags=["hide-input"]
ridge = TENSOR_TFLOPS / HBM_TB_PER_S
Markdown(
    f"A kernel can use {H200_SHARED_MEMORY / 2**10:.0f} KiB of shared memory on an SM of an H200. In one second, the "
    f"tensor cores of the GPU can do {TENSOR_TFLOPS:g} x 10¹² operations, and HBM can move {HBM_TB_PER_S:g} x 10¹² bytes "
    f"(NVIDIA's datasheet). So the GPU can do **{ridge:.0f} operations in the time that it needs to move one byte**. A "
    "computation with fewer operations for each byte has to wait for memory."
)

# %% [markdown]
# How many operations does attention do for each byte that it moves? Each of the $N^2$ scores of $Q K^T$ takes $d$
# multiplications and $d$ additions, and $P V$ takes as many: $2 N^2 d$ operations each. Plain attention writes $S$ to
# HBM, reads it for the softmax, writes $P$, and reads $P$ for the second product.

# %%
length = 16384
operations = 4 * length**2 * HEAD_DIM
least = 2 * kv_bytes(length)  # q, k and v are read once, o is written once
plain = least + 4 * score_bytes(length)
print(f"plain attention         {operations / plain:8,.0f} operations for each byte")
print(f"if S and P stay on chip {operations / least:8,.0f} operations for each byte")

# %% tags=["hide-input"]
assert operations / plain < ridge < operations / least
Markdown(
    f"Plain attention does {operations / plain:.0f} operations for each byte, fewer than the {ridge:.0f} of the GPU: "
    "memory sets its speed, and the tensor cores are idle for most of the time. If $S$ and $P$ never went to memory, "
    "arithmetic would set the speed. **This is the idea of FlashAttention: compute the same result, and never write the "
    "matrices $S$ and $P$ to memory.** They are computed on the chip in small blocks, and each block is used at once "
    "and then forgotten."
)

# %% [markdown]
# The next figure shows measurements on an H200: the memory that a forward pass needs in addition to its inputs. Each
# panel is for one head_dim (`D`), without a mask (`full`), with the sequence length on its horizontal axis. Longer
# sequences come in smaller batches, so the total number of tokens is the same everywhere. The memory of plain PyTorch
# grows with the length, because of $S$ and $P$, and that of all other implementations does not grow.

# %% tags=["hide-input"]
measured("memory")
table = shapes(read_results(), "table")
full = sorted((shape[3], row) for shape, row in table.items() if shape[5:] == (128, False))
(_, short), (_, long) = full[0], full[-1]
growth = {name: long[name]["peak_mib"] / short[name]["peak_mib"] for name in set(long) & set(short)}
checked(
    "memory_grows",
    growth.pop("plain") > 5 and max(growth.values()) < 1.1 and set(VERSIONS) < set(growth),
)

# %% [markdown]
# ## A first Triton kernel
#
# A **kernel** is a function that a GPU runs many times at once. In Triton, one such run is called a **program**. All
# programs execute the same code. Each reads its own number with `tl.program_id` and works on its own part of the data,
# a **block**.
#
# The smallest useful kernel adds two vectors:


# %%
@triton.jit
def add_kernel(x, y, out, n, BLOCK: tl.constexpr):
    """out = x + y, of n numbers each; every program adds BLOCK of them."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # positions of this program's numbers
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
# What each part does:
#
# * `x`, `y` and `out` arrive as **pointers**, the addresses of the first numbers of three tensors. A kernel does not
#   know the shape of a tensor.
# * `tl.arange(0, BLOCK)` is a vector of the numbers 0 to `BLOCK` - 1. Most variables of a kernel are vectors or
#   matrices: `index` has the positions of this program's numbers, and `x + index` is a vector of addresses.
# * `tl.load` reads from all of these addresses at once, and `tl.store` writes to all of them.
# * `BLOCK` is a `tl.constexpr`, a constant that is known when the kernel is compiled. It has to be a power of two.
# * `mine` is a **mask**, a vector of true and false. Ten numbers do not divide into blocks of four, so the last program
#   has two positions past the end. The mask keeps it from reading and writing there.
# * `add_kernel[(programs,)](...)` launches the kernel. The brackets contain the **grid**, the number of programs.
#
# *Guess:* how many programs does a vector of 1000 numbers need, with blocks of 128?

# %%
my_guess = None  # your guess here

# %%
guess(my_guess, triton.cdiv(1000, 128), "programs")

# %% [markdown]
# A launch with tensors on the CPU is **simulated**: the simulator of this package runs the programs one after the other
# and uses NumPy for their operations. So a kernel can print, too. Here three programs share ten numbers:


# %%
@triton.jit
def talking_kernel(x, n, BLOCK: tl.constexpr):
    """What each program of add_kernel works on."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = index < n
    a = tl.load(x + index, mask=mine, other=0.0)
    print("index, mine, a:", index, mine, a)


talking_kernel[(3,)](torch.arange(10.0), 10, BLOCK=4)

# %% [markdown]
# What happens without the mask? Here you get no error: the kernel writes past the end of its vector, into the first two
# numbers of the vector behind it.


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
checked("neighbour_overwritten", (neighbour != 0).tolist() == [True, True] + [False] * 4)

# %% [markdown]
# ## Tiles
#
# Attention works on matrices. A rectangular block of a matrix is called a **tile**. Memory is one long row of numbers,
# so element $(i, j)$ of a matrix is at position $i \cdot \text{stride} + j$, where the stride is the length of a row. A
# tile needs the positions of all its elements. Write its row numbers as a column vector and its column numbers as a row
# vector. Then $\text{rows} \cdot \text{stride} + \text{columns}$ is a matrix with all positions:

# %%
rows, columns, stride = torch.arange(4, 8), torch.arange(0, 4), 10
rows[:, None] * stride + columns[None, :]

# %% [markdown]
# In a kernel, `[:, None]` and `[None, :]` work in the same way. `tl.dot` computes the matrix product of two tiles; on a
# GPU, the tensor cores do it. The next kernel computes scores. Each program computes one tile of the score matrix, so
# the grid has two dimensions.


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
# This kernel is the first step of plain attention. It ends with a `tl.store` that writes the score matrix to memory.
# FlashAttention never stores a tile of scores.

# %% [markdown]
# ## The kernel of FlashAttention 1
#
# Now you can read the first kernel. It is a *lesson*: a plain file, `flash_versions/lessons/fa1.py`, that runs by
# itself. Callers can ask the package for more than a causal mask, such as a sliding window; below the cell you can
# unfold the package's kernel with these options. About half of its lines compute which queries and keys a program works
# on. At the first reading, find four things: `tl.program_id`, the tile of queries that is loaded, the loop, and the
# stores at the end.

# %% tags=["hide-input"]
show_plain("fa1", "forward_kernel")

# %% [markdown]
# * A program works on one tile of **queries**. `load_rows` computes the addresses of a tile, as you have just seen, and
#   leaves out rows behind the end.
# * The first dimension of a tensor, the batch, counts *sequences*. `head_of` finds one head of one sequence: where it
#   begins in memory, the stride between neighbours, and its length. (`lengths` is for sequences that have a number of
#   keys of their own.) `row` has the positions of the tile's queries.
# * `last_key` is the last key that each query sees, and `end` is the number of blocks of keys that the tile sees. The
#   loop visits these blocks one after the other.
# * Three variables go from one pass of the loop to the next, all in registers. `row_max` is the largest score of each
#   query so far. `row_sum` is the sum of $e^{s - \text{row\_max}}$ over the keys so far. `acc` is the result for the
#   keys so far, already divided by `row_sum`; when `row_sum` grows, `acc` is corrected.
# * `lse`, the log-sum-exp of a query's scores, is $\log \sum_j e^{s_j}$, which equals row_max + $\log$(row_sum). It is
#   stored, too: the backward pass needs it.
#
# [The next notebook](01_fa1.ipynb) explains `fold_block`, which adds one block of keys to these variables. Here, only
# observe which scores are on the chip at each step. `record` runs the package's kernel in the simulator and keeps a
# `Step` for each block of keys that a program visits. Twelve queries and twelve keys in tiles of four make three
# programs. The first one visits one block of keys, the last one three.

# %%
q, k, v = (torch.randn(1, 12, 1, 16) for _ in range(3))
steps = record("fa1", q, k, v, causal=True, block_q=4, block_kv=4)
for step in steps:
    print(
        f"program {step.program}, keys {4 * step.j} to {4 * step.j + 3}: s has the shape",
        step.after["s"].shape,
    )
checked("visited_blocks", [step.program for step in steps] == [0, 1, 1, 2, 2, 2])

# %% [markdown]
# *Guess:* the scores of 12 queries and 12 keys are 144 numbers. If the programs run one after the other, how many
# scores exist at the same time?

# %%
my_guess = None  # your guess here

# %%
guess(my_guess, max(step.after["s"].size for step in steps), "scores that exist at the same time")


# %% tags=["hide-input"]
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
    ax.set_title(f"program {step.program}, keys {4 * step.j} to {4 * step.j + 3}")
    return figure


film(
    steps,
    draw,
    "The scores that exist at each step; move the slider. A blank square is a score that is not computed yet, that is "
    "forgotten already, or that the causal mask hides. No program visits a tile above the diagonal.",
)

# %% [markdown]
# The result is that of plain attention, up to rounding: the kernel adds its numbers in another order. The package
# compares every version with attention in 64-bit arithmetic. A version passes if its largest error is within a budget:
# twice the largest error of plain PyTorch, plus an allowance for roundings that even a perfect kernel may add. In fp32
# the allowance is the larger part of the budget. `oracle/budget.py` says how it is computed.

# %% tags=["varies"]
_ = compare(steps.o, q, k, v, causal=True)

# %% [markdown]
# ## Where this leads
#
# Each version of FlashAttention removes something that the version before it wastes.

# %% tags=["hide-input"]
lines = ["| version | what was wasted before it | its idea |", "|---|---|---|"]
lines += [f"| {x.title} | {x.wasted} | {x.idea} |" for x in VERSIONS.values()]
Markdown("\n".join(lines))

# %% [markdown]
# You do not have to understand every word of this table now; a notebook explains each row.
#
# The next figure shows the speed of each version on an H200, divided by the speed of PyTorch's own FlashAttention 2.
# Solid lines are the versions of this package.

# %% tags=["hide-input"]
measured("speedup")
rates = {name: rate_of(long, name) for name in (*VERSIONS, "torch fa2")}
checked(
    "fa2_faster_fa4_like_fa3",
    abs(rates["fa4"] / rates["fa3"] - 1) < 0.05 < rates["fa2"] / rates["torch fa2"] - 1,
)
Markdown(
    "At head_dim 128, without a mask and with 16,384 tokens in a sequence, the ratios are "
    + ", ".join(f"{rates[name] / rates['torch fa2']:.2f} ({name})" for name in VERSIONS)
    + "."
)

# %% [markdown]
# Our FA2 is faster than PyTorch's, which was written for the GPU generation before the H200. FA4 is made for the
# generation after it, and gains almost nothing here.

# %% tags=["hide-input"]
gains = [rate_of(row, "fa3") / rate_of(row, "plain") for row in table.values()]
assert min(gains) > 2.5
Markdown(
    f"FA3 is {min(gains):.1f} to {max(gains):.0f} times as fast as plain PyTorch at the shapes that were measured. With "
    "a causal mask the factor is largest, because plain PyTorch also computes the hidden scores."
)

# %% [markdown]
# On a GPU of your own, `python -m flash_versions.verify` checks and times all versions.

# %% [markdown]
# ## Exercises
#
# **1. A mask.** In this package, the causal mask is aligned at the *end*: with `m` queries and `n` keys, the last query
# sees the last key. (If a chat has 100 tokens in its cache and asks with one new query, this query has to see all of
# them.) Return the number of the last key that query `i` sees. Keys count from 0; return -1 if the query sees no key.


# %%
def last_key(i, m, n):
    """Number of the last key that query i of m sees, of n keys; -1 if it sees none."""
    return None  # your code here


check("last_key", last_key)

# %% [markdown]
# **2. A kernel.** Write a softmax of each row. The cell is a puzzle: it is checked when it runs, and every load and
# store is watched. You need these functions: `tl.load`, `tl.max(x, 0)`, `tl.exp`, `tl.where`, `tl.sum(x, 0)`,
# `tl.store`. [Puzzles](../docs/learn/puzzles.md) has more of this kind, from easier ones to the backward.

# %%
# puzzle: row_softmax

# %% [markdown]
# Solutions are in [solutions/00_start](solutions/00_start). Each file also has wrong answers, to test `check` with. You
# also find hints and a solution folded below each exercise; each hint says a little more.

# %% [markdown]
# ## Where to read on
#
# * [01_fa1](01_fa1.ipynb): how a softmax is computed block by block.
# * [A GPU in ten words](../docs/learn/gpu.md), and [the glossary](../docs/learn/glossary.md) with all terms of these
#   notebooks.
# * Vaswani et al. 2017, [Attention Is All You Need](https://arxiv.org/abs/1706.03762): section 3.2 defines attention.
# * Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135): section 2 explains the memory wall and the
#   parts of a GPU.
# * Triton's own tutorials, "Vector Addition" and "Fused Softmax", in `python/tutorials` of its repository.
# * In the package: [tiles/rows.py](../flash_versions/versions/tiles/rows.py) loads and stores tiles,
#   [tiles/algebra.py](../flash_versions/versions/tiles/algebra.py) computes masks, and
#   [flash_versions/simulator](../flash_versions/simulator) runs kernels without a GPU.
