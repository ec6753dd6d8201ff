"""The switches of FA4's kernel for Blackwell. None of them was measured: it never ran on a GPU."""

from dataclasses import dataclass

from flash_versions.dispatch.request import Request

MAX_THRESHOLD = 8.0
SCHEDULERS = ("static", "dynamic")


@dataclass(frozen=True)
class BlackwellConfig:
    """The switches of the kernel; each is a constant at one place in it.

    Attributes:
        stages: slots of the pipeline that K and V share.
        threshold: a row is rescaled when its maximum has grown by more, in log2 units; 0 rescales
            whenever it has grown.
        eighths: eighths of the exponentials that a polynomial computes.
        degree: degree of this polynomial; None takes the smallest that rounding P hides.
        scheduler: "static" or "dynamic", see `tile_scheduler.Scheduler`.
    """

    stages: int = 4
    threshold: float = MAX_THRESHOLD
    eighths: int = 2
    degree: int | None = None
    scheduler: str = "static"

    queries = 256  # of a program's tile: two tiles of tensor memory
    heads = 1  # of a tile
    block_kv = 128

    def __post_init__(self) -> None:
        if self.stages < 3:
            raise ValueError(
                f"stages={self.stages} is not possible; 3 or more hold V of a block while the next "
                f"K and V are loaded."
            )
        if not 0 <= self.threshold <= MAX_THRESHOLD:
            raise ValueError(f"threshold={self.threshold} is not possible; 0 to 8 are.")
        if self.eighths not in range(9):
            raise ValueError(f"eighths={self.eighths} is not possible; 0 to 8 are.")
        if self.degree not in (None, 2, 3, 4, 5):
            raise ValueError(f"degree={self.degree} is not possible; 2 to 5 are.")
        if self.scheduler not in SCHEDULERS:
            raise ValueError(
                f"scheduler={self.scheduler!r} is unknown; there are {', '.join(SCHEDULERS)}."
            )


def default_config(request: Request) -> BlackwellConfig:
    """As many slots as shared memory has room for, and both ideas on, as in the paper."""
    return BlackwellConfig(stages=4 if max(request.q.shape[3], request.v.shape[3]) > 64 else 9)
