"""What checks of kernels share: memory in which a wrong access shows; whether a kernel did it."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime import interpreter, jit

from flash_versions.mine.guard import guarded_input, guarding


def run_guarded(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """Call a function that launches a kernel, with NaN behind its inputs and guarded memory.

    Args:
        function: allocates its results with `torch.empty_like` or `torch.empty`.
        inputs: are copied.

    Raises:
        AssertionError: the kernel wrote behind a tensor.
    """
    with guarding() as allocated:
        result = function(*(guarded_input(x, float("nan")) for x in inputs))
    for one in allocated:
        where = one.damage()
        assert where is None, (
            f"a store hits memory {where}, which belongs to something else: it needs a mask."
        )
    return result


def works_without_kernel(function: Callable[..., Any], *inputs: torch.Tensor) -> bool:
    """Whether a function still has a result when no kernel runs."""
    with ExitStack() as stack:
        for owner, name in ((interpreter.GridExecutor, "__call__"), (jit.JITFunction, "run")):
            stack.enter_context(patch.object(owner, name, lambda *args, **named: None))
        try:
            with guarding():
                found = function(*(x.clone() for x in inputs))
        except NotImplementedError:  # nothing was written
            return False
    return not found.isnan().any()
