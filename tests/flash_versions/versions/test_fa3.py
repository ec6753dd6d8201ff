"""What only FA3 has: descriptors, the order of tiles, the schedules of its kernel for Hopper, and
what is left to FA2.
"""

from functools import partial
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

from flash_versions import VERSIONS
from flash_versions.dispatch.device import H200_SHARED_MEMORY, Properties, devices
from flash_versions.dispatch.request import Request, make_request
from flash_versions.dispatch.sizes import panel_widths
from flash_versions.versions import fa3, fa4
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.fa3 import forward as portable
from flash_versions.versions.fa3.forward import heavy_first
from flash_versions.versions.fa3.hopper import host as forward_hopper
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.config import HopperConfig, default_config
from flash_versions.versions.tiles import wgmma
from tests.helpers.kernels.budget import random_inputs

inputs = partial(
    random_inputs, M=70, N=130, heads=4, kv_heads=2, batch=2, head_dim=32, dtype=torch.float32
)


@triton.jit
def places_kernel(out, tiles, total, section):
    for number in range(total):
        tl.store(out + number, heavy_first(number, tiles, total, section))


@pytest.mark.parametrize(
    ("tiles", "pairs", "section"), [(1, 1, 1), (7, 5, 2), (7, 5, 5), (1, 9, 4), (12, 3, 2)]
)
def test_heavy_tiles_of_all_heads_of_a_section_come_first(tiles, pairs, section, device):
    total = tiles * pairs
    out = torch.zeros(total, dtype=torch.int32, device=device)
    places_kernel[(1,)](out, tiles, total, section)
    places = out.tolist()
    assert sorted(places) == list(range(total))
    for first in range(0, pairs, section):
        heads = range(first, min(first + section, pairs))
        walked = places[first * tiles : (first + len(heads)) * tiles]
        assert walked == [head * tiles + tile for tile in range(tiles) for head in heads]


# ---- the schedules of the kernel for Hopper ----


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        ({"consumers": 4}, "consumers=4 is not possible; 2 and 3 are"),
        ({"block_kv": 96}, "block_kv=96 is not possible; 64 and 128 are"),
        ({"stages": 0}, "stages=0 and q_stages=2 must be at least 1"),
        ({"stages": 1, "late_wait": True}, "use stages=2"),
        ({"o_columns": 256}, "o_columns=256 is not possible; 64 and 128 are"),
        ({"scheduler": "fair"}, "scheduler='fair' is not grid, static or dynamic"),
    ],
    ids=str,
)
def test_a_configuration_that_would_hang_is_refused(switches, sentence):
    with pytest.raises(ValueError, match=sentence):
        HopperConfig(**switches)


HEAD_DIMS = (8, 32, 64, 72, 96, 112, 128, 130, 160, 192, 200, 256)


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim_has_tiles_that_fit(causal):
    """In shared memory, with at least two slots of K; and O, whose 64 rows take a register
    of each thread for two dims, in registers beside as many for S and half as many for P.
    """
    for head_dim, head_dim_v in product(HEAD_DIMS, HEAD_DIMS):
        q, k, v = (
            torch.empty(1, 256, 4, dims, dtype=torch.bfloat16)
            for dims in (head_dim, head_dim, head_dim_v)
        )
        config = default_config(make_request(q, k, v, causal=causal))
        widths, widths_v = panel_widths(head_dim), panel_widths(head_dim_v)
        assert config.fits(sum(widths), sum(widths_v)), (head_dim, head_dim_v)
        assert config.stages >= 2
        scores = config.block_kv // 2
        registers = sum(widths_v) // 2 + scores + scores // 2
        assert registers <= {2: 192, 3: 130}[config.consumers], (head_dim, head_dim_v)


# ---- what is left to FA2 ----


def misaligned(x):
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def odd_rows(x):
    return torch.cat((x, x), -1)[..., : x.shape[-1] + 1].contiguous()[..., : x.shape[-1]]


def same(x):
    return x


OF_ONE = {"M": 64, "batch": 1, "heads": 1, "kv_heads": 1}
INTEGERS = torch.tensor([20, 130])
LEFT_TO_FA2 = {
    "one query": (same, {"M": 1}, {}, "the sequences have fewer than 64 query rows"),
    "63 queries": (same, {"M": 63}, {}, "query rows (63): FA2 packs the query heads"),
    "splits": (same, OF_ONE, {"num_splits": 2}, "the keys are to be split in 2, which FA2"),
    "no keys": (same, {"N": 0}, {}, "k is empty"),
    "misaligned": (misaligned, {}, {}, "q does not begin at a multiple of 16 bytes"),
    "odd rows": (odd_rows, {}, {}, "q has strides (9240, 132, 33, 1); a descriptor steps by"),
    "expanded": (lambda x: x[:1].expand(x.shape), {}, {}, "q has strides (0, "),
    "wide": (same, {"head_dim": 320, "M": 65}, {}, "head_dim 320 is left to FA2's kernels"),
    "pages": (same, {}, {"kv_lengths": INTEGERS, "block_table": INTEGERS[:, None] // 100},
              "block_table scatters"),
    "lengths": (same, {}, {"kv_lengths": INTEGERS}, "kv_lengths is left to FA2's kernel"),
    "starts": (same, {}, {"kv_starts": INTEGERS}, "kv_starts is left to FA2's kernel"),
    "intervals": (same, {}, {"query_ends": torch.full((130,), 60)}, "query_ends is left to FA2's"),
    "left": (same, {}, {"window": (0, None)}, "window_left is left to FA2's kernel"),
    "right": (same, {}, {"window": (None, 3)}, "window_right is left to FA2's kernel"),
    "softcap": (same, {}, {"softcap": 2.0}, "softcap is left to FA2's kernel"),
    "slopes": (same, {}, {"alibi_slopes": torch.ones(4)}, "alibi_slopes is left to FA2's kernel"),
    "sink": (same, {}, {"sink": torch.ones(4)}, "sink is left to FA2's kernel"),
    "dropout": (same, {}, {"dropout_p": 0.5}, "dropout_p is left to FA2's kernel"),
}  # fmt: skip


@pytest.mark.parametrize("version", ["fa3", "fa4"])
@pytest.mark.parametrize("name", LEFT_TO_FA2)
def test_what_is_left_to_fa2(name, version, device, monkeypatch):
    """Says why, gets there off Hopper, and the portable kernels refuse options."""
    change, shape, options, sentence = LEFT_TO_FA2[name]
    options = {k: x.to(device) if torch.is_tensor(x) else x for k, x in options.items()}
    request = make_request(*(change(x) for x in inputs(device, **shape)), **options)
    gathered, asked = portable.left_to_gathering(request), portable.left_for_options(request)
    assert sentence in (gathered or asked)
    monkeypatch.setattr(forward_hopper, "left_to_portable", lambda request: "no Hopper")
    monkeypatch.setattr(fa3.decode_hopper, "serves", lambda request: False)
    choose = {"fa3": fa3, "fa4": fa4}[version].choose_forward
    assert choose(request) is fa2_forward.forward
    assert VERSIONS[version].unsupported(request) is None
    if asked:
        with pytest.raises(ValueError, match="left to FA2's kernel"):
            VERSIONS[version].variants["portable"](request)


@pytest.mark.parametrize("version", ["fa3", "fa4"])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"scale": 2.0}, {"window": (None, 0)}], ids=str
)
def test_plain_calls_are_not_left_to_fa2(options, version, device, monkeypatch):
    request = make_request(*inputs(device), **options)
    expected = VERSIONS[version].variants["portable"](request)
    monkeypatch.setattr(fa2_forward, "forward", None)
    assert torch.equal(VERSIONS[version].forward(request)[0], expected[0])


def test_sequences_too_far_apart_are_left_to_the_portable_kernel(monkeypatch):
    """Boxes of ragged sequences count rows from the first sequence on, up to 2^30."""
    monkeypatch.setattr(wgmma, "available", lambda device: True)
    kinds = {"dtype": torch.bfloat16, "device": "meta"}
    for rows, left in ((2**28, False), (2**29, True)):
        k = torch.empty_strided((3, 128, 1, 16), (16 * rows, 16, 16, 1), **kinds)
        q, lengths = torch.empty(3, 128, 1, 16, **kinds), torch.empty(3, device="meta")
        request = Request(q, k, k, kv_lengths=lengths)
        for kernel in (forward_hopper, backward_hopper):
            assert bool(kernel.left_to_portable(request)) == left
        assert kernel.left_to_portable(request._replace(kv_lengths=None)) is None


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [
        (Properties(num_sms=132), "the keys are to be split in 32, which FA2 does."),
        (Properties(num_sms=1), None),
        (Properties((8, 9), H200_SHARED_MEMORY), "compute capability 8.9 has no TMA"),
        (Properties((9, 0), H200_SHARED_MEMORY), None),
    ],
    ids=str,
)
def test_gpus_that_leave_few_tiles_and_many_keys_to_gathering(gpu, reason, device):
    request = make_request(*inputs(device, N=4096, **OF_ONE))
    with devices.assume(gpu):
        found = portable.left_to_gathering(request)
    assert found == reason or found.startswith(reason)


@pytest.mark.parametrize("version", ["fa3", "fa4"])
def test_gradients_are_those_of_the_kernel_for_hopper_or_fa2s(version, device, monkeypatch):
    """Also of split keys, as a backward has no splits."""
    request = make_request(*inputs(device, dtype=torch.bfloat16, **OF_ONE), num_splits=2)
    o, lse, _ = portable.forward(request)
    given = request, o, lse, None, torch.randn_like(o), None
    found = []
    monkeypatch.setattr(backward_hopper, "backward", lambda *given: found.append(given))
    monkeypatch.setattr(backward_hopper, "left_to_portable", lambda request: "no Hopper")
    gradients = VERSIONS[version].backward(*given)
    expected = fa2_backward.backward(*given)
    assert all(torch.equal(x, y) for x, y in zip(gradients[:3], expected)) and not found
    monkeypatch.setattr(backward_hopper, "left_to_portable", lambda request: None)
    VERSIONS[version].backward(*given)
    assert found == [given]
