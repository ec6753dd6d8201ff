"""Low-rank adapters (LoRA): train two thin matrices beside each frozen one.

    y = W x + (ALPHA / rank) B A x        A: (rank, in), B: (out, rank), B = 0 at the beginning

The optimiser then holds moments for A and B only, and with the adapters switched off the model is
the one that it was: the reference of the KL term costs no second copy. For sampling and publishing,
W + (ALPHA / rank) B A takes the place of W, and nothing is left of the adapters.

Sources: LoRA (arXiv:2106.09685); "LoRA Without Regret" (Thinking Machines, 2025) for adapters on
all projections, and for a scale by which the best learning rate hardly depends on the rank, at
about ten times that of full training.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from transformer.model.decoder import Transformer
from transformer.training.parallel import whole

ALPHA = 32.0


class AdaptedLinear(nn.Module):
    """A linear projection, frozen, with an adapter beside it.

    Args:
        linear: whose weight and bias it takes over, under the same names.
        rank: of the adapter.
        generator: on the CPU, draws A.
    """

    def __init__(self, linear: nn.Linear, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias
        bound = 1 / math.sqrt(linear.in_features)  # Kaiming's for a = sqrt(5), as nn.Linear's own
        a = torch.rand(rank, linear.in_features, generator=generator) * 2 * bound - bound
        self.lora_a = nn.Parameter(a.to(linear.weight.device))
        self.lora_b = nn.Parameter(
            torch.zeros(linear.out_features, rank, device=linear.weight.device)
        )
        self.scale = ALPHA / rank
        self.enabled = True

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        y = F.linear(x, self.weight, self.bias)
        if self.enabled:
            y = y + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)
        return y

    def merged(self) -> Tensor:
        """The weight that does the same alone, (out, in) fp32; a collective if it is sharded."""
        return whole(self.weight).float() + self.scale * whole(self.lora_b) @ whole(self.lora_a)


def add_adapters(model: Transformer, rank: int, seed: int, dtype: torch.dtype) -> None:
    """Freeze a model, in place, and put adapters on all projections of its layers.

    Args:
        seed: of their first matrices, which are the same on every device.
        dtype: of the frozen weights; the adapters are fp32.

    Raises:
        ValueError: a rank that no projection has, for which the adapters outgrow the model.
    """
    if rank > (width := model.config.hidden_size):
        raise ValueError(
            f"--lora-rank {rank} is more than the width of the model, {width}: the adapters would"
            " be larger than the weights; with 0, all weights are trained"
        )
    model.requires_grad_(False).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    for module in [*model.model.layers.modules()]:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear) and name.endswith("_proj"):  # not the router of experts
                setattr(module, name, AdaptedLinear(child, rank, generator))


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model without what its adapters learned."""
    adapters = [module for module in model.modules() if isinstance(module, AdaptedLinear)]
    for module in adapters:
        module.enabled = False
    try:
        yield
    finally:
        for module in adapters:
            module.enabled = True


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and values of the parameters of the plain model that does the same.

    They come one by one, so that of a sharded model one at a time is gathered, unless all of it is
    (`parallel.gathered`); every rank has to go through all of them.
    """
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(module, AdaptedLinear) and name.startswith("lora"):
                continue
            adapted = isinstance(module, AdaptedLinear) and name == "weight"
            value = module.merged() if adapted else whole(parameter)
            yield f"{path}.{name}", value
