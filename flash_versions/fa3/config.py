"""The switches of FA3's kernel for Hopper, and how they are set."""

from dataclasses import dataclass

from flash_versions.hopper import WARPGROUP_ROWS
from flash_versions.memory import cdiv
from flash_versions.request import Request
from flash_versions.version import num_multiprocessors

# Rows that a consumer of three gets done while one of two does a row, at head_dim 64 (docs/log.md).
THREE_TO_TWO = 1.16


@dataclass(frozen=True)
class HopperConfig:
    """The switches of the kernel; each is a constant at one place in it.

    Attributes:
        consumers: warpgroups that compute, 64 query rows each; 2 or 3.
        block_kv: keys of a tile.
        stages: slots of the rings of K and of V.
        q_stages: buffers for a consumer's Q: with 2, the next tile's is there when it is needed.
        epilogue_buffer: O leaves through a buffer of its own; otherwise through that of Q, which
            then waits for it.
        overlap: issue S of the next block before the softmax of this one.
        ping_pong: consumers take turns at the tensor cores.
        late_wait: wait for P V behind the softmax, as written.
        scheduler: "grid", "static" or "dynamic", see `hopper.Scheduler`.
    """

    consumers: int = 2
    block_kv: int = 128
    stages: int = 2
    q_stages: int = 2
    epilogue_buffer: bool = True
    overlap: bool = True
    ping_pong: bool = True
    late_wait: bool = False
    scheduler: str = "static"

    @property
    def block_q(self) -> int:
        """Query rows of a tile."""
        return self.consumers * WARPGROUP_ROWS.value


def default_config(request: Request) -> HopperConfig:
    """The fastest configuration that was found on an H200 (docs/log.md)."""
    causal = request.window_right is not None
    head_dim, head_dim_v = request.q.shape[3], request.v.shape[3]
    scheduler = "dynamic" if causal else "static"
    if max(head_dim, head_dim_v) > 128:
        return HopperConfig(
            block_kv=64,
            q_stages=1,
            epilogue_buffer=min(head_dim, head_dim_v) <= 128,
            scheduler=scheduler,
        )
    if max(head_dim, head_dim_v) > 64:
        return HopperConfig(scheduler=scheduler)
    if prefers_two_consumers(request):
        return HopperConfig(2, stages=3, ping_pong=not causal, scheduler=scheduler)
    return HopperConfig(3, stages=3, scheduler=scheduler)


def prefers_two_consumers(request: Request) -> bool:
    """Whether tiles of 128 queries beat those of 192 at head_dim 64.

    Three consumers keep the tensor cores busier. But of a tile of 192 queries a causal mask leaves
    less, and fewer tiles may fill the multiprocessors worse.
    """
    q = request.q
    if request.window_right is not None:
        return request.k.shape[1] <= 4096
    programs = num_multiprocessors(q.device)
    two, three = (
        consumers * cdiv(cdiv(q.shape[1], 64 * consumers) * q.shape[2] * q.shape[0], programs)
        for consumers in (2, 3)
    )
    return two * THREE_TO_TWO < three
