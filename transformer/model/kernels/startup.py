"""The start on a GPU: that kernels are compiled is said."""

import sys
from typing import Any

from triton import knobs

from flash_versions.dispatch.extras import progress_bar

NOTICE = "note: kernels are compiled for this GPU; the next start finds them in Triton's cache\n"


class Compiling:
    """Says once on standard error that Triton compiles; on a terminal, a bar counts the kernels."""

    def __init__(self) -> None:
        self.said = self.ended = False
        self.bar: Any = None

    def begin(self) -> None:
        """Listen to Triton."""
        knobs.compilation.listener = self.listen

    def listen(self, **about: Any) -> None:
        """Take what Triton says of a kernel that it compiled or found in its cache."""
        if about["cache_hit"] or self.ended:
            return
        if not self.said:
            self.said = True
            sys.stderr.write(NOTICE)
            self.bar = progress_bar(0, "kernel")
        if self.bar is not None:
            self.bar.update()

    def end(self) -> None:
        """Close the bar before an answer is written."""
        self.ended = True
        if self.bar is not None:
            self.bar.close()


compiling = Compiling()
