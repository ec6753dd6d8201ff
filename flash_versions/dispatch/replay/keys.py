"""What decides how a call is served, as a key; and the calls that were served, by key."""

from typing import Any

import torch
from torch.autograd import forward_ad

from flash_versions.dispatch.replay.driver import has_hooks

MAX_KEYS = 4096
PLAIN = (torch.Tensor, torch.nn.Parameter)

known: dict[tuple, Any] = {}  # calls that were served, the last few thousand


def place_of(x: torch.Tensor) -> tuple[int, int] | None:
    """(device, stream) where a kernel for this tensor runs, if a tape may be played there: on the
    current GPU, in a stream that is not captured into a graph, without hooks of a profiler.
    """
    if not x.is_cuda:
        return None
    device = x.get_device()
    if device != torch._C._cuda_getDevice():
        return None
    if torch._C._cuda_isCurrentStreamCapturing() or has_hooks():
        return None
    return device, torch._C._cuda_getCurrentRawStream(device)


def is_quiet() -> bool:
    """Whether nothing of torch watches calls or changes them: torch.compile and torch.export, a
    dispatch mode, a transform such as vmap, forward-mode differentiation.
    """
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
    )


def is_cast(*tensors: torch.Tensor) -> bool:
    """Whether autocast, which is on, changes one of them."""
    dtype = torch.get_autocast_dtype("cuda")
    return any(x.dtype != dtype for x in tensors)


def described(x: torch.Tensor, addresses: list[int]) -> tuple:
    """What a call depends on of a tensor; of addresses, which one it shares."""
    address = x.data_ptr()
    same = addresses.index(address) if address in addresses else None
    return x.dtype, x.shape, x.stride(), address % 16, x.requires_grad, x.get_device(), same


def find(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, others: tuple, options: tuple
) -> tuple[Any, tuple | None]:
    """A call that was served before, if it was, and its key; the key of a call that cannot be
    replayed is None.

    Args:
        q: as `attention` takes it.
        k: likewise.
        v: likewise.
        others: the optional tensors, each may be None; () if all are.
        options: the other arguments.
    """
    if not (is_quiet() and type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN):
        return None, None
    if torch.is_autocast_enabled("cuda") and is_cast(q, k, v):
        return None, None
    place = place_of(q)
    a, b, c = q.data_ptr(), k.data_ptr(), v.data_ptr()
    if place is None or not (a and b and c) or q.is_neg() or k.is_neg() or v.is_neg():
        return None, None
    key = (  # what `described` says, in one go: half of a call's time goes into this
        *place, torch.is_grad_enabled(), options, *map(type, options),
        q.dtype, q.shape, q.stride(), a % 16, q.requires_grad,
        k.dtype, k.shape, k.stride(), b % 16, k.requires_grad, k.get_device(),
        v.dtype, v.shape, v.stride(), c % 16, v.requires_grad, v.get_device(),
        a == b, a == c, b == c,
    )  # fmt: skip
    addresses = [a, b, c]
    for x in others:
        if x is None:
            key += (None,)
            continue
        if type(x) not in PLAIN or x.is_neg() or not (x.is_contiguous() and x.data_ptr()):
            return None, None  # it would be copied, or is empty
        key += described(x, addresses)
        addresses.append(x.data_ptr())
    try:
        return known.get(key), key
    except TypeError:  # an option that is not hashable
        return None, None


def keep(key: tuple, call: Any) -> None:
    """Keep a call for others with its key."""
    if len(known) >= MAX_KEYS:
        known.clear()
    known[key] = call
