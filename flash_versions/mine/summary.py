"""What wrong cases have in common and right ones have not."""

from collections.abc import Callable, Sequence

import torch

from flash_versions.mine.check import Outcome

BLOCKS = (16, 32, 64, 128)
MOST = 0.25  # of the right cases may have the property
Property = Callable[[Outcome], bool]


def more_keys(n: int) -> Property:
    """Whether a case has more than n keys."""
    return lambda x: n < x.case.N


def more_queries(n: int) -> Property:
    """Whether a case has more than n queries."""
    return lambda x: n < x.case.M


def indivisible(n: int) -> Property:
    """Whether n does not divide the number of keys."""
    return lambda x: x.case.N % n > 0


PROPERTIES: dict[str, Property] = {
    "more queries than keys under a causal mask: queries that see no key": lambda x: (
        x.case.causal and x.case.M > x.case.N
    ),
    "grouped heads": lambda x: x.case.heads != x.case.kv_heads,
    "kv_lengths": lambda x: x.case.kv_lengths is not None,
    "kv_starts": lambda x: x.case.kv_starts is not None,
    "a causal mask with as many queries as keys": lambda x: x.case.causal and x.case.M == x.case.N,
    "a causal mask": lambda x: x.case.causal,
    "no causal mask": lambda x: not x.case.causal,
    "more than one sequence": lambda x: x.case.batch > 1,
    "a head_dim that is no power of two": lambda x: x.case.head_dim & (x.case.head_dim - 1) > 0,
    "a 16-bit dtype": lambda x: x.dtype != torch.float32,
    "float32": lambda x: x.dtype == torch.float32,
    "a scale of their own": lambda x: "scale" in x.case.options,
    **{f"more than {n} keys: several blocks of {n}": more_keys(n) for n in BLOCKS},
    **{f"more than {n} queries: several blocks of {n}": more_queries(n) for n in BLOCKS},
    **{f"a number of keys that {n} does not divide": indivisible(n) for n in BLOCKS},
}


def common_property(wrong: Sequence[Outcome], right: Sequence[Outcome]) -> str | None:
    """A sentence about the property that best tells wrong cases from right ones: all wrong ones
    have it, and few of the right ones. None if there is no such property.
    """
    if not wrong or not right:
        return None
    best, fewest = None, len(right) * MOST
    for words, has in PROPERTIES.items():
        others = sum(map(has, right))
        if all(map(has, wrong)) and others < fewest:
            best, fewest = words, others
    if best is None:
        return None
    return f"All {len(wrong)} wrong cases, and {fewest} of {len(right)} right ones, have {best}."
