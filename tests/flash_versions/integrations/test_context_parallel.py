"""Attention over a split sequence, on processes that talk through gloo, against one device."""

import re
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing

from flash_versions import attention_reference, context_parallel_attention
from flash_versions.dispatch.request import make_request
from flash_versions.integrations.distributed.context_parallel import (
    LAYOUTS,
    METHODS,
    shard,
    unshard,
)
from flash_versions.versions.oracle.budget import assess_request

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
    Case("ring", True, dtype=F32, version="fa1", heads=1, kv_heads=1, batch=1),
    Case("all_to_all", True, dtype=F32, version="auto", heads=2, kv_heads=1, batch=1),
]
CASES = EXACT + ROUNDED
# Of two groups within four ranks.
IN_GROUPS = KERNELS + [Case(method, True) for method in METHODS]


def computed(case, group=None):
    """o, lse, dq, dk, dv of the whole sequence; only the call itself knows that it was split."""
    mine = partial(shard, group=group, layout=case.layout)
    whole = partial(unshard, group=group, layout=case.layout)
    *inputs, _, _ = case.inputs()
    leaves = [mine(x).requires_grad_() for x in inputs]
    o, lse = context_parallel_attention(
        *leaves, causal=case.causal, method=case.method, layout=case.layout, version=case.version,
        group=group, return_lse=True, **case.options,
    )  # fmt: skip
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


def work(rank, folder):
    """One process of four: all cases, then bad input."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)  # and memory that nobody wrote holds NaN
    dist.init_process_group("gloo", f"file://{folder}/meet", TIMEOUT, 4, rank)
    group, _ = dist.new_subgroups(2)
    found = [computed(case) for case in CASES]
    found += [computed(case, group) for case in IN_GROUPS]
    torch.save((found, refusals(rank, 4)), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Of each rank what it found, and what it refused."""
    # The processes are forked from one that has imported what takes long.
    multiprocessing.set_forkserver_preload(["flash_versions", "pytest"])
    folder = str(tmp_path_factory.mktemp("world"))
    with pytest.MonkeyPatch.context() as patch:  # kernels are simulated on any machine
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        multiprocessing.start_processes(work, (folder,), 4, start_method="forkserver")
    return [torch.load(f"{folder}/{rank}.pt") for rank in range(4)]


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


@pytest.mark.parametrize("place", range(len(CASES + IN_GROUPS)))
def test_the_results_are_those_of_one_device(results, place):
    """In fp64 nothing hides behind rounding; other types have the error budget of one device."""
    case = (CASES + IN_GROUPS)[place]
    if case.dtype == F64:
        right = expected(case)
        for found, _ in results:
            for what, x in found[place].items():
                torch.testing.assert_close(x, right[what], rtol=1e-12, atol=1e-12, msg=what)
        return
    q, k, v, do, dlse = case.inputs()
    request = make_request(q, k, v, causal=case.causal, **case.options)
    found = results[0][0][place]
    assert {x.dtype for key, x in found.items() if key != "lse"} == {case.dtype}
    for what, accuracy in assess_request(found, request, do, dlse).items():
        assert accuracy.ok, f"{what}: {accuracy}"


SENTENCES = {
    "odd": r"q has 7 rows on this rank; .* a multiple of 8\.",
    "heads": "q has 3 heads; .* 4 ranks",
    "shard": "length 12; layout='zigzag' on 4 ranks needs a multiple of 8",
    "shard contiguous": "length 3; layout='contiguous' on 4 ranks needs a multiple of 4",
    "unshard": "x requires grad",
    "outsider": "this process is not in the group",
    "lengths differ": r"q is torch.float32 of shape \(1, 8, 4, 16\) on rank 0 and .*12.* on rank 1",
    "masks differ": "window_right is None on rank 0 and 0 on rank 1",
    "gradients differ": "needs_grad is False on rank 0 and True on rank 1",
    "one is wrong": "rank 1: q has 7 rows",
    "nothing is wrong": "None",
}


def test_refusals_before_anything_is_sent(results):
    assert SENTENCES.keys() == results[0][1].keys() | results[1][1].keys()
    for _, refused_here in results:
        for name, sentence in refused_here.items():
            assert re.search(SENTENCES[name], str(sentence)), (name, sentence)


@pytest.mark.parametrize("method", METHODS)
def test_one_process_just_runs(method):
    q, k, v, _, _ = Case(method, True, queries=7, keys=7).inputs()
    options = {"method": method, "causal": True, "version": "reference"}
    o, lse = context_parallel_attention(*map(shard, (q, k, v)), return_lse=True, **options)
    right = attention_reference(q, k, v, causal=True)
    assert torch.equal(unshard(o), right[0]) and torch.equal(lse, right[1])
    assert torch.equal(context_parallel_attention(q, k, v, **options), o)


good = torch.zeros(1, 8, 2, 16)
BAD = {
    "method": ({"method": "tree"}, "method='tree' is unknown; there are ring, all_to_all"),
    "layout": ({"layout": "striped"}, "layout='striped' is unknown; there are zigzag, contiguous"),
    "window": ({"window": (4, 0)}, "window is not possible with method='ring'; use"),
    "lengths": ({"kv_lengths": torch.tensor([3])}, "kv_lengths is not possible over several ranks"),
    "version": ({"version": "fa9"}, "version='fa9' is unknown"),
    "cross": ({"k": good[:, :4], "v": good[:, :4], "causal": True}, "q has 8 rows and k 4; causal"),
    "dtype": (dict.fromkeys("qkv", good.to(torch.float8_e4m3fn)), "float8_e4m3fn; over several"),
    "group": ({"group": 3}, "group is a int; it must be a torch.distributed.ProcessGroup"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_gets_a_sentence(name):
    changed, sentence = BAD[name]
    arguments = {"q": good, "k": good, "v": good, "version": "reference"} | changed
    with pytest.raises(ValueError, match=sentence):
        context_parallel_attention(**arguments)
