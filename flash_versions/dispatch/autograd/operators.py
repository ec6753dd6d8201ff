"""The kernels as operators of torch, `flash_versions::forward` and `::backward`: one opaque call
with known shapes for autograd, torch.compile, torch.export and checkpointing.

Both take a version's name and the fields of a `Request`. They are custom operators and not
functions torch can trace into, because the kernels may also be simulated.
"""

import sys
from typing import Any, get_args

import torch

from flash_versions.dispatch.autograd.compute import empty_results, run_backward, run_forward
from flash_versions.dispatch.request import Fields, Request
from flash_versions.dispatch.version import differentiable

NAMES = Request._fields
KINDS = {torch.Tensor: "Tensor", float: "float", int: "SymInt", bool: "bool", str: "str"}
REQUEST = ", ".join(  # the fields of a request as the arguments of an operator
    f"{KINDS[kind]} {name}" if kind in KINDS else f"{KINDS[get_args(kind)[0]]}? {name}"
    for name, kind in Fields.__annotations__.items()
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


def refuse_double_backward(ctx: Any, *gradients: Any) -> tuple:
    """There is no second derivative."""
    raise RuntimeError(
        "attention has no second derivative: its backward was itself asked for a gradient; use "
        "version='reference' where create_graph=True is needed."
    )


@torch.library.custom_op(
    "flash_versions::forward",
    mutates_args=(),
    schema=f"(str version, {REQUEST}) -> (Tensor, Tensor, Tensor)",
)
def forward(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """(o, lse, statistics) of the request with these fields; see `Version`."""
    request = Request(*arguments)
    o, lse, statistics = run_forward(differentiable(version), request)
    return o, lse, o.new_empty(0) if statistics is None else statistics


@torch.library.custom_op(
    "flash_versions::backward",
    mutates_args=(),
    schema=(
        f"(str version, {REQUEST}, Tensor o, Tensor lse, Tensor statistics, Tensor? do, "
        "Tensor? dlse) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
)
def backward(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """(dq, dk, dv, dsink) of the request with these fields; dsink is empty without a sink."""
    request = Request(*arguments[: len(NAMES)])
    *gradients, dsink = run_backward(differentiable(version), request, *arguments[len(NAMES) :])
    return *gradients, gradients[0].new_empty(0) if dsink is None else dsink


@forward.register_fake
def fake_forward(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Results of the right shapes, types and strides."""
    request = Request(*arguments)
    refuse_ahead_of_time(request.q.device)
    o, lse, statistics = empty_results(differentiable(version), request)
    return o, lse, o.new_empty(0) if statistics is None else statistics


@backward.register_fake
def fake_backward(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of the right shapes, types and strides."""
    request = Request(*arguments[: len(NAMES)])
    like = [x.new_empty(x.shape) for x in (request.q, request.k, request.v)]
    sink = request.sink
    return *like, request.q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def save_for_backward(ctx: Any, inputs: tuple, output: tuple) -> None:
    """Keep a request and its results."""
    ctx.set_materialize_grads(False)
    version, *arguments = inputs
    tensors = [x if isinstance(x, torch.Tensor) else None for x in arguments]
    ctx.save_for_backward(*tensors, *output)
    ctx.version = version
    ctx.others = [None if isinstance(x, torch.Tensor) else x for x in arguments]


def backward_of_forward(ctx: Any, do: Any, dlse: Any, _: Any) -> tuple:
    """The gradient of every input of the forward operator."""
    saved = ctx.saved_tensors
    tensors, results = saved[: len(NAMES)], saved[len(NAMES) :]
    arguments = [other if x is None else x for x, other in zip(tensors, ctx.others)]
    dq, dk, dv, dsink = torch.ops.flash_versions.backward(
        ctx.version, *arguments, *results, do, dlse
    )
    gradients = dict.fromkeys(NAMES) | {"q": dq, "k": dk, "v": dv}
    if arguments[NAMES.index("sink")] is not None:
        gradients["sink"] = dsink
    return None, *gradients.values()


forward.register_autograd(backward_of_forward, setup_context=save_for_backward)
backward.register_autograd(refuse_double_backward, setup_context=lambda ctx, inputs, output: None)
