"""Random inputs, and results against the error budget: what tests of kernels share."""

import torch

from flash_versions.versions.oracle.budget import assess, assess_request


def random_inputs(device, *, M, N, heads, kv_heads, batch, head_dim, dtype):
    """q, k, v with a non-zero mean in v, so that an output of zeros is far from right."""
    q = torch.randn(batch, M, heads, head_dim, device=device)
    k, v = torch.randn(2, batch, N, kv_heads, head_dim, device=device)
    return q.to(dtype), k.to(dtype), (v + 0.5).to(dtype)


def assert_ok(found):
    """Every result is within its budget."""
    for name, accuracy in found.items():
        assert accuracy.ok, f"{name}: {accuracy}"


def assert_within_budget(o, lse, q, k, v, **options):
    """The result of a call; lse may be None."""
    assert_ok(assess(o, lse, q, k, v, **options))


def assert_right(request, o, lse):
    """The result of a request's forward."""
    assert_ok(assess_request({"o": o, "lse": lse}, request))


def assert_gradients_right(request, gradients, do, dlse=None):
    """{name: gradient} of a request, or the gradients in the order of the backward."""
    if not isinstance(gradients, dict):
        gradients = dict(zip(("dq", "dk", "dv", "dsink"), gradients))
    assert_ok(assess_request(gradients, request, do, dlse))
