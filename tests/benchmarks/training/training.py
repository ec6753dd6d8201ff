"""Training with our kernels against torch's attention, on a GPU; writes JSON.

    python -m tests.benchmarks.training.training --out FILE

First one attention layer, forward and backward through autograd as a model calls it: what the host
takes to launch is part of it. Every competitor in turn, round after round; a time is that of STEPS
calls between two synchronisations, divided by STEPS. Then the shipped model, trained from scratch
for 200 steps with each version and seed: the loss after every step. Versions differ by rounding
only, and the curve of one may be as far from another's as those of two seeds are.
"""

import os
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from flash_versions import attention  # noqa: E402
from flash_versions.bench.document import new_document  # noqa: E402
from flash_versions.bench.measure import host_time  # noqa: E402
from flash_versions.bench.peers import PEERS  # noqa: E402
from tests.benchmarks.harness import in_turns, keep, parser  # noqa: E402
from transformer.training.corpus import Teacher  # noqa: E402
from transformer.training.run import Training  # noqa: E402
from transformer.training.teaching import Teaching  # noqa: E402

LAYER, CURVE = "layer", "training curve"
SHAPE = {"B": 8, "S": 2048, "H": 16, "D": 128, "causal": True}
ROUNDS, STEPS = 9, 20
VERSIONS = ("fa2", "fa3", "fa4")
SEEDS, CURVE_STEPS = (0, 1, 2), 200
DEVICE, WORKERS = "cuda", 4


def layer_rows() -> list[dict]:
    """A row for each competitor: seconds of a forward and a backward."""
    sizes = (SHAPE["B"], SHAPE["S"], SHAPE["H"], SHAPE["D"])
    torch.manual_seed(0)
    leaves = [torch.randn(sizes, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
    do = torch.randn_like(leaves[0])
    leaves = [x.requires_grad_() for x in leaves]
    functions = {name: partial(attention, version=name) for name in VERSIONS}
    functions |= {name: PEERS[name].function for name in ("cudnn", "torch fa2")}

    def seconds(function: Callable) -> float:
        def both() -> None:
            torch.autograd.grad(function(*leaves, causal=True), leaves, do)

        return host_time(both, STEPS, wait=True) / 1e6

    calls = {name: partial(seconds, function) for name, function in functions.items()}
    return [
        {"suite": LAYER, "version": name, **SHAPE, "seconds": statistics.median(x), "times": x}
        for name, x in in_turns(calls, ROUNDS).items()
    ]


def curve(version: str, seed: int) -> dict:
    """A row: the loss of every step."""
    how = {"batch_tokens": 65536, "learning_rate": 3e-3, "attention": version, "workers": WORKERS}
    recipe = Teaching(teacher=Teacher(), seed=seed, steps=CURVE_STEPS, **how)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        training = Training(recipe, Path(folder), torch.device(DEVICE))
        for batch, _ in zip(training.batches(), range(CURVE_STEPS)):
            loss, _ = training.learn(batch)
            losses.append(loss.clone() / int(batch.learned[:, 1:].sum()))
    values = [round(x, 5) for x in torch.stack(losses).tolist()]
    return {"suite": CURVE, "version": version, "seed": seed, "losses": values}


def main() -> None:
    """Measure; the file is written again after each part."""
    args = parser(__doc__, device=False).parse_args()
    method = {"rounds": ROUNDS, "steps": STEPS, "method": "wall clock, interleaved, median"}
    document = new_document(DEVICE, protocol=method)
    keep_here = partial(keep, document, args.out, hidden=("times", "losses"))
    keep_here(layer_rows())
    for seed in SEEDS:
        for version in ("sdpa", *VERSIONS[1:]):
            keep_here([curve(version, seed)])


if __name__ == "__main__":
    main()
