"""Quantisation against plain torch: exact scales, equal bits, V where the formula puts it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.precision import BLOCK_KEYS, BLOCK_ROWS, SCALES, Fp8, Quantized
from flash_versions.versions.fp8.quantize import dequantize, prepare, quantize
from tests.helpers.kernels.quantized import blocks, expected, expected_bits, limit_of_factors

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def inputs(device, m=150, n=300, heads=4, kv_heads=2, dim=64, dim_v=None, dtype=torch.bfloat16):
    q = torch.randn(2, m, heads, dim, dtype=dtype, device=device)
    k = torch.randn(2, n, kv_heads, dim, dtype=dtype, device=device)
    v = torch.randn(2, n, kv_heads, dim_v or dim, dtype=dtype, device=device)
    # Every row has a size of its own, so that it matters which rows share a scale.
    sizes = [torch.rand(2, x.shape[1], x.shape[2], 1, device=device) * 8 - 4 for x in (q, k, v)]
    return tuple((x * size.exp()).to(dtype) for x, size in zip((q, k, v), sizes))


def assert_same(a, b):
    for x, y in zip(a[:3], b[:3]):
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))
    assert all(torch.equal(x, y) for x, y in zip(a[3:], b[3:]))


@pytest.mark.parametrize("how", [*map(Fp8, SCALES), Fp8("head", dtype=E5M2)], ids=str)
def test_bits_and_scales(device, how):
    q, k, v = inputs(device)
    assert_same(quantize(q, k, v, how), expected(q, k, v, how))


@pytest.mark.parametrize(
    "shape",
    [
        {"m": 1, "n": 1},
        {"m": 64, "n": 128, "dim": 128, "heads": 2},
        {"m": 65, "n": 129, "dim": 16, "heads": 6, "dtype": torch.float16},
        {"m": 10, "n": 20, "dim": 80, "dim_v": 24, "dtype": torch.float32},
        {"m": 130, "n": 20, "dim": 256, "kv_heads": 1, "heads": 1},
    ],
    ids=str,
)
def test_shapes(device, shape):
    q, k, v = inputs(device, **shape)
    assert_same(quantize(q, k, v), expected(q, k, v, Fp8()))


def test_strides(device):
    """Slices of packed heads, a head-major view, and keys that two sequences share."""
    packed = torch.randn(2, 90, 3, 2, 64, device=device).bfloat16()
    q, k, v = packed.unbind(2)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    k = k[:1].expand(2, -1, -1, -1)
    assert_same(quantize(q, k, v), expected(q, k, v, Fp8()))


@pytest.mark.parametrize("scales", SCALES)
def test_keys_past_their_length_are_not_looked_at(device, scales):
    q, k, v = inputs(device)
    lengths = [130, 17]
    zeroed = [k.clone(), v.clone()]
    for b, length in enumerate(lengths):
        k[b, length:], v[b, length:] = float("nan"), float("inf")
        for x in zeroed:
            x[b, length:] = 0
    found = quantize(q, k, v, Fp8(scales), torch.tensor(lengths, device=device))
    assert_same(found, quantize(q, *zeroed, Fp8(scales)))


@pytest.mark.parametrize("scales", SCALES)
def test_zeros_have_the_scale_1_and_no_say(device, scales):
    q, k, v = inputs(device)
    q[:, :64], k[:, :128], v[:, 128:256] = 0, 2.0**-110, -0.0
    found = quantize(q, k, v, Fp8(scales))
    if scales == "block":
        assert (found.q_scale[:, :, 0] == 1).all() and (found.k_scale[:, :, 0] == 1).all()
        assert (found.v_scale[:, :, 1] == 1).all()
    assert torch.equal(found.v_reference, found.v_scale[..., [0, -1]].amax(-1))
    assert found.v_reference.max() < 0.9  # less than the scale of the zeros
    for a, b in zip(dequantize(found), (q, k, v)):
        assert (a - b.float()).abs().max() <= b.float().abs().max() * 2.0**-4
    nothing = quantize(q * 0, k * 0, v * 0, Fp8(scales))
    assert all((x == 1).all() for x in nothing[3:6])
    assert not any(x.float().any() for x in nothing[:3])


def test_nan_and_infinity_stay_with_themselves(device):
    q, k, v = inputs(device)
    clean = quantize(q, k, v)
    for x in (q, k, v):
        x[0, 3, 1, 5], x[0, 4, 1, 6] = float("nan"), float("-inf")
    found = quantize(q, k, v)
    for scale, same in zip(found[3:], clean[3:]):
        assert scale.isfinite().all() and torch.equal(scale[1], same[1])
    for name, a, b in zip("qkv", dequantize(found), dequantize(clean)):
        wrong = a.isnan()
        assert wrong[0, 3, 1, 5] and wrong.sum() == 1, name
        assert a[0, 4, 1, 6] < 0 and a[0, 4, 1, 6].isfinite()
        assert (a[1] == b[1]).all()


def rotation(dim):
    """diag(signs) @ H / sqrt(dim) in fp64: Sylvester's construction, signs from a hash."""
    hadamard = np.ones((1, 1))
    while len(hadamard) < dim:
        hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
    mixed = (np.arange(1, dim + 1, dtype=np.uint64) * 0x9E3779B9) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> np.uint64(16))) * np.uint64(0x85EBCA6B)) & np.uint64(0xFFFFFFFF)
    signs = 1.0 - 2.0 * (mixed >> np.uint64(31)).astype(float)
    return torch.from_numpy(signs[:, None] * hadamard / dim**0.5)


@pytest.mark.parametrize(
    "dim, dtype", [(16, torch.bfloat16), (64, torch.float16), (256, torch.float32)], ids=str
)
def test_rotation(device, dim, dtype):
    q, k, v = inputs(device, m=70, n=130, dim=dim, dim_v=64, dtype=dtype)
    found = quantize(q, k, v, Fp8(hadamard=True))
    matrix = rotation(dim)
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(dim, dtype=torch.float64))
    assert 0.2 < (matrix[:, 0] < 0).double().mean() < 0.8, "the signs are mixed"
    for x, a, scale, size in (
        (q, found.q, found.q_scale, BLOCK_ROWS),
        (k, found.k, found.k_scale, BLOCK_KEYS),
    ):
        exact = x.double().cpu() @ matrix
        largest = blocks(exact, size).abs().amax(-1)
        limit = limit_of_factors(E4M3, dim)
        torch.testing.assert_close(scale.cpu(), largest / limit, rtol=1e-5, atol=0)
        units = expected_bits(exact.float(), largest / limit, size, E4M3, limit).view(E4M3).float()
        # Equal but where the exact value lies next to the middle between two numbers.
        differs = (a.cpu().float() - units).abs()
        assert (differs <= units.abs() / 8 + 2.0**-9).all()
        assert (differs > 0).double().mean() < 1e-3
    plain = quantize(q, k, v)
    assert torch.equal(found.v.view(torch.uint8), plain.v.view(torch.uint8))


def test_what_cannot_be_quantised(monkeypatch):
    for dim in (8, 80, 512):
        q = torch.zeros(1, 4, 1, dim)
        with pytest.raises(ValueError, match=f"q has head_dim {dim}; hadamard=True needs a power"):
            quantize(q, q, q, Fp8(hadamard=True))
    q = torch.randn(2, 20, 32, 2).transpose(2, 3)
    with pytest.raises(ValueError, match=r"q has strides \(1280, 64, 1, 2\); the last one must"):
        quantize(q, q, q)
    monkeypatch.setattr(devices, "assumed", Properties((8, 0)))
    q = SimpleNamespace(shape=(1, 1, 1, 64), is_cuda=True, device="cuda")
    with pytest.raises(ValueError, match=r"compute capability 8.0 has no FP8; 8.9 \(Ada\)"):
        quantize(q, q, q)


def request(q, k, v, **options):
    names = ("precision", "q_descale", "k_descale", "v_descale", "kv_lengths")
    return SimpleNamespace(q=q, k=k, v=v, **(dict.fromkeys(names) | options))


def test_prepare_quantises_as_the_precision_says(device):
    q, k, v = inputs(device)
    lengths = torch.tensor([300, 40], device=device)
    how = Fp8("head", True)
    found = prepare(request(q, k, v, precision=str(how), kv_lengths=lengths))
    assert_same(found, quantize(q, k, v, how, lengths))


@pytest.mark.parametrize(("dim", "dtype"), [(64, E4M3), (24, E5M2)])
def test_prepare_takes_what_is_quantised(device, dtype, dim):
    q, k, v = (x.to(dtype) for x in inputs(device, dim=dim))
    q_scale = torch.rand(2, 4, 3, device=device) + 0.5
    k_scale = torch.rand(2, 2, device=device) + 0.5
    v_scale = torch.rand(2, 2, 3, device=device) + 0.5
    given = {"q_descale": q_scale, "k_descale": k_scale, "v_descale": v_scale}
    found = prepare(request(q, k, v, **given))
    assert isinstance(found, Quantized) and found.q.shape[3] % 16 == 0
    a, b, c = dequantize(found)
    rows = q_scale.repeat_interleave(64, 2)[..., :150].transpose(1, 2)[..., None]
    assert torch.equal(a[..., :dim], q.float() * rows) and not a[..., dim:].any()
    assert torch.equal(b[..., :dim], k.float() * k_scale[:, None, :, None])
    rows = v_scale.repeat_interleave(128, 2)[..., :300].transpose(1, 2)[..., None]
    assert torch.equal(c, v.float() * rows)
    assert torch.equal(found.v_reference, v_scale.amax(-1))
    v_scale[..., 1:] += 1  # later blocks have the larger scales, also those behind the last key
    given |= {"kv_lengths": torch.tensor([256, 40], device=device)}
    v_scale[0, :, 2] += 1
    found = prepare(request(q, k, v, **given)).v_reference
    assert torch.equal(found, torch.stack((v_scale[0, :, 1], v_scale[1, :, 0])))
