"""The part of a verification that may hang or lose the GPU: a process of its own.

`python -m flash_versions.verify.trial KIND WHERE` does tasks (see `bench/workers.py`): a version,
and a number. Of KIND "calls" it is that of a call, or null, which times the version; of "pairs",
that of a pair of calls that must have the same bits. WHERE is "gpu", or "simulated".
"""

import sys
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_versions import attention
from flash_versions.bench.measure import ROUNDS, timed
from flash_versions.bench.workers import Answer, work
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import EXPLICIT, VERSIONS
from flash_versions.verify import pairs
from flash_versions.verify.cases import Call, draw
from flash_versions.versions.oracle.budget import assess_request

TIMED_SHAPES = (4, 4096, 16, 64), (4, 4096, 16, 128)  # batch, length, heads, head_dim


def results(
    version: str, given: Call, device: str, deterministic: bool = True
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a version computes for a call, by name, and the gradient of o that it got."""
    *inputs, do = given.inputs(device)
    q, k, v = (x.requires_grad_(given.backward) for x in inputs)
    options = given.case.all_options(device) | {"deterministic": deterministic}
    o, lse = attention(q, k, v, version=version, return_lse=True, **options)
    found = {"o": o.detach(), "lse": lse.detach()}
    if given.backward:
        o.backward(do)
        found |= {f"d{name}": x.grad for name, x in zip("qkv", (q, k, v)) if x.grad is not None}
    return found, do


def attempt(version: str, given: Call, device: str) -> Answer:
    """A call's outcome: "passed", "refused" or "failed", and what was found."""
    tried = (VERSIONS | EXPLICIT)[version]
    request = make_request(*given.inputs(device)[:3], **given.case.all_options(device))
    why = tried.unsupported(request)
    if why is None and given.backward and tried.backward is None:
        why = f"version {version!r} has no backward."
    if why:
        return {"outcome": "refused", "why": why}
    first, do = results(version, given, device)
    runs = [results(version, given, device)[0] for _ in range(2)]
    wrong = [
        f"{name}: two runs differ"
        for name, x in first.items()
        if not all(torch.equal(x, run[name]) for run in runs)
    ]
    found = assess_request(first, request, do if given.backward else None)
    if given.backward:  # the kernels that may add in any order have a budget to keep, too
        fast, _ = results(version, given, device, deterministic=False)
        of_fast = assess_request(fast, request, do)
        found |= {f"{name} with deterministic=False": x for name, x in of_fast.items()}
    wrong += [f"{name}: {accuracy}" for name, accuracy in found.items() if not accuracy.ok]
    share = max(x.error / x.budget if x.budget else 0.0 for x in found.values())
    if wrong:
        return {"outcome": "failed", "why": "; ".join(wrong)}
    return {"outcome": "passed", "share_of_budget": share}


def compared(version: str) -> list[dict[str, Any]]:
    """Speed of the forward against torch's scaled_dot_product_attention, causal, in bf16."""
    rows = []
    for shape in TIMED_SHAPES:
        inputs = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
        q, k, v = (x.transpose(1, 2) for x in inputs)
        calls = {
            "ms": partial(attention, *inputs, causal=True, version=version),
            "sdpa_ms": partial(scaled_dot_product_attention, q, k, v, is_causal=True),
        }
        times = {name: median(x) for name, x in timed(calls, ROUNDS).items()}
        rows.append({"shape": shape, **times})
    return rows


def call(small: bool, version: str, number: int | None) -> Answer:
    """The outcome of a call, or the timing of a version."""
    if number is None:
        return {"outcome": "passed", "timing": compared(version)}
    return attempt(version, draw(number, small), "cpu" if small else "cuda")


if __name__ == "__main__":
    do = {"calls": call, "pairs": pairs.outcome}[sys.argv[1]]
    work(partial(do, sys.argv[2] == "simulated"))
