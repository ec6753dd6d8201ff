"""A decoding step's layers: within the error budget, everything written, bad input named."""

import pytest
import torch
import torch.nn.functional as F

from flash_versions.versions.oracle.budget import Accuracy
from tests.compile.compiled import compiled
from transformer.model.kernels.decode import gemv
from transformer.model.kernels.decode.gemv import Norm
from transformer.model.kernels.decode.gemv_qkv import MANY_TOKENS, qkv
from transformer.model.rope import Rope, rotary_table, rotate

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 1e-5
# Tokens, outputs, K: tiles that divide and that do not, more than one of them; several tokens.
SHAPES = [(1, 64, 128), (1, 30, 1208), (1, 37, 200), (1, 6, 8456), (2, 64, 128), (17, 38, 200)]


def random(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Normal, rounded to the dtype."""
    return torch.randn(*shape).to(device, dtype)


def weight_of(rows: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Weights whose outputs have the size of the inputs."""
    return (torch.randn(rows, width) / width**0.5).to(device, dtype)


def judged(got, plain, exact, name="y") -> None:
    """The error against fp64, with that of plain PyTorch in the same dtype."""
    rounding = torch.finfo(got.dtype).eps / 2 * exact.abs().max().item()
    accuracy = Accuracy(*((x.double() - exact).abs().max().item() for x in (got, plain)), rounding)
    assert accuracy.ok, f"{name}: {accuracy}"


def layer(x, weight, bias, scale, dtype):
    """What a norm and the linear layer after it do in a dtype, as the model does it."""
    x, weight = x.to(dtype), weight.to(dtype)
    if scale is not None:
        x = scale.to(dtype) * F.rms_norm(x, x.shape[-1:], eps=EPS)
    return F.linear(x, weight, None if bias is None else bias.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "width"), SHAPES)
def test_linear(device, dtype, tokens, outputs, width):
    """With and without everything around the product."""
    x = random(tokens, width, dtype=dtype, device=device)
    weight = weight_of(outputs, width, dtype, device)
    bias, residual = (
        random(*shape, dtype=dtype, device=device) for shape in ((outputs,), (tokens, outputs))
    )
    scale = 1 + 0.2 * random(width, dtype=dtype, device=device)
    for case in ((None, None, None), (scale, None, None), (scale, bias, residual)):
        scale_or_none, bias_or_none, added = case
        norm = None if scale_or_none is None else Norm(scale_or_none, EPS)
        got = gemv.linear(x, weight, bias_or_none, norm=norm, residual=added)
        plain, exact = (
            layer(x, weight, bias_or_none, scale_or_none, d) + (0 if added is None else added.to(d))
            for d in (dtype, torch.float64)
        )
        assert got.dtype == dtype and got.shape == (tokens, outputs)
        judged(got, plain, exact)


def test_the_sum_takes_the_place_of_the_residual(device):
    """Where tokens are several."""
    x = random(5, 40, dtype=torch.float32, device=device)
    weight = weight_of(24, 40, torch.float32, device)
    residual = random(5, 24, dtype=torch.float32, device=device)
    expected = residual + x @ weight.T
    got = gemv.linear(x, weight, residual=residual)
    torch.testing.assert_close(got, expected)
    assert got.data_ptr() == residual.data_ptr()


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(("tokens", "outputs", "width"), SHAPES)
def test_swiglu(device, dtype, tokens, outputs, width):
    """Two outputs that are far apart in the weight, and their product."""
    x = random(tokens, width, dtype=dtype, device=device)
    weight, bias = weight_of(2 * outputs, width, dtype, device), None
    if tokens != 2:
        bias = random(2 * outputs, dtype=dtype, device=device)
    scale = 1 + 0.2 * random(width, dtype=dtype, device=device)
    got = gemv.swiglu(x, weight, bias, norm=Norm(scale, EPS))
    found = []
    for d in (dtype, torch.float64):
        gate, up = layer(x, weight, bias, scale, d).chunk(2, -1)
        found.append(F.silu(gate) * up)
    judged(got, *found)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize(
    ("batch", "new", "heads", "kv_heads", "head_dim", "qk_norm"),
    [
        (1, 1, 3, 1, 24, True),
        (3, 1, 4, 4, 16, False),
        (2, 3, 6, 2, 8, True),
        (MANY_TOKENS + 3, 1, 3, 1, 24, True),
    ],
)
def test_qkv(device, dtype, batch, new, heads, kv_heads, head_dim, qk_norm):
    """Queries, and what is in the cache afterwards: the new slots and no other."""
    width, capacity, tokens = 72, 20, batch * new
    x = random(tokens, width, dtype=dtype, device=device)
    rows = (heads + 2 * kv_heads) * head_dim
    weight = weight_of(rows, width, dtype, device)
    bias = random(rows, dtype=dtype, device=device)
    scale = 1 + 0.2 * random(width, dtype=dtype, device=device)
    of_heads = [1 + 0.2 * random(head_dim, dtype=dtype, device=device) for _ in range(2)]
    norms = [Norm(weight, 1e-6) if qk_norm else None for weight in of_heads]
    options = {"norm": Norm(scale, EPS), "q_norm": norms[0], "k_norm": norms[1]}
    whole = random(2, 3, batch, capacity, kv_heads, head_dim, dtype=dtype, device=device)
    before = whole.clone()
    cache = whole.transpose(0, 1)[1]  # as in a cache of many layers; the halves are apart
    lengths = torch.randint(new, capacity + 1, (batch,), dtype=torch.int32, device=device)
    lengths[0] = capacity
    table = rotary_table(Rope(), head_dim, 32, x.device, dtype)
    q = qkv(x, weight, bias, cache, lengths, table, **options)

    slots = lengths[:, None] - new + torch.arange(new, device=device)
    row = torch.arange(batch, device=device)[:, None]
    found = []
    for d in (dtype, torch.float64):
        y = layer(x, weight, bias, scale, d).view(batch, new, -1, head_dim)
        parts = list(y.split([heads, kv_heads, kv_heads], 2))
        for i, norm in enumerate(norms):
            if norm is not None:
                normed = F.rms_norm(parts[i], (head_dim,), eps=1e-6)
                parts[i] = norm.weight.to(d) * normed
            parts[i] = rotate(parts[i], *(t.to(d) for t in table[slots.long()].unbind(-3)))
        found.append(parts)
    k, v = (half[row, slots] for half in cache)
    for name, got, plain, exact in zip("qkv", (q, k, v), *found, strict=True):
        judged(got, plain, exact, name)
    cache[:, row, slots] = before.transpose(0, 1)[1][:, row, slots]
    assert torch.equal(whole, before)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
def test_large_values_do_not_overflow(device):
    """The gate's exponential may be infinite; a square of x may not be in fp16."""
    x = torch.full((1, 64), 300.0, dtype=torch.float16, device=device)
    weight = torch.ones(2, 64, dtype=torch.float16, device=device)
    weight[0] = -1
    assert gemv.swiglu(x, weight).item() == 0
    norm = Norm(torch.ones(64, dtype=torch.float16, device=device), EPS)
    assert gemv.linear(x, weight, norm=norm)[0].tolist() == [-64, 64]


STREAMS = {"linear_kernel", "swiglu_kernel", "qkv_kernel"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.wide), "sm_90"])
def test_compiled_code(arch):
    """On either architecture: weights in loads of 16 bytes, no spills, one kernel for each part."""
    rows = compiled("kernels.gemv", arch)
    streams = [row for row in rows if row["kernel"] in STREAMS]
    assert {row["kernel"] for row in streams} == STREAMS
    for row in rows:
        assert row["stack"] == 0, row
        # What is rounded between a product and a sum stays so; sm_80 subtracts by an FMA.
        assert arch == "sm_80" or row["bf16_fma"] == 0, row
    assert {"draw_kernel", "forward_kernel", "backward_kernel"} <= {row["kernel"] for row in rows}
    for row in streams:
        assert row["wide_loads"] >= 4, row
        assert row["registers"] <= 128, row
        assert row["waits"] == (arch == "sm_90"), row


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "width"), [(3072, 2048), (896, 4864), (28672, 4096)])
def test_overlap_changes_no_bit(rows, width):
    """A chain of layers, a thousand times: each kernel may start before the one before it ends."""
    x = random(1, width, dtype=torch.bfloat16, device="cuda")
    weight = weight_of(rows, width, torch.bfloat16, "cuda")
    back = weight_of(width, rows, torch.bfloat16, "cuda")
    scale = torch.ones(width, dtype=torch.bfloat16, device="cuda")

    def chain(overlap):
        y = gemv.linear(x, weight, norm=Norm(scale, EPS), overlap=overlap)
        return gemv.linear(y, back, residual=x, overlap=overlap)

    expected = chain(overlap=False)
    if torch.cuda.get_device_capability() >= (9, 0):
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(1000):
            different += (chain(overlap=True) != expected).any()
        assert different.item() == 0
