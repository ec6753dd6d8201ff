"""The scales of one FP8 block: those of Q and K in the score, that of V in P's exponent."""

import math

import torch

OFFSET = 8.0
State = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # acc, row_max, row_sum


def fold_fp8(
    state: State,
    s8: torch.Tensor,
    v8: torch.Tensor,
    q_scale: float,
    k_scale: float,
    v_scale: float,
    v_reference: float,
    scale_log2: float,
) -> State:
    """Fold a block of 8-bit keys and values into the state: (acc, row_max, row_sum).

    Args:
        state: acc (rows, dims), in units of v_reference; row_max and row_sum (rows,).
        s8: (rows, keys), the product of the 8-bit numbers of Q and K.
        v8: (keys, dims), the 8-bit numbers of V.
        q_scale: what 1 counts in the 8-bit numbers of Q.
        k_scale: of this block of K.
        v_scale: of this block of V.
        v_reference: the largest v_scale of the head.
        scale_log2: softmax scale, to log2 units.
    """
    acc, row_max, row_sum = state
    scores = s8 * (q_scale * k_scale * scale_log2)
    new_max = torch.maximum(row_max, scores.amax(1))
    alpha = torch.exp2(row_max - new_max)
    shift = OFFSET + math.log2(v_scale / v_reference)
    p = torch.exp2(scores - new_max[:, None] + shift)
    row_sum = row_sum * alpha + p.sum(1) * (v_reference / v_scale)
    acc = acc * alpha[:, None] + p.to(torch.float8_e4m3fn).float() @ v8
    return acc, new_max, row_sum


def wrong_without_the_scale_of_keys(state, s8, v8, q_scale, k_scale, *rest):
    """Blocks of different scales no longer meet on one axis."""
    return fold_fp8(state, s8, v8, q_scale, 1.0, *rest)


def wrong_without_the_scale_of_values(
    state, s8, v8, q_scale, k_scale, v_scale, v_reference, scale_log2
):
    """Every block of V counts as if it had the largest scale."""
    return fold_fp8(state, s8, v8, q_scale, k_scale, v_reference, v_reference, scale_log2)


def wrong_row_sum_counts_values(state, s8, v8, q_scale, k_scale, v_scale, v_reference, scale_log2):
    """row_sum is of P with V's scale in it: the weights of a row no longer add up to 1."""
    acc, row_max, row_sum = state
    scores = s8 * (q_scale * k_scale * scale_log2)
    new_max = torch.maximum(row_max, scores.amax(1))
    alpha = torch.exp2(row_max - new_max)
    p = torch.exp2(scores - new_max[:, None] + OFFSET + math.log2(v_scale / v_reference))
    acc = acc * alpha[:, None] + p.to(torch.float8_e4m3fn).float() @ v8
    return acc, new_max, row_sum * alpha + p.sum(1)


def wrong_without_the_offset(state, s8, v8, q_scale, k_scale, v_scale, v_reference, scale_log2):
    """P stays at most 1, where e4m3 has the fewest numbers."""
    acc, row_max, row_sum = state
    scores = s8 * (q_scale * k_scale * scale_log2)
    new_max = torch.maximum(row_max, scores.amax(1))
    alpha = torch.exp2(row_max - new_max)
    p = torch.exp2(scores - new_max[:, None] + math.log2(v_scale / v_reference))
    acc = acc * alpha[:, None] + p.to(torch.float8_e4m3fn).float() @ v8
    return acc, new_max, row_sum * alpha + p.sum(1) * (v_reference / v_scale)
