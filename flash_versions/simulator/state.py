"""Which program runs in this thread."""

import threading
from typing import Any


class Program:
    """A program of a launch.

    Attributes:
        number: its place in the order in which programs begin.
        grid: how many there are along three axes; ids: its place there.
    """

    def __init__(self, number: int, grid: tuple[int, int, int]) -> None:
        self.number, self.grid = number, grid
        self.ids = number % grid[0], number // grid[0] % grid[1], number // (grid[0] * grid[1])


class Here(threading.local):
    """What runs in this thread: a program of a launch; of a Gluon kernel, a partition of it."""

    program: Any = None
    memory: Any = None  # the class of tensors' memory, which may watch what happens to them
    partition: Any = None
    checking: bool = False  # whether this is the first program of a kernel with such arguments
    trusts: bool = False  # whether no program is checked
    may_be_dry: bool = False  # whether then what is not run is looked at, too
    unsure = [False]  # whether a loop had too few steps to be checked; of all threads
    dry: int = 0  # how many steps and branches around are only looked at: none loads or stores


here = Here()
