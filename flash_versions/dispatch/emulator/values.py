"""Tensors in registers, for emulator.py: what a kernel computes with, on torch's."""

import operator
from typing import NamedTuple

import torch


def raw(x):
    return x.data if isinstance(x, Tensor) else x


def tensor_of(x):
    """The torch tensor of a value; a Python number is an int32 or an fp32."""
    if isinstance(x, Tensor):
        return x.data
    if isinstance(x, float):  # or a constant that is one
        return torch.tensor(float(x), dtype=torch.float32)
    return torch.tensor(x, dtype=torch.bool if isinstance(x, bool) else torch.int32)


class Tensor:
    """A tensor in registers, or a number at run time: one of no dimension."""

    class type:
        layout = None

    def __init__(self, data):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    def to(self, dtype, bitcast=False):
        return Tensor(self.data.view(dtype) if bitcast else self.data.to(dtype))

    def reshape(self, shape):
        return Tensor(self.data.reshape(shape))

    def permute(self, axes):
        return Tensor(self.data.permute(axes))

    def __getitem__(self, index):
        return Tensor(self.data[index])

    def __invert__(self):
        return Tensor(~self.data)

    def __neg__(self):
        return Tensor(-self.data)

    def __bool__(self):
        return bool(self.data)

    def __index__(self):
        return int(self.data)


class Pointer(NamedTuple):
    """Where elements of a tensor in memory are."""

    data: torch.Tensor
    offset: torch.Tensor = torch.tensor(0)

    def __add__(self, offset):
        return Pointer(self.data, self.offset + tensor_of(offset).long())

    def to(self, dtype):
        """The address, 0 of an empty tensor."""
        address = self.data.data_ptr() + self.offset * self.data.element_size()
        return Tensor(address.to(dtype))


def computed(function):
    return lambda *values: Tensor(function(*map(tensor_of, values)))


def truncated(a, b):
    return torch.div(a, b, rounding_mode="trunc")


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OPERATORS = "add", "sub", "mul", "truediv", "lshift", "rshift", "and", "or", "xor"
for _name in (*_OPERATORS, *_COMPARISONS):
    _function = getattr(operator, f"__{_name}__")
    setattr(Tensor, f"__{_name}__", lambda a, b, f=_function: Tensor(f(a.data, raw(b))))
    setattr(Tensor, f"__r{_name}__", lambda a, b, f=_function: Tensor(f(raw(b), a.data)))
for _name, _function in {"floordiv": truncated, "mod": torch.fmod}.items():  # as in C
    setattr(Tensor, f"__{_name}__", computed(_function))
    setattr(Tensor, f"__r{_name}__", computed(lambda a, b, f=_function: f(b, a)))


def allocation(x):
    """Which allocation of shared memory, or what registers, a value is part of."""
    return x.data.untyped_storage().data_ptr()
