"""Which kernels were verified on this machine's GPU: a file in the user's cache folder.

`python -m flash_versions.verify` writes it. A kernel that its authors never ran on hardware is
chosen by version="auto" only where it is in this file.
"""

import hashlib
import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from flash_versions.files import replacing


def path() -> Path:
    """Where the file is."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "flash_versions" / "verified.json"


def read_sources() -> str:
    """A hash of the source of all kernels, and of what launches them; "" if it is not there."""
    root = Path(__file__).parents[1]
    folders = root / "dispatch", root / "versions"
    files = sorted(x for folder in folders for end in ("py", "c") for x in folder.rglob(f"*.{end}"))
    texts = [f"{file.relative_to(root)}\n".encode() + file.read_bytes() for file in files]
    return hashlib.sha256(b"\0".join(texts)).hexdigest() if texts else ""


sources = cache(read_sources)  # as they were when this process asked first


def conditions(device: torch.device | None = None) -> dict[str, Any]:
    """What a verification is valid for: a GPU, by default the current one, this Triton and this
    package.
    """
    return {
        "gpu": torch.cuda.get_device_name(device),
        "capability": list(torch.cuda.get_device_capability(device)),
        "triton": triton.__version__,
        "sources": sources(),
    }


def read() -> list[dict[str, Any]]:
    """What was verified, each a kernel with its conditions; if the file is damaged, nothing, with a
    warning.
    """
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


def is_verified(kernel: str, device: torch.device) -> bool:
    """Whether this kernel has passed `flash_versions.verify` on such a GPU with this Triton."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return False
    entries = [x for x in read() if x.get("kernel") == kernel]  # as a rule none: no source is read
    return bool(entries and sources() and {"kernel": kernel, **conditions(device)} in entries)


def record(kernel: str) -> None:
    """Write that a kernel has passed on the current GPU; what is known of other sources goes.

    Raises:
        OSError: the cache folder cannot be written.
    """
    found, new, file = read(), {"kernel": kernel, **conditions()}, path()
    file.parent.mkdir(parents=True, exist_ok=True)
    others = [x for x in found if new != x | {"sources": new["sources"]}]
    with replacing(file) as temporary:
        temporary.write_text(json.dumps([*others, new], indent=1))
