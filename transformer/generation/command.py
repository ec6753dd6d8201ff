"""What the commands of this package share: how they fail, and how they name a device."""

import argparse
import gc
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

import flash_versions

ATTENTIONS = ("auto", *flash_versions.BASELINES, *flash_versions.VERSIONS, *flash_versions.LESSONS)
INTERRUPTED = 130  # the exit code of a command after Ctrl-C


def attention_name(text: str) -> str:
    """The name of a version or a baseline, or a file of a version, for argparse."""
    if text in ATTENTIONS or text.endswith(".py"):
        return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is unknown; {', '.join(ATTENTIONS)} and a file such as mine.py work"
    )


def flag(name: str) -> str:
    """The option of an argument."""
    return f"--{name.replace('_', '-')}"


def refuse_below(arguments: object, **least: int) -> None:
    """Raise a ValueError for an attribute that is given and below its least value."""
    for name, number in least.items():
        if (value := getattr(arguments, name)) is not None and value < number:
            raise ValueError(f"{flag(name)} must be at least {number}, got {value}")


def interruptible() -> None:
    """Let Ctrl-C raise KeyboardInterrupt. While a command is imported it ends the process instead,
    see the package's `__init__`.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def out_of_memory(error: Exception) -> bool:
    """Whether a GPU's or the machine's memory is full; torch has an exception for GPUs only."""
    if isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error):
        return True
    return isinstance(error, MemoryError | torch.OutOfMemoryError)


def describe_error(error: Exception) -> str:
    """One sentence about an error; what the system refused begins with the file's name."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


class ElsewhereError(Exception):
    """Another process of the run failed, and says why."""

    everywhere = True  # all processes know of it


def run_training(run: Callable[[], None], less_memory: str) -> int:
    """Run a command that trains, and say what ends it on standard error. The exit code: 0, 2 for a
    wrong request, 130 if interrupted. A smaller value of the option `less_memory` needs less.
    """
    try:
        interruptible()
        run()
        return 0
    except KeyboardInterrupt:
        sys.stderr.write(
            "\ninterrupted; the same command goes on from the last saved state, if there is one\n"
        )
        return INTERRUPTED
    except ElsewhereError:
        pass
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {describe_error(error)}\n")
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        sys.stderr.write(f"error: the memory is full; a smaller {less_memory} needs less\n")
    gc.collect()  # a group of processes that an error holds must not end with the interpreter
    return 2


class Parser(argparse.ArgumentParser):
    """Raises ValueError for a wrong command line, so that all errors are reported alike."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong."""
        raise ValueError(f"{message} (--help lists the options)")


def choose_device(name: str) -> torch.device:
    """The device by its name; "auto" is the first GPU, or the CPU if there is none."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"--device {name} is unknown; auto, cpu, cuda and cuda:N work") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {name} is not supported; auto, cpu, cuda and cuda:N are")
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise ValueError(f"--device {name} is not there: torch finds {count} NVIDIA GPUs")
    return device
