"""Activation checkpointing: a layer keeps its input only; the backward pass computes it again.

Memory for activations falls to that of one layer and the inputs of all, for a third more arithmetic
(Chen et al. 2016, arXiv:1604.06174). The gradient is the same, bit for bit where arithmetic repeats
itself.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from transformer.model.decoder import Transformer
from transformer.model.layers import Block


class _Again(nn.Module):
    """A layer, computed by its own forward whatever has taken that one's place."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block
        self.compute = block.forward

    def forward(self, *args: Any) -> Tensor:
        return self.compute(*args)


def recompute_activations(model: Transformer) -> None:
    """Let all layers of a model forget their activations, in place; copies are to be made before.

    Where no gradient is recorded nothing changes.
    """
    for block in model.model.layers:
        block.forward = _recomputing(block)


def _recomputing(block: Any) -> Any:
    again = _Again(block)

    def forward(x: Tensor, *rest: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return again.compute(x, *rest)
        # Within `functional_call` the layer has other weights now than in the backward pass.
        weights = {f"block.{name}": p for name, p in block.named_parameters()}
        return checkpoint(
            lambda x: functional_call(again, weights, (x, *rest)), x, use_reentrant=False
        )

    return forward
