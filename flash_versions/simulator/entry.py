"""Which launches are simulated; what simulates them is imported with the first of them."""

import functools
import os
import sys
from importlib.util import find_spec
from typing import Any

import torch

NEEDLESS = (
    "flash_versions: TRITON_INTERPRET is not needed and is ignored: launches with tensors on the "
    "CPU are simulated.\n"
)


def on_cpu(arguments: Any) -> bool:
    """Whether the tensors among the arguments of a launch are on the CPU.

    Raises:
        ValueError: only some of them are, or one is where no kernel runs.
    """
    places = {y.device.type for x in arguments for y in tensors_in(x)}
    if places == {"cpu"}:
        return True
    if "cpu" in places or "meta" in places:
        raise ValueError(
            f"the tensors of this launch are on {' and '.join(sorted(places))}; kernels take "
            "tensors that are all on the CPU, where they are simulated, or all on a GPU"
        )
    return False


def tensors_in(x: Any) -> list[torch.Tensor]:
    """The tensors of an argument: of a tuple or of a descriptor, too."""
    if isinstance(x, torch.Tensor):
        return [x]
    if isinstance(x, tuple):
        return [tensor for y in x for tensor in tensors_in(y)]
    return tensors_in(x.base) if type(x).__name__ == "TensorDescriptor" else []


def install() -> None:
    """Let `kernel[grid](...)` simulate launches with tensors on the CPU, which Triton refuses; all
    other launches are Triton's. Where triton is not installed, let kernels import the
    stand-in of `standin`. Calling it again changes nothing.
    """
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on"):
        sys.stderr.write(NEEDLESS)
        del os.environ["TRITON_INTERPRET"]
    if find_spec("triton") is None:
        from flash_versions.simulator import standin

        standin.install()
        return
    from triton.runtime.jit import JITFunction

    original = JITFunction.run
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def run(self: Any, *arguments: Any, grid: Any, warmup: bool, **named: Any) -> Any:
        if not warmup and on_cpu((*arguments, *named.values())):
            from flash_versions.simulator import launch

            launch.launch(self, grid, arguments, named)
            return None
        return original(self, *arguments, grid=grid, warmup=warmup, **named)

    run.simulates = True  # type: ignore[attr-defined]  # for those who ask
    JITFunction.run = run
