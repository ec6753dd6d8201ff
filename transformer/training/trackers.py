"""Trackers of experiments, which show the curves of runs: TensorBoard and Weights & Biases.

Every run also writes its own record, which needs none of them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

TRACKERS = ("none", "tensorboard", "wandb")
PROJECT = "flash-versions"  # how Weights & Biases groups the runs


class Tracker(Protocol):
    """Where measurements go."""

    def log(self, step: int, measured: Mapping[str, Any]) -> None:
        """Keep the measurements of a step; what is not a number is left out."""

    def close(self) -> None:
        """End the run."""


class Nothing:
    """No tracker."""

    def log(self, step: int, measured: Mapping[str, Any]) -> None:
        """See `Tracker`."""

    def close(self) -> None:
        """See `Tracker`."""


class TensorBoard:
    """Writes RUN/tensorboard, which `tensorboard --logdir RUN` shows."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, step: int, measured: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        for name, value in numbers(measured).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """See `Tracker`."""
        self._writer.close()


class WeightsAndBiases:
    """Sends to wandb's server, or writes RUN/wandb if the variable WANDB_MODE is "offline"."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, step: int, measured: Mapping[str, Any]) -> None:
        """See `Tracker`."""
        self._run.log(numbers(measured), step=step)

    def close(self) -> None:
        """See `Tracker`."""
        self._run.finish()


def numbers(measured: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """What can be drawn; measurements in a mapping of their own get its name before theirs."""
    found: dict[str, float] = {}
    for name, value in measured.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = value
    return found


def check(name: str) -> None:
    """Refuse a tracker that is not installed, before a run has a folder.

    Raises:
        ValueError: says how to install it.
    """
    try:
        if name == "tensorboard":
            from torch.utils.tensorboard import SummaryWriter  # noqa: F401
        if name == "wandb":
            import wandb  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"--report-to {name}: {name} is not installed; "
            f"pip install 'flash-versions[{name}]' does that."
        ) from error


def open_tracker(name: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    """The tracker of a run.

    Args:
        name: one of TRACKERS.
        folder: of the run, whose name is the run's.
        settings: what the tracker shows beside the curves.

    Raises:
        ValueError: it is not installed, or wandb cannot begin a run.
    """
    check(name)
    if name == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter

        return TensorBoard(SummaryWriter(str(folder / "tensorboard")))
    if name == "wandb":
        import wandb

        about = {"name": folder.resolve().name, "config": dict(settings)}
        try:
            return WeightsAndBiases(wandb.init(project=PROJECT, dir=str(folder), **about))
        except Exception as error:  # wandb's own errors, such as that no key is there
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"--report-to wandb: {reason} (WANDB_MODE=offline needs no account)"
            ) from error
    return Nothing()
