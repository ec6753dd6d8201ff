"""From logits to a token: the filters, in Hugging Face's order, and the draw.

    repetition penalty -> temperature -> top-k -> top-p -> min-p -> draw

Two things are notable. The filters keep ties as `transformers` does (every logit equal to the k-th
largest survives top-k), so the kept set is the same bit for bit. And every row of a batch has a
random generator of its own, which gives one number per token: a row's text depends on its logits
and its seed, never on the rows next to it.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from transformer.model.kernels.decode.sample import Draws, choose

# Far beyond these, ordinary logits overflow float32. So low a temperature is all but greedy.
MIN_TEMPERATURE = 1e-4
LARGEST = 1e30  # of an option: a few products later, float32 still holds it
MAX_PENALTY = 1000


@dataclass(frozen=True)
class Sampling:
    """How the next token is sampled. The defaults sample from the model's own distribution.

    Attributes:
        temperature: divides the logits; 0 means greedy, and then no filter below is applied.
        top_k: keep the k most likely tokens (and ties with the last of them); 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p.
        min_p: keep tokens at least min_p times as likely as the most likely one; 0 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of seen tokens.

    Raises:
        ValueError: a value is NaN, of the wrong kind or out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k must be a whole number >= 0 (0 keeps all), got {self.top_k}")
        # Written so that NaN, for which every comparison is false, is refused.
        if self.temperature != 0 and not MIN_TEMPERATURE <= self.temperature <= LARGEST:
            raise ValueError(
                f"temperature must be 0 (greedy) or between {MIN_TEMPERATURE} and {LARGEST:g},"
                f" got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if not 1 / MAX_PENALTY <= self.repetition_penalty <= MAX_PENALTY:
            raise ValueError(
                f"repetition_penalty must be between {1 / MAX_PENALTY} and {MAX_PENALTY},"
                f" got {self.repetition_penalty}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken without a draw."""
        return self.temperature == 0

    @property
    def unfiltered(self) -> bool:
        """Whether the choice is by the logits as they are, but for the temperature."""
        filters = (self.top_k, self.top_p, self.min_p) != (0, 1, 0) and not self.greedy
        return self.repetition_penalty == 1 and not filters


def row_generators(seed: int, rows: int, *, first: int = 0) -> list[torch.Generator]:
    """One CPU generator per row, seeded by the first 63 bits of SHA-256 of the text "seed:row".

    Hashing keeps row 1 of seed 0 unrelated to row 0 of seed 1, which `seed + row` would not. The
    generators live on the CPU so that a seed means the same numbers on every device. `first` is
    the number of the first row: a file worked through in batches gives the rows of one batch.
    """
    generators = []
    for row in range(first, first + rows):
        digest = hashlib.sha256(f"{seed}:{row}".encode()).digest()
        generators.append(torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1))
    return generators


@cache
def token_mask(tokens: tuple[int, ...], vocabulary: int, device: torch.device) -> Tensor | None:
    """(vocabulary,) bool, which tokens these are; None if there are none. Not to be changed."""
    if not tokens:
        return None
    mask = torch.zeros(vocabulary, dtype=torch.bool)
    mask[list(tokens)] = True
    return mask.to(device)


def penalise_seen(logits: Tensor, penalty: float, seen: Tensor) -> Tensor:
    """Make seen tokens less likely (CTRL, Keskar et al. 2019). seen: (B, V) bool."""
    penalised = torch.where(logits < 0, logits * penalty, logits / penalty)
    return torch.where(seen, penalised, logits)


def keep_top_k(logits: Tensor, k: int) -> Tensor:
    """Drop every logit below the k-th largest; ties with it stay."""
    kth_largest = logits.topk(min(k, logits.shape[-1])).values[..., -1:]
    return logits.masked_fill(logits < kth_largest, -math.inf)


def keep_top_p(logits: Tensor, p: float) -> Tensor:
    """Nucleus sampling (Holtzman et al. 2020): drop the unlikely tail of mass at most 1 - p."""
    ascending, order = logits.sort()
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - p
    dropped[..., -1] = False  # the most likely token always stays
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -math.inf)


def keep_min_p(logits: Tensor, min_p: float) -> Tensor:
    """Drop tokens less likely than min_p times the most likely one (Nguyen et al. 2024)."""
    probabilities = logits.softmax(-1)
    threshold = min_p * probabilities.amax(-1, keepdim=True)
    return logits.masked_fill(probabilities < threshold, -math.inf)


def process_logits(logits: Tensor, sampling: Sampling, seen: Tensor | None) -> Tensor:
    """The logits of the distribution that is sampled from; dropped tokens are -inf.

    Args:
        logits: (B, V), any float dtype.
        sampling: greedy applies the repetition penalty only.
        seen: (B, V) bool, the tokens of the prompt and of the answer so far, padding excluded.
            May be None when there is no repetition penalty.

    Returns:
        (B, V) float32.
    """
    logits = logits.float()
    if sampling.repetition_penalty != 1:
        assert seen is not None
        logits = penalise_seen(logits, sampling.repetition_penalty, seen)
    if sampling.greedy:
        return logits
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.top_k:
        logits = keep_top_k(logits, sampling.top_k)
    if sampling.top_p < 1:
        logits = keep_top_p(logits, sampling.top_p)
    if sampling.min_p > 0:
        logits = keep_min_p(logits, sampling.min_p)
    return logits


def uniform_numbers(generators: Sequence[torch.Generator], count: int) -> Tensor:
    """The next numbers of each of B generators, (B, count) float64 on the CPU, from [0, 1)."""
    return torch.stack([torch.rand(count, dtype=torch.float64, generator=g) for g in generators])


def draw_from(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """One token per row, by inverting the cumulative distribution.

    No value travels from the device to the host.

    Args:
        probabilities: (B, V) float32; a token of probability 0 is never drawn. From a row with NaN
            the last token is.
        uniform: (B,) float64, see uniform_numbers.

    Returns:
        (B,) int64 tokens.
    """
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    # The first token whose cumulative probability exceeds the target has a probability above 0;
    # there is one, for the numbers are at most 1 - 2^-53 and so the target is below the total.
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp(max=probabilities.shape[-1] - 1)


def sample(
    logits: Tensor,
    sampling: Sampling,
    seen: Tensor | None,
    uniform: Tensor | None,
    logprobs: bool = True,
) -> tuple[Tensor, Tensor]:
    """Sample the next token of every row.

    Args:
        logits, seen: see `process_logits`.
        uniform: (B,) float64, a number for each draw; greedy needs none.
        logprobs: greedy without them may leave them out.

    Returns:
        tokens: (B,) int64.
        scores: (B,) float32, the log-probabilities of the tokens in the distribution that they were
            drawn from (greedy: the softmax of the logits); greedy without logprobs perhaps the
            largest logits. Not finite where the processed logits are not: one is NaN or +inf, or
            all are -inf.
    """
    if not (sampling.greedy and sampling.unfiltered):
        logits = process_logits(logits, sampling, seen)
    if sampling.greedy:
        if logits.is_cuda:
            return choose(logits)
        largest, tokens = logits.max(-1)
        if not logprobs:
            return tokens, largest.float()
        return tokens, logits.float().log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert uniform is not None
    if logits.is_cuda:
        return choose(logits, Draws(uniform[:, None].contiguous()))
    # The softmax of a row that is not finite is NaN everywhere, and dropped tokens are -inf and do
    # not count.
    probabilities = logits.softmax(-1)
    tokens = draw_from(probabilities, uniform)
    # As `logprobs.token_logprobs` computes them: training finds the same bits.
    return tokens, logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
