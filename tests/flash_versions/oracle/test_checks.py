"""What is wrong is not timed: the checks pass what is right and refuse what is not."""

import pytest
import torch

from flash_versions.bench import suites
from flash_versions.dispatch.precision import Fp8, Quantized
from flash_versions.versions.fp8.quantize import dequantize
from flash_versions.versions.oracle import checks
from flash_versions.versions.oracle.reference import attention_reference

E4M3 = torch.float8_e4m3fn
SCALE = 32**-0.5


@pytest.fixture(scope="module")
def inputs():
    """q, k, v (2, 200, heads, 32), blocks of very different magnitudes."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q = torch.randn(2, 200, 4, 32, device=device)
    k, v = (torch.randn(2, 200, 2, 32, device=device) for _ in range(2))
    v[:, 128:] *= 20
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def exact(q, k, v):
    """fp64 attention."""
    q, k, v = (x.double().contiguous() for x in (q, k, v))
    return attention_reference(q, k, v, causal=True, scale=SCALE)[0]


def with_one_wrong(x: Quantized, what: str) -> Quantized:
    """Inputs of which one scale, or the order of V's keys, is not that of the tensors."""
    if what == "order":
        return x._replace(v=x.v.view(torch.int8).flip(-1).view(x.v.dtype))
    scale = getattr(x, what).clone()
    scale[0, 0, -1] *= 1.5
    return x._replace(**{what: scale})


@pytest.mark.parametrize(
    ("scales", "what"),
    [("block", "q_scale"), ("head", "k_scale"), ("block", "v_scale"), ("head", "order")],
)
def test_a_kernel_that_takes_other_scales_or_keys_is_refused(inputs, scales, what):
    request, x = suites.quantized_request(Fp8(scales), True, *inputs)
    o = exact(*dequantize(with_one_wrong(x, what))).bfloat16()
    with pytest.raises(ArithmeticError, match="wrong output: o: error .* OVER its budget"):
        checks.check_fp8(o, True, SCALE, (request, x))
    checks.check_fp8(exact(*dequantize(x)).bfloat16(), True, SCALE, (request, x))


def test_fp8_output_of_a_peer(inputs):
    """e4m3 in and out with scales of 1, as cuDNN's."""
    given = suites.in_e4m3(*inputs)
    o = exact(*given)
    checks.check_fp8(o.to(E4M3), True, SCALE, given)
    with pytest.raises(ArithmeticError, match="OVER its budget"):
        checks.check_fp8((o * 1.5).to(E4M3), True, SCALE, given)
    o[0, 0] = torch.nan
    with pytest.raises(ArithmeticError, match="wrong output: not finite"):
        checks.check_fp8(o.to(E4M3), True, SCALE, given)


def test_a_wrong_forward_and_a_wrong_backward_are_refused(inputs):
    leaves = [x.detach().double().requires_grad_() for x in inputs]
    right = exact(*leaves)
    o = right.detach().bfloat16()
    checks.check((o,), 200, True, *inputs, o)
    with pytest.raises(ArithmeticError, match="wrong output: o: "):
        checks.check((o * 1.05,), 200, True, *inputs, o)
    dq, dk, dv = (x.bfloat16() for x in torch.autograd.grad(right, leaves, o.double()))
    checks.check((dq, dk, dv), 200, True, *inputs, o)
    with pytest.raises(ArithmeticError, match="wrong output: dk: "):
        checks.check((dq, dk * 1.05, dv), 200, True, *inputs, o)
