"""What only FA1 has: the statistics that it saves for its backward."""

import torch

from flash_versions.fa1.forward import forward


def test_saved_statistics_are_the_softmax_maximum_and_sum(device):
    q, k, v = (torch.randn(2, n, 2, 64, device=device) for n in (50, 130, 130))
    row_max, row_sum = statistics = torch.empty(2, 2, 2, 50, device=device)
    _, lse = forward(q, k, v, causal=True, scale=0.125, statistics=statistics)
    s = torch.einsum("bmhd,bnhd->bhmn", q.double(), k.double()) / 8
    hidden = torch.ones(50, 130, dtype=torch.bool, device=device).triu(81)
    s = s.masked_fill(hidden, -torch.inf)
    torch.testing.assert_close(row_max, s.amax(-1).float())
    torch.testing.assert_close(row_sum, (s - s.amax(-1, keepdim=True)).exp().sum(-1).float())
    torch.testing.assert_close(lse, row_max + row_sum.log())


def test_statistics_of_a_row_without_a_key(device):
    q, k, v = (torch.randn(1, n, 1, 64, device=device) for n in (3, 1, 1))
    row_max, row_sum = statistics = torch.empty(2, 1, 1, 3, device=device)
    o, lse = forward(q, k, v, causal=True, scale=0.125, statistics=statistics)
    assert torch.equal(row_sum[0, 0, :2], torch.zeros(2, device=device))
    assert (row_max[0, 0, :2] == -torch.inf).all() and (lse[0, 0, :2] == -torch.inf).all()
    assert torch.equal(o[0, :2], torch.zeros(2, 1, 64, device=device))
