"""The kernels as operators of torch, `flash_versions::forward` and `::backward`: one opaque call
with known shapes for autograd, torch.compile, torch.export and checkpointing.

Both take a version's name and the fields of a `Request`. They are custom operators and not
functions torch can trace into, because the kernels may also run in Triton's interpreter.

A custom operator costs tens of microseconds on the host, as much as launching the kernels. So a
call on plain tensors, with nobody watching, runs the same code without it: `run` chooses.
"""

from functools import partial
from typing import Any, get_args

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import remembered
from flash_versions.dispatch.request import PLACES, Request
from flash_versions.dispatch.version import (
    Backward,
    Chosen,
    Forward,
    Version,
    choose_version,
    differentiable,
)

Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
PLAIN = (torch.Tensor, torch.nn.Parameter)
NAMES = Request._fields
KINDS = {torch.Tensor: "Tensor", float: "float", int: "SymInt", bool: "bool", str: "str"}
REQUEST = ", ".join(  # the fields of a request as the arguments of an operator
    f"{KINDS[kind]} {name}" if kind in KINDS else f"{KINDS[get_args(kind)[0]]}? {name}"
    for name, kind in Request.__annotations__.items()
)


def run(name: str | Version, request: Request) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, lse) of a request by the version of that name, or by the newest that supports it
    ("auto"); differentiable. A baseline may give None for the LSE.
    """
    watched, differentiated = is_watched(request), request.needs_grad
    if watched or not isinstance(name, str | Version):  # the latter is refused
        version = choose_version(name, request)
    else:
        version, forward = choose(request, name, differentiated)
    if version.backward is None and differentiated and request.precision is not None:
        # Autograd would take the gradient of the rounding for 1.
        inputs = request.q, request.k, request.v, request.sink
        o, lse = Attention.apply(version, version.forward, request, *inputs)
    elif version.backward is None:
        o, lse, _ = version.forward(request)
    elif forward_ad._current_level >= 0:
        raise RuntimeError(
            "attention has no forward-mode derivative; use version='reference' for torch.func.jvp "
            "and torch.autograd.forward_ad."
        )
    elif watched:
        o, lse, _ = torch.ops.flash_versions.forward(version.name, *request)
    elif differentiated:
        q, k, v, sink = request.q, request.k, request.v, request.sink
        o, lse = Attention.apply(version, forward, request, q, k, v, sink)
    else:
        o, lse, _ = launch_forward(forward, request)
    return o, lse


@remembered
def choose(request: Request, name: str | Version, differentiated: bool) -> tuple[Version, Forward]:
    """The version that serves a request, and what computes its forward there. What a version
    refuses may depend on whether gradients are asked for.
    """
    version = choose_version(name, request)
    return version, choose_forward(request, version)


def choose_forward(request: Request, version: Version) -> Forward:
    """What computes a request: of a version of several kernels one, with its launch planned."""
    if version.backward is None:
        return version.forward
    if max(request.q.shape[1], request.max_kv_length) >= 2**31:
        raise ValueError("q or k is longer than 2^31 - 1 rows, what the kernels count to.")
    if request.q.numel() == 0 or request.batch == 0:
        return partial(nothing_to_launch, version)
    if isinstance(version.forward, Chosen):
        return version.forward.choose(in_vectors(request))
    return version.forward


planned_forward = remembered(choose_forward)


@remembered
def choose_backward(request: Request, version: Version) -> Backward:
    """The same of the backward, of a request that is `in_vectors`."""
    assert version.backward is not None
    if isinstance(version.backward, Chosen):
        return version.backward.choose(request)
    return version.backward


def is_watched(request: Request) -> bool:
    """Whether somebody needs to see an operator: torch.compile or torch.export, a dispatch mode
    (fake tensors, tracing), a tensor subclass, a transform such as vmap.
    """
    if (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or _get_current_dispatch_mode() is not None
    ):
        return True
    level = torch._C._functorch.maybe_get_level
    for x in request:
        if x is not None and isinstance(x, torch.Tensor):
            if type(x) not in PLAIN or level(x) >= 0:
                return True
    return False


def run_forward(version: Version, request: Request) -> Results:
    """(o, lse, statistics), which is None if the version has none."""
    return launch_forward(planned_forward(request, version), request)


def launch_forward(forward: Forward, request: Request) -> Results:
    """The results of what `choose_forward` chose for a request."""
    with devices.on_device(request.q):
        o, lse, statistics = forward(in_vectors(request))
    assert lse is not None  # only a baseline has none
    return narrowed(o, request.v), lse, statistics


def nothing_to_launch(version: Version, request: Request) -> Results:
    """The results of a request without queries."""
    o, lse, statistics = empty_results(version, request)
    return o.zero_(), lse.fill_(float("-inf")), statistics


def in_vectors(request: Request) -> Request:
    """The request with rows of whole 16-byte vectors and no less than a tile's 16 elements, padded
    by zeros, which change no product. 8-bit tensors stay: they are laid out anew anyway.

    With values of fewer than 16 dims, Triton 3.6 compiles a product that reads past its shared
    memory on Hopper.
    """
    if request.precision is not None or not (request.q.shape[3] % 16 or request.v.shape[3] % 16):
        return request
    q, k, v = widened(request.q), widened(request.k), widened(request.v)
    if q is request.q and k is request.k and v is request.v:
        return request
    return request._replace(q=q, k=k, v=v)


def widened(x: torch.Tensor) -> torch.Tensor:
    """x with its last dimension padded as `in_vectors` says; x itself if it needs no padding."""
    dims = x.shape[3]
    missing = max(16 - dims, -dims % (16 // x.element_size()))
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def narrowed(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """x without what `widened` added to `like`."""
    return x if x.shape[3] == like.shape[3] else x[..., : like.shape[3]].contiguous()


def run_backward(
    version: Version,
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor | None,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(dq, dk, dv, dsink); do or dlse is None if nothing depends on o or on the LSE.

    Raises:
        ValueError: the request is in FP8, which has no gradients.
    """
    if request.precision is not None:
        raise ValueError(
            f"precision={request.precision!r} is forward only and a gradient of its result was "
            f"asked for; call it under torch.no_grad(), detach the result, or leave precision out."
        )
    no_gradient = do is None and dlse is None
    if o.numel() == 0 or request.k.numel() == 0 or request.batch == 0 or no_gradient:
        dq, dk, dv = (x.new_zeros(x.shape) for x in (request.q, request.k, request.v))
        dsink = None if request.sink is None else torch.zeros_like(request.sink)
        if dsink is not None and dlse is not None and request.batch > 0:
            dsink += dlse.sum((0, 2))  # no key: the sink alone is the LSE
        return dq, dk, dv, dsink
    if do is None:
        do = o.new_zeros(o.shape)
    elif do.stride(3) != 1 and do.shape[3] > 1:
        do = do.contiguous()  # such as the gradient of a sum: one number for all
    do = do.resolve_neg()
    if dlse is not None:
        dlse = dlse.resolve_neg()
    request, do = without_unseeing(request, do)
    aligned = in_vectors(request)
    with devices.on_device(o):
        dq, dk, dv, dsink = choose_backward(aligned, version)(
            aligned, widened(o), lse, statistics, widened(do), dlse
        )
    return narrowed(dq, request.q), narrowed(dk, request.k), narrowed(dv, request.v), dsink


def without_unseeing(request: Request, do: torch.Tensor) -> tuple[Request, torch.Tensor]:
    """The request and do with 0 in rows of queries that lie in front of their sequence's first key,
    in a batch that is padded on the left. They see no key, and what is NaN there would spread: a
    product of tiles has 0 * NaN in its sums.
    """
    starts, right = request.kv_starts, request.window_right
    if starts is None or right is None or request.cu_seqlens_q is not None:
        return request, do
    q_length, longest = request.q.shape[1], request.max_kv_length
    ends = longest if request.kv_lengths is None else request.kv_lengths.clamp(0, longest)
    first_seeing = q_length - right - (ends - starts.clamp(min=0)).clamp(min=0)
    place = torch.arange(q_length, device=do.device)
    unseeing = (place < first_seeing[:, None])[:, :, None, None]
    return request._replace(q=request.q.masked_fill(unseeing, 0.0)), do.masked_fill(unseeing, 0.0)


def refuse_double_backward(ctx: Any, *gradients: Any) -> tuple:
    """There is no second derivative."""
    raise RuntimeError(
        "attention has no second derivative: its backward was itself asked for a gradient; use "
        "version='reference' where create_graph=True is needed."
    )


class Attention(torch.autograd.Function):
    """The forward and the backward of a version, for autograd without an operator."""

    @staticmethod
    def forward(ctx: Any, version, planned, request, q, k, v, sink):  # noqa: D102
        o, lse, statistics = launch_forward(planned, request)
        ctx.set_materialize_grads(False)
        fields = list(request)
        ctx.save_for_backward(*[fields[i] for i in PLACES], o, lse, statistics)
        for i in PLACES:
            fields[i] = None
        ctx.version, ctx.fields = version, fields
        return o, lse

    @staticmethod
    def backward(ctx: Any, do, dlse):  # noqa: D102
        *tensors, o, lse, statistics = ctx.saved_tensors
        fields = ctx.fields.copy()
        for i, x in zip(PLACES, tensors):
            fields[i] = x
        request = Request(*fields)
        q, k, v = request.q, request.k, request.v
        gradients = run_backward(ctx.version, request, o, lse, statistics, do, dlse)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = FirstDerivative.apply(q, k, v, do, dlse, *gradients)
        return None, None, None, *gradients


class FirstDerivative(torch.autograd.Function):
    """Gradients that cannot be differentiated again."""

    @staticmethod
    def forward(ctx: Any, q, k, v, do, dlse, *gradients):  # noqa: D102
        return tuple(x if x is None else x.clone() for x in gradients)

    backward = staticmethod(refuse_double_backward)


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
    o, lse, statistics = empty_results(differentiable(version), Request(*arguments))
    return o, lse, o.new_empty(0) if statistics is None else statistics


@backward.register_fake
def fake_backward(version: str, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """Gradients of the right shapes, types and strides."""
    request = Request(*arguments[: len(NAMES)])
    like = [x.new_empty(x.shape) for x in (request.q, request.k, request.v)]
    sink = request.sink
    return *like, request.q.new_empty(0) if sink is None else sink.new_empty(sink.shape)


def empty_results(version: Version, request: Request) -> Results:
    """(o, lse, statistics) without their contents; statistics is None if the version has none."""
    q, n = request.q, version.num_statistics
    batch, q_length, heads, _ = q.shape
    o = q.new_empty((batch, q_length, heads, request.v.shape[3]), dtype=request.out_dtype)
    lse = q.new_empty((batch, heads, q_length), dtype=torch.float32)
    return o, lse, lse.new_empty((n, *lse.shape)) if n else None


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
