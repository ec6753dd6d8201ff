"""Tile sizes where nothing was timed, against facts of the GPUs and what others measured."""

import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import (
    KEY_GRADIENTS,
    QUERY_GRADIENT,
    backward_config,
    default_config,
)
from flash_versions.versions.fa1 import forward as fa1
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import forward as fa2

KIB = 1024
GPUS = {
    "A100": Properties((8, 0), 163 * KIB, 108),
    "RTX 4090": Properties((8, 9), 99 * KIB, 128),
    "H200": Properties((9, 0), 227 * KIB, 132),
    "B200": Properties((10, 0), 227 * KIB, 148),
    "RTX 5090": Properties((12, 0), 99 * KIB, 170),
}
GRADIENTS = {
    "keys": (fa2_backward.MEASURED_KV, KEY_GRADIENTS),
    "queries": (fa2_backward.MEASURED_Q, QUERY_GRADIENT),
}


def request_of(head_dim: int, rows: int = 4096, dtype=torch.bfloat16, **options):
    q = torch.empty(1, rows, 1, head_dim, dtype=dtype)
    return make_request(q, q, q, **options)


@pytest.mark.parametrize("head_dim", [16, 32, 64, 128, 256, 512])
@pytest.mark.parametrize("gpu", GPUS)
def test_operands_and_accumulators_fit(gpu, head_dim):
    """In bytes and registers counted here: all tiles of a forward and of a backward, one block
    under way, in 16 bits; O or the gradients in fp32.
    """
    request, kib = request_of(head_dim), GPUS[gpu].shared_memory
    with devices.assume(GPUS[gpu]):
        forwards = [default_config(4096, request, version.MEASURED) for version in (fa1, fa2)]
        dkdv, dq = (backward_config(request, *about) for about in GRADIENTS.values())
    for config in forwards:
        assert 2 * head_dim * (config.block_q + 2 * config.block_kv) <= kib
        assert config.block_q * head_dim / (32 * config.num_warps) <= 128
    for config in (dkdv, dq):
        assert 2 * head_dim * 2 * (config.block_q + config.block_kv) <= kib
    assert 2 * dkdv.block_kv * head_dim / (32 * dkdv.num_warps) <= 128
    assert dq.block_q * head_dim / (32 * dq.num_warps) <= 128


def test_what_was_measured_stays():
    with devices.assume(GPUS["H200"]):
        for version in (fa1, fa2):
            for head_dim, measured in version.MEASURED.items():
                assert default_config(4096, request_of(head_dim), version.MEASURED) is measured
        for measured, needs in GRADIENTS.values():
            for head_dim, config in measured.items():
                assert backward_config(request_of(head_dim), measured, needs) is config
        q = request_of(128)
        narrow = q._replace(v=q.v[..., :64])  # nothing was measured for it
        assert default_config(4096, narrow, fa2.MEASURED) is not fa2.MEASURED[128]
    with devices.assume(GPUS["A100"]):  # nothing was measured there
        assert default_config(4096, request_of(128), fa2.MEASURED) is not fa2.MEASURED[128]


def test_changed_scores_take_smaller_tiles_and_few_rows_short_ones():
    with devices.assume(GPUS["RTX 4090"]):
        plain, capped = request_of(64), request_of(64, softcap=30.0)
        for about in GRADIENTS.values():
            of_plain, of_capped = (backward_config(x, *about) for x in (plain, capped))
            areas = [x.block_q * x.block_kv / x.num_warps for x in (of_capped, of_plain)]
            assert areas[0] <= areas[1]
        assert default_config(64, request_of(64, 64), {}).block_q == 64
