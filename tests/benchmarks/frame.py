"""What the scripts that measure have in common: command line, JSON and clock."""

import argparse
import json
import time
from pathlib import Path

import torch

from flash_versions.bench.document import save

BEGAN = time.monotonic()  # when the script was started


def parser(doc, seconds=None, device=True):
    """A command line: where the JSON goes, and if asked for, on which device and for how long."""
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    if device:
        made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    if seconds is not None:
        text = f"after which nothing more begins ({seconds:g})"
        made.add_argument("--seconds", type=float, default=seconds, help=text)
    return made


def keep(document, out, rows, hidden=()):
    """Add rows to a document, print them without the fields that are too long, and write it."""
    document["rows"] += rows
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k not in hidden}), flush=True)
    save(document, out)


def passed():
    """Seconds since the script was started."""
    return time.monotonic() - BEGAN


def now(device):
    """Seconds, once the device has done all that it was given."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def forget_peak(device):
    """Begin to measure the peak of memory anew."""
    if torch.device(device).type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak_gib(device):
    """The most memory in use since `forget_peak`; None on a CPU."""
    on_gpu = torch.device(device).type == "cuda"
    return torch.cuda.max_memory_allocated() / 2**30 if on_gpu else None


def reason(error):
    """Why a contestant has no time."""
    return f"{type(error).__name__}: {str(error)[:300]}"
