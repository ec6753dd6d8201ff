# %% [markdown]
# # FA2: the same result with less of everything else
#
# FA1 keeps the score matrix out of memory. Two kinds of waste remain. Between two matrix products, the tensor cores
# wait while other units execute many ordinary instructions. And when there are few queries, most of the GPU has no
# work.
#
# FlashAttention 2 (FA2) has no new formula. Its idea in one sentence: **execute fewer instructions between two matrix
# products, and give all SMs work.** Its changes:
#
# * divide by the sum of exponentials once at the end, not after every block;
# * compute with powers of two, so that one multiplication does both the scale and the change from $e^x$ to $2^x$;
# * apply the mask only in blocks that the diagonal cuts;
# * share the keys of one query among several programs (split-KV);
# * in the backward pass, use many programs for each head, not one.
#
# Time: about 50 minutes. Read [01_fa1](01_fa1.ipynb) first. You need no GPU. Cells that begin with `%%needs_triton`
# need Linux.

# %% tags=["hide-cell"]
# %matplotlib inline
import numpy as np
import torch
from lessons import (
    changes,
    check,
    checked,
    film,
    guess,
    instructions,
    measured,
    recompiled,
    record,
    show,
    show_plain,
)
from lessons.tables import loop_table, per_score, say
from lessons.pictures.memory import rooflines, traffic
from lessons.pictures.scores import splits, tiles
from lessons.practice.folded import display_answer
from matplotlib.figure import Figure

from flash_versions import attention, compare
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import splits as fa2_splits
from flash_versions.plot.figures import HBM_TB_PER_S, TENSOR_TFLOPS, exp2_roof
from flash_versions.bench.results import rate_of, read_results, shapes

np.set_printoptions(precision=3, suppress=True)
document = read_results()

# %% [markdown]
# ## What FA1 wastes
#
# **Multiplications.** The next cell compiles FA1's kernel for an H200 and counts the ordinary multiplications in its
# loop over blocks, for each score.

# %%
# %%needs_triton
(fa1_loop,) = per_score(instructions("fa1", "sm_90", head_dim=64, causal=True))
print(f"FA1, multiplications for each score: {fa1_loop['FMUL']:.1f}")

# %% [markdown]
# **Change one line.** In FA1's loop, `the_line` keeps `o` normalised. What is left of it if `o` may stay a sum until
# the loop has ended? (The last division is then missing, so the result is wrong. Only the count matters here.) Write
# your line; the cell compiles FA1 with it, in a copy of the package.

# %%
# %%needs_triton
the_line = "o = (o * (alpha * row_sum)[:, None] + pv) * norm[:, None]"
my_line = the_line  # change it


def with_line(line):
    """FA1's loop with another line."""
    file = "versions/fa1/forward.py"
    (loop,) = per_score(recompiled(file, the_line, line, "fa1", head_dim=64, causal=True))
    return loop


changed = with_line(my_line)
for name in ("FMUL", "FFMA", "FADD", "MUFU"):
    print(f"{name}  {fa1_loop[name]:5.2f} -> {changed[name]:5.2f} for each score")

# %% tags=["hide-input"]
# %%needs_triton
unnormalised = "o = o * alpha[:, None] + pv"
left = with_line(unnormalised)["FMUL"]
display_answer(
    f"{unnormalised} leaves {left:.2f} multiplications for each score, in place of {fa1_loop['FMUL']:.2f}."
)

# %% [markdown]
# **Masks.** A causal mask costs a comparison and a selection for each score. FA1 does this in every block that it
# visits, although only blocks on the diagonal need it. All queries of a tile see blocks left of the diagonal
# completely.

# %%
length, block_q, block_kv = 8192, 128, 64
in_tile = block_q // block_kv
visited = sum((tile + 1) * in_tile for tile in range(length // block_q))
cut = length // block_q * in_tile
print(f"blocks visited: {visited}, blocks that need the mask: {cut} ({cut / visited:.1%})")

# %% [markdown]
# **The GPU.** When a model writes text, one query at a time looks at many keys in the KV cache. This is called
# **decoding**. With one query, FA1 has only one tile of queries and so one program for each head. A GPU has many more
# SMs than that, and each program reads all keys alone.

# %%
sms = 132  # of an H200
decode = {shape[4]: row for shape, row in shapes(document, "decode").items() if shape[0] == 1}
keys = max(decode)
found = decode[keys]["fa1"]
print(f"FA1's programs: {found['H']}; SMs of an H200: {sms}")
print(f"rate of reading {keys:,} keys and values: {found['tb_per_s']:.2f} TB/s, measured")
print(f"bandwidth of an H200: {HBM_TB_PER_S} TB/s")

# %% [markdown]
# ## The ideas, by hand
#
# **Normalise once.** In every block, FA1 multiplies `o` by the old sum and divides it by the new one. FA2 does neither.
# It keeps the sum of exponentials times values without dividing, in a variable `acc`, and divides once at the end. Only
# the correction by `alpha` remains in the loop.

# %%
scores = np.array([[1.0, 3, 2, 5], [4, 4, 0, 1], [0, 1, 2, 3], [6, 0, 2, 1]])
values = np.array([[1.0, 0], [0, 1], [2, 2], [4, -4]])

m, l, acc = np.full(4, -np.inf), np.zeros(4), np.zeros((4, 2))
for block in (slice(0, 2), slice(2, 4)):
    m_new = np.maximum(m, scores[:, block].max(1))
    alpha = np.exp(m - m_new)
    p = np.exp(scores[:, block] - m_new[:, None])
    l = alpha * l + p.sum(1)
    acc = alpha[:, None] * acc + p @ values[block]
    m = m_new
    print("alpha", alpha, "\nacc\n", acc)
o = acc / l[:, None]
truth = torch.softmax(torch.tensor(scores), -1) @ torch.tensor(values)
print("equal after the last division:", np.allclose(o, truth))

# %% [markdown]
# **Compute powers of two.** The hardware computes $2^x$ and not $e^x$. So $e^x = 2^{x \log_2 e}$ costs one more
# multiplication for each score. But each score is multiplied by $1 / \sqrt{d}$ in any case. FA2 replaces this scale by
# $\text{scale\_log2} = \log_2 e / \sqrt{d}$. `s` is now a plain product of a query and a key, and `m` is the maximum of
# `s * scale_log2`. Such a number is an exponent of 2; the code says that it is in *log2 units*. Then `s * scale_log2 -
# m`, the exponent of 2, is one instruction, a multiply-add. The next cell computes the exponentials of one query in
# both ways. They are equal.

# %%
scale_log2 = np.log2(np.e)  # times 1 / sqrt(d), which is 1 here
with_two = np.exp2(scores[0] * scale_log2 - (scores[0] * scale_log2).max())
with_e = np.exp(scores[0] - scores[0].max())
print("with powers of 2:", with_two)
print("with powers of e:", with_e)
checked("powers_of_two", np.allclose(with_two, with_e))

# %% [markdown]
# **Split the keys.** Let two programs share the keys of one query. Each runs the same loop on its half of the keys and
# does not know the other half. Each has a result `acc`, a maximum `m` and a sum `l`. To combine them, correct both to
# the common maximum and add. This is the step of the online softmax again, with halves in the place of blocks.

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
combined = (weight_a * acc_a + weight_b * acc_b) / (weight_a * l_a + weight_b * l_b)
print(f"weights {weight_a:.3f} {weight_b:.3f}")
print("o, combined     ", combined)
print("o over all keys ", truth[0].numpy())
assert np.allclose(combined, truth[0])

# %% [markdown]
# ## The kernel: what changes
#
# The next cells compare two lessons, `lessons/fa1.py` and `lessons/fa2.py`. Red lines are FA1's, green lines are FA2's.
#
# First the softmax step: powers of two, with the scale inside.

# %%
changes("fa1", "fa2", "softmax_step")

# %% [markdown]
# Next, one block of keys.
#
# * The two lines that normalised `acc` are gone.
# * `acc * alpha` is passed to `tl.dot` as its accumulator: `tl.dot(p, v, x)` computes `x + p @ v`.
# * `MASKED` is a `tl.constexpr`. The compiler makes two versions of the function, and the one with `MASKED=False` has
#   no comparisons.

# %%
changes("fa1", "fa2", "fold_block")

# %% [markdown]
# Last, the kernel.
#
# * The loop has become two: the first visits blocks that all queries of the tile see, without a mask; the second visits
#   blocks that the diagonal cuts. `full_end` is the block where the second begins. (The kernel with all options has a
#   third loop before these two. It visits the blocks that the left edge of a sliding window cuts.)
# * The division has moved behind the loops.
# * `tile = tiles - 1 - ...`: the first program takes the last tile of a head, which has the most keys to visit. With
#   one head of many tiles, this tile would otherwise start last, and the other SMs would wait for it. With many heads,
#   the last head's long tiles start late in any case: [FA3](03_fa3.ipynb) counts that the order then gains nothing, and
#   finds a better one.

# %%
changes("fa1", "fa2", "forward_kernel")

# %% [markdown]
# `SPLIT`, `share_of_keys` and the second axis of the grid are for split keys; without splits, a program has all blocks
# that its tile sees.
#
# One more change is in the package's kernel only. Models often let several query heads share one head of keys and
# values (GQA). FA2 puts the queries of all these heads into *one tile*, so a program reads K and V once for all of
# them.
#
# Which tile comes when? The number in a tile is its turn within its program. In FA2, program p0 has the last queries,
# and only tiles on the diagonal have a mask.

# %% tags=["hide-input"]
tiles.compare("fa1", "fa2")

# %% [markdown]
# ## Two predictions
#
# First prediction. You have seen how many multiplications FA1's loop has for each score. How many has FA2's loop
# without a mask?

# %%
my_guess = None  # your guess here

# %%
# %%needs_triton
compiled = instructions("fa2", ("sm_80", "sm_90", "sm_100"), head_dim=64, causal=True)
fa2_loop, fa2_masked = per_score(compiled["sm_90"])
guess(my_guess, fa2_loop["FMUL"], "multiplications for each score")

# %% [markdown]
# Second prediction. 4 query heads share one key head. One query in each head looks at 64 keys, in blocks of 16 keys.
# FA1 calls `fold_block` 16 times: 4 times for each head. How often does FA2 call it?

# %%
my_guess = None  # your guess here

# %% [markdown]
# ## Watch it run
#
# The next cells run the real kernels in the simulator.

# %%
generator = torch.Generator().manual_seed(0)
q = torch.randn(1, 1, 4, 32, generator=generator)  # (batch, length, heads, head_dim)
k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(2))
folds = {name: len(record(name, q, k, v, block_kv=16)) for name in ("fa1", "fa2")}
print("FA1 calls fold_block", folds["fa1"], "times")
guess(my_guess, folds["fa2"], "FA2 calls it", "times")
assert folds["fa1"] == 16

# %% [markdown]
# Now a causal call with 64 queries in tiles of 16. A frame of the film is one block. On the left are the scores that
# have been computed so far; masked scores are white. On the right is the norm of `acc` for each query of the tile,
# before and after the block. Blocks with a mask are on the diagonal. `acc` is not normalised: in most blocks it grows,
# and in a few it shrinks, because a larger maximum has arrived.

# %% tags=["hide-input"]
q, k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(3))
steps = record("fa2", q, k, v, block_q=16, block_kv=16, causal=True)


def tile_of(step):
    """The query tile of a step: the first program has the last tile."""
    return 3 - step.program


def masked(step):
    """Whether the block has scores that are hidden."""
    return bool(np.isinf(step.after["s"]).any())


def draw(index):
    """The score matrix after this step, and how long the rows of acc are."""
    figure = Figure(figsize=(7, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    seen = np.full((64, 64), np.nan)
    for step in steps[: index + 1]:
        tile = tile_of(step)
        seen[16 * tile : 16 * tile + 16, 16 * step.j : 16 * step.j + 16] = step.after["s"]
    seen[np.isinf(seen)] = np.nan
    left.imshow(seen, vmin=-15, vmax=15, cmap="coolwarm")
    left.set(xlabel="key", ylabel="query", xticks=range(0, 65, 16), yticks=range(0, 65, 16))
    left.grid(color="0.7")
    step = steps[index]
    mask = "with a mask" if masked(step) else "no mask"
    figure.suptitle(f"program {step.program}, block {step.j}: {mask}")
    rows = 16 * tile_of(step) + np.arange(16)
    for name, colour in (("before", "0.8"), ("after", "#0072B2")):
        state = getattr(step, name)
        size = np.linalg.norm(state["acc"], axis=1)
        right.barh(rows, size, color=colour, height=0.9 if name == "before" else 0.5, label=name)
    right.set(
        xlim=(0, 40), ylim=(rows[-1] + 0.5, rows[0] - 0.5), xlabel="length of acc", ylabel="query"
    )
    right.legend(loc="lower right", frameon=False)
    return figure


change = np.concatenate([
    np.linalg.norm(step.after["acc"], axis=1) - np.linalg.norm(step.before["acc"], axis=1)
    for step in steps if step.j
])  # fmt: skip
checked("acc_grows", 0.5 < (change > 0).mean() < 1)
checked("masks_on_the_diagonal", all(masked(step) == (step.j == tile_of(step)) for step in steps))
film(
    range(len(steps)),
    draw,
    "Left: the scores that have been computed; the last tile of queries comes first. Right: the length of acc, for each "
    "query of the tile.",
)

# %% tags=["varies"]
accuracy = compare(steps.o, q, k, v, causal=True)

# %% [markdown]
# ## Split the keys, watched
#
# One query looks at 192 keys, in 4 splits. Each split is a program of its own, on the second axis of the grid. The
# blocks of keys are shared out in their order.

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
# Combine the results of the splits two at a time; the order does not matter. FA2's maximum is in log2 units, so the
# weights are powers of two. The result equals that of the kernel.

# %%
parts = [(x["acc"][0], x["row_max"][0], x["row_sum"][0]) for x in last.values()]
while len(parts) > 1:
    (acc_a, m_a, l_a), (acc_b, m_b, l_b) = parts[:2]
    m = max(m_a, m_b)
    a, b = np.exp2(m_a - m), np.exp2(m_b - m)
    parts = [*parts[2:], (a * acc_a + b * acc_b, m, a * l_a + b * l_b)]
acc, m, l = parts[0]
equal = np.allclose(acc / l, steps.o[0, 0, 0], atol=1e-6)
print("equal to what the kernel wrote:", equal)
checked("combined", equal)

# %% tags=["hide-input"]
splits.tree(4)

# %% [markdown]
# *Each coloured box is the result of one split. Each white box combines two results.*
#
# In the lesson, a second kernel combines the splits. It does not build a tree: it has one program for each query of each
# head, which loads the results of all splits at once.

# %% tags=["hide-input"]
show_plain("fa2", "combine")

# %% [markdown]
# How many splits should there be? The package computes how many programs there would be with one split. If they occupy
# at least 80 % of the SMs (`FULL`), it stays at one split. Otherwise, the number of splits is chosen so that each SM
# gets about two programs. But each split gets at least four blocks, because combining very short splits costs more than
# it gains.

# %%
show(fa2_splits.choose_num_splits, docstring=False)
checked("full", fa2_splits.FULL == 0.8)
for heads in (8, 32, 128):
    chosen = fa2_splits.choose_num_splits(heads, 131072 // 64, sms)
    print(f"{heads:3} programs without splits, 131072 keys: {chosen} splits")

# %% [markdown]
# ## What the compiler makes of it
#
# This table counts instructions for each score: for FA1's loop, and for FA2's loops without and with a mask.

# %% tags=["hide-input"]
# %%needs_triton
columns = {"FA1, H200": fa1_loop, "FA2, H200": fa2_loop, "FA2 masked, H200": fa2_masked}
for gpu, arch in (("A100", "sm_80"), ("B200", "sm_100")):
    columns[f"FA2, {gpu}"] = per_score(compiled[arch])[0]
loop_table(columns)

# %% tags=["hide-input"]
# %%needs_triton
saved = 1 - sum(fa2_loop.values()) / sum(fa1_loop.values())
assert 1 <= fa2_loop["FMUL"] < 1.2 and 1 <= fa2_loop["FFMA"] < 1.2
assert abs(fa2_loop["MUFU"] - fa1_loop["MUFU"]) < 0.2
say(
    f"FA2's loop without a mask has {saved:.0%} fewer instructions than FA1's. Of {fa1_loop['FMUL']:.1f} multiplications for each "
    f"score, {fa2_loop['FMUL']:.1f} is left: `acc * alpha`, as `acc` has a number for each score here. One multiply-add computes the exponent. The two multiplications that "
    "kept denormal results are gone, too, because `tl.exp2` rounds such results to 0. The number of "
    "exponentials is the same in both, one for each score. [FA4](04_fa4.ipynb) reduces their cost."
)

# %% [markdown]
# The next figure needs no compiler. It counts, from the order of tiles alone, how much ordinary work there is for each
# score that a query sees, with a causal mask. FA2 needs only a few of FA1's comparisons with the mask. FA1 multiplies
# `o` by two factors in each block, and FA2 multiplies `acc` by one. FA4 can leave out most of these multiplications;
# the figure assumes that it does, and [FA4's notebook](04_fa4.ipynb) explains when.

# %% tags=["hide-input"]
one, two = (traffic.count(name, 8192, 64, causal=True) for name in ("fa1", "fa2"))
checked("ordinary_work", two.masked < 0.1 * one.masked)
checked("ordinary_work", 0.45 < (two.rescales / two.needed) / (one.rescales / one.needed) < 0.55)
traffic.ordinary_work(head_dim=64)

# %% [markdown]
# ## What it is worth
#
# The next figure was measured on an H200. It shows the speed of each version, divided by that of PyTorch's own
# FlashAttention 2. This notebook is about the distance from fa1 to fa2.

# %% tags=["hide-input"]
measured("speedup")
table = [
    row for shape, row in shapes(document, "table").items() if shape[5] == 64 and shape[3] > 1024
]
gains = [rate_of(row, "fa2") / rate_of(row, "fa1") for row in table]
assert min(gains) > 1
say(
    f"At head_dim 64, with 2048 keys or more, FA2 is {min(gains):.2f} to {max(gains):.2f} times as fast as FA1."
)

# %% tags=["hide-input"]
long = decode[keys]
group = long["fa1"]["H"] // long["fa1"]["Hkv"]
programs = long["fa1"]["Hkv"]
assert long["fa2 unsplit"]["tb_per_s"] < 0.1 * HBM_TB_PER_S < 0.5 * long["fa2"]["tb_per_s"]
say(
    f"**Decoding** with one query and {keys:,} keys:\n\n"
    f"* FA1 reads keys and values at {long['fa1']['tb_per_s']:.2f} TB/s, with {long['fa1']['H']} programs. This rate counts each key once, although FA1 reads it "
    f"{group} times, once for each query head.\n"
    f"* FA2 without splits reads each key once, but has only {programs} programs. A program spends most of its time "
    f"waiting for loads, and {programs} programs do not request enough bytes at a time. Together they reach {long['fa2 unsplit']['tb_per_s']:.2f} TB/s.\n"
    f"* FA2 with splits reaches {long['fa2']['tb_per_s']:.2f} TB/s of {HBM_TB_PER_S}. It takes "
    f"{1000 * long['fa2']['ms_p50']:.0f} microseconds, where FA1 takes {1000 * long['fa1']['ms_p50']:.0f}."
)

# %% [markdown]
# A roofline shows what limits a kernel. The horizontal axis is the number of operations for each byte, where each number
# of the inputs and the result counts once; the vertical axis is the measured rate. The slanted line is the most that
# the bandwidth of HBM allows, the flat line the most that the tensor cores can do.
#
# The points of FA1 and FA2 could be more than twice as high before they met the slanted line. So the bandwidth of
# HBM does not limit them. The dotted line is another upper limit, for a kernel that computes either products or
# exponentials at any moment, and never both. (An SM computes 16 exponentials or 2048 multiply-adds of tensor cores in a
# cycle.) FA3 is above it, because it does both at the same time.

# %% tags=["hide-input"]
points = rooflines.points()
checked("not_memory", all(points[v][1] < 0.5 * points[v][0] * HBM_TB_PER_S for v in ("fa1", "fa2")))
in_turn = 1 / (1 / TENSOR_TFLOPS + 1 / exp2_roof(128))
checked("fa3_above", points["fa2"][1] < in_turn < points["fa3"][1])
rooflines.draw()

# %% [markdown]
# ## Backward: each program writes its own part
#
# FA1's backward had one program for each head, which read and wrote all of `dq` for each block of keys. FA2 splits it
# so that no two programs write the same gradient:
#
# * a small kernel computes `delta`, once for each query;
# * in the second kernel, a program has one block of *keys*, loops over the queries that see it, and computes the
#   block's `dk` and `dv`;
# * in the third kernel, a program has one tile of *queries*, loops over their keys, and computes the tile's `dq`.
#
# Each program keeps its gradients in registers and writes them once. The price is two more products. A single kernel
# would need five products of tiles: the scores $QK^T$, the gradient of the weights $dO\,V^T$, and `dv`, `dk` and `dq`.
# The second kernel computes four of them (all but `dq`), and the third computes three (the first two and `dq`): seven
# in all. The backward pass also needs less from the forward pass: one number for each query, not two. This is the
# log-sum-exp (LSE), $\text{lse} = m + \log l$. With it, the weights are $p = e^{s - \text{lse}}$. The next cell shows
# two functions of the third kernel.

# %% tags=["hide-input"]
show_plain("fa2", "probabilities", "fold_keys", file="backward.py")

# %% tags=["varies"]
q, k, v = (torch.randn(1, 64, 1, 32, generator=generator) for _ in range(3))
leaves = [x.clone().requires_grad_() for x in (q, k, v)]
o = attention(*leaves, causal=True, version="fa2")
do = torch.randn(o.shape, generator=generator)
o.backward(do)
gradients = {f"d{name}": x.grad for name, x in zip("qkv", leaves)}
accuracy = compare(o.detach(), q, k, v, causal=True, do=do, **gradients)

# %% tags=["hide-input"]
shape = (2, 16, 16, 8192, 8192, 128, False)
row = shapes(document, "backward")[shape]
batch, heads, tile = shape[0], shape[1], fa2_backward.MEASURED_KV[128].block_kv
say(
    f"With {batch} sequences of {shape[3]} keys and {heads} heads, FA2 has "
    f"{batch * heads * shape[3] // tile} programs for `dk` and `dv`, and FA1 has {batch * heads}. On an H200, FA2's backward does "
    f"{rate_of(row, 'fa2'):.0f} TFLOP/s, FA1's {rate_of(row, 'fa1'):.0f}, and plain PyTorch's {rate_of(row, 'plain'):.0f}."
)

# %% [markdown]
# In the next figure, longer sequences come in smaller batches. FA1 is slowest for the longest sequences, where it has
# the fewest programs, and FA2 keeps nine tenths of its best rate or more.

# %% tags=["hide-input"]
measured("backward")
over_length = {
    name: [rate_of(row, name) for shape, row in sorted(shapes(document, "backward").items(), key=lambda x: x[0][3])
           if shape[5:] == (128, False)]
    for name in ("fa1", "fa2")
}  # fmt: skip
checked(
    "backward_over_length",
    over_length["fa1"][-1] == min(over_length["fa1"]) < 0.5 * max(over_length["fa1"]),
)
checked("backward_over_length", over_length["fa2"][-1] > 0.9 * max(over_length["fa2"]))

# %% [markdown]
# ## Exercises
#
# **1. Repair a loop.** This is FA2's loop in NumPy, and one factor is missing.


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
# Solutions are in [solutions/02_fa2](solutions/02_fa2).

# %% [markdown]
# **2. Combine splits, as a kernel.** Each program loads what it needs of the parts. The check puts NaN in a part that has
# no keys.

# %%
# puzzle: combine

# %% [markdown]
# ## Where to read on
#
# * Dao 2023, [FlashAttention-2](https://arxiv.org/abs/2307.08691): section 3.1 has the algorithm, section 3.2 the grid.
# * Dao, Haziza, Massa, Sizov 2023, [Flash-Decoding for long-context
#   inference](https://pytorch.org/blog/flash-decoding/): how the keys are split.
# * The original, in CUDA:
#   [csrc/flash_attn/src/flash_fwd_kernel.h](https://github.com/Dao-AILab/flash-attention/blob/main/csrc/flash_attn/src/flash_fwd_kernel.h).
# * `python -m flash_versions.diff fa1 fa2` writes all changes from one lesson to the other to the terminal.
# * Next: [FlashAttention 3](03_fa3.ipynb). FA2's loop has few instructions left, but it still executes its steps one
#   after the other.
