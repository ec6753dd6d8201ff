"""A call of attention: the kernels alone, a node of autograd, or an operator of torch."""

import torch
from torch.autograd import forward_ad

from flash_versions.dispatch.autograd.derivatives import NO_FORWARD_MODE
from flash_versions.dispatch.autograd.kept import Call, serve
from flash_versions.dispatch.autograd.operators import forward_operator, is_plain
from flash_versions.dispatch.replay import keys
from flash_versions.dispatch.request import Request
from flash_versions.dispatch.version import EXPLICIT, VERSIONS, Version, choose_version

NO_TRANSFORM = (
    "attention cannot be differentiated by torch.func.grad, vjp or jacrev; use .backward(), "
    "torch.autograd.grad or version='reference'."
)


def run(
    name: str | Version, request: Request, slot: keys.Slot | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(o, lse) of a request by the version of that name, or by the newest that supports it
    ("auto"); differentiable. A baseline may give None for the LSE. With a slot, the call is kept
    there for later ones.

    An operator costs tens of microseconds on the host, as much as launching the kernels. So a
    request of plain tensors that nothing watches runs the same code without it.

    Raises:
        ValueError: no version serves the request, or an operator would have to find one by its name
            that is not registered.
        RuntimeError: a forward-mode derivative is asked for, or a gradient by torch.func.
    """
    version = choose_version(name, request)
    if version.backward is None and not (request.precision and request.needs_grad):
        o, lse, _ = version.forward(request)
        return o, lse
    if forward_ad._current_level >= 0:
        raise RuntimeError(NO_FORWARD_MODE)
    if is_plain(request):
        call = Call(version, request, request.needs_grad)
        # A user's version may launch kernels past the `Launcher`s, which a tape would not know of.
        if slot is not None and VERSIONS.get(version.name) is version:
            slot.keep(call)
        return serve(call, call.tensors(request))
    if (VERSIONS | EXPLICIT).get(version.name) is not version:
        raise ValueError(
            f"version {version.name!r} is not registered; torch.compile, vmap and dispatch modes "
            f"find a version by its name: call it without them, or put it in a file and give the "
            f"name that load_version knows it by."
        )
    try:
        o, lse, _ = forward_operator(version.name, *request)
    except RuntimeError as error:
        if "functorch" in str(error):  # torch tells the operator's author what to write
            raise RuntimeError(NO_TRANSFORM) from error
        raise
    return o, lse
