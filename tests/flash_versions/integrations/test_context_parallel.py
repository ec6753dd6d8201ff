"""Attention over a split sequence, on processes that talk through gloo, against one device."""

import json
import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from flash_versions import attention_reference, context_parallel_attention
from flash_versions.dispatch.request import make_request
from flash_versions.integrations.distributed import ring
from flash_versions.integrations.distributed.context_parallel import (
    LAYOUTS,
    METHODS,
    pieces,
    shard,
    unshard,
)
from flash_versions.integrations.distributed.merge import merge_attention_states
from flash_versions.versions.oracle.budget import assess_request
from flash_versions.versions.oracle.reference import REFERENCE
from tests.helpers import ROOT

pytestmark = pytest.mark.xdist_group("context_parallel")  # the processes start once
TIMEOUT = timedelta(seconds=120)
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Case(NamedTuple):
    """A sequence, and how it is computed."""

    method: str
    causal: bool
    layout: str = "zigzag"
    dtype: torch.dtype = F64
    version: str = "reference"
    heads: int = 4
    kv_heads: int = 2
    queries: int = 32
    keys: int = 32
    head_dim_v: int = 16
    batch: int = 2
    options: dict = {}  # noqa: RUF012
    of_lse: bool = True  # whether the gradient comes through the LSE, too
    of_o: bool = True

    @property
    def name(self):
        """For the report of the tests."""
        mask = "causal" if self.causal else "full"
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}-{self.kv_heads}"
        extra = (f"{self.queries}x{self.keys}", *self.options)
        return " ".join((self.method, mask, self.layout, self.version, dtype, heads, *extra))

    def inputs(self):
        """q, k, v, do and the gradient of the LSE, of the whole sequence."""
        make = partial(torch.randn, generator=torch.Generator().manual_seed(1), dtype=F64)
        q = make(self.batch, self.queries, self.heads, 16)
        k = make(self.batch, self.keys, self.kv_heads, 16)
        v = make(self.batch, self.keys, self.kv_heads, self.head_dim_v)
        do = make(self.batch, self.queries, self.heads, self.head_dim_v)
        dlse = make(self.batch, self.heads, self.queries)
        wide = torch.promote_types(self.dtype, F32)
        return *(x.to(self.dtype) for x in (q, k, v, do)), dlse.to(wide)

    def gradients(self):
        """Of o and of the LSE; None where nothing depends on it."""
        _, _, _, do, dlse = self.inputs()
        return do if self.of_o else None, dlse if self.of_lse else None


EXACT = [
    Case(method, causal, layout)
    for method in METHODS
    for causal in (True, False)
    for layout in LAYOUTS
]
EXACT += [
    Case("ring", True, heads=3, kv_heads=1, head_dim_v=8, options={"scale": 0.5, "softcap": 3.0}),
    Case("ring", False, queries=16, keys=48),
    Case("ring", True, of_lse=False),
    Case("ring", True, of_o=False),
    Case("all_to_all", False, heads=12, kv_heads=6, head_dim_v=8),
    Case("all_to_all", True, heads=12, kv_heads=3),
    Case("all_to_all", True, queries=16, keys=48, options={"window": (9, 0), "softcap": 3.0}),
]
ROUNDED = [Case(method, True, dtype=BF16) for method in METHODS]
ROUNDED.append(Case("ring", False, "contiguous", dtype=BF16))
KERNELS = [
    Case("ring", True, dtype=BF16, version="fa2", heads=2, kv_heads=1, batch=1),
    Case("ring", False, dtype=F32, version="fa2", heads=2, kv_heads=1, batch=1),
    Case("ring", True, dtype=F32, version="fa1", heads=1, kv_heads=1, batch=1),
    Case("all_to_all", True, dtype=F32, version="auto", heads=2, kv_heads=1, batch=1),
]
CASES = {2: EXACT + ROUNDED + KERNELS, 4: EXACT + ROUNDED}
# Of two groups within four ranks.
IN_GROUPS = [Case(method, True) for method in METHODS]


def computed(case, group=None):
    """o, lse, dq, dk, dv of the whole sequence; only the call itself knows that it was split."""
    mine = partial(shard, group=group, layout=case.layout)
    whole = partial(unshard, group=group, layout=case.layout)
    *inputs, _, _ = case.inputs()
    leaves = [mine(x).requires_grad_() for x in inputs]
    o, lse = context_parallel_attention(
        *leaves,
        causal=case.causal,
        method=case.method,
        layout=case.layout,
        version=case.version,
        group=group,
        return_lse=True,
        **case.options,
    )
    do, dlse = case.gradients()
    outputs, gradients = [], []
    for result, gradient, dim in ((o, do, 1), (lse, dlse, 2)):
        if gradient is not None:
            outputs.append(result)
            gradients.append(mine(gradient, dim=dim))
    found = torch.autograd.grad(outputs, leaves, gradients)
    results = {"o": whole(o.detach()), "lse": whole(lse.detach(), dim=2)}
    return results | {f"d{name}": whole(x) for name, x in zip("qkv", found)}


def refused(call, *args, **kwargs):
    """The sentence that a call raises."""
    try:
        call(*args, **kwargs)
    except ValueError as error:
        return str(error)
    return None


def refusals(rank, size):
    """What a rank says to bad input. Rank 0 calls alone: had it sent anything, it would wait."""
    call = context_parallel_attention
    x = torch.zeros(1, 8, 4, 16)
    found = {}
    if rank == 0:
        odd, three = x[:, :7], x[:, :, :3]
        found["odd"] = refused(call, odd, odd, odd)
        found["heads"] = refused(call, three, three, three, method="all_to_all")
        found["shard"] = refused(shard, torch.zeros(1, 3 * size))
        found["shard contiguous"] = refused(shard, torch.zeros(1, 3), layout="contiguous")
        found["unshard"] = refused(unshard, x.clone().requires_grad_())
    outsider = dist.new_group([0])
    if rank > 0:
        found["outsider"] = refused(call, x, x, x, group=outsider)
    longer = torch.zeros(1, 8 + 4 * (rank == 1), 4, 16)
    found["lengths differ"] = refused(call, longer, longer, longer, check=True)
    found["masks differ"] = refused(call, x, x, x, causal=rank == 1, check=True)
    leaf = x.clone().requires_grad_(rank == 1)
    found["gradients differ"] = refused(call, leaf, x, x, check=True)
    bad = x[:, :7] if rank == 1 else x
    found["one is wrong"] = refused(call, bad, bad, bad, check=True)
    found["nothing is wrong"] = refused(call, x, x, x, version="reference", check=True)
    return found


def events(case):
    """In which order a rank sends, computes and waits in a forward and its backward."""
    log = []

    def logged(what, call):
        def run(*args):
            log.append(f"{what} {args[2]}" if what == "send" else what)
            return call(*args)

        return run

    places = (
        (ring.Ring, "pass_on", "send"),
        (ring.Transfer, "wait", "wait"),
        (ring.compute, "run_forward", "forward"),
        (ring, "part_backward", "backward"),
    )
    for owner, name, what in places:
        setattr(owner, name, logged(what, getattr(owner, name)))
    computed(case)
    return log


def work(rank, size, folder):
    """One process: all cases, then bad input."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # and memory that nobody wrote holds NaN
    dist.init_process_group("gloo", f"file://{folder}/meet", TIMEOUT, size, rank)
    found = {case.name + str(i): computed(case) for i, case in enumerate(CASES[size])}
    if size == 2:
        again = {f"{case.name} again": computed(case) for case in KERNELS[:1]}
        found |= again
    else:
        group, _ = dist.new_subgroups(2)
        found |= {f"{case.name} in groups": computed(case, group) for case in IN_GROUPS}
    found["refusals"] = refusals(rank, size)
    found["events"] = events(EXACT[0])
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """results(size)[rank]: what the processes of a world found; each world starts once."""
    worlds = {}
    # The processes are forked from one that has imported what takes long.
    multiprocessing.set_forkserver_preload(["flash_versions", "pytest"])

    def run(size):
        if size not in worlds:
            folder = str(tmp_path_factory.mktemp(f"world{size}"))
            start = multiprocessing.start_processes
            with pytest.MonkeyPatch.context() as patch:  # kernels are interpreted on any machine
                patch.setenv("CUDA_VISIBLE_DEVICES", "")
                patch.setenv("TRITON_INTERPRET", "1")
                start(work, (size, folder), size, start_method="forkserver")
            worlds[size] = [torch.load(f"{folder}/{rank}.pt") for rank in range(size)]
        return worlds[size]

    return run


def expected(case):
    """o, lse, dq, dk, dv on one device in fp64."""
    q, k, v, _, _ = case.inputs()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    results = attention_reference(*leaves, causal=case.causal, **case.options)
    wanted = [(x, g) for x, g in zip(results, case.gradients()) if g is not None]
    outputs, gradients = [x for x, _ in wanted], [g.to(x.dtype) for x, g in wanted]
    found = torch.autograd.grad(outputs, leaves, gradients, materialize_grads=True)
    names = ("o", "lse", "dq", "dk", "dv")
    return dict(zip(names, (*(x.detach() for x in results), *found)))


def named(size, cases):
    """(size, name in the results, case), with a readable id."""
    return [
        pytest.param(size, case.name + str(i), case, id=f"{size} ranks {case.name} {i}")
        for i, case in enumerate(CASES[size])
        if case in cases
    ]


@pytest.mark.parametrize(("size", "name", "case"), named(2, EXACT) + named(4, EXACT))
def test_algebra_is_exact(results, size, name, case):
    """In fp64 nothing hides behind rounding."""
    right = expected(case)
    for rank in range(size):
        found = results(size)[rank][name]
        for what, x in found.items():
            torch.testing.assert_close(x, right[what], rtol=1e-12, atol=1e-12, msg=what)


ROUNDING = named(2, ROUNDED + KERNELS) + named(4, ROUNDED)


@pytest.mark.parametrize(("size", "name", "case"), ROUNDING)
def test_within_the_error_budget_of_one_device(results, size, name, case):
    q, k, v, do, dlse = case.inputs()
    request = make_request(q, k, v, causal=case.causal, **case.options)
    found = results(size)[0][name]
    assert {x.dtype for key, x in found.items() if key != "lse"} == {case.dtype}
    for what, accuracy in assess_request(found, request, do, dlse).items():
        assert accuracy.ok, f"{what}: {accuracy}"


def test_sums_are_in_fp32(results):
    """Rounded once: but for ties, what sums of the same parts in fp64 give."""
    size, case = 4, ROUNDED[-1]
    found = results(size)[0][case.name + str(CASES[size].index(case))]
    q, k, v, do, dlse = (x.chunk(size, 1) for x in (*case.inputs()[:4], case.inputs()[4].mT))
    o, lse = found["o"].chunk(size, 1), found["lse"].chunk(size, 2)
    exact = {name: [0.0] * size for name in ("dq", "dk", "dv")}
    for rank in range(size):
        merged = None
        for source in ((rank - step) % size for step in range(size)):
            request = make_request(q[rank], k[source], v[source])
            o_part, lse_part, _ = REFERENCE.forward(request)
            part = o_part.double(), lse_part.double()
            merged = part if merged is None else merge_attention_states(*merged, *part)
            gradients = ring.part_backward(
                REFERENCE, request, o[rank], lse[rank], do[rank], dlse[rank].mT
            )
            for (name, sums), x in zip(exact.items(), gradients):
                sums[rank if name == "dq" else source] += x.double()
        assert (merged[0].to(BF16) == o[rank]).float().mean() > 0.99
    for name, sums in exact.items():
        assert (torch.cat(sums, 1).to(BF16) == found[name]).float().mean() > 0.99, name


def test_every_run_has_the_same_bits(results):
    case = KERNELS[0]
    for rank in range(2):
        found = results(2)[rank]
        first = found[case.name + str(CASES[2].index(case))]
        again = found[f"{case.name} again"]
        assert all(torch.equal(x, again[what]) for what, x in first.items())


@pytest.mark.parametrize("case", IN_GROUPS, ids=lambda case: case.name)
def test_groups_within_the_world(results, case):
    right = expected(case)
    for rank in range(4):
        for what, x in results(4)[rank][f"{case.name} in groups"].items():
            torch.testing.assert_close(x, right[what], rtol=1e-12, atol=1e-12, msg=what)


def test_a_block_travels_while_another_is_computed(results):
    """Sending begins before what it overlaps with, and is waited for after it."""
    forward = ["send 0", "forward", "wait", "forward"]
    # The gradients of a block, tag 1, leave while the next one is computed.
    backward = ["send 0", "backward", "send 1", "wait", "backward", "wait", "send 1", "wait"]
    for rank in range(2):
        assert results(2)[rank]["events"] == forward + backward


SENTENCES = {
    "odd": "q has 7 rows on this rank; .* a multiple of {twice}.",
    "heads": "q has 3 heads; .* {size} ranks",
    "shard": "length {three}; layout='zigzag' on {size} ranks needs a multiple of {twice}",
    "shard contiguous": "length 3; layout='contiguous' on {size} ranks needs a multiple of {size}",
    "unshard": "x requires grad",
    "outsider": "this process is not in the group",
    "lengths differ": r"q is torch.float32 of shape \(1, 8, 4, 16\) on rank 0 and .*12.* on rank 1",
    "masks differ": "window_right is None on rank 0 and 0 on rank 1",
    "gradients differ": "needs_grad is False on rank 0 and True on rank 1",
    "one is wrong": "rank 1: q has 7 rows",
}


@pytest.mark.parametrize("size", [2, 4])
def test_refusals_before_anything_is_sent(results, size):
    words = {"size": size, "twice": 2 * size, "three": 3 * size}
    for rank in range(size):
        found = results(size)[rank]["refusals"]
        alone = {"outsider"} if rank == 0 else {n for n in SENTENCES if "differ" not in n}
        alone -= {"one is wrong"} | ({"outsider"} if rank else set())
        assert found.pop("nothing is wrong", None) is None
        assert found.keys() == SENTENCES.keys() - alone
        for name, sentence in found.items():
            assert sentence is not None, name
            pytest.raises(ValueError, raising, sentence).match(SENTENCES[name].format(**words))


def raising(sentence):
    raise ValueError(sentence)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("return_lse", [False, True])
def test_one_process_just_runs(method, return_lse):
    q, k, v, _, _ = Case(method, True, queries=7, keys=7).inputs()
    options = {"causal": True, "return_lse": return_lse, "version": "reference"}
    found = context_parallel_attention(*map(shard, (q, k, v)), method=method, **options)
    right = attention_reference(q, k, v, causal=True)
    if return_lse:
        assert torch.equal(found[1], right[1])
        found = found[0]
    assert torch.equal(unshard(found), right[0])


good = torch.zeros(1, 8, 2, 16)
BAD = {
    "method": ({"method": "tree"}, "method='tree' is unknown; there are ring, all_to_all"),
    "layout": ({"layout": "striped"}, "layout='striped' is unknown; there are zigzag, contiguous"),
    "window": ({"window": (4, 0)}, "window is not possible with method='ring'; use"),
    "lengths": ({"kv_lengths": torch.tensor([3])}, "kv_lengths is not possible over several ranks"),
    "sink": ({"sink": torch.zeros(2), "method": "all_to_all"}, "sink is not possible"),
    "no LSE": ({"version": "sdpa"}, "version 'sdpa': it does not return the LSE"),
    "version": ({"version": "fa9"}, "version='fa9' is unknown"),
    "cross": ({"k": good[:, :4], "v": good[:, :4], "causal": True}, "q has 8 rows and k 4; causal"),
    "dtype": (dict.fromkeys("qkv", good.to(torch.float8_e4m3fn)), "float8_e4m3fn; over several"),
    "rank": ({"q": good[0]}, r"q has shape \(8, 2, 16\); it must be \(batch, length, heads"),
    "group": ({"group": 3}, "group is a int; it must be a torch.distributed.ProcessGroup"),
    "flag": ({"return_lse": 1}, "return_lse=1 must be True or False"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_sentence(name):
    changed, sentence = BAD[name]
    arguments = {"q": good, "k": good, "v": good, "version": "reference"} | changed
    with pytest.raises(ValueError, match=sentence):
        context_parallel_attention(**arguments)


def pairs(rank, size, length, causal, layout):
    """(queries, keys) positions that a rank computes, step by step."""
    held = pieces(torch.arange(size * length), size, layout, 0)
    for step in range(size):
        source = (rank - step) % size
        seen = torch.zeros(size * length, size * length, dtype=torch.int)
        if (here := ring.part(rank, source, length, causal, layout)) is not None:
            rows, columns = held[rank][here.queries], held[source][here.keys]
            block = torch.ones(len(rows), len(columns), dtype=torch.int)
            block = block.tril(len(columns) - len(rows)) if here.causal else block
            seen[rows[:, None], columns] = block
        yield seen


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_the_ranks_compute_every_visible_pair_once(size, layout, causal):
    length = 4
    total = sum(x for rank in range(size) for x in pairs(rank, size, length, causal, layout))
    everything = torch.ones(size * length, size * length, dtype=torch.int)
    assert torch.equal(total, everything.tril() if causal else everything)


@pytest.mark.parametrize("size", [2, 3, 4, 8])
def test_zigzag_balances_the_work(size):
    """All ranks have as much to do, in every step; cut into W parts, the last one has most."""
    length = 8

    def steps(layout):
        each = [pairs(rank, size, length, True, layout) for rank in range(size)]
        return torch.tensor([[int(x.sum()) for x in rank] for rank in each])

    work = steps("zigzag")
    assert (work == work[0]).all()
    assert (work[:, 1:] == length * length // 2).all()
    totals = steps("contiguous").sum(1)
    assert totals[-1] - totals[0] == (size - 1) * length * length


def test_the_command_for_gpus_on_the_cpu(tmp_path):
    out = tmp_path / "results.json"
    launch = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    options = ("--device=cpu", "--length=256", "--version=reference", f"--out={out}")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "GIT_COMMIT": "abc1234",
        "OMP_NUM_THREADS": "1",
    }
    command = (*launch, "-m", "tests.benchmarks.attention.context_parallel", *options)
    subprocess.run(command, env=environment, check=True, timeout=300)
    document = json.loads(out.read_text())
    assert document["commit"] == "abc1234" and document["gpus"] == 2
    rows = document["rows"]
    assert len(rows) == 2 * 2 * 2 * 3  # masks, heads, passes, contestants
    for row in rows:
        assert "reason" not in row and row["ms_p50"] > 0 and row["N"] == 256
        assert row["version"] == "1 GPU" or row["ratio"] > 0
