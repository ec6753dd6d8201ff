"""FA3's decoding kernel for Hopper on the device: layouts, options, switches, graphs, replays."""

from functools import partial

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.hopper.decode import host
from flash_versions.versions.fa3.hopper.decode.host import DecodeConfig
from flash_versions.versions.oracle.budget import assess_request
from tests.gpu.launches import captured, differing_in_streams, on_hopper
from tests.helpers.kernels.budget import assert_right, random_inputs

pytestmark = on_hopper
LENGTHS = [3000, 1, 64, 65, 0, 1777, 128, 2]
CONFIGS = [
    DecodeConfig(), DecodeConfig(slots=2), DecodeConfig(64, 1), DecodeConfig(128, 1),
    DecodeConfig(128, 2),
]  # fmt: skip
inputs = partial(
    random_inputs, "cuda", M=1, N=3000, heads=8, kv_heads=2, batch=8, head_dim=128,
    dtype=torch.bfloat16
)  # fmt: skip


def in_pages(x, page_size):
    """(batch, N, ...) as shuffled pages and the table that finds them; what belongs to no sequence
    is NaN.
    """
    batch, n = x.shape[:2]
    of_each = -(-n // page_size)
    filled = x.new_full((batch, of_each * page_size, *x.shape[2:]), float("nan"))
    for b, length in enumerate(LENGTHS):
        filled[b, :length] = x[b, :length]
    pages = x.new_full((batch * of_each + 3, page_size, *x.shape[2:]), float("nan"))
    generator = torch.Generator("cuda").manual_seed(page_size)
    order = torch.randperm(len(pages), generator=generator, device="cuda")
    table = order[: batch * of_each]
    pages[table] = filled.unflatten(1, (of_each, page_size)).flatten(0, 1)
    return pages, table.view(batch, of_each).int()


def poisoned(page_size=None, transposed=False, options=None, **shape):
    """A request with NaN wherever no sequence has a key, and the same in rows without NaN."""
    q, k, v = inputs(**shape)
    given = {"causal": True, "kv_lengths": torch.tensor(LENGTHS, device="cuda")} | (options or {})
    exact = make_request(q, k, v, **given)
    k, v = k.clone(), v.clone()
    for b, length in enumerate(LENGTHS):
        k[b, length:] = v[b, length:] = float("nan")
    if page_size is not None:
        (k, given["block_table"]), (v, _) = (in_pages(x, page_size) for x in (k, v))
    if transposed:
        k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    return make_request(q, k, v, **given), exact


def check(request, exact, *given):
    """Within the budget, and the same bits when computed again."""
    assert host.left_to_gathering(request) is None
    o, lse, _ = host.forward(request, *given)
    assert_right(exact, o, lse)
    for _ in range(10):
        again, lse_again, _ = host.forward(request, *given)
        assert torch.equal(o, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("head_dim, page_size", [
    (64, None), (64, 16), (80, 32), (80, None), (128, None), (128, 64), (128, 128), (256, 256),
    (256, 16),
])  # fmt: skip
def test_head_dims_and_pages(head_dim, page_size):
    check(*poisoned(page_size, head_dim=head_dim))


@pytest.mark.parametrize("page_size", [None, 16, 64])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_configurations(config, page_size):
    check(*poisoned(page_size), config)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "queries"), [(2, 2, 1), (4, 1, 3), (16, 1, 4), (6, 2, 2), (64, 1, 1)]
)
def test_groups_and_queries(heads, kv_heads, queries, dtype):
    shape = {"heads": heads, "kv_heads": kv_heads, "M": queries, "dtype": dtype}
    check(*poisoned(16, **shape))


@pytest.mark.parametrize("page_size", [None, 64])
def test_a_graph_follows_the_lengths(page_size):
    """Replayed with other lengths; the same bits 100 times, whichever program comes last, and when
    calls are replayed by a tape.
    """
    q, k, v = inputs(batch=16, N=8192, heads=32, kv_heads=8)
    rows, given = (k, v), {}
    if page_size is not None:
        table = torch.randperm(16 * 8192 // page_size, device="cuda").int().view(16, -1)
        k, v = (x.view(-1, page_size, 8, 128) for x in (k, v))
        given = {"block_table": table}
        rows = tuple(x[table.long()].flatten(1, 2) for x in (k, v))
    lengths = torch.full((16,), 8192, device="cuda")
    call = partial(attention, q, k, v, causal=True, kv_lengths=lengths, **given)
    call(version="fa3")  # compiles
    graph, replayed = captured(lambda: call(version="fa3"))
    generator = torch.Generator("cuda").manual_seed(0)
    for _ in range(20):
        lengths.random_(0, 8193, generator=generator)
        first = call(version="fa3")
        exact = make_request(q, *rows, causal=True, kv_lengths=lengths)
        accuracy = assess_request({"o": first}, exact)["o"]
        assert accuracy.ok, accuracy
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(100):
            graph.replay()
            different += (replayed != first).any()
        for _ in range(3):
            different += (call(version="fa3") != first).any()
        assert different.item() == 0


@pytest.mark.parametrize("in_graphs", [False, True])
def test_two_streams_at_once(in_graphs):
    """Each has its own counters of pieces, as has each graph, though both come from one stream."""
    requests = [poisoned(page_size)[0] for page_size in (None, 64)]
    runs = [lambda request=request: host.forward(request)[:1] for request in requests]
    expected = [run()[0] for run in runs]
    if in_graphs:
        graphs = [captured(run) for run in runs]
        runs = [lambda graph=graph, o=o: (graph.replay(), o)[1] for graph, o in graphs]
    assert differing_in_streams(runs, 200) == [0, 0]
    assert all(torch.equal(run()[0], right) for run, right in zip(runs, expected))
