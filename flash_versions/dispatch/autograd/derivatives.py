"""What cannot be had of attention: second derivatives, and those of forward mode."""

from typing import Any

import torch
from torch.autograd import forward_ad

NO_FORWARD_MODE = (
    "attention has no forward-mode derivative; use version='reference' for torch.func.jvp and "
    "torch.autograd.forward_ad."
)


def has_tangent(x: torch.Tensor | None) -> bool:
    """Whether a tensor carries a forward-mode derivative."""
    return x is not None and forward_ad.unpack_dual(x).tangent is not None


class FirstDerivative(torch.autograd.Function):
    """Gradients that cannot be differentiated again. They come with the tensors that they depend
    on.
    """

    @staticmethod
    def forward(ctx: Any, gradients, *tensors):  # noqa: D102
        return gradients

    @staticmethod
    def backward(ctx: Any, *gradients):  # noqa: D102
        raise RuntimeError(
            "attention has no second derivative: its backward was itself asked for a gradient; use "
            "version='reference' where create_graph=True is needed."
        )
