"""What only FA3 has: descriptors, the walk of a persistent grid, and what is left to FA2."""

import re
from functools import partial
from itertools import pairwise, product

import pytest
import torch
import triton
import triton.language as tl

from flash_versions import VERSIONS, attention
from flash_versions.dispatch import launch
from flash_versions.dispatch.autograd.compute import in_vectors
from flash_versions.dispatch.device import H200_SHARED_MEMORY, Properties, devices
from flash_versions.dispatch.request import Request, make_request
from flash_versions.dispatch.sizes import LaunchConfig, panel_widths
from flash_versions.versions import fa3
from flash_versions.versions.fa2 import backward as fa2_backward
from flash_versions.versions.fa2 import forward as fa2_forward
from flash_versions.versions.fa3 import backward
from flash_versions.versions.fa3 import forward as portable
from flash_versions.versions.fa3.forward import heavy_first
from flash_versions.versions.fa3.hopper import host as forward_hopper
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.config import (
    HopperConfig,
    default_config,
    fp8_config,
)
from flash_versions.versions.fa3.hopper.host import even_section
from flash_versions.versions.tiles import wgmma
from flash_versions.versions.tiles.tma import undescribable
from tests.flash_versions.versions.test_attention import CASES, DTYPES, EVERY_DTYPE, LAYOUTS
from tests.flash_versions.versions.test_packed import bounds, packed_inputs
from tests.helpers.kernels.budget import assert_gradients_right, assert_right, random_inputs
from tests.helpers.rotation import rotated

interpreted = pytest.mark.skipif(
    torch.cuda.is_available(), reason="swaps code that only the interpreter re-reads"
)
inputs = partial(
    random_inputs, M=70, N=130, heads=4, kv_heads=2, batch=2, head_dim=32, dtype=torch.float32
)


def gradients_of(request, differentiate, do=None, dlse=None, **options):
    """{name: gradient} of a request, by a backward of one's own choice."""
    with torch.no_grad():
        o, lse, _ = portable.forward(request)
        do = torch.randn_like(o) if do is None else do
        found = differentiate(request, o, lse, None, do, dlse, **options)
    return {n: x for n, x in zip(("dq", "dk", "dv", "dsink"), found) if x is not None}, do


# ---- the kernel on calls of every kind, also on those that FA2 would get ----

DESCRIBED = [case for case in CASES if case.batch and case.M and case.N]
PORTABLE = [case for case in DESCRIBED if (case.starts, case.ends) == (None, None)]  # no lists


@pytest.mark.parametrize(("case", "dtype"), rotated(PORTABLE, DTYPES, EVERY_DTYPE))
def test_equivalence_of_the_kernel_itself(case, dtype, device):
    request = in_vectors(make_request(*case.inputs(dtype, device), **case.all_options(device)))
    with torch.no_grad():
        o, lse, _ = portable.forward(request)
    assert_right(request, o, lse)


@pytest.mark.parametrize(("case", "dtype"), rotated(PORTABLE, DTYPES, EVERY_DTYPE))
def test_gradients_of_the_kernels_themselves(case, dtype, device):
    request = in_vectors(make_request(*case.inputs(dtype, device), **case.all_options(device)))
    dlse = torch.randn(case.batch, case.heads, case.M, device=device)
    gradients, do = gradients_of(request, backward.backward, dlse=dlse)
    assert set(gradients) == {"dq", "dk", "dv"} | ({"dsink"} if case.sink else set())
    assert_gradients_right(request, gradients, do, dlse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides_that_descriptors_take(layout, device):
    request = make_request(*(LAYOUTS[layout](x) for x in inputs(device)), causal=True)
    assert portable.left_to_gathering(request) is None
    assert_right(request, *portable.forward(request)[:2])


def test_the_stride_of_a_single_element_does_not_matter(device):
    q, k, v = (x[:1, :, :1] for x in inputs(device))
    odd = [x.as_strided(x.shape, (7, x.stride(1), 3, 1)) for x in (q, k, v)]
    request = make_request(*odd)
    assert portable.left_to_gathering(request) is None
    expected = portable.forward(make_request(q, k, v))[0]
    assert torch.equal(portable.forward(request)[0], expected)


def test_compiles_as_one_graph(device):
    def layer(q, k, v):
        return attention(q * 2, k, v, causal=True, version="fa3") + 1

    q, k, v = inputs(device)
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v), layer(q, k, v))


# ---- what lies beside the rows of a sequence ----


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_keys_past_the_length_do_not_leak(causal, device):
    """A box reads them; of the masked block only."""
    q, k, v = inputs(device, N=200)
    lengths = torch.tensor([130, 71], device=device)
    request = make_request(q, k, v, causal=causal, kv_lengths=lengths)
    assert portable.left_to_gathering(request) is None
    clean, lse, _ = portable.forward(request)
    assert_right(request, clean, lse)
    gradients, do = gradients_of(request, backward.backward)
    assert_gradients_right(request, gradients, do)
    for row, length in enumerate(lengths.tolist()):
        k[row, length:], v[row, length:] = float("nan"), float("nan")
        assert not gradients["dk"][row, length:].any() and not gradients["dv"][row, length:].any()
    assert torch.equal(portable.forward(request)[0], clean)
    again, _ = gradients_of(request, backward.backward, do)
    assert all(torch.equal(again[name], gradients[name]) for name in gradients)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of a tile of the poisoned sequence
@pytest.mark.filterwarnings("ignore:invalid value")
def test_neighbours_in_a_packing_do_not_leak(device):
    lengths = [70, 90, 65]
    q, k, v = (x.bfloat16() for x in packed_inputs(lengths, lengths, device))
    cu_seqlens = bounds(lengths, device)
    request = make_request(q, k, v, causal=True, cu_seqlens_q=cu_seqlens, num_splits=1)
    assert portable.left_to_gathering(request) is None
    assert backward.left_to_gathering(request) is None
    clean, do = gradients_of(request, backward.backward)
    assert_gradients_right(request, clean, do)
    clean["o"], lse, _ = portable.forward(request)
    assert_right(request, clean["o"], lse)
    for first, end in pairwise(cu_seqlens.tolist()):
        of_one = torch.zeros(sum(lengths), dtype=torch.bool, device=device)
        of_one[first:end] = True
        poisoned = {
            name: getattr(request, name).masked_fill(of_one[:, None, None], float("nan"))
            for name in "qkv"
        }
        another = request._replace(**poisoned)
        poisoned_do = do.masked_fill(of_one[:, None, None], float("nan"))
        again, _ = gradients_of(another, backward.backward, poisoned_do)
        again["o"], lse, _ = portable.forward(another)
        assert lse[0][:, ~of_one].isfinite().all()
        for name in clean:
            assert torch.equal(again[name][0, ~of_one], clean[name][0, ~of_one]), name
            assert again[name][0, of_one].isnan().all(), name


# ---- the switches of the kernel for Hopper ----


@pytest.mark.parametrize(
    ("switches", "sentence"),
    [
        ({"consumers": 4}, "consumers=4 is not possible; 2 and 3 are"),
        ({"block_kv": 96}, "block_kv=96 is not possible; 64 and 128 are"),
        ({"stages": 0}, "stages=0 and q_stages=2 must be at least 1"),
        ({"stages": 1, "late_wait": True}, "use stages=2"),
        ({"o_columns": 256}, "o_columns=256 is not possible; 64 and 128 are"),
        ({"section": 0}, "section=0 must be at least 1"),
        ({"scheduler": "fair"}, "scheduler='fair' is unknown; there are grid, static, dynamic"),
    ],
    ids=str,
)
def test_a_configuration_that_would_hang_is_refused(switches, sentence):
    with pytest.raises(ValueError, match=sentence):
        HopperConfig(**switches)


HEAD_DIMS = (8, 32, 64, 72, 96, 112, 128, 130, 160, 192, 200, 256)


@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim_has_tiles_that_fit(causal, device):
    """In shared memory, with at least two slots of K; and O, whose 64 rows take a register
    of each thread for two dims, in registers beside as many for S and half as many for P.
    """
    for head_dim, head_dim_v in product(HEAD_DIMS, HEAD_DIMS):
        q, k, v = (
            torch.empty(1, 256, 4, dims, dtype=torch.bfloat16, device=device)
            for dims in (head_dim, head_dim, head_dim_v)
        )
        config = default_config(make_request(q, k, v, causal=causal))
        widths, widths_v = panel_widths(head_dim), panel_widths(head_dim_v)
        assert config.fits(sum(widths), sum(widths_v)), (head_dim, head_dim_v)
        assert config.stages >= 2
        scores = config.block_kv // 2
        registers = sum(widths_v) // 2 + scores + scores // 2
        assert registers <= {2: 192, 3: 130}[config.consumers], (head_dim, head_dim_v)


ENDS = torch.full((1, 2, 4097), 7, dtype=torch.int32)


@pytest.mark.parametrize(("dims", "options", "tile"), [
    ((192, 192), {}, (64, 3, 128)), ((192, 192), {"query_ends": ENDS}, (64, 3, 64)),
    ((192, 128), {"causal": True}, (128, 2, 64)), ((160, 160), {}, (128, 2, 64)),
    ((144, 144), {}, (128, 2, 128)), ((256, 256), {}, (64, 2, 128)),
    ((256, 256), {"query_ends": ENDS}, (64, 2, 128)), ((256, 128), {}, (64, 3, 64)),
], ids=str)  # fmt: skip
def test_tiles_above_head_dim_128(dims, options, tile):
    """Keys, slots of K and V, columns of O's buffer: in this order as large as fits."""
    q, k, v = (torch.empty(1, 4097, 2, dim, dtype=torch.bfloat16) for dim in (*dims[:1], *dims))
    config = default_config(make_request(q, k, v, **options))
    assert (config.block_kv, config.stages, config.o_columns) == tile


@pytest.mark.parametrize(("tokens", "heads", "group", "section"), [
    ((1, 16384), 16, 1, 8), ((1, 16384), 21, 1, 11), ((2, 8192), 21, 1, 14), ((1, 16384), 6, 1, 6),
    ((1, 16384), 40, 4, 20), ((4, 4096), 16, 1, 16), ((1, 16384), 32, 32, 32), ((1, 500), 7, 1, 7),
    ((1, 2**20), 16, 1, 1),
], ids=str)  # fmt: skip
def test_sections_have_whole_groups_and_like_numbers_of_heads(tokens, heads, group, section):
    q = torch.empty(*tokens, heads, 128, dtype=torch.bfloat16, device="meta")
    k = q[:, :, : heads // group]
    assert even_section(make_request(q, k, k, causal=True)) == section


LONG, SHORT, ONE = (4, 4096), (16, 1024), (1, 16384)  # sequences and their tokens
ODD = (19, 532)
CAUSAL = {"causal": True}


@pytest.mark.parametrize(("tokens", "options", "consumers"), [
    (SHORT, CAUSAL, 2), (LONG, CAUSAL, 2), (ONE, CAUSAL, 3), (ODD, CAUSAL, 3), (LONG, {}, 3),
    ((7, 4842), CAUSAL, 3),
    (ONE, {"window": (1024, 0)}, 3),
], ids=str)  # fmt: skip
def test_consumers_at_head_dim_64(tokens, options, consumers):
    """Three, unless tiles of 192 rows fill 132 SMs worse."""
    q = torch.empty(*tokens, 32, 64, dtype=torch.bfloat16)
    with devices.assume(Properties(num_sms=132)):
        assert default_config(make_request(q, q, q, **options)).consumers == consumers


@pytest.mark.parametrize(("head_dim", "tokens", "options", "expected"), [
    (96, LONG, {}, True), (112, LONG, {}, False), (96, SHORT, {}, False), (96, LONG, CAUSAL, False),
    (96, ODD, CAUSAL, True), (96, LONG, {"softcap": 20.0}, False), (64, LONG, {}, False),
    (128, LONG, {}, False), (96, LONG, {"kv_lengths": torch.tensor([4096, 1, 2, 3]).int()}, False),
], ids=str)  # fmt: skip
def test_three_consumers_in_order(head_dim, tokens, options, expected):
    """For plain calls, and not where tiles of 192 rows fill 132 SMs worse."""
    q = torch.empty(*tokens, 2048 // head_dim, head_dim, dtype=torch.bfloat16)
    with devices.assume(Properties(num_sms=132)):
        config = default_config(make_request(q, q, q, **options))
    assert (config.consumers == 3 and not config.overlap) == expected


@pytest.mark.parametrize(("head_dim", "tokens", "options", "expected"), [
    (128, LONG, {}, True), (128, SHORT, {}, False), (128, ONE, CAUSAL, True),
    (128, LONG, CAUSAL, False), (64, SHORT, CAUSAL, True), (64, LONG, {}, False),
    (256, LONG, {}, False),
], ids=str)  # fmt: skip
def test_three_consumers_in_order_in_fp8(head_dim, tokens, options, expected):
    """Of the caller's 8-bit tensors, as their scores have 32 bits."""
    q = torch.empty(*tokens, 2048 // head_dim, head_dim, dtype=torch.float8_e4m3fn)
    with devices.assume(Properties(num_sms=132)):
        config = fp8_config(make_request(q, q, q, **options))
    assert (config.consumers == 3 and not config.overlap) == expected


@pytest.mark.parametrize(("head_dim", "tokens", "options", "consumers"), [
    (128, LONG, {}, 3), (128, SHORT, {}, 2), (128, ONE, CAUSAL, 3), (128, LONG, CAUSAL, 2),
    (64, SHORT, CAUSAL, 2), (64, LONG, {}, 3), (256, LONG, {}, 2),
], ids=str)  # fmt: skip
def test_consumers_whose_scores_have_16_bits(head_dim, tokens, options, consumers):
    """Three overlap where two would not fill the SMs better."""
    q = torch.empty(*tokens, 2048 // head_dim, head_dim, dtype=torch.bfloat16)
    with devices.assume(Properties(num_sms=132)):
        config = fp8_config(make_request(q, q, q, precision="fp8", **options))
    assert config.consumers == consumers and config.overlap


# ---- the walk ----


@triton.jit
def places_kernel(out, tiles, total, section):
    for number in range(total):
        tl.store(out + number, heavy_first(number, tiles, total, section))


@pytest.mark.parametrize(
    ("tiles", "pairs", "section"),
    [(1, 1, 1), (7, 5, 1), (7, 5, 2), (7, 5, 5), (1, 9, 4), (12, 3, 2), (5, 8, 4)],
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


@interpreted
@pytest.mark.parametrize("multiprocessors", [1, 3, 1000])
@pytest.mark.parametrize("packed", [False, True], ids=["alike", "packed"])
def test_every_tile_is_computed_once(packed, multiprocessors, device, monkeypatch):
    """Three programs for 3 x 5 x 2 tiles and more: 3, 2 and 5 do not divide one another."""
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=multiprocessors))
    seen = []
    forward_tile = portable.forward_tile

    def count(tile, sequence, rows, keys, *rest):
        seen.append((int(tile), int(sequence), int(rows.head)))
        return forward_tile(tile, sequence, rows, keys, *rest)

    monkeypatch.setattr(portable, "forward_tile", count)
    config = LaunchConfig(32, 32, num_warps=8, num_stages=2)
    lengths = [70, 1, 96] if packed else [90, 90]
    if packed:
        q, k, v = packed_inputs(lengths, lengths, device, heads=5, kv_heads=1)
        request = make_request(q, k, v, causal=True, cu_seqlens_q=bounds(lengths, device))
    else:
        q, k, v = inputs(device, M=90, N=90, heads=5, kv_heads=1)
        request = make_request(q, k, v, causal=True)
    o, lse, _ = portable.forward(request, config, persistent=True)
    assert_right(request, o, lse)
    expected = {
        (tile, sequence, head)
        for sequence, length in enumerate(lengths)
        for tile in range(-(-length // 32))
        for head in range(5)
    }
    assert len(seen) == len(expected) and set(seen) == expected
    if not packed and multiprocessors == 1:
        assert [tile for tile, _, _ in seen] == [2] * 10 + [1] * 10 + [0] * 10


@pytest.mark.parametrize("warps", [4, 8])
def test_any_number_of_programs_gives_the_same_bits(warps, device, monkeypatch):
    request = make_request(*inputs(device, M=40, N=60, heads=6), causal=True)
    config = LaunchConfig(16, 32, warps, num_stages=2)
    results = [portable.forward(request, config)[0]]
    for multiprocessors in (1, 7):
        monkeypatch.setattr(devices, "assumed", Properties(num_sms=multiprocessors))
        results.append(portable.forward(request, config, persistent=True)[0])
    assert all(torch.equal(o, results[0]) for o in results)


def test_sections_hold_what_fits_in_the_cache(device):
    x = torch.zeros(2, 1, 8, 128, device=device, dtype=torch.bfloat16)
    k = x[:, :, :4].expand(2, 16384, 4, 128)
    causal = make_request(x, k, k, causal=True)
    # 16384 keys and values are 8 MiB: 4 key heads fit, 2 query heads each.
    assert portable.heads_of_section(causal) == 8
    assert portable.heads_of_section(make_request(x, k, k)) == 1
    assert portable.heads_of_section(make_request(x, k[:, :1024], k[:, :1024], causal=True)) == 16
    longer = x[:, :, :4].expand(2, 2**20, 4, 128)
    assert portable.heads_of_section(make_request(x, longer, longer, causal=True)) == 2


@interpreted
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_the_tiles_of_a_backward_are_walked_over_once_and_heavy_first(causal, device, monkeypatch):
    """Key heads of two sequences for dK and dV, query heads for dQ, in tiles of 32."""
    seen = []
    find_tile = backward.find_tile

    def note(*arguments, **options):
        tile, sequence, rows, keys = find_tile(*arguments, **options)
        seen.append((int(tile), int(sequence), int(rows.head)))
        return tile, sequence, rows, keys

    monkeypatch.setattr(backward, "find_tile", note)
    request = make_request(*inputs(device, M=80, N=80, heads=6, kv_heads=2), causal=causal)
    config = LaunchConfig(32, 32, 4, 2)
    gradients, do = gradients_of(request, backward.backward, kv_config=config, q_config=config)
    assert_gradients_right(request, gradients, do)
    of_keys, of_queries = seen[: 3 * 4], seen[3 * 4 :]
    for walked, heads in ((of_keys, 2), (of_queries, 6)):
        everything = [(t, b, h) for b in range(2) for h in range(heads) for t in range(3)]
        assert sorted(walked) == sorted(everything)
        if not causal:
            assert walked == everything
    if causal:  # the first keys and the last queries
        assert [tile for tile, _, _ in of_keys] == [0] * 4 + [1] * 4 + [2] * 4
        assert [tile for tile, _, _ in of_queries] == [2] * 12 + [1] * 12 + [0] * 12


def test_sections_of_a_backward_hold_what_streams_past(device):
    x = torch.zeros(2, 1, 8, 128, device=device, dtype=torch.bfloat16)
    q = x.expand(2, 16384, 8, 128)
    causal = make_request(q, x[:, :, :4], x[:, :, :4], causal=True)
    # 16384 queries and dO are 8 MiB a head, two heads a group: 2 key heads fit.
    assert backward.key_heads_of_section(causal) == 2
    assert backward.key_heads_of_section(make_request(q, x[:, :, :4], x[:, :, :4])) == 1
    assert backward.key_heads_of_section(make_request(x, x, x, causal=True)) == 16


BACKWARD_TILES = {
    "tall": (LaunchConfig(64, 16, 4, 2), LaunchConfig(16, 64, 4, 2)),
    "wide": (LaunchConfig(16, 64, 4, 2), LaunchConfig(64, 16, 4, 2)),
}


@pytest.mark.parametrize("tiles", BACKWARD_TILES)
@pytest.mark.parametrize("heads", [2, 6])
def test_backward_of_any_tile(heads, tiles, device):
    q, k, v = inputs(device, M=50, N=70, heads=heads, batch=1)
    request = make_request(q, k, v, causal=True, window=(30, None))
    kv_config, q_config = BACKWARD_TILES[tiles]
    gradients, do = gradients_of(request, backward.backward, kv_config=kv_config, q_config=q_config)
    assert_gradients_right(request, gradients, do)


# ---- what is left to FA2 ----


def misaligned(x):
    flat = torch.zeros(x.numel() + 1, dtype=x.dtype, device=x.device)
    flat[1:] = x.flatten()
    return flat[1:].view(x.shape)


def odd_rows(x):
    return torch.cat((x, x), -1)[..., : x.shape[-1] + 1].contiguous()[..., : x.shape[-1]]


LEFT_TO_FA2 = {
    "one query": (lambda x: x, {"M": 1}, {}, "^the sequences have fewer than 64 query rows"),
    "63 queries": (lambda x: x, {"M": 63}, {}, r"query rows \(63\): FA2 packs the query heads"),
    "splits": (lambda x: x, {"M": 64, "batch": 1, "heads": 1, "kv_heads": 1},
               {"num_splits": 2}, "^the keys are to be split in 2, which FA2"),
    "no keys": (lambda x: x, {"N": 0}, {}, "^k is empty"),
    "misaligned": (misaligned, {}, {}, "^q does not begin at a multiple of 16 bytes"),
    "odd rows": (odd_rows, {}, {}, r"^q has strides \(9240, 132, 33, 1\); a descriptor steps by"),
    "expanded": (lambda x: x[:1].expand(x.shape), {}, {}, r"^q has strides \(0, "),
}  # fmt: skip


@pytest.mark.parametrize("name", LEFT_TO_FA2)
def test_what_is_left_to_gathering(name, device, monkeypatch):
    change, shape, options, sentence = LEFT_TO_FA2[name]
    q, k, v = (change(x) for x in inputs(device, **shape))
    request = make_request(q, k, v, **options)
    check_left_to_gathering(request, sentence, monkeypatch)


SEQUENCES_LEFT_TO_FA2 = {
    "in pages": ({"kv_lengths": [20, 130], "block_table": [[0], [1]]}, "^block_table scatters"),
}


@pytest.mark.parametrize("name", SEQUENCES_LEFT_TO_FA2)
def test_sequences_left_to_gathering(name, device, monkeypatch):
    given, sentence = SEQUENCES_LEFT_TO_FA2[name]
    options = {key: torch.tensor(value, device=device) for key, value in given.items()}
    check_left_to_gathering(make_request(*inputs(device), **options), sentence, monkeypatch)


def check_left_to_gathering(request, sentence, monkeypatch):
    assert pytest.raises(ValueError, raise_reason, request).match(sentence)
    expected = fa2_forward.forward(request)[0]
    monkeypatch.setattr(portable, "forward", None)
    assert torch.equal(fa3.VERSION.forward(request)[0], expected)
    assert VERSIONS["fa3"].unsupported(request) is None


def raise_reason(request):
    if reason := portable.left_to_gathering(request):
        raise ValueError(reason)


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


def test_packed_decoding_is_left_to_gathering(device):
    """By the mean: 100 sequences of one query are as many rows as one of a hundred."""
    q, k, v = packed_inputs([1] * 100, [2] * 100, device)
    cu_seqlens = {
        "cu_seqlens_q": bounds([1] * 100, device),
        "cu_seqlens_k": bounds([2] * 100, device),
    }
    reason = portable.left_to_gathering(make_request(q, k, v, **cu_seqlens))
    assert reason is not None and reason.startswith(
        "the sequences have fewer than 64 query rows (1)"
    )
    whole = {"cu_seqlens_q": bounds([100], device), "cu_seqlens_k": bounds([200], device)}
    assert portable.left_to_gathering(make_request(q, k, v, **whole)) is None


def test_few_tiles_and_many_keys_are_left_to_gathering(device, monkeypatch):
    request = make_request(*inputs(device, M=64, N=4096, heads=1, kv_heads=1, batch=1))
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=132))
    assert portable.left_to_gathering(request).startswith("the keys are to be split in 32")
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=1))
    assert portable.left_to_gathering(request) is None


def test_what_fa3_serves_does_not_go_to_fa2(device, monkeypatch):
    request = make_request(*inputs(device))
    expected = portable.forward(request)[0]
    monkeypatch.setattr(fa2_forward, "forward", None)
    assert torch.equal(fa3.VERSION.forward(request)[0], expected)


@pytest.mark.parametrize(("capability", "left"), [((8, 0), True), ((8, 9), True), ((9, 0), False)])
def test_a_gpu_without_tma_is_left_to_gathering(capability, left, device, monkeypatch):
    monkeypatch.setattr(devices, "assumed", Properties(capability, H200_SHARED_MEMORY))
    reason = portable.left_to_gathering(make_request(*inputs(device)))
    assert (reason is not None) == left
    if left:
        assert reason.startswith(f"compute capability {capability[0]}.{capability[1]} has no TMA")


# ---- whose backward ----


GRADIENTS = {
    "one number for all": lambda x: x[:1, :1, :1].expand(x.shape),
    "misaligned": misaligned,
    "odd rows": odd_rows,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_that_no_descriptor_takes_is_copied(name, device):
    request = make_request(*inputs(device, N=70, heads=2, kv_heads=1), causal=True)
    do = GRADIENTS[name](torch.randn(2, 70, 2, 32, device=device))
    assert undescribable("do", do)
    gradients, _ = gradients_of(request, backward.backward, do)
    expected, _ = gradients_of(request, backward.backward, do.clone())
    assert all(torch.equal(gradients[x], expected[x]) for x in expected)


@pytest.mark.parametrize("name", sorted({*LEFT_TO_FA2} - {"splits", "no keys"}))
def test_gradients_that_are_left_to_gathering(name, device, monkeypatch):
    change, shape, options, sentence = LEFT_TO_FA2[name]
    request = make_request(*(change(x) for x in inputs(device, **shape)), **options)
    assert re.search(sentence, backward.left_to_gathering(request))
    o, lse, _ = fa2_forward.forward(request)
    given = request, o, lse, None, torch.randn_like(o), None
    expected = fa2_backward.backward(*given)[:3]
    for module in (backward, backward_hopper):
        monkeypatch.setattr(module, "backward", None)
    found = VERSIONS["fa3"].backward(*given)[:3]
    assert all(torch.equal(x, y) for x, y in zip(found, expected))


def test_split_keys_have_gradients_of_their_own(device):
    shape = {"M": 64, "batch": 1, "heads": 1, "kv_heads": 1, "dtype": torch.bfloat16}
    request = make_request(*inputs(device, **shape), num_splits=2)
    assert portable.left_to_gathering(request) is not None
    assert backward.left_to_gathering(request) is None


ON_A_GPU = {
    "Hopper": ((9, 0), {}, None),
    "Hopper, wide": ((9, 0), {"head_dim": 256}, None),
    "Blackwell": ((10, 0), {"head_dim": 80}, None),
    "Blackwell, wide": ((10, 0), {"head_dim": 256}, "tiles of 64 x 32 in torch.bfloat16 on comp"),
    "Hopper, 192": ((9, 0), {"head_dim": 192}, "tiles of 64 x 32 in torch.bfloat16 on compute cap"),
    "exact products": ((9, 0), {"dtype": torch.float32}, "tiles of 32 x 32 in torch.float32 on"),
    "mma.sync": (
        (12, 0),
        {},
        "tiles of 64 x 64 in torch.bfloat16 on compute capability 12.0 are m",
    ),
    "no TMA": ((8, 9), {}, "compute capability 8.9 has no TMA"),
}


@pytest.mark.parametrize("name", ON_A_GPU)
def test_gradients_on_a_gpu_are_for_boxes_where_products_read_them(name, device, monkeypatch):
    capability, shape, sentence = ON_A_GPU[name]
    monkeypatch.setattr(devices, "assumed", Properties(capability, H200_SHARED_MEMORY))
    request = make_request(*inputs(device, **({"dtype": torch.bfloat16} | shape)))
    found = backward.left_to_gathering(request)
    assert found is None if sentence is None else found.startswith(sentence)


@pytest.mark.parametrize("version", ["fa3", "fa4"])
def test_the_explicit_backward_comes_first(version, device, monkeypatch):
    request = make_request(*inputs(device, dtype=torch.bfloat16))
    o, lse, _ = portable.forward(request)
    given = request, o, lse, None, torch.randn_like(o), None
    found = []
    monkeypatch.setattr(backward_hopper, "launch", lambda plan, *given: found.append(given))
    monkeypatch.setattr(backward_hopper, "left_to_portable", lambda request: "no Hopper")
    portables = VERSIONS[version].backward(*given)
    assert len(portables) == 4 and not found
    monkeypatch.setattr(launch, "decided", {})
    monkeypatch.setattr(backward_hopper, "left_to_portable", lambda request: None)
    VERSIONS[version].backward(*given)
    assert found == [given]
