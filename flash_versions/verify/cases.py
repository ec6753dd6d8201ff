"""Calls to verify: drawn at random, with a seed, so that a report names them by their numbers."""

from random import Random
from typing import Any, NamedTuple

import torch

from flash_versions.versions.oracle.suite import DTYPES, Case

LENGTHS = 1, 17, 64, 127, 128, 129, 255, 300, 513, 1000
SMALL_LENGTHS = 1, 17, 33
HEADS = (1, 1), (4, 4), (4, 2), (6, 1)  # of queries, of keys
HEAD_DIMS = 16, 32, 64, 80, 128, 192, 256
WINDOWS: tuple[tuple[int | None, int | None], ...] = ((100, None), (64, 10), (None, 30))


class Call(NamedTuple):
    """A call of `attention`; `number` is also the seed of its inputs."""

    number: int
    dtype: torch.dtype
    backward: bool
    case: Case

    def inputs(self, device: str) -> tuple[torch.Tensor, ...]:
        """q, k, v and a gradient of o: (batch, length, heads, head_dim)."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.number)
            q, k, v = self.case.inputs(self.dtype, "cpu")
            do = torch.randn(q.shape).to(self.dtype)
        return q.to(device), k.to(device), v.to(device), do.to(device)

    def __str__(self) -> str:
        x = self.case
        about: dict[str, Any] = {
            "number": self.number, "dtype": str(self.dtype).removeprefix("torch."),
            "batch": x.batch, "queries": x.M, "keys": x.N, "heads": x.heads,
            "kv_heads": x.kv_heads, "head_dim": x.head_dim, "causal": x.causal, **x.options,
            "backward": self.backward,
        }  # fmt: skip
        return ", ".join(f"{name}={value}" for name, value in about.items() if value is not False)


def draw(number: int, small: bool) -> Call:
    """The call of this number, 0, 1, 2 ...; small: short enough to be simulated."""
    rng, options = Random(number), dict[str, Any]()
    heads, kv_heads = rng.choice(HEADS[:2] if small else HEADS)
    causal, window = rng.random() < 0.5, rng.choice(WINDOWS)
    if rng.random() < 0.2 and not (causal and window[0] is None):
        options["window"] = (window[0], None) if causal else window
    if rng.random() < 0.1:
        options["softcap"] = rng.choice((2.0, 30.0))
    lengths = SMALL_LENGTHS if small else LENGTHS
    case = Case(
        f"call {number}", rng.choice(lengths), rng.choice(lengths), heads, kv_heads,
        rng.choice(HEAD_DIMS[:2] if small else HEAD_DIMS), causal=causal,
        batch=1 if small else rng.choice((1, 2)), options=options,
    )  # fmt: skip
    # Half precision is what matters; one call in twelve is in fp32.
    dtype = rng.choice(DTYPES if number % 4 == 0 else DTYPES[1:])
    return Call(number, dtype, rng.random() < 0.5, case)
