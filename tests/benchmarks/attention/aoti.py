"""Which models survive AOTInductor? python -m tests.benchmarks.attention.aoti

Each case is one step further towards a model with `flash_attn_func`: exported, compiled into a
package, loaded and compared with the model, and then loaded once more by a process that did not
compile it. All of that runs in processes of their own, several at a time, and takes less than a
minute on a GPU. A process that dies says at which stage and leaves its stack, Python's and the C++
one. `--device cpu` does the same on a CPU, with kernels interpreted. What users are refused on a
GPU is tried here.
"""

import argparse
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import nn

import flash_versions  # noqa: F401  before triton, so that a CPU interprets
from flash_versions.dispatch.autograd import operators
from flash_versions.dispatch.request import Request
from flash_versions.flash_attn import flash_attn_func

CASES = {
    "products": "torch's products alone",
    "operator": "an operator of Python's with one tensor",
    "schema": "an operator with all arguments of ours, which launches nothing",
    "attention": "flash_attn_func",
    "layer": "flash_attn_func between two products",
}
LIMIT = 250.0  # seconds for one process
LAST = "works: "


@torch.library.custom_op("aoti_probe::copy", mutates_args=())
def copy(x: torch.Tensor) -> torch.Tensor:
    """x once more."""
    return x.clone()


@torch.library.custom_op(
    "aoti_probe::forward",
    mutates_args=(),
    schema=f"(str version, {operators.REQUEST}) -> (Tensor, Tensor, Tensor)",
)
def forward(version, q, *others):
    """What has the shapes of o, lse and statistics."""
    return q.clone(), q.new_zeros(q.shape[:3], dtype=torch.float32), q.new_empty(0)


copy.register_fake(torch.empty_like)
forward.register_fake(
    lambda version, q, *others: (
        torch.empty_like(q),
        q.new_empty(q.shape[:3], dtype=torch.float32),
        q.new_empty(0),
    )
)


class Model(nn.Module):
    """(batch, length, 3, heads, head_dim) to (batch, length, heads, head_dim), by a case."""

    def __init__(self, case: str, head_dim: int):
        super().__init__()
        self.case = case
        if case in ("products", "layer"):
            self.inward, self.outward = (nn.Linear(head_dim, head_dim) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """q, k and v lie in dimension 2."""
        if self.case in ("products", "layer"):
            x = self.inward(x)
        q, k, v = x.unbind(2)
        if self.case == "operator":
            q = torch.ops.aoti_probe.copy(q)
        elif self.case == "schema":
            others = list(Request._field_defaults.values())
            missing = len(Request._fields) - 3 - len(others)  # the scale, which has no default
            q = torch.ops.aoti_probe.forward("fa4", q, k, v, *[0.25] * missing, *others)[0]
        elif self.case != "products":
            q = flash_attn_func(q, k, v, causal=True)
        return self.outward(q) if self.case in ("products", "layer") else q


@torch.no_grad()
def go_through(case: str, device: str, file: Path) -> None:
    """The stages of a case in this process; those before the package only if there is none."""
    operators.NOT_AHEAD_OF_TIME = ()
    faulthandler.enable()
    torch._C._set_print_stack_traces_on_fatal_signal(True)  # in C++, before Python's own
    dtype, head_dim, length = (torch.bfloat16, 64, 256) if device == "cuda" else (None, 16, 24)
    torch.manual_seed(0)
    model = Model(case, head_dim).to(device, dtype).eval()
    x = torch.randn(1, length, 3, 2, head_dim, device=device, dtype=dtype)
    if not file.exists():
        print("export", flush=True)
        exported = torch.export.export(model, (x,))
        print("compile", flush=True)
        torch._inductor.aoti_compile_and_package(exported, package_path=str(file))
    else:
        print("open the library", flush=True)
        with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(file) as package:
            (name,) = [name for name in package.namelist() if name.endswith("wrapper.so")]
            ctypes.CDLL(package.extract(name, folder))
    print("load", flush=True)
    packaged = torch._inductor.aoti_load_package(str(file))
    print("run", flush=True)
    off = (packaged(x) - model(x)).abs().max().item()
    print(f"{LAST}{off:.1e} from the model", flush=True)


def verdict(code: int | None, printed: str) -> str:
    """What became of a process, in a line; it printed its stages and ended with this code."""
    stages = printed.splitlines() or ["its imports"]
    if code == 0 and stages[-1].startswith(LAST):
        return stages[-1]
    if code is None:
        return f"was stopped after {LIMIT:.0f} s in: {stages[-1]}"
    how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    return f"{how} in: {stages[-1]}"


def stacks(err: str) -> list[str]:
    """Of what a process wrote before it died: the C++ stack of the thread that died, which comes
    first, and Python's.
    """
    lines = err.splitlines()
    died = [i for i, line in enumerate(lines) if line.startswith(("SIG", "Fatal Python"))]
    if not died:
        return lines[-20:]
    return [*lines[died[0] : died[0] + 40], "...", *lines[died[-1] : died[-1] + 20]]


def both(case: str, device: str, folder: Path) -> list[str]:
    """The verdicts of the process that compiles a case and of one that loads what it made."""
    command = [sys.executable, "-m", "tests.benchmarks.attention.aoti"]
    command += ["--device", device, "--file"]
    found = []
    for who in ("compiling", "another"):
        file = folder / f"{case}.pt2"
        if who == "another" and not file.exists():
            break
        try:
            done = subprocess.run(
                [*command, str(file), case], capture_output=True, text=True, timeout=LIMIT,
                env=os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"},
            )  # fmt: skip
            code, out, err = done.returncode, done.stdout, done.stderr
        except subprocess.TimeoutExpired as error:
            code, out, err = None, (error.stdout or b"").decode(), ""
        found.append(f"{case:10} {who:10} {verdict(code, out)}")
        if code != 0:
            found += [f"    {line}" for line in stacks(err)]
    return found


def main() -> None:
    """Try the cases and say what became of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)} (all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--file", type=Path, help="go through one case here, with this package")
    arguments = parser.parse_args()
    cases = arguments.cases or list(CASES)
    if arguments.file is not None:
        go_through(cases[0], arguments.device, arguments.file)
        return
    print(f"torch {torch.__version__} on {arguments.device}", flush=True)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(cases)) as pool:
        for lines in pool.map(lambda x: both(x, arguments.device, Path(folder)), cases):
            print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
