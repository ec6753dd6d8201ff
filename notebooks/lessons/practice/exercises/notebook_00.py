"""The exercise of 00_start: the causal mask."""

from collections.abc import Callable

import torch

from flash_versions import attention_reference
from lessons.practice.exercises import exercise


@exercise(
    "last_key",
    "Which key does the last query, m - 1, see last?",
    "The last query sees key n - 1; each query before it sees one key less.",
    "Query i is m - 1 - i queries before the last one. Where there are more queries than keys, "
    "the first ones see no key.",
)
def check_last_key(last_key: Callable[[int, int, int], int]) -> None:
    """Against what the reference attends to."""
    for m, n in ((4, 4), (1, 100), (2, 5), (5, 2)):
        # With values that count the keys and equal scores, o is the mean of the visible numbers.
        q, k = torch.zeros(1, m, 1, 16), torch.zeros(1, n, 1, 16)
        v = torch.arange(n, dtype=torch.float32)[None, :, None, None].expand(1, n, 1, 16)
        o, lse = attention_reference(q.double(), k.double(), v.double(), causal=True)
        seen = lse[0, 0].exp().round().int()
        for i in range(m):
            found, truth = last_key(i, m, n), int(seen[i]) - 1
            assert found == truth, (
                f"of {m} queries and {n} keys, query {i} sees keys up to {truth}; you say {found}."
            )
            assert truth < 0 or abs(o[0, i, 0, 0].item() - truth / 2) < 1e-9
