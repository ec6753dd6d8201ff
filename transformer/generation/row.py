"""One answer on the host: its tokens as they arrive, its text, and why it ended."""

import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field

from transformer.generation.chat import IncrementalDecoder, Tokenizer


@dataclass(frozen=True)
class Completion:
    """One row's answer.

    Attributes:
        prompt_tokens: length of the prompt.
        tokens: what was generated, the end-of-sequence token included: training has to see it.
        text: the same as text, without the end-of-sequence token or stop string, and without a
            character that was cut off in the middle.
        finish_reason: "stop" (end-of-sequence token or stop string), "length" or "interrupted".
        logprobs: natural-log probability of each token under the distribution that it was drawn
            from (greedy: under softmax of the logits), if asked for.
    """

    prompt_tokens: int
    tokens: list[int]
    text: str
    finish_reason: str
    logprobs: list[float] | None = None


@dataclass(eq=False)
class Row:
    """The state of one answer.

    Attributes:
        index: its number among the answers.
        prompt: tokens.
        limit: the most tokens of the answer.
        tokenizer: of its text.
        eos: tokens that end it.
        stop_strings: texts that end it.
        finish_reason: "" while it is running.
        steps: forwards of the model that it took part in while it was running.
    """

    index: int
    prompt: Sequence[int]
    limit: int
    tokenizer: InitVar[Tokenizer]
    eos: Sequence[int]
    stop_strings: Sequence[str]
    tokens: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    steps: int = 0
    _read: int = 0  # tokens
    _shown: int = 0  # characters

    def __post_init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = IncrementalDecoder(tokenizer)

    @property
    def stored(self) -> int:
        """Tokens in the cache: the newest token is not there yet."""
        return len(self.prompt) + max(0, len(self.tokens) - 1)

    def take(self, tokens: Sequence[int], scores: Sequence[float]) -> None:
        """Add tokens, up to where the row ends.

        Raises:
            ValueError: a score is not finite, see `sampling.sample`.
        """
        ends = [tokens.index(token) + 1 for token in self.eos if token in tokens]
        count = min(len(tokens), self.limit - len(self.tokens), *ends)
        if not all(map(math.isfinite, scores[:count])):
            raise ValueError(
                f"the model's logits for row {self.index} are not finite: the weights are broken,"
                " a 16-bit dtype overflows, which float32 may not, or the temperature or the"
                " repetition penalty is too extreme"
            )
        self.tokens += tokens[:count]
        self.scores += scores[:count]
        if count in ends:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.limit:
            self.finish_reason = "length"

    def read(self) -> str:
        """Turn new tokens into text, and return what of it can now be shown.

        A stop string ends the row with the newest token, so tokens have to be read one by one then.
        """
        tokens, self._read = self.tokens[self._read :], len(self.tokens)
        ended = self.finish_reason == "stop" and tokens[-1] in self.eos
        self.text += self._decoder.push(tokens[:-1] if ended else tokens)
        if ended:
            self.text += self._decoder.flush()
        # Text that may yet become a stop string is held back, so a match begins in unseen text.
        matches = [self.text.find(stop, self._shown) for stop in self.stop_strings]
        if found := [start for start in matches if start >= 0]:
            self.text = self.text[: min(found)]
            self.finish_reason = "stop"
        held = 0 if self.finish_reason else held_back(self.text, self.stop_strings)
        end = len(self.text) - held
        shown, self._shown = self.text[self._shown : end], end
        return shown

    def interrupt(self) -> str:
        """Finish early, keeping the text so far."""
        if self.finish_reason:
            return ""
        self.finish_reason = "interrupted"
        return self.read()

    def completion(self, logprobs: bool) -> Completion:
        """The answer as it is handed out; its scores are log-probabilities if they were wanted."""
        return Completion(
            len(self.prompt),
            self.tokens,
            self.text,
            self.finish_reason,
            self.scores if logprobs else None,
        )


def held_back(text: str, stop_strings: Sequence[str]) -> int:
    """Length of the longest end of the text with which one of the stop strings begins."""
    longest = max((len(stop) for stop in stop_strings), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stop_strings):
            return length
    return 0
