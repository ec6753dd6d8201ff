"""Things by name: one of ours, or a Python object of the user's as `package.module:attribute`."""

import importlib
from collections.abc import Mapping
from typing import Any


def find_named(name: str, known: Mapping[str, Any], kind: str, form: str) -> Any:
    """What a name means.

    Args:
        name: a key of `known`, or `package.module:attribute`, which is imported.
        known: ours.
        kind: what is looked for, for messages: task, reward.
        form: how the user may name one of their own: module:Class, module:function.

    Raises:
        ValueError: there is nothing of this name.
    """
    if name in known:
        return known[name]
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(
            f"no {kind} is called {name!r}; there are {', '.join(known)}, and {form} for one of"
            " your own"
        )
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the user's module may raise anything
        raise ValueError(f"there is no {kind} {name}: {error}") from error
