"""How many bytes a simulated kernel reads from tensors and writes to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from flash_versions.simulator.memory import Memory
from flash_versions.simulator.state import here


class Moved:
    """What kernels move.

    Attributes:
        read, written: bytes so far.
    """

    def __init__(self) -> None:
        self.read = self.written = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, loads and stores of kernels that this thread launches are counted."""
        moved = self

        class Counted(Memory):
            def load(self, offset: Any, valid: Any = None) -> Any:
                lanes = offset.size if valid is None else int(np.count_nonzero(valid))
                moved.read += lanes * self.kind.itemsize
                return super().load(offset, valid)

            def store(self, offset: Any, values: Any) -> None:
                moved.written += offset.size * self.kind.itemsize
                super().store(offset, values)

        with patch.object(here, "memory", Counted):
            yield
