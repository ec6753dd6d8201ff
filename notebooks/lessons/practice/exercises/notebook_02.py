"""The exercises of 02_fa2: the reduction of split-KV, and a missing correction."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from lessons.practice.exercises import exercise

Pair = tuple[np.ndarray, np.ndarray]
DIM = 3
WIDTH = 4  # head_dim of `attend`
MANY = 2000  # keys: all their scores or values are far more than a state and a block


@exercise(
    "combine",
    "Correct all splits to the largest of their maxima first; then add.",
    "top = row_max.max(0), and the weight of a split is np.exp2(row_max - top). The weights "
    "multiply both acc and row_sum.",
    "Where top is -inf, subtract 0 instead. Where the total is 0, divide by 1. The LSE is "
    "(top + log2 of the total) * np.log(2).",
)
def check_combine(combine: Callable[..., Pair]) -> None:
    """Hold the reduction of splits against the softmax over all keys at once."""
    generator = np.random.default_rng(0)
    scores, values = generator.normal(size=(4, 12)), generator.normal(size=(12, DIM))
    reduce_and_compare(combine, scores, values, 1, "one split")
    reduce_and_compare(combine, scores, values, 3, "three splits")
    far = scores + 200 * np.arange(3).repeat(4)
    reduce_and_compare(combine, far, values, 3, "splits whose maxima lie 200 apart")
    hidden = scores.copy()
    hidden[1, :4] = -np.inf
    reduce_and_compare(combine, hidden, values, 3, "a row that sees no key of split 0")
    hidden[2] = -np.inf
    reduce_and_compare(combine, hidden, values, 3, "a row that sees no key at all")


def reduce_and_compare(
    combine: Callable[..., Pair], scores: np.ndarray, values: np.ndarray, splits: int, which: str
) -> None:
    """Split scores (rows, keys) in log2 units, let the reader combine, compare o and LSE."""
    parts = [
        partial(s, v)
        for s, v in zip(np.split(scores, splits, axis=1), np.split(values, splits), strict=True)
    ]
    acc, row_max, row_sum = (np.stack(x).astype(np.float32) for x in zip(*parts, strict=True))
    with np.errstate(all="ignore"):
        found = combine(acc.copy(), row_max.copy(), row_sum.copy())
    whole_acc, whole_max, whole_sum = partial(scores, values)
    norm = np.where(whole_sum == 0, 1.0, whole_sum)
    truth = whole_acc / norm[:, None], (whole_max + np.log2(norm)) * np.log(2)
    for name, mine, right in zip(("o", "lse"), found, truth, strict=True):
        compare(np.asarray(mine, dtype=float), right, name, which)


def partial(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What a split leaves: acc (rows, dim), unnormalised; row_max, log2 units; row_sum."""
    row_max = scores.max(1)
    p = np.exp2(scores - np.where(row_max == -np.inf, 0.0, row_max)[:, None])
    return p @ values, row_max, p.sum(1)


@exercise(
    "attend",
    "row_sum is corrected by alpha. Which other sum was computed with the old maximum?",
    "Correct acc before the new block is added to it: acc * alpha[:, None].",
)
def check_attend(attend: Callable[..., np.ndarray]) -> None:
    """Hold a loop over KV blocks against plain attention."""
    generator = np.random.default_rng(0)
    q, k, v = (generator.normal(size=(8, WIDTH)) for _ in range(3))
    loop_and_compare(attend, q, k, v, 8, "one block")
    loop_and_compare(attend, q, k, v, 2, "blocks of 2 keys")
    loop_and_compare(attend, q, k * 5, v, 1, "blocks of 1 key, large scores")
    loop_and_compare(attend, q, k[:7], v[:7], 3, "7 keys in blocks of 3")
    k, v = (generator.normal(size=(MANY, WIDTH)) for _ in range(2))
    loop_and_compare(attend, q, k, v, 2, f"{MANY} keys in blocks of 2")


def loop_and_compare(
    attend: Callable[..., np.ndarray],
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    block: int,
    which: str,
) -> None:
    """Run the reader's loop and compare its o with a softmax over all keys."""
    scores = q @ k.T / np.sqrt(q.shape[1])
    p = np.exp(scores - scores.max(1, keepdims=True))
    truth = p / p.sum(1, keepdims=True) @ v
    given = q.copy(), InBlocks(k, block), InBlocks(v, block), block
    with np.errstate(all="ignore"):
        found, held = with_memory(lambda: attend(*given))
    compare(np.asarray(found, dtype=float), truth, "o", which)
    assert len(k) < MANY or held < v.nbytes, (
        f"{which}: the function holds {held:,} bytes at a time, more than all values have. Fold "
        "each block into acc, row_max and row_sum, and keep nothing else of it."
    )


def with_memory(function: Callable[[], Any]) -> tuple[Any, int]:
    """What a function returns, and the most bytes that it held at a time."""
    traced = tracemalloc.is_tracing()
    tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        found = function()
        return found, tracemalloc.get_traced_memory()[1] - before
    finally:
        if not traced:
            tracemalloc.stop()


class InBlocks:
    """Rows of keys or values, of which a slice may take `block` at a time."""

    def __init__(self, rows: np.ndarray, block: int) -> None:
        self.rows, self.block, self.shape = rows, block, rows.shape

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> np.ndarray:
        taken = self.rows[part].copy()
        assert isinstance(part, slice) and len(taken) <= self.block, (
            f"the loop has to take {self.block} keys at a time: k[first : first + block]."
        )
        return taken

    def __array__(self, *args: object, **named: object) -> np.ndarray:
        return self[:]

    @property
    def T(self) -> np.ndarray:
        """Transposed, if all rows are one block."""
        return self[:].T


def compare(found: np.ndarray, truth: np.ndarray, name: str, which: str) -> None:
    """Refuse an array that is not the right one, with the worst of its numbers."""
    assert found.shape == truth.shape, (
        f"{which}: {name} has shape {found.shape}; it should be {truth.shape}."
    )
    off = ~np.isclose(found, truth, rtol=1e-4, atol=1e-5)
    if off.any():
        at = tuple(int(i) for i in np.argwhere(off)[0])
        raise AssertionError(
            f"{which}: {int(off.any(tuple(range(1, off.ndim))).sum())} of {len(off)} rows are "
            f"wrong; {name}{list(at)} is {found[at]:.4f} and should be {truth[at]:.4f}."
        )
