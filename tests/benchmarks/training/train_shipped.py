"""`transformer.train` on one GPU, each step a CUDA graph; train_shipped.sh runs it.

    python -m tests.benchmarks.training.train_shipped --teacher sloppy --out DIR ...
    python -m tests.benchmarks.training.train_shipped --probe

The first command has the options of `transformer.train`. The shipped model is so small that
launching the kernels of a step one by one takes longer than they run. So a step is captured once
for each shape of a batch and then replayed; the arithmetic is that of `Training.update`: on an H200
a captured step took 12 ms and a plain one 16, with the same losses. `--probe` compares the losses
of captured steps with those of plain ones and prints how long both take; its exit code is 0 if they
agree.
"""

import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F

from transformer import train
from transformer.training import byte_tokenizer
from transformer.training.corpus import ChatBatch, Teacher
from transformer.training.parallel import ALONE
from transformer.training.run import IGNORED, Recipe, Training, row_tensors

PROBED = 6  # batches of the probe, each learned five times
AGREE = 0.1  # rounding moves an early loss by a few per cent; a wrong step moves it by more


class Captured(Training):
    """A training on one GPU whose steps are replayed."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        # A captured step reads the learning rate from here.
        self.rate = torch.zeros((), device=self.device)
        for group in self.optimizer.param_groups:
            group.update(lr=self.rate, capturable=self.device.type == "cuda")
        self.graphs, self.seen = {}, set()
        self.pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def learn(self, batch: ChatBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Take one step; see `Training.learn`."""
        tokens, targets = full(batch, self.recipe.batch_tokens)
        self.rate.fill_(self.recipe.rate_at(self.step))
        self.step += 1
        shape = tokens.shape
        if shape not in self.seen:  # what is set up at a first call cannot be captured
            self.seen.add(shape)
            return self.update(tokens.to(self.device), targets.to(self.device))
        if shape not in self.graphs:
            places = tokens.to(self.device), targets.to(self.device)
            self.graphs[shape] = *places, *self.capture(*places)
        to_tokens, to_targets, graph, loss, norm = self.graphs[shape]
        to_tokens.copy_(tokens, non_blocking=True)
        to_targets.copy_(targets, non_blocking=True)
        graph.replay()
        return loss, norm

    def capture(self, tokens: torch.Tensor, targets: torch.Tensor):
        """A graph of a step that reads these tensors, and where it leaves the loss and the norm."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Other threads, such as those of the data, may go on calling CUDA meanwhile.
        with torch.cuda.graph(graph, self.pool, stream, capture_error_mode="thread_local"):
            loss, norm = self.update(tokens, targets)
        return graph, loss, norm


def full(batch: ChatBatch, batch_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of a batch with as many rows as fit, so that there are few shapes."""
    tokens, targets = row_tensors(batch, ALONE)
    missing = batch_tokens // tokens.shape[1] - tokens.shape[0]
    tokens = F.pad(tokens, (0, 0, 0, missing), value=byte_tokenizer.PAD)
    return tokens, F.pad(targets, (0, 0, 0, missing), value=IGNORED)


def probe() -> int:
    """Compare captured steps with plain ones."""
    recipe = Recipe(Teacher(), 0, 10_000, 65536, 1e-3)
    batches = recipe.corpus()[0][:PROBED]
    losses = []
    for kind in (Training, Captured):
        with tempfile.TemporaryDirectory() as folder:
            training = kind(recipe, Path(folder), torch.device("cuda"))
            losses.append([training.learn(batch)[0].item() for _ in range(5) for batch in batches])
            torch.cuda.synchronize()
            began = time.perf_counter()
            for batch in batches:
                training.learn(batch)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / PROBED
        print(f"{kind.__name__}: {1000 * seconds:.1f} ms a step")
    apart = max(abs(ours - plain) / plain for plain, ours in zip(*losses))
    print(f"the losses differ by at most {apart:.2%}")
    return int(apart > AGREE)


def main() -> int:
    """The probe, or a training."""
    if torch.cuda.is_available():
        torch.backends.cuda.enable_cudnn_sdp(False)  # it makes a plan for each shape
        torch.cuda.set_stream(torch.cuda.Stream())  # the default stream cannot be captured
    if sys.argv[1:] == ["--probe"]:
        return probe()
    train.Training = Captured
    return train.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
