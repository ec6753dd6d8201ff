"""Trackers of experiments, which show the curves of runs: TensorBoard and Weights & Biases.

Every run also writes its own record, which needs none of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb"}
TRACKERS = ("none", *PACKAGES)
PROJECT = "flash-versions"  # how Weights & Biases groups the runs


@dataclass(frozen=True)
class Tracker:
    """Where measurements go; by default, nowhere.

    Attributes:
        add: is given the numbers of a step, by name, and the step.
        close: ends the run.
    """

    add: Callable[[dict[str, float], int], object] = lambda found, step: None
    close: Callable[[], object] = lambda: None

    def log(self, step: int, measured: Mapping[str, Any]) -> None:
        """Keep the measurements of a step; what is not a number is left out."""
        self.add(numbers(measured), step)


def numbers(measured: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """What can be drawn; measurements in a mapping of their own get its name before theirs."""
    found: dict[str, float] = {}
    for name, value in measured.items():
        if isinstance(value, Mapping):
            found |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = value
    return found


def package(name: str) -> Any:
    """The package of a tracker, None for "none"; a ValueError says how to install it. A command
    calls this before a run has a folder, too.
    """
    try:
        return import_module(PACKAGES[name]) if name != "none" else None
    except ImportError as error:
        raise ValueError(
            f"--report-to {name}: {name} is not installed; "
            f"pip install 'flash-versions[{name}]' does that."
        ) from error


def open_tracker(name: str, folder: Path, settings: Mapping[str, Any]) -> Tracker:
    """The tracker of a run: TensorBoard writes RUN/tensorboard, which `tensorboard --logdir RUN`
    shows; wandb sends to its server, or writes RUN/wandb if the variable WANDB_MODE is "offline".
    Either shows the settings beside the curves.

    Raises:
        ValueError: it is not installed, or wandb cannot begin a run.
    """
    tracker = package(name)
    if name == "tensorboard":
        writer = tracker.SummaryWriter(str(folder / "tensorboard"))

        def add(found: dict[str, float], step: int) -> None:
            for name, value in found.items():
                writer.add_scalar(name, value, step)

        return Tracker(add, writer.close)
    if name == "wandb":
        about = {"name": folder.resolve().name, "config": dict(settings)}
        try:
            run = tracker.init(project=PROJECT, dir=str(folder), **about)
        except Exception as error:  # wandb's own errors, such as that no key is there
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise ValueError(
                f"--report-to wandb: {reason} (WANDB_MODE=offline needs no account)"
            ) from error
        return Tracker(lambda found, step: run.log(found, step=step), run.finish)
    return Tracker()
