"""What a matrix product asks of emulator.py beyond attention: an accumulator that stays in
flight from product to product, and loads of a vector. `load` is its `load` with these.
"""

from unittest.mock import patch

import torch

from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import wgmma
from flash_versions.dispatch.emulator.emulator import Tensor, gl, gluon, module, tensor_of


class Accumulator:
    """The registers of a product in flight: only the next product may add to them."""

    def __init__(self, product):
        self.product = product

    @property
    def data(self):
        """For the product that adds to it and is computed later, but for nobody else's eyes."""
        if self.product.result is None:
            self.product.compute()
        return self.product.result.data

    def __getattr__(self, name):
        raise AssertionError("a product is read while it is in flight")


def warpgroup_mma_wait(num_outstanding, deps):
    """The emulator's, but that what is still in flight comes back as an `Accumulator`."""
    wgmma.warpgroup_mma_wait(num_outstanding, deps=())
    found = [x.product if isinstance(x, Accumulator) else x for x in deps]
    results = tuple(x.result if x.done else Accumulator(x) for x in found)
    return results[0] if len(results) == 1 else results


def load_values(pointer, mask=None, other=0):
    """A number, or a vector whose elements outside of the mask are not touched."""
    if pointer.offset.dim() == 0:
        return gluon_emulator.load_scalar(pointer)
    mask = tensor_of(mask).expand(pointer.offset.shape)
    inside = pointer.offset[mask]
    assert ((inside >= 0) & (inside < pointer.data.numel())).all(), "a load outside of a tensor"
    values = torch.full(pointer.offset.shape, other, dtype=pointer.data.dtype)
    values[mask] = pointer.data[inside]
    return Tensor(values)


language = module(gl.__name__, **{**vars(gl), "load": load_values})
HOPPER = gluon_emulator.MODULES[gluon_emulator.HOPPER]
MODULES = {
    "triton.experimental.gluon": module("gluon", **{**vars(gluon), "language": language}),
    gl.__name__: language,
    gluon_emulator.HOPPER: module(
        HOPPER.__name__, **{**vars(HOPPER), "warpgroup_mma_wait": warpgroup_mma_wait}
    ),
}


def load(name):
    """`emulator.load` of a matrix product."""
    with patch.dict(gluon_emulator.MODULES, MODULES):
        return gluon_emulator.load(name)
