"""What only FA1 has: the statistics that it saves, and its backward from them."""

from functools import partial

import torch

from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions.fa1.backward import backward
from flash_versions.versions.fa1.forward import forward
from tests.helpers.kernels.budget import assert_gradients_right, random_inputs

inputs = partial(
    random_inputs, M=50, N=130, heads=2, kv_heads=2, batch=2, head_dim=64, dtype=torch.float32
)


def test_saved_statistics_are_the_softmax_maximum_and_sum(device):
    q, k, v = inputs(device)
    _, lse, (row_max, row_sum) = forward(make_request(q, k, v, causal=True, scale=0.125))
    s = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) / 8
    hidden = torch.ones(50, 130, dtype=torch.bool, device=device).triu(81)
    s = s.masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(row_max, s.amax(-1).float())
    torch.testing.assert_close(row_sum, (s - s.amax(-1, keepdim=True)).exp().sum(-1).float())
    torch.testing.assert_close(lse, row_max + row_sum.log())


def gradients(request, do, dlse=None, config=None):
    """dq, dk, dv of a request by the kernels alone."""
    return backward(request, *forward(request), do, dlse, config)[:3]


def test_dq_is_summed_in_fp32(device):
    """Equal keys add the same to dq in each of 100 blocks; 16-bit partial sums would drift."""
    q, k, v = inputs(device, M=16, N=1600, heads=1, kv_heads=1, batch=1, dtype=torch.bfloat16)
    request = make_request(q, k[:, :1].expand_as(k), v)
    do, dlse = torch.zeros_like(q), torch.ones(1, 1, 16, device=device)
    found = gradients(request, do, dlse, LaunchConfig(16, 16, num_warps=4, num_stages=1))
    assert_gradients_right(request, found, do, dlse)


def test_a_small_scale_costs_no_bits(device):
    """dS is rounded to fp16 before the scale: queries 2^10 times as large under a scale 2^-10 times
    as large have the same dk, bit for bit.
    """
    request = make_request(*inputs(device, M=20, N=20, dtype=torch.float16), scale=0.125)
    do = torch.randn_like(request.q)
    small = request._replace(q=request.q * 2.0**10, scale=request.scale * 2.0**-10)
    assert torch.equal(gradients(small, do)[1], gradients(request, do)[1])
