# %% [markdown]
# # FA4: less work between two products
#
# FA3 hides its copies behind computation, and the products of one warpgroup behind the softmax of another. The softmax
# itself is what remains between two products. From one generation of GPUs to the next, tensor cores have become much
# faster, and the units that compute a softmax have not. So FA4 asks two questions about every step between two
# products. Is it needed? And if it is, can a unit do it that would be idle?
#
# * **Conditional rescaling.** The accumulator is multiplied only when a row's maximum has grown by more than a
#   threshold.
# * **A polynomial for 2^x.** A share of the exponentials runs on the multiply-add units.
# * **Roles with states.** Loader, consumers and storer are separate parts of the kernel, each run by warps of its own.
#
# FA4 was designed for Blackwell GPUs. This project measures it on Hopper, where the first idea pays only in some cases,
# and the second in none. By default the kernel for Hopper uses conditional rescaling where head_dim is at most 32 or
# larger than 128, and in FP8. The measurements in the middle of this notebook say why. Where products take less time
# than the softmax, version "fa4" leaves some calls to FA3's kernel, which has neither idea. The second half is about a
# kernel for Blackwell.
#
# Time: about 75 minutes. Read [03_fa3](03_fa3.ipynb) first. You need no GPU. Cells that begin with `%%needs_triton`
# need Linux.

# %% tags=["hide-cell"]
# %matplotlib inline
from random import Random

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import display
from lessons import changes, check, checked, film, guess, instructions, measured, record
from lessons import recompiled, show, show_plain
from lessons.fit_exp2 import chosen_degree, measure, remez
from lessons.practice.folded import display_answer
from lessons.tables import say, table
from matplotlib.figure import Figure

from flash_versions.bench.results import ablation_ratios, read_results
from flash_versions.dispatch.request import make_request
from flash_versions.plot.figures import EXP2_PER_TENSOR_FLOP
from flash_versions.versions.fa4 import exp2
from flash_versions.versions.fa4.blackwell import forward as on_blackwell
from flash_versions.versions.fa4.hopper import roles
from flash_versions.versions.fa4.hopper.config import FP8_THRESHOLDS, default_config, fp8_config
from flash_versions.versions.tiles.algebra import LOG2E
from transformer.generation.session import find_checkpoint
from transformer.model.weights import load_model
from transformer.training.corpus import Teacher, draw_chat

# %% [markdown]
# ## What FA3 wastes
#
# What is left between two products? The cell below compiles FA3's kernel for a Hopper GPU and counts the arithmetic of
# its loop over blocks, for a thread. `MUFU` is the special function unit, which computes exponentials: 16 of them in a
# cycle on an SM, while `FFMA`, `FMUL` and `FADD` (multiply-add, multiply, add) have 128 lanes. Which unit is busy for
# longest?

# %%
# %%needs_triton
ARITHMETIC = {"MUFU": 16, "FFMA": 128, "FMUL": 128, "FADD": 128}  # results of an SM in a cycle


def arithmetic(found):
    """Instructions of the hot loop by name."""
    return {name: found["hot_loops"][0]["opcodes"].get(name, 0) for name in ARITHMETIC}


fa3_loop = arithmetic(instructions("fa3", "sm_90", causal=True))
table(
    ["FA3's loop", *ARITHMETIC],
    [["instructions of a thread", *fa3_loop.values()],
     ["cycles of an SM, for 256 threads", *(256 * fa3_loop[x] // rate for x, rate in ARITHMETIC.items())]],
)  # fmt: skip

# %% [markdown]
# **Change one line.** In FA3's loop, `the_line` computes p = 2^x. Write something in its place that has no exponential;
# a straight line will do, as only the count matters here (`x` stands for `s * scale_log2 - (pivot - shift)[:, None]`;
# `shift` is 0 in 16 bits). The cell compiles FA3 with it, in a copy of the package.

# %%
# %%needs_triton
the_line = "return gl.exp2(s * scale_log2 - (pivot - shift)[:, None])"
my_line = the_line  # change it


def with_line(line):
    """FA3's loop with another line."""
    return arithmetic(recompiled("versions/fa3/fp8/pairs.py", the_line, line, "fa3", causal=True))


changed = with_line(my_line)
for name, count in fa3_loop.items():
    print(f"{name}  {count} -> {changed[name]}")

# %% tags=["hide-input"]
# %%needs_triton
straight = "return 1.0 + 0.7 * (s * scale_log2 - (pivot - shift)[:, None])"
left = with_line(straight)
assert left["MUFU"] < fa3_loop["MUFU"] / 8 and left["FFMA"] > 1.5 * fa3_loop["FFMA"]
display_answer(
    f"{straight} leaves {left['MUFU']} instructions of the special function unit in place of {fa3_loop['MUFU']}, and "
    f"makes {left['FFMA']} multiply-adds in place of {fa3_loop['FFMA']}. FA4 does this with a polynomial that is as exact "
    "as the rounding of P, and for a share of the exponentials, so that both units are busy."
)

# %% [markdown]
# The other waste is a rescale. In every block FA3 multiplies the whole accumulator by alpha = 2^(old maximum − new
# maximum). How often does that change anything? The answer depends on the scores, so this notebook takes real ones:
# queries and keys of the small chat model that comes with the package, in all of its layers, while it reads a few
# chats.

# %%
layers = []


def attend_and_keep(q, k, v, **options):
    """Attention by PyTorch, with a note of its inputs."""
    layers.append([x.bfloat16() for x in (q, k, v)])
    turned = (x.transpose(1, 2) for x in (q, k, v))
    o = torch.nn.functional.scaled_dot_product_attention(*turned, is_causal=True, enable_gqa=True)
    return o.transpose(1, 2)


model = load_model(find_checkpoint("reinforced"), attend_and_keep, dtype=torch.float32)
draws, tokens = Random(0), []
while len(tokens) < 512:
    tokens += draw_chat(draws, Teacher())[0]
with torch.no_grad():
    model(torch.tensor([tokens[:512]]))
q, k, v = layers[0]
print(f"{len(layers)} layers; q {tuple(q.shape)}, k {tuple(k.shape)}: batch, length, heads, dim")

# %% [markdown]
# Now run FA3's kernel on the second layer, in the simulator, and look at every alpha after a tile's first block:

# %%
steps = record("fa3", *layers[1], causal=True, block_q=64, block_kv=64)
later = np.concatenate([step.after["alpha"] for step in steps if step.j > 0])
one, near = np.mean(later == 1), np.mean((later < 1) & (later > 2.0**-8))
say(
    f"The kernel multiplied a row of the accumulator {later.size} times. In {one:.1%} of the cases "
    f"alpha was exactly 1, so nothing changed. In {near:.1%} it was between 1 and 2^-8, and in "
    f"{1 - one - near:.1%} it was 2^-8 or less."
)
checked("most_near_one", one > 0.3 and one + near > 0.9)

# %% [markdown]
# Each of these multiplications takes head_dim products, at a moment when the next step of the warpgroup has to wait for
# them. More than nine tenths of them multiply by 1, or by a number above 2^-8. The next section shows that the kernel
# can leave out most of these.
#
# The second waste is one of balance. How many cycles does an SM of Hopper need for a tile of 128 x 128 scores?

# %% tags=["hide-input"]
FLOP_PER_CYCLE = 16 / EXP2_PER_TENSOR_FLOP  # at 16 exponentials a cycle
cycles = {d: 4 * 128 * 128 * d / FLOP_PER_CYCLE for d in (64, 128, 256)}
exponentials = 128 * 128 / 16
table(
    ["head_dim", "cycles of products in 16 bits", "of products in 8 bits", "of exponentials"],
    [[d, f"{c:.0f}", f"{c / 2:.0f}", f"{exponentials:.0f}"] for d, c in cycles.items()],
)
checked("as_long_in_fp8", cycles[128] / 2 == exponentials)

# %% [markdown]
# In 8 bits at head_dim 128 the exponentials take as long as the products. Meanwhile the multiply-add units have time.
# An SM of Hopper does 128 multiply-adds in a cycle, and 16 exponentials.

# %% [markdown]
# ## Conditional rescaling, by hand
#
# Take four queries and four keys, one key to a block. The scores are in log2 units, that is, exponents of 2. FA3 keeps
# the running maximum m and sums 2^(x − m).

# %%
x = torch.tensor(
    [
        [0.0, 3.0, 6.0, 9.0],  # grows a little in every block
        [5.0, 4.0, 3.0, 2.0],  # the largest comes first
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 20.0, 1.0, 2.0],  # one jump
    ]
)
torch.manual_seed(0)
v4 = torch.randint(-2, 3, (4, 4)).float()


def attention_by(rule):
    """Fold the four keys with a rule for the reference: (o, log2-sum-exp, alphas)."""
    reference, row_sum, acc, alphas = torch.full((4,), -torch.inf), torch.zeros(4), 0.0, []
    for j in range(4):
        new = rule(x[:, j], reference)
        alpha = torch.where(reference > -torch.inf, torch.exp2(reference - new), 1.0)
        p = torch.exp2(x[:, j] - new)
        acc = acc * alpha[:, None] + p[:, None] * v4[j]
        row_sum, reference = row_sum * alpha + p, new
        alphas.append(alpha)
    return acc / row_sum[:, None], reference + torch.log2(row_sum), torch.stack(alphas, 1)


o3, lse3, alphas3 = attention_by(torch.maximum)
torch.set_printoptions(precision=4, sci_mode=False)
print("alpha of each query (row) and block (column), FA3:", alphas3, sep="\n")

# %% [markdown]
# In FA4 a row has a **reference** r in place of the maximum. FA4 raises r, to the new maximum, only where the maximum
# exceeds r by more than a threshold of 8, that is, by a factor of more than 2^8.

# %%
o4, lse4, alphas4 = attention_by(lambda s, r: torch.where(s > r + 8, s, r))
print("alpha of each query (row) and block (column), FA4:", alphas4, sep="\n")
count3, count4 = (int((alphas < 1).sum()) for alphas in (alphas3, alphas4))
print("the same o:", torch.allclose(o3, o4), " the same LSE:", torch.allclose(lse3, lse4))
say(f"FA3 multiplies {count3} times by an alpha below 1, FA4 {count4} times.")
checked("same_result", torch.allclose(o3, o4) and torch.allclose(lse3, lse4))

# %% [markdown]
# The results are the same. Why is this exact, and not an approximation? At every moment
#
# > row_sum = Σ 2^(x − r)  and  acc = Σ 2^(x − r) v
#
# hold for *every* choice of r. At the end acc / row_sum is a quotient in which 2^(−r) cancels. The maximum is one
# choice of r, and a safe one, because with it no P exceeds 1. With the threshold no P exceeds 2^8. A floating-point
# format such as bf16 has the same relative precision at 256 as at 1:

# %%
for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
    kind = torch.finfo(dtype)
    print(f"{str(dtype):22} largest {kind.max:9.3g}, relative rounding error {kind.eps / 2:.3g}")
least, most = FP8_THRESHOLDS
say(
    f"The largest number of e4m3 is 448, so in FP8 P has less room. The threshold there can be 8 at "
    f"most. By default it is {most} for short sequences and {least} for long ones, whose many small "
    f"weights add up: P then starts at 2^{8 - most} or 2^{8 - least} and may grow to 2^8."
)

# %% [markdown]
# ### Exercise: `raise_reference`
#
# Decide when to rescale. A row that has not seen a key yet has a reference of −inf.


# %%
def raise_reference(block_max, reference, threshold):
    """(reference, alpha) of each row after a block whose maxima are block_max; in log2 units."""
    return None  # your code here


check("raise_reference", raise_reference)

# %% [markdown]
# ## The kernel
#
# This is the same decision in FA4's lesson, with a threshold of 8:

# %% tags=["hide-input"]
show_plain("fa4", "raise_reference")

# %% [markdown]
# And this is what changes in the function that folds a block of keys into the state. `mixed_exp2` computes 2 of 8
# exponentials by a polynomial, as FA4 does on Blackwell; the section after the next one explains it.

# %% tags=["hide-input"]
changes("fa3", "fa4", "fold_block")

# %% [markdown]
# Each row has a reference of its own. But whether the accumulator is multiplied is decided for many rows at once: this
# portable kernel decides for a whole *tile*, and the kernel for Hopper for the 16 rows of a *warp*. If any of them was
# raised, all of them are multiplied, the others by exactly 1. (In the package's kernel, blocks that the mask cuts are
# always multiplied. They are few in a long sequence, and a second branch would cost registers.)

# %% [markdown]
# ## How often, on real scores?
#
# ### Your prediction
#
# Take the chat model again, all layers and heads, tiles of 64 queries and blocks of 64 keys. FA4 walks over the blocks
# of a tile from the last one, on the diagonal, to the first. In what share of the blocks after the one on the diagonal
# is the accumulator multiplied, with a threshold of 8?

# %%
my_guess = None  # your guess here, between 0 and 1


# %%
def replay(threshold, backwards, size=64):
    """The rule in fp64: (blocks that are not cut by the mask, those in which a row is raised)."""
    blocks = raised_blocks = 0
    for q, k, _ in layers:
        keys = k.double().repeat_interleave(q.shape[2] // k.shape[2], 2)
        s = torch.einsum("bmhd,bnhd->bhmn", q.double(), keys) * q.shape[3] ** -0.5 * LOG2E.value
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=bool).triu(1), -torch.inf)[0]
        maxima = s.unflatten(-1, (-1, size)).amax(-1)  # (heads, queries, blocks)
        for tile in range(1, maxima.shape[1] // size):
            seen = maxima[:, tile * size : (tile + 1) * size, : tile + 1]
            seen = seen.flip(-1) if backwards else seen
            reference = seen[..., 0]
            for block_max in seen.unbind(-1)[1:]:
                raised = block_max > reference + threshold
                reference = torch.where(raised, block_max, reference)
                blocks += len(raised)
                raised_blocks += int(raised.any(-1).sum())
    return blocks, raised_blocks


blocks, raised = replay(8.0, backwards=True)
guess(my_guess, raised / blocks, "share of the blocks")

# %% [markdown]
# How does that share depend on the threshold, and on the direction in which a kernel walks over the keys?

# %% tags=["hide-input"]
thresholds = np.arange(0, 11)
figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
shares = {}
for backwards, label in ((False, "first block to last"), (True, "last block to first")):
    counted = [replay(t, backwards) for t in thresholds]
    shares[label] = np.array([raised / blocks for blocks, raised in counted])
    ax.plot(thresholds, shares[label], "o-", label=label)
ax.set(xlabel="threshold, log2", ylabel="blocks that rescale", ylim=(0, 1.05))
ax.legend(frameon=False)
plt.close(figure)
display(figure)
forwards, backwards = shares.values()
checked("threshold_helps", forwards[8] < forwards[0] / 2 and backwards[8] < backwards[0] / 2)
checked("direction_helps", (backwards[1:9] < forwards[1:9]).all())

# %% [markdown]
# *The share of blocks in which the accumulator is multiplied.* A threshold of 8 more than halves it. Walking from the
# last block to the first helps as well: the nearest keys tend to have the largest scores, so a kernel that begins with
# them has a good reference from the start. FA4's kernels walk this way.
#
# ## A run with every intermediate
#
# One head of the model reads 128 tokens, in tiles of 32. Each frame shows the scores of a block, P (the darkest green
# is 1 or more), and two numbers for every query of the tile: its true running maximum (dot) and the reference that the
# kernel uses (line). The grey area begins 8 above the reference.

# %% tags=["hide-input"]
q, k, v = (x[:, :128] for x in layers[2])
steps = record("fa4", q[:, :, 1:2], k, v, causal=True, block_q=32, block_kv=32)
scale_log2 = q.shape[3] ** -0.5 * LOG2E.value


def draw(number):
    """One step: scores, P, and the references beside the true maxima."""
    step, figure = steps[number], Figure(figsize=(5, 3.8), layout="constrained")
    upper, lower = figure.subfigures(2, 1)
    scores, p = upper.subplots(1, 2)
    scores.imshow(step.after["s"] * scale_log2, cmap="PuOr", vmin=-20, vmax=20, aspect="auto")
    scores.set(title=f"S, block {step.j}", xticks=[], yticks=[])
    p.imshow(step.after["p"], cmap="Greens", vmin=0, vmax=1, aspect="auto")
    p.set(title="P", xticks=[], yticks=[])
    so_far = [s.after["s"].max(1) for s in steps[: number + 1] if s.program == step.program]
    state, queries = lower.subplots(), np.arange(32)
    state.step(queries, step.after["row_max"], where="mid", label="reference")
    state.plot(queries, np.max(so_far, 0) * scale_log2, "k.", markersize=4, label="true maximum")
    raised = (step.after["alpha"] < 1).sum()
    state.fill_between(queries, step.after["row_max"] + 8, 50, step="mid", color="#eeeeee")
    state.set(title=f"rows raised: {raised}", xlabel="query of the tile", ylim=(-5, 35))
    state.legend(fontsize=7, frameon=False, loc="upper left", ncols=2)
    return figure


shown = [number for number, step in enumerate(steps) if step.program in (0, 2)]
film(
    shown,
    draw,
    "Two of the tiles: first that of the last queries, then one of earlier queries. Each starts "
    "with its last block, on the diagonal.",
)
after_first = [steps[number] for number in shown if steps[number].before["row_max"].max() > -np.inf]
above = [
    (s.after["s"].max(1) * scale_log2 - s.before["row_max"] - 8, s.after["alpha"] < 1)
    for s in after_first
]
sure = [(excess[abs(excess) > 1e-3] > 0, raised[abs(excess) > 1e-3]) for excess, raised in above]
checked("only_in_the_grey", all((over == raised).all() for over, raised in sure))
largest = max(step.after["p"].max() for step in steps)
checked("p_in_range", 1 < largest <= 256)
say(f"The largest P of the whole run is {largest:.4g}.")

# %% [markdown]
# The true maximum may exceed the reference. Only if it reaches the grey area of the frame before, the kernel raises the
# reference to the new maximum. P may therefore exceed 1, and it stays below 2^8 = 256.

# %% [markdown]
# ## 2^x without an exponential
#
# The special function unit computes 2^x. A multiply-add unit can do it as well:
#
# 1. Split x = n + f, where n is the nearest integer and f lies between −1/2 and 1/2. (This range reduction is by Cody
#    and Waite.)
# 2. 2^f is a smooth function on a short interval, so a polynomial of low degree approximates it.
# 3. Multiplying by 2^n takes one addition: n is *added to the exponent bits* of the result.
#
# Rounding x to n is an addition, too. A number as large as 1.5 · 2^23 has no bits left for a fraction, so x + 1.5 ·
# 2^23 is rounded to an integer, which stands in its lowest bits.

# %%
fit = remez(3)
magic = np.float32(exp2.MAGIC.value)
one = np.float32(-2.3)
shifted = one + magic
n, f = int(shifted - magic), float(one - (shifted - magic))
c3, c2, c1 = fit.coefficients
power = np.float32(((c3 * f + c2) * f + c1) * f + 1)
print(f"x = {one:.1f}: n = {n}, f = {f:.4f}")
print(f"bits of x + 1.5 * 2^23: {shifted.view(np.int32):032b}  (the last ones are n)")
print(f"2^f by the polynomial:  {power.view(np.int32):032b}  = {power:.7f}")
result = (power.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)
print(f"n added to exponent:    {result.view(np.int32):032b}  = {result:.7f}")
print(f"exactly: {2.0 ** float(one):.7f}")

# %% [markdown]
# ### Exercise: `polynomial_exp2`
#
# Write it for a whole tensor, with integer shifts. P is rounded to bf16 afterwards, so three decimal digits are enough.
# Masked scores are −inf and have to become exactly 0.


# %%
def polynomial_exp2(x, coefficients):
    """2^x of an fp32 tensor; coefficients are (c_3, c_2, c_1) of 1 + c_1 f + c_2 f^2 + c_3 f^3."""
    return None  # your code here


check("polynomial_exp2", polynomial_exp2)

# %% [markdown]
# Where do the coefficients come from? They are those of the polynomial whose *largest* relative error is smallest, with
# the condition p(0) = 1, which keeps the largest element of a row exact. `fit_exp2.py` finds it with Remez' exchange
# algorithm. The next plot compares it with a Taylor series.

# %% tags=["hide-input"]
f = np.linspace(-0.5, 0.5, 1001)
figure, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
wrong = {}
for degree in (2, 3, 4):
    polynomial = np.polyval([*remez(degree).coefficients, 1.0], f)
    wrong[degree] = np.abs(polynomial / np.exp2(f) - 1)
    ax.semilogy(f, wrong[degree] + 1e-12, label=f"degree {degree}")
taylor = np.polyval([np.log(2) ** 3 / 6, np.log(2) ** 2 / 2, np.log(2), 1.0], f)
wrong["taylor"] = np.abs(taylor / np.exp2(f) - 1)
ax.semilogy(f, wrong["taylor"] + 1e-12, "k:", label="Taylor, degree 3")
ax.axhline(torch.finfo(torch.bfloat16).eps / 2, color="grey", linestyle="--")
ax.text(-0.5, torch.finfo(torch.bfloat16).eps / 1.8, "rounding to bf16", color="grey", fontsize=8)
ax.set(xlabel="f", ylabel="relative error of 2^f", ylim=(1e-8, 1e-1))
ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.close(figure)
display(figure)
checked("taylor_worse", wrong["taylor"].max() > 3 * wrong[3].max())

# %% [markdown]
# *The relative error of the polynomials, before anything is rounded. The dashed line is the largest error that rounding
# to bf16 makes anyway.* The Taylor series of degree 3 is exact near 0, and at the ends its error is more than three
# times the largest one of our polynomial of the same degree.
#
# ### Your prediction
#
# P is rounded after 2^x. Require that the error after rounding is at most that of rounding alone. Which degree is
# enough for bf16?

# %%
my_guess = None  # 2, 3, 4 or 5

# %%
guess(my_guess, chosen_degree(torch.bfloat16), "the smallest degree for bf16")
rows, after = [], {}
for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
    found = [measure(remez(degree).coefficients, dtype) for degree in (2, 3, 4)]
    name = str(dtype).removeprefix("torch.")
    after[dtype] = [one.after_cast / one.allowed for one in found]
    errors = [f"{one.after_cast:.6f}" for one in found]
    rows.append([name, f"{found[0].allowed:.6f}", *errors, chosen_degree(dtype)])
table(
    ["P is rounded to", "largest error allowed", "of degree 2", "of degree 3", "of degree 4",
     "chosen degree"], rows
)  # fmt: skip
checked("degree_two_beyond", after[torch.bfloat16][0] > 1 >= after[torch.bfloat16][1])

# %% [markdown]
# With degree 2 the error after rounding to bf16 exceeds what is allowed; with degree 3 it stays below. This is the
# package's function:

# %% tags=["hide-input"]
show(exp2.polynomial_exp2, docstring=False)

# %% [markdown]
# A kernel uses the polynomial for a *share* of the exponentials only, so that both units are busy. For which columns of
# a block? Record a block, and look where P differs from an exponential. In the output, P marks a polynomial and a dot
# an exponential.

# %%
q, k, v = (torch.randn(1, 64, 1, 32).bfloat16() for _ in range(3))
found = {}
for eighths in (1, 2, 4):
    steps = record("fa4", q, k, v, block_q=64, block_kv=64, eighths=eighths)
    s, p = steps[0].after["s"], steps[0].after["p"]
    scale = np.float32(32**-0.5 * LOG2E.value)
    exponential = np.exp2(s * scale - steps[0].after["row_max"][:, None])
    found[eighths] = (np.abs(p / exponential - 1) > 1e-6).any(0)
    print(f"{eighths}/8:", "".join("P" if column else "." for column in found[eighths]))
checked("share_is_as_asked", all(x.sum() == 64 * eighths / 8 for eighths, x in found.items()))

# %% [markdown]
# Each line has as many P as was asked for. The pattern selects columns by register index. A thread holds some columns
# of the accumulator in its registers, so every thread gets the same mix, and no number moves between threads.

# %% [markdown]
# ## Roles with states
#
# FA4's kernel for Hopper divides its warps into three roles that meet at barriers: a loader, two or three consumers,
# and a storer. Each role goes from state to state; the kernel's text enters a state by name, with `enter(...)`.

# %% tags=["hide-input"]
for role in roles.ROLES:
    done = [f"`{state}`: {what}" for (of, state), what in roles.MEANING.items() if of == role]
    say(f"**{role}**\n\n* " + "\n* ".join(done))

# %% [markdown]
# The decision of this notebook belongs to the state `score` of a consumer: after S has been issued, each warp
# multiplies its rows of the accumulator if one of them was raised. This is what changes in a consumer from FA3's lesson
# to FA4's:

# %% tags=["hide-input"]
changes("fa3-hopper", "fa4-hopper", "softmax_step")
changes("fa3-hopper", "fa4-hopper", "fold_block")

# %% [markdown]
# `softmax_step` now raises references in place of maxima, and `correct` multiplies the accumulator where it has to. The
# decision is made by a warp, and Gluon has no operation for that, so `correct` is written in PTX, NVIDIA's assembly
# language: `vote.sync.any` asks whether any thread of the warp has a raised row. Where the answer is no, a branch skips
# the multiplications.

# %% [markdown]
# An instrumented launch notes when a role enters a state. This table shows, from the committed trace, the share of its
# time that each consumer of one program spends in each state.

# %% tags=["hide-input"]
results = read_results()
trace = results["trace"]
program = trace["programs"][0]["roles"]
consumers = [name for name in program if name.startswith("consumer")]
states = list(dict.fromkeys(state for state, _, _ in program["consumer 0"]))
spent = {
    name: {
        state: sum(end - start for s, start, end in program[name] if s == state)
        / (program[name][-1][2] - program[name][0][1])
        for state in states
    }
    for name in consumers
}
print(trace["machine"]["gpu"], trace["what"])
table(
    ["state", *consumers],
    [[state, *(f"{spent[name][state]:.1%}" for name in consumers)] for state in states],
)
checked("mostly_softmax", all(max(x, key=x.get) == "softmax" for x in spent.values()))
checked("little_waiting", all(x["await"] + x["hand over"] < 0.1 for x in spent.values()))

# %% [markdown]
# Consumers spend more time in the softmax than in any other state. They spend less than a tenth of it on waiting for
# tiles and on handing over O.

# %% tags=["hide-input"]
measured("timeline")

# %% [markdown]
# *Above: a few tiles of one program. Below: the moment at which the first tile ends. The consumers hand over their O
# and do not wait for the storer; the grey stretch is their wait for Q and K of the next tile.*

# %% [markdown]
# ## What the compiler made of it

# %% tags=["hide-input"]
# %%needs_triton
found = {
    (version, arch): one
    for version, arches in (("FA3", ("sm_90", "sm_100")), ("FA4", ("sm_80", "sm_90", "sm_100")))
    for arch, one in instructions(version.lower(), arches, causal=True).items()
}
names = {"sm_80": "Ampere", "sm_90": "Hopper", "sm_100": "Blackwell"}
kinds = {
    "ex2": "exponentials", "wgmma": "products, Hopper's", "tcgen05": "products, Blackwell's",
    "mma_sync": "products, Ampere's", "tma_loads": "copies of boxes in", "tma_stores": "and out",
    "spill_loads": "spills, bytes",
}  # fmt: skip
rows = [[label, *(one[kind] for one in found.values())] for kind, label in kinds.items()]
fmas = {
    key: one["opcodes"].get("FFMA", 0) + 2 * one["opcodes"].get("FFMA2", 0)  # FFMA2 does two
    for key, one in found.items()
}
rows.append(["multiply-adds", *fmas.values()])
table(["instructions", *(f"{version}, {names[arch]}" for version, arch in found)], rows)


def fewer_exponentials(version, other, arch):
    """Whether the first version has fewer exponentials and more multiply-adds than the second."""
    less = found[version, arch]["ex2"] < found[other, arch]["ex2"]
    return less and fmas[version, arch] > fmas[other, arch]


checked("polynomial_on_blackwell", fewer_exponentials("FA4", "FA3", "sm_100"))
checked("none_on_hopper", found["FA4", "sm_90"]["ex2"] == found["FA3", "sm_90"]["ex2"])

# %% [markdown]
# Compare each FA4 with the FA3 of the same GPU. On Blackwell some exponentials have become multiply-adds. On Hopper
# none has. On Ampere the call goes to FA2's kernel. These choices follow the measurements of the next section.

# %% [markdown]
# ## What it is worth, measured
#
# ### Your prediction
#
# On an H200, in bf16 at head_dim 128 without a mask, an eighth of the exponentials becomes polynomials. What is the
# speed, divided by the speed with none of them?

# %%
my_guess = None  # your guess here: 1 is no change, 1.05 is five percent faster

# %% tags=["hide-input"]
BY_DEFAULT = {"rescale if grown": 1.0}  # in FP8
bf16 = ablation_ratios(results)["fa4"]
fp8 = ablation_ratios(results, "ablation fp8", "cudnn fp8")["fa4"]
columns = {
    f"{what}, head_dim {d}": {
        name: ratio / group[f"D={d} full"]["always rescale"]
        for name, ratio in (BY_DEFAULT | group[f"D={d} full"]).items()
    }
    for what, group in (("bf16", bf16), ("FP8", fp8))
    for d in (64, 128, 256)
}
guess(my_guess, columns["bf16, head_dim 128"]["1/8 polynomial"], "against no polynomial")

# %% tags=["hide-input"]
tricks = {
    "rescale if grown": "conditional rescaling",
    "1/8 polynomial": "1/8 of the exponentials by polynomial",
    "2/8 polynomial": "2/8 by polynomial",
    "4/8 polynomial": "4/8 by polynomial",
    "both, 1/8": "conditional rescaling and 1/8",
}
table(
    ["speed, relative to neither trick", *columns],
    [
        [label, *(f"{c[name]:.2f}" if name in c else "" for c in columns.values())]
        for name, label in tricks.items()
    ],
)
rescale = {c: x["rescale if grown"] for c, x in columns.items()}
eighth, half = (
    {c: x[f"{n}/8 polynomial"] for c, x in columns.items() if c.startswith("bf16")} for n in (1, 4)
)
checked("both_cost", rescale["bf16, head_dim 128"] < 0.99 and eighth["bf16, head_dim 128"] < 0.99)
checked("threshold_pays", min(rescale["bf16, head_dim 256"], rescale["FP8, head_dim 256"]) > 1.01)
checked("no_gain_at_64", eighth["bf16, head_dim 64"] < 0.99)
checked("threshold_in_fp8", rescale["FP8, head_dim 128"] > 1.01 > rescale["bf16, head_dim 128"])
checked("half_costs", max(half.values()) < 0.95)
long = [torch.empty(4, 4096, 16, d, dtype=torch.bfloat16) for d in (128, 256)]
defaults = [(default_config(r), fp8_config(r)) for r in (make_request(x, x, x) for x in long)]
checked(
    "off_where_it_costs",
    [(a.threshold > 0, a.eighths, b.threshold > 0, b.eighths) for a, b in defaults]
    == [(False, 0, True, 0), (True, 0, True, 0)],
)

# %% [markdown]
# Read it column by column.
#
# * **bf16, head_dim 128**: both tricks cost speed. Products take twice as long as exponentials there and hide them. The
#   decision and the polynomial's instructions are additional work between two products.
# * **head_dim 256, bf16 and FP8**: conditional rescaling pays. The accumulator is twice as wide, so a multiplication
#   that is left out saves twice as much.
# * **bf16, head_dim 64**: exponentials take as long as products, so a gain from the polynomial would be plausible. The
#   measurement shows a loss.
# * **FP8, head_dim 128**: products take half the time, so the softmax is most of a block. Conditional rescaling pays,
#   where in bf16 it does not. The polynomial is not there: it works on scores in fp32, and in FP8 they have 16 bits,
#   two in a register.
# * **Half of the exponentials** by polynomial is a loss, because several instructions take the place of one.
#
# The kernel for Hopper has each trick switched off where it costs. What remains of FA4 in these cases are its roles. A
# GPU with faster products, for which FA4 was designed, has a different balance.

# %% [markdown]
# ## At home on Blackwell
#
# This half of the notebook is about FA4 on the GPU that it was designed for. We have no such GPU. The kernel for
# Blackwell, `fa4/blackwell/forward.py`, compiles without one and runs in the simulator, so we know that its results are
# right. Its speed was never measured.
#
# What changed in the machine?

# %% tags=["hide-input"]
hopper = {"tensor": FLOP_PER_CYCLE, "exponentials": 16, "arithmetic": 128, "shared_memory": 128}
# Published rates of an SM of a B200 (Zadouri et al. 2026).
b200 = {"tensor": 8192, "exponentials": 16, "arithmetic": 128, "shared_memory": 128}
words = {
    "tensor": "operations of the tensor cores, 16 bits",
    "exponentials": "exponentials",
    "arithmetic": "multiply-adds",
    "shared_memory": "bytes of shared memory",
}
table(
    ["an SM does in a cycle", "Hopper", "Blackwell", "ratio"],
    [
        [text, f"{hopper[x]:.0f}", f"{b200[x]}", f"{b200[x] / hopper[x]:.1f}"]
        for x, text in words.items()
    ],
)
products = 4 * 128 * 128 * 128 / b200["tensor"]
say(
    f"For 128 x 128 scores at head_dim 128, a B200 needs {products:.0f} cycles of products and "
    f"{128 * 128 / b200['exponentials']:.0f} cycles of exponentials."
)
checked("only_products_are_faster", b200["tensor"] / hopper["tensor"] == 2)
checked("same_exponentials", hopper["exponentials"] == b200["exponentials"])
checked("balanced", products == 128 * 128 / b200["exponentials"])

# %% [markdown]
# Products became twice as fast; exponentials did not become faster. So in 16 bits at head_dim 128 both take equally
# long, which was the case on Hopper in 8 bits only.
#
# Two more things changed, and they change the shape of the kernel:
#
# * **Tensor memory.** On Hopper, accumulators are in the registers of the warpgroup that issues a product. On Blackwell
#   they are in a memory of their own: 512 columns of 128 rows, 4 bytes each. Warps read from it and write to it as they
#   need.
# * **One thread issues a product** (`tcgen05.mma`), for the whole SM, and goes on at once. A barrier tells when the
#   product is done.
#
# With both, the work between two products can be split among more warps than before:
#
# | role | warps | does |
# | --- | --- | --- |
# | loader | 1 | asks TMA for Q, and for K and V in turns |
# | products | 1 | issues S = Q Kᵀ and O += P V, for two tiles of 128 queries in turns |
# | softmax 0, softmax 1 | 4 each | of one tile each: maximum, 2^x, writes P over S |
# | correction | 4 | multiplies O by alpha, where a row was raised; at the end divides O by the row sum |
# | storer | 1 | starts the copies of O to memory |
#
# ### Where everything is
#
# Tensor memory has 512 columns. S of tile 0 is in columns 0 to 127 and S of tile 1 in the next 128; O of each tile
# takes 128 columns more. P is written over S, in half of its columns, because P has 16 bits in place of 32. Alpha goes
# from the softmax to the correction through a column of S that P leaves free.
#
# ### The correction
#
# This is the role that exists for conditional rescaling, and the function that it calls. A thread has a row, so
# `gl.min(alpha, axis=0) < 1.0` asks all 128 rows of the tile.

# %% tags=["hide-input"]
show(on_blackwell.correct, docstring=False)
show(on_blackwell.rescale, docstring=False)

# %% [markdown]
# ### What is known, and what is not
#
# The kernel's results are right in the simulator, also with every role as late as the rules allow, and it compiles for
# Blackwell. Its speed is unknown. It is also unknown whether the hardware needs a fence (an instruction that keeps
# accesses to memory in order) that the simulator does not ask for. So `version="auto"` does not choose this kernel. On
# a Blackwell GPU, `python -m flash_versions.verify` compares all kernels with the oracle and times them; once the
# kernel has passed there, "auto" takes it on that machine. [The page about this
# kernel](../docs/understand/blackwell.md) says more.

# %% [markdown]
# ## Exercise: the rescale in a kernel
#
# Leave rescales out that change little, in the loop of a kernel for Hopper. The check
# counts them.

# %%
# puzzle: rescale

# %% [markdown]
# ## Where to read on
#
# * Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao 2026, [FlashAttention-4](https://arxiv.org/abs/2603.05451): the
#   sections on conditional rescaling and on emulating the exponential.
# * The authors' code: [flash_attn/cute](https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute) of
#   flash-attention, `flash_fwd_sm100.py` and `softmax.py`.
# * This project: the docstrings of `flash_versions/versions/fa4/softmax.py` (why the rescaling is exact, and stays in
#   range), `exp2.py` and `fit_exp2.py`, and what was tried and did not help, in [log.md](../docs/understand/log.md).
# * Solutions: `raise_reference.py` and `polynomial_exp2.py` in `notebooks/solutions/04_fa4`. Next:
#   [05_transformer](05_transformer.ipynb), a model that talks and runs on these kernels.
