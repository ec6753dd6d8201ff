"""What a model asks of the machine and of the versions of attention, below their public API."""

from collections.abc import Sequence
from typing import Any

import torch

import flash_versions
from flash_versions import simulator
from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import Request, make_request
from flash_versions.versions.api import choose_version

__all__ = ["choose_for_all", "devices", "say_simulated"]


def say_simulated() -> None:
    """Say now that kernels are simulated, and not in the midst of an answer."""
    simulator.say()


def choose_for_all(
    name: str,
    heads: tuple[int, int, int],
    kinds: Sequence[dict[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
    precision: str | None = None,
    paged: bool = False,
    sinks: bool = False,
    simulated: bool = True,
) -> tuple[str, list[str]]:
    """The version that will run in all layers, and notes on the choice.

    Where no kernel runs (on the CPU of a machine with a GPU, on a GPU that is too old), or is not
    to be simulated, "auto" is torch's own attention, or where that knows too little, PyTorch
    written out.

    Args:
        name: of a version or a baseline, a file of yours such as "mine.py", or "auto".
        heads: of queries, of keys, and their dimension.
        kinds: what each kind of layer asks of attention, see `Config.attention_options`.
        device, dtype: the model's.
        precision: that of attention.
        paged: whether keys and values lie in pages.
        sinks: whether each head has one.
        simulated: whether "auto" may be a version that is simulated, as all are on a CPU.

    Raises:
        ValueError: it cannot run, in one sentence.
        OSError: there is no such file.
    """
    if name.endswith(".py"):
        flash_versions.load_version(name)
    requests = _requests(heads, kinds, device, dtype, precision, paged, sinks)
    names = [*reversed(flash_versions.VERSIONS)] if name == "auto" else [name]
    if name == "auto" and device.type == "cpu" and not simulated:
        names = []
    refused = None
    for version in names:
        try:
            return {choose_version(version, request).name for request in requests}.pop(), []
        except ValueError as error:
            refused = refused or error
    if refused is not None and (name != "auto" or precision is not None):
        raise refused
    for version, what in (("sdpa", "torch's own"), ("reference", "PyTorch written out")):
        if version == "reference" and device.type == "cuda":
            break  # it waits for the device, which a captured step cannot
        try:
            for request in requests:
                choose_version(version, request)
        except ValueError as error:
            refused = refused or error
            continue
        return version, [f"attention is {version}, {what}: {refused}"] if refused else []
    assert refused is not None
    raise refused


def _requests(
    heads: tuple[int, int, int],
    kinds: Sequence[dict[str, Any]],
    device: torch.device,
    dtype: torch.dtype,
    precision: str | None,
    paged: bool,
    sinks: bool,
) -> list[Request]:
    """A small request for each kind of layer: what it asks of attention in a decoding step."""
    q = torch.zeros(1, 1, heads[0], heads[2], device=device, dtype=dtype)
    k = q[:, :, : heads[1]]  # also a page of one token
    ones = torch.ones(1, dtype=torch.int32, device=device)
    table = torch.zeros(1, 1, dtype=torch.int32, device=device) if paged else None
    common: dict[str, Any] = {
        "causal": True,
        "kv_lengths": ones,
        "block_table": table,
        "precision": precision,
        "sink": torch.zeros(heads[0], device=device, dtype=dtype) if sinks else None,
    }
    return [make_request(q, k, k, **common, **options) for options in kinds]
