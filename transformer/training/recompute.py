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


def recompute_activations(model: Transformer) -> None:
    """Let all layers of a model forget their activations, in place; copies are to be made before.

    Where no gradient is recorded nothing changes.
    """
    for block in model.model.layers:
        block.forward = _recomputing(block)


def _recomputing(block: Any) -> Any:
    again = nn.ModuleDict({"block": block})  # for `functional_call`: it computes as the layer did
    again.forward = block.forward

    def forward(x: Tensor, *rest: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return again.forward(x, *rest)
        # Within `functional_call` the layer has other weights now than in the backward pass.
        weights = {f"block.{name}": p for name, p in block.named_parameters()}
        return checkpoint(
            lambda x: functional_call(again, weights, (x, *rest)), x, use_reentrant=False
        )

    return forward
