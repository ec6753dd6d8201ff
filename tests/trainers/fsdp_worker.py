"""One of two processes of a run under FSDP2: torchrun -m tests.trainers.fsdp_worker FOLDER.

The first process writes the steps of a run with SDPA and of one with ours to FOLDER/steps.pt.
accelerate's `prepare` shards the model by torch's `fully_shard`. It does so on GPUs only, so it is
told that these two processes on a CPU are such a run.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor

from tests.trainers.runs import LENGTH, OURS, STEPS, VOCABULARY, random_model

LR, WORLD = 0.05, 2


def rows_of(step: int, rank: int) -> torch.Tensor:
    """Tokens (2, LENGTH) of a process in a step."""
    g = torch.Generator().manual_seed(WORLD * step + rank)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=g)


def accelerator() -> Accelerator:
    """One that shards on a CPU."""
    made = Accelerator(cpu=True)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    AcceleratorState._shared_state |= {"fsdp_plugin": plugin}
    for state in (AcceleratorState, PartialState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    assert made.is_fsdp2
    return made


def train(
    accelerator: Accelerator, implementation: str
) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses, the mean of both processes, and whole gradients of each step."""
    model = random_model(implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    model, optimizer = accelerator.prepare(model, optimizer)
    assert all(isinstance(x, DTensor) for x in model.parameters())
    losses, gradients = [], []
    for step in range(STEPS):
        rows = rows_of(step, accelerator.process_index)
        loss = model(input_ids=rows, labels=rows).loss
        accelerator.backward(loss)
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


if __name__ == "__main__":
    made = accelerator()
    found = {name: train(made, name) for name in ("sdpa", OURS)}
    if made.is_main_process:
        torch.save(found, Path(sys.argv[1]) / "steps.pt")
    dist.destroy_process_group()
