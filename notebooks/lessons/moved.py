"""How many bytes the operations of PyTorch move: each reads its inputs and writes a result."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def bytes_of(values: Any) -> dict[int, int]:
    """Bytes of the tensors among values, by address."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]
    return {x.data_ptr(): x.numel() * x.element_size() for x in tensors}


class Moved(TorchDispatchMode):
    """Inside, notes the operations that move something, with their bytes, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        read, written = bytes_of((args, kwargs)), bytes_of(result)
        if written.keys() - read.keys():  # else a view
            moved = sum(read.values()) + sum(written.values())
            self.operations.append((func.__name__.partition(".")[0], moved))
        return result


def bytes_moved(function: Callable[..., Any], *inputs: torch.Tensor) -> list[tuple[str, int]]:
    """The operations of a function, each with the bytes that it reads and writes."""
    with Moved() as found:
        function(*inputs)
    return found.operations
