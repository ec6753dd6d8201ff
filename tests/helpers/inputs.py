"""Random tensors for tests of kernels."""

import torch


def random_inputs(device, *, M, N, heads, kv_heads, batch, head_dim, dtype):
    """q, k, v with a non-zero mean in v, so that an output of zeros is far from right."""
    q = torch.randn(batch, M, heads, head_dim, device=device)
    k, v = torch.randn(2, batch, N, kv_heads, head_dim, device=device)
    return q.to(dtype), k.to(dtype), (v + 0.5).to(dtype)
