"""The online softmax with conditional rescaling: a reference in the place of the running maximum.

Before: whenever a block brings a larger maximum m, all sums are multiplied by 2^(m_old - m_new), so
that p = 2^(x - m) never exceeds 1. That takes a product for every element of the accumulator in
every block, between two products of the tensor cores.

Now every row has a reference r, the maximum of the first block in which it saw a key. It is raised,
to the new maximum, only where the maximum of a block exceeds it by more than THRESHOLD. Where no
row of a tile (in the kernel for Hopper, of a warp) is raised, its accumulator is not touched.

That is exact. Let x_j be the scores in log2 units. For every block and every row,

    row_sum = sum_j 2^(x_j - r),    acc = sum_j 2^(x_j - r) v_j

holds for the keys so far: adding a block keeps it, and so does raising r to r', when both are
multiplied by alpha = 2^(r - r'). At the end

    acc / row_sum = sum_j 2^x_j v_j / sum_j 2^x_j,    r + log2(row_sum) = log2(sum_j 2^x_j)

in which 2^-r has cancelled: output and LSE do not depend on r. The maximum is one choice of r, the
one that also bounds p by 1; any other that keeps all numbers in range is as good.

All numbers stay in range. No p exceeds 2^THRESHOLD = 256, which fp16 (65504) and bf16 hold; with as
many keys as 2^31, row_sum is at most 2^39 and acc at most 2^39 max|v|, where fp32 reaches 2^127.
Below, row_sum is at least 1 in the block that set r. No value that was large enough before becomes
too small: r is never above the maximum, so p is at least what it was, and rounding p to 16 bits has
the same relative error for every size of p. e4m3 ends at 448: with P scaled by 2^shift, THRESHOLD +
shift has to stay below log2(448) = 8.8.

Each row has its own reference, so its result does not depend on its neighbours in the tile: where
only a neighbour is raised, the row is multiplied by exactly 1.

Source: Zadouri et al. 2026, "FlashAttention-4: Algorithm and Kernel Pipelining Co-Design for
Asymmetric Hardware Scaling", arXiv:2603.05451; the threshold is that of its code.
"""

import triton
import triton.language as tl


@triton.jit
def raise_reference(s, row_max, scale_log2, THRESHOLD: tl.constexpr):
    """Fold a block of scores (queries, keys) into the references of its rows: (row_max, pivot,
    alpha).

    s is unscaled, scale_log2 a number or one for each row. row_max is the reference in log2 units,
    -inf before a row's first key. pivot is the same, but 0 in place of -inf, so that no -inf is
    subtracted from -inf. alpha is 2^(old - new), exactly 1 where the reference stays, and 1 for the
    first reference, because there is nothing to rescale. THRESHOLD 0 is the running maximum, as in
    `algebra.softmax_step`, where the first alpha is 0. The caller computes p = 2^(s * scale_log2 -
    pivot), alpha * row_sum + sum(p) and alpha * acc + p @ v.
    """
    block_max = tl.max(s, 1) * scale_log2
    if THRESHOLD == 0:
        new_max = tl.maximum(row_max, block_max)
    else:
        new_max = tl.where(block_max > row_max + THRESHOLD, block_max, row_max)
    pivot = tl.where(new_max == float("-inf"), 0.0, new_max)
    alpha = tl.exp2(row_max - pivot)
    if THRESHOLD != 0:
        alpha = tl.where(row_max == float("-inf"), 1.0, alpha)
    return new_max, pivot, alpha
