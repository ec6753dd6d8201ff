"""The reduction of split-KV, in NumPy."""

import numpy as np


def combine(acc, row_max, row_sum):
    """Partial results of splits into (o, lse): acc (splits, rows, dim), row_max in log2 units."""
    top = row_max.max(0)
    pivot = np.where(top == -np.inf, 0.0, top)
    weight = np.exp2(row_max - pivot)
    whole = (weight[:, :, None] * acc).sum(0)
    total = (weight * row_sum).sum(0)
    total = np.where(total == 0.0, 1.0, total)  # a row that saw no key: o = 0, lse = -inf
    return whole / total[:, None], (top + np.log2(total)) * np.log(2)


def wrong_average(acc, row_max, row_sum):
    """Splits count alike only if their sums are equal."""
    with np.errstate(all="ignore"):
        lse = (row_max.max(0) + np.log2(row_sum.sum(0))) * np.log(2)
        return (acc / row_sum[:, :, None]).mean(0), lse


def wrong_no_weights(acc, row_max, row_sum):
    """Sums under different maxima are added as they are."""
    total = row_sum.sum(0)
    return acc.sum(0) / total[:, None], (row_max.max(0) + np.log2(total)) * np.log(2)


def wrong_pivot(acc, row_max, row_sum):
    """With the maximum of the first split, weights of later ones overflow."""
    weight = np.exp2(row_max - row_max[0])
    total = (weight * row_sum).sum(0)
    o = (weight[:, :, None] * acc).sum(0) / total[:, None]
    return o, (row_max[0] + np.log2(total)) * np.log(2)


def wrong_lse_in_log2(acc, row_max, row_sum):
    """The LSE goes to memory in natural units."""
    o, lse = combine(acc, row_max, row_sum)
    return o, lse / np.log(2)
