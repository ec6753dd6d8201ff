"""The head of every JSON document of results: when, where and on what it was measured."""

import hashlib
import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import triton

from flash_versions.bench.peers import LIBRARIES, installed_version
from flash_versions.files import write

SCHEMA = 1
PACKAGE = Path(__file__).parents[1]

Document = dict[str, Any]


def machine(device: str = "cuda") -> dict[str, str]:
    """GPU, driver and library versions; on a CPU only the versions."""
    versions = {"torch": torch.__version__, "triton": triton.__version__}
    versions["python"] = platform.python_version()
    if device == "cpu":
        return {"gpu": "none", **versions}
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm", "--format=csv,noheader"]
    try:
        smi = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        smi = "unknown, unknown"
    driver, clock = (field.strip() for field in smi.splitlines()[0].split(","))
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "max_sm_clock": clock,
        "cuda": str(torch.version.cuda),
        "cudnn": str(torch.backends.cudnn.version()),
        **{name: installed_version(*where) for name, where in LIBRARIES.items()},
        **versions,
    }


def commit() -> str:
    """The measured commit: GIT_COMMIT if it is set, otherwise what git says."""
    git = ["git", "describe", "--always", "--dirty"]
    try:
        found = subprocess.run(git, capture_output=True, text=True, cwd=PACKAGE).stdout.strip()
    except OSError:
        found = ""
    return os.environ.get("GIT_COMMIT") or found or "unknown"


def source() -> str:
    """A digest of the package's code, since uncommitted changes leave the commit as it was."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        digest.update(f"{path.relative_to(PACKAGE)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def new_document(device: str = "cuda", libraries: tuple[str, ...] = (), **about: Any) -> Document:
    """A document without rows.

    Args:
        device: "cuda" or "cpu", where it is measured.
        libraries: distributions whose versions the machine names beside its own.
        about: further fields, such as `protocol`.
    """
    return {
        "schema": SCHEMA,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "source": source(),
        "machine": machine(device) | {name: version(name) for name in libraries},
        **about,
        "rows": [],
    }


def save(document: Document, path: Path) -> None:
    """Write a document, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, json.dumps(document, indent=1) + "\n")
