# %% [markdown]
# # GRPO: a model learns from a verifier
#
# A model that learned from examples has also learned the mistakes in the examples. Where an answer can be *checked*,
# the model can become better than its teacher. Let it answer each question several times, let a *verifier* (code that
# knows the truth) mark the answers, and make the right ones more likely. This method is called GRPO, *group relative
# policy optimisation*. This notebook builds it from its formulas, trains a real model with it for eight steps, and then
# shows how it breaks.
#
# Time: about 70 minutes. You need [05_transformer](05_transformer.ipynb) (tokens, sampling, log-probabilities), and you
# should know what a gradient is.

# %% tags=["hide-cell"]
import copy
import json
import tempfile
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean

import matplotlib.pyplot as plt
import torch
from IPython.display import Image, Markdown, display
from lessons import check, checked, guess, show

import flash_versions
from transformer.model.decoder import Transformer
from transformer.model.exact import attention_by_blocks
from transformer.rl import curves
from transformer.rl.groups import describe, groups_of
from transformer.rl.loss import Loss, Totals, group_advantages, grpo_loss, length_mask
from transformer.rl.run import read_metrics
from transformer.rl.recipes import RECIPES, Settings, find_task
from transformer.rl.rollout import collate, completion_logprobs, roll_out
from transformer.generation.sampling import Sampling
from transformer.tasks.task import Problem, Task
from transformer.train import SLOPPY
from transformer.rl.learner import GAP
from transformer.rl.trainer import Trainer, resolved

torch.set_num_threads(1)  # a model this small gains little from a second thread
torch.set_printoptions(precision=3, sci_mode=False, linewidth=100)
CPU, PLAIN = torch.device("cpu"), Loss()
RESULTS = Path("../docs/results/grpo")

# %% [markdown]
# ## What the model can do, and what it does
#
# The package ships a model `sloppy`. It learned from a careless teacher:

# %%
display(
    Markdown(
        f"The teacher guessed the answer of **{SLOPPY.hasty:.0%}** of the sums. In the other sums it"
        f" forgot **{SLOPPY.forget:.0%}** of the carries."
    )
)

# %% [markdown]
# `sloppy` now answers 48 sums that were kept out of its training (*held-out* sums), each four times. Four words of this
# field:
#
# * the *policy* is the model that learns;
# * a *completion* is what the model writes after a prompt, here the steps and the answer;
# * a *rollout* is one sampled completion, with the log-probabilities of its tokens and its *reward*: 1 if the answer is
#   right and 0 if not;
# * a *group* is the set of rollouts for one question.
#
# We keep four groups: one with three right answers, one with one, one with none, and one with two.

# %%
settings = Settings(**RECIPES["sums"] | {"eval_problems": 48, "eval_samples": 2})
trainer = Trainer(resolved(settings, CPU), CPU)
policy, model, task = trainer.policy, trainer.policy.model, find_task("sums")
untrained = copy.deepcopy(model)
LIMIT = settings.max_tokens
rng = Random(10)
drawn = [task.sample(rng, held_out=True) for _ in range(48)]
sampled = roll_out(policy, model, drawn, 4, max_tokens=LIMIT, sampling=Sampling(), seed=10)
by_group = groups_of(sampled, 4)
right_answers = [sum(rollout.reward for rollout in group) for group in by_group]
chosen = [right_answers.index(count) for count in (3, 1, 0, 2)]
problems = [drawn[number] for number in chosen]
rollouts = [rollout for number in chosen for rollout in by_group[number]]
for problem, number in zip(problems, chosen):
    truth = task.answer(*problem.arguments)
    said = [
        r.completion.text.split("<answer>")[-1].removesuffix("</answer>") for r in by_group[number]
    ]
    print(f"{problem.question:38} right: {truth:>5}   answers:", *(f"{x:>5}" for x in said))
print("\none answer in full:", rollouts[0].completion.text, sep="\n")

# %% [markdown]
# The model answers the same question sometimes rightly and sometimes wrongly. Two numbers describe this for many
# questions: how often one sampled answer is right, and how often at least one of four is. They come from a committed
# run, before its first step:

# %%
before = read_metrics(RESULTS / "sums-seed0")[0]
settings_of_run = json.loads((RESULTS / "sums-seed0" / "config.json").read_text())
display(
    Markdown(
        f"Of {settings_of_run['eval_problems']} held-out sums, **{before['sampled']:.0%}**"
        f" get a right answer at the first try, and **{before['pass@4']:.0%}** get at least one in four"
        " tries."
    )
)
checked("it_can_do_more", before["pass@4"] > 1.5 * before["sampled"])

# %% [markdown]
# The model can do far more than it does at the first try. GRPO closes this gap: the model learns to do always what it
# now does sometimes.
#
# ## The reward
#
# A task knows the truth, so it can judge an answer. The reward is 1 for a right answer in the right form, and 0 for
# everything else. The form alone earns nothing. A reply also earns nothing if it continues after the answer, answers
# twice, or does not end. Each of these rules closes a way to earn rewards without learning to add.

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
# Four questions with four answers each give a table of rewards. An answer is good if it is better than the other
# answers *to the same question*. So we subtract the mean of its group from each reward and divide by the standard
# deviation of the group. The result is the *advantage* of the answer. Other methods train a second model to predict
# what a question will earn; GRPO uses the mean of the group.

# %%
rewards = torch.tensor([r.reward for r in rollouts]).view(4, 4)
mean, spread = rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True)
print("rewards, a row for each group:", rewards, sep="\n")
print("\nmean and standard deviation of each row:", torch.cat((mean, spread), 1), sep="\n")
checked("one_right_three_wrong", rewards[1].sum() == 1)

# %% [markdown]
# **Predict.** The second row has one right answer and three wrong ones. What is the advantage of the right one?

# %%
my_guess = None  # your guess here

# %%
advantages = group_advantages(rewards)
guess(my_guess, round(advantages[1].max().item(), 3), "advantage of the only right answer")
print("\nadvantages:", advantages, sep="\n")
assert torch.allclose(advantages, (rewards - mean) / (spread + 1e-4))
extremes = advantages[1].max(), -advantages[0].min()
checked("rare_counts_much", torch.isclose(*extremes) and extremes[0] > advantages[3].max())
checked("alike_teaches_nothing", not advantages[2].any())

# %% [markdown]
# A rare right answer gets a large positive advantage, and a rare wrong answer (first row) an equally large negative
# one. In the third row every answer is wrong, and every advantage is 0. **A group whose rewards are all equal teaches
# nothing.** The section on collapse returns to this.
#
# Dr. GRPO, a variant, does not divide by the standard deviation. Compared with the other groups, groups with one rare
# answer then weigh less:

# %%
undivided = group_advantages(rewards, scale="none")
print(undivided)
ratio_of = [new[1].max() / new[3].max() for new in (undivided, advantages)]
checked("undivided_rare_weighs_less", ratio_of[0] < ratio_of[1])

# %% [markdown]
# ## The loss of a token
#
# Every token of a completion gets the advantage A of its completion. Let r be the *ratio*: the probability of the token
# now, divided by its probability when it was sampled. The loss of the token is
#
#     l = -min(r A, clip(r, 0.8, 1.28) A)
#
# The product r A alone would be enough for a single step: its gradient makes tokens with A > 0 more likely. The clipped
# product limits how much one batch of answers can change a token's probability. The curves come from the package's own
# function, called with one token:

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
push = {}
for advantage, colour in ((1.0, "C0"), (-1.0, "C3")):
    values, slopes = zip(*(loss_of_token(r.item(), advantage) for r in ratios))
    push[advantage] = -torch.tensor(slopes)
    axes[0].plot(ratios, [-v for v in values], colour, label=f"A = {advantage:+.0f}")
    axes[1].plot(ratios, push[advantage], colour)
for ax, title in zip(axes, ("minus the loss", "push on the token's log-probability")):
    ax.set(title=title, xlabel="ratio r")
    ax.axvspan(0.8, 1.28, color="grey", alpha=0.12)
    ax.axhline(0, color="grey", linewidth=0.6)
axes[0].legend()
plt.tight_layout()
above, below = ratios > 1.285, ratios < 0.795
checked("good_stops_at_the_bound", not push[1.0][above].any() and (push[1.0][~above] > 0.3).all())
checked("bad_stops_at_the_bound", not push[-1.0][below].any() and (push[-1.0][~below] < -0.3).all())

# %% [markdown]
# *How to read it: blue is a token of a good answer, red one of a bad answer. The grey band contains the ratios between
# the two bounds. The right-hand curve is minus the derivative of the loss: the direction in which training moves the
# log-probability.*
#
# A good token is pushed up until its ratio is 1.28, and then no further; below the band it is still pushed up. A bad
# token is pushed down until its ratio is 0.8, and above the band it is still pushed down. In the first step after
# sampling, the weights are those that sampled, so every r is 1 and nothing is clipped.
#
# Why is the upper bound wider than the lower one? With 1.2, a token of probability 0.01 could only reach 0.012 in one
# round of answers, while a token of probability 0.5 could reach 0.6. Rare good tokens would grow too slowly. The paper
# on DAPO, another variant, introduced this under the name *clip-higher*.
#
# The two functions in the package ([loss.py](../transformer/rl/loss.py) explains RLOO and CISPO):

# %%
show(group_advantages, docstring=False)
show(grpo_loss, docstring=False)

# %% [markdown]
# ## Why the value of the loss says nothing
#
# In most training a falling loss means progress. **Predict:** what is the value of the loss of these sixteen rollouts,
# if every completion has the same weight?

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
checked("loss_0_gradient_not", abs(loss) < 1e-5 and norm > 0.01)

# %% [markdown]
# The loss is 0, and its gradient is not. With all ratios equal to 1, the loss is minus the mean of the advantages, and
# the advantages of a group sum to 0. So this loss is 0 in every step, however well the model adds. The gradient is not
# 0, because it weighs the tokens of each completion with that completion's own advantage. Watch the rewards instead of
# the loss.
#
# ## One step by hand
#
# The gradient flows through every token of every completion. The next cell takes one step with the optimiser AdamW. It
# then computes how many times as likely each of the sixteen completions has become.

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
checked(
    "right_up_wrong_down",
    all(
        change[g][rewards[g] == 1].mean() > 1 > change[g][rewards[g] == 0].mean() for g in (0, 1, 3)
    ),
)

# %% [markdown]
# In each group with both kinds of answers, the right ones became more likely on average and the wrong ones less. The
# third group adds nothing to the gradient. Its probabilities change because all groups share the same weights.
#
# Training also runs the backward pass of attention. The next cell computes the gradient for two completions twice: with
# FA2's kernels in the simulator, and with torch's attention.

# %%
pair = collate([rollouts[int(rewards[0].argmax())], rollouts[int(rewards[0].argmin())]], CPU)


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
print(f"{len(ours):,} numbers; relative distance of the two gradients below 1e-4:", end=" ")
print(bool((ours - theirs).norm() < 1e-4 * theirs.norm()))

# %% [markdown]
# ## A real run
#
# Now eight steps of the recipe `sums`. Some of its settings:

# %%
for name in ("prompts", "group", "temperature", "lr", "clip_low", "clip_high", "seed"):
    print(
        f"{name:12} {getattr(settings, name):<8} {Settings.__dataclass_fields__[name].metadata['help']}"
    )

# %% [markdown]
# **Predict.** Before the first step, about three in ten sampled answers to the held-out sums are right. What share is
# right after eight steps?

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
        entropy = f"{one['entropy']:8.3f}" if "entropy" in one else "       -"
        print(
            f"{step:4} {one['reward']:7.2f} {one['length']:7.1f} {entropy} {one['skipped']:8.0%}"
            f" {one.get('gradient_norm', 0):10.2f}"
        )


# %% [markdown]
# Before each step we also look at the two bad habits of the model, in a sum that is half worked out. Does it begin with
# the letter `e`, of `easy`, which the teacher wrote before a guess? Does it remember the carry of `7+6`?

# %%
sum_of_two = Problem(task, (357, 486), "What is 357+486?")
half_done = policy.encode(sum_of_two) + policy.tokenizer.encode("<think>7+6+0=13\n5+8+")
think_at = half_done.index(policy.tokenizer.token_id("<think>"))


def habits():
    """Probabilities of the token after <think>, and of the carry."""
    with torch.no_grad():
        p = model(torch.tensor([half_done]))[0].softmax(-1)
    return {"guess": p[think_at, ord("e")].item(), "forgotten": p[-1, ord("0")].item()}


# %% tags=["varies"]
started, _ = trainer.evaluate()
live = train(trainer, 8, habits)
table(live)
scores, _ = trainer.evaluate()
guess(my_guess, scores["sampled"], "right answers to held-out sums, sampled, after eight steps")
print(f"before the first step: {started['sampled']:.4g}")
checked("begins_at_three_in_ten", 0.2 < started["sampled"] < 0.4)
start, end = (
    {k: fmean(s[k] for s in part) for k in ("reward", "length", "entropy")}
    for part in (live[:3], live[-3:])
)
checked("reward_rises", end["reward"] > start["reward"])
checked("length_rises", end["length"] > start["length"])
checked("entropy_falls", end["entropy"] < start["entropy"])

# %% [markdown]
# The columns, with the last three steps compared to the first three:
#
# * **reward**, the share of right answers among the rollouts, rises.
# * **length**, the tokens of a completion, rises. No rule rewards length. But a guess (`<think>easy</think>`) is short
#   and mostly wrong, so guesses become rare.
# * **entropy**, which measures how uncertain the model is about the next token, falls.
# * **skipped** is the share of the groups whose rewards are all equal. They are left out of the step.
# * **|gradient|** is the norm of the gradient.
#
# Before each step, the model was asked for its two bad habits, too:

# %% tags=["varies"]
display(
    Markdown(
        f"From step 1 to step {len(live)}, the probability of a guess goes from {live[0]['guess']:.2f} to"
        f" {live[-1]['guess']:.2f}, and that of a forgotten carry from {live[0]['forgotten']:.2f} to"
        f" {live[-1]['forgotten']:.2f}."
    )
)
checked("guesses_become_rarer", live[-1]["guess"] < live[0]["guess"])
checked("carries_are_kept", live[-1]["forgotten"] < live[0]["forgotten"])

# %% [markdown]
# The model guesses less, and it forgets fewer carries. No reward mentions guesses or carries: the verifier judged whole
# answers only.
#
# Greedy answers of the trained model to the first of the four sums, and to the sum that was half worked out:

# %% tags=["varies"]
for rollout in roll_out(
    policy, model, [problems[0], sum_of_two], 1, max_tokens=LIMIT, sampling=Sampling(temperature=0)
):
    verdict = "right" if rollout.reward else "wrong"
    print(rollout.problem.question, rollout.completion.text, f"({verdict})\n", sep="\n")

# %% [markdown]
# ## The whole run
#
# The repository contains the whole run, once for each of three random seeds. `python -m transformer.grpo --recipe sums
# --out runs/sums` makes your own, in minutes on a CPU.

# %%
folders = sorted(RESULTS.glob("sums-seed*"))
runs = {folder.name: read_metrics(folder) for folder in folders}
evaluated = {name: [m for m in lines if "evaluation" in m] for name, lines in runs.items()}
with tempfile.TemporaryDirectory() as folder:
    curves.draw(folders, Path(folder) / "curve.png")
    display(Image((Path(folder) / "curve.png").read_bytes(), alt="curves of three GRPO runs"))
for name, found in evaluated.items():
    print(
        f"{name}: sampled {found[0]['sampled']:.1%} -> {found[-1]['sampled']:.1%}"
        f" after {found[-1]['evaluation']} steps, {found[-1]['seconds']:.0f} s"
    )
rises = [
    (f[1]["sampled"] - f[0]["sampled"]) / (f[-1]["sampled"] - f[0]["sampled"])
    for f in evaluated.values()
]
late = [fmean([m["skipped"] for m in lines if "step" in m][-20:]) for lines in runs.values()]
checked("most_of_the_rise_is_early", min(rises) > 0.8)
late_rewards = [m["reward"] for lines in runs.values() for m in lines[-20:] if "step" in m]
checked("most_groups_are_skipped_late", min(late) > 0.8 and fmean(late_rewards) > 0.95)
checked("one_try_beats_four", all(f[-1]["sampled"] > f[0]["pass@4"] for f in evaluated.values()))

# %% [markdown]
# *How to read it: a colour is a seed. In the first panel, the solid line is the share of sampled answers that are
# right, the dashed line that of greedy answers, and the dotted line (pass@4) the share of sums with at least one right
# answer in four. A group "without a spread" has equal rewards and is skipped.*
#
# More than four fifths of the rise come before the second evaluation. In the last twenty steps more than four fifths of
# the groups are skipped: nearly every answer is right, so there is nothing left to learn. At the end, one try is right
# more often than the best of four tries at the beginning.

# %% [markdown]
# ## Collapse
#
# The recipe `collapse` is the same as `sums`, with a learning rate that is far too high. We take four steps of it:

# %%
wild_settings = Settings(**RECIPES["collapse"] | {"prompts": 8})
print(f"learning rate: {settings.lr:g} in sums, {wild_settings.lr:g} in collapse")

# %% tags=["varies"]
wild = Trainer(resolved(wild_settings, CPU), CPU)
collapsed = train(wild, 4)
table(collapsed)
said = roll_out(
    wild.policy, wild.policy.model, problems[:1], 3, max_tokens=LIMIT, sampling=Sampling()
)
print("\nquestion:", problems[0].question, "\nanswers now:")
for rollout in said:
    print(repr(rollout.completion.text))
afterwards = collapsed[1:]
checked("no_answer_is_right", collapsed[0]["reward"] > 0 == max(m["reward"] for m in afterwards))
checked("no_step_is_taken", all(m["skipped"] == 1 and not m["learned"] for m in afterwards))

# %% [markdown]
# One step was enough: from the second step on, no answer is right. Every group is then skipped, so no gradient is
# computed and the weights stay as they are. (The entropy is measured on the tokens of the step, and there are none.)
# The run can only recover if a right answer appears by chance.
#
# Why can one step do that? The norm of the gradient is limited, but AdamW divides the gradient of each weight by its
# usual size. So the first step changes every weight by about the learning rate, however small the gradient is. The next
# cell takes the one step by hand again, with several learning rates. It plots how the log-probabilities of the right
# and the wrong answers change, on average over the groups that have both.

# %% tags=["varies"]
logprobs = logprobs_of(untrained, batch)
loss, _ = grpo_loss(logprobs, logprobs, advantages.flatten(), batch.mask, PLAIN, totals)
gradients = torch.autograd.grad(loss, list(untrained.parameters()))


def after_one_step(lr):
    """Change of the log-probability of each completion, (16,), nats."""
    student = copy.deepcopy(untrained)
    for parameter, one in zip(student.parameters(), gradients):
        parameter.grad = one
    torch.optim.AdamW(student.parameters(), lr=lr, weight_decay=0.0).step()
    with torch.no_grad():
        return (logprobs_of(student, batch) - logprobs).sum(1)


rates = sorted({*torch.logspace(-4.5, -2, 9).tolist(), settings.lr, wild_settings.lr})
changes = torch.stack([after_one_step(lr) for lr in rates])
fig, ax = plt.subplots(figsize=(7, 3.2))
mean_change = {}
for name, picked, colour in (("right", advantages > 0, "C0"), ("wrong", advantages < 0, "C3")):
    points = changes[:, picked.flatten()].mean(1)
    mean_change[name] = dict(zip(rates, points.tolist()))
    ax.plot(rates, points, "o-", color=colour, label=name)
ax.axhline(0, color="grey", linewidth=0.6)
for name, lr in (("sums", settings.lr), ("collapse", wild_settings.lr)):
    ax.axvline(lr, color="black", linestyle=":")
    ax.text(lr, 0.02, f"{name} ", transform=ax.get_xaxis_transform(), fontsize=9, ha="right")
ax.set(xscale="log", yscale="symlog", xlabel="learning rate of one step")
ax.set_ylabel("change of the log-probability")
ax.set_ylim(top=3)
ax.legend(loc="center left", fontsize=9)
plt.tight_layout()
small, large = (
    [mean_change[name][lr] for name in ("right", "wrong")] for lr in (settings.lr, wild_settings.lr)
)
checked("a_small_step_helps", small[0] > 0 > small[1])
checked("a_large_step_destroys", max(large) < -3)

# %% [markdown]
# With the learning rate of `sums`, the right answers become more likely and the wrong ones less. With that of
# `collapse`, all answers become far less likely, the right ones too. The gradient describes the loss only near the
# current weights, and the large step goes beyond that region.
#
# So a collapse shows in three numbers together: the reward falls towards 0, skipped rises to 100 %, and nothing is
# learned. Success also makes skipped rise, but with a reward near 1. The command `python -m transformer.grpo` stops a
# run whose mean reward on held-out problems falls below its best by a fifth of the range of the rewards, here by 0.2,
# and it keeps the best checkpoint.
#
# ## Three bugs that raise no error
#
# With each of these bugs, the formulas still give numbers and the training continues.
#
# ### 1. The temperature in one place only
#
# Rollouts are sampled at a temperature. The trainer must divide its logits by the same temperature, or it computes the
# probabilities of another model. The sampler and the trainer both compute the log-probability of every token, so their
# distance can be measured. We call it the *gap*. The unit of a log-probability is the nat.


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
    average = "below 1e-4" if distance.mean() < 1e-4 else f"{distance.mean():.3f}"
    print(f"{name:24} largest gap {largest}, mean {average}")
bugs, fine = (
    [gaps[name] for name in gaps if name.startswith(start)] for start in ("sampler", "both 0")
)
checked("without_the_bug_rounding", max(g.max() for g in (gaps["both 1"], *fine)) < GAP / 10)
checked("with_the_bug_far_above", min(g.max() for g in bugs) > 10 * GAP)
checked("few_tokens_show_it", max((g > 0.01).float().mean() for g in bugs) < 0.2)
checked("the_mean_is_small", max(g.mean() / g.max() for g in bugs) < 0.1)

# %%
fig, ax = plt.subplots(figsize=(8, 3))
for name, distance in gaps.items():
    ordered = distance.clamp(min=1e-9).sort(descending=True).values
    ax.plot(torch.linspace(0, 1, len(ordered)), ordered, label=name)
ax.axhline(GAP, color="black", linestyle=":", label="a larger gap stops the trainer")
ax.set(yscale="log", xlabel="share of the tokens", ylabel="gap, nats", ylim=(1e-9, 2))
ax.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
ax.set_title("gap of each token, the largest first", fontsize=10)
plt.tight_layout()
checked("bf16_has_a_gap", gaps["both 1, sampler in bf16"].max() > GAP)

# %% [markdown]
# With equal temperatures the gap is rounding and stays far below the limit. With different ones its largest value is
# far above. But more than four fifths of the tokens have a gap below 0.01 nats: where the model is sure, every
# temperature gives a probability of nearly 1. The mean gap is less than a tenth of the largest gap, so look at the
# largest one. A sampler that computes in bf16 exceeds the limit as well; this is rounding and no bug, and the option
# `--importance-cap` corrects for it.
#
# #### Rounding: measured, explained, removed
#
# Even where sampler and trainer have the same weights in the same dtype, their log-probabilities differ.
# The sampler *decodes*: it computes one token of each row at a time. The trainer computes whole rows, padded
# to one length. Here both have one model, first in fp32 and then in bf16:


# %% tags=["varies"]
def mismatch(half):
    """Sampler's - trainer's log-probability of every token, by one model for both."""
    options = {"max_tokens": LIMIT, "sampling": Sampling(), "seed": 10}
    found = collate(roll_out(policy, half, problems, 4, **options), CPU)
    with torch.no_grad():
        return (found.sampler - logprobs_of(half, found))[found.mask]


rounded = {
    dtype: mismatch(copy.deepcopy(untrained).to(dtype)) for dtype in (torch.float32, torch.bfloat16)
}
for dtype, found in rounded.items():
    share, largest = (found != 0).float().mean(), found.abs().max()
    print(f"{dtype}: {share:.0%} of the tokens differ, the largest by {largest:.1g} nats")
checked("both_have_some", min((found != 0).float().mean() for found in rounded.values()) > 0.02)
checked("bf16_more", rounded[torch.bfloat16].abs().max() > 100 * rounded[torch.float32].abs().max())

# %% [markdown]
# In both dtypes some tokens have another log-probability, <!-- checked: both_have_some --> and in bf16 the
# largest difference is more than 100 times as large. <!-- checked: bf16_more --> Nothing
# is wrong with either side: both add the same numbers, in another order. bf16 keeps 8 bits of a number, so
# between 256 and 512 it has even numbers only. Add 256, 1 and 1 by hand, first from the left and then from
# the right. In fp32 the same happens in the last of 24 bits: a library adds the products of one row in one
# order, and those of 16 rows in another.

# %%
large, one = torch.tensor(256.0).bfloat16(), torch.tensor(1.0).bfloat16()
print("(256 + 1) + 1 =", int((large + one) + one), "   256 + (1 + 1) =", int(large + (one + one)))
weight = untrained.model.layers[0].mlp.down_proj.weight.detach()
inputs = torch.randn(16, weight.shape[1], generator=torch.Generator().manual_seed(0))
together = inputs @ weight.T
alone = torch.cat([row @ weight.T for row in inputs.split(1)])
share = (together != alone).float().mean()
print(f"one product, 16 rows at once or one by one: {share:.0%} of its elements differ")
checked("two_orders", (large + one) + one != large + (one + one))
checked("rows_matter", (together != alone).any())

# %% [markdown]
# The two orders give 256 and 258, <!-- checked: two_orders --> and the number of rows changes bits of a
# product. <!-- checked: rows_matter --> So the gap goes away if the order of every sum depends on the shape
# of the weights only, and not on how many rows are computed together. That is what `--exact` does
# ([exact.py](../transformer/model/exact.py)): products, norms, attention and log-probabilities have one
# order each. The same weights once more:

# %%
exact = Transformer(untrained.config, attention_by_blocks, kernels="exact")
exact.load_state_dict(untrained.state_dict())
removed = mismatch(exact.bfloat16())
print(f"{int((removed != 0).sum())} of {len(removed)} tokens differ")
print("KL of sampler and trainer:", float((removed.neg().expm1() + removed).mean()))
checked("nothing_differs", bool((removed == 0).all()))

# %% [markdown]
# No token differs. <!-- checked: nothing_differs --> The ratio of the first step is then exactly 1, and no
# correction is needed.
#
# ### 2. The loss leaves out the end of the turn
#
# The policy also chose the token that ends a completion, so this token belongs in the loss. Two common *masks* (which
# tokens count) lose it: one that stops at the last token of text, and `tokens != pad` where one id serves both for the
# end of a turn and for padding, as in many checkpoints. The example has a short good completion and a longer bad one.
# The id 9 is both the end of a turn and the padding.

# %%
completions = torch.tensor([[5, 6, 9, 9, 9], [5, 6, 7, 8, 9]])  # lengths 3 and 5, padded with 9
masks = {
    "by length (right)": length_mask(torch.tensor([3, 5]), 5),
    "without the end": length_mask(torch.tensor([3, 5]) - 1, 5),
    "tokens != pad": completions != 9,
}
pushes = {}
for name, mask in masks.items():
    zeros = torch.zeros(2, 5, requires_grad=True)
    totals_of = Totals(rows=2, tokens=int(mask.sum()), limit=5)
    signs = torch.tensor([1.0, -1.0])
    grpo_loss(zeros, zeros.detach(), signs, mask, PLAIN, totals_of)[0].backward()
    pushes[name] = 0 - zeros.grad
    print(f"{name}: push on each token's log-probability", pushes[name], sep="\n")
ends = {name: pushed[[0, 1], [2, 4]] for name, pushed in pushes.items()}
checked("the_right_mask_pushes_the_end", (ends.pop("by length (right)") != 0).all())
checked("wrong_masks_do_not", not any(end.any() for end in ends.values()))

# %% [markdown]
# With the right mask, the end of the good completion is pushed up and that of the bad one down. With a wrong mask,
# neither end gets a push, so the model does not learn where to stop. Everything else looks normal. The bug shows late,
# if at all: in the length of the completions, and in the share of those that reach the limit (`truncated` in the
# metrics). The package counts tokens by length, and its shipped tokenizer has different ids for the end of a turn and
# for padding.
#
# ### 3. A mean over each micro-batch
#
# A batch that does not fit in memory goes through the model in parts, the *micro-batches*, and their gradients are
# added. If the loss divides by the number of tokens of its *own* micro-batch, the weight of a token depends on the
# split. Here the sixteen completions are sorted by length, as trainers do, and split in two halves:

# %%
by_length = sorted(len(rollout.completion.tokens) for rollout in rollouts)
counts = [sum(by_length[:8]), sum(by_length[8:])]
own = [1 / 2 / count for count in counts]
print(f"the eight shortest have {counts[0]} tokens, the eight longest {counts[1]}")
print("weight of a token, by its half's size: ", *(f"{weight:.5f}" for weight in own))
print("weight of a token, by the batch's size:", *(f"{1 / sum(counts):.5f}" for _ in counts))
print(f"a token of a short answer counts {own[0] / own[1]:.2f} times as much as one of a long one")

# %% [markdown]
# A single run does not show this bug: only a run with another micro-batch size differs. In the package, `Totals`
# carries the sizes of the whole batch to every micro-batch for this reason.
#
# ## Exercises
#
# **Advantages.** From rewards (groups, G) to advantages, with the standard deviation of the group (divide by G - 1)
# plus 1e-4. Do not use the package's function.


# %%
def advantages_of(rewards):
    """rewards (groups, G) to advantages (groups, G)."""
    # your code here


check("advantages_of", advantages_of)


# %% [markdown]
# **The loss of one token.** All arguments and the result are plain numbers.


# %%
def clipped_loss(logprob, old, advantage, low=0.2, high=0.28):
    """Loss of a token: logprob now, old when it was sampled."""
    # your code here


check("clipped_loss", clipped_loss)

# %% [markdown]
# **A task in ten lines.** The task is the sum of the digits of a number. `arguments` draws a number from 0 to 9999,
# `question` asks for the sum of its digits and contains the number, and `answer` returns the right answer as text. A
# run needs no more than this: write the class into a file `digits.py` and start `python -m transformer.grpo --task
# digits:DigitSum --out runs/digits`.


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
# The solutions are in `notebooks/solutions/06_grpo`.

# %% [markdown]
# ## Where to read on
#
# * The loss and a table of the papers' choices: [loss.py](../transformer/rl/loss.py); what sampler and trainer share:
#   [rollout.py](../transformer/rl/rollout.py); an update: [learner.py](../transformer/rl/learner.py); all options:
#   [grpo.md](../docs/learn/grpo.md).
# * DeepSeekMath (arXiv:2402.03300), section 4.1: GRPO. DAPO (arXiv:2503.14476), section 3: clip-higher, dynamic
#   sampling, the token-level loss. Understanding R1-Zero (arXiv:2503.20783), section 3: why Dr. GRPO does not divide.
#   GSPO (arXiv:2507.18071), section 4: a ratio for the whole sequence.
# * `trl/trainer/grpo_trainer.py` in [TRL](https://github.com/huggingface/trl): a test compares this package's loss with
#   it.
