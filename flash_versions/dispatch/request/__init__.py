"""One call of attention in one form, and the checks that come before it.

`request.py` has `Request`, the one list of what a call can ask for: the operators of torch have its
fields as arguments. `checks.py` makes it from `Options`, and checks all that is known without
reading device memory. `values.py` reads the values of lengths, tables and scales, if asked to.
"""

from flash_versions.dispatch.request.checks import (
    check_integers,
    check_qkv,
    check_together,
    in_autocast_dtype,
    make_request,
    of_each_key,
)
from flash_versions.dispatch.request.request import (
    INTERVALS,
    PLACES,
    PLANS,
    TENSORS,
    Fields,
    Options,
    Request,
    Sides,
)

__all__ = [
    "INTERVALS",
    "PLACES",
    "PLANS",
    "TENSORS",
    "Fields",
    "Options",
    "Request",
    "Sides",
    "check_integers",
    "check_qkv",
    "check_together",
    "in_autocast_dtype",
    "make_request",
    "of_each_key",
]
