"""The exercises of 03_fa3: the order of causal tiles, which tiles an interval mask leaves, and the
scales of one FP8 block.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lessons.practice.exercises import exercise

LOG2E = 1.4426950408889634
OFFSET = 8.0  # P of 8 bits is multiplied by 2^8, see flash_versions.versions.fp8.quantize
P_ROUNDING = 2.0**-4  # the largest relative error of a normal number that is rounded to e4m3
LEAST = 0.01  # of that error; fp32 alone makes a thousandth of this
ORDER_HINTS = (
    "Tile t sees t + 1 blocks of keys. Which tiles have most work, and of which heads are they?",
    "Begin with the last tile of every head; then take the tile before it of every head.",
    "Two loops: the outer one over reversed(range(tiles)), the inner one over range(heads).",
)
KIND_HINTS = (
    "A query i sees a key if start <= i < end. Which query of the tile sees the key with the first "
    "start, if any of them does? And which one the key with the last end?",
    "No query of the tile sees the block if the first start is behind `high`, or the last end is "
    "at or before `low`.",
    "All queries see all keys if even the last start is at or before `low`, and even the first end "
    "is behind `high`.",
)
BLOCK_HINTS = (
    "A score in log2 units is s8 * q_scale * k_scale * scale_log2. With it, the step is that of "
    "FA2: new maximum, alpha, P, row_sum, acc.",
    "V's scale and the factor 2^8 are part of P's exponent: P = 2^(score - row_max + shift) with "
    "shift = 8 + log2(v_scale / v_reference).",
    "row_sum counts P without V's scale, so multiply its sum by v_reference / v_scale. Round P by "
    ".to(torch.float8_e4m3fn).float() for the product only.",
)

Tile = tuple[int, int]  # head, tile of that head


def finish_time(order: Iterable[Tile], processors: int) -> int:
    """When the last tile is done, in blocks of keys, if a processor that is free takes the next."""
    free = [0] * processors
    for _, tile in order:
        heapq.heappush(free, heapq.heappop(free) + tile + 1)
    return max(free)


@exercise("causal_order", *ORDER_HINTS)
def check_order(function: Callable[[int, int], list[Tile]]) -> None:
    """function(heads, tiles) -> (head, tile) in the order in which they begin."""
    for heads, tiles, processors in ((1, 4, 2), (6, 8, 12), (5, 16, 16)):
        order = function(heads, tiles)
        expected = set(itertools.product(range(heads), range(tiles)))
        found = [(int(head), int(tile)) for head, tile in order]
        assert len(found) == len(expected) and set(found) == expected, (
            f"with {heads} heads of {tiles} tiles there are {len(expected)} tiles, each to be "
            f"visited once; you returned {len(found)}, of them {len(set(found) & expected)} right "
            f"and different ones."
        )
        weights = [tile + 1 for _, tile in found]
        late, best = finish_time(found, processors), heaviest_first(heads, tiles, processors)
        for number, (weight, following) in enumerate(itertools.pairwise(weights)):
            assert weight >= following, (
                f"with {heads} heads of {tiles} tiles, the tile at place {number} of your order "
                f"sees {weight} blocks of keys and the next one {following}, so a heavier tile "
                f"comes after a lighter one. {processors} SMs then finish after {late} blocks; "
                f"with the heaviest tiles first they finish after {best}."
            )


def heaviest_first(heads: int, tiles: int, processors: int) -> int:
    """When the last tile is done if the heaviest tiles come first."""
    order = sorted(itertools.product(range(heads), range(tiles)), key=lambda place: -place[1])
    return finish_time(order, processors)


@exercise("tile_kind", *KIND_HINTS)
def check_kind(function: Callable[..., str]) -> None:
    """function(first_start, last_start, first_end, last_end, low, high) -> the kind of a tile."""
    generator = torch.Generator().manual_seed(5)
    for number in range(400):
        low = int(torch.randint(9, (), generator=generator))
        high = low + number % 5
        queries = torch.arange(low, high + 1)
        keys = 1 + number % 3
        starts = torch.randint(12, (keys,), generator=generator)
        ends = starts + torch.randint(1, 9, (keys,), generator=generator)
        seen = (queries[:, None] >= starts) & (queries[:, None] < ends)
        given = [int(x) for x in (starts.min(), starts.max(), ends.min(), ends.max())]
        given += [low, high]
        kind = function(*given)
        assert kind in ("skipped", "masked", "full"), (
            f'return "skipped", "masked" or "full"; you returned {kind!r}.'
        )
        said = (
            f"queries {low} to {high} and keys with intervals "
            f"{', '.join(f'[{a}, {b})' for a, b in zip(starts.tolist(), ends.tolist()))}, which "
            f"give tile_kind{tuple(given)}: you returned {kind!r}"
        )
        assert kind != "skipped" or not seen.any(), (
            f"{said}, but the queries see {int(seen.sum())} of the {seen.numel()} scores, and they "
            f"would be lost."
        )
        assert kind != "full" or seen.all(), (
            f"{said}, but the queries see only {int(seen.sum())} of the {seen.numel()} scores, and "
            f"the others would count, too."
        )
        assert kind != "masked" or not seen.all(), (
            f"{said}, but the queries see all {seen.numel()} scores, so the tile needs no mask."
        )
        outside = given[0] > given[5] or given[3] <= given[4]
        assert kind == "skipped" or not outside, (
            f"{said}, but the four numbers say that the queries see no score, so the tile need not "
            f"be computed."
        )


def folded(
    function: Callable[..., Any], generator: torch.Generator, spread: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(o, row_sum, exact o, exact row sum) of 4 queries and 3 blocks of 8 keys in FP8, whose scales
    lie up to `spread` powers of two apart.
    """
    e4m3, scale_log2 = torch.float8_e4m3fn, LOG2E / 4
    q8, k8, v8 = (
        (100 * torch.randn(shape, generator=generator)).to(e4m3).float()
        for shape in ((4, 16), (3, 8, 16), (3, 8, 5))
    )
    q_scale = 0.01
    k_scale, v_scale = 0.01 * torch.exp2(
        spread * torch.rand(2, 3, generator=generator) - spread / 2
    )
    reference = v_scale.max().item()
    state = (torch.zeros(4, 5), torch.full((4,), -torch.inf), torch.zeros(4))
    for j in range(3):
        given = (k_scale[j].item(), v_scale[j].item(), reference, scale_log2)
        result = function(state, q8 @ k8[j].T, v8[j], q_scale, *given)
        assert isinstance(result, tuple) and len(result) == 3, (
            f"return (acc, row_max, row_sum); you returned {type(result).__name__}."
        )
        state = result
    acc, row_max, row_sum = (x.double() for x in state)
    scores = torch.einsum("md,jnd->mjn", q8, k8).double() * k_scale.double()[None, :, None]
    scores = (scores * q_scale * scale_log2).flatten(1)
    largest = scores.amax(1)
    off = int((row_max - largest).abs().argmax())
    assert torch.allclose(row_max, largest, rtol=1e-5, atol=1e-5), (
        f"row_max of row {off} is {row_max[off]:.4f}; the largest score, in log2 units and with "
        f"all of its scales, is {largest[off]:.4f}."
    )
    p = torch.exp2(scores - scores.amax(1, keepdim=True))
    values = (v8.double() * v_scale.double()[:, None, None]).flatten(0, 1)
    exact = p @ values / p.sum(1, keepdim=True)
    bound = P_ROUNDING * 2 * (p @ values.abs()) / p.sum(1, keepdim=True) + 1e-4
    o = acc / row_sum[:, None] * reference
    return o, row_sum, torch.stack([exact, bound]), p.sum(1) * 2**OFFSET


@exercise("fold_fp8", *BLOCK_HINTS)
def check_block(function: Callable[..., Any]) -> None:
    """function(state, s8, v8, q_scale, k_scale, v_scale, v_reference, scale_log2) -> state."""
    generator = torch.Generator().manual_seed(3)
    for spread, said in ((0.0, "all scales equal"), (6.0, "scales up to 64 times apart")):
        for _ in range(4):
            o, row_sum, (exact, bound), units = folded(function, generator, spread)
            off = int((row_sum / units - 1).abs().argmax())
            assert torch.allclose(row_sum, units, rtol=P_ROUNDING), (
                f"with {said}, row_sum of row {off} is {row_sum[off]:.3f} and should be 2^8 times "
                f"the sum of 2^(score - row_max), without V's scale: {units[off]:.3f}."
            )
            errors = (o - exact).abs() / bound
            worst, at = errors.max().item(), divmod(int(errors.argmax()), o.shape[1])
            assert worst <= 1, (
                f"with {said}, the error of acc / row_sum * v_reference is {worst:.1f} times as "
                f"large as rounding P to 8 bits explains; in row {at[0]}, dim {at[1]}, it is "
                f"{o[at]:.3f} and should be {exact[at]:.3f}."
            )
            assert worst > LEAST, (
                f"with {said}, acc has no error of rounding: the tensor cores multiply P of 8 "
                f"bits, so round it before the product, with .to(torch.float8_e4m3fn).float()."
            )
