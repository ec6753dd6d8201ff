"""What runs where: every version is asked what it would launch on every kind of GPU.

The answers are which kernels each call of each version launches, or the sentence that refuses it.
The host's code is the package's own; in the place of a launch the kernel is noted. The GPUs need
not be here.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from version_pages import table

from flash_versions import VERSIONS
from flash_versions.bench.results import read_results
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import Request, make_request
from flash_versions.inspect import compiled

# GPUs that a reader may have, by compute capability; what else the package compiles for is added.
GPUS = {"sm_75": "T4", "sm_80": "A100", "sm_89": "RTX 4090, L40S", "sm_90": "H100, H200"}
CALLS: dict[str, dict[str, Any]] = {
    "forward, bf16": {"dtype": torch.bfloat16},
    "forward, fp32": {"dtype": torch.float32},
    "decoding": {"dtype": torch.bfloat16, "queries": 1},
    "backward": {"dtype": torch.bfloat16, "backward": True},
    "FP8": {"dtype": torch.bfloat16, "precision": "fp8"},
}
Answer = dict[str, Any]  # {"kernels": [module.kernel, ...]} or {"refused": sentence}


def request_of(dtype: torch.dtype, queries: int = 4096, precision: str | None = None) -> Request:
    """A causal call on uninitialised tensors."""
    q = torch.empty(1, queries, 32, 128, dtype=dtype)
    k = torch.empty(1, 4096, 8, 128, dtype=dtype)
    return make_request(q, k, k, causal=True, precision=precision)


@contextmanager
def noting(found: list[str]) -> Iterator[None]:
    """Inside, kernels are noted and not launched."""

    def note(launcher: Launcher, *arguments: Any, **options: Any) -> None:
        kernel = getattr(launcher.kernel, "fn", launcher.kernel)
        name = f"{kernel.__module__.removeprefix('flash_versions.versions.')}.{kernel.__name__}"
        if name not in found:
            found.append(name)

    with mock.patch.object(Launcher, "__call__", note):
        yield


def ask(name: str, dtype: torch.dtype, backward: bool = False, **call: Any) -> Answer:
    """What one call of a version launches, where we are told to be."""
    one, request = VERSIONS[name], request_of(dtype, **call)
    if reason := one.unsupported(request):
        return {"refused": reason}
    found: list[str] = []
    with noting(found):
        o, lse, statistics = one.forward(request)
        if backward:
            assert one.backward is not None
            found.clear()
            one.backward(request, o, lse, statistics, torch.empty_like(o), lse)
    return {"kernels": found}


def ask_all() -> dict[str, dict[str, Answer]]:
    """{version: {call: answer}}."""
    return {name: {call: ask(name, **what) for call, what in CALLS.items()} for name in VERSIONS}


def refusal(capability: tuple[int, int]) -> str | None:
    """What the package says of a GPU that it does not compile for."""
    with devices.assume(Properties(capability)):
        return devices.limits(torch.device("cuda"))


def answers() -> dict[str, Any]:
    """{kind of machine: {version: {call: answer}}}; for a GPU that is refused, the sentence."""
    found: dict[str, Any] = {"no GPU": ask_all()}
    for arch in sorted({*GPUS, *compiled.ARCHES}, key=lambda arch: int(arch[3:])):
        digits = arch.removeprefix("sm_")
        example = GPUS.get(arch) or compiled.ARCHES[arch].example
        name = f"{example} ({digits[:-1]}.{digits[-1]})"
        if arch not in compiled.ARCHES:
            found[name] = refusal((int(digits[:-1]), int(digits[-1])))
            continue
        with compiled.compiling(arch):
            found[name] = ask_all()
    return found


def address(kernel: str) -> str:
    """A kernel as a link to its file."""
    path = f"{kernel.rpartition('.')[0].replace('.', '/')}.py"
    return f"[{path}](../../flash_versions/versions/{path})"


def is_lesson(kernel: str) -> bool:
    """Whether a kernel is a version's own, and not one that all share."""
    return re.match(r"fa\d", kernel) is not None


def cell(answer: Answer) -> str:
    """One answer in a table."""
    if "refused" in answer:
        return "no: " + answer["refused"].partition(": ")[2]
    return ", ".join(dict.fromkeys(map(address, filter(is_lesson, answer["kernels"]))))


def how(name: str, answer: Answer, gpu: bool) -> str:
    """Natively or simulated, and by which of the kernels."""
    if "refused" in answer:
        return "no"
    modules = [kernel.rpartition(".")[0] for kernel in answer["kernels"] if is_lesson(kernel)]
    owner = modules[0].partition(".")[0]
    kind = "explicit (Gluon)" if "hopper" in modules[0].split(".") else "portable (Triton)"
    if owner != name:
        kind = f"with {owner}'s kernel"
    return f"{'natively' if gpu else 'simulated'}, {kind}"


def tables() -> str:
    """The page's tables."""
    found, names, first = answers(), list(VERSIONS), next(iter(CALLS))
    rows = []
    for machine, by_version in found.items():
        gpu = machine != "no GPU"
        cells = (
            [how(name, by_version[name][first], gpu) for name in names]
            if isinstance(by_version, dict)
            else ["no"] * len(names)
        )
        rows.append([machine, *cells])
    made = [f"{first.capitalize().replace(', ', ' in ')}, 4096 queries and keys, causal:\n"]
    made.append(table(["machine", *(VERSIONS[name].title for name in names)], rows))
    for machine, refused in found.items():
        if isinstance(refused, str):
            made.append(f"{machine}: {refused}\n")
    machines = {about["machine"]["gpu"] for about in read_results()["suites"].values()}
    measured = sorted(machines - {"none"})
    made.append(
        f"Times were measured on: {', '.join(measured)}. The others are what the "
        "package's own host code chooses when it is told of such a GPU; `make test-all` "
        "compiles the kernels for them.\n"
    )
    for name in names:
        made.append(f"## {VERSIONS[name].title}\n")
        made.append(by_call(name, found))
    return "\n".join(made)


def by_call(name: str, found: dict[str, Any]) -> str:
    """For one version, which file's kernels each kind of call launches on each machine."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for machine, by_version in found.items():
        if isinstance(by_version, dict):
            cells = tuple(cell(by_version[name][call]) for call in CALLS)
            rows.setdefault(cells, []).append(machine)
    return table(["", *CALLS], [["; ".join(machines), *cells] for cells, machines in rows.items()])
