"""`python -m flash_versions`: what is here, what of it runs natively on this machine, what to do
next.
"""

import platform
import sys
from importlib.metadata import PackageNotFoundError, version

import torch

from flash_versions import VERSIONS
from flash_versions.dispatch.request import Request

NEXT = """\
  python -m transformer.generate             a small model answers through these kernels
  make lab                                   notebooks that explain them, from plain attention on
  make puzzles                               kernels to write yourself, each checked in seconds
  python -m flash_versions.diff fa1 fa2      what changes from one lesson to the next
  python -m flash_versions.mine new          an attention of your own, in one file
  make test                                  every version against the fp64 oracle
"""


def installed(package: str) -> str:
    """A package's version, or that it is missing."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def where_it_runs(name: str) -> str:
    """Whether a version runs natively, simulated or not at all on this machine, and why."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16, device=device)
    if reason := VERSIONS[name].unsupported(Request(x, x, x)):
        return f"no: {reason}"
    return "natively" if device == "cuda" else "simulated"


def where_exact() -> str:
    """Which kernels give a row the same bits whatever else is in the call, on this machine."""
    names = ", ".join(name for name, version in VERSIONS.items() if not version.inexact)
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    kernels = "FA3's for Hopper in 16 bits, FA2's in others" if hopper else "FA2's"
    return f"{names}: {kernels}"


def report() -> list[tuple[str, str]]:
    """The rows of the table: (what, state)."""
    rows = [("Python", platform.python_version())]
    rows += [(name, installed(name)) for name in ("torch", "triton", "numpy")]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        rows.append(("GPU", f"{torch.cuda.get_device_name()} (compute capability {major}.{minor})"))
    else:
        rows.append(("GPU", "none"))
    rows += [(f"{v.name}  {v.title}", where_it_runs(v.name)) for v in VERSIONS.values()]
    rows.append(("batch_invariant=True", where_exact()))
    return rows


def main() -> int:
    """Print the table; returns the exit code."""
    rows = report()
    width = max(len(what) for what, _ in rows)
    for what, state in rows:
        sys.stdout.write(f"{what:<{width}}  {state}\n")
    sys.stdout.write(f"\nNext, in this environment:\n{NEXT}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
