"""Bugs that are planted in the text of emulated kernels, to see that the emulator finds them."""

import inspect
import re
import textwrap
from typing import NamedTuple

from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS, Deadlock

WRONG = "wrong result"


class Bug(NamedTuple):
    """Changes of a function's text, and what they lead to in one of the orders."""

    function: str
    changes: list[tuple[str, str]]
    found: str  # a pattern in the message
    case: object = None  # what is run, if not the usual


def plant(bug, modules, monkeypatch):
    """Change the text of a function, and put it in the function's place in all modules; the last
    one that has the name says which function that is.
    """
    *classes, name = bug.function.split(".")
    owners = [x for x in modules if hasattr(x, [*classes, name][0])]
    if classes:
        owners = [getattr(owners[-1], classes[0])]
    function = vars(owners[-1])[name]
    source = getattr(function, "function", function)  # of a kernel, or of plain Python
    text = textwrap.dedent(inspect.getsource(source))
    for old, new in bug.changes:
        assert old in text, f"{bug.function} has no {old!r} any more"
        text = text.replace(old, new)
    scope = {}
    exec(text, source.__globals__, scope)
    for owner in owners:
        if vars(owner)[name] is function:
            monkeypatch.setattr(owner, name, scope[name])
        for x in vars(owner).values():  # a `Launcher`
            if getattr(x, "kernel", None) is function:
                monkeypatch.setattr(x, "kernel", scope[name])


def outcomes(run, monkeypatch):
    """What run(), which says whether the result is right, comes to in one order after the other: an
    error's message, WRONG or "".
    """
    for order in ORDERS.values():
        monkeypatch.setattr(gluon_machine, "order", order)
        try:
            yield "" if run() else WRONG
        except (Deadlock, AssertionError) as error:
            yield str(error)


def assert_found(bug, run, monkeypatch):
    """Fail if a bug that is planted shows in no order."""
    seen = []
    for outcome in outcomes(run, monkeypatch):
        if re.search(bug.found, outcome):
            return
        seen.append(outcome)
    raise AssertionError(f"{bug.found!r} is not in " + "\n".join(seen))
