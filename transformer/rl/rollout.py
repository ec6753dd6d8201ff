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
from transformer.generation.engine import Completion, check_prompt, generate
from transformer.generation.messages import encode_prompt
from transformer.generation.sampling import Sampling, row_generators, token_mask
from transformer.model.decoder import Transformer
from transformer.model.exact import attention_of
from transformer.model.weights import eos_token_ids, load_config, load_model
from transformer.rl.limit import at_most
from transformer.rl.loss import length_mask
from transformer.tasks.task import Marks, Problem
from transformer.tasks.verifiers import RewardError, as_reward
from transformer.model.logprobs import token_logprobs

WIDTH_MULTIPLE = 16  # of a batch: strides that 16 divides share a compiled kernel

Forward = Callable[[Tensor, Tensor], Tensor]  # (tokens, wanted) -> logits, see `Transformer`


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
        eos = eos_token_ids(folder)
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
        if self.template is None:
            tokens = self.tokenizer.encode_plain(problem.question)
        else:
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
    except Exception as error:
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
    """

    tokens: Tensor
    wanted: Tensor
    targets: Tensor
    mask: Tensor
    sampler: Tensor


def collate(
    rollouts: Sequence[Rollout], device: torch.device, context: int | None = None
) -> RolloutBatch:
    """The batch of some rollouts, padded to no more than a context, if one is given."""
    rows = [(r.prompt, r.completion.tokens, r.completion.logprobs or []) for r in rollouts]
    width = max(len(prompt) + len(tokens) for prompt, tokens, _ in rows)
    rounded = width + -width % WIDTH_MULTIPLE
    if context is None or rounded <= context:
        width = rounded
    longest = max(len(tokens) for _, tokens, _ in rows)
    tokens = pad_right([[*p, *c] for p, c, _ in rows], width, np.int64)
    before = torch.tensor([len(p) - 1 for p, *_ in rows])
    lengths = torch.tensor([len(c) for _, c, _ in rows])
    wanted = length_mask(before + lengths, width) & ~length_mask(before, width)
    targets = tokens[:, 1:][wanted[:, :-1]]
    sampler = pad_right([x for *_, x in rows], longest, np.float32)
    batch = (tokens, wanted, targets, length_mask(lengths, longest), sampler)
    return RolloutBatch(*(x.to(device) for x in batch))


def pad_right(rows: Sequence[Sequence[float]], width: int, dtype: type) -> Tensor:
    """Rows of numbers as a tensor, (B, width), zeros behind them."""
    padded: np.ndarray = np.zeros((len(rows), width), dtype)
    for line, row in zip(padded, rows):
        line[: len(row)] = row
    return torch.from_numpy(padded)


def completion_logprobs(
    forward: Forward, batch: RolloutBatch, banned: Sequence[int], temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of every completion token, (B, T) each, 0 outside of the mask."""
    logits = forward(batch.tokens, batch.wanted)
    out = token_mask(tuple(banned), logits.shape[-1], logits.device)
    found = token_logprobs(logits[None], batch.targets[None], temperature, out)
    logprobs, entropy = (x.new_zeros(batch.mask.shape).masked_scatter(batch.mask, x) for x in found)
    return logprobs, entropy
