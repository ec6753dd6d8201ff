"""Prompt-lookup decoding: several tokens from one forward, and the same tokens as without.

A decoding step reads all weights to give one token; for a few tokens more it reads them only once,
too. So a step is given a draft: what followed the last time that the row's newest tokens occurred
in its own prompt or answer. The model's choices for all of them come out of one forward, and as
many drafted tokens are kept as agree with them, plus the model's own next one:

    text       the cat sat on the mat . the cat
    draft                                       sat  on  the  mat
    choices                                     sat  on  a    big
    new                                         sat  on  a

Answers that quote (a summary, a corrected text, code) become two to four times as fast; where
nothing repeats, a step costs a little more. All of it happens on the device, each row at its own
pace. Source: Saxena 2023, Prompt Lookup Decoding; verification as in Leviathan et al. 2023,
arXiv:2211.17192, which is exact for greedy choices.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from transformer.generation.decoding import Arrived, Decoding
from transformer.generation.row import Row
from transformer.generation.sampling import Sampling

LONGEST_MATCH = 3  # tokens; a longer match is a better guide than a later one


class PromptLookupDecoding(Decoding):
    """`Decoding` with drafts of up to `drafts` tokens in each step.

    Near the end of the cache, where a draft might not fit, steps go on without.
    """

    def __init__(
        self,
        model: Any,
        cache: Any,
        logits: Tensor,
        rows: Sequence[Row],
        options: Any,
        *,
        drafts: int,
        **others: Any,
    ) -> None:
        device = logits.device
        self.drafts = drafts
        self._stored = 0  # no running row has more in the cache once all was done that is in flight
        self._agreed = torch.zeros(len(rows), 1, dtype=torch.int64, device=device)
        width = cache.capacity + drafts + 1
        text = torch.zeros(len(rows), width, dtype=torch.int64)
        for line, row in zip(text, rows):
            line[: len(row.prompt)] = torch.tensor(row.prompt)
        self._text = text.to(device)
        filled = [[len(row.prompt)] for row in rows]
        self._filled = torch.tensor(filled, dtype=torch.int64, device=device)
        super().__init__(model, cache, logits, rows, options, **others)
        self._text.scatter_(1, self._filled, self.newest)
        self._filled += 1
        self._tokens = self._tokens.new_zeros(len(rows), drafts + 1)
        self._scores = self._scores.new_zeros(len(rows), drafts + 1)

    def advance(self, count: int) -> None:
        """Take `count` steps; each adds 1 to `drafts` + 1 tokens to every row."""
        for _ in range(count):
            fits = self._stored + self.drafts + 1 <= self.cache.capacity
            tokens = self.drafts + 1 if fits else 1
            self._run(tokens)
            self._stored += tokens
            self._send(
                self.rows, tokens, self._tokens[:, :tokens], self._scores[:, :tokens], self._agreed
            )

    def replace(self, index: int, row: Row, logits: Tensor, numbers: Tensor | None) -> None:
        """As in `Decoding`."""
        super().replace(index, row, logits, numbers)
        text = torch.tensor(row.prompt, dtype=torch.int64).to(self._text.device)
        self._text[index, : len(text)] = text
        self._text[index, len(text)] = self.newest[index, 0]
        self._filled[index] = len(text) + 1

    def shorten(self, longest: int) -> None:
        """As in `Decoding`."""
        super().shorten(longest)
        self._stored = longest + self.ahead

    def _step(self, count: int) -> None:
        """One forward of the newest token and count - 1 drafted ones."""
        tokens = torch.cat([self.newest, self._draft(count - 1)], dim=1)
        logits = self.model(tokens, self.cache)
        chosen, scores = self._sample(logits.flatten(0, 1), None, None)
        chosen, scores = chosen.view_as(tokens), scores.view_as(tokens)
        agreed = (chosen[:, :-1] == tokens[:, 1:]).long().cumprod(1).sum(1, keepdim=True)
        self.cache.retract(count - 1 - agreed[:, 0])
        self.newest.copy_(chosen.gather(1, agreed))
        self._tokens[:, :count] = chosen
        self._scores[:, :count] = scores
        self._agreed.copy_(agreed)
        order = torch.arange(count, device=tokens.device)
        self._text.scatter_(1, self._filled + order, chosen)  # the next step overwrites the rest
        self._filled += agreed + 1
        self._filled.clamp_(max=self._text.shape[1] - self.drafts - 1)  # rows that have ended

    def _draft(self, count: int) -> Tensor:
        """(B, count): what followed the latest of the longest matches of each row's newest tokens,
        over and over if that is less; anything if there is no match.
        """
        text, filled = self._text, self._filled
        place = torch.arange(text.shape[1], device=text.device)
        matches = (place < filled).expand(text.shape)  # that end right before each place
        start = torch.zeros_like(filled)
        for back in range(1, LONGEST_MATCH + 1):
            same = text == text.gather(1, (filled - back).clamp(min=0))
            matches = matches & same.roll(back, dims=1) & (place >= back)
            latest = torch.where(matches, place, 0).amax(1, keepdim=True)
            start = torch.where(latest > 0, latest, start)
        order = torch.arange(count, device=text.device)
        return text.gather(1, start + order % (filled - start))

    def _read(self, rows: list[Row], sent: np.ndarray) -> Arrived:
        """Undo `_send`; the last column says how many drafted tokens agreed, if it was a step."""
        if sent.shape[1] % 2 == 0:
            return super()._read(rows, sent)
        count = sent.shape[1] // 2
        tokens, scores = sent[:, :count].astype(int), sent[:, count:-1]
        kept = sent[:, -1].astype(int) + 1
        return [
            (row, tokens[i, :k].tolist(), scores[i, :k].tolist())
            for i, (row, k) in enumerate(zip(rows, kept))
        ]


def check_prompt_lookup(drafts: int, sampling: Sampling) -> None:
    """Refuse drafts where they would not be exact."""
    if drafts and not sampling.greedy:
        raise ValueError(
            "prompt lookup is exact for greedy choices only: use temperature 0, or sample without"
        )
    if drafts and sampling.repetition_penalty != 1:
        raise ValueError(
            "prompt lookup and a repetition penalty exclude each other: the penalty depends on"
            " tokens that a draft may take back"
        )
