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

from flash_versions.dispatch.autograd.call import Call, look
from flash_versions.dispatch.autograd.compute import empty_results
from flash_versions.dispatch.autograd.derivatives import (
    NO_FORWARD_MODE,
    FirstDerivative,
    has_tangent,
)
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import PLACES, Fields, Request
from flash_versions.dispatch.version import (
    EXPLICIT,
    VERSIONS,
    Version,
    choose_version,
    differentiable,
)

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
DEVICES = ("cpu", "cuda")
PLAIN = {torch.Tensor, torch.nn.Parameter, type(None)}
OTHERS = [i for i in range(NUM_FIELDS) if i not in PLACES]
operators = getattr(torch.ops, library.ns)
forward_operator: Any = operators.forward.default
backward_operator: Any = operators.backward.default

SINK = PLACES.index(Request._fields.index("sink"))
NO_TRANSFORM = (
    "attention cannot be differentiated by torch.func.grad, vjp or jacrev; use .backward(), "
    "torch.autograd.grad or version='reference'."
)
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


def call_of(name: str, fields: tuple) -> tuple[Call, tuple]:
    """What serves an operator's request, and the tensors of it."""
    tensors = tuple([fields[i] for i in PLACES])
    call, keys = look(tensors, ("operator", name, *[fields[i] for i in OTHERS]))
    if call is None:
        request = Request(*fields)
        with devices.on_device(request.q):
            call = Call(differentiable(name), request)
        call.remember(keys, request, tensors)
    return call, tuple([tensors[i] for i in call.given])


def forward(name: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """(o, lse, statistics) of the request with these fields; see `Version`."""
    call, tensors = call_of(name, fields)
    with devices.on_device(tensors[0]):
        return tensors_alone(call.compute(tensors))


def backward(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dsink) of the request with these fields; dsink is empty without a sink."""
    fields, (o, lse, statistics, *given) = arguments[:NUM_FIELDS], arguments[NUM_FIELDS:]
    call, tensors = call_of(name, fields)
    own = statistics if call.version.num_statistics else None
    found = call.differentiate(tensors, o, lse, own, *given)
    return tensors_alone((*found[:3], next((x for x in found[3:] if x is not None), None)))


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
    """The forward and the backward where torch watches: both by operators. The request's q, k, v
    and sink come again as arguments, so that autograd sees them.
    """

    @staticmethod
    def forward(ctx: Any, name: str, request: Request, *differentiable):  # noqa: D102
        results = below_autograd(forward_operator, name, *request)
        fields: list[Any] = [*request]
        ctx.save_for_backward(*[fields[i] for i in PLACES], *results)
        for i in PLACES:
            fields[i] = None
        ctx.name, ctx.fields = name, fields
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(results[2])
        return results

    @staticmethod
    def backward(ctx: Any, do, dlse, _):  # noqa: D102
        if forward_ad._current_level >= 0 and (has_tangent(do) or has_tangent(dlse)):
            raise RuntimeError(NO_FORWARD_MODE)
        *tensors, o, lse, statistics = ctx.saved_tensors
        fields = ctx.fields.copy()
        for i, x in zip(PLACES, tensors):
            fields[i] = x
        *found, dsink = backward_operator(ctx.name, *fields, o, lse, statistics, do, dlse)
        return None, None, *found, None if tensors[SINK] is None else dsink


def forward_with_gradient(name: str, *fields: Any) -> tuple[torch.Tensor, ...]:
    """The forward operator as autograd calls it: a node if a gradient is asked for."""
    request = Request(*fields)
    if request.needs_grad:
        return Node.apply(name, request, request.q, request.k, request.v, request.sink)
    if is_plain(request):
        return forward(name, *fields)
    return below_autograd(forward_operator, name, *fields)


def is_plain(request: Request) -> bool:
    """Whether nothing watches operations on the tensors of a request, which are on a CPU or a GPU:
    no compiler, no dispatch mode, no transform, no trace, no subclass.
    """
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    values: tuple[Any, ...] = request
    if values[0].device.type not in DEVICES:
        return False
    types = {type(values[i]) for i in PLACES}
    return types <= PLAIN


def backward_without_gradient(name: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The backward operator as autograd calls it."""
    if is_plain(Request(*arguments[:NUM_FIELDS])):
        found = backward(name, *arguments)
    else:
        found = below_autograd(backward_operator, name, *arguments)
    if torch.is_grad_enabled():
        return FirstDerivative.apply(found, *[x for x in arguments if isinstance(x, torch.Tensor)])
    return found


def run(
    name: str | Version, request: Request, keys: tuple | None = None, tensors: tuple = ()
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, lse) of a request by the version of that name, or by the newest that supports it
    ("auto"); differentiable. A baseline may give None for the LSE. With keys, what serves the call
    of these tensors also serves later ones.

    An operator costs tens of microseconds on the host, as much as launching the kernels. So a
    request of plain tensors that nothing watches runs the same code without it.

    Raises:
        ValueError: no version serves the request, or an operator would have to find one by its name
            that is not registered.
        RuntimeError: a forward-mode derivative is asked for, or a gradient by torch.func.
    """
    version = choose_version(name, request)
    if version.backward is None and not (request.precision and request.needs_grad):
        o, lse, _ = version.forward(request)
        return o, lse
    if forward_ad._current_level >= 0:
        raise RuntimeError(NO_FORWARD_MODE)
    if keys is not None or is_plain(request):
        with devices.on_device(request.q):
            call = Call(version, request)
            call.remember(keys, request, tensors)
            fields: tuple[Any, ...] = request  # of which some may be copies of the caller's
            return call(tuple([fields[i] for i in PLACES]))
    if (VERSIONS | EXPLICIT).get(version.name) is not version:
        raise ValueError(
            f"version {version.name!r} is not registered; torch.compile, vmap and dispatch modes "
            f"find a version by its name: call it without them, or put it in a file and give the "
            f"name that load_version knows it by."
        )
    try:
        o, lse, _ = forward_operator(version.name, *request)
    except RuntimeError as error:
        if "functorch" in str(error):  # torch tells the operator's author what to write
            raise RuntimeError(NO_TRANSFORM) from error
        raise
    return o, lse


for device in DEVICES:
    library.impl("forward", forward, device.upper())
    library.impl("backward", backward, device.upper())
library.impl("forward", forward_with_gradient, "Autograd")
library.impl("backward", backward_without_gradient, "Autograd")
torch.library.register_fake(FORWARD, fake_forward, lib=library)
torch.library.register_fake(BACKWARD, fake_backward, lib=library)
