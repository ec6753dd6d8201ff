"""What happens to a score on its way to the softmax: softcap, ALiBi, an attention sink, dropout;
and what it has to know of its query. Shared by every version that offers it.

Whatever a call does not use is None at compile time: no instruction is left of it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flash_versions.dispatch.request import Request
from flash_versions.versions.tiles.algebra import LOG2E, first_visible, last_visible


class ScoreMods(NamedTuple):
    """How raw products q . k become scores; None where a call asks for nothing.

    Scores are kept in units of 1 / scale_log2: multiplied by it, they are exponents of 2. Without
    softcap that leaves the products as they are.
    """

    scale_log2: Any
    cap_scale: Any  # scale / softcap
    slopes: Any  # pointer to ALiBi slopes (batch, heads)
    slopes_batch_stride: Any
    slopes_head_stride: Any
    sink: Any  # pointer to one logit per query head
    dropout_seed: Any  # pointer to one int64
    dropout_threshold: Any  # p * 2^32
    dropout_rescale: Any  # 1 / (1 - p): factor on kept probabilities
    score_descale: Any = None  # pointers to scales of the 8-bit tensors, fp32 (batch, heads)
    value_descale: Any = None

    @classmethod
    def of(cls, request: Request) -> "ScoreMods":
        """The modifications that a request asks for."""
        scale, softcap, slopes = request.scale, request.softcap, request.alibi_slopes
        dropout = request.dropout_p > 0
        return cls(
            scale_log2=(softcap or scale) * LOG2E.value,
            cap_scale=None if softcap is None else scale / softcap,
            slopes=slopes,
            slopes_batch_stride=slopes.stride(0) if slopes is not None and slopes.dim() == 2 else 0,
            slopes_head_stride=None if slopes is None else slopes.stride(-1),
            sink=request.sink,
            dropout_seed=request.dropout_seed if dropout else None,
            dropout_threshold=round(request.dropout_p * 2**32) if dropout else None,
            dropout_rescale=1 / (1 - request.dropout_p) if dropout else None,
        )

    def with_descales(self, request: Request) -> "ScoreMods":
        """The same for the 8-bit tensors of a request: q and k count as one."""
        batch, _, kv_heads, group = request.batch, *request.k.shape[1:3], request.group
        q, k, v = (
            torch.ones((), device=request.q.device) if x is None else x
            for x in (request.q_descale, request.k_descale, request.v_descale)
        )
        score, value = (
            x.expand(batch, kv_heads).repeat_interleave(group, 1).contiguous() for x in (q * k, v)
        )
        return self._replace(score_descale=score, value_descale=value)


@triton.jit
def in_16_bits(tile, mods):
    """A tile of 8-bit numbers in bf16, which has them all; any other tile as it is."""
    return tile.to(tl.bfloat16) if mods.score_descale is not None else tile


@triton.jit
def descale_scores(s, mods, sequence_head):
    """Products of 8-bit numbers times what they count."""
    if mods.score_descale is not None:
        return s * tl.load(mods.score_descale + sequence_head)[:, None]
    else:
        return s


@triton.jit
def descale_values(acc, mods, sequence_head):
    """A sum of 8-bit values times what they count."""
    if mods.value_descale is not None:
        return acc * tl.load(mods.value_descale + sequence_head)[:, None]
    else:
        return acc


@triton.jit
def load_slopes(mods, sequence, head):
    """ALiBi slopes of the heads, in the units of the scores; 0 without ALiBi."""
    if mods.slopes is not None:
        offset = sequence.to(tl.int64) * mods.slopes_batch_stride + head * mods.slopes_head_stride
        return tl.load(mods.slopes + offset).to(tl.float32) * (LOG2E / mods.scale_log2)
    else:
        return head * 0.0


class Queries(NamedTuple):
    """The rows of a query tile: one element per row, but for the offset."""

    head: Any
    pos: Any
    offset: Any  # of the keys' axis: a query's own place among them is pos + offset
    first_key: Any
    last_key: Any
    slope: Any
    sequence_head: Any


@triton.jit
def place_queries(
    tile, sequence, kv_heads, rows, keys, window, mods, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr
):
    """The rows of a tile: row r is query r // GROUP in head r % GROUP of the group."""
    row = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    pos = row // GROUP
    head = keys.head * GROUP + row % GROUP
    offset = keys.length - rows.length  # causal is bottom-right: the last query sees the last key
    return Queries(
        head,
        pos,
        offset,
        first_visible(pos, offset, window.left),
        last_visible(pos, offset, window.right, keys.length),
        load_slopes(mods, sequence, head),
        sequence * kv_heads * GROUP + head,
    )


@triton.jit
def tanh(x):
    """Hyperbolic tangent in fp32: near 0 a series, where 1 - exp(-2x) would cancel."""
    # x - x^3/3 + 2x^5/15 - 17x^7/315 + 62x^9/2835; the next term is below 2^-26 x at |x| = 1/4
    x2 = x * x
    series = x2 * (62.0 / 2835.0) - 17.0 / 315.0
    series = series * x2 + 2.0 / 15.0
    series = series * x2 - 1.0 / 3.0
    near_zero = x + x * (x2 * series)
    decay = tl.exp(-2.0 * tl.abs(x))
    elsewhere = (1.0 - decay) / (1.0 + decay)
    elsewhere = tl.where(x < 0, -elsewhere, elsewhere)
    return tl.where(tl.abs(x) < 0.25, near_zero, elsewhere)


@triton.jit
def cap_scores(s, mods):
    """Softcap: tanh(s * scale / softcap), which scale_log2 takes to +-softcap."""
    return tanh(s * mods.cap_scale) if mods.cap_scale is not None else s


@triton.jit
def uncap_gradient(ds, capped, mods):
    """The gradient of capped scores, taken back through the cap: tanh' = 1 - tanh^2."""
    return ds * (1.0 - capped * capped) if mods.cap_scale is not None else ds


@triton.jit
def add_alibi(s, slope, distance, mods):
    """ALiBi: less slope for every position between the query's own place and the key."""
    return s - slope * tl.abs(distance).to(tl.float32) if mods.slopes is not None else s


@triton.jit
def sink_state(row_max, row_sum, mods, head, present):
    """The state (row_max, row_sum) of a softmax before its first key, log2 units.

    A sink is a key that was seen before all others and whose value is 0: it sets the maximum and
    adds 1 to the sum. `present` is false where another split has counted it.
    """
    if mods.sink is not None:
        sink = tl.load(mods.sink + head).to(tl.float32) * LOG2E
        row_max = tl.where(present, sink, row_max)
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def drop(p, mods, sequence_head, q_pos, k_pos):
    """p with 0 where dropout drops it.

    The position decides, by the first word of Philox4x32-10 with key = seed and counter = (q_pos,
    k_pos, sequence_head, 0): the backward draws the same as the forward, whatever the tiles.
    """
    if mods.dropout_seed is not None:
        zero = (q_pos + k_pos + sequence_head) * 0
        seed = tl.load(mods.dropout_seed)
        word, _, _, _ = tl.philox(seed, q_pos + zero, k_pos + zero, sequence_head + zero, zero)
        return tl.where(word.to(tl.uint32, bitcast=True) >= mods.dropout_threshold, p, 0.0)
    else:
        return p
