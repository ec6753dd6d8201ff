"""The exercises of `05_transformer`: the rotary embedding and the cache's lengths."""

import torch

from lessons.practice.exercises import exercise
from transformer.model.cache import KVCache
from transformer.model.config import Config
from transformer.model.rope import Rope, rotary_table, rotate

CLOSE = 1e-4  # of fp32 angles at positions of a few hundred
SHAPE = Config(
    vocab_size=8,
    hidden_size=8,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
)


@exercise(
    "rotate_head",
    "Pair i has the elements i and i + n / 2. All pairs turn, each by an angle of its own.",
    "The angles are position / theta ** (torch.arange(0, n, 2) / n), one for each pair.",
    "A turned pair is (a cos - b sin, b cos + a sin).",
)
def check_rotate_head(rotate_head):
    """Against the package, for several positions, sizes and thetas."""
    generator = torch.Generator().manual_seed(0)
    for size, position, theta in (
        (4, 0, 10_000.0),
        (4, 1, 10_000.0),
        (8, 3, 100.0),
        (64, 200, 1e6),
    ):
        x = torch.randn(size, generator=generator)
        cos, sin = rotary_table(Rope(theta), size, position + 1, x.device, x.dtype).unbind(-3)
        truth = rotate(x.view(1, 1, 1, size), cos[position], sin[position]).flatten()
        found = rotate_head(x.clone(), position, theta)
        assert isinstance(found, torch.Tensor) and found.shape == x.shape, (
            f"it should return a tensor of shape ({size},), as x has; it returned {found!r:.80}."
        )
        worst = int((found - truth).abs().argmax())
        assert (found - truth).abs().max() < CLOSE, (
            f"with {size} numbers at position {position} and theta {theta:g}, number {worst} is"
            f" {found[worst]:.3f}; it should be {truth[worst]:.3f}."
        )


@exercise(
    "advance",
    "Pads are not kept: a row grows by count - padding.",
    "Number the tokens of a row 0, 1, ... count - 1. The first real one has the number `padding`"
    " and goes to the row's first free slot.",
    "(number - padding) % count is a token's place behind those that the row holds.",
)
def check_advance(advance):
    """Against the package's cache, from an empty and from a filled one."""
    for before, count, pads in (
        ([0, 0], 4, [0, 0]),
        ([0, 0, 0], 5, [2, 0, 4]),
        ([3, 5], 1, [0, 0]),
        ([3, 5], 4, [1, 3]),
    ):
        cache = KVCache(SHAPE, len(before), 32)
        cache.lengths, cache.longest = torch.tensor(before, dtype=torch.int32), max(before)
        padding = torch.tensor(pads)
        span = cache.reserve(count, padding)
        found = advance(torch.tensor(before), count, padding.clone())
        assert isinstance(found, tuple) and len(found) == 2, (
            f"it should return slots and lengths; it returned {found!r:.80}."
        )
        given = f"lengths {before}, {count} tokens and {pads} pads"
        for name, mine, truth in zip(("slots", "lengths"), found, (span.positions, cache.lengths)):
            assert torch.is_tensor(mine) and mine.tolist() == truth.tolist(), (
                f"for {given} the {name} are {list_of(mine)}; they should be {truth.tolist()}."
            )


def list_of(value: object) -> object:
    """A tensor's content, or the thing itself."""
    return value.tolist() if isinstance(value, torch.Tensor) else value
