"""The exercise of 01_fa1: the step of the online softmax."""

from collections.abc import Callable

import numpy as np

from lessons.practice.exercises import exercise

State = tuple[np.ndarray, np.ndarray, np.ndarray]  # o (rows, dim), row_max and row_sum (rows)
BLOCK = 4  # keys


@exercise(
    "fold",
    "Begin with the new maximum of each row. Which of your three numbers were computed with the "
    "old one?",
    "Multiply what was summed with the old maximum by alpha = exp(old maximum - new maximum). o is "
    "no sum: multiply it by the old row_sum first, and divide by the new one at the end.",
    "A row that has seen no key has the maximum -inf, and -inf - (-inf) is not a number: subtract "
    "0 there. Its sum is 0: divide by 1.",
)
def check_fold(fold: Callable[..., State]) -> None:
    """Hold one step of FA1's online softmax against the softmax of everything seen so far."""
    generator = np.random.default_rng(0)
    scores = generator.normal(size=(3, 4 * BLOCK))
    values = generator.normal(size=(4 * BLOCK, 2))
    follow(fold, scores, values, "random scores")
    follow(fold, scores + 10 * np.arange(4).repeat(BLOCK), values, "scores that grow")
    follow(fold, scores + 1000, values, "scores near 1000")
    hidden = scores.copy()
    hidden[0, :BLOCK] = -np.inf
    follow(fold, hidden, values, "a row that sees no key of block 0")


def follow(fold: Callable[..., State], scores: np.ndarray, values: np.ndarray, which: str) -> None:
    """Fold scores (rows, keys) block by block and compare the state after each."""
    rows, keys = scores.shape
    state: State = (np.zeros((rows, values.shape[1])), np.full(rows, -np.inf), np.zeros(rows))
    for j in range(keys // BLOCK):
        block = slice(j * BLOCK, (j + 1) * BLOCK)
        with np.errstate(all="ignore"):
            state = fold(*(x.copy() for x in state), scores[:, block].copy(), values[block].copy())
        truth = state_after(scores[:, : block.stop], values[: block.stop])
        for place, name in ((1, "row_max"), (2, "row_sum"), (0, "o")):
            found = np.asarray(state[place], dtype=float)
            shape = truth[place].shape
            assert found.shape == shape, f"{name} has shape {found.shape}; it should be {shape}."
            if not np.allclose(found, truth[place], rtol=1e-6, atol=1e-9):
                off = ~np.isclose(found, truth[place], rtol=1e-6, atol=1e-9)
                at = tuple(int(i) for i in np.argwhere(off)[0])
                raise AssertionError(
                    f"{which}: after block {j}, {name}{list(at)} is {found[at]:.4f}; "
                    f"it should be {truth[place][at]:.4f}."
                )


def state_after(scores: np.ndarray, values: np.ndarray) -> State:
    """The state when these keys have been seen, computed from all of them at once."""
    row_max = scores.max(1)
    p = np.exp(scores - np.where(row_max == -np.inf, 0.0, row_max)[:, None])
    row_sum = p.sum(1)
    return p @ values / np.where(row_sum == 0, 1.0, row_sum)[:, None], row_max, row_sum
