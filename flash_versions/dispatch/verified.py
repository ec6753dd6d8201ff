"""Which kernels were verified on this machine's GPU: a file in the user's cache folder.

`python -m flash_versions.verify` writes it. A kernel that its authors never ran on hardware is
chosen by version="auto" only where it is in this file.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import triton


def path() -> Path:
    """Where the file is."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "flash_versions" / "verified.json"


def place() -> dict[str, Any]:
    """What a verification is valid for: this GPU and this Triton."""
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "triton": triton.__version__,
    }


def read() -> list[dict[str, Any]]:
    """What was verified, each a kernel and a place; none if the file is damaged, with a warning."""
    file = path()
    try:
        found = json.loads(file.read_text())
        if isinstance(found, list) and all(isinstance(x, dict) for x in found):
            return found
    except FileNotFoundError:
        return []
    except (OSError, ValueError):
        pass
    warnings.warn(f"{file} is damaged and was ignored; verify again or delete it.", stacklevel=2)
    return []


def is_verified(kernel: str) -> bool:
    """Whether a kernel has passed `flash_versions.verify` on this GPU with this Triton."""
    if not torch.cuda.is_available():
        return False
    return {"kernel": kernel, **place()} in read()


def note(kernel: str) -> None:
    """Write that a kernel has passed here.

    Raises:
        OSError: the cache folder cannot be written.
    """
    found, new, file = read(), {"kernel": kernel, **place()}, path()
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps([*(x for x in found if x != new), new], indent=1))
    temporary.replace(file)
