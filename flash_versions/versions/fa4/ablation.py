"""What each idea of FA4 is worth: its kernels with one thing changed, for the benchmark."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from flash_versions.dispatch.version import Forward, ForwardQuantized
from flash_versions.versions.fa3 import ablation as fa3_ablation
from flash_versions.versions.fa4 import forward
from flash_versions.versions.fa4.hopper import host as forward_hopper
from flash_versions.versions.fa4.hopper.config import default_config, fp8_config

# Of the kernel for Hopper, see `RolesConfig`.
SWITCHES: Mapping[str, dict[str, Any]] = {
    "always rescale": {"threshold": 0.0, "eighths": 0},
    "rescale if grown": {"threshold": 8.0, "eighths": 0},
    "1/8 polynomial": {"threshold": 0.0, "eighths": 1},
    "2/8 polynomial": {"threshold": 0.0, "eighths": 2},
    "4/8 polynomial": {"threshold": 0.0, "eighths": 4},
    "both, 1/8": {"threshold": 8.0, "eighths": 1},
    "both, 2/8": {"threshold": 8.0, "eighths": 2},
}
varied = partial(fa3_ablation.varied, run=forward_hopper.forward, configured=default_config)
varied_fp8 = partial(
    fa3_ablation.varied_fp8, run=forward_hopper.forward_quantized, configured=fp8_config
)
VARIANTS: Mapping[str, Forward] = {
    "portable": forward.forward,
    **{name: partial(varied, **switches) for name, switches in SWITCHES.items()},
}
FP8_VARIANTS: Mapping[str, ForwardQuantized] = {  # scores of 16 bits have no polynomial
    "always rescale": partial(varied_fp8, threshold=0.0),
    "threshold 1": partial(varied_fp8, threshold=1.0),
    "starts": partial(varied_fp8, starts=True),
    "no starts": partial(varied_fp8, starts=False),
}
