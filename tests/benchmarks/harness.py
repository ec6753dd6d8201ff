"""What all that is measured here shares: command line, JSON, clock."""

import argparse
import gc
import json
import time
from pathlib import Path

import torch

from flash_versions.bench.document import save
from flash_versions.bench.workers import reason

BEGAN = time.monotonic()  # when the script was started


def parser(doc, seconds=None, device=True, add=False):
    """A command line: where the JSON goes, and if asked for, on which device, for how long, and
    whether it goes to what is there.
    """
    made = argparse.ArgumentParser(description=doc.partition("\n")[0])
    made.add_argument("--out", type=Path, required=True, help="where the JSON goes")
    if device:
        made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    if seconds is not None:
        text = f"after which nothing more begins ({seconds:g})"
        made.add_argument("--seconds", type=float, default=seconds, help=text)
    if add:
        made.add_argument("--add", action="store_true", help="keep what FILE has of other rows")
    return made


def keep(document, out, rows, hidden=("suite",), place=()):
    """Add rows to a document, print them without the fields that are too long, and write it. A row
    takes the place of an earlier one with the same of the fields `place`; a failure does not.
    """
    for row in rows:
        print(json.dumps({k: v for k, v in row.items() if k not in hidden}), flush=True)
        same = (i for i, x in enumerate(document["rows"]) if all(x[k] == row[k] for k in place))
        at = next(same, None) if place else None
        if at is None:
            document["rows"].append(row)
        elif "reason" not in row or "reason" in document["rows"][at]:
            document["rows"][at] = row
    save(document, out)


def earlier(options):
    """The rows of the document of before, each with the date and the commit of its measurement;
    none without `--add`.
    """
    if not options.add or not options.out.exists():
        return []
    before = json.loads(options.out.read_text())
    return [{key: before[key] for key in ("date", "commit")} | row for row in before["rows"]]


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


def attempt(row, measure, seconds):
    """The row with the fields that `measure` returns, or with the reason why it has none: an error,
    or that the script has run for so many seconds. Memory is free afterwards.
    """
    try:
        if passed() > seconds:
            raise TimeoutError(f"no time was left after {seconds:.0f} s")
        return row | measure()
    except Exception as error:  # whatever it is, the others are measured
        return row | {"reason": reason(error)}
    finally:
        gc.collect()
        torch.cuda.empty_cache()


def in_time(items, seconds):
    """The items, until the script has run for so many seconds."""
    for item in items:
        if passed() > seconds:
            print(f"the time is up before {item}", flush=True)
            return
        yield item
