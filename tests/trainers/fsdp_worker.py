"""One of two processes of a run under FSDP2: torchrun -m tests.trainers.fsdp_worker FOLDER.

The first process writes the steps of a run with SDPA and of one with ours to FOLDER/steps.pt.
Sharding is `fully_shard`, torch's function that accelerate calls on GPUs; accelerate does not shard
on CPUs.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from tests.trainers.runs import LENGTH, OURS, STEPS, VOCABULARY, random_model

LR, WORLD = 0.05, 2


def rows_of(step: int, rank: int) -> torch.Tensor:
    """Tokens (2, LENGTH) of a process in a step."""
    g = torch.Generator().manual_seed(WORLD * step + rank)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=g)


def train(implementation: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses, the mean of both processes, and whole gradients of each step."""
    model = random_model(implementation)
    mesh = dist.device_mesh.init_device_mesh("cpu", (WORLD,))
    for part in (*model.model.layers, model):
        fully_shard(part, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    losses, gradients = [], []
    for step in range(STEPS):
        rows = rows_of(step, dist.get_rank())
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean) / WORLD)
        gradients.append({n: p.grad.full_tensor() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {name: train(name) for name in ("sdpa", OURS)}
    if dist.get_rank() == 0:
        torch.save(found, Path(sys.argv[1]) / "steps.pt")
    dist.destroy_process_group()
