"""The other implementations: plain PyTorch is right, the libraries are called as they ask to be.

cuDNN's front end is faked: what is held here is the graph that is built and what it is given.
"""

import sys
import types
from functools import partial

import pytest
import torch

from flash_versions.bench import peers
from flash_versions.versions.oracle.budget import assess
from flash_versions.versions.oracle.checks import check_fp8

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("m, n, heads, dim", [(7, 7, 2, 16), (3, 9, 4, 16), (64, 2048, 2, 128)])
def test_plain_attention_is_right(causal, m, n, heads, dim, monkeypatch):
    monkeypatch.setattr(peers, "free_memory", lambda device: 2**30)
    make = partial(torch.randn, dtype=torch.bfloat16)
    q, k, v = (make(2, x, h, dim) for x, h in ((m, heads), (n, 2), (n, 2)))
    o = peers.plain(q, k, v, causal)
    for accuracy in assess(o, None, q, k, v, causal=causal).values():
        assert accuracy.ok


def test_plain_attention_refuses_what_does_not_fit(monkeypatch):
    monkeypatch.setattr(peers, "free_memory", lambda device: 3 * 2 * 8 * 8 * 4 - 1)
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(MemoryError, match=r"3 score matrices take .* GiB are free"):
        peers.plain(q, q, q, False)
    monkeypatch.setattr(peers, "free_memory", lambda device: 3 * 2 * 8 * 8 * 4)
    assert peers.plain(q, q, q, False).shape == q.shape
    with pytest.raises(MemoryError, match="5 score matrices"):
        peers.plain(q.requires_grad_(), q, q, False)


@pytest.mark.parametrize("returned", ["o", "o and lse"])
def test_flash_attn_4_returns_o(returned, monkeypatch):
    def function(q, k, v, causal):
        assert causal
        return q + 1 if returned == "o" else (q + 1, None)

    cute = types.ModuleType("flash_attn.cute")
    cute.flash_attn_func = function
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", cute)
    q = torch.zeros(1, 2, 1, 16)
    assert torch.equal(peers.flash_attn_4(q, q, q, True), q + 1)


# cuDNN's FP8 forward.


class FakeTensor:
    """A tensor of a graph; its setters return it, as the front end's do."""

    def __init__(self, name, **attributes):
        self.name, self.attributes = name, attributes

    def set_output(self, value):
        self.attributes["output"] = value
        return self

    def set_dim(self, dim):
        self.attributes["dim"] = dim
        return self

    def set_stride(self, stride):
        self.attributes["stride"] = stride
        return self

    def set_data_type(self, kind):
        self.attributes["data_type"] = kind
        return self


class FakeGraph:
    """The front end's graph. One that writes what is in `refused` has no plan."""

    refused: tuple[str, ...] = ()
    made: list["FakeGraph"] = []  # noqa: RUF012  (reset by the fixture)

    def __init__(self, **options):
        self.options, self.steps, self.packs = options, [], []
        FakeGraph.made.append(self)

    def tensor(self, name, dim, stride, data_type):
        return FakeTensor(name, dim=dim, stride=stride, data_type=data_type)

    def sdpa_fp8(self, **arguments):
        self.arguments = arguments
        self.outputs = {name: FakeTensor(name) for name in ("o", "stats", "amax_s", "amax_o")}
        return list(self.outputs.values())

    def check_support(self):
        for name in FakeGraph.refused:
            if self.outputs[name].attributes["output"]:
                raise RuntimeError(f"no engine writes {name}")
        self.steps.append("check_support")

    def get_workspace_size(self):
        return 64

    def execute(self, pack, workspace, handle):
        assert workspace.nbytes == 64 and handle == "handle"
        self.packs.append({tensor.name: x for tensor, x in pack.items()})
        pack[self.outputs["o"]].copy_(torch.full((), 2.0))


for step in ("validate", "build_operation_graph", "create_execution_plans", "build_plans"):
    setattr(FakeGraph, step, lambda self, *of, step=step: self.steps.append(step))


@pytest.fixture
def cudnn(monkeypatch):
    """A `cudnn` module that remembers its graphs."""
    fake = types.ModuleType("cudnn")
    fake.data_type = types.SimpleNamespace(FP8_E4M3="e4m3", FLOAT="fp32")
    fake.heur_mode = types.SimpleNamespace(A="A", FALLBACK="FALLBACK")
    fake.pygraph, fake.streams = FakeGraph, []
    fake.create_handle = lambda: "handle"
    fake.set_stream = lambda handle, stream: fake.streams.append(stream)
    monkeypatch.setitem(sys.modules, "cudnn", fake)
    monkeypatch.setattr(FakeGraph, "made", [])
    stream = types.SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(peers, "cudnn_handle", lambda device: "handle")
    peers.cudnn_fp8_plan.cache_clear()
    yield fake
    peers.cudnn_fp8_plan.cache_clear()


def fp8_inputs(batch=2, m=32, n=48, heads=4, kv_heads=2, dim=64):
    q = torch.randn(batch, m, heads, dim).to(E4M3)
    k, v = (torch.randn(batch, n, kv_heads, dim).to(E4M3) for _ in range(2))
    return q, k, v


def test_cudnn_fp8_is_given_the_tensors_and_its_factors(cudnn):
    q, k, v = fp8_inputs()
    o = peers.cudnn_fp8(q, k, v, True)
    assert o.shape == q.shape and o.dtype == E4M3 and o.is_contiguous()
    assert (o.float() == 2).all()
    [graph] = FakeGraph.made
    assert graph.options["handle"] == "handle" and graph.options["io_data_type"] == "e4m3"
    assert graph.steps[-1] == "build_plans" and cudnn.streams[-1] == 7
    asked = graph.arguments
    assert asked["attn_scale"] == 0.125 and asked["use_causal_mask"] and asked["is_inference"]
    assert asked["q"].attributes["dim"] == [2, 4, 32, 64]
    assert asked["q"].attributes["stride"] == [32 * 4 * 64, 64, 4 * 64, 1]
    assert asked["k"].attributes["dim"] == [2, 2, 48, 64]
    assert graph.outputs["o"].attributes == {
        "output": True,
        "dim": [2, 4, 32, 64],
        "stride": [32 * 4 * 64, 64, 4 * 64, 1],
        "data_type": "e4m3",
    }
    [pack] = graph.packs
    assert pack["q"] is q and pack["k"] is k and pack["v"] is v
    assert pack["descale_s"].item() * pack["scale_s"].item() == 1
    assert {pack[f"descale_{x}"].item() for x in "qkv"} == {1.0} == {pack["scale_o"].item()}
    written = {name for name, x in graph.outputs.items() if x.attributes.get("output")}
    assert written == set(pack) - {*peers.FP8_FACTORS, *"qkv"}


def test_cudnn_fp8_plans_are_made_once_for_a_shape(cudnn):
    q, k, v = fp8_inputs()
    for _ in range(3):
        peers.cudnn_fp8(q, k, v, False)
    assert len(FakeGraph.made) == 1 and len(FakeGraph.made[0].packs) == 3
    assert not FakeGraph.made[0].arguments["use_causal_mask"]
    peers.cudnn_fp8(q, k, v, True)
    peers.cudnn_fp8(*fp8_inputs(m=64), True)
    assert len(FakeGraph.made) == 3


def test_cudnn_fp8_asks_for_other_outputs_before_it_gives_up(cudnn, monkeypatch):
    monkeypatch.setattr(peers, "FP8_OUTPUTS", (("amax_s", "amax_o"), ("amax_o",)))
    monkeypatch.setattr(FakeGraph, "refused", ("amax_s",))
    assert peers.cudnn_fp8(*fp8_inputs(), False).dtype == E4M3
    assert "amax_s" not in FakeGraph.made[-1].packs[0]
    peers.cudnn_fp8_plan.cache_clear()
    monkeypatch.setattr(FakeGraph, "refused", ("amax_s", "amax_o"))
    with pytest.raises(RuntimeError, match="cuDNN's FP8 kernel: no engine writes amax_s"):
        peers.cudnn_fp8(*fp8_inputs(), False)


def test_versions_of_libraries_that_are_not_there(monkeypatch):
    assert peers.installed("torch") and peers.installed_version("torch", "torch") != "unknown"
    assert not peers.installed("no_such_module")
    assert peers.installed_version("no_such_module", "none") == "not installed"
    assert not peers.installed("no_such_package.module")
    assert peers.installed_version("json", "no-such-distribution") == "unknown"


@pytest.mark.gpu
@pytest.mark.skipif(not peers.installed("cudnn"), reason="cuDNN's front end is not installed")
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_cudnn_fp8_on_a_gpu(dim, causal):
    shape = (2, 512, 4, dim)
    q, k, v = (torch.randn(shape, device="cuda").to(E4M3) for _ in range(3))
    check_fp8(peers.cudnn_fp8(q, k, v, causal), causal, dim**-0.5, (q, k, v))
