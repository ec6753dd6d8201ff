"""A call that came often: its kernels are recorded, then replayed (`dispatch/replay`)."""

from typing import Any

import torch
from torch.autograd import forward_ad

from flash_versions.dispatch.autograd.compute import run_backward, run_forward
from flash_versions.dispatch.autograd.derivatives import (
    NO_FORWARD_MODE,
    FirstDerivative,
    has_tangent,
)
from flash_versions.dispatch.replay import keys
from flash_versions.dispatch.replay.script import Returned
from flash_versions.dispatch.replay.tape import Tape
from flash_versions.dispatch.request import (
    INTERVALS,
    PLACES,
    PLANS,
    Request,
    check_qkv,
    check_together,
    of_each_key,
)
from flash_versions.dispatch.version import VERSIONS, Version


class Call:
    """How a request is served: everything but the tensors, which come from call to call.

    Attributes:
        fields: the request without its tensors; values, the same as a list.
        places: the fields that are tensors, in order. Packed q, k and v may come as the caller's
            (total, heads, head_dim); results and gradients then have no batch, too. An interval
            mask may come as the caller's, or expanded.
        one_cut: cu_seqlens_q cuts the keys, too.
        intervals: the places of an interval mask.
        forward: the tape of `compute`.
        backwards: the tapes of `gradients`, found as calls are in `keys.known`. A key has what
            gradients depend on beside the call and its tensors.
    """

    def __init__(self, version: Version, request: Request, differentiated: bool) -> None:
        values: list[Any] = [*request]
        cuts = request.cu_seqlens_q
        self.one_cut = cuts is not None and request.cu_seqlens_k is cuts
        if self.one_cut:
            values[CUTS_OF_KEYS] = None
        self.places = [i for i in PLACES if values[i] is not None]
        for i in self.places:
            values[i] = None
        self.version, self.values, self.differentiated = version, values, differentiated
        self.fields = Request(*values)
        self.intervals = [i for i in self.places if i in INTERVAL_PLACES]
        self.forward = Tape()
        self.backwards: dict[tuple, keys.Kept] = {}

    def tensors(self, request: Request) -> tuple[torch.Tensor, ...]:
        """Those of a request that is like this call's."""
        values: tuple[Any, ...] = request
        return tuple([values[i] for i in self.places])

    def request(self, tensors: tuple[torch.Tensor, ...]) -> Request:
        """The request for these tensors."""
        values = self.values.copy()
        for i, x in zip(self.places, tensors):
            values[i] = x
        for i in (0, 1, 2):  # q, k and v
            if tensors[i].dim() == 3:
                values[i] = tensors[i].unsqueeze(0)
        for i in self.intervals:
            values[i] = of_each_key(Request._fields[i], values[i], {}, values[1])
        if self.one_cut:
            values[CUTS_OF_KEYS] = values[CUTS_OF_QUERIES]
        return Request(*values)

    def compute(self, *tensors: torch.Tensor) -> Returned:
        """(o, lse, statistics) by the kernels that were chosen; o alone where the others are not
        asked for: they are temporaries of the tape then.
        """
        request = self.request(tensors)
        check_qkv(request.q, request.k, request.v)  # of these lengths
        check_together(request)
        o, lse, statistics = run_forward(self.version, request)
        if not (self.differentiated or self.fields.return_lse):
            return o.squeeze(0) if tensors[0].dim() == 3 else o, None, None
        if tensors[0].dim() == 3:
            o, lse = o.squeeze(0), lse.squeeze(0)
        return o, lse, statistics

    def gradients(self, *tensors: torch.Tensor | None) -> Returned:
        """The gradients of the call's tensors; behind these come o, lse, statistics if the version
        has any, do, and dlse, which may be missing.
        """
        inputs: Any = tensors[: len(self.places)]
        o, lse, *others = tensors[len(self.places) :]
        statistics = others.pop(0) if self.version.num_statistics else None
        do, dlse = (*others, None)[:2]
        assert o is not None and lse is not None
        if inputs[0].dim() == 3:
            o, lse = o.unsqueeze(0), lse.unsqueeze(0)
            do, dlse = (x if x is None else x.unsqueeze(0) for x in (do, dlse))
        request = self.request(inputs)
        *found, dsink = run_backward(self.version, request, o, lse, statistics, do, dlse)
        others = [dsink if i == SINK else None for i in self.places[3:]]
        if inputs[0].dim() == 3:
            found = [dx.squeeze(0) for dx in found]
        return *found, *others

    def replayed_gradients(self, tensors: tuple[torch.Tensor, ...]) -> Returned:
        """`gradients` of a call that is replayed, if do is given."""
        if (place := keys.place_of(tensors[0])) is None:
            return self.gradients(*tensors)
        key = *place, self.fields.is_deterministic, len(tensors)
        for fits, tape in self.backwards.get(key, ()):
            if fits(*tensors):
                return tape(self.gradients, tensors, place[1])
        if not (keys.is_quiet() and keys.are_apart(tensors)):
            return self.gradients(*tensors)
        tape = Tape()
        keys.keep(self.backwards.setdefault(key, []), tensors, tape)
        return tape(self.gradients, tensors, place[1])


CUTS_OF_QUERIES, CUTS_OF_KEYS = map(Request._fields.index, ("cu_seqlens_q", "cu_seqlens_k"))
INTERVAL_PLACES = [Request._fields.index(name) for name in INTERVALS]
SINK = Request._fields.index("sink")


def find_call(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: tuple, window: Any, optional: tuple
) -> tuple[Any, tuple[torch.Tensor, ...], Any]:
    """The call that serves these arguments of `attention`, as `keys.find` returns it."""
    slopes, sink, cuts, cuts_k, lengths, first, table, starts, ends = optional
    # With pages, cu_seqlens_k=cu_seqlens_q gives lengths; without cu_seqlens_k, pages are full.
    one_cut = cuts_k is cuts
    given: bool | tuple[bool, ...] | None = None  # which optional tensors, for the key
    others: tuple = ()
    few = slopes is sink is lengths is first is table is starts is ends is None
    if not (few and (one_cut or cuts_k is None)):
        if hasattr(starts, PLANS) or hasattr(ends, PLANS):
            return keys.NOT_FOUND  # their lists are memory of which a replay does not know
        rest = lengths, first, table, starts, ends
        others = slopes, sink, cuts, None if one_cut else cuts_k, *rest
        given = one_cut, *[x is not None for x in others]
        others = tuple([x for x in others if x is not None])
    elif cuts is not None:
        given, others = one_cut, (cuts,)
    if isinstance(window, tuple):
        window = *window, *map(type, window)
    return keys.find(q, k, v, others, (*options, window, given))


def find(name: str, request: Request) -> tuple[Any, tuple[torch.Tensor, ...], Any]:
    """The call that an operator's request is like, as `keys.find` returns it."""
    if request.precision is not None or request.dropout_p or request.has_intervals:
        return keys.NOT_FOUND
    values: list[Any] = [*request]
    one_cut = request.cu_seqlens_k is request.cu_seqlens_q
    if one_cut:
        values[CUTS_OF_KEYS] = None
    others = tuple([x for i in PLACES[3:] if (x := values[i]) is not None])
    given = tuple([values[i] is not None for i in PLACES[3:]])
    for i in PLACES:
        values[i] = None
    return keys.find(*request[:3], others, ("operator", name, one_cut, given, *values))


def forward_of(version: Version, request: Request) -> Returned:
    """`run_forward` for an operator: if requests like this came often, by a tape."""
    call, tensors, where = find(version.name, request)
    if call is not None:
        return call.forward(call.compute, tensors, where)
    if where is not None and VERSIONS.get(version.name) is version:
        where.keep(Call(version, request, differentiated=True))
    return run_forward(version, request)


def backward_of(
    version: Version,
    request: Request,
    o: torch.Tensor,
    lse: torch.Tensor,
    statistics: torch.Tensor,
    do: torch.Tensor | None,
    dlse: torch.Tensor | None,
) -> Returned:
    """`run_backward` for an operator: if there is a call for its forward, by a tape."""
    own = statistics if version.num_statistics else None
    call, tensors, _ = (None, (), None) if do is None else find(version.name, request)
    if call is None:
        return run_backward(version, request, o, lse, own, do, dlse)
    given = [x for x in (o, lse, own, do, dlse) if x is not None]
    found = call.replayed_gradients((*tensors, *given))
    sinks = [x for i, x in zip(call.places, found) if i == SINK]
    return *found[:3], *(sinks or [None])


def serve(
    call: Call, tensors: tuple[torch.Tensor, ...], stream: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, lse) of a call with these tensors, differentiable; lse is None if it is not asked for.
    With a stream, a tape may be played there.
    """
    if not call.differentiated:
        o, lse, _ = call.forward(call.compute, tensors, stream)
        return o, lse
    apply = Attention.apply if stream is None else apply_plainly
    if call.fields.return_lse:
        return apply(call, stream, *tensors)
    return apply(call, stream, *tensors), None


class Attention(torch.autograd.Function):
    """The forward and the backward of a call, for autograd without an operator."""

    @staticmethod
    def forward(ctx: Any, call, stream, *tensors):  # noqa: D102
        o, lse, statistics = call.forward(call.compute, tensors, stream)
        if statistics is None:
            ctx.save_for_backward(*tensors, o, lse)
        else:
            ctx.save_for_backward(*tensors, o, lse, statistics)
        ctx.call, ctx.is_played = call, stream is not None
        if not call.fields.return_lse:
            return o
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do, dlse=None):  # noqa: D102
        if forward_ad._current_level >= 0 and any(map(has_tangent, (do, dlse))):
            raise RuntimeError(NO_FORWARD_MODE)
        call, saved = ctx.call, ctx.saved_tensors
        tensors = (*saved, do) if dlse is None else (*saved, do, dlse)
        played = ctx.is_played and do is not None
        gradients = call.replayed_gradients(tensors) if played else call.gradients(*tensors)
        if torch.is_grad_enabled():  # create_graph=True
            gradients = FirstDerivative.apply(gradients, *saved[:3], do, dlse)
        return None, None, *gradients


# Autograd's own `apply`. `Attention.apply` first looks for transforms such as vmap, as `keys.find`
# has done.
apply_plainly = super(torch.autograd.Function, Attention).apply
