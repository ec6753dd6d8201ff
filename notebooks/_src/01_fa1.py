# %% [markdown]
# # FA1: scores never leave the chip
#
# Attention is three lines of PyTorch. On a GPU they are slow, and not because of their arithmetic: they write a matrix
# with one number for every pair of a query and a key to memory, and read it back. FlashAttention 1 (FA1) computes the
# same result and never writes that matrix.
#
# The idea in one sentence: **compute the softmax block by block, and correct earlier blocks when a later block has a
# larger score.** This notebook derives the correction by hand, shows it in the kernel, and runs the kernel step by
# step. After it you can write the correction yourself, which is the first exercise.
#
# Time: about 50 minutes. You need [00_start](00_start.ipynb): what attention is, what memory costs, how to read a
# Triton kernel. You need no GPU.

# %% tags=["hide-cell"]
# %matplotlib inline
import numpy as np
import torch
from lessons import (
    bytes_moved,
    check,
    checked,
    film,
    guess,
    instructions,
    measured,
    record,
    show_plain,
)
from lessons.tables import loop_table, per_score, say
from lessons.pictures.memory import traffic
from lessons.pictures.scores import softmax_state, tiles
from lessons.practice.folded import display_answer

from flash_versions import attention, compare
from flash_versions.versions.fa1 import forward as fa1
from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS
from flash_versions.bench.results import rate_of, read_results, shapes

np.set_printoptions(precision=3, suppress=True)

# %% [markdown]
# ## What plain attention wastes
#
# These are the three lines, for one head. `s` has the scores and `p` the weights; both have a row for each query and a
# column for each key.


# %%
def plain(q, k, v):
    """Attention of one head: q, k, v (length, head_dim)."""
    s = q @ k.mT * q.shape[-1] ** -0.5  # written to memory
    p = torch.softmax(s, -1)  # s is read, p is written
    return p @ v  # p is read


# %% [markdown]
# The next cell counts the bytes that they move, for one head with 8192 tokens. From these it computes two times for an
# H200: the bytes divided by the bandwidth of HBM, and the operations divided by the rate of the tensor cores, both from
# the datasheet.

# %%
length, head_dim, size = 8192, 128, 2  # one head in bf16, 2 bytes for each number
tensors = 4 * length * head_dim * size  # q, k and v are read, o is written
matrices = 4 * length * length * size  # s is written and read, so is p
flops = 4 * length * length * head_dim  # two products, a multiplication and an addition each

arithmetic = flops / (TENSOR_TFLOPS * 1e12)
memory = (tensors + matrices) / (HBM_TB_PER_S * 1e12)
print(f"q, k, v, o        {tensors / 2**20:8.0f} MiB")
print(f"s and p           {matrices / 2**20:8.0f} MiB")
print(f"time to multiply  {arithmetic * 1e6:8.0f} microseconds")
print(f"time to move      {memory * 1e6:8.0f} microseconds")

# %% tags=["hide-input"]
say(
    f"`s` and `p` are {matrices / (tensors + matrices):.0%} of the bytes, although they are neither inputs nor results. "
    f"Moving all bytes takes {memory / arithmetic:.1f} times as long as the multiplications, so the tensor cores wait "
    "for memory."
)

# %% [markdown]
# **Change one line.** The next cell runs the three lines on 1024 tokens and lists the operations of PyTorch with the
# bytes that each of them reads and writes. Which operation moves most? One change saves two passes over the scores, and
# the result stays the same. Change a line of `mine`, run the cell again, and watch the sum.


# %%
def mine(q, k, v):
    """The three lines, yours to change."""
    s = q @ k.mT * q.shape[-1] ** -0.5
    p = torch.softmax(s, -1)
    return p @ v


one_head = torch.randn(3, 1024, 128).bfloat16()
moved = bytes_moved(mine, *one_head)
for name, count in moved:
    print(f"{name:10} {count / 2**20:6.2f} MiB")
print(f"{'all':10} {sum(count for _, count in moved) / 2**20:6.2f} MiB")
right = torch.allclose(mine(*one_head).float(), plain(*one_head).float(), atol=0.02)
print("the result is", "the same" if right else "another one")


# %% tags=["hide-input"]
def scaled_before(q, k, v):
    """The scale on q."""
    return torch.softmax(q * q.shape[-1] ** -0.5 @ k.mT, -1) @ v


before = sum(count for _, count in moved) / 2**20
after = sum(count for _, count in bytes_moved(scaled_before, *one_head)) / 2**20
display_answer(
    f"s = q * q.shape[-1] ** -0.5 @ k.mT scales q, which is small, and no scores: {after:.2f} in place of "
    f"{before:.2f} MiB. While each line is an operation of its own, s and p have to be written."
)

# %% [markdown]
# Can `s` stay on the chip? As a whole it does not fit: the shared memory of an SM has 228 KiB, of which a program can
# use 227. In blocks it would fit, but a softmax needs the largest of *all* scores of a query and the sum over *all*
# keys. When the first block of keys has arrived, neither is known.

# %% [markdown]
# ## The idea, by hand
#
# Take four queries, four keys, and simple scores.

# %%
scores = np.array([[1.0, 3, 2, 5], [4, 4, 0, 1], [0, 1, 2, 3], [6, 0, 2, 1]])
values = np.array([[1.0, 0], [0, 1], [2, 2], [4, -4]])

p = np.exp(scores - scores.max(1, keepdims=True))
softmax = p / p.sum(1, keepdims=True)
print("softmax\n", softmax)
print("o\n", softmax @ values)

# %% [markdown]
# Now assume that only the first two keys have arrived. Compute what is possible: the maximum `m` and the sum `l` over
# *these* keys, and with them the attention `o` over these keys.

# %%
first = scores[:, :2]
m = first.max(1)
p = np.exp(first - m[:, None])
l = p.sum(1)
o = p @ values[:2] / l[:, None]
print("m", m)
print("l", l)
print("o\n", o)

# %% [markdown]
# The other two keys arrive, and for some queries the maximum grows. Each exponential in `l` was computed as $e^{s -
# m}$, but it should have been $e^{s - m_\text{new}}$. To correct it, multiply it by $\alpha = e^{m - m_\text{new}}$.
# **This factor is the same for all earlier keys of a query.** So the sum `l` is corrected by one multiplication,
# without the old scores. `o` is corrected in a similar way. `o` times `l` is a sum of the same exponentials, each
# multiplied by a value. So $o_\text{new} = (\alpha \, l \, o + p V) / l_\text{new}$, where $p$ are the exponentials of
# the new block.

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
checked("alpha_is_one", (alpha[m_new == m] == 1).all() and (alpha[m_new > m] < 1).all())
checked("exact", np.allclose(o_new, softmax @ values))

# %% [markdown]
# The result is exact, not an approximation. Where the maximum did not grow, `alpha` is 1 and nothing changes; where it
# grew, `alpha` is less than 1 and the old part shrinks. This algorithm is the **online softmax**. Its state is `m`, `l`
# and `o`: everything that has to be kept of the keys that a query has seen.
#
# ## The kernel
#
# This is the correction in the package's kernel. `s` is a tile of scores in registers, with a row for each query of the
# program and a column for each key of the block.

# %% tags=["hide-input"]
show_plain("fa1", "softmax_step")

# %% [markdown]
# In the code `m` is called `row_max`, and `l` is called `row_sum`. Compared with the calculation by hand, only `pivot`
# is new. With a mask, a query may see no key in the first block. Its maximum is still $-\infty$ then, and $-\infty -
# (-\infty)$ is not a number.
#
# `softmax_step` is called by `fold_block`, which adds one block of keys to the state. (Its `acc` is `o`.) Its steps
# correspond to the three lines of PyTorch:
#
# | plain attention | FA1, for one block of keys |
# |---|---|
# | `s = q @ k.mT * scale` | `s = tl.dot(q_tile, k_tile.T) * scale` |
# | `p = softmax(s)` | `p, new_max, new_sum, alpha = softmax_step(s, row_max, row_sum)` |
# | `o = p @ v` | `pv = tl.dot(p, v_tile)`, and the corrected `acc` is added |

# %% tags=["hide-input"]
show_plain("fa1", "fold_block")

# %% [markdown]
# `load_rows` loads the keys and the values of the block. `input_precision="ieee"` multiplies fp32 inputs with all their
# bits; without it, the tensor cores would first cut their fractions to 10 bits (tf32). It does not affect bf16. `p` is
# rounded to the type of V, because tensor cores multiply numbers of one type. `tl.where` is the causal mask: it
# replaces the scores of keys after `last_key` by $-\infty$. `norm` is $1 / l_\text{new}$; its `tl.where` avoids a
# division by 0 for queries that have seen no key.
#
# A program calls `fold_block` for one block of keys after another, with the queries of one tile. You have read this
# loop in `forward_kernel`, in [00_start](00_start.ipynb). The programs of many tiles run at the same time, on all SMs
# of the GPU.
#
# Two pictures show in which order the tiles of the score matrix are computed. Tiles above the diagonal, which a causal
# mask hides, are never computed. On the left is the order of the original paper: an outer loop over keys, an inner one
# over queries. It reads and writes `o` once for each block of keys. On the right is the kernel of this package, whose
# outer loop is over queries: `o` stays in registers and is written once. Each of its programs, p0 to p5, computes one
# row of tiles, from left to right; the numbers count the tiles of one program.

# %% tags=["hide-input"]
tiles.compare("paper", "fa1")

# %% [markdown]
# ## Two predictions
#
# Guess before you run the next cells: write a number in the place of `None`.
#
# First prediction. Each program reads all keys that its queries see. There are 8192 queries, and the tiles have the
# size that FA1 uses on an H200. How many programs read the same key, without a mask?

# %%
block_q = fa1.MEASURED[head_dim].block_q
print("queries in a tile:", block_q)
my_guess = None  # your guess here

# %%
guess(my_guess, length // block_q, "programs that read the same key")
counted = {name: traffic.count(name, length, head_dim) for name in ("plain", "fa1")}
print(f"FA1's programs read and write     {counted['fa1'].asked / 2**20:4.0f} MiB")
print(f"each number of q, k, v, o once is {counted['fa1'].least / 2**20:4.0f} MiB")
print(f"plain attention moves             {counted['plain'].asked / 2**20:4.0f} MiB")
checked("as_much_as_plain", 0.8 < counted["fa1"].asked / counted["plain"].asked < 1.25)

# %% [markdown]
# FA1's programs read about as many bytes as plain attention moves. Why is FA1 faster? Programs of the same head run at
# about the same time and read the same keys. These fit into the **L2** cache between the SMs and HBM, so HBM delivers
# each key about once, and L2 delivers the other copies. The scores of plain attention do not fit into L2: 32 heads of
# 8192 tokens, as in the measurements further below, have 4 GiB of scores, and L2 has 60 MiB. Larger tiles of queries
# also help, because fewer programs read each key. So tiles should be large. How large they can be depends on the
# registers, which have to hold the tile's scores and `o`.
#
# Second prediction. 64 queries look at 256 keys with random scores, in 8 blocks of 32 keys. In how many of the 8 blocks
# does the maximum of a query grow, on average? The first block counts, because the maximum begins at $-\infty$.

# %%
my_guess = None  # your guess here

# %% [markdown]
# ## Watch it run
#
# `record` runs the package's kernel in the simulator, which executes each operation on a tile with NumPy. It keeps the
# variables of the kernel before and after each block.

# %%
generator = torch.Generator().manual_seed(0)
q, k, v = (torch.randn(1, n, 1, 32, generator=generator) for n in (64, 256, 256))
steps = record("fa1", q, k, v, block_q=64, block_kv=32)
grown = np.stack([step.after["row_max"] > step.before["row_max"] for step in steps])
guess(my_guess, float(grown.sum(0).mean()), "blocks in which the maximum grows")
checked("few_blocks", grown.sum(0).mean() < 4 and grown[0].all())
checked("rarer", grown[1:3].mean() > 2 * grown[-2:].mean())

# %% [markdown]
# The maximum grows in fewer than half of the blocks. Among random scores, a new score is less and less often the
# largest so far: the maximum grows more than twice as often in the second and third block as in the last two. FA1
# nevertheless corrects `o` in every block. [FA4](04_fa4.ipynb) leaves out corrections that are not needed.
#
# The film shows the state of four queries, one frame for each block: the maximum `m`, the sum `l`, and the length
# (Euclidean norm) of the vector `o`. Where `m` grows, `l` is first multiplied by `alpha`, which makes it smaller, and
# then the block's exponentials are added.

# %% tags=["hide-input"]
film(
    softmax_state.frames(steps),
    softmax_state.frame,
    "m, l and the length of o for four queries, after each block. Move the slider.",
)

# %% [markdown]
# After each block, `o` is the attention over the keys so far. The next cell compares it with a softmax over these keys.

# %%
s = (q[0, :, 0] @ k[0, :, 0].T * 32**-0.5).double()
for step in steps:
    seen = 32 * (step.j + 1)
    truth = torch.softmax(s[:, :seen], -1) @ v[0, :seen, 0].double()
    right = np.allclose(step.after["o"], truth, atol=1e-5)
    print(f"after {seen:3} keys, o is the attention over them: {right}")

# %% [markdown]
# Now 64 queries look at 64 keys. With a causal mask, query 0 sees one key and query 63 sees all. With four tiles of 16
# queries and blocks of 16 keys, program 0 visits one block and program 3 visits all four.

# %%
q, k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(3))
steps = record("fa1", q, k, v, block_q=16, block_kv=16, causal=True)
visited = [[step.j for step in steps if step.program == program] for program in range(4)]
for program, blocks in enumerate(visited):
    print(f"program {program} visits blocks", *blocks)
checked("causal_blocks", visited == [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3]])

# %% [markdown]
# `compare` is the package's own check. It reports the largest error against attention in 64-bit arithmetic, and the
# budget: twice the error of plain PyTorch, plus an allowance for rounding. For fp32 most of the budget is the
# allowance.

# %% tags=["varies"]
accuracy = compare(steps.o, q, k, v, causal=True)

# %% [markdown]
# ## What the compiler makes of it
#
# The simulator shows what a kernel computes, but not how fast. The machine code that the compiler makes says more.
# Compiling needs no GPU. It needs Triton's compiler, which exists for Linux only; elsewhere, cells that begin with
# `%%needs_triton` print a sentence that says so. The first table counts the instructions of the loop over blocks for
# each score that it computes, for three GPUs. `MUFU`, `FMUL` and so on are the names of instructions.

# %% tags=["hide-input"]
# %%needs_triton
compiled = instructions("fa1", ("sm_80", "sm_90", "sm_100"), head_dim=64, causal=True)
loops = {
    gpu: per_score(found)[0] for gpu, found in zip(("A100", "H200", "B200"), compiled.values())
}
loop_table(loops)

# %% tags=["hide-input"]
# %%needs_triton
checked("about_six", 6 <= loops["H200"]["FMUL"] < 7 and 1 <= loops["H200"]["MUFU"] < 1.2)
say(
    f"Each score needs one exponential. But why {loops['H200']['FMUL']:.1f} multiplications on an H200?"
)

# %% [markdown]
# `MUFU` is an instruction of the special function unit, and `FMUL` is a multiplication. There is a little more than one
# `MUFU` for each score, because that unit also computes `alpha` and $1 / l_\text{new}$ for each query and block. (On
# the A100 and the H200 four threads share a query, and each computes both.) Six of the multiplications can be named:
#
# * one multiplies the score by the scale $1 / \sqrt{d}$;
# * one turns $e^x$ into $2^{x \log_2 e}$, because the hardware only computes powers of two;
# * two keep very small (denormal) results exact. The unit for $2^x$ returns 0 if $x$ is below -126. For such $x$ the
#   compiler computes $2^{x/2}$, which takes one multiplication, and squares it, which takes another. Both instructions
#   have a condition, but they are executed for each score, whether the condition is true or not;
# * two correct `o`: one multiplies by `alpha * row_sum`, one by `norm`. At head_dim 64 and 64 keys in a block, `o` has
#   as many numbers as the tile has scores, so each of them counts as one for a score.
#
# The matrix products hardly count in such a list, because one instruction of a tensor core does thousands of
# multiplications. All other instructions are executed by the other units of an SM, while the tensor cores wait. **FA2
# removes many of them.**
#
# The same source becomes a different product instruction on each GPU generation: `mma.sync` on the A100 (Ampere),
# `wgmma` on the H200 (Hopper), `tcgen05` on the B200 (Blackwell).

# %% [markdown]
# ## What it is worth
#
# First a count, then measurements. The count shows how many bytes and operations one head needs, for different sequence
# lengths, with a causal mask.
#
# * Left: the bytes that programs read and write. The green curve counts each number of the inputs and the result once.
#   FA1's curve is higher, because several programs read the same keys. L2 serves these repeated reads, so HBM delivers
#   about as many bytes as the green curve shows. Plain attention has no such help.
# * Middle: the operations for each byte.
# * Right: the operations that are computed, divided by those that are needed. Plain attention also multiplies for the
#   half of the scores that the mask hides. FA1 computes hidden scores only in tiles on the diagonal.

# %% tags=["hide-input"]
traffic.against_length(causal=True)

# %% [markdown]
# The next figure shows the memory that was measured on an H200, in addition to the inputs. Plain PyTorch's memory grows
# with the sequence length, and FA1's does not.

# %% tags=["hide-input"]
document = read_results()
measured("memory")
memory_of = {
    name: [row[name]["peak_mib"] for shape, row in sorted(shapes(document, "table").items(), key=lambda x: x[0][3])
           if shape[5:] == (128, False)]
    for name in ("plain", "fa1")
}  # fmt: skip
checked("memory_grows", memory_of["plain"][-1] > 5 * memory_of["plain"][0])
checked("memory_grows", max(memory_of["fa1"]) < 1.1 * min(memory_of["fa1"]))

# %% [markdown]
# And this is the speed, in TFLOP/s: 10¹² operations in a second. This notebook is about the difference between plain
# PyTorch and fa1. Later notebooks explain the faster versions.

# %% tags=["hide-input"]
measured("forward")
row = shapes(document, "table")[(2, 16, 16, 8192, 8192, 128, False)]
fa1_rate, plain_rate, torch_rate = (rate_of(row, name) for name in ("fa1", "plain", "torch fa2"))
checked("like_torch", 0.8 < fa1_rate / torch_rate < 1.2)
checked("a_third", all(0.28 < rate / TENSOR_TFLOPS < 0.4 for rate in (fa1_rate, torch_rate)))
say(
    f"With 8192 queries and keys, at head_dim 128 and without a mask, plain PyTorch needs {row['plain']['peak_mib']:,.0f} "
    f"MiB in addition to its inputs and FA1 {row['fa1']['peak_mib']:,.0f} MiB. FA1 does {fa1_rate:.0f} TFLOP/s, "
    f"{fa1_rate / plain_rate:.1f} times as many as plain PyTorch. PyTorch's own FlashAttention 2 kernel, which was written "
    f"for the generation before the H200, does {torch_rate:.0f} TFLOP/s. The tensor cores could do {TENSOR_TFLOPS:.0f}."
)

# %% [markdown]
# FA1 is about as fast as PyTorch's kernel, which is FlashAttention 2, written for the GPU generation before the H200.
# Both reach about a third of what the tensor cores can do; the next notebooks look for the rest.

# %% [markdown]
# ## Backward, in short
#
# Training needs the gradients of `q`, `k` and `v`, and their formulas contain `p`, the matrix that was never written.
# Plain PyTorch keeps `p` from the forward pass. FA1 keeps its result `o` and two numbers for each query, `m` and `l`,
# and *computes each tile of `p` again* when it needs it: $p = e^{s - m} / l$. This costs arithmetic and saves memory.

# %%
kept = length * length * size
statistics = 2 * length * 4
print(f"kept by plain attention  {kept / 2**20:8.2f} MiB for one head")
print(f"kept by FA1              {statistics / 2**20:8.2f} MiB")

# %% [markdown]
# The next cell computes two gradients by hand, for the small matrix of scores that this notebook began with. `dv` is
# one of them. The other is `ds`, the gradient of the scores, from which one more product each gives `dq` and `dk`: $ds
# = p \, (dp - \delta)$, where $dp = dO \, V^T$ and `do` is the gradient of the result, $dO$. The term `delta` needs an
# explanation. The gradient of a softmax contains a sum over all keys, $\sum_k p_k \, (dO \cdot v_k)$, and one tile does
# not have all keys. But $\sum_k p_k v_k$ is `o`, so the sum equals $dO \cdot o$, which a program can compute from the
# query's rows of `do` and `o`.

# %%
s = torch.tensor(scores, requires_grad=True)
x = torch.tensor(values, requires_grad=True)
o = torch.softmax(s, -1) @ x
do = torch.tensor([[1.0, 2], [0, 1], [1, 1], [-1, 3]], dtype=torch.double)
o.backward(do)  # autograd's answer

m = torch.tensor(scores).max(1).values  # all that the forward kept, beside o
l = torch.exp(torch.tensor(scores) - m[:, None]).sum(1)
p = torch.exp(torch.tensor(scores) - m[:, None]) / l[:, None]  # p, again
delta = (do * o.detach()).sum(1)
dp = do @ torch.tensor(values).T
ds = p * (dp - delta[:, None])
print("dv is right:", torch.allclose(p.T @ do, x.grad))
print("ds is right:", torch.allclose(ds, s.grad))

# %% [markdown]
# The kernel does the same for one block of keys and one block of queries, with the same names. `dk` and `dv` belong to
# the keys and stay in registers while the loop goes over the queries. `dq` belongs to the queries: for each block of
# keys it is loaded, added to, and stored. In the place of `m` and `l`, the lesson keeps the LSE, $m + \log l$: then $p$
# is $e^{s - \text{lse}}$.

# %% tags=["hide-input"]
show_plain("fa1", "probabilities", "fold_queries", file="backward.py")

# %% tags=["varies"]
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
o = attention(*leaves, causal=True, version="fa1")
do = torch.randn(o.shape, generator=generator)
o.backward(do)
gradients = {f"d{name}": x.grad for name, x in zip("qkv", leaves)}
accuracy = compare(o.detach(), q, k, v, causal=True, do=do, **gradients)

# %% tags=["hide-input"]
sms = 132  # of an H200
row = shapes(document, "backward")[(2, 16, 16, 8192, 8192, 128, False)]
fa1_rate, plain_rate = rate_of(row, "fa1"), rate_of(row, "plain")
assert fa1_rate < plain_rate / 2
say(
    f"The gradients are right, but FA1's backward is slow: {fa1_rate:.0f} TFLOP/s on an H200, where plain PyTorch has "
    f"{plain_rate:.0f}. It uses one program for each head, as in the paper. This measurement has 2 sequences of 16 heads, "
    f"so {2 * 16} programs run on {sms} SMs, and most SMs have no work. Each program also reads and writes all "
    f"of its `dq` once for each block of keys. FA2 mends both."
)

# %% [markdown]
# ## Exercises
#
# **1. Write the correction.** The state of a tile is `o` (rows, dim), `row_max` (rows) and `row_sum` (rows). Add a
# block of keys with scores `s` (rows, keys) and values `v` (keys, dim), and return the new `o`, `row_max` and
# `row_sum`. `o` stays normalised, as in FA1. Consider queries that have seen no key so far.


# %%
def fold(o, row_max, row_sum, s, v):
    """Return o, row_max, row_sum."""


check("fold", fold)

# %% [markdown]
# The solution is in [solutions/01_fa1](solutions/01_fa1).

# %% [markdown]
# **2. The kernel.** Write the loop of FlashAttention 1 in Triton. The cell is checked when it runs: its results, and
# how often each element is loaded.

# %%
# puzzle: fa1

# %% [markdown]
# ## Where to read on
#
# * Dao et al. 2022, [FlashAttention](https://arxiv.org/abs/2205.14135): Algorithm 1 is the forward pass, Algorithm 4
#   and appendix B are the backward pass, section 3.2 counts bytes.
# * Milakov and Gimelshein 2018, [Online normalizer calculation for softmax](https://arxiv.org/abs/1805.02867): the
#   correction by `alpha`, four years before FlashAttention.
# * The first release, in CUDA:
#   [fmha_fprop_kernel_1xN.h](https://github.com/Dao-AILab/flash-attention/blob/v1.0.9/csrc/flash_attn/src/fmha_fprop_kernel_1xN.h).
# * [flash_versions/versions/fa1](../flash_versions/versions/fa1): the complete kernels of this notebook.
# * Next: [FlashAttention 2](02_fa2.ipynb) keeps the algorithm and removes instructions.
