"""The switches of FA4's kernel for Hopper, and how they are set."""

import math
from dataclasses import dataclass, fields
from typing import Any

from flash_versions.dispatch.precision import Fp8
from flash_versions.dispatch.request import Request
from flash_versions.versions.fa3.hopper import config as fa3
from flash_versions.versions.fa3.hopper.config import HopperConfig
from flash_versions.versions.fp8.quantize import P_OFFSET

FP8_THRESHOLDS = 1, 3  # the least and the largest by default
FP8_LOSS = 2.0**-3  # of a row's largest weight, see `fp8_threshold`
ROUNDED_TO_ZERO = 2.0**-10  # the largest number that is, in e4m3


@dataclass(frozen=True)
class RolesConfig(HopperConfig):
    """FA3's switches, and FA4's; S of the next block is always issued before the softmax of this
    one, and P V waited for where ptxas puts the wait.

    Attributes:
        threshold: a row is rescaled when its maximum has grown by more, in log2 units; 0 always
            rescales. In FP8 at most 8: P then starts at 2^(8 - threshold) and may grow to 2^8.
        eighths: eighths of the exponentials that a polynomial computes; 0 in FP8.
        starts: tiles of small scores have starts in the place of references (`starts.py`); only in
            FP8, for tensors that are quantised in the call with one scale for all keys of a head,
            and ignored otherwise.
    """

    threshold: float = 8.0
    eighths: int = 0
    starts: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.threshold <= P_OFFSET:
            raise ValueError(f"threshold={self.threshold} is not possible; 0 to 8 are.")
        if self.eighths not in range(9):
            raise ValueError(f"eighths={self.eighths} is not possible; 0 to 8 are.")
        if not self.overlap or self.late_wait or self.tail > 1:
            raise ValueError("overlap, late_wait and tail are FA3's; leave them as they are.")


def with_roles(config: HopperConfig, **switches: Any) -> RolesConfig:
    """FA3's configuration with FA4's switches."""
    values = {field.name: getattr(config, field.name) for field in fields(HopperConfig)}
    return RolesConfig(**{**values, **switches})


def default_config(request: Request) -> RolesConfig:
    """The fastest configuration that was found on an H200 (docs/understand/log.md)."""
    config = fa3.overlapping_config(request)
    if 32 < max(request.q.shape[3], request.v.shape[3]) <= 128:
        # The decision costs as much as the multiplications that it saves. Up to 32 dims, where
        # products of the tensor cores are short, it costs a little less.
        return with_roles(config, threshold=0.0)
    return with_roles(config)


def fp8_config(request: Request) -> RolesConfig:
    """The fastest configuration in FP8 that was found on an H200 (docs/understand/log.md). At
    head_dim 64 starts would cost time.
    """
    config = fa3.overlapping_fp8_config(request)
    wide = max(request.q.shape[3], request.v.shape[3]) > 64
    of_blocks = Fp8.parse(request.precision or "fp8").scales == "block"
    starts = wide and not of_blocks and fa3.has_fp16_scores(request)
    threshold = fp8_threshold(request.k.shape[1])
    return with_roles(config, threshold=threshold, starts=starts)


def fp8_threshold(keys: int) -> float:
    """The threshold for so many keys, in log2 units: a larger one is faster, but costs range of P.

    P starts at 2^(8 - threshold), and e4m3 rounds to 0 what is no larger than 2^-10. So a key may
    be lost if it has no more than 2^(threshold - 18) of its row's largest weight. If all keys but
    one are so light, what is lost adds up to FP8_LOSS of that weight at most. Above 16384 keys it
    may be more. Without a threshold, that begins above 32768 keys.
    """
    least, largest = FP8_THRESHOLDS
    room = FP8_LOSS * 2**P_OFFSET / (ROUNDED_TO_ZERO * max(keys, 1))
    return float(min(max(math.floor(math.log2(room)), least), largest))
