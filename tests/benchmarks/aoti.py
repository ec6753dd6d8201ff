"""Does a model with `flash_attn_func` survive AOTInductor? python -m tests.benchmarks.aoti

Exports a small model, compiles it into a package, loads the package and compares: each stage is
printed before it begins, so that the last line tells where a process died. On a GPU it takes less
than a minute. `--device cpu` does the same there, with kernels interpreted.
"""

import argparse
import faulthandler
import tempfile
from pathlib import Path

import torch

import flash_versions  # noqa: F401  before triton, so that a CPU interprets
from flash_versions.flash_attn import flash_attn_func


class Layer(torch.nn.Module):
    """Two heads of attention between two projections."""

    def __init__(self, head_dim: int):
        super().__init__()
        self.inward = torch.nn.Linear(32, 3 * 2 * head_dim)
        self.outward = torch.nn.Linear(2 * head_dim, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, 32) to the same."""
        q, k, v = self.inward(x).unflatten(-1, (3, 2, -1)).unbind(2)
        return self.outward(flash_attn_func(q, k, v, causal=True).flatten(2))


@torch.no_grad()
def main() -> None:
    """Go through the stages on one device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    faulthandler.enable()
    dtype, head_dim, length = (torch.bfloat16, 64, 256) if device == "cuda" else (None, 16, 24)
    torch.manual_seed(0)
    model = Layer(head_dim).to(device, dtype).eval()
    x = torch.randn(1, length, 32, device=device, dtype=dtype)
    print(f"torch {torch.__version__} on {device}: export", flush=True)
    exported = torch.export.export(model, (x,))
    with tempfile.TemporaryDirectory() as folder:
        print("compile and package", flush=True)
        file = str(Path(folder) / "model.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=file)
        print("load", flush=True)
        packaged = torch._inductor.aoti_load_package(file)
        print("run", flush=True)
        off = (packaged(x) - model(x)).abs().max().item()
    print(f"works: the largest difference from the model is {off:.1e}", flush=True)


if __name__ == "__main__":
    main()
