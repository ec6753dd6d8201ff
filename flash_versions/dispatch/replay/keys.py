"""What decides how a call is served, and the calls that were served before.

A key has what Python knows at once, such as the options. What else a call depends on but for its
lengths, torch compares in C++, as it does before it runs a graph of torch.compile (`alike`).

In a model, a call's code and data have left the CPU's caches since the call before, and a backward
runs in a thread that has just woken up. Then each function that is entered, in Python or in C,
takes several times as long as in a loop, and so does each name that is looked up in `torch._C`. So
every call enters few functions, and they were looked up at import.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad

from flash_versions.dispatch.replay.driver import BOX_ALIGNED, has_hooks

MAX_KEYS = 4096
MAX_ALIKE = 16  # of one key
PLAIN = (torch.Tensor, torch.nn.Parameter)
# A torch without CUDA has none of them.
current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)
is_capturing: Any = getattr(torch._C, "_cuda_isCurrentStreamCapturing", None)
dispatch_modes: Any = torch._C._len_torch_dispatch_stack
is_traced: Any = torch._C._get_tracing_state
transform: Any = torch._C._functorch.peek_interpreter_stack
Guards = getattr(torch._C._dynamo.guards, "TensorGuards", None)  # private: may go in a later torch

# How often a key comes until a call is kept. What comes after that is recorded and compiled, which
# takes as long as several ordinary calls.
OFTEN = 4

Kept = list[tuple[Callable[..., bool], Any]]  # (which tensors, what serves them)
known: dict[tuple, Kept] = {}  # calls that were served
seen: dict[tuple, int] = {}  # how often keys came of which none was kept yet


def place_of(x: torch.Tensor) -> tuple[int, int] | None:
    """(device, stream) where a kernel for this tensor runs, if a tape may be played there: on the
    current GPU, in a stream that is not captured into a graph, without hooks of a profiler.
    """
    if not x.is_cuda:
        return None
    device = x.get_device()
    if device != current_device() or is_capturing() or has_hooks():
        return None
    return device, current_stream(device)


def is_quiet() -> bool:
    """Whether nothing of torch watches calls or changes them: torch.compile and torch.export, a
    dispatch mode, a trace, a transform such as vmap.
    """
    compiled = torch.compiler.is_compiling()  # by this name, which torch.compile 2.10 knows
    return not (compiled or dispatch_modes() or is_traced() or transform() is not None)


def is_cast(*tensors: torch.Tensor) -> bool:
    """Whether autocast, which is on, changes one of them."""
    dtype = torch.get_autocast_dtype("cuda")
    return any(x.dtype != dtype for x in tensors)


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """Whether other tensors are like these, and the thread is in such a state: type, dtype, device,
    requires_grad, and all sizes and strides that are not `varying`; and, as torch knows from the
    dispatch keys of both, what changes the meaning of operations: negative views, inference mode,
    autocast, dispatch modes, tracing, transforms such as vmap. The grad mode is none of these.
    """
    looks: Any = [varying(x, tensors[0]) for x in tensors]
    sizes, strides = [look[0] for look in looks], [look[1] for look in looks]
    assert Guards is not None
    check = Guards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    if not torch.is_autocast_enabled():
        return check
    dtype = torch.get_autocast_dtype("cuda")  # torch compares whether autocast is on, not its dtype
    return lambda *others: torch.get_autocast_dtype("cuda") == dtype and check(*others)


def varying(x: torch.Tensor, q: torch.Tensor) -> tuple[list[int | None], list[int | None]]:
    """(sizes, strides) of a tensor, with None in the place of each that may differ from call to
    call. Fixed are the last two sizes, heads and head dim, of q and of tensors with its dtype and
    number of dims, and all strides up to the smallest stride of a size that may differ.
    """
    sizes: list[int | None] = [None] * x.dim()
    if x.dim() == q.dim() and x.dtype == q.dtype:
        sizes[-2:] = x.shape[-2:]
    least = min([step for step, n in zip(x.stride(), sizes) if n is None], default=None)
    strides = [step if least is None or step <= least else None for step in x.stride()]
    return sizes, strides


def keep(kept: Kept, tensors: Sequence[torch.Tensor], what: Any) -> None:
    """Keep what serves tensors that are like these."""
    if len(kept) >= MAX_ALIKE:
        kept.clear()
    kept.append((alike(tensors), what))


class Slot(NamedTuple):
    """Where a call can be kept: under a key, for tensors like its own."""

    key: tuple
    tensors: tuple[torch.Tensor, ...]

    def keep(self, call: Any) -> None:
        """Keep a call for others like it."""
        if len(known) >= MAX_KEYS:
            known.clear()
        keep(known.setdefault(self.key, []), self.tensors, call)


def find(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: tuple, options: tuple
) -> tuple[Any, tuple[torch.Tensor, ...], Any]:
    """The call that serves these arguments, if one was kept.

    Args:
        q: as `attention` takes it.
        k: likewise.
        v: likewise.
        others: the optional tensors that were given, in the order of `Request`.
        options: the other arguments, and which optional tensors were given.

    Returns:
        (call, tensors, stream) if a call was kept: it serves `tensors`, all that were given.
        (None, tensors, slot) if the key came often and no call was kept: the caller can keep one
        there, see `Slot`.
        (None, (), None) if the call came seldom or cannot be replayed. With a torch without
        `Guards`, none can.
    """
    if Guards is None or not (type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return NOT_FOUND
    if forward_ad._current_level >= 0 or (place := place_of(q)) is None:
        return NOT_FOUND
    tensors = (q, k, v, *others)
    key = *place, torch.is_grad_enabled(), options, *map(type, options)
    try:
        kept = known.get(key, ())
    except TypeError:  # not hashable
        return NOT_FOUND
    for fits, call in kept:
        if fits(*tensors):
            return call, tensors, place[1]
    if key not in known and (times := seen.get(key, 0) + 1) < OFTEN:
        if len(seen) >= MAX_KEYS:
            seen.clear()
        seen[key] = times
        return NOT_FOUND
    if not (is_quiet() and are_apart(tensors)):
        return NOT_FOUND
    if torch.is_autocast_enabled() and is_cast(q, k, v):  # on GPUs
        return NOT_FOUND
    if not all(x.is_contiguous() for x in tensors[3:]):  # it would be copied
        return NOT_FOUND
    return None, tensors, Slot(key, tensors)


NOT_FOUND: tuple[None, tuple, None] = (None, (), None)


def are_apart(tensors: Sequence[Any]) -> bool:
    """Whether a call with these tensors can be recorded: they are torch's own, are aligned, have
    memory, and that is what they say; and no two begin at one address, by which a recording knows
    them. None is any.
    """
    given = [x for x in tensors if x is not None]
    if not all(type(x) in PLAIN and not x.is_neg() for x in given):
        return False
    addresses = [x.data_ptr() for x in given]
    return len({0, *addresses}) > len(addresses) and not any(a % BOX_ALIGNED for a in addresses)
