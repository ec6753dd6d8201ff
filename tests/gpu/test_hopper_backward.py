"""FA3's backward for Hopper: what the compiler makes of it, and on the device.

    TRITON_INTERPRET=0 python -m tests.gpu.test_hopper_backward [wide]

prints a JSON row for each kernel that is compiled. The tests run it in a process of its own,
because compiling and interpreting cannot share one.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import cache, partial
from itertools import groupby, product

import pytest
import torch

from flash_versions import attention
from flash_versions.dispatch.autograd.compute import in_vectors, narrowed, widened
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import make_request
from flash_versions.inspect.command import Compiled, compiling
from flash_versions.versions.fa3.forward import forward
from flash_versions.versions.fa3.hopper.backward import kernel as backward_hopper
from flash_versions.versions.fa3.hopper.backward.config import (
    BackwardConfig,
    default_config,
    tile_widths,
)
from flash_versions.versions.fa3.hopper.config import OTHER_BYTES
from flash_versions.versions.fa4.hopper import backward as shared_out
from flash_versions.versions.tiles import wgmma
from tests.helpers import ROOT
from tests.helpers.kernels.budget import assert_gradients_right

pytestmark = pytest.mark.slow

# name -> (head_dim, head_dim of v, queries, keys, heads, options)
CALLS: dict[str, tuple[int, int, int, int, int, dict]] = {
    "full-64": (64, 64, 512, 512, 4, {}),
    "causal-64": (64, 64, 512, 512, 4, {"causal": True}),
    "softcap-64": (64, 64, 512, 512, 4, {"window": (100, 20), "softcap": 30.0}),
    "full-128": (128, 128, 512, 512, 4, {}),
    "causal-128": (128, 128, 512, 512, 4, {"causal": True}),
    "parts-64": (64, 64, 512, 512, 8, {"causal": True}),
    "ragged-128": (128, 128, 500, 700, 8, {"causal": True}),
    "window-128": (128, 128, 512, 512, 4, {"window": (100, 20)}),
    "softcap-128": (128, 128, 512, 512, 4, {"softcap": 30.0}),
    "128-by-64": (128, 64, 512, 512, 4, {}),
    "full-256": (256, 256, 512, 512, 4, {}),
    "causal-256": (256, 256, 500, 700, 8, {"causal": True}),
    "192-by-128": (192, 128, 512, 512, 4, {"window": (100, 20), "softcap": 30.0}),
    "80": (80, 80, 512, 512, 4, {"causal": True}),
    "ordered-64": (64, 64, 512, 512, 4, {"deterministic": True}),
    "ordered-128": (128, 128, 512, 512, 4, {"causal": True, "deterministic": True}),
    "ordered-256": (256, 256, 512, 512, 4, {"deterministic": True}),
}
# Of these, the same calls without turns.
FAST = {"ordered-64": "full-64", "ordered-128": "causal-128", "ordered-256": "full-256"}
# name -> (the call, eighths of the exponentials that are polynomials)
SHARES = {
    "full-64, 2/8": ("full-64", 2),
    "causal-128, 2/8": ("causal-128", 2),
    "causal-256, 3/8": ("causal-256", 3),
}
# Head dims in two panels: name -> (as in CALLS, switches of the configuration)
DIVIDED: dict[str, tuple[tuple, dict]] = {
    "96, early": (
        (96, 96, 512, 512, 4, {"causal": True}),
        {"panels": True, "early": True, "stages": 3},
    ),
    "96, softcap": ((96, 96, 500, 700, 8, {"softcap": 30.0}), {"panels": True}),
}
# Other divisions of the work above head_dim 128: as DIVIDED, and HGMMAs of a step, of consumers and
# of the warpgroup of dQ.
HALVES = {"block_kv": 128, "panels": True, "halves": True}
PAIR = {"block_kv": 128, "panels": True, "pair": True}
DIVISIONS: dict[str, tuple[tuple, dict, tuple[int, int]]] = {
    "192 by 128, halves": ((192, 128, 512, 512, 4, {"causal": True}), HALVES, (52, 48)),
    "160, halves": ((160, 160, 500, 700, 8, {"causal": True}), HALVES, (56, 40)),
    "192, pair": ((192, 192, 512, 512, 4, {}), PAIR, (88,)),
    "192, pair, in turns": (
        (192, 192, 500, 700, 8, {"causal": True, "deterministic": True}),
        PAIR,
        (88,),
    ),
    "256 by 128, pair": ((256, 128, 512, 512, 4, {}), PAIR, (88,)),
    "160, pair": ((160, 160, 500, 700, 8, {"causal": True}), PAIR, (72,)),
}
# The same of divided groups, which are compiled only: calls on the device have other groups.
IN_PARTS = {
    "192, pair, in parts": (
        (192, 192, 500, 700, 8, {"causal": True}),
        PAIR | {"parts": 2},
        (88,),
    ),
    "160, halves, in parts": ((160, 160, 512, 512, 8, {}), HALVES | {"parts": 2}, (56, 40)),
}
WIDE = {
    "causal-64", "softcap-64", "full-128", "ragged-128", "window-128", "128-by-64", "causal-256",
    "80", "ordered-64", "full-64, 2/8", "causal-256, 3/8", "96, softcap", "192, pair, in turns",
    "256 by 128, pair", "160, pair",
}  # fmt: skip
MOVES_DATA = ("SHFL", "PRMT", "STS", "LDS", "STSM", "LDSM")
SHARED_MEMORY = 227 * 1024
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or not wgmma.available(torch.device("cuda")),
        reason="needs a Hopper GPU",
    ),
]
compiles = pytest.mark.xdist_group("hopper_backward_compile")  # one worker: each compiled once


def of(*calls, more=()):
    """A test's parameters: a call, and what else belongs to it."""
    more = more or [()] * len(calls)
    return [
        pytest.param(call, *rest, marks=pytest.mark.wide if call in WIDE else ())
        for call, rest in zip(calls, more)
    ]


# ---- what the compiler makes of it ----


def compile_backward(
    head_dim: int, head_dim_v: int, queries: int, keys: int, heads: int, options: dict, eighths=0,
    switches: dict | None = None,
) -> list[Compiled]:  # fmt: skip
    """The kernels of one backward on Hopper, FA4's if some eighths are polynomials; switches: what
    is other than in the usual configuration of so many dims.
    """
    q = torch.empty(1, queries, heads, head_dim, dtype=torch.bfloat16)
    k = torch.empty(1, keys, 4, head_dim, dtype=torch.bfloat16)
    v = torch.empty(1, keys, 4, head_dim_v, dtype=torch.bfloat16)
    o, lse = torch.empty(*q.shape[:3], head_dim_v, dtype=q.dtype), torch.empty(1, heads, queries)
    with compiling("sm_90") as found:
        request = make_request(q, k, v, **options)
        plain = BackwardConfig(block_kv=64 if max(head_dim, head_dim_v) > 128 else 128)
        config = None if switches is None else replace(plain, **switches)
        given = request, o, lse, None, torch.empty_like(o), lse, config
        shared_out.backward(*given, eighths=eighths)
    return found


def row(kernel: Compiled) -> dict:
    """What the tests look at."""
    return {
        "kernel": kernel.kernel,
        "unused_barriers": kernel.unused_barriers,
        "shared": kernel.shared,
        "stack": kernel.stack,
        "early": kernel.code.metadata.launch_pdl,
        "registers": kernel.registers,
        "warps": kernel.num_warps,
        "serialised": kernel.serialised,
        "loops": [
            {
                "instructions": len(loop.instructions),
                "local_memory": loop.local_memory,
                "products": loop.opcodes["HGMMA"],
                "exponentials": loop.opcodes["MUFU"],
                "maxima": loop.opcodes["FMNMX"],
                "moves": sum(loop.opcodes[name] for name in MOVES_DATA),
                "events": [e.name for e in loop.events],
            }
            for loop in kernel.hot_loops
        ],
        **kernel.counts,
    }


def compiled(call: str) -> dict[str, dict]:
    """{kernel: row}."""
    return all_compiled("wide" if call in WIDE else "not wide")[call]


@cache
def all_compiled(which: str) -> dict[str, dict[str, dict]]:
    """{call: {kernel: row}} of the wide calls or of the others."""
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name, which],
        capture_output=True,
        text=True,
        env=os.environ | {"TRITON_INTERPRET": "0"},
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def explicit(call: str) -> dict:
    rows = compiled(call)
    return next(x for name, x in rows.items() if name.startswith("backward_"))


def consumer_loops(call: str) -> list[dict]:
    return [x for x in explicit(call)["loops"] if x["exponentials"] > 1]


def dq_loops(call: str) -> list[dict]:
    """Of the warpgroup that does nothing but dQ."""
    return [x for x in explicit(call)["loops"] if x["exponentials"] <= 1]


def without_moves(loop: dict) -> list[str]:
    """A loop's events, less local memory and waits at named barriers, of which the compiler adds
    some; arrivals there are the kernel's own.
    """
    return [x for x in loop["events"] if not x.startswith(("BAR.SYNC", "STL", "LDL"))]


@compiles
@pytest.mark.parametrize("call", of(*CALLS))
def test_it_compiles_fits_and_is_asynchronous(call):
    """Loads, stores and additions are TMA's, and no product waits for the one before it. Three
    kernels, of which the first and the last keep to registers, and the later two are launched while
    the one before runs.
    """
    rows = compiled(call)
    wide = max(CALLS[call][:2]) > 128
    main = "backward_wide_kernel" if wide else "backward_kernel"
    main = "backward_halves_kernel" if CALLS[call][:2] == (192, 128) else main
    assert list(rows) == ["prepare_kernel", main, "finish_kernel"]
    assert [x["early"] for x in rows.values()] == [False, True, True]
    assert rows["prepare_kernel"]["stack"] == rows["finish_kernel"]["stack"] == 0
    kernel = explicit(call)
    assert kernel["warps"] == (12 if wide else 16) and kernel["shared"] <= SHARED_MEMORY
    assert not kernel["serialised"] and not kernel["unused_barriers"]
    assert kernel["wgmma"] and kernel["tma_loads"] and kernel["tma_stores"]
    assert not kernel["mma_sync"] and not kernel["cp_async"]


@compiles
@pytest.mark.parametrize("call", of(*CALLS))
def test_masked_blocks_have_loops_of_their_own(call):
    """A consumer has a loop for blocks that all its keys are seen by, one for those in front of
    them, and one for those behind them; only consumers compute exponentials. Beyond head_dim 128 it
    has one, and with halves of the queries alone does somebody else multiply.
    """
    head_dim, head_dim_v, _, keys, _, options = CALLS[call]
    wide = max(head_dim, head_dim_v) > 128
    left = options.get("window", (None, None))[0] is not None
    right = "causal" in options or "window" in options or keys % 128 != 0
    consumers, others = consumer_loops(call), dq_loops(call)
    assert len(consumers) == 2 * (1 if wide else 1 + left + right)
    assert len(others) == (0 if wide and (head_dim, head_dim_v) != (192, 128) else 1)


@compiles
@pytest.mark.parametrize("call", of(*CALLS))
def test_the_loops_keep_to_registers(call):
    """But for a handful of loads."""
    for loop in explicit(call)["loops"]:
        assert loop["local_memory"] <= 8


@compiles
@pytest.mark.parametrize(
    ("call", "early"),
    of("full-128", "causal-128", "full-64", "causal-64", more=[[False], [False], [True], [True]]),
)
def test_the_order_of_a_step(call, early):
    """Products of dP are issued between the exponentials; behind dV the turn is given away, behind
    dK dS is announced, and when dK is there, Q and dO are free. dV and dK have their left operands
    in registers. Early, so have dP and S, and S of the next step runs to the end of this one;
    otherwise a step begins with S, and waits for it.
    """
    for loop in consumer_loops(call):
        events = without_moves(loop)
        issued, after = events[: events.index("wait 1")], events[events.index("wait 1") :]
        dp = issued[0 if early else issued.index("wait 0") :]
        dp_product = "HGMMA regs" if early else "HGMMA smem"
        assert dp.index(dp_product) < len(dp) - 1 - dp[::-1].index("MUFU.EX2")
        products = [x for x, _ in groupby(x for x in issued if x != "MUFU.EX2")]
        dk = ["wait 1", "mbarrier wait", "HGMMA regs"]  # dP; a slot for dS
        if early:
            assert products == ["mbarrier wait", "HGMMA regs", "BAR.ARV"]
            s = ["mbarrier wait", "HGMMA regs"]
            assert after == [*dk, *s, "BAR.ARV", "wait 2", "wait 1", "BAR.ARV", "wait 0"]
        else:
            s = ["mbarrier wait", "HGMMA smem", "wait 0"]
            assert products == [*s, "mbarrier wait", "HGMMA smem", "HGMMA regs", "BAR.ARV"]
            assert after == [*dk, "BAR.ARV", "wait 1", "wait 0", "BAR.ARV"]


@compiles
@pytest.mark.parametrize(("call", "parts"), [("full-64", 1), ("causal-128", 2), ("softcap-128", 2)])
def test_dq_is_two_halves_or_one_product(call, parts):
    """A part is left for an adder when its slot is empty; dS is given back when the last part is
    there.
    """
    for loop in dq_loops(call):
        part, left = ["HGMMA smem", "wait 0"], ["mbarrier wait", "mbarrier arrive"]
        expected = [*(parts - 1) * [*part, *left], *part, "mbarrier arrive", *left]
        assert without_moves(loop) == expected


@compiles
@pytest.mark.parametrize("call", of(*[x for x in CALLS if max(CALLS[x][:2]) <= 128]))
def test_five_products_and_an_exponential_for_a_score(call):
    """A product takes 16 of what is summed over at a time: S and dP sum over dims, each panel of dV
    and dK over 64 queries, and dQ, or each part of it, over 128 keys. A consumer has 64 by 64
    scores.
    """
    widths = [tile_widths(x, panels=True) for x in CALLS[call][:2]]
    dims, panels = sum(map(sum, widths)), sum(map(len, widths))
    dq_parts = 1 if max(CALLS[call][:2]) <= 64 and "softcap" not in CALLS[call][5] else 2
    for loop in consumer_loops(call):
        assert loop["products"] == dims // 16 + panels * 64 // 16
        each = 3 if "softcap" in CALLS[call][5] else 1  # tanh takes two
        assert loop["exponentials"] == each * 64 * 64 // 128
    for loop in dq_loops(call):
        assert loop["products"] == dq_parts * 128 // 16


@compiles
@pytest.mark.parametrize("call", of(*FAST))
def test_turns_cost_consumers_next_to_nothing(call):
    """The loops of the kernel stay uniform for ptxas: the same products, moves and, but for a few,
    instructions, and no more spills.
    """
    ordered, fast = consumer_loops(call), explicit(FAST[call])
    assert explicit(call)["stack"] <= fast["stack"] + 16
    loops = [x for x in fast["loops"] if x["exponentials"]]
    for with_turns, without in zip(ordered, loops, strict=True):
        assert with_turns["products"] == without["products"]
        assert with_turns["exponentials"] == without["exponentials"]
        assert with_turns["instructions"] <= without["instructions"] + 24


@compiles
@pytest.mark.parametrize("name", of(*SHARES))
def test_a_share_of_polynomials_moves_no_data(name):
    """So many exponentials become multiply-adds, which begin with a maximum. Registers are as many,
    no product waits for another, and nothing else moves between threads or through memory.
    """
    call, eighths = SHARES[name]
    assert explicit(name)["registers"] == explicit(call)["registers"]
    assert explicit(name)["stack"] <= explicit(call)["stack"] and not explicit(name)["serialised"]
    for shared, alone in zip(consumer_loops(name), consumer_loops(call), strict=True):
        polynomials = alone["exponentials"] * eighths // 8
        assert shared["exponentials"] == alone["exponentials"] - polynomials
        assert shared["maxima"] - alone["maxima"] == polynomials
        assert shared["moves"] == alone["moves"]
        assert shared["local_memory"] <= 8


@compiles
def test_at_head_dim_256_consumers_share_the_scores():
    """Each computes S and dP of half of the queries, and half of the dims of the other three."""
    for loop in explicit("full-256")["loops"]:
        assert loop["products"] == 2 * 256 // 16 + 2 * 64 // 16 + 2 * 64 // 16
        assert loop["exponentials"] == 64 * 32 // 128


@compiles
@pytest.mark.parametrize("name", of(*DIVIDED))
def test_two_panels_are_not_padded(name):
    """S and dP sum over 96 dims. A consumer has four other products, over 64 queries: two panels of
    dV and of dK. Its loop touches no spilled register.
    """
    (head_dim, head_dim_v, *_), switches = DIVIDED[name]
    kernel, config = explicit(name), BackwardConfig(**switches)
    assert not kernel["serialised"] and not kernel["unused_barriers"]
    assert config.fits(head_dim, head_dim_v) and kernel["shared"] <= SHARED_MEMORY
    assert 0 < kernel["shared"] - config.shared_bytes(head_dim, head_dim_v) <= OTHER_BYTES
    for loop in consumer_loops(name):
        assert loop["products"] == (head_dim + head_dim_v) // 16 + 4 * 64 // 16
        assert loop["local_memory"] == 0
    for loop in dq_loops(name):
        assert loop["products"] == 2 * 128 // 16 and loop["local_memory"] <= 2


@compiles
@pytest.mark.parametrize("name", of(*DIVISIONS, *IN_PARTS))
def test_other_divisions_of_the_work(name):
    """Halves: two consumers, and a warpgroup that loads and computes dQ, so three in all. Pair: two
    consumers alone, of which at 160 dims one has three parts of dQ and one two. No loop touches a
    spilled register, or in turns under a causal mask a few.
    """
    (head_dim, head_dim_v, *_), switches, products = (DIVISIONS | IN_PARTS)[name]
    kernel, config = explicit(name), BackwardConfig(**switches)
    assert not kernel["serialised"] and not kernel["unused_barriers"]
    assert kernel["warps"] == (8 if config.pair else 12)
    assert config.fits(head_dim, head_dim_v) and kernel["shared"] <= SHARED_MEMORY
    assert 0 < kernel["shared"] - config.shared_bytes(head_dim, head_dim_v) <= OTHER_BYTES
    found = sorted(x["products"] for x in kernel["loops"])
    more = 8 * (name == "160, pair")
    assert found == sorted([products[0] + more, *products])
    for loop in kernel["loops"]:
        assert loop["local_memory"] <= (4 if name.endswith("in turns") else 0)


# ---- on the device ----


def qkv(M, N, heads, D, kv_heads=None, batch=1, dtype=torch.bfloat16, D_v=None):
    q = torch.randn(batch, M, heads, D, device="cuda", dtype=dtype)
    k = torch.randn(batch, N, kv_heads or heads, D, device="cuda", dtype=dtype)
    v = torch.randn(batch, N, kv_heads or heads, D_v or D, device="cuda", dtype=dtype)
    return q, k, v


def prepared(q, k, v, config=None, dlse=False, eighths=0, **options):
    """(request, do, dlse, a backward to call)."""
    request = make_request(q, k, v, **options)
    o, lse, _ = forward(in_vectors(request))
    do = torch.randn_like(narrowed(o, v))
    dlse = torch.randn_like(lse) if dlse else None
    given = in_vectors(request), widened(o), lse, None, widened(do), dlse
    return request, do, dlse, partial(shared_out.backward, *given, config, eighths=eighths)


def check(q, k, v, config=None, dlse=False, eighths=0, **options):
    request, do, dlse, run = prepared(q, k, v, config, dlse, eighths, **options)
    found = {n: narrowed(x, like) for n, x, like in zip(("dq", "dk", "dv"), run(), (q, k, v))}
    assert_gradients_right(request, found, do, dlse)
    return found


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 96, 128, 160, 256])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_head_dims(self, D, dtype, causal):
        check(*qkv(700, 900, 12, D, kv_heads=4, batch=3, dtype=dtype), causal=causal)
        check(*qkv(300, 200, 2, D, dtype=dtype), causal=causal, dlse=True)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("eighths", [1, 2, 3, 8])
    def test_a_share_of_polynomials(self, eighths, D, dtype):
        inputs = qkv(700, 900, 6, D, kv_heads=2, batch=2, dtype=dtype)
        check(*inputs, eighths=eighths)
        check(*inputs, eighths=eighths, causal=True)

    @pytest.mark.parametrize("D, D_v", [(64, 128), (128, 64), (192, 128), (32, 96)])
    def test_values_of_another_head_dim(self, D, D_v):
        check(*qkv(500, 600, 4, D, kv_heads=2, D_v=D_v), causal=True)

    @pytest.mark.parametrize("options", [
        {"window": (200, None), "causal": True}, {"window": (64, 10)}, {"window": (None, 300)},
        {"window": (200, None)}, {"softcap": 5.0, "causal": True},
        {"softcap": 30.0, "window": (100, 50)},
    ], ids=str)  # fmt: skip
    @pytest.mark.parametrize("D", [32, 64, 128, 256])
    def test_windows_and_softcap(self, options, D):
        check(*qkv(900, 1100, 6, D, kv_heads=2, batch=2), **options)
        check(*qkv(1100, 900, 6, D, kv_heads=2, batch=2), **options)

    @pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 128, 129, 1000, 2047])
    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_lengths(self, length, D):
        check(*qkv(length, length, 4, D, batch=2), causal=True)
        check(*qkv(length, 300, 4, D, batch=2))

    @pytest.mark.parametrize("D", [64, 128])
    @pytest.mark.parametrize("changes", [
        {}, {"early": True}, {"stages": 3}, {"stages": 3, "early": True},
        {"block_q": 128}, {"block_q": 128, "early": True}, {"held": True},
        {"stages": 3, "early": True, "held": True},
    ], ids=str)  # fmt: skip
    def test_every_switch(self, changes, D):
        if D == 128 and changes.keys() & {"block_q", "stages", "held"}:
            pytest.skip("does not fit in shared memory or in registers")
        config = replace(BackwardConfig(), **changes)
        check(*qkv(700, 900, 12, D, kv_heads=4, batch=3), config, causal=True)

    @pytest.mark.parametrize("dims", [(72, 72), (80, 80), (96, 96), (96, 64)])
    @pytest.mark.parametrize("more", [False, True], ids=["as it is", "early, three slots"])
    @pytest.mark.parametrize("ordered", [False, True], ids=["any order", "in turns"])
    def test_two_panels(self, dims, more, ordered):
        """And padded, which has to stay right."""
        divided = BackwardConfig(panels=True, stages=3 if more else 2, early=more)
        for config in (divided, BackwardConfig()):
            inputs = qkv(700, 900, 12, dims[0], kv_heads=4, batch=3, D_v=dims[1])
            check(*inputs, config, causal=True, deterministic=ordered)
            check(*qkv(300, 200, 2, dims[0], D_v=dims[1]), config, deterministic=ordered)

    @pytest.mark.parametrize("dims", [(144, 144), (160, 160), (176, 176), (192, 192), (192, 128),
                                      (128, 192), (256, 128), (96, 256), (160, 256)])  # fmt: skip
    @pytest.mark.parametrize("ordered", [False, True], ids=["any order", "in turns"])
    def test_above_head_dim_128(self, dims, ordered):
        """By default, and padded."""
        for config in (None, BackwardConfig(block_kv=64)):
            inputs = qkv(700, 900, 12, dims[0], kv_heads=4, batch=3, D_v=dims[1])
            check(*inputs, config, causal=True, deterministic=ordered)
            check(*qkv(300, 200, 2, dims[0], D_v=dims[1]), config, deterministic=ordered)

    @pytest.mark.parametrize("name", DIVISIONS)
    @pytest.mark.parametrize("ordered", [False, True], ids=["any order", "in turns"])
    def test_other_divisions_of_the_work(self, name, ordered):
        (D, D_v, *_), switches, _ = DIVISIONS[name]
        config = BackwardConfig(**switches)
        inputs = qkv(700, 900, 12, D, kv_heads=4, batch=3, D_v=D_v)
        check(*inputs, config, causal=True, deterministic=ordered)
        check(*qkv(300, 200, 2, D, D_v=D_v), config, deterministic=ordered)

    @pytest.mark.parametrize("parts", [2, 3, 6])
    @pytest.mark.parametrize("D", [64, 96, 128, 160, 192, 256])
    @pytest.mark.parametrize("ordered", [False, True], ids=["any order", "in turns"])
    def test_groups_in_parts(self, ordered, D, parts):
        """All tiles divided or some; the same bits of dK and dV in every run."""
        for options in ({"causal": True}, {"window": (300, 100)}):
            inputs = qkv(700, 900, 12, D, kv_heads=2, batch=3)
            request, do, _, _ = prepared(*inputs, deterministic=ordered, **options)
            config = replace(default_config(request), parts=parts)
            check(*inputs, config, deterministic=ordered, **options)
            o, lse, _ = forward(request)
            runs = [shared_out.backward(request, o, lse, None, do, None, config) for _ in range(20)]
            for x, found in product(range(0 if ordered else 1, 3), runs):
                assert torch.equal(found[x], runs[0][x])

    def test_keys_past_the_end_add_nothing(self):
        q, k, v = qkv(100, 70, 1, 64)
        check(q.abs() + 3, -k.abs() - 3, v)

    @pytest.mark.parametrize("D", [64, 128, 256])
    def test_queries_without_keys_have_no_gradient(self, D):
        found = check(*qkv(700, 300, 4, D, batch=2), causal=True)
        assert not found["dq"][:, :400].any()

    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_ten_thousand_launches(self, D, causal):
        """dK and dV bit for bit; dQ as close to the first as additions in another order are."""
        _, _, _, run = prepared(*qkv(1500, 1500, 4, D, batch=4), causal=causal)
        dq, dk, dv, _ = run()
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        largest = torch.zeros((), dtype=torch.float32, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                again = run()
                different += (again[1] != dk).any() | (again[2] != dv).any()
                largest.copy_(torch.maximum(largest, (again[0] - dq).abs().max().float()))
        for _ in range(100):
            graph.replay()
        assert int(different) == 0
        assert float(largest) <= 2**-7 * float(dq.abs().max())  # an ulp of bf16

    def test_two_streams_at_once(self):
        runs = [prepared(*qkv(S, S, 4, 64), causal=True)[3] for S in (300, 1000)]
        expected = [run()[1:3] for run in runs]
        streams = [torch.cuda.Stream() for _ in runs]
        counts = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in runs]
        torch.cuda.synchronize()
        for _ in range(300):
            for stream, run, right, different in zip(streams, runs, expected, counts):
                with torch.cuda.stream(stream):
                    for x, y in zip(run()[1:3], right):
                        different += (x != y).any()
        torch.cuda.synchronize()
        assert [int(different) for different in counts] == [0, 0]

    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("options", [
        {}, {"causal": True}, {"window": (200, 50)}, {"window": (None, 300)},
        {"window": (200, None)}, {"softcap": 5.0, "causal": True},
    ], ids=str)  # fmt: skip
    def test_in_order(self, options, D):
        """Lengths that end within a tile, groups of heads, queries without keys."""
        for M, N in ((900, 1100), (1100, 900), (2500, 2500)):
            inputs = qkv(M, N, 6, D, kv_heads=2, batch=2)
            request, do, _, run = prepared(*inputs, deterministic=True, **options)
            found = run()
            named = {n: narrowed(x, y) for n, x, y in zip(("dq", "dk", "dv"), found, inputs)}
            assert_gradients_right(request, named, do, None)
            again = run()
            assert all(torch.equal(x, y) for x, y in zip(found[:3], again[:3]))

    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_packed_sequences_and_own_lengths_in_order(self, causal, D):
        options = {"causal": causal, "deterministic": True, "version": "fa3"}
        lengths = [1, 900, 0, 130, 2000, 64, 777]
        ragged = {"cu_seqlens_q": torch.tensor([0, *lengths], device="cuda").cumsum(0).int()}
        rows = {"kv_lengths": torch.tensor([700, 0, 3, 128], device="cuda")}
        for inputs, about in (
            ([x[0] for x in qkv(sum(lengths), sum(lengths), 8, D, kv_heads=2)], ragged),
            (qkv(500, 900, 8, D, kv_heads=2, batch=4), rows),
        ):
            leaves = [x.requires_grad_() for x in inputs]
            o = attention(*leaves, **options, **about)
            do = torch.randn_like(o)
            found = torch.autograd.grad(o, leaves, do, retain_graph=True)
            request = make_request(*(x.detach() for x in leaves), causal=causal, **about)
            named = {n: x.view_as(y) for n, x, y in zip(("dq", "dk", "dv"), found, request[:3])}
            assert_gradients_right(request, named, do.view_as(request.q), None)
            for _ in range(10):
                again = torch.autograd.grad(o, leaves, do, retain_graph=True)
                assert all(torch.equal(x, y) for x, y in zip(found, again))

    @pytest.mark.parametrize("D", [64, 128, 256])
    @pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
    def test_the_same_bits_beside_other_work(self, D, causal):
        """A hundred launches in a graph while another stream multiplies matrices: programs begin
        when an SM has room for them.
        """
        run = prepared(*qkv(2000, 2000, 8, D, kv_heads=2, batch=2), causal=causal,
                       deterministic=True)[3]  # fmt: skip
        expected = run()
        different = torch.zeros((), dtype=torch.int64, device="cuda")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(100):
                for x, y in zip(run()[:3], expected):
                    different += (x != y).any()
        other = torch.cuda.Stream()
        a = torch.randn(1024, 1024, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(2000):
                a @ a
        graph.replay()
        torch.cuda.synchronize()
        assert int(different) == 0

    def test_several_streams_in_order(self):
        """Launches that wait for turns share the SMs, and all of them end."""
        shapes = [(300, 64, False), (3000, 64, False), (3000, 128, True), (3000, 256, False)]
        runs = [
            prepared(*qkv(S, S, 4, D), causal=causal, deterministic=True)[3]
            for S, D, causal in shapes
        ]
        expected = [run() for run in runs]
        streams = [torch.cuda.Stream() for _ in runs]
        different = [torch.zeros((), dtype=torch.int64, device="cuda") for _ in runs]
        torch.cuda.synchronize()
        for _ in range(100):
            for stream, run, right, count in zip(streams, runs, expected, different):
                with torch.cuda.stream(stream):
                    for x, y in zip(run()[:3], right):
                        count += (x != y).any()
        torch.cuda.synchronize()
        assert [int(count) for count in different] == [0] * len(runs)

    def test_attention_uses_it_in_order_or_not(self, monkeypatch):
        seen = []
        launch = Launcher.launch
        monkeypatch.setattr(
            Launcher, "launch", lambda *given: (seen.append(given[:2]), launch(*given))
        )
        leaves = [x.requires_grad_() for x in qkv(500, 500, 16, 128, kv_heads=4, batch=4)]
        for ordered in (False, True):
            attention(*leaves, causal=True, version="fa3", deterministic=ordered).sum().backward()
        plans = [plan for launcher, plan in seen if launcher is backward_hopper.launch_backward]
        assert [plan.constants["ORDERED"] for plan in plans] == [False, True]


def main() -> None:
    calls = CALLS | {name: (*CALLS[call], eighths) for name, (call, eighths) in SHARES.items()}
    divided = DIVIDED | DIVISIONS | IN_PARTS
    calls |= {name: (*call, 0, switches) for name, (call, switches, *_) in divided.items()}
    wide = sys.argv[1:] == ["wide"]
    calls = {name: call for name, call in calls.items() if (name in WIDE) == wide}
    rows = {name: {x.kernel: row(x) for x in compile_backward(*c)} for name, c in calls.items()}
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
