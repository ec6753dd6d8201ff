"""A bug in the kernel for Blackwell for a reader to find, and what the simulator says about it."""

import inspect
import linecache
from typing import Any
from unittest.mock import patch

import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.simulator import AccessError, CompileError, Deadlock
from flash_versions.simulator.gluon.machine import ORDERS, using
from flash_versions.versions.fa4.blackwell import forward
from flash_versions.versions.fa4.blackwell.config import BlackwellConfig
from flash_versions.versions.oracle.budget import assess_request

BLACKWELL = Properties((10, 0), num_sms=1)
FUNCTION = "correct"
FILE = "<the correction>"
RESCALED = "rescale(buffers.acc.index(t), buffers.get(t, ALPHA, O), D)"
ARRIVED = "mbarrier.arrive(buffers.p_full.index(t), count=1)"
SPACE = " " * 16


def planted() -> str:
    """The text of the correction with a bug: it has two lines in the wrong order."""
    right = [f"{SPACE}{RESCALED}", f"{SPACE}{ARRIVED}"]
    text = inspect.getsource(forward.correct.fn)
    made = text.replace("\n".join(right), "\n".join(reversed(right)))
    assert made != text
    return made


def correction(text: str) -> Any:
    """The function that a text of `correct` defines among the kernel's.

    Raises:
        SyntaxError: the text is no Python.
        NameError: it does not define `correct`.
    """
    lines = text.splitlines(keepends=True)
    linecache.cache[FILE] = len(text), None, lines, FILE  # where Triton looks for the text
    scope: dict[str, Any] = {}
    exec(compile(text, FILE, "exec"), vars(forward), scope)
    if FUNCTION not in scope:
        raise NameError(f"the text does not define {FUNCTION}()")
    return scope[FUNCTION]


def outcomes(text: str) -> dict[str, str]:
    """What comes of a call whose correction has this text, in each of the simulator's orders.

    Args:
        text: of the function `correct`.

    Returns:
        the complaint of the simulator or of the error budget, "" if there is none, by the order.

    Raises:
        SyntaxError: the text is no Python.
        NameError: it does not define `correct`.
    """
    generator = torch.Generator().manual_seed(0)
    # Scores that differ much: the references are raised in later blocks, too.
    q, k, v = (torch.randn(1, n, 1, 64, generator=generator) for n in (300, 400, 400))
    request = make_request(*(x.bfloat16() for x in (20 * q, k, v)))
    found = {}
    with devices.assume(BLACKWELL), patch.object(forward, FUNCTION, correction(text)):
        for name, order in ORDERS.items():
            try:
                with using(order=order):
                    o, lse, _ = forward.forward(request, BlackwellConfig(stages=4))
                assessed = assess_request({"o": o, "lse": lse}, request)
                found[name] = "; ".join(f"{x}: {a}" for x, a in assessed.items() if not a.ok)
            except (AccessError, CompileError, Deadlock, AssertionError) as error:
                found[name] = str(error)
    return found
