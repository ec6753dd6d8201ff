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
from torch.autograd import forward_ad

from flash_versions.dispatch.autograd.compute import empty_results
from flash_versions.dispatch.autograd.derivatives import (
    NO_FORWARD_MODE,
    FirstDerivative,
    has_tangent,
)
from flash_versions.dispatch.autograd.kept import backward_of, forward_of
from flash_versions.dispatch.replay import keys
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
NUM_FIELDS = len(Request._fields)
DEVICES = ("CPU", "CUDA")
PLAIN = {*keys.PLAIN, type(None), bool, int, float, str}  # fields of a request
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


def tensors_alone(results: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor, ...]:
    """The results with an empty tensor in the place of None, which an operator cannot return."""
    first = results[0]
    assert first is not None
    return tuple([first.new_empty(0) if x is None else x for x in results])


def forward(name: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """(o, lse, statistics) of the request with these fields; see `Version`."""
    return tensors_alone(forward_of(differentiable(name), Request(*fields)))


def backward(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dsink) of the request with these fields; dsink is empty without a sink."""
    request, given = Request(*arguments[:NUM_FIELDS]), arguments[NUM_FIELDS:]
    return tensors_alone(backward_of(differentiable(name), request, *given))


def fake_forward(name: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """Results of the right shapes, types and strides."""
    request = Request(*fields)
    refuse_ahead_of_time(request.q.device)
    return tensors_alone(empty_results(differentiable(name), request))


def fake_backward(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of the right shapes, types and strides."""
    request = Request(*arguments[:NUM_FIELDS])
    like = request.q, request.k, request.v, request.sink
    return tensors_alone(tuple([x if x is None else x.new_empty(x.shape) for x in like]))


def below_autograd(operator: Callable, *arguments: Any) -> Any:
    """The results of an operator, of which autograd has taken note."""
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*arguments)


class Node(torch.autograd.Function):
    """The forward of a version, and its backward as the gradient. The request's q, k, v and sink
    come again as arguments, so that autograd sees them.
    """

    @staticmethod
    def forward(ctx: Any, name: str, request: Request, *differentiable):  # noqa: D102
        results = below_autograd(forward_operator, name, *request)
        fields: list[Any] = [*request]
        ctx.places = places = [i for i in PLACES if fields[i] is not None]
        ctx.save_for_backward(*[fields[i] for i in places], *results)
        for i in places:
            fields[i] = None
        ctx.name, ctx.fields = name, fields
        ctx.set_materialize_grads(False)
        if results[2] is not None:
            ctx.mark_non_differentiable(results[2])
        return results

    @staticmethod
    def backward(ctx: Any, do, dlse, _):  # noqa: D102
        if forward_ad._current_level >= 0 and (has_tangent(do) or has_tangent(dlse)):
            raise RuntimeError(NO_FORWARD_MODE)
        *tensors, o, lse, statistics = ctx.saved_tensors
        fields = ctx.fields.copy()
        for i, x in zip(ctx.places, tensors):
            fields[i] = x
        request = Request(*fields)
        found = backward_operator(ctx.name, *request, o, lse, statistics, do, dlse)
        *gradients, dsink = found
        return None, None, *gradients, None if request.sink is None else dsink


def forward_with_gradient(name: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """The forward operator as autograd calls it: a node if a gradient is asked for."""
    request = Request(*fields)
    if request.needs_grad:
        given = request.q, request.k, request.v, request.sink
        return tensors_alone(Node.apply(name, request, *given))
    return below_autograd(forward_operator, name, *fields)


def is_plain(request: Request) -> bool:
    """Whether nothing watches operations on the tensors of a request, which are on a CPU or a GPU:
    no compiler, no dispatch mode, no transform, no trace, no subclass.
    """
    q = request.q
    return keys.is_quiet() and (q.is_cuda or q.is_cpu) and PLAIN.issuperset(map(type, request))


def backward_without_gradient(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The backward operator as autograd calls it."""
    found = below_autograd(backward_operator, name, *arguments)
    if torch.is_grad_enabled():
        return FirstDerivative.apply(found, *[x for x in arguments if isinstance(x, torch.Tensor)])
    return found


for device in DEVICES:
    library.impl("forward", forward, device)
    library.impl("backward", backward, device)
library.impl("forward", forward_with_gradient, "Autograd")
library.impl("backward", backward_without_gradient, "Autograd")
torch.library.register_fake(FORWARD, fake_forward, lib=library)
torch.library.register_fake(BACKWARD, fake_backward, lib=library)
