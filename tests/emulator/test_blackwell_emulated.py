"""FA4's kernel for Blackwell without a GPU, in the emulator."""

from dataclasses import replace

import pytest
import torch

from flash_versions.dispatch.autograd import in_vectors, narrowed
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import emulator as gluon_emulator
from flash_versions.dispatch.emulator import machine as gluon_machine
from flash_versions.dispatch.emulator.machine import ORDERS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from tests.flash_versions.versions.test_attention import CASES
from tests.helpers.rotation import rotated

LOADED = gluon_emulator.load("flash_versions.versions.fa4.blackwell.forward")
forward_blackwell = LOADED["fa4.blackwell.forward"]
config = LOADED["fa4.blackwell.config"]
DTYPES = [torch.float16, torch.bfloat16]
SMALL = config.BlackwellConfig(stages=4)
by_order = pytest.mark.parametrize("order", ORDERS, indirect=True)


@pytest.fixture(autouse=True)
def small_blackwell(monkeypatch):
    """A GPU of two multiprocessors, so that programs walk over several tiles."""
    memory = LOADED["fa4.blackwell.tensor_memory"]
    monkeypatch.setattr(memory, "available", lambda device: True)
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


@pytest.fixture
def order(request, monkeypatch):
    """Run a test in an order, named by its parameter."""
    monkeypatch.setattr(gluon_machine, "order", ORDERS[request.param])


def qkv(M, N, heads, D, kv_heads=None, batch=1, dtype=torch.bfloat16, D_v=None):
    q = torch.randn(batch, M, heads, D, dtype=dtype)
    k = torch.randn(batch, N, kv_heads or heads, D, dtype=dtype)
    v = torch.randn(batch, N, kv_heads or heads, D_v or D, dtype=dtype)
    return q, k, v


def check(schedule, q, k, v, **options):
    request = make_request(q, k, v, **options)
    o, lse, _ = forward_blackwell.forward(in_vectors(request), schedule)
    o = narrowed(o, v)
    for name, accuracy in assess_request({"o": o, "lse": lse}, request).items():
        assert accuracy.ok, f"{name}: {accuracy}"


@pytest.mark.parametrize(("case", "dtype"), rotated(CASES, DTYPES))
def test_every_case_that_it_takes(case, dtype):
    inputs, options = case.inputs(dtype, "cpu"), case.all_options("cpu")
    if not all(x.numel() for x in inputs):
        pytest.skip("what no descriptor can address does not come to this kernel")
    request = make_request(*inputs, **options)
    if reason := forward_blackwell.left_to_portable(request):
        pytest.skip(reason)
    for threshold in (0.0, 8.0):
        schedule = replace(config.default_config(request), threshold=threshold)
        check(schedule, *inputs, **options)


@by_order
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("D", [64, 128])
def test_every_order(D, causal, order):
    """More tiles than programs, ragged at both ends."""
    check(None, *qkv(300, 330, 3, D, kv_heads=1), causal=causal)
