"""What is said once where kernels are simulated because there is no GPU."""

import sys

import torch

NOTICE = (
    "flash_versions: no GPU found, so kernels are simulated on the CPU: for reading and testing, "
    "not for speed.\n"
)
unsaid = {"notice"}


def say() -> None:
    """Say once on stderr that kernels are simulated, if that is because there is no GPU."""
    if unsaid and not torch.cuda.is_available():
        unsaid.clear()
        if "--quiet" not in sys.argv[1:]:  # of a command of ours
            sys.stderr.write(NOTICE)
