"""The losses of training from scratch with our kernels and with torch's attention, on a GPU; JSON.

    python -m tests.benchmarks.training.training --out FILE

The shipped model is trained for 200 steps with each version and seed: the loss after every step.
Versions differ by rounding only, and the curve of one may be as far from another's as those of two
seeds are.
"""

import os
import tempfile
from itertools import product
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from flash_versions.bench.document import new_document  # noqa: E402
from tests.benchmarks.harness import keep, parser  # noqa: E402
from transformer.training.corpus import Teacher  # noqa: E402
from transformer.training.run import Training  # noqa: E402
from transformer.training.teaching import Teaching  # noqa: E402

VERSIONS, SEEDS, STEPS = ("sdpa", "fa3", "fa4"), (0, 1, 2), 200
DEVICE, WORKERS = "cuda", 4


def curve(version, seed):
    """A row: the loss of every step."""
    how = {"batch_tokens": 65536, "learning_rate": 3e-3, "attention": version, "workers": WORKERS}
    recipe = Teaching(teacher=Teacher(), seed=seed, steps=STEPS, **how)
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        training = Training(recipe, Path(folder), torch.device(DEVICE))
        for batch, _ in zip(training.batches(), range(STEPS)):
            loss, _ = training.learn(batch)
            losses.append(loss.clone() / int(batch.learned[:, 1:].sum()))
    values = [round(x, 5) for x in torch.stack(losses).tolist()]
    return {"suite": "training curve", "version": version, "seed": seed, "losses": values}


def main():
    """Measure; the file is written again after each run."""
    args = parser(__doc__, device=False).parse_args()
    document = new_document(DEVICE, protocol={"steps": STEPS})
    for seed, version in product(SEEDS, VERSIONS):
        keep(document, args.out, [curve(version, seed)], hidden=("losses",))


if __name__ == "__main__":
    main()
