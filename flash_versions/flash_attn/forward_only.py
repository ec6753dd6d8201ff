"""Results that have no gradient, of inputs that want one: only who asks for it is refused."""

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


class ForwardOnly(torch.autograd.Function):
    """Ties results to the inputs that they were computed from without a gradient."""

    @staticmethod
    def forward(ctx: Any, what: str, count: int, *tensors: torch.Tensor):  # noqa: D102
        ctx.what = what
        return tuple(x.view_as(x) for x in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor):  # noqa: D102
        raise ValueError(
            f"{ctx.what} has no backward, and a gradient of its result was asked for; call it "
            f"under torch.no_grad(), or detach the result."
        )


def forward_only(what: str) -> Callable[[Function], Function]:
    """Make a function of tensors take some that require grad; its result then requires grad, too,
    and a backward through it raises a ValueError. `what` begins the sentence.
    """

    def decorated(function: Function) -> Function:
        @wraps(function)
        def call(*given: Any, **named: Any) -> Any:
            if not torch.is_grad_enabled():
                return function(*given, **named)
            tensors = [x for x in (*given, *named.values()) if isinstance(x, torch.Tensor)]
            wanting = [x for x in tensors if x.requires_grad]
            if not wanting:
                return function(*given, **named)
            with torch.no_grad():
                found = function(*given, **named)
            results = found if isinstance(found, tuple) else (found,)
            known = [x for x in results if x is not None]  # there is no S_dmask
            tied = iter(ForwardOnly.apply(what, len(known), *known, *wanting))
            results = tuple(None if x is None else next(tied) for x in results)
            return results if isinstance(found, tuple) else results[0]

        return call  # type: ignore[return-value]

    return decorated
