"""What wrong cases have in common and right ones have not."""

from collections.abc import Sequence

import torch

from flash_versions.mine.check import Outcome
from flash_versions.mine.mistakes import BLOCKS

MOST = 0.25  # of the right cases may have the property


def properties(outcome: Outcome) -> dict[str, bool]:
    """What a case may have in common with others, and whether it is so."""
    x = outcome.case
    found = {
        "more queries than keys under a causal mask: queries that see no key": (
            x.causal and x.M > x.N
        ),
        "grouped heads": x.heads != x.kv_heads,
        "kv_lengths": x.kv_lengths is not None,
        "kv_starts": x.kv_starts is not None,
        "a causal mask with as many queries as keys": x.causal and x.M == x.N,
        "a causal mask": x.causal,
        "no causal mask": not x.causal,
        "more than one sequence": x.batch > 1,
        "a head_dim that is no power of two": x.head_dim & (x.head_dim - 1) > 0,
        "a 16-bit dtype": outcome.dtype != torch.float32,
        "float32": outcome.dtype == torch.float32,
        "a scale of their own": "scale" in x.options,
    }
    found |= {f"more than {n} keys: several blocks of {n}": n < x.N for n in BLOCKS}
    found |= {f"more than {n} queries: several blocks of {n}": n < x.M for n in BLOCKS}
    return found | {f"a number of keys that {n} does not divide": x.N % n > 0 for n in BLOCKS}


def common_property(wrong: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """A sentence about the property that best tells wrong cases from right ones: all wrong ones
    have it, and few of the right ones. None if there is no such property.
    """
    if not wrong:
        return None
    those, others = [properties(x) for x in wrong], [properties(x) for x in right]
    shared = [words for words in those[0] if all(x[words] for x in those)]
    count = {words: sum(x[words] for x in others) for words in shared}
    best = min(shared, key=lambda words: count[words], default="")
    if not best or count[best] >= len(right) * MOST:
        return None
    return (
        f"All {len(wrong)} wrong cases, and {count[best]} of {len(right)} right ones, have {best}."
    )
