"""How long the simulator takes for small calls, beside another commit's machines for the same.

    python -m tests.benchmarks.simulator BEFORE [--turns 5] [--out docs/results/simulator/cpu.json]

BEFORE is a checkout of that commit, with Triton's interpreter and an emulator of Gluon. Each turn
runs both, one after the other, in processes of one thread; a call's time is the least of its turns.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
# Versions x forward, backward x these: 24 calls. (lengths of queries and keys, head_dim, dtype,
# options)
CALLS = {
    "causal, bf16": (200, 200, 64, torch.bfloat16, {"causal": True}),
    "full, fp32": (100, 333, 128, torch.float32, {}),
    "window, fp16": (300, 300, 80, torch.float16, {"causal": True, "window": (50, 0)}),
}
GLUON = {  # (version, length, head_dim, options)
    "fa3": ("fa3", 200, 64, {"causal": True}),
    "fa3, D=128": ("fa3", 150, 128, {}),
    "fa4": ("fa4", 200, 64, {"causal": True}),
    "fa4, window": ("fa4", 300, 64, {"causal": True, "window": (100, 0)}),
}


def timed(compute, *given, **options):
    """Seconds of the best of three calls; those before them also compile and check."""
    for _ in range(3):
        compute(*given, **options)
    found = []
    for _ in range(3):
        begin = time.perf_counter()
        compute(*given, **options)
        found.append(time.perf_counter() - begin)
    return min(found)


def of_triton():
    """Seconds of the calls of `attention`, by name."""
    from flash_versions import attention

    found = {}
    for version in ("fa1", "fa2", "fa3", "fa4"):
        for name, (M, N, D, dtype, options) in CALLS.items():
            torch.manual_seed(0)
            q, k, v = (torch.randn(1, n, 2, D).to(dtype).requires_grad_() for n in (M, N, N))
            given = {"version": version, **options}
            found[f"{version}, forward, {name}"] = timed(attention, q, k, v, **given)
            o = attention(q, k, v, **given)
            inputs = o, (q, k, v), torch.randn_like(o)
            backward = timed(torch.autograd.grad, *inputs, retain_graph=True)
            found[f"{version}, backward, {name}"] = backward
    return found


def of_gluon():
    """Seconds of the kernels for Hopper, by name."""
    from flash_versions.dispatch.device import Properties, devices
    from flash_versions.dispatch.request import make_request

    hosts, backward = gluon_hosts()
    devices.assumed = Properties((9, 0), num_sms=2)
    found = {}
    for name, (version, n, D, options) in GLUON.items():
        torch.manual_seed(0)
        q, k, v, do = (torch.randn(1, n, 2, D).bfloat16() for _ in range(4))
        request = make_request(q, k, v, **options)
        o, lse, _ = hosts[version].forward(request)
        found[f"{name}, forward"] = timed(hosts[version].forward, request)
        if version == "fa3":
            given = request, o, lse, None, do, None
            found[f"{name}, backward"] = timed(backward.backward, *given)
    return found


def gluon_hosts():
    """The host modules of the kernels: of the older commit, imported anew with stand-ins."""
    names = {x: f"flash_versions.versions.{x}.hopper.host" for x in ("fa3", "fa4")}
    back = "flash_versions.versions.fa3.hopper.backward.kernel"
    try:
        from flash_versions.dispatch.emulator import emulator
    except ImportError:
        from importlib import import_module

        return {x: import_module(name) for x, name in names.items()}, import_module(back)
    forward = emulator.load("flash_versions.versions.fa4.hopper.host")
    backward = emulator.load("flash_versions.versions.fa4.hopper.backward")
    for loaded in (forward, backward):
        loaded["tiles.wgmma"].available = lambda device: True
    hosts = {x: forward[f"{x}.hopper.host"] for x in names}
    return hosts, backward["fa3.hopper.backward.kernel"]


def run_in(checkout: Path) -> dict:
    """Seconds by kind and call in a process that imports this checkout's package."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--here"]
    done = subprocess.run(command, env=environment, cwd=checkout, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", type=Path, nargs="?")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        torch.set_num_threads(1)
        print(json.dumps({"triton": of_triton(), "gluon": of_gluon()}))
        return
    turns = [{x: run_in(x) for x in (options.before, ROOT)} for _ in range(options.turns)]
    rows, means = [], {}
    for kind in ("triton", "gluon"):
        ratios = []
        for name in turns[0][ROOT][kind]:
            before, after = (min(t[x][kind][name] for t in turns) for x in (options.before, ROOT))
            row = {"suite": "simulator", "kind": kind, "call": name}
            rows.append(row | {"before_s": before, "after_s": after})
            ratios.append(before / after)
            times = f"{before * 1e3:7.1f} -> {after * 1e3:6.1f} ms"
            print(f"{kind:6} {name:32} {times}  {ratios[-1]:.2f}")
        means[kind] = statistics.geometric_mean(ratios)
        print(f"{kind}: {means[kind]:.2f} times as fast; the least is {min(ratios):.2f}")
    if options.out:
        from flash_versions.bench.document import new_document, save

        git = ["git", "rev-parse", "--short=8", "HEAD"]
        before = subprocess.check_output(git, cwd=options.before, text=True).strip()
        about = {"before": before, "turns": options.turns, "times_as_fast": means}
        save(new_document("cpu", **about) | {"rows": rows}, options.out)


if __name__ == "__main__":
    main()
