"""What checks of kernels share: accesses are watched, and PyTorch does not compute the result."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from flash_versions.mine.guard import MARGIN, Guarded, guarded_input, guarding

EXPONENTIALS = frozenset(("exp", "exp2", "pow", "rpow", "ldexp"))
COMPUTES = EXPONENTIALS | {
    *("softmax", "log_softmax", "logsumexp", "sum", "max", "amax", "maximum", "where"),
    *("mm", "bmm", "matmul", "rmatmul", "einsum", "scaled_dot_product_attention"),
}
CLOSE = 1e-4  # of fp32 numbers of about 1, after sums of some hundred


class Without(TorchFunctionMode):
    """Inside, functions of PyTorch with these names raise an AssertionError."""

    def __init__(self, names: frozenset[str], why: str) -> None:
        super().__init__()
        self.names, self.why = names, why

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.strip("_")
        assert name not in self.names, f"your function calls `{name}` of PyTorch; {self.why}."
        return func(*args, **kwargs or {})


class Accesses:
    """What interpreted kernels load and store: how often, and the first access out of bounds."""

    def __init__(self, tensors: list[torch.Tensor], allocated: list[Guarded]) -> None:
        self.tensors, self.allocated = tensors, allocated
        self.stores, self.fault = 0, ""

    def allowed(self, what: str, pointers: TensorHandle, mask: TensorHandle) -> TensorHandle:
        """The mask of an access without its addresses out of bounds."""
        size = pointers.get_element_ty().primitive_bitwidth // 8
        wanted, good = mask.data.astype(bool), np.zeros(pointers.data.shape, dtype=bool)
        place = "memory that is no tensor"
        for x in (*self.tensors, *(one.tensor for one in self.allocated)):
            index = (pointers.data.astype(np.int64) - x.data_ptr()) // size
            good |= (index >= 0) & (index < x.numel())
            near = wanted & ~good & (index >= -MARGIN) & (index < x.numel() + MARGIN)
            if near.any():
                place = f"element {index[near][0]} of a tensor that has {x.numel()}"
        if (wanted & ~good).any() and not self.fault:
            self.fault = f"a {what} goes to {place}: the {what} needs another mask."
        return TensorHandle(wanted & good, mask.dtype)


@contextmanager
def watching(tensors: list[torch.Tensor], allocated: list[Guarded]) -> Iterator[Accesses]:
    """Inside, kernels access these tensors and nothing else; a wrong access is noted and not made.

    Args:
        tensors: contiguous, those that exist.
        allocated: the list of `guarding`, which grows.
    """
    found = Accesses(tensors, allocated)
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        return load(self, pointers, found.allowed("load", pointers, mask), *rest, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        found.stores += 1
        return store(self, pointers, value, found.allowed("store", pointers, mask), *rest)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", masked_load),
        patch.object(InterpreterBuilder, "create_masked_store", masked_store),
    ):
        yield found


def run_guarded(function: Callable[..., Any], *inputs: Any) -> Any:
    """Call a function that launches a kernel, with every access watched.

    Args:
        function: allocates its results with `torch.empty_like` or `torch.empty`.
        inputs: tensors are copied, to memory between margins of NaN.

    Raises:
        AssertionError: the kernel accessed memory outside of the tensors, or the result does not
            come from a kernel.
        NotImplementedError: nothing has computed anything.
    """
    given = [guarded_input(x, float("nan")) if torch.is_tensor(x) else x for x in inputs]
    tensors = [x for x in given if torch.is_tensor(x)]
    with (
        guarding() as allocated,
        watching(tensors, allocated) as accesses,
        Without(COMPUTES, "the kernel has to compute the result"),
        np.errstate(all="ignore"),
    ):
        result = function(*given)
    assert not accesses.fault, accesses.fault
    if not accesses.stores:
        raise NotImplementedError
    return result


def compare(found: Any, truth: torch.Tensor, name: str, which: str) -> None:
    """Refuse a tensor that is not the right one, with the first of its wrong elements."""
    assert torch.is_tensor(found) and found.shape == truth.shape, (
        f"{which}: {name} should be a tensor of shape {tuple(truth.shape)}, not {found!r:.80}."
    )
    right = torch.isclose(found.double(), truth.double(), rtol=CLOSE, atol=CLOSE)
    if not right.all():
        at = tuple((~right).nonzero()[0].tolist())
        raise AssertionError(
            f"{which}: {name}{list(at)} is {found[at]:.4f}; it should be {truth[at]:.4f}."
        )
