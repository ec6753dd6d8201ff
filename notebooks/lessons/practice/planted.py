"""A bug in the kernel for Blackwell for a reader to find, and what the emulator says about it."""

import inspect
import textwrap
from typing import Any
from unittest.mock import patch

import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator, machine
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request

KERNEL = "flash_versions.versions.fa4.blackwell.forward"
FUNCTION = "correct"
RESCALED = "rescale(buffers.acc.index(t), buffers.get(t, ALPHA, O), D)"
ARRIVED = "mbarrier.arrive(buffers.p_full.index(t), count=1)"
SPACE = " " * 16


def planted() -> str:
    """The text of the correction with a bug: it has two lines in the wrong order."""
    right = [f"{SPACE}{RESCALED}", f"{SPACE}{ARRIVED}"]
    text = text_of(emulator.load(KERNEL)["fa4.blackwell.forward"])
    made = text.replace("\n".join(right), "\n".join(reversed(right)))
    assert made != text
    return made


def text_of(module: Any) -> str:
    """The text of the correction."""
    return textwrap.dedent(inspect.getsource(vars(module)[FUNCTION].function))


def outcomes(text: str) -> dict[str, str]:
    """What comes of a call whose correction has this text, in each of the emulator's orders.

    Args:
        text: of the function `correct`.

    Returns:
        the complaint of the emulator or of the error budget, "" if there is none, by the order.

    Raises:
        SyntaxError: the text is no Python.
        NameError: it does not define `correct`.
    """
    loaded = emulator.load(KERNEL)
    forward, config = loaded["fa4.blackwell.forward"], loaded["fa4.blackwell.config"]
    scope: dict[str, Any] = {}
    exec(text, vars(forward), scope)
    if FUNCTION not in scope:
        raise NameError(f"the text does not define {FUNCTION}()")
    generator = torch.Generator().manual_seed(0)
    # Scores that differ much: the references are raised in later blocks, too.
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator) for n in (300, 400, 400))
    request = make_request(*(x.bfloat16() for x in (20 * q, k, v)))
    found = {}
    for name, order in machine.ORDERS.items():
        with (
            patch.object(forward, FUNCTION, scope[FUNCTION]),
            patch.object(loaded["fa4.blackwell.tensor_memory"], "available", lambda device: True),
            patch.object(devices, "assumed", Properties(num_sms=1)),
            patch.object(machine, "order", order),
        ):
            try:
                o, lse, _ = forward.forward(request, config.BlackwellConfig(stages=4))
                assessed = assess_request({"o": o, "lse": lse}, request)
                found[name] = "; ".join(f"{x}: {a}" for x, a in assessed.items() if not a.ok)
            except (machine.Deadlock, AssertionError) as error:
                found[name] = str(error)
    return found
