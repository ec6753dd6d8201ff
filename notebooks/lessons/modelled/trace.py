"""What each role of FA4's kernel for Blackwell does, in its order: from a run in the emulator."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator, machine, tmem
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.reference import attention_reference

FIRST_COLUMNS = 0, 256  # of S and of O of tile 0
KERNEL = "flash_versions.versions.fa4.blackwell.forward"
ROLES = {"correct": "correction", "multiply": "products", "load": "loader", "store": "storer"}
PRINTED_ORDER = ("loader", "products", "softmax 0", "softmax 1", "correction", "storer")


class Wait(NamedTuple):
    """Until a barrier's phase has ended so many times."""

    barrier: int
    phases: int


class Arrive(NamedTuple):
    """At a barrier; the phase of which then expects so many bytes more."""

    barrier: int
    arrivals: int
    bytes: int = 0


class Copy(NamedTuple):
    """A tile on its way to shared memory, counted by a barrier."""

    barrier: int
    bytes: int


class Product(NamedTuple):
    """A product of (rows, inner) and (inner, columns), 0 of a commit; what its end arrives at."""

    what: str
    tile: int
    rows: int
    inner: int
    columns: int
    shared_bytes: int
    barriers: tuple[int, ...]
    touched: tuple[tuple[int, int], ...]  # columns of tensor memory: (first, behind the last)


class Moved(NamedTuple):
    """A tile between tensor memory and registers."""

    what: str  # load, store
    bytes: int
    touched: tuple[tuple[int, int], ...]


class Work(NamedTuple):
    """Arithmetic of a softmax, as a share of what a block costs: "maximum" or "exponentials"."""

    what: str
    share: float


Operation = Wait | Arrive | Copy | Product | Moved | Work


class Trace(NamedTuple):
    """A program's run.

    Attributes:
        roles: what each role does, by name.
        counts: how many arrivals a phase of each barrier takes.
        blocks: of keys, for each of the two tiles.
        error: largest difference of the output to torch's attention.
    """

    roles: dict[str, tuple[Operation, ...]]
    counts: tuple[int, ...]
    blocks: int
    error: float


class Watch:
    """The operations of each role while the kernel runs."""

    def __init__(self) -> None:
        self.roles: dict[str, list[Operation]] = {}
        self.barriers: dict[int, tuple[int, machine.Barrier]] = {}
        self.waited: dict[tuple[str, int], int] = {}

    def number(self, barrier: machine.Barrier) -> int:
        """A barrier's number in this run."""
        return self.barriers.setdefault(id(barrier), (len(self.barriers), barrier))[0]

    def note(self, operation: Operation) -> None:
        """An operation of the role that runs now."""
        self.roles.setdefault(self.role(), []).append(operation)

    def role(self) -> str:
        """The role that runs now."""
        name = machine.here.partition.name.partition(", ")[2]
        function, _, place = name.partition(" ")
        return ROLES.get(function) or f"{function} {int(place) - 1}"

    def phases(self, barrier: machine.Barrier, phase: int) -> int:
        """How often the barrier's phase must have ended when a wait for `phase` returns.

        A phase that ends for the n-th time, n = 1, 2, ..., has parity (n - 1) % 2. A role waits for
        one phase after the other, the first wait being for the first phase or for the one before.
        """
        key = self.role(), self.number(barrier)
        after = self.waited.get(key, -1)
        self.waited[key] = next(n for n in (after + 1, after + 2) if (n - 1) % 2 == phase)
        return self.waited[key]


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Note what the emulated kernel does. The emulator does what it always does."""

    def wait(barrier: Any, phase: Any, pred: Any = True) -> None:
        if pred:
            watch.note(Wait(watch.number(barrier), watch.phases(barrier, int(phase))))
        really["wait"](barrier, phase, pred)

    def arrive(barrier: Any, count: int) -> None:
        watch.note(Arrive(watch.number(barrier), count))
        really["arrive"](barrier, count)

    def expect(barrier: Any, bytes: int) -> None:
        watch.note(Arrive(watch.number(barrier), 1, bytes))
        really["expect"](barrier, bytes)

    def copy(load: Any, descriptor: Any, coordinates: Any, barrier: Any, *rest: Any) -> None:
        watch.note(Copy(watch.number(barrier), descriptor.block_type.nbytes))
        really["copy"](load, descriptor, coordinates, barrier, *rest)

    def product(made: Any, operands: Any, written: Any, compute: Any, barriers: Any) -> None:
        (rows, inner), (_, columns) = (x.shape for x in operands) if operands else ((0, 0), (0, 0))
        shared = [x for x in operands if isinstance(x, emulator.Shared)]
        watch.note(
            Product(
                "Q Kᵀ" if len(shared) == 2 else "P V",
                int(bool(written) and written[0].first not in FIRST_COLUMNS),
                rows,
                inner,
                columns,
                sum(x.data.numel() * x.data.element_size() for x in shared),
                tuple(watch.number(x) for x in barriers),
                tuple(x.region[1:] for x in (*operands, *written) if x not in shared),
            )
        )
        really["product"](made, operands, written, compute, barriers)

    def load(tile: Any, layout: Any = None) -> Any:
        watch.note(Moved("load", size_of(tile), (tile.region[1:],)))
        if watch.role().startswith("softmax"):
            watch.note(Work("maximum", 1.0))
        return really["load"](tile, layout)

    def store(tile: Any, value: Any) -> None:
        if watch.role().startswith("softmax") and tile.shape[-1] > 1:
            watch.note(Work("exponentials", tile.shape[-1] / 128))
        watch.note(Moved("store", size_of(tile), (tile.region[1:],)))
        really["store"](tile, value)

    targets: list[tuple[Any, str, Callable[..., Any]]] = [
        (machine.mbarrier, "wait", wait),
        (machine.mbarrier, "arrive", arrive),
        (machine.mbarrier, "expect", expect),
        (machine.Load, "__init__", copy),
        (tmem.Product, "__init__", product),
        (tmem.TensorMemory, "load", load),
        (tmem.TensorMemory, "store", store),
    ]
    names = ("wait", "arrive", "expect", "copy", "product", "load", "store")
    really = {name: vars(owner)[place] for name, (owner, place, _) in zip(names, targets)}
    with ExitStack() as stack:
        for owner, place, replacement in targets:
            stack.enter_context(patch.object(owner, place, replacement))
        yield


def size_of(tile: Any) -> int:
    """Bytes of a tile."""
    return tile.data.numel() * tile.data.element_size()


@cache
def record(threshold: float, eighths: int, blocks: int = 8, head_dim: int = 128) -> Trace:
    """Run one program: 256 queries, `blocks` blocks of 128 keys, bf16, no mask, random numbers.

    Args:
        threshold: a row is rescaled when its maximum has grown by more, in log2 units.
        eighths: eighths of the exponentials that the polynomial computes.
        blocks: of keys.
        head_dim: 64 or 128.
    """
    loaded = emulator.load(KERNEL)
    forward, config = loaded["fa4.blackwell.forward"], loaded["fa4.blackwell.config"]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, n, 1, head_dim, generator=generator).bfloat16()
        for n in (256, 128 * blocks, 128 * blocks)
    )
    schedule = config.BlackwellConfig(
        stages=4 if head_dim > 64 else 9, threshold=threshold, eighths=eighths
    )
    watch = Watch()
    with (
        patch.object(loaded["fa4.blackwell.tensor_memory"], "available", lambda device: True),
        patch.object(devices, "assumed", Properties(num_sms=1)),
        patch.object(machine, "order", machine.ORDERS["any order"]),
        watching(watch),
    ):
        o, _, _ = forward.forward(make_request(q, k, v), schedule)
    exact, _ = attention_reference(q.double(), k.double(), v.double())
    counts = [barrier.count for _, barrier in watch.barriers.values()]
    roles = {name: tuple(watch.roles[name]) for name in PRINTED_ORDER}
    return Trace(roles, tuple(counts), blocks, float((o.double() - exact).abs().max()))
