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
# # GRPO: a model learns from a verifier
#
# A model that was taught by examples learns its teacher's mistakes too. Where an answer can be
# *checked*, it can do better than its teacher: let it answer each question several times, check the
# answers, and make the right ones more likely. That is GRPO, *group relative policy optimisation*,
# and this notebook builds it from its formulas, trains a real model with it in a few seconds, and
# then breaks it in the ways in which it is usually broken.
#
# You need [05_transformer](05_transformer.ipynb): tokens, sampling, log-probabilities. And what a gradient is.

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
import copy
import json
import tempfile
from functools import partial
from pathlib import Path
from random import Random

import matplotlib.pyplot as plt
import torch
from IPython.display import Image, Markdown, display
from lessons import check, film, guess, show

import flash_versions
from transformer.rl import curves
from transformer.rl.groups import describe
from transformer.rl.loss import Loss, Totals, group_advantages, grpo_loss, length_mask
from transformer.rl.run import read_metrics
from transformer.rl.recipes import RECIPES, Settings, find_task
from transformer.rl.rollout import collate, completion_logprobs, roll_out
from transformer.generation.sampling import Sampling
from transformer.tasks.task import Problem, Task
from transformer.train import SLOPPY
from transformer.rl.learner import GAP
from transformer.rl.trainer import Trainer, resolved

torch.set_num_threads(1)  # the model is so small that a second thread brings little
torch.set_printoptions(precision=3, sci_mode=False, linewidth=100)
CPU, PLAIN = torch.device("cpu"), Loss()
RESULTS = Path("../docs/results/grpo")

# %% [markdown]
# ## What examples leave on the table
#
# The shipped model `sloppy` had a careless teacher:

# %%
display(
    Markdown(
        f"It guessed **{SLOPPY.hasty:.0%}** of the sums blindly, and where it worked one out it"
        f" forgot **{SLOPPY.forget:.0%}** of the carries."
    )
)

# %% [markdown]
# Let the pupil answer four sums, four times each. A *rollout* is a completion with its
# log-probabilities and its reward; the prompt is read once for the four.

# %%
settings = Settings(**RECIPES["sums"] | {"eval_problems": 48, "eval_samples": 2})
trainer = Trainer(resolved(settings, CPU), CPU)
policy, model, task = trainer.policy, trainer.policy.model, find_task("sums")
rng = Random(10)
problems = [task.sample(rng, held_out=True) for _ in range(4)]
untrained = copy.deepcopy(model)
LIMIT = settings.max_tokens
rollouts = roll_out(policy, model, problems, 4, max_tokens=LIMIT, sampling=Sampling(), seed=10)
for number, problem in enumerate(problems):
    answers = [r.completion.text.split("<answer>")[-1].removesuffix("</answer>") for r in rollouts]
    print(f"{problem.question:38} {task.answer(*problem.arguments):>5}   it says", end=" ")
    print(*answers[4 * number : 4 * number + 4])
print("\none answer in full:", rollouts[0].completion.text, sep="\n")

# %% [markdown]
# Sometimes right, sometimes wrong, on the same question. On many questions that gives two numbers:
# how often a sampled answer is right, and how often at least one of four is. From the committed
# run, before its first step:

# %%
before = read_metrics(RESULTS / "sums-seed0")[0]
settings_of_run = json.loads((RESULTS / "sums-seed0" / "config.json").read_text())
display(
    Markdown(
        f"Of {settings_of_run['eval_problems']} held-out sums, one answer is right for"
        f" **{before['sampled']:.0%}**, at least one of four for **{before['pass@4']:.0%}**. It"
        " *can* do far more than it does. What lies between the two is what there is to learn."
    )
)

# %% [markdown]
# ## The reward
#
# A task knows the truth, so it can judge: 1 for a right answer in the right form, else 0. Nothing
# for the form alone, and nothing for a reply that goes on, answers twice or does not end. Each of
# these rules closes a loophole that a model would find.

# %%
problem = task.sample(Random(1))
right, wrong = task.answer(*problem.arguments), "12"
print(problem.question, "\n")
for reply in (
    f"<think>...</think><answer>{right}</answer>",
    f"<think>...</think><answer>{wrong}</answer>",
    f"<answer>{right}</answer>",
    f"<think></think><answer>{right}</answer>",
    f"<think></think><answer>{wrong}</answer><answer>{right}</answer>",
    f"It is {right}.",
):
    print(f"{problem.reward(reply):.0f}  {reply}")

# %% [markdown]
# ## Advantages: 4 x 4 numbers by hand
#
# Four questions, four answers: a table of rewards. An answer is good if it is better than the
# others *to the same question*. So take the mean of its row away and divide by the row's spread.
# That is the *advantage*; no second model has to learn what to expect of a question, the group
# says it.

# %%
rewards = torch.tensor([r.reward for r in rollouts]).view(4, 4)
mean, spread = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
print("rewards:", rewards, sep="\n")
print("\nmean and standard deviation of each row:", torch.cat((mean, spread), 1), sep="\n")

# %% [markdown]
# The second row has one right answer and three wrong ones. What is the advantage of the right one?

# %%
my_guess = None  # your guess here

# %%
advantages = group_advantages(rewards)
guess(my_guess, round(advantages[1].max().item(), 3), "advantage of the only right answer")
print("\nadvantages:", advantages, sep="\n")
assert torch.allclose(advantages, (rewards - mean) / (spread + 1e-4))

# %% [markdown]
# A rare success counts much, a rare failure (first row) just as much the other way. And the third
# row, in which nobody knew, is all zeros: **a group whose answers are all alike teaches nothing**.
# Keep that in mind for the end.
#
# Without the division (Dr. GRPO), rows with few surprises weigh less:

# %%
print(group_advantages(rewards, scale="none"))

# %% [markdown]
# ## The loss of a token
#
# Every token of a completion gets its completion's advantage A. With r, how many times as likely
# the token is now as it was when it was sampled,
#
#     l = -min(r A, clip(r, 0.8, 1.28) A)
#
# The first product alone would do for one step: its gradient makes tokens more likely where A > 0.
# The second one bounds how much can be gained before new answers are sampled. The curves below are
# the package's own function, one token at a time.

# %%
ONE = Totals(rows=1, tokens=1, limit=1)
ratios = torch.linspace(0.4, 1.8, 141)


def loss_of_token(r, advantage, loss=PLAIN):
    """Loss and its derivative by the log-probability, of one token whose ratio is r."""
    logprob = torch.tensor([[r]]).log().requires_grad_()
    value, _ = grpo_loss(
        logprob,
        torch.zeros(1, 1),
        torch.tensor([advantage]),
        torch.ones(1, 1, dtype=torch.bool),
        loss,
        ONE,
    )
    return value.item(), torch.autograd.grad(value, logprob)[0].item()


fig, axes = plt.subplots(1, 2, figsize=(10, 3.2))
for advantage, colour in ((1.0, "C0"), (-1.0, "C3")):
    values, slopes = zip(*(loss_of_token(r.item(), advantage) for r in ratios))
    axes[0].plot(ratios, [-v for v in values], colour, label=f"A = {advantage:+.0f}")
    axes[1].plot(ratios, [-s for s in slopes], colour)
for ax, title in zip(axes, ("what is gained", "the push on the token's log-probability")):
    ax.set(title=title, xlabel="r, how many times as likely as when it was sampled")
    ax.axvspan(0.8, 1.28, color="grey", alpha=0.12)
    ax.axhline(0, color="grey", linewidth=0.6)
axes[0].legend()
plt.tight_layout()

# %% [markdown]
# *What to see: a good token (blue) is pushed up until it is 1.28 times as likely, then no more. A
# bad one (red) is pushed down until 0.8. The other sides stay open: a good token that has become
# less likely is always pushed back. In the first step after sampling r is 1, in the middle of the
# grey band, and nothing is clipped.*
#
# The upper bound is wider than the lower one (DAPO's *clip-higher*): from a probability of 0.01,
# 1.2 times is a step of 0.002, so rare good ideas would hardly ever be taken up.
#
# In the package:

# %%
show(group_advantages, docstring=False)
show(grpo_loss, docstring=False)

# %% [markdown]
# ## Why the value of the loss says nothing
#
# A falling loss means learning: not here. We compute the loss of the sixteen rollouts, with GRPO's
# own weights: every completion counts the same. What is its value?

# %%
my_guess = None  # your guess here

# %%
batch = collate(rollouts, CPU)


def logprobs_of(model, batch, temperature=1.0):
    """Log-probability of every token of the completions, (rows, tokens), by one forward."""
    forward = lambda tokens, wanted: model(tokens, wanted=wanted)  # noqa: E731
    return completion_logprobs(forward, batch, policy.banned, temperature)[0]


totals = Totals(rows=16, tokens=int(batch.mask.sum()), limit=LIMIT)
logprobs = logprobs_of(model, batch)
loss, _ = grpo_loss(
    logprobs, logprobs, advantages.flatten(), batch.mask, Loss(reduce="grpo"), totals
)
loss.backward()
norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
model.zero_grad()
guess(my_guess, round(abs(loss.item()), 5), "value of the loss")
print(f"norm of its gradient: {norm:.1f}")

# %% [markdown]
# It is minus the mean advantage, and advantages sum to 0 in every group. It is 0 before, during and
# after training, while the gradient is not: `old` equals `logprobs` in value, but only one of the
# two is differentiated. Watch rewards, not the loss.
#
# ## One step by hand
#
# The gradient goes through every token of every completion. One step of AdamW, and then the
# probability of each of the sixteen completions, after against before:

# %% tags=["varies"]
student = copy.deepcopy(model)
optimizer = torch.optim.AdamW(student.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.0)
logprobs = logprobs_of(student, batch)
loss, _ = grpo_loss(logprobs, logprobs, advantages.flatten(), batch.mask, PLAIN, totals)
loss.backward()
optimizer.step()
with torch.no_grad():
    change = (logprobs_of(student, batch) - logprobs).sum(1).exp().view(4, 4)
for row, reward in zip(change, rewards):
    print("   ".join(f"{'right' if r else 'wrong'} x {c:4.2f}" for r, c in zip(reward, row)))

# %% [markdown]
# Right answers became more likely and wrong ones less, in the groups that had both. The third group
# pushed nowhere; it moves because the others move the weights that it shares with them.
#
# Training runs the backward of attention, too. With FA2's kernels in the place of torch's, forward
# and backward in the interpreter, two completions give the same gradient:

# %%
pair = collate([rollouts[0], rollouts[3]], CPU)


def gradient(version):
    """Gradient of the loss of one right and one wrong completion, as one vector."""
    student = copy.deepcopy(model)
    student.attention = partial(flash_versions.attention, version=version)
    logprobs = logprobs_of(student, pair)
    sizes = Totals(rows=2, tokens=int(pair.mask.sum()), limit=LIMIT)
    signs = torch.tensor([1.0, -1.0])
    grpo_loss(logprobs, logprobs, signs, pair.mask, PLAIN, sizes)[0].backward()
    return torch.cat([p.grad.flatten() for p in student.parameters()])


ours, theirs = gradient("fa2"), gradient("sdpa")
print(f"{len(ours):,} numbers; distance relative to their size below 1e-4:", end=" ")
print(bool((ours - theirs).norm() < 1e-4 * theirs.norm()))

# %% [markdown]
# ## A real run
#
# Eight steps of the recipe `sums`, with its settings:

# %%
for name in ("prompts", "group", "temperature", "lr", "clip_low", "clip_high", "beta", "seed"):
    print(
        f"{name:12} {getattr(settings, name):<8} {Settings.__dataclass_fields__[name].metadata['help']}"
    )

# %% [markdown]
# These are the settings and the seed of the committed run; problems and draws depend on nothing
# else. What share of held-out sums will it answer right after eight steps, sampled?

# %%
my_guess = None  # your guess here


# %%
def train(trainer, steps, watch=dict):
    """Metrics of a few steps, and what is watched before each."""
    found = []
    for _ in range(steps):
        seen = watch()
        groups = trainer.roll_out()
        measured = trainer.learn(groups.rollouts)
        found.append(measured | describe(groups.rollouts, trainer.settings.group) | seen)
    return found


def table(metrics):
    """Print what matters of each step."""
    print("step  reward  length  entropy  skipped  |gradient|")
    for step, one in enumerate(metrics, 1):
        print(
            f"{step:4} {one['reward']:7.2f} {one['length']:7.1f} {one.get('entropy', 0):8.3f}"
            f" {one['skipped']:8.0%} {one.get('gradient_norm', 0):10.2f}"
        )


# %% [markdown]
# While it learns we look at its two vices, on one sum that is half worked out: does it begin with
# `easy`, the word before a blind guess? And does it remember the carry in the second line?

# %%
sum_of_two = Problem(task, (357, 486), "What is 357+486?")
half_done = policy.encode(sum_of_two) + policy.tokenizer.encode("<think>7+6+0=13\n5+8+")
think_at = half_done.index(policy.tokenizer.token_id("<think>"))


def vices():
    """Probabilities of the token after <think>, and of the carry."""
    with torch.no_grad():
        p = model(torch.tensor([half_done]))[0].softmax(-1)
    return {
        "guess": p[think_at, ord("e")].item(),
        "work": p[think_at, ord("0") : ord("9") + 1].sum().item(),
        "forgotten": p[-1, ord("0")].item(),
        "carried": p[-1, ord("1")].item(),
    }


# %% tags=["varies"]
live = train(trainer, 8, vices)
table(live)
scores, greedy = trainer.evaluate()
guess(my_guess, scores["sampled"], "right answers to held-out sums, sampled, after eight steps")

# %% [markdown]
# * **reward**: the share of right answers among the rollouts.
# * **length** grows. Nobody rewards length; but the teacher's blind guesses were short
#   (`<think>easy</think>`), and worked answers are right more often.
# * **entropy** falls: it becomes sure.
# * **skipped**: groups in which all are right teach nothing any more. It is a sign of success here.
#
# The vices, before each of the steps:


# %%
def draw_vices(step):
    """Two choices of the model before a step."""
    figure = plt.Figure(figsize=(5, 2.2), layout="constrained")
    for ax, names in zip(figure.subplots(1, 2), (("guess", "work"), ("forgotten", "carried"))):
        ax.bar(names, [live[step][name] for name in names], color=["C3", "C0"])
        ax.set(ylim=(0, 1.05))
    figure.suptitle(f"before step {step + 1}", fontsize=10)
    return figure


# %% tags=["varies"]
film(
    range(len(live)),
    draw_vices,
    "Left: the probability to begin with a guess or with work. Right: to forget the carry of 7+6 or"
    " to write it. Nobody says which is right: only whole answers are judged.",
)

# %% [markdown]
# What it says now to the first of the four sums, and to one with carries, greedily:

# %% tags=["varies"]
for rollout in roll_out(
    policy, model, [problems[0], sum_of_two], 1, max_tokens=LIMIT, sampling=Sampling(temperature=0)
):
    print(rollout.problem.question, "\n", rollout.completion.text, "\n")

# %% [markdown]
# ## The whole run
#
# The committed results have the whole run, with three seeds.

# %%
folders = sorted(RESULTS.glob("sums-seed*"))
with tempfile.TemporaryDirectory() as folder:
    curves.draw(folders, Path(folder) / "curve.png")
    display(Image((Path(folder) / "curve.png").read_bytes(), alt="curves of three GRPO runs"))

# %% [markdown]
# *What to see: nearly all of the rise comes before the second evaluation; then most groups are
# skipped, for the task is solved. The solid line, one answer, reaches the dotted one, the best
# of four: what it could do sometimes it now does always.*

# %%
for folder in folders:
    evaluations = [m for m in read_metrics(folder) if "evaluation" in m]
    first, last = evaluations[0], evaluations[-1]
    print(
        f"{folder.name}: sampled {first['sampled']:.1%} -> {last['sampled']:.1%}"
        f" after {last['evaluation']} steps, {last['seconds']:.0f} s"
    )

# %% [markdown]
# The live run above against the committed one. Same seeds: on many machines the first steps agree
# exactly, until the rounding of a sum decides a draw.

# %% tags=["varies"]
fig, ax = plt.subplots(figsize=(7, 3))
for folder in folders:
    rewards_of = [m["reward"] for m in read_metrics(folder) if "step" in m]
    ax.plot(range(1, 1 + len(rewards_of)), rewards_of, color="lightgrey")
ax.plot(range(1, 1 + len(live)), [one["reward"] for one in live], "o-", markersize=4)
ax.set(xlabel="step", ylabel="reward of the rollouts", ylim=(0, 1), xlim=(0, 40))
ax.set_title("this notebook's run (blue) on the committed ones (grey)", fontsize=10)
plt.tight_layout()

# %% [markdown]
# ## Collapse
#
# Now the recipe `collapse`. It differs from `sums` in its learning rate: how many times as high is it?

# %%
wild_settings = Settings(**RECIPES["collapse"] | {"prompts": 8})
print(f"{settings.lr:g} -> {wild_settings.lr:g}, {wild_settings.lr / settings.lr:.1f} times")

# %% tags=["varies"]
wild = Trainer(resolved(wild_settings, CPU), CPU)
collapsed = train(wild, 4)
table(collapsed)
said = roll_out(
    wild.policy, wild.policy.model, problems[:1], 3, max_tokens=LIMIT, sampling=Sampling()
)
print("\nasked", repr(problems[0].question), "it now says:")
for rollout in said:
    print(repr(rollout.completion.text))

# %% [markdown]
# Within a few steps no answer is right. Then every group is alike, every advantage is 0 and there
# is no gradient: *no way back*, whatever the learning rate is from there on. (The entropy and the
# gradient read 0 because no token is learned from any more.)
#
# How can so few steps do that? The gradient's norm is clipped, but AdamW divides by the gradient's
# own size: at the beginning every weight moves by about the learning rate, up or down. So take the
# one step from above again, in the same direction, with other lengths, and ask how likely the right
# and the wrong answers of the three groups with a spread are afterwards.

# %% tags=["varies"]
logprobs = logprobs_of(untrained, batch)
loss, _ = grpo_loss(logprobs, logprobs, advantages.flatten(), batch.mask, PLAIN, totals)
gradients = torch.autograd.grad(loss, list(untrained.parameters()))


def after_one_step(lr):
    """How many times as likely each completion is, (16,), in logarithms."""
    student = copy.deepcopy(untrained)
    for parameter, one in zip(student.parameters(), gradients):
        parameter.grad = one
    torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0).step()
    with torch.no_grad():
        return (logprobs_of(student, batch) - logprobs).sum(1)


lengths = torch.logspace(-4.5, -2, 11).tolist()
changes = torch.stack([after_one_step(lr) for lr in lengths])
fig, ax = plt.subplots(figsize=(7, 3.2))
for name, chosen, colour in (("right", advantages > 0, "C0"), ("wrong", advantages < 0, "C3")):
    ax.plot(lengths, changes[:, chosen.flatten()].mean(1), "o-", color=colour, label=name)
ax.axhline(0, color="grey", linewidth=0.6)
for name, lr in (("sums", settings.lr), ("collapse", wild_settings.lr)):
    ax.axvline(lr, color="black", linestyle=":")
    ax.text(lr, 0.02, f" {name}", transform=ax.get_xaxis_transform(), fontsize=9)
ax.set(xscale="log", yscale="symlog", xlabel="learning rate of one step")
ax.set_ylabel("change of the log-probability")
ax.set_ylim(top=3)
ax.legend(loc="center left", fontsize=9)
plt.tight_layout()

# %% [markdown]
# *What to see: a short step does what the gradient says, right answers up and wrong ones down. Too
# long a step leaves the region in which the gradient means anything, and everything that the model
# knew how to say, the right answers too, becomes unlikely.*
#
# So the signs to watch: the reward falls to 0, skipped jumps to 100 %, nothing is learned. Compare
# with success, where skipped rises as well, but with a reward near 1. The command stops a run whose
# held-out accuracy falls far below its best, and keeps the best checkpoint.
#
# ## Three bugs that train all the same
#
# Each of these has been in public implementations. None raises an error.
#
# ### 1. The temperature in one place only
#
# Rollouts are sampled at a temperature. The trainer has to divide its logits by the same one, or it
# computes the probabilities of another model. Both sides compute the log-probability of every
# token, so there is a number to watch, the *gap* between the two.


# %%
def gap(sampled=1.0, trained=1.0, sampler=untrained):
    """|sampler's - trainer's log-probability| of every token of sixteen rollouts."""
    drawn = roll_out(
        policy,
        sampler,
        problems,
        4,
        max_tokens=LIMIT,
        sampling=Sampling(temperature=sampled),
        seed=10,
    )
    found = collate(drawn, CPU)
    with torch.no_grad():
        return (logprobs_of(untrained, found, trained) - found.sampler).abs()[found.mask]


gaps = {
    "both 1": gap(),
    "both 0.7": gap(0.7, 0.7),
    "sampler 0.7, trainer 1": gap(0.7, 1.0),
    "sampler 1.3, trainer 1": gap(1.3, 1.0),
    "both 1, sampler in bf16": gap(sampler=copy.deepcopy(untrained).bfloat16()),
}
for name, distance in list(gaps.items())[:4]:
    largest = "below 1e-4" if distance.max() < 1e-4 else f"{distance.max():.2f}"
    print(f"{name:24} largest gap {largest}")

# %%
fig, ax = plt.subplots(figsize=(8, 3))
for name, distance in gaps.items():
    ordered = distance.clamp(min=1e-9).sort(descending=True).values
    ax.plot(torch.linspace(0, 1, len(ordered)), ordered, label=name)
ax.axhline(GAP, color="black", linestyle=":", label="more than this stops the trainer")
ax.set(yscale="log", xlabel="share of the tokens", ylabel="gap, nats", ylim=(1e-9, 2))
ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
ax.set_title("distance of the sampler's and the trainer's log-probabilities", fontsize=10)
plt.tight_layout()

# %% [markdown]
# *What to see: done right, the gap is rounding, far below the line. With the bug it is far above,
# but only for a part of the tokens: where the model is sure, every temperature gives 1. So the mean
# looks harmless, and the largest gap tells. A sampler in bf16 has a gap, too; that is no bug but
# rounding, which `--importance-cap` corrects for.*
#
# ### 2. The end of the turn, out of the loss
#
# A completion ends with an end-of-turn token, and the policy chose it. Two common masks lose it:
# one that stops at the last token of text, and `tokens != pad` in the many checkpoints in which the
# end of a turn and the padding are one id. Here are a short completion and a longer one under the
# three masks, with 9 as the id of both:

# %%
completions = torch.tensor([[5, 6, 9, 9, 9], [5, 6, 7, 8, 9]])  # lengths 3 and 5, padded with 9
masks = {
    "by length (right)": length_mask(torch.tensor([3, 5]), 5),
    "without the end": length_mask(torch.tensor([3, 5]) - 1, 5),
    "tokens != pad": completions != 9,
}
for name, mask in masks.items():
    zeros = torch.zeros(2, 5, requires_grad=True)
    totals_of = Totals(rows=2, tokens=int(mask.sum()), limit=5)
    grpo_loss(zeros, zeros.detach(), torch.tensor([1.0, -1.0]), mask, PLAIN, totals_of)[
        0
    ].backward()
    print(f"{name}: push on each token's log-probability", 0 - zeros.grad, sep="\n")

# %% [markdown]
# With a wrong mask the last token gets no push: the good completion does not learn to stop there,
# the bad one not to. Nothing else looks different. It shows late, if at all: in the length of the
# completions, and in the share of them that hit the limit (`truncated`). The package counts tokens
# by length, and its shipped tokenizer keeps the two ids apart.
#
# ### 3. A mean in every micro-batch
#
# A batch that does not fit in memory goes through the model in micro-batches, whose gradients add
# up. A loss that divides by *its own* number of tokens then depends on the split. The sixteen
# completions in two halves, sorted by length as a trainer sorts them:

# %%
by_length = sorted(len(rollout.completion.tokens) for rollout in rollouts)
counts = [sum(by_length[:8]), sum(by_length[8:])]
own = [1 / 2 / count for count in counts]
print(f"the eight shortest have {counts[0]} tokens, the eight longest {counts[1]}")
print("weight of a token, by its half's size: ", *(f"{weight:.5f}" for weight in own))
print("weight of a token, by the batch's size:", *(f"{1 / sum(counts):.5f}" for _ in counts))
print(f"a token of a short answer counts {own[0] / own[1]:.2f} times as much as one of a long one")

# %% [markdown]
# It shows only in comparison: another micro-batch size gives another run. `Totals` carries the
# sizes of the whole batch for that reason.
#
# ## Exercises
#
# **Advantages.** From rewards (groups, G) to advantages, with the standard deviation of the group
# (Bessel's correction: divide by G - 1) plus 1e-4. Do not use the package's.


# %%
def advantages_of(rewards):
    """rewards (groups, G) to advantages (groups, G)."""
    # your code here


check("advantages_of", advantages_of)


# %% [markdown]
# **The loss of one token.** All are plain numbers.


# %%
def clipped_loss(logprob, old, advantage, low=0.2, high=0.28):
    """Loss of a token: logprob now, old when it was sampled."""
    # your code here


check("clipped_loss", clipped_loss)

# %% [markdown]
# **A task in ten lines.** The sum of a number's digits: `arguments` draws a number from 0 to 9999,
# `question` asks for the sum of its digits and has the number in it, `answer` gives the right
# answer as text. This is all that a run needs: put the class in a file `digits.py` and start
# `python -m transformer.grpo --task digits:DigitSum --out runs/digits`.


# %%
class DigitSum(Task):
    name = "digit-sum"

    def arguments(self, rng):
        """Draw a problem: a tuple."""
        # your code here

    def question(self, rng, number):
        """Put it into words."""
        # your code here

    def answer(self, number):
        """The right answer, a text."""
        # your code here


check("digit_sum", lambda: DigitSum())

# %% [markdown]
# Solutions are in `notebooks/solutions`.
#
# ## On your GPU
#
# The same recipe, twenty steps, drawn over the committed ones. It does nothing without a GPU.

# %% tags=["varies"]
if torch.cuda.is_available():
    with tempfile.TemporaryDirectory() as folder:
        run, picture = Path(folder) / "here", Path(folder) / "curve.png"
        options = ["--recipe", "sums", "--steps", "20", "--eval-every", "10", "--out", str(run)]
        subprocess.run(
            [sys.executable, "-m", "transformer.grpo", *options],
            env=os.environ | {"TRITON_INTERPRET": "0"},
            capture_output=True,
            check=True,
        )
        curves.draw([run, *folders], picture)
        display(Image(picture.read_bytes(), alt="this machine's run and the committed ones"))
else:
    print("There is no GPU here, so nothing is trained.")

# %% [markdown]
# ## Where to read on
#
# * The loss and a table of the papers' choices: [loss.py](../transformer/rl/loss.py); a step:
#   [trainer.py](../transformer/rl/trainer.py); what sampler and trainer share:
#   [rollout.py](../transformer/rl/rollout.py); all options: [grpo.md](../docs/grpo.md).
# * DeepSeekMath (arXiv:2402.03300), section 4.1: GRPO. DAPO (arXiv:2503.14476), section 3:
#   clip-higher, dynamic sampling, the token-level loss. Understanding R1-Zero (arXiv:2503.20783),
#   section 3: why Dr. GRPO does not divide. GSPO (arXiv:2507.18071), section 4: a ratio for the
#   whole sequence.
# * Upstream: `trl/trainer/grpo_trainer.py` in [TRL](https://github.com/huggingface/trl), against
#   which this package's loss is tested.
