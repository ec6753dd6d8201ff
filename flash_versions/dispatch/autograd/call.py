"""A call of attention: what serves it, found once for all calls like it; and its node of autograd.

A key has all that decides how a call is served (`look` in `dispatch/launch.c`): options, and of
each tensor its type, shape, strides, alignment, whether it requires grad. A call with a key that
came before enters few functions. In a model, its code and data have left the CPU's caches since the
call before, and a backward runs in a thread that has just woken up: there, each function that is
entered takes several times as long as in a loop.
"""

from typing import Any

import torch
from torch.autograd import forward_ad

from flash_versions.dispatch.autograd.compute import (
    Results,
    planned,
    planned_backward,
    run_backward,
)
from flash_versions.dispatch.autograd.derivatives import (
    NO_FORWARD_MODE,
    FirstDerivative,
    has_tangent,
)
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.launch import native
from flash_versions.dispatch.request import INTERVALS, PLACES, PLANS, Request, for_each_head
from flash_versions.dispatch.version import Version

MAX_KNOWN = 4096
known: dict[bytes, "Call"] = {}  # calls that came before, by their keys
similar: dict[bytes, "Call"] = {}  # one for each key that calls of other lengths share
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # a torch without CUDA has none

CUTS_OF_QUERIES, CUTS_OF_KEYS = map(Request._fields.index, ("cu_seqlens_q", "cu_seqlens_k"))
INTERVAL_PLACES = [Request._fields.index(name) for name in INTERVALS]
SINK = Request._fields.index("sink")
WINDOW_RIGHT = Request._fields.index("window_right")
DETERMINISTIC = Request._fields.index("deterministic")


def look(tensors: tuple, options: tuple) -> tuple["Call | None", tuple | None]:
    """What serves a call, or None, and its keys: those of `launch.c`, or None if it is unusual: not
    on the current GPU, watched or changed by something of torch, such as autocast, or with an
    argument that has to be checked or copied.

    Args:
        tensors: all that a request can have, in order; None where they are not given.
        options: the other arguments.
    """
    if current_device is None or not (getattr(tensors[0], "is_cuda", False) or devices.assumed):
        return None, None
    module = native()
    if module is None or forward_ad._current_level >= 0:
        return None, None
    if torch.is_autocast_enabled() and is_cast(*tensors[:3]):
        return None, None
    keys = module.look(current_device(), tensors, options)
    if keys is None:
        return None, None
    call = known.get(keys[0])
    if call is None and keys[1] is not None and (like := similar.get(keys[1])) is not None:
        call = like.resized(keys[0], tensors[:3])
    return call, keys


def is_cast(*tensors: Any) -> bool:
    """Whether autocast, which is on, changes one of them."""
    dtype = torch.get_autocast_dtype("cuda")
    return any(getattr(x, "dtype", None) != dtype for x in tensors)


class Call:
    """How a request is served: everything but the tensors, which come from call to call.

    Attributes:
        values: the fields of the request, None in the place of tensors.
        places: the fields that are tensors, in order; given, the same counted among PLACES. Packed
            ones of q, k and v may come as the caller's (total, heads, head_dim); their results and
            gradients then have no batch, too. An interval mask may come as the caller's, or
            expanded.
        one_cut: cu_seqlens_q cuts the keys, too.
        intervals: the places of an interval mask.
        forward: computes the results of a request like this, of this kind (`Version.kind_of`).
        gradients: the same of its gradients, by whether they must be deterministic. Prepared in the
            forward: the backward's thread is slower.
    """

    def __init__(self, version: Version, request: Request) -> None:
        values: list[Any] = [*request]
        cuts = request.cu_seqlens_q
        self.one_cut = cuts is not None and request.cu_seqlens_k is cuts
        if self.one_cut:
            values[CUTS_OF_KEYS] = None
        self.places = [i for i in PLACES if values[i] is not None]
        for i in self.places:
            values[i] = None
        self.given = [PLACES.index(i) for i in self.places]
        self.version, self.values = version, values
        self.intervals = [i for i in self.places if i in INTERVAL_PLACES]
        self.needs_grad, self.return_lse = request.needs_grad, request.return_lse
        self.kind: tuple | None = None
        self.plan(request)

    def plan(self, request: Request) -> None:
        """Find what computes the request; if the kind is not None, it is the request's."""
        self.strides = [request.q.stride(), request.k.stride(), request.v.stride()]
        self.forward: Any
        self.forward, self.kind = planned(self.version, request, self.kind)
        self.steps = getattr(self.forward, "steps", None)
        self.gradients: dict[bool, Any] = {}
        if self.needs_grad:
            self.find_gradients(request)

    def resized(self, key: bytes, tensors: tuple[torch.Tensor, ...]) -> "Call":
        """The call of this key, whose tensors have other lengths."""
        made: Call = object.__new__(Call)
        made.__dict__ = self.__dict__.copy()
        made.plan(self.request(tensors))
        if getattr(made.forward, "final", True):
            keep(known, key, made)
        return made

    def find_gradients(self, request: Request) -> Any:
        """What computes gradients; None: it is asked anew."""
        deterministic = request.is_deterministic
        found = self.gradients.get(deterministic, self)
        if found is self or not getattr(found, "final", True):
            found = planned_backward(self.version, request, self.kind)
            self.gradients[deterministic] = found
        return found

    def request(self, tensors: tuple[torch.Tensor, ...]) -> Request:
        """The request for these tensors."""
        values = self.values.copy()
        values[:3] = tensors[:3]
        if len(tensors) == 3:
            return tuple.__new__(Request, values)
        for i, x in zip(self.places, tensors):
            values[i] = x
        values[:3] = [x.unsqueeze(0) if x.dim() == 3 else x for x in tensors[:3]]
        for i in self.intervals:
            values[i] = for_each_head(values[i], values[1].shape[0], values[1].shape[2])
        if self.one_cut:
            values[CUTS_OF_KEYS] = values[CUTS_OF_QUERIES]
        return tuple.__new__(Request, values)

    def compute(self, tensors: tuple[torch.Tensor, ...]) -> Results:
        """(o, lse, statistics), which is None if the version has none."""
        if self.steps is not None:
            found = self.steps(*tensors)
            if found is not None:
                return found[0], found[1], None
        results = self.forward(self.request(tensors))
        if tensors[0].dim() == 3:
            o, lse, statistics = results
            return o.squeeze(0), lse.squeeze(0), statistics
        return results

    def differentiate(
        self,
        tensors: tuple[torch.Tensor, ...],
        o: torch.Tensor,
        lse: torch.Tensor,
        statistics: torch.Tensor | None,
        do: torch.Tensor | None,
        dlse: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the tensors."""
        asked = self.values[DETERMINISTIC]
        if asked is None:
            asked = torch.are_deterministic_algorithms_enabled()
        steps = getattr(self.gradients.get(asked), "steps", None)
        if (
            steps is not None
            and do is not None
            and dlse is None
            and self.is_usual(tensors, o, lse, do)
        ):
            found = steps(*tensors, o, lse, do)
            if found is not None:
                return found[:3]
        request = self.request(tensors)
        if tensors[0].dim() == 3:
            o, lse = o.unsqueeze(0), lse.unsqueeze(0)
            do, dlse = (x if x is None else x.unsqueeze(0) for x in (do, dlse))
        gradients = self.find_gradients(request)
        *found, dsink = run_backward(self.version, request, o, lse, statistics, do, dlse, gradients)
        found = [dx.squeeze(0) if x.dim() == 3 else dx for dx, x in zip(found, tensors)]
        return *found, *[dsink if i == SINK else None for i in self.places[3:]]

    def is_usual(self, tensors: tuple, *others: torch.Tensor) -> bool:
        """Whether tensors of a backward are as the forward had them, and the others contiguous."""
        for x in others:
            if not x.is_contiguous() or x.is_neg():
                return False
        if current_device() != tensors[0].get_device():
            return False
        return [x.stride() for x in tensors] == self.strides

    def __call__(self, tensors: tuple) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(o, lse) for all tensors that a request can have; differentiable. lse may be None if it
        is not asked for.
        """
        given = self.given
        tensors = tensors[:3] if len(given) == 3 else tuple([tensors[i] for i in given])
        if not self.needs_grad:
            o, lse, _ = self.compute(tensors)
            return o, lse
        found = apply(self, *tensors)
        return found if self.return_lse else (found, None)

    def remember(self, keys: tuple | None, request: Request, tensors: tuple) -> None:
        """Serve later calls of these keys, unless the request has others than the caller's tensors,
        such as copies, or tensors that know more than what the keys say.
        """
        fields: tuple[Any, ...] = request
        if keys is None or not getattr(self.forward, "final", True):
            return
        if any(hasattr(fields[i], PLANS) for i in self.intervals):
            return
        for i, place in zip(self.given[3:], self.places[3:]):
            if tensors[i] is None or tensors[i].data_ptr() != fields[place].data_ptr():
                return
        keep(known, keys[0], self)
        if keys[1] is not None and self.kind is not None and fields[WINDOW_RIGHT] in (None, 0):
            keep(similar, keys[1], self)


def keep(calls: dict[bytes, Call], key: bytes, call: Call) -> None:
    """Note what serves a key."""
    if len(calls) >= MAX_KNOWN:
        calls.clear()
    calls[key] = call


class Node(torch.autograd.Function):
    """The forward and the backward of a call where nothing watches operations."""

    @staticmethod
    def forward(ctx: Any, call: Call, *tensors):  # noqa: D102
        o, lse, statistics = call.compute(tensors)
        ctx.save_for_backward(*tensors, o, lse, statistics)
        ctx.call = call
        if not call.return_lse:
            return o
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do, dlse=None):  # noqa: D102
        if forward_ad._current_level >= 0 and any(map(has_tangent, (do, dlse))):
            raise RuntimeError(NO_FORWARD_MODE)
        *tensors, o, lse, statistics = ctx.saved_tensors
        found = ctx.call.differentiate(tuple(tensors), o, lse, statistics, do, dlse)
        if torch.is_grad_enabled():  # create_graph=True
            found = FirstDerivative.apply(found, *tensors[:3], do, dlse)
        return None, *found


# Autograd's own `apply`. `Node.apply` first looks for transforms such as vmap, as `key_of` and
# `operators.is_plain` have done.
apply = super(torch.autograd.Function, Node).apply
