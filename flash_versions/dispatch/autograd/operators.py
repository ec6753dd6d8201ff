"""The kernels as operators of torch, `flash_versions::forward` and `::backward`: one opaque call
with known shapes for autograd, torch.compile, torch.export and checkpointing.

Both take a version's name and the fields of a `Request`. They are operators and not functions torch
can trace into, because the kernels may also be simulated. `torch.library.custom_op` would make
them, too; each call of what it makes takes tens of microseconds more.
"""

import sys
from collections.abc import Callable
from typing import Any, get_args

import torch

from flash_versions.dispatch.autograd.compute import empty_results, run_backward, run_forward
from flash_versions.dispatch.request import PLACES, Fields, Request
from flash_versions.dispatch.version import differentiable

KINDS = {torch.Tensor: "Tensor", float: "float", int: "SymInt", bool: "bool", str: "str"}
REQUEST = ", ".join(  # the fields of a request as the arguments of an operator
    f"{KINDS[kind]} {name}" if kind in KINDS else f"{KINDS[get_args(kind)[0]]}? {name}"
    for name, kind in Fields.__annotations__.items()
)
FORWARD, BACKWARD = "flash_versions::forward", "flash_versions::backward"
library = torch.library.Library(FORWARD.partition("::")[0], "FRAGMENT")
library.define(f"forward(str version, {REQUEST}) -> (Tensor, Tensor, Tensor)")
library.define(
    f"backward(str version, {REQUEST}, Tensor o, Tensor lse, Tensor statistics, Tensor? do, "
    f"Tensor? dlse) -> (Tensor, Tensor, Tensor, Tensor)"
)
DEVICES = ("cpu", "cuda")
PLAIN = (torch.Tensor, torch.nn.Parameter)
operators = getattr(torch.ops, library.ns)
forward_operator: Any = operators.forward.default
backward_operator: Any = operators.backward.default

# Where AOTInductor is refused: a process that loaded a package with `forward` in it was ended by a
# segmentation fault (an H200, torch 2.11).
NOT_AHEAD_OF_TIME = ("cuda",)


def refuse_ahead_of_time(device: torch.device) -> None:
    """Refuse what AOTInductor compiles for a device where its packages may not load."""
    inductor = sys.modules.get("torch._inductor.virtualized")  # not there before it compiles
    if inductor is None or not getattr(inductor.V.graph, "aot_mode", False):
        return
    if device.type in NOT_AHEAD_OF_TIME:
        raise RuntimeError(
            "attention cannot be packaged by AOTInductor for a GPU: loading such a package may end "
            "the process; torch.compile and torch.export work, or version='sdpa' in the package."
        )


def refuse_double_backward(ctx: Any, *gradients: Any) -> tuple:
    """There is no second derivative."""
    raise RuntimeError(
        "attention has no second derivative: its backward was itself asked for a gradient; use "
        "version='reference' where create_graph=True is needed."
    )


def forward(version: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """(o, lse, statistics) of the request with these fields; see `Version`."""
    o, lse, statistics = run_forward(differentiable(version), Request(*fields))
    return o, lse, o.new_empty(0) if statistics is None else statistics


def backward(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dsink) of the request with these fields; dsink is empty without a sink."""
    request = Request(*arguments[: len(Request._fields)])
    *gradients, dsink = run_backward(
        differentiable(version), request, *arguments[len(Request._fields) :]
    )
    return *gradients, gradients[0].new_empty(0) if dsink is None else dsink


def fake_forward(version: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """Results of the right shapes, types and strides."""
    request = Request(*fields)
    refuse_ahead_of_time(request.q.device)
    o, lse, statistics = empty_results(differentiable(version), request)
    return o, lse, o.new_empty(0) if statistics is None else statistics


def fake_backward(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of the right shapes, types and strides."""
    request = Request(*arguments[: len(Request._fields)])
    like = [x.new_empty(x.shape) for x in (request.q, request.k, request.v)]
    sink = request.sink
    return *like, request.q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def below_autograd(operator: Callable, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The results of an operator, of which autograd has taken note."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class Node(torch.autograd.Function):
    """The forward operator, and the backward operator as its gradient. The request's q, k, v and
    sink come again as arguments, so that autograd sees them.
    """

    @staticmethod
    def forward(ctx: Any, version, request: Request, *differentiable):  # noqa: D102
        results = below_autograd(forward_operator, version, *request)
        fields: list[Any] = [*request]
        ctx.save_for_backward(*[fields[i] for i in PLACES], *results)
        for i in PLACES:
            fields[i] = None
        ctx.version, ctx.fields = version, fields
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[2])
        return results

    @staticmethod
    def backward(ctx: Any, do, dlse, _):  # noqa: D102
        *tensors, o, lse, statistics = ctx.saved_tensors
        fields = ctx.fields.copy()
        for i, x in zip(PLACES, tensors):
            fields[i] = x
        request = Request(*fields)
        *gradients, dsink = backward_operator(ctx.version, *request, o, lse, statistics, do, dlse)
        return None, None, *gradients, None if request.sink is None else dsink


def forward_with_gradient(version: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """The forward operator as autograd calls it: a node if a gradient is asked for."""
    request = Request(*fields)
    if request.needs_grad:
        return Node.apply(version, request, request.q, request.k, request.v, request.sink)
    if is_plain(fields):
        return forward(version, *fields)
    return below_autograd(forward_operator, version, *fields)


def is_plain(arguments: tuple) -> bool:
    """Whether nothing below autograd watches operations on tensors that are on a CPU or a GPU: no
    dispatch mode, no transform, no subclass.
    """
    if torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    return tensors[0].device.type in DEVICES and all(type(x) in PLAIN for x in tensors)


class LastNode(torch.autograd.Function):
    """The backward operator, which has no gradient."""

    @staticmethod
    def forward(ctx: Any, version, fields, *tensors):  # noqa: D102
        return below_autograd(backward_operator, version, *fields)

    backward = staticmethod(refuse_double_backward)


def backward_without_gradient(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The backward operator as autograd calls it."""
    if torch.is_grad_enabled():
        given = [x for x in arguments if isinstance(x, torch.Tensor) and x.requires_grad]
        if given:
            return LastNode.apply(version, arguments, *given)
    if is_plain(arguments):
        return backward(version, *arguments)
    return below_autograd(backward_operator, version, *arguments)


for device in DEVICES:
    library.impl("forward", forward, device.upper())
    library.impl("backward", backward, device.upper())
library.impl("forward", forward_with_gradient, "Autograd")
library.impl("backward", backward_without_gradient, "Autograd")
torch.library.register_fake(FORWARD, fake_forward, lib=library)
torch.library.register_fake(BACKWARD, fake_backward, lib=library)
