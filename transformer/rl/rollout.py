"""Rollouts: groups of completions that the policy samples, each judged by its task.

What the sampler and the trainer must have in common is written once, here: the prompt's tokens, the
tokens that are banned, the temperature, and which of the tokens count. Reinforcement learning that
samples from one distribution and trains another goes wrong without a sign.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from transformer.generation.chat import Tokenizer, load_template
from transformer.generation.engine import Completion, EngineOptions, check_prompt, generate
from transformer.generation.messages import encode_prompt
from transformer.generation.sampling import Sampling, row_generators, token_mask
from transformer.model.decoder import Branches, Transformer
from transformer.model.exact import attention_of
from transformer.model.logprobs import token_logprobs
from transformer.model.weights import eos_token_ids, load_config, load_model
from transformer.rl.limit import at_most
from transformer.rl.loss import length_mask
from transformer.tasks.task import Marks, Problem
from transformer.tasks.verifiers import RewardError, as_reward
from transformer.training.corpus import pad_right

WIDTH_MULTIPLE = 16  # of a batch: strides that 16 divides share a compiled kernel

UNIT, SPLIT = 128, 4096  # keys that batch-invariant attention takes together, a multiple of them

Forward = Callable[..., Tensor]  # (tokens, wanted=, branches= if any) -> logits: a `Transformer`


@dataclass(frozen=True)
class Policy:
    """A model that learns, and how it speaks.

    Attributes:
        model: fp32 weights, those that the optimiser changes.
        template: the chat template, None to use questions as they are.
        eos: tokens that end a completion.
        banned: tokens that are neither sampled nor given probability in training: padding, reserved
            ids, rows of the embedding without a token. A sampled pad would have to be told apart
            from padding ever after.
    """

    model: Transformer
    tokenizer: Tokenizer
    template: str | None
    eos: tuple[int, ...]
    banned: tuple[int, ...]

    @classmethod
    def load(
        cls, folder: Path, attention: str, device: torch.device, exact: bool = False
    ) -> "Policy":
        """Load a checkpoint in fp32; exact: see `transformer.model.exact`.

        Raises:
            FileNotFoundError: there is no checkpoint, or it has no tokenizer.
            ValueError: it cannot be used: a damaged file, or no token that ends a completion.
        """
        config, tokenizer = load_config(folder), Tokenizer.load(folder)
        eos = eos_token_ids(folder, tokenizer.eos)
        if not eos:
            raise ValueError(f"{folder} names no end-of-sequence token, so no completion would end")
        # A run that is taken up again ends in the same bits: also its gradients must have them.
        attend = attention_of(attention, exact, deterministic=True)
        kernels = "exact" if exact else "auto"
        model = load_model(folder, attend, device, torch.float32, kernels)
        reserved = (text for text in tokenizer.control_tokens if "reserved" in text)
        unwanted = (tokenizer.special_tokens.get("pad_token", ""), *reserved)
        ids = {token for text in unwanted if (token := tokenizer.token_id(text)) is not None}
        banned = {*range(tokenizer.vocab_size, config.vocab_size), *ids} - {*eos}
        return cls(model, tokenizer, load_template(folder), eos, tuple(sorted(banned)))

    def encode(self, problem: Problem) -> list[int]:
        """The tokens of a problem's prompt; ValueError if it leaves no room for an answer."""
        if self.template is None and problem.history:
            raise ValueError(
                f"the prompt {problem.question!r} is a conversation, or has a system prompt, and"
                " the model has no chat template"
            )
        _, tokens = encode_prompt(self.tokenizer, self.template, problem.messages)
        check_prompt(self.model.config, tokens, f"the prompt {problem.question!r}")
        return tokens


@dataclass(frozen=True)
class Rollout:
    """A completion, judged.

    Attributes:
        prompt: tokens.
        completion: with the log-probability of every token.
        reward: what training maximises.
        answer, form: see `task.Marks`.
        parts: by name, the rewards that a task of several adds up.
    """

    problem: Problem
    prompt: list[int]
    completion: Completion
    reward: float
    answer: float
    form: float
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def truncated(self) -> bool:
        """Whether the limit, and not the policy, ended it."""
        return self.completion.finish_reason != "stop"


def roll_out(
    policy: Policy,
    model: Transformer,
    problems: Sequence[Problem],
    samples: int,
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int = 0,
    first: int = 0,
    reward_seconds: float = math.inf,
    shared: bool = False,
) -> list[Rollout]:
    """Let the policy answer every problem `samples` times, and judge the answers.

    An answer that the limit cut off earns what its task says, but no more than the lowest reward of
    those of its group that ended: otherwise a policy whose wrong answers are punished would learn
    never to end.

    Args:
        policy: whose tokens they are.
        model: the policy's weights, in the dtype to sample in.
        problems: what is asked.
        samples: the size of a group.
        max_tokens: of a completion.
        sampling: greedy, or a temperature without filters.
        seed, first: of the generators, see `row_generators`: a completion depends on its own number
            only, `first` and up, not on those that are sampled with it.
        reward_seconds: that the rewards of a completion may take.
        shared: decode a group with one copy of its prompt's keys; an exact policy has one for each
            completion, because attention to both parts adds in another order.

    Returns:
        Group by group.

    Raises:
        ValueError: a filter (top-k, top-p, min-p, a repetition penalty): the trainer would have to
            apply it, too, and a token that it dropped could not be learned; a prompt that leaves no
            room; texts so long that the rotary embedding depends on the length; a reward that is no
            finite number, that raised or took too long, by its task and its completion.
        KeyboardInterrupt: the batch was interrupted.
    """
    if sampling != Sampling(temperature=sampling.temperature):
        raise ValueError(
            f"rollouts are drawn from the policy itself: of {sampling} only the temperature may be"
            " set, filters would make the trained distribution another one than the sampled"
        )
    prompts = [policy.encode(problem) for problem in problems]
    trained, longest = model.config.trained_positions, max(map(len, prompts), default=0)
    if trained < min(longest + max_tokens, model.config.max_positions):
        raise ValueError(
            f"beyond {trained} tokens the rotary embedding of this model depends on the length of"
            f" the longest text of a batch, which training does not know: a prompt of {longest}"
            f" tokens leaves {max(0, trained - longest)} for max_tokens, not {max_tokens}"
        )
    number = len(problems) * samples
    rollouts: dict[int, Rollout] = {}

    def judge(index: int, completion: Completion) -> None:  # while a GPU goes on with the others
        which = index // samples
        rollouts[index] = judged(problems[which], prompts[which], completion, reward_seconds)

    generate(
        model,
        policy.tokenizer,
        prompts,
        max_tokens=max_tokens,
        sampling=sampling,
        generators=() if sampling.greedy else row_generators(seed, number, first=first),
        eos=policy.eos,
        on_end=judge,
        logprobs=True,
        samples=samples,
        banned=policy.banned,
        engine=EngineOptions(shared_prefix=shared and model.kernels != "exact"),
    )
    if len(rollouts) < number:
        raise KeyboardInterrupt
    groups = ([rollouts[at + i] for i in range(samples)] for at in range(0, number, samples))
    return [rollout for group in groups for rollout in _capped(group)]


def _capped(group: Sequence[Rollout]) -> list[Rollout]:
    lowest = min((r.reward for r in group if not r.truncated), default=math.inf)
    return [replace(r, reward=min(r.reward, lowest)) if r.truncated else r for r in group]


def judged(
    problem: Problem, prompt: list[int], completion: Completion, seconds: float = math.inf
) -> Rollout:
    """Score a completion by itself; one that was cut off is neither right nor in the right form."""
    cut_off = completion.finish_reason != "stop"
    name = f"of task {problem.task.name!r}"
    try:
        with at_most(seconds, name):
            reward = as_reward(name, problem.reward(completion.text, cut_off))
            marks = Marks(0.0, 0.0) if cut_off else problem.marks(completion.text)
            parts = problem.parts(completion.text, cut_off)
    except (Exception, SystemExit) as error:
        what = str(error) if isinstance(error, RewardError) else f"{name} raised {error!r}"
        raise ValueError(
            f"the reward {what}, for the completion {completion.text!r} of {problem.question!r}"
        ) from error
    return Rollout(problem, prompt, completion, reward, marks.answer, marks.form, parts)


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts as tensors: rows padded on the right.

    Attributes:
        tokens: (B, L) int64, prompt and completion; what follows them means nothing.
        wanted: (B, L) bool, the positions whose logits predict a completion's token.
        targets: (N,) int64, the tokens of all completions, one after another.
        mask: (B, T) bool, a completion's tokens, its end-of-turn token among them.
        sampler: (B, T) fp32, log-probabilities that the tokens were drawn with.
        branches: where rows of tokens are prompts with several completions; None: each has a row.
    """

    tokens: Tensor
    wanted: Tensor
    targets: Tensor
    mask: Tensor
    sampler: Tensor
    branches: Branches | None = None


def collate(
    rollouts: Sequence[Rollout], device: torch.device, context: int | None = None
) -> RolloutBatch:
    """The batch of some rollouts, padded to no more than a context, if one is given."""
    texts = [[*r.prompt, *r.completion.tokens] for r in rollouts]
    width = max(map(len, texts))
    rounded = width + -width % WIDTH_MULTIPLE
    if context is None or rounded <= context:
        width = rounded
    tokens = torch.from_numpy(pad_right(texts, width, np.int64))
    before = torch.tensor([len(r.prompt) - 1 for r in rollouts])
    ends = before + torch.tensor([len(r.completion.tokens) for r in rollouts])
    wanted = length_mask(ends, width) & ~length_mask(before, width)
    return _batch(rollouts, tokens, wanted, device)


def _batch(
    rollouts: Sequence[Rollout],
    tokens: Tensor,
    wanted: Tensor,
    device: torch.device,
    branches: Branches | None = None,
) -> RolloutBatch:
    said = [r.completion.tokens for r in rollouts]
    targets = torch.tensor([token for tokens in said for token in tokens], dtype=torch.int64)
    mask = length_mask(torch.tensor([*map(len, said)]), max(map(len, said)))
    logprobs = [r.completion.logprobs or [] for r in rollouts]
    sampler = torch.from_numpy(pad_right(logprobs, mask.shape[1], np.float32))
    if branches is not None:
        branches = Branches(*(x.to(device) for x in branches))
    tokens, wanted, targets = (x.to(device) for x in (tokens, wanted, targets))
    return RolloutBatch(tokens, wanted, targets, mask.to(device), sampler.to(device), branches)


def collate_shared(
    rollouts: Sequence[Rollout], device: torch.device, exact: bool = False
) -> RolloutBatch:
    """The batch of some groups of rollouts, each a row: the prompt, and behind it the answers as
    branches. A branch begins with the end of the prompt: with its last token, whose logits predict
    the answer's first.

    exact: whether an answer's log-probabilities are those of a row of its own, to the bit.
    Attention adds keys by blocks and splits of a row, so a branch then begins with the rest of the
    prompt that fills no block, and where a block begins; and a group may take several rows, each
    with the prompt. Gradients are equal up to rounding: those of the prompt's tokens are summed
    over the branches in one product and not row by row.
    """
    unit = UNIT if exact else 1
    rows: list[list[tuple[int, int, Rollout]]] = []  # of each, (start, end, rollout)
    for one in rollouts:
        first = (len(one.prompt) - 1) // unit * unit
        length = len(one.prompt) - first + len(one.completion.tokens) - 1
        start = None
        if rows and rows[-1][0][2].prompt == one.prompt:
            start = next_start(rows[-1][-1][1], first, length, unit, exact)
        if start is None:
            rows.append([])
            start = first
        rows[-1].append((start, start + length, one))
    width = max(row[-1][1] for row in rows)
    width += -width % WIDTH_MULTIPLE
    tokens, positions, ends, wanted = torch.zeros(4, len(rows), width, dtype=torch.int64)
    for i, row in enumerate(rows):
        first, _, one = row[0]
        prompt = slice(first)
        tokens[i, prompt] = torch.tensor(one.prompt[prompt])
        positions[i, prompt], ends[i, prompt] = torch.arange(first), width
        for start, end, one in row:
            own, answer = slice(start, end), one.completion.tokens
            tokens[i, own] = torch.tensor([*one.prompt[first:], *answer[:-1]])
            positions[i, own], ends[i, own] = torch.arange(first, first + end - start), end
            wanted[i, end - len(answer) : end] = 1
    return _batch(rollouts, tokens, wanted.bool(), device, Branches(positions, ends))


def next_start(end: int, first: int, length: int, unit: int, exact: bool) -> int | None:
    """Where a branch begins in a row of tokens that ends there; None: in another row.

    In a row of its own, the branch is behind `first` tokens. Its keys have to be divided into the
    same splits here.
    """
    start = end + -end % unit
    if not exact:
        return start
    if first % SPLIT == 0:  # the branch begins a split, and others may hold it as well
        return start if start % SPLIT + length <= SPLIT else start + -start % SPLIT
    return start if start + length <= first + -first % SPLIT else None


def completion_logprobs(
    forward: Forward, batch: RolloutBatch, banned: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every completion token, (B, T) each, 0 outside of the mask."""
    branches = {} if batch.branches is None else {"branches": batch.branches}
    logits = forward(batch.tokens, wanted=batch.wanted, **branches)
    out = token_mask(tuple(banned), logits.shape[-1], logits.device)
    found = token_logprobs(logits[None], batch.targets[None], temperature, out)
    logprobs, entropy = (x.new_zeros(batch.mask.shape).masked_scatter(batch.mask, x) for x in found)
    return logprobs, entropy
