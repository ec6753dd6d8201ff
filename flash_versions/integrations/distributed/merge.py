"""Two partial results of attention, over disjoint sets of keys, into the result over both."""

import torch


def merge_attention_states(
    o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over the keys of a and of b, from attention over each.

    The same queries saw the keys of a, with sum of exponentials l_a = exp(lse_a), and those of b:

        lse = log(exp(lse_a) + exp(lse_b))      o = exp(lse_a - lse) o_a + exp(lse_b - lse) o_b

    It is the algebra of `fa2.combine`, elementwise and in fp32, and it is associative: any number
    of parts can be merged, in any order. Ring attention merges a part for each device that holds
    keys; sequences with a common prefix attend to it once, in one batch, and merge their own keys:

        o_a, lse_a = attention(q, prefix_k, prefix_v, return_lse=True)
        o_b, lse_b = attention(q, k, v, causal=True, return_lse=True)
        o, lse = merge_attention_states(o_a, lse_a, o_b, lse_b)

    Differentiable, in o as in lse. A sink is part of the LSE: give it to one part only.

    Args:
        o_a: (batch, M, heads, dim), or packed (total, heads, dim).
        lse_a: natural log, (batch, heads, M), or packed (heads, total). Where it is -inf, a query
            saw no key of a: o_a weighs nothing, whatever it holds.
        o_b: like o_a.
        lse_b: like lse_a.

    Returns:
        o: like o_a. lse: like lse_a, at least fp32. A query that saw no key of either has o = 0 and
        lse = -inf, and zero gradients.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
    """
    _check(o_a, lse_a, o_b, lse_b)
    wide = torch.promote_types(o_a.dtype, torch.float32)
    x_a, x_b = lse_a.to(wide), lse_b.to(wide)
    # Any pivot gives the same result, so it needs no gradient; the larger one prevents overflow.
    pivot = torch.maximum(x_a, x_b).detach()
    unseen = pivot == -torch.inf
    pivot = pivot.masked_fill(unseen, 0.0)
    weight_a, weight_b = torch.exp(x_a - pivot), torch.exp(x_b - pivot)
    total = (weight_a + weight_b).masked_fill(unseen, 1.0)
    lse = (pivot + total.log()).masked_fill(unseen, -torch.inf)
    o = _weighted(o_a, lse_a, weight_a / total) + _weighted(o_b, lse_b, weight_b / total)
    return o.to(o_a.dtype), lse


def _weighted(o: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """o times its weight in the weight's dtype; 0 where it saw no key, even of NaN."""
    weight, lse = (x.transpose(-1, -2).unsqueeze(-1) for x in (weight, lse))
    return weight * o.to(weight.dtype).masked_fill(lse == -torch.inf, 0.0)


def _check(o_a: torch.Tensor, lse_a: torch.Tensor, o_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    if o_a.dim() not in (3, 4):
        raise ValueError(
            f"o_a has shape {tuple(o_a.shape)}; it must be (batch, M, heads, dim), or packed "
            f"(total, heads, dim)."
        )
    if o_b.shape != o_a.shape or o_b.dtype != o_a.dtype:
        raise ValueError(
            f"o_b has shape {tuple(o_b.shape)} and dtype {o_b.dtype}, o_a has {tuple(o_a.shape)} "
            f"and {o_a.dtype}; they must be the same."
        )
    *batch, length, heads, _ = o_a.shape
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != (*batch, heads, length) or not lse.is_floating_point():
            raise ValueError(
                f"{name} has shape {tuple(lse.shape)} and dtype {lse.dtype}; it must be a float "
                f"tensor of shape {(*batch, heads, length)}."
            )
    for name, x in (("lse_a", lse_a), ("o_b", o_b), ("lse_b", lse_b)):
        if x.device != o_a.device:
            raise ValueError(f"{name} is on {x.device}, o_a is on {o_a.device}; use one device.")
