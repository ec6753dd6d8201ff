"""Calls to verify: drawn at random, with a seed, so that a report names them by their numbers."""

from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch

LENGTHS = 1, 17, 64, 127, 128, 129, 255, 300, 513, 1000
SMALL_LENGTHS = 1, 17, 33
HEADS = (1, 1), (4, 4), (4, 2), (6, 1)  # of queries, of keys
HEAD_DIMS = 16, 32, 64, 80, 128, 192, 256
WINDOWS: tuple[tuple[int | None, int | None], ...] = ((100, None), (64, 10), (None, 30))


@dataclass(frozen=True)
class Case:
    """A call; `number` is also the seed of its inputs."""

    number: int
    dtype: str
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool
    window: tuple[int | None, int | None] | None
    softcap: float | None
    backward: bool

    def inputs(self, device: str) -> tuple[torch.Tensor, ...]:
        """q, k, v and a gradient of o: (batch, length, heads, head_dim)."""
        generator = torch.Generator().manual_seed(self.number)
        shapes = (
            (self.queries, self.heads),
            (self.keys, self.kv_heads),
            (self.keys, self.kv_heads),
            (self.queries, self.heads),
        )
        return tuple(
            torch.randn(self.batch, *shape, self.head_dim, generator=generator)
            .to(getattr(torch, self.dtype))
            .to(device)
            for shape in shapes
        )

    def options(self) -> dict[str, Any]:
        """The other arguments of the call."""
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    def __str__(self) -> str:
        given = asdict(self).items()
        return ", ".join(f"{name}={value}" for name, value in given if value not in (None, False))


def draw(number: int, small: bool) -> Case:
    """The case of this number.

    Args:
        number: 0, 1, 2, ...
        small: short enough to be simulated.
    """
    rng = Random(number)
    lengths = SMALL_LENGTHS if small else LENGTHS
    heads, kv_heads = rng.choice(HEADS[:2] if small else HEADS)
    causal = rng.random() < 0.5
    window = rng.choice(WINDOWS) if rng.random() < 0.2 else None
    if window and causal:
        window = window[0], None
    return Case(
        number,
        rng.choice(
            ("bfloat16", "float16", "float32") if number % 4 == 0 else ("bfloat16", "float16")
        ),
        1 if small else rng.choice((1, 2)),
        rng.choice(lengths),
        rng.choice(lengths),
        heads,
        kv_heads,
        rng.choice(HEAD_DIMS[:2] if small else HEAD_DIMS),
        causal,
        window if window != (None, None) else None,
        rng.choice((2.0, 30.0)) if rng.random() < 0.1 else None,
        rng.random() < 0.5,
    )
