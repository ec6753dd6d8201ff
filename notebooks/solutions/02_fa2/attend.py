"""FlashAttention 2's loop for one query tile, in NumPy."""

import numpy as np


def attend(q, k, v, block):
    """Attention of q (rows, dim) over k and v (keys, dim); normalised once, at the end."""
    scale_log2 = np.log2(np.e) / np.sqrt(q.shape[1])
    acc = np.zeros((len(q), v.shape[1]))
    row_max = np.full(len(q), -np.inf)
    row_sum = np.zeros(len(q))
    for first in range(0, len(k), block):
        s = q @ k[first : first + block].T
        new_max = np.maximum(row_max, s.max(1) * scale_log2)
        p = np.exp2(s * scale_log2 - new_max[:, None])
        alpha = np.exp2(row_max - new_max)
        row_sum = alpha * row_sum + p.sum(1)
        acc = acc * alpha[:, None] + p @ v[first : first + block]
        row_max = new_max
    return acc / row_sum[:, None]


def wrong_no_rescale(q, k, v, block):
    """The sum is brought to the new maximum, the accumulator is not."""
    scale_log2 = np.log2(np.e) / np.sqrt(q.shape[1])
    acc = np.zeros((len(q), v.shape[1]))
    row_max = np.full(len(q), -np.inf)
    row_sum = np.zeros(len(q))
    for first in range(0, len(k), block):
        s = q @ k[first : first + block].T
        new_max = np.maximum(row_max, s.max(1) * scale_log2)
        p = np.exp2(s * scale_log2 - new_max[:, None])
        alpha = np.exp2(row_max - new_max)
        row_sum = alpha * row_sum + p.sum(1)
        acc = acc + p @ v[first : first + block]
        row_max = new_max
    return acc / row_sum[:, None]


def wrong_dropped_tail(q, k, v, block):
    """Only whole blocks."""
    scale_log2 = np.log2(np.e) / np.sqrt(q.shape[1])
    acc, row_sum = np.zeros((len(q), v.shape[1])), np.zeros(len(q))
    row_max = np.full(len(q), -np.inf)
    for first in range(0, len(k) - block + 1, block):
        s = q @ k[first : first + block].T * scale_log2
        new_max = np.maximum(row_max, s.max(1))
        p, alpha = np.exp2(s - new_max[:, None]), np.exp2(row_max - new_max)
        row_sum = alpha * row_sum + p.sum(1)
        acc = acc * alpha[:, None] + p @ v[first : first + block]
        row_max = new_max
    return acc / row_sum[:, None]
