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
# # FA4: less to do in the place that matters
#
# After FA3 nobody waits for loads, and products of one group of warps hide the softmax of another.
# What is left between two products is the softmax itself. Tensor cores double with every generation
# of GPUs; the units that compute a softmax do not. So FA4 asks of every step between two products:
# is it needed? And if it is, can a unit that has time do it?
#
# * **Conditional rescaling**: multiply the accumulator only when the maximum has grown *much*.
# * **A polynomial for 2^x**: compute a share of the exponentials on the multiply-add units.
# * **Roles with states**: loader, consumers and storer as programs of their own.
#
# FA4 was designed for Blackwell GPUs. Here it is measured on Hopper, and not everything pays there.
# That is part of the lesson.
#
# Before you start: [03_fa3](03_fa3.ipynb).

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
from random import Random

import matplotlib.pyplot as plt
import numpy as np
import torch
from IPython.display import Markdown, display
from lessons import changes, check, film, guess, instructions, measured, own_gpu, record, show
from lessons.pictures import roles as role_pictures
from matplotlib.figure import Figure

from flash_versions.versions.fa4 import exp2, softmax
from flash_versions.versions.fa4.hopper import forward as forward_hopper
from flash_versions.versions.fa4 import forward as fa4
from flash_versions.versions.fa4.hopper.config import FP8_THRESHOLD
from lessons.fit_exp2 import chosen_degree, evaluate, measure, remez, rounded
from flash_versions.plot.figures import EXP2_PER_TENSOR_FLOP
from flash_versions.dispatch.request import make_request
from flash_versions.bench.results import ablation_ratios, read_results
from flash_versions.versions.tiles.algebra import LOG2E
from flash_versions.dispatch.sizes import LaunchConfig
from transformer.training.corpus import Teacher, draw_chat
from transformer.generation.session import find_checkpoint
from transformer.model.weights import load_model

torch.manual_seed(0)


def table(head, rows):
    """Display rows as a table: the first column is text, the others are numbers."""
    lines = [head, ["---", *["--:"] * (len(head) - 1)], *rows]
    display(Markdown("\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)))


# %% [markdown]
# ## What FA3 wasted
#
# In every block FA3 multiplies the whole accumulator by alpha = 2^(old maximum − new maximum). How
# often does that change anything? Random numbers would be an easy answer. Here are real ones:
# queries and keys of the small chat model that comes with the package, in all of its layers, while
# it reads a few chats.

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
print(f"{len(layers)} layers; q {tuple(q.shape)}, k {tuple(k.shape)}")

# %%
steps = record("fa3", *layers[1], causal=True, block_q=64, block_kv=64)
later = np.concatenate([step.after["alpha"] for step in steps if step.j > 0])
print(f"{later.size} times a row of the accumulator was multiplied by alpha")
print(f"{np.mean(later == 1):5.1%} of them by exactly 1")
print(f"{np.mean((later < 1) & (later > 2.0**-8)):5.1%} by something between 1 and 2^-8")
print(f"{np.mean(later <= 2.0**-8):5.1%} by less")

# %% [markdown]
# Each of these is a product for every number of the row, in the one place where everybody waits.
# Many change nothing at all, and most of the others change something that nobody needs, as you will
# see.
#
# The second waste is one of balance. Cycles that a multiprocessor of Hopper needs for a tile of 128
# x 128 scores, by unit:

# %%
FLOP_PER_CYCLE = 16 / EXP2_PER_TENSOR_FLOP  # at 16 exponentials a cycle
rows = []
for head_dim in (64, 128, 256):
    products = 4 * 128 * 128 * head_dim / FLOP_PER_CYCLE
    rows.append([head_dim, f"{products:.0f}", f"{products / 2:.0f}", f"{128 * 128 / 16:.0f}"])
table(["head_dim", "products, 16 bits", "products, 8 bits", "exponentials"], rows)

# %% [markdown]
# In 8 bits at head_dim 128 the exponentials take as long as the products. Meanwhile the
# multiply-add units, which are several times as fast as the one for special functions, have time.

# %% [markdown]
# ## Conditional rescaling, by hand
#
# Four queries, four keys, one key to a block. The scores are in powers of two. FA3 keeps the
# running maximum m and sums 2^(x − m).

# %%
x = torch.tensor(
    [
        [0.0, 3.0, 6.0, 9.0],  # grows a little in every block
        [5.0, 4.0, 3.0, 2.0],  # the largest comes first
        [1.0, 1.0, 1.0, 1.0],
        [0.0, 20.0, 1.0, 2.0],  # one jump
    ]
)
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
print("alpha of each block, FA3:", alphas3, sep="\n")

# %% [markdown]
# FA4's rule: a row has a **reference** r, and it is raised to the maximum only where a block
# exceeds it by more than a threshold of 8, that is, by a factor of 2^8.

# %%
o4, lse4, alphas4 = attention_by(lambda s, r: torch.where(s > r + 8, s, r))
print("alpha of each block, FA4:", alphas4, sep="\n")
print("blocks in which a row is rescaled:",
      f"FA3 {(alphas3 < 1).any(0).sum()}, FA4 {(alphas4 < 1).any(0).sum()}")  # fmt: skip
print("the same o:", torch.allclose(o3, o4), " the same LSE:", torch.allclose(lse3, lse4))

# %% [markdown]
# Why is that exact, and not an approximation? At every moment
#
# > row_sum = Σ 2^(x − r)  and  acc = Σ 2^(x − r) v
#
# hold for *whatever* r is, and at the end acc / row_sum is a quotient in which 2^(−r) cancels. The
# maximum is just one choice of r. It is a safe one, because no P exceeds 1. With the threshold no P
# exceeds 2^8, and a format like bf16 does not mind: its numbers are as exact at 256 as at 1.

# %%
for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
    kind = torch.finfo(dtype)
    print(f"{str(dtype):22} largest {kind.max:9.3g}, relative rounding error {kind.eps / 2:.3g}")
print(f"P of 8 bits has less room above: its threshold is at most {FP8_THRESHOLD:g}")

# %% [markdown]
# ### Exercise: `raise_reference`
#
# Decide when to rescale. A reference of −inf means that the row has not seen a key yet.


# %%
def raise_reference(block_max, reference, threshold):
    """(reference, alpha) of each row after a block whose maxima are block_max; in log2 units."""
    raise NotImplementedError  # your code here


check("raise_reference", raise_reference)

# %% [markdown]
# ## The kernel
#
# The same decision in the package, and what it changes in the kernel.

# %%
show(softmax.raise_reference)

# %%
changes("fa3", "fa4", "fold_block")

# %%
show(fa4.rescale)

# %% [markdown]
# The decision is made for a *tile*: if no row was raised, nothing is multiplied. One row is enough
# to pay for all. (Blocks that a mask cuts always multiply; they are few in a long sequence, and a
# second branch would cost registers.)

# %% [markdown]
# ## How often, on real scores?
#
# ### Your prediction
#
# The chat model again, all layers and heads, tiles of 64 queries, blocks of 64 keys. Of the blocks
# after a tile's first one, in what share is the accumulator rescaled with a threshold of 8?

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

# %%
thresholds = np.arange(0, 11)
figure, ax = plt.subplots(figsize=(6, 2.8), layout="constrained")
for backwards, label in ((False, "first block to last"), (True, "last block to first")):
    shares = [raised / blocks for blocks, raised in (replay(t, backwards) for t in thresholds)]
    ax.plot(thresholds, shares, "o-", label=label)
ax.set(xlabel="threshold, log2", ylabel="blocks that rescale", ylim=(0, 1.05))
ax.legend(frameon=False)
plt.close(figure)
figure

# %% [markdown]
# *Two things help. The threshold, and the order: of a causal query the nearest keys tend to have
# the largest scores, so a kernel that begins with the last block has a good reference from the
# start. FA4's kernels walk that way.*
#
# The kernel itself counts, too. It multiplies in all blocks that are cut, and in as many others as
# the replay says:

# %%
config = LaunchConfig(block_q=64, block_kv=64, num_warps=4, num_stages=1)
counts = torch.zeros(2, dtype=torch.int32)
for q, k, v in layers:
    fa4.forward(make_request(q, k, v, causal=True), config, threshold=8.0, counts=counts)
cut = sum(q.shape[2] * q.shape[1] // 64 for q, _, _ in layers)  # one for each tile and head
print(f"blocks folded {counts[0]}, rescaled {counts[1]} = {cut} that are cut + {counts[1] - cut}")
print(f"replay in fp64: {raised} of {blocks}")

# %% [markdown]
# ## A run with every intermediate
#
# One head of the model over 128 tokens, in tiles of 32. In each frame: the scores of a block, P
# (darkest from 1 on), and for every query of the tile the true running maximum (dots) and the
# reference that the kernel uses (line). A dot may rise above the line as long as it stays out of
# the grey: there the line follows.

# %%
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


film(
    [number for number, step in enumerate(steps) if step.program in (0, 2)],
    draw,
    "Two of the tiles: that of the last queries, which comes first, and a later one. Each begins "
    "with its last block, on the diagonal. Then dots leave their lines now and then; only where one "
    "reaches the grey is a row raised, and the accumulator rescaled.",
)

# %%
largest = max(step.after["p"].max() for step in steps)
print(f"the largest P of the whole run: {largest:.4g}")

# %% [markdown]
# ## 2^x without an exponential
#
# The special function unit computes 2^x. A multiply-add unit can do it as well:
#
# 1. Split x = n + f, n the nearest integer, f between −1/2 and 1/2 (Cody and Waite).
# 2. 2^f is a smooth function on a short interval: a polynomial of low degree does.
# 3. 2^n costs nothing: n is *added to the exponent bits* of the result.
#
# Even rounding to n is done by an addition: a large number like 1.5 · 2^23 has no bits left for a
# fraction, so x + 1.5 · 2^23 rounds x to an integer and leaves it in its lowest bits.

# %%
fit = remez(3)
magic = np.float32(exp2.MAGIC.value)
one = np.float32(-2.3)
shifted = one + magic
n, f = int(shifted - magic), float(one - (shifted - magic))
c3, c2, c1 = fit.coefficients
power = np.float32(((c3 * f + c2) * f + c1) * f + 1)
print(f"x = {one}: n = {n}, f = {f:.4f}")
print(f"bits of x + 1.5 * 2^23: {shifted.view(np.int32):032b}  (the last ones are n)")
print(f"2^f by the polynomial:  {power.view(np.int32):032b}  = {power:.7f}")
result = (power.view(np.int32) + (shifted.view(np.int32) << 23)).view(np.float32)
print(f"n added to exponent:    {result.view(np.int32):032b}  = {result:.7f}")
print(f"exactly: {2.0 ** float(one):.7f}")

# %% [markdown]
# ### Exercise: `polynomial_exp2`
#
# Write it for a whole tensor, with integer shifts. P is rounded to bf16 afterwards, so three digits
# are enough; masked scores are −inf and have to become exactly 0.


# %%
def polynomial_exp2(x, coefficients):
    """2^x of an fp32 tensor; coefficients are (c_3, c_2, c_1) of 1 + c_1 f + c_2 f^2 + c_3 f^3."""
    raise NotImplementedError  # your code here


check("polynomial_exp2", polynomial_exp2)

# %% [markdown]
# Where do the coefficients come from? The polynomial whose *largest* relative error is as small as
# possible, under the condition p(0) = 1, so that the largest element of a row stays exactly 1.
# `fit_exp2.py` derives it by Remez' exchange. A Taylor series of the same degree is exact at 0 and
# bad at the ends.

# %%
f = np.linspace(-0.5, 0.5, 1001)
figure, ax = plt.subplots(figsize=(7, 2.8), layout="constrained")
for degree in (2, 3, 4):
    polynomial = np.polyval([*remez(degree).coefficients, 1.0], f)
    ax.semilogy(f, np.abs(polynomial / np.exp2(f) - 1) + 1e-12, label=f"degree {degree}")
taylor = np.polyval([np.log(2) ** 3 / 6, np.log(2) ** 2 / 2, np.log(2), 1.0], f)
ax.semilogy(f, np.abs(taylor / np.exp2(f) - 1) + 1e-12, "k:", label="Taylor, degree 3")
ax.axhline(torch.finfo(torch.bfloat16).eps / 2, color="grey", linestyle="--")
ax.text(-0.5, torch.finfo(torch.bfloat16).eps / 1.8, "rounding to bf16", color="grey", fontsize=8)
ax.set(xlabel="f", ylabel="relative error of 2^f", ylim=(1e-8, 1e-1))
ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
plt.close(figure)
figure

# %% [markdown]
# *The relative error of the polynomials, before anything is rounded. The dashed line is what
# rounding to bf16 costs anyway.*
#
# ### Your prediction
#
# P is rounded after 2^x. Allow the polynomial no larger error *after that* than rounding alone may
# have. Which degree is enough for bf16?

# %%
my_guess = None  # 2, 3, 4 or 5

# %%
guess(my_guess, chosen_degree(torch.bfloat16), "the smallest degree for bf16")
rows = []
for dtype in (torch.float8_e4m3fn, torch.bfloat16, torch.float16):
    found = [measure(remez(degree).coefficients, dtype) for degree in (2, 3, 4)]
    name = str(dtype).removeprefix("torch.")
    errors = [f"{one.after_cast:.6f}" for one in found]
    rows.append([name, f"{found[0].allowed:.6f}", *errors, chosen_degree(dtype)])
table(["P in", "allowed", "degree 2", "degree 3", "degree 4", "chosen"], rows)

# %%
x = np.linspace(-2, 0, 40 * 500, dtype=np.float32)
exact = np.exp2(x.astype(np.float64))
figure, ax = plt.subplots(figsize=(7, 2.6), layout="constrained")
for label, values, style in (
    ("polynomial of degree 2", evaluate(x, remez(2).coefficients), "-"),
    ("polynomial of degree 3", evaluate(x, remez(3).coefficients), "-"),
    ("exact exponential", np.exp2(x), "k:"),
):
    error = np.abs(rounded(values, torch.bfloat16) / exact - 1)
    ax.plot(x.reshape(40, 500)[:, 250], error.reshape(40, 500).max(1), style, label=label)
ax.axhline(torch.finfo(torch.bfloat16).eps / 2, color="grey", linestyle="--")
ax.set(xlabel="x", ylabel="largest relative error\nafter rounding to bf16", ylim=(0, None))
ax.legend(frameon=False, fontsize=8)
plt.close(figure)
figure

# %% [markdown]
# *The largest error of 2^x after it is rounded to bf16; the dashed line is what rounding may cost.
# Degree 2 goes beyond it; degree 3 lies close to the exact exponential and stays below.*
#
# Only a *share* of the exponentials goes that way, so that both units are busy. Which columns of a
# block? The kernel can be asked: record a block, and look where P is not what an exponential gives.

# %%
show(exp2.polynomial_exp2)

# %%
q, k, v = (torch.randn(1, 64, 1, 32).bfloat16() for _ in range(3))
for eighths in (1, 2, 4):
    steps = record("fa4", q, k, v, block_q=64, block_kv=64, eighths=eighths)
    s, p = steps[0].after["s"], steps[0].after["p"]
    scale = np.float32(32**-0.5 * LOG2E.value)
    exponential = np.exp2(s * scale - steps[0].after["row_max"][:, None])
    by_polynomial = (np.abs(p / exponential - 1) > 1e-6).any(0)
    print(f"{eighths}/8:", "".join("P" if column else "." for column in by_polynomial))

# %% [markdown]
# P marks a polynomial. The pattern looks odd and is chosen with care: in the accumulator of a
# tensor core the bits of a column's number that decide are *register* numbers. So every thread has
# its share of both kinds, and no number moves between threads.

# %% [markdown]
# ## Roles with states
#
# FA4's kernel for Hopper is three programs that meet at barriers. What each may do is a table, and
# the kernel's text enters its states by name (`trace.enter(...)`).

# %%
role_pictures.state_machine()

# %% [markdown]
# *Each role goes round its own circle. The consumers' has the decision of this notebook: whether
# the accumulator is multiplied at all.*

# %%
show(forward_hopper.attend, docstring=False)

# %% [markdown]
# An instrumented launch writes down when a role enters which state. From the committed trace, the
# share of the time that the consumers of one program spend in each:

# %%
results = read_results()
trace = results["trace"]
program = trace["programs"][0]["roles"]
consumers = [name for name in program if name.startswith("consumer")]
states = list(dict.fromkeys(state for state, _, _ in program["consumer 0"]))
rows = []
for state in states:
    row = [state]
    for name in consumers:
        total = program[name][-1][2] - program[name][0][1]
        row.append(
            f"{sum(end - start for s, start, end in program[name] if s == state) / total:.1%}"
        )
    rows.append(row)
print(trace["machine"]["gpu"], trace["what"])
table(["state", *consumers], rows)

# %%
measured("timeline")

# %% [markdown]
# *Above: a few tiles of one program. Below: where the first tile ends. The consumers have handed
# their O over and do not wait for the storer; grey is their wait for Q and K of the next tile.*
#
# As in FA3, Triton's interpreter cannot run this kernel. `tests/emulator/test_fa4_emulated.py` runs its text
# in the emulator, with every role as late as the rules allow; `tests/emulator/test_roles.py` holds the
# states that it goes through against the table.

# %% [markdown]
# ## What the compiler made of it

# %%
found = {
    (version, arch): one
    for version, arches in (("FA3", ("sm_90", "sm_100")), ("FA4", ("sm_80", "sm_90", "sm_100")))
    for arch, one in instructions(version.lower(), arches, causal=True).items()
}
found["FA4 in FP8", "sm_90"] = instructions("fa4", "sm_90", causal=True, precision="fp8:head")
kinds = {
    "ex2": "exponentials", "wgmma": "products, Hopper's", "tcgen05": "products, Blackwell's",
    "mma_sync": "products, Ampere's", "tma_loads": "copies of boxes in", "tma_stores": "and out",
    "spill_loads": "spills, bytes",
}  # fmt: skip
rows = [[label, *(one[kind] for one in found.values())] for kind, label in kinds.items()]
opcodes = [one["opcodes"] for one in found.values()]  # FFMA2 does two at once
rows.append(["multiply-adds", *(one.get("FFMA", 0) + 2 * one.get("FFMA2", 0) for one in opcodes)])
table(["", *map(", ".join, found)], rows)

# %% [markdown]
# Compare each FA4 with the FA3 of the same GPU. On Blackwell (sm_100) some of the exponentials have
# become multiply-adds. On Hopper (sm_90) none has: there the polynomial is used in FP8 only. On
# Ampere (sm_80) the call is FA2's. All of this is a matter of measurement:

# %% [markdown]
# ## What it is worth, measured
#
# ### Your prediction
#
# On an H200, in bf16 at head_dim 128 without a mask, an eighth of the exponentials becomes
# polynomials. The speed compared with none of them?

# %%
my_guess = None  # your guess here: 1 is no change, 1.05 is five percent faster

# %%
bf16 = ablation_ratios(results)["fa4"]
fp8 = ablation_ratios(results, "ablation fp8", "cudnn fp8")["fa4"]
without = bf16["D=128 full"]["always rescale"]
guess(my_guess, bf16["D=128 full"]["1/8 polynomial"] / without, "against no polynomial")

# %%
names = ("rescale if grown", "1/8 polynomial", "2/8 polynomial", "4/8 polynomial", "both, 1/8")
columns = [
    (f"{what}, D={head_dim}", group[f"D={head_dim} full"])
    for what, group in (("bf16", bf16), ("FP8", fp8))
    for head_dim in (64, 128, 256)
]
table(
    ["speed, against neither trick", *(title for title, _ in columns)],
    [[name, *(f"{c[name] / c['always rescale']:.2f}" for _, c in columns)] for name in names],
)

# %% [markdown]
# Read it by column.
#
# * **bf16**: at head_dim 128 both tricks cost. Products take twice as long as exponentials there,
#   and hide them: the decision and the extra instructions are work in the one place that counts. At
#   head_dim 256 the threshold pays: the accumulator is twice as wide, so a rescale that is left out
#   saves more. At head_dim 64 exponentials take as long as products, and one would expect a gain
#   from the polynomial; there is none. So one measures.
# * **FP8 at head_dim 128**: products and exponentials take equally long, and an eighth on the other
#   unit is a gain. More than that is not, as several instructions take the place of one.
# * **FP8 at head_dim 256**: the threshold again.
#
# Where a trick costs, the kernel has it off. What is left of FA4 there are the roles. On a chip
# with faster products, for which FA4 was written, the balance is another one.

# %%
measured("ablation-fp8")

# %% [markdown]
# *One thing changed, in FP8. Bars to the left are slower than the version as it is.*

# %%
measured("speedup")

# %% [markdown]
# *All versions against torch's FlashAttention-2, over the length. From FA1 to FA4, this is what the
# four notebooks were about.*

# %% [markdown]
# ## On your own GPU

# %% tags=["varies"]
own_gpu()

# %% [markdown]
# ## Where to read on
#
# * Zadouri, Hoehnerbach, Shah, Liu, Thakkar, Dao 2026,
#   [FlashAttention-4](https://arxiv.org/abs/2603.05451): the sections on conditional rescaling and
#   on emulating the exponential.
# * Upstream:
#   [flash_attn/cute](https://github.com/Dao-AILab/flash-attention/tree/main/flash_attn/cute) of
#   flash-attention, `flash_fwd_sm100.py` and `softmax.py`.
# * Here: the docstrings of `flash_versions/versions/fa4/softmax.py` (why it is exact, and stays in range),
#   `exp2.py` and `fit_exp2.py` (run `python -m lessons.fit_exp2`), and what was tried
#   and did not help in [log.md](../docs/log.md).
# * Solutions: `notebooks/solutions/raise_reference.py` and `polynomial_exp2.py`. Next:
#   [05_transformer](05_transformer.ipynb), where these kernels are one line of a model that talks.
