"""Is a lesson right, and how fast? What `python -m flash_versions.lessons.fa2` answers."""

import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from triton.testing import do_bench

from flash_versions import attention
from flash_versions.dispatch.request import make_request
from flash_versions.lessons import LESSONS, version_name
from flash_versions.versions.oracle.budget import Accuracy, assess_request
from flash_versions.versions.oracle.suite import CASES, DTYPES, Case

TIMED = {"cuda": (2, 8192, 16, 128), "cpu": (1, 256, 2, 128)}  # batch, length, heads, head_dim


def run(path: str) -> None:
    """Hold the results and gradients of the lesson in this file against the fp64 reference, each
    within its error budget, and time it beside the engine's version. Exits with 1 if one is wrong.
    """
    name = Path(path).stem.removesuffix("_backward")
    version, device = version_name(name), "cuda" if torch.cuda.is_available() else "cpu"
    tried, wrong = 0, 0
    for case, dtype in calls(version, device):
        tried += 1
        for result, accuracy in assess(version, case, dtype, device).items():
            wrong += not accuracy.ok
            if not accuracy.ok:
                sys.stdout.write(f"WRONG  {case.name}: {result}: {accuracy}\n")
    lines = [f"{version}: {tried} calls, {wrong} results are wrong"]
    lines += [timed(x, device) for x in (version, name[:3])]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(int(wrong > 0))


def calls(version: str, device: str) -> Iterator[tuple[Case, torch.dtype]]:
    """The cases of the equivalence suite that a lesson takes, each in one of its dtypes."""
    for i, case in enumerate(CASES):
        kinds = DTYPES[1:] if "fp8" in version else DTYPES  # 16 bits are quantised
        for dtype in kinds[i % len(kinds) :] + kinds[: i % len(kinds)]:
            request = make_request(*case.inputs(dtype, device), **options_of(version, case, device))
            if LESSONS[version].unsupported(request) is None:
                yield case, dtype
                break


def assess(version: str, case: Case, dtype: torch.dtype, device: str) -> dict[str, Accuracy]:
    """The accuracy of a call's results and gradients by name: o, lse, dq, dk, dv."""
    torch.manual_seed(0)
    leaves = [x.requires_grad_() for x in case.inputs(dtype, device)]
    options = options_of(version, case, device)
    request = make_request(*leaves, **options)
    o, lse = attention(*leaves, version=version, return_lse=True, **options)
    results = {"o": o.detach(), "lse": lse.detach()}
    if "precision" in options:  # for inference
        return assess_request(results, request)
    do, dlse = torch.randn_like(o), torch.randn_like(lse)
    gradients = torch.autograd.grad((o, lse), leaves, (do, dlse))
    return assess_request(results | dict(zip(("dq", "dk", "dv"), gradients)), request, do, dlse)


def options_of(version: str, case: Case, device: str) -> dict[str, Any]:
    """The options of a case, with the precision of a lesson that has one."""
    return case.all_options(device) | ({"precision": "fp8"} if "fp8" in version else {})


def timed(version: str, device: str) -> str:
    """A line: how long a version takes for a causal forward in bf16."""
    batch, length, heads, head_dim = TIMED[device]
    q, k, v = torch.randn(3, batch, length, heads, head_dim, device=device).bfloat16()
    precision = "fp8" if "fp8" in version else None
    if device == "cpu":
        start = perf_counter()
        attention(q, k, v, causal=True, version=version, precision=precision)
        return f"{version:<18} {perf_counter() - start:6.2f} s for {length} tokens, simulated"
    ms = do_bench(lambda: attention(q, k, v, causal=True, version=version, precision=precision))
    rate = 2 * batch * heads * length**2 * head_dim / ms / 1e9
    return f"{version:<18} {ms:6.3f} ms for {length} tokens, {rate:.0f} TFLOP/s"
