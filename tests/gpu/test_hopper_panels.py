"""Head dims in two panels in the forwards for Hopper: does the swizzle of a narrow panel, 32 or 64
bytes, mean the same to TMA and to WGMMA?
"""

import pytest
import torch

from flash_versions import masks
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.hopper import host as fa3_hopper
from flash_versions.versions.fa4.hopper import host as fa4_hopper
from tests.gpu.launches import on_hopper
from tests.helpers.kernels.budget import assert_right

pytestmark = on_hopper
FORWARD = {"fa3": fa3_hopper.forward, "fa4": fa4_hopper.forward}
HEAD_DIMS = [
    (32, 32), (16, 64), (64, 24),
    (72, 72), (80, 80), (88, 88), (96, 96), (136, 136), (160, 160), (192, 192), (192, 128),
    (128, 192), (96, 64), (64, 96), (256, 160),
]  # fmt: skip
HEADS, KV_HEADS, ROWS = 6, 2, 900
LENGTHS = [300, 0, 1, 599]
OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window and softcap": {"window": (100, 50), "softcap": 20.0},
    "packed": {"causal": True, "cu_seqlens_q": torch.tensor([0, *LENGTHS]).cumsum(0).int()},
    "intervals": masks.documents(LENGTHS),
}


def request_of(dims, options, queries):
    """A call of 16-bit vectors; as many keys as queries where options are about each of them."""
    given = {name: x.cuda() if isinstance(x, torch.Tensor) else x for name, x in options.items()}
    packed = "cu_seqlens_q" in options
    lead = (ROWS,) if packed else (1, ROWS)
    q = torch.randn(*lead, HEADS, dims[0], device="cuda", dtype=torch.bfloat16)
    k = torch.randn(*lead, KV_HEADS, dims[0], device="cuda", dtype=torch.bfloat16)
    v = torch.randn(*lead, KV_HEADS, dims[1], device="cuda", dtype=torch.bfloat16)
    if not packed and "query_ends" not in options:
        q = q[:, :queries]
    return in_vectors(make_request(q, k, v, **given))


@pytest.mark.parametrize("version", FORWARD)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
def test_within_budget_and_the_same_again(dims, options, version):
    request = request_of(dims, options, queries=700)
    o, lse, _ = FORWARD[version](request)
    assert_right(request, o, lse)
    again, lse_again, _ = FORWARD[version](request)
    assert torch.equal(o, again) and torch.equal(lse, lse_again)
