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
    current GPU, in a stream that is not captured into a graph, and nobody watches.
    """
    device = x.get_device()
    if device < 0 or device != torch._C._cuda_getDevice():
        return None
    if torch._C._cuda_isCurrentStreamCapturing() or has_hooks():
        return None
    return device, torch._C._cuda_getCurrentRawStream(device)


def is_quiet() -> bool:
    """Whether nothing of torch watches calls or changes them: torch.compile and torch.export, a
    dispatch mode, a transform such as vmap, forward-mode differentiation, autocast.
    """
    return not (
        torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or torch.is_autocast_enabled("cuda")
    )


def described(x: torch.Tensor, addresses: list[int]) -> tuple:
    """What a call depends on of a tensor; of addresses, which one it shares."""
    address = x.data_ptr()
    same = addresses.index(address) if address in addresses else None
    return x.dtype, x.shape, x.stride(), address % 16, x.requires_grad, x.get_device(), same


def find(tensors: tuple, others: tuple, options: tuple) -> tuple[Any, tuple | None]:
    """A call that was served before, if it was, and its key; the key of a call that cannot be
    replayed is None.

    Args:
        tensors: q, k and v.
        others: the optional tensors, or None.
        options: the other arguments.
    """
    if not is_quiet() or type(tensors[0]) not in PLAIN:
        return None, None
    place = place_of(tensors[0])
    if place is None:
        return None, None
    key = [*place, torch.is_grad_enabled(), *options, *map(type, options)]
    addresses: list[int] = []
    for x in (*tensors, *others):
        if x is None:
            key.append(None)
            continue
        if type(x) not in PLAIN or x.is_neg():
            return None, None
        if len(addresses) > 2 and not x.is_contiguous():  # not q, k or v: it is copied
            return None, None
        key += described(x, addresses)
        addresses.append(x.data_ptr())
    if 0 in addresses:  # an empty tensor
        return None, None
    try:
        found = tuple(key)
        return known.get(found), found
    except TypeError:  # an option that is not hashable
        return None, None


def keep(key: tuple, call: Any) -> None:
    """Keep a call for others with its key."""
    if len(known) >= MAX_KEYS:
        known.clear()
    known[key] = call
