"""The exercises of 01_fa1: the step of the online softmax, and a broken mask."""

from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
import triton

from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions.fa1 import forward as fa1
from lessons.kernels.recording import unchecked
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
    state: State = (
        np.zeros((rows, values.shape[1])),
        np.full(rows, -np.inf),
        np.zeros(rows),
    )
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


@exercise(
    "rows_that_change",
    "Without the mask, a query sees all keys of the blocks that its tile visits. For which "
    "queries is this the same as with the mask?",
    "The tile of query i ends with query (i // block_q + 1) * block_q - 1, which sees as many keys "
    "as it has queries before it, and itself.",
    "The loop ends with the block of that key: it visits "
    "((i // block_q + 1) * block_q - 1) // block_kv + 1 blocks. Query i changes if they have more "
    "than i + 1 keys.",
)
def check_rows_that_change(rows_that_change: Callable[[int, int, int], list[int]]) -> None:
    """Hold a list of rows against those that FA1's own kernel gets wrong without its mask."""
    for length, block_q, block_kv in ((16, 16, 16), (64, 16, 16), (64, 16, 8), (64, 8, 16)):
        found = sorted(int(i) for i in rows_that_change(length, block_q, block_kv))
        truth = rows_without_mask(length, block_q, block_kv)
        case = f"length {length}, tiles of {block_q} queries, blocks of {block_kv} keys"
        missing = sorted(set(truth) - set(found))
        surplus = sorted(set(found) - set(truth))
        assert not missing, f"{case}: row {missing[0]} changes and is not in your list."
        assert not surplus, f"{case}: row {surplus[0]} is in your list and does not change."


@triton.jit
def mask_nothing(s, k_pos, first_key, last_key, window):
    """In the place of `mask_scores`."""
    return s


def rows_without_mask(length: int, block_q: int, block_kv: int) -> list[int]:
    """The queries whose result changes if FA1 leaves out `mask_scores` and nothing else."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, length, 1, 16, generator=generator) for _ in range(3))
    request = make_request(q, k, v, causal=True)
    config = LaunchConfig(block_q, block_kv, num_warps=4, num_stages=1)
    with unchecked():  # blocks of 8 keys
        right = fa1.forward(request, config)[0]
        with patch.object(fa1, "mask_scores", mask_nothing):
            broken = fa1.forward(request, config)[0]
    return (right != broken).any(-1).flatten().nonzero().flatten().tolist()
