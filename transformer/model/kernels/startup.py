"""The start on a GPU: what the first kernels wait for is done early, and compiling them is said."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from triton import knobs
from triton.runtime import cache, driver

from flash_versions.dispatch.extras import progress_bar

NOTICE = "note: kernels are compiled for this GPU; the next start finds them in Triton's cache\n"


def load_products(device: torch.device, dtype: torch.dtype) -> None:
    """Load cuBLAS (0.1 s), and before it what every program on a GPU loads."""
    x = torch.zeros(16, 16, device=device, dtype=dtype)
    F.linear(x, x)


def load_compiler() -> None:
    """Let Triton read itself, 400 MB, for the key of its cache (0.4 s), and build its driver."""
    cache.triton_key()
    driver.active.get_current_target()


@contextmanager
def warming_up(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Inside, threads load what the first kernels on a GPU need; at the end it is there. What fails
    in them fails again where it is needed, and is reported there. From here on, compiling is said.
    """
    with ThreadPoolExecutor(2) as threads:
        if device.type == "cuda":
            knobs.compilation.listener = compiling.listen
            threads.submit(load_compiler)
            threads.submit(load_products, device, dtype)
        yield


class Compiling:
    """Says once on standard error that Triton compiles; on a terminal, a bar counts the kernels.

    Attributes:
        now: some were compiled, and the first answer has not begun.
    """

    def __init__(self) -> None:
        self.now = self.ended = False
        self.bar: Any = None

    def listen(self, **about: Any) -> None:
        """Take what Triton says of a kernel that it compiled or found in its cache."""
        if about["cache_hit"] or self.ended:
            return
        if not self.now:
            self.now = True
            sys.stderr.write(NOTICE)
            self.bar = progress_bar(0, "kernel")
        if self.bar is not None:
            self.bar.update()

    def end(self) -> None:
        """Close the bar before an answer is written."""
        self.now, self.ended = False, True
        if self.bar is not None:
            self.bar.close()


compiling = Compiling()
