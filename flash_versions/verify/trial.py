"""The part of a verification that may hang or lose the GPU: a process of its own.

`python -m flash_versions.verify.trial SMALL` reads tasks, a line of JSON each: a version, and the
number of a case or null, which times the version. It answers each with a line of JSON. If SMALL is
1, the cases are small and are simulated.
"""

import json
import sys
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from flash_versions import attention
from flash_versions.bench.measure import ROUNDS, timed
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.version import EXPLICIT, VERSIONS
from flash_versions.verify.cases import Case, draw
from flash_versions.versions.oracle.budget import assess_request

TIMED_SHAPES = (4, 4096, 16, 64), (4, 4096, 16, 128)  # batch, length, heads, head_dim


def results(
    version: str, case: Case, device: str, deterministic: bool = True
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a version computes for a case, by name, and the gradient of o that it got."""
    *inputs, do = case.inputs(device)
    q, k, v = (x.requires_grad_(case.backward) for x in inputs)
    o, lse = attention(
        q, k, v, version=version, return_lse=True, deterministic=deterministic, **case.options()
    )
    found = {"o": o.detach(), "lse": lse.detach()}
    if case.backward:
        o.backward(do)
        found |= {f"d{name}": x.grad for name, x in zip("qkv", (q, k, v)) if x.grad is not None}
    return found, do


def attempt(version: str, case: Case, device: str) -> dict[str, Any]:
    """A case's outcome: "passed", "refused" or "failed", and what was found."""
    tried = (VERSIONS | EXPLICIT)[version]
    request = make_request(*case.inputs(device)[:3], **case.options())
    why = tried.unsupported(request)
    if why is None and case.backward and tried.backward is None:
        why = f"version {version!r} has no backward."
    if why:
        return {"outcome": "refused", "why": why}
    first, do = results(version, case, device)
    runs = [results(version, case, device)[0] for _ in range(2)]
    wrong = [
        f"{name}: two runs differ"
        for name, x in first.items()
        if not all(torch.equal(x, run[name]) for run in runs)
    ]
    found = assess_request(first, request, do if case.backward else None)
    if case.backward:  # the kernels that may add in any order have a budget to keep, too
        fast, _ = results(version, case, device, deterministic=False)
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


def main(small: bool) -> None:
    """Answer tasks until there are no more."""
    device = "cpu" if small else "cuda"
    for line in sys.stdin:
        version, number = json.loads(line)
        try:
            if number is None:
                found = {"outcome": "passed", "timing": compared(version)}
            else:
                found = attempt(version, draw(number, small), device)
        except Exception as error:  # reported, as every other outcome
            found = {"outcome": "failed", "why": f"{type(error).__name__}: {error}"}
        print(json.dumps(found), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1] == "1")
