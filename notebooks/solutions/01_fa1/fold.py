"""One step of FlashAttention 1's online softmax, in NumPy."""

import numpy as np


def fold(o, row_max, row_sum, s, v):
    """Fold scores s (rows, keys) and values v (keys, dim) into the state; o stays normalised."""
    new_max = np.maximum(row_max, s.max(1))
    pivot = np.where(new_max == -np.inf, 0.0, new_max)  # no visible key yet: avoid inf - inf
    p = np.exp(s - pivot[:, None])
    alpha = np.exp(row_max - pivot)
    new_sum = alpha * row_sum + p.sum(1)
    norm = 1.0 / np.where(new_sum == 0.0, 1.0, new_sum)
    o = (o * (alpha * row_sum)[:, None] + p @ v) * norm[:, None]
    return o, new_max, new_sum


def wrong_no_rescale(o, row_max, row_sum, s, v):
    """The old sum and the old o are added as they are."""
    new_max = np.maximum(row_max, s.max(1))
    p = np.exp(s - new_max[:, None])
    new_sum = row_sum + p.sum(1)
    return (o * row_sum[:, None] + p @ v) / new_sum[:, None], new_max, new_sum


def wrong_old_sum_left_out(o, row_max, row_sum, s, v):
    """o is normalised, so alpha alone does not bring it back to a sum."""
    new_max = np.maximum(row_max, s.max(1))
    p = np.exp(s - new_max[:, None])
    alpha = np.exp(row_max - new_max)
    new_sum = alpha * row_sum + p.sum(1)
    return (o * alpha[:, None] + p @ v) / new_sum[:, None], new_max, new_sum


def wrong_no_maximum(o, row_max, row_sum, s, v):
    """Without subtracting the maximum, exponentials overflow."""
    p = np.exp(s)
    new_sum = row_sum + p.sum(1)
    new_max = np.maximum(row_max, s.max(1))
    return (o * row_sum[:, None] + p @ v) / new_sum[:, None], new_max, new_sum


def wrong_no_guard(o, row_max, row_sum, s, v):
    """A row that has seen no key yet computes inf - inf."""
    new_max = np.maximum(row_max, s.max(1))
    p = np.exp(s - new_max[:, None])
    alpha = np.exp(row_max - new_max)
    new_sum = alpha * row_sum + p.sum(1)
    return (o * (alpha * row_sum)[:, None] + p @ v) / new_sum[:, None], new_max, new_sum
