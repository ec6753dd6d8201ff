"""A mixture of experts: many small feed-forwards, of which a router picks a few for each token.

    scores  = router(norm(x))                       a number for each expert
    weights = softmax(the largest few scores)       or the largest few of softmax(scores)
    y       = sum of weight * expert(norm(x))       over these few

A token and one of its experts are a pair. Pairs are sorted by expert, so the rows of each expert
lie together, and one grouped product does the products of all experts:

    pairs    a1 a3 b1 b2 c2 c3   ->   a1 b1 | b2 c2 | a3 c3   ->   rows @ weight[1 | 2 | 3]

Parameters are stacked over the experts and carry the names of transformers 5. Sources: Shazeer et
al. 2017 (arXiv:1701.06538), Mixtral (arXiv:2401.04088), Qwen3 (arXiv:2505.09388).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer.model import exact
from transformer.model.config import Config

Gate = Callable[[Tensor, Tensor], Tensor]  # gate and up to what `down_proj` reads


class Experts(nn.Module):
    """The weights of all experts of a layer."""

    def __init__(self, config: Config, gated: Gate):
        super().__init__()
        experts, hidden, inside = config.num_experts, config.hidden_size, config.expert_size
        self.gated = gated
        self.gate_up_proj = nn.Parameter(torch.zeros(experts, 2 * inside, hidden))
        self.down_proj = nn.Parameter(torch.zeros(experts, hidden, inside))
        if config.mlp_bias:
            self.gate_up_proj_bias = nn.Parameter(torch.zeros(experts, 2 * inside))
            self.down_proj_bias = nn.Parameter(torch.zeros(experts, hidden))

    def forward(self, rows: Tensor, owners: Tensor, exactly: bool = False) -> Tensor:
        """(pairs, hidden) to the same.

        Args:
            exactly: see `grouped`.
            rows: of each expert in succession.
            owners: (pairs,) int64, ascending, the expert of each row.
        """
        numbers = torch.arange(len(self.down_proj), device=owners.device)
        ends = torch.searchsorted(owners, numbers, right=True, out_int32=True)
        gate_up = self._project(rows, "gate_up_proj", owners, ends, exactly)
        return self._project(self.gated(*gate_up.chunk(2, -1)), "down_proj", owners, ends, exactly)

    def _project(
        self, rows: Tensor, name: str, owners: Tensor, ends: Tensor, exactly: bool
    ) -> Tensor:
        product = grouped(rows, getattr(self, name), ends, exactly)
        bias = getattr(self, f"{name}_bias", None)
        return product if bias is None else product + bias[owners].type_as(product)


class MixtureOfExperts(nn.Module):
    """Takes the place of a layer's feed-forward."""

    def __init__(self, config: Config, gated: Gate):
        super().__init__()
        self.chosen, self.normed = config.experts_per_token, config.normed_routing
        self.gate = nn.Linear(config.hidden_size, config.num_experts, bias=config.mlp_bias)
        self.experts = Experts(config, gated)
        self.exact = False

    def forward(
        self, x: Tensor, norm: nn.Module, products: Any = None, residual: Tensor | None = None
    ) -> Tensor:
        """(batch, length, hidden) to the same; `norm` is that of x. The residual is added."""
        h = norm(x).flatten(0, 1)
        scores = self.gate(h) if products is None else products.last(h, self.gate)
        weights, experts = self.route(scores)
        owners, order = experts.flatten().sort(stable=True)
        found = self.experts(h[order // self.chosen], owners, self.exact)
        pairs = found[order.argsort()].unflatten(0, experts.shape)  # as they were before the sort
        weighted = (pairs * weights[..., None]).unbind(1)  # added one by one: `exact`
        y = functools.reduce(torch.add, weighted).type_as(x).view_as(x)
        return y if residual is None else residual + y

    def route(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each token, (tokens, chosen), in fp32 at least."""
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        if not self.normed:
            return scores.softmax(-1).topk(self.chosen)
        best, experts = scores.topk(self.chosen)  # the same as to norm the best of a softmax
        return best.softmax(-1), experts


def grouped(rows: Tensor, weight: Tensor, ends: Tensor, exactly: bool = False) -> Tensor:
    """rows[ends[e - 1] : ends[e]] @ weight[e]^T for every expert e.

    Args:
        rows: (pairs, in).
        weight: (experts, out, in).
        ends: (experts,) int32.
        exactly: whether a row's bits depend on that row only, see `exact`.

    Returns:
        (pairs, out).
    """
    if torch.is_autocast_enabled(rows.device.type):
        dtype = torch.get_autocast_dtype(rows.device.type)
        rows, weight = rows.to(dtype), weight.to(dtype)
    if in_one_product(weight) and not exactly:
        return F.grouped_mm(rows, weight.mT, offs=ends)
    bounds = [0, *ends.tolist()]  # waits for the device
    parts = zip(bounds, bounds[1:], weight, strict=False)
    product = exact.linear if exactly else F.linear
    return torch.cat([product(rows[start:end], expert) for start, end, expert in parts])


def in_one_product(weight: Tensor) -> bool:
    """Whether torch's grouped product has a kernel for this weight, which reads `ends` on the
    device: bf16 on data-centre GPUs from Hopper on, rows that are multiples of 16 bytes.
    """
    return (
        weight.is_cuda
        and weight.dtype == torch.bfloat16
        and torch.cuda.get_device_capability(weight.device)[0] in (9, 10)
        and all(size % 8 == 0 for size in weight.shape[1:])
    )
