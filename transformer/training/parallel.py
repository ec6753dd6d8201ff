"""Several processes on one run: `torchrun --nproc-per-node N -m transformer.grpo ...`.

    weights     FSDP2 (`fully_shard`): a rank keeps 1/N of every parameter, of its gradient and of
                the optimiser's moments; a layer is gathered when it is computed
    rollouts    a rank samples its share of the groups from a plain copy of the weights: ranks end
                at different times, so nothing in decoding may wait for another rank
    gradients   averaged over the ranks by FSDP, so a loss that is to be summed is multiplied by N
    state       the first rank writes it whole, so any number of ranks, or one plain process, can
                go on from it

One process is the special case in which nothing here does anything. Ranks talk through NCCL on GPUs
and gloo on CPUs. All of them must reach every collective, in the same order: what may fail on one
rank alone (a reward, a file) happens inside `World.together`, which tells the others.

Sources: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
"""

import gc
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from transformer.generation.command import ElsewhereError, choose_device, out_of_memory
from transformer.model.decoder import Transformer
from transformer.model.files import replacing


@dataclass(frozen=True)
class World:
    """The processes of a run, as one of them sees them.

    Attributes:
        device: of this rank.
        rank: number of this process, from 0.
        size: how many there are.
        mesh: of their devices, None for one process.
    """

    device: torch.device = torch.device("cpu")
    rank: int = 0
    size: int = 1
    mesh: DeviceMesh | None = None

    @property
    def main(self) -> bool:
        """Whether this rank writes files and talks."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Which of `count` things are this rank's: neighbours, as many as the others' or one less
        or more.
        """
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def reduce(self, x: Tensor, by: Any = dist.ReduceOp.SUM) -> Tensor:
        """The sum over the ranks, or another reduction, in place."""
        if self.mesh is not None:
            dist.all_reduce(x, by)
        return x

    def total(self, number: float, by: Any = dist.ReduceOp.SUM) -> float:
        """The same of a number, in fp64."""
        if self.mesh is None:
            return float(number)
        x = torch.tensor(number, dtype=torch.float64, device=self.device)
        return self.reduce(x, by).item()

    def gather(self, x: Any) -> list[Any]:
        """What each rank gave, by rank; it is pickled."""
        if self.mesh is None:
            return [x]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, x)
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Leave the block together: an error in it on one rank ends all of them.

        The first rank that failed raises its error, all others `ElsewhereError`. Inside there must
        be no collective, which a rank that failed would never reach.
        """
        error = None
        try:
            yield
        except Exception as raised:
            if self.mesh is None:
                raise
            error = raised
        failed = self.gather(error is not None)
        if any(failed):
            if error is not None and failed.index(True) == self.rank:
                error.everywhere = True  # type: ignore[attr-defined]
                raise error
            raise ElsewhereError from error


ALONE = World()


@contextmanager
def alike() -> Iterator[None]:
    """For errors that all ranks make alike, before they are connected: one of them says it."""
    try:
        yield
    except (ValueError, OSError) as error:
        if int(os.environ.get("RANK", 0)):
            raise ElsewhereError from error
        raise


def own_device(name: str) -> torch.device:
    """The device of this process: as `choose_device` says, but a GPU of its own under torchrun.

    Raises:
        ValueError: it is not there, or there are more processes than GPUs.
    """
    device = choose_device(name)
    here, everywhere = (int(os.environ.get(x, 1)) for x in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if max(here, everywhere) == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        if here == 1:
            return device
        raise ValueError(
            f"--device {name} would be every process's; with torchrun, --device cuda gives each a"
            " GPU of its own"
        )
    if here > torch.cuda.device_count():
        raise ValueError(
            f"torchrun started {here} processes here but torch finds {torch.cuda.device_count()}"
            " GPUs; --nproc-per-node may be as many"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


@contextmanager
def connected(device: torch.device) -> Iterator[World]:
    """The world that torchrun describes in the environment; a plain process is alone.

    After an error that the ranks do not know of `together`, nothing is taken down: others may wait
    in a collective, until torchrun ends them because this one has ended.

    What has been imported stays, and Python's garbage collector need not look through it again: a
    tenth of a second now and then, on one rank for which all others wait.
    """
    gc.freeze()
    size = int(os.environ.get("WORLD_SIZE", 1))
    if size == 1:
        yield World(device)
        return
    if device.type == "cuda":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink multicast is not on every machine
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    try:
        yield World(device, dist.get_rank(), size, init_device_mesh(device.type, (size,)))
    except Exception as error:
        if getattr(error, "everywhere", False):
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


def refuse_another(what: str, ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """ValueError if what a folder holds, such as "runs/a holds a run", has other settings."""
    for name, value in ours.items():
        if (other := theirs.get(name)) != value:
            raise ValueError(
                f"{what} with another {name} ({other}, now {value}); repeat its command or use"
                " another --out"
            )


# ---- weights ----


def shard(model: Transformer, world: World, dtype: torch.dtype) -> None:
    """Spread a model over the ranks, in place; each must hold the same weights.

    Args:
        model: its parameters become DTensors. Optimisers are made afterwards.
        world: the ranks; one keeps the model as it is.
        dtype: of the arithmetic; the parameters keep theirs, and gradients are summed in fp32.
    """
    if world.mesh is None:
        return
    precision = MixedPrecisionPolicy()
    if dtype != torch.float32:
        precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for part in (*model.model.layers, model):
        # Layers stay gathered until their backward pass: memory for half of the traffic.
        fully_shard(part, mesh=world.mesh, mp_policy=precision, reshard_after_forward=False)


def forward_in(
    dtype: torch.dtype, model: nn.Module, world: World, tokens: Tensor, **options: Any
) -> Tensor:
    """Logits by the arithmetic in which the model is used; gradients go to its fp32 weights."""
    if dtype == torch.float32 or world.size > 1:  # FSDP rounds by itself
        return model(tokens, **options)
    weights = {name: p.to(dtype) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, (tokens,), options)


def exchange_gradients(model: nn.Module, wanted: bool) -> None:
    """Say whether the next backward pass ends in the sum over ranks: only the last one need."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(wanted)
        model.set_reshard_after_backward(wanted)


def whole(x: Tensor) -> Tensor:
    """All of a tensor that may be spread over the ranks, without its gradient."""
    x = x.detach()
    return x.full_tensor() if isinstance(x, DTensor) else x


@contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """All weights of a sharded model on every rank for a while, in the dtype of the arithmetic.

    The weights of a layer travel together, where `whole` sends each by itself.
    """
    parts = [part for part in model.modules() if isinstance(part, FSDPModule)]
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def clip_gradients(parameters: Sequence[Tensor], largest: float) -> Tensor:
    """Scale the gradients so that their norm is at most `largest`; the norm before, 0-d."""
    return whole(nn.utils.clip_grad_norm_(parameters, largest))


# ---- state ----


def trained(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that learn, by name."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def training_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> dict[str, Any]:
    """The weights that learn and the optimiser's state, for `write_state`; all ranks call this
    together. Of a sharded model the first rank has all tensors, whole and on the CPU.
    """

    def kept(x: Any) -> Any:
        if world.mesh is None or not isinstance(x, Tensor):
            return x
        x = whole(x)  # one at a time: a GPU need not hold all of the state
        return x.cpu() if world.main else None

    found = optimizer.state_dict()
    moments = {
        number: {name: kept(x) for name, x in of_weight.items()}
        for number, of_weight in found["state"].items()
    }
    weights = {name: kept(x) for name, x in trained(model).items()}
    return {"model": weights, "optimizer": {**found, "state": moments}}


def restore_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Put back what `read_state` found, whether one process or several saved it, and are here."""
    parameters = trained(model)
    for name, parameter in parameters.items():
        parameter.copy_(_spread_like(state["model"][name], parameter))
    shaped = dict(enumerate(parameters.values()))  # the optimiser numbers them
    moments = {
        number: {
            name: _spread_like(x, shaped[number]) if x.shape == shaped[number].shape else x.clone()
            for name, x in kept.items()
        }
        for number, kept in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({**state["optimizer"], "state": moments})


def _spread_like(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of another, spread over the ranks as that is; each rank has all
    of it.
    """
    x = x.to(like.device, copy=True)  # of a file that is to be replaced
    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def undamaged(path: Path, remedy: str = "delete it") -> Iterator[None]:
    """Turn what a damaged file raises, which depends on where it is damaged, into one sentence."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if out_of_memory(error):
            raise
        raise ValueError(f"{path} is damaged; {remedy} to start again") from error


def write_state(path: Path, state: dict[str, Any], world: World) -> None:
    """Write the state of a run, `training_state` and what else the next step depends on, "step"
    among it, replacing the one before it at once; all ranks call this together.

    Raises:
        ValueError: a weight is no longer finite; the state before it is left.
    """
    with world.together():
        if not world.main:
            return
        for name, weight in state["model"].items():
            if not weight.isfinite().all():
                raise ValueError(
                    f"{name} is no longer finite at step {state['step']}, so nothing is saved; a"
                    " smaller --lr helps"
                )
        # Through a file of Python's, which says what is wrong with it.
        with replacing(path) as temporary, temporary.open("wb") as file:
            torch.save(state, file)


def read_state(path: Path) -> dict[str, Any] | None:
    """The state that `write_state` wrote, for `restore_training`; None if there is none. Its
    tensors stay in the file until they are copied, so several ranks hold them once.
    """
    if not path.exists():
        return None
    return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
