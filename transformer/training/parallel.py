"""Several processes on one run: `torchrun --nproc-per-node N -m transformer.grpo ...`.

    weights     FSDP2 (`fully_shard`): a rank keeps 1/N of every parameter, of its gradient and of
                the optimiser's moments; a layer is gathered when it is computed
    rollouts    a rank samples its share of the groups from a plain copy of the weights: ranks end
                at different times, so nothing in decoding may wait for another rank
    gradients   averaged over the ranks by FSDP, so a loss that is to be summed is multiplied by N
    state       `torch.distributed.checkpoint`: every rank writes what it holds, and any number of
                ranks, or one plain process, can go on from it

One process is the special case in which nothing here does anything. Ranks talk through NCCL on GPUs
and gloo on CPUs. All of them must reach every collective, in the same order: what may fail on one
rank alone (a reward, a file) happens inside `World.together`, which tells the others.

Sources: ZeRO (arXiv:1910.02054), PyTorch FSDP (arXiv:2304.11277).
"""

import gc
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from transformer.generation.command import ElsewhereError, choose_device, out_of_memory
from transformer.model.decoder import Transformer
from transformer.model.files import replacing, writing

RECORD = "record.pt"  # of a sharded state: all that is no tensor of the model or the optimiser
TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


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

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(x)
        return x

    def max(self, x: Tensor) -> Tensor:
        """The largest over the ranks, in place."""
        if self.mesh is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX)
        return x

    def total(self, number: float) -> float:
        """The sum of a number over the ranks, in fp64."""
        if self.mesh is None:
            return float(number)
        return self.sum(torch.tensor(number, dtype=torch.float64, device=self.device)).item()

    def most(self, number: float) -> float:
        """The largest of a number over the ranks."""
        if self.mesh is None:
            return float(number)
        return self.max(torch.tensor(number, dtype=torch.float64, device=self.device)).item()

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
    """The weights that learn and the optimiser's state, for `write_state`."""
    if world.mesh is None:
        return {"model": trained(model), "optimizer": optimizer.state_dict()}
    weights, moments = get_state_dict(model, optimizer, options=TRAINED)
    return {"model": weights, "optimizer": moments}


def restore_training(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Put back what `read_state` found, whether one process or several saved it, and are here.

    Raises:
        ValueError: a sharded state is damaged.
    """
    if "shards" in state:
        weights, moments = get_state_dict(model, optimizer, options=TRAINED)
        with undamaged(state["shards"]), _own_errors(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
            dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=state["shards"])
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=moments, options=TRAINED
        )
        return
    parameters = trained(model)
    for name, parameter in parameters.items():
        parameter.copy_(_spread_like(state["model"][name], parameter))
    shaped = dict(enumerate(parameters.values()))  # the optimiser numbers them
    moments = {
        number: {
            name: _spread_like(x, shaped[number]) if x.shape == shaped[number].shape else x
            for name, x in kept.items()
        }
        for number, kept in state["optimizer"]["state"].items()
    }
    optimizer.load_state_dict({**state["optimizer"], "state": moments})


def _spread_like(x: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, spread over the ranks as another is; each rank holds all of it already."""
    if not isinstance(like, DTensor):
        return x
    return distribute_tensor(x, like.device_mesh, like.placements, src_data_rank=None)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise what a rank's file system raised: the exception around it is no `Exception`."""
    try:
        yield
    except dcp.CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error


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
    """Write the state of a run, replacing the one before it at once.

    Args:
        path: of one process's file; several write a folder beside it, PATH's stem and the step.
        state: `training_state` and what else the next step depends on, "step" among it.
        world: all of its ranks call this.

    Raises:
        ValueError: a weight is no longer finite; the state before it is left.
    """
    with world.together():
        for name, weight in state["model"].items():
            if not (weight.to_local() if isinstance(weight, DTensor) else weight).isfinite().all():
                raise ValueError(
                    f"{name} is no longer finite at step {state['step']}, so nothing is saved; a"
                    " smaller --lr helps"
                )
    if world.mesh is None:
        with replacing(path) as temporary:
            _save(state, temporary)
        _forget_shards(path)
        return
    # Whatever is killed here, one complete state at least is left; of two, either will do.
    folder = path.with_name(f"{path.stem}-{state['step']:08d}")
    temporary = _unfinished(path)
    tensors = {name: state[name] for name in ("model", "optimizer")}
    record = {name: value for name, value in state.items() if name not in tensors}
    with world.together():
        if world.main:
            shutil.rmtree(temporary, ignore_errors=True)
    with alike(), writing(folder):
        try:
            dcp.save(tensors, checkpoint_id=temporary)
        except dcp.CheckpointException as error:
            raise _unwritten(next(iter(error.failures.values()))[0], folder) from error
    with world.together(), writing(folder):
        if world.main:
            _save(record, temporary / RECORD)
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            path.unlink(missing_ok=True)
            _forget_shards(path, but=folder)


def _unwritten(error: BaseException, folder: Path) -> BaseException:
    """What to raise for the error of a rank that could not write. It comes from another process, so
    what the system said to torch is lost.
    """
    if isinstance(error, RuntimeError) and not out_of_memory(error):
        return OSError(f"{folder} could not be written; the disk may be full")
    return error


def _save(x: Any, path: Path) -> None:
    """`torch.save` through a file of Python's, which says what is wrong with it."""
    with path.open("wb") as file:
        torch.save(x, file)


def read_state(path: Path, device: torch.device) -> dict[str, Any] | None:
    """The state that `write_state` wrote, for `restore_training`; None if there is none."""
    if shards := _shards(path):
        record = torch.load(shards[-1] / RECORD, map_location=device, weights_only=True)
        return {**record, "shards": shards[-1]}
    if path.exists():
        return torch.load(path, map_location=device, weights_only=True)
    return None


def has_state(path: Path) -> bool:
    """Whether `read_state` would find one."""
    return path.exists() or bool(_shards(path))


def forget_state(path: Path) -> None:
    """Delete the state, whichever form it has."""
    path.unlink(missing_ok=True)
    _forget_shards(path)


def _shards(path: Path) -> list[Path]:
    """Complete sharded states, the last one saved at the end."""
    return [record.parent for record in sorted(path.parent.glob(f"{path.stem}-*/{RECORD}"))]


def _unfinished(path: Path) -> Path:
    return path.with_name(f".{path.stem}")


def _forget_shards(path: Path, but: Path | None = None) -> None:
    for folder in (_unfinished(path), *path.parent.glob(f"{path.stem}-*")):
        if folder != but:
            (folder / RECORD).unlink(missing_ok=True)  # first: what is left is complete no more
            shutil.rmtree(folder, ignore_errors=True)
