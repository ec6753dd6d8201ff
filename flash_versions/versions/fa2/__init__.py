"""FlashAttention 2: deferred normalisation, an unmasked loop, and split-KV with a reduction."""

from flash_versions.dispatch.version import Version, kernel_limits
from flash_versions.versions.fa2 import backward, forward

VERSION = Version(
    name="fa2",
    title="FlashAttention 2",
    wasted="two rescales of o and a mask in every block; an idle GPU when queries are few",
    idea="normalise once at the end, mask only blocks that are cut, split the keys over the grid",
    source="Dao 2023, arXiv:2307.08691; split-KV: Flash-Decoding, Dao et al. 2023",
    forward=forward.forward,
    limits=kernel_limits,
    backward=backward.backward,
    inexact=None,
)
