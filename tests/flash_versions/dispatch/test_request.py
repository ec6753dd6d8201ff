"""What a call may not ask for, and what it is told: the tensor, what was given, what would work."""

import inspect

import numpy as np
import pytest
import torch

from flash_versions import VERSIONS, attention
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import TENSORS, Options, Request, make_request

ones = torch.ones
BOUNDS = torch.tensor([0, 1, 4])
PAGES = torch.tensor([[0]])
ONE = torch.tensor([1])


def arguments(**changes):
    q, k, v = torch.randn(3, 1, 4, 2, 64)
    return {"q": q, "k": k, "v": v} | changes


def eight_bits(**changes):
    x = torch.randn(1, 4, 2, 64).to(torch.float8_e4m3fn)
    return {"q": x, "k": x, "v": x} | changes


def half(**changes):
    return arguments(**dict.fromkeys("qkv", torch.randn(1, 4, 2, 64).half())) | changes


def packed(**changes):
    q, k, v = torch.randn(3, 4, 2, 64)
    return {"q": q, "k": k, "v": v} | changes


def test_request_is_the_one_list_of_arguments():
    """The signatures, the options of type checkers and the operators say what `Request` says."""
    given = dict(inspect.signature(attention).parameters)
    assert list(given)[:3] == ["q", "k", "v"] and given.pop("version").default == "auto"
    taken = inspect.signature(make_request).parameters
    assert {x: y.default for x, y in given.items()} == {x: y.default for x, y in taken.items()}
    options = given.keys() - {"q", "k", "v"}
    assert {**Options.__annotations__, "return_lse": bool}.keys() == options
    made = {"window_left", "window_right", "dropout_seed"}  # from other options, or drawn
    assert options - {"causal", "window", "check"} == {*Request._fields[3:]} - made
    for operator in (torch.ops.flash_versions.forward, torch.ops.flash_versions.backward):
        taken = {x.name: x.type.annotation_str for x in operator.default._schema.arguments}
        assert list(taken)[1 : len(Request._fields) + 1] == list(Request._fields)
        assert {x for x in Request._fields if "Tensor" in taken[x]} == set(TENSORS)


REFUSED = {
    "q is 3-D": (arguments(q=ones(4, 2, 64)), r"q has shape \(4, 2, 64\).*\(batch, length"),
    "v unlike k": (arguments(v=ones(1, 5, 2, 64)), r"k has shape .* v \(1, 5, 2, 64\)"),
    "other batch": (arguments(q=ones(2, 4, 2, 64)), r"q has 2 sequences.*batch must be equal"),
    "other head_dim": (arguments(q=ones(1, 4, 2, 32)), "head_dim 32 and k 64; they must be equal"),
    "heads do not divide": (arguments(q=ones(1, 4, 3, 64)), "3 heads.*multiple of k's 2"),
    "mixed dtypes": (arguments(k=ones(1, 4, 2, 64).half()), "k has dtype torch.float16"),
    "other device": (arguments(k=ones(1, 4, 2, 64, device="meta")), "k is on meta, q is on cpu"),
    "last stride": (arguments(q=ones(1, 4, 64, 2).mT), "q has stride 2 in its last dimension"),
    "no head_dim": (arguments(**dict.fromkeys("qkv", ones(1, 4, 2, 0))), "at least 1"),
    "scale 0": (arguments(scale=0.0), r"scale=0.0 must be a positive"),
    "lengths: shape": (arguments(kv_lengths=torch.tensor([1, 2])), r"kv_lengths .* shape \(1,\)"),
    "no splits": (arguments(num_splits=0), "num_splits=0 must be an integer of at least 1"),
    "causal: a text": (arguments(causal="False"), "causal='False' must be True or False"),
    "deterministic: a number": (
        arguments(deterministic=1), "deterministic=1 must be True, False or None"),
    "q: a list": (arguments(q=[1.0]), "q is a list; it must be a torch.Tensor"),
    "q: sparse": (
        arguments(q=ones(1, 4, 2, 64).to_sparse()),
        r"q has the layout torch.sparse_coo and must be dense; call q.to_dense\(\)"),
    "v: mkldnn": (arguments(v=ones(1, 4, 2, 64).to_mkldnn()), "v has the layout torch._mkldnn"),
    "k: nested": (
        arguments(k=torch.nested.nested_tensor([ones(4, 2, 64)], layout=torch.jagged)),
        "k is a nested tensor; nested_attention in .* takes jagged ones"),
    "slopes: sparse": (arguments(alibi_slopes=ones(2).to_sparse()), "alibi_slopes has the layout"),
    "sink: sparse": (arguments(sink=ones(2).to_sparse()), "sink has the layout torch.sparse_coo"),
    "lengths: sparse": (arguments(kv_lengths=ONE.to_sparse()), "kv_lengths has the layout"),
    "intervals: sparse": (
        arguments(query_ends=ones(4).int().to_sparse()), "query_ends has the layout torch.sparse"),
    "scale: sparse": (eight_bits(q_descale=ones(1).to_sparse()), "q_descale has the layout torch"),
    "lengths: device": (arguments(kv_lengths=ones(1, dtype=torch.int32, device="meta")), "on meta"),
    "scale: vanishes in fp32": (arguments(scale=1e-46), "scale=1e-46 must be a positive"),
    "unknown version": (arguments(version="fa9"), "version='fa9' is unknown; there are auto, fa1"),
    "splits in fa1": (arguments(version="fa1", num_splits=2), "'fa1': num_splits=2.*'fa2'"),
    "lse of sdpa": (arguments(version="sdpa", return_lse=True), "'sdpa'.*does not return the LSE"),
    "window: a number": (arguments(window=3), r"window=3 must be a pair"),
    "window: too far": (arguments(window=(2**30, 0)), r"whole numbers from 0 to 2\^30 - 1"),
    "too many queries": (
        arguments(q=ones(1, 1, 2, 64).expand(1, 2**30, 2, 64)),
        r"q has 1073741824 rows; .* 2\^30 - 1"),
    "softcap 0": (arguments(softcap=0.0), "softcap=0.0 must be a positive"),
    "dropout 1": (arguments(dropout_p=1.0), "dropout_p=1.0 must be a probability"),
    "dropout as a tensor": (arguments(dropout_p=torch.zeros(())), "must be a probability"),
    "slopes: shape": (arguments(alibi_slopes=ones(3)), r"slopes .*\(3,\).*\(2,\) or \(1, 2\)"),
    "slopes: grad": (arguments(alibi_slopes=ones(2).requires_grad_()), "slopes requires grad"),
    "sink: shape": (arguments(sink=ones(1, 2)), r"sink has shape \(1, 2\).*of shape \(2,\)"),
    "packed q is 4-D": (arguments(cu_seqlens_q=BOUNDS), "q has .*for packed sequences"),
    "packed keys alone": (
        packed(cu_seqlens_k=BOUNDS, q=ones(1, 4, 2, 64)), "give cu_seqlens_q"),
    "bounds: dtype": (packed(cu_seqlens_q=ones(3)), "cu_seqlens_q .*int32 or int64"),
    "bounds: of other batches": (
        packed(cu_seqlens_q=BOUNDS, cu_seqlens_k=BOUNDS[:2]), r"cu_seqlens_k .*shape \(3,\)"),
    "bounds and starts": (packed(cu_seqlens_q=BOUNDS, kv_starts=BOUNDS[1:]), "leave kv_starts out"),
    "intervals: shape": (
        arguments(query_ends=ones(2, 4).int()), r"query_ends .*\(4,\), \(1, 4\) or \(1, 2, 4\)"),
    "intervals and lengths": (
        arguments(query_ends=ones(4).int(), kv_lengths=ONE), "kv_lengths and query_ends were both"),
    "pages: 1-D": (arguments(block_table=ONE, kv_lengths=ONE), r"table .*\(1, pages of a row\)"),
    "packed without bounds": (
        arguments(**dict.fromkeys("qkv", ones(4, 2, 64))), "packed sequences come with cu_seqlens_q"
    ),
    "a mask": (arguments(kv_lengths=ones(1, 4).bool()), r"True for the first .* is mask.sum\(1\)"),
    "heads first": (
        arguments(q=ones(1, 4, 9, 64), **dict.fromkeys("kv", ones(1, 2, 5, 64))),
        r"if the heads come first, .* call .transpose\(1, 2\)",
    ),
    "precision: unknown": (half(precision="fp4"), "precision='fp4' is unknown; write 'fp8'"),
    "precision of float32": (
        arguments(precision="fp8"), "'fp8' was given for a q of dtype torch.float32; float16 and"),
    "precision of 8 bits": (
        eight_bits(precision="fp8:head:hadamard"), "q has dtype torch.float8_e4m3fn, so it is "),
    "scale of 16 bits": (half(k_descale=ones(1)), "k_descale was given and q has dtype torch.fl"),
    "scale: shape": (
        eight_bits(q_descale=ones(2, 2)), r"q_descale has shape \(2, 2\).*\(1, 2\).*\(1, 2, 1\)"),
    "FP8 in fa1": (half(version="fa1", precision="fp8"), "'fa1': precision=.* version 'fa3'"),
    "FP8 in fa2": (eight_bits(version="fa2"), "'fa2': precision='fp8:tensor:e4m3' is not.*'fa3'"),
    "pages in FP8": (
        half(precision="fp8", block_table=PAGES, kv_lengths=ONE), "block_table is not possible"),
    "packed in FP8": (
        half(precision="fp8", cu_seqlens_q=BOUNDS) | {n: x[0] for n, x in half().items()},
        "cu_seqlens_q is not possible with precision='fp8:block:e4m3' of 16-bit .*in 8 bits"),
    "packed in FP8: blocks": (
        {n: x[0] for n, x in eight_bits().items()}
        | {"cu_seqlens_q": BOUNDS, "k_descale": ones(2, 2, 1)},
        r"k_descale has shape \(2, 2, 1\) .* of shape \(1,\), \(2, 2\) for the key heads\."),
    "head_dim in FP8": (
        half(precision="fp8", v=ones(1, 4, 2, 300).half()),
        "v has head_dim 300; head dims up to 256 work with precision='fp8:block:e4m3'"),
    "rotation of 80 dims": (
        half(precision="fp8:hadamard", **dict.fromkeys("qk", ones(1, 4, 2, 80).half())),
        "head_dim 80; .*powers of two from 16 to 256"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_would_work(name):
    given, sentence = REFUSED[name]
    with pytest.raises(ValueError, match=sentence):
        attention(**given)


@pytest.mark.parametrize("version", VERSIONS)
def test_version_limits(version, device):
    def request(dtype=torch.float32, head_dim=64, dim_v=64, **changes):
        x = torch.ones(1, 2, 2, head_dim, dtype=dtype, device=device)
        return Request(x, x, x[..., :1].expand(-1, -1, -1, dim_v), **changes)

    limits = VERSIONS[version].unsupported
    assert limits(request()) is None
    assert "torch.float64" in limits(request(torch.float64))
    widest = 256 if version == "fa1" else 512
    assert limits(request(head_dim=widest, dim_v=widest)) is None
    assert f"q has head_dim {widest + 1}" in limits(request(head_dim=widest + 1))
    assert f"v has head_dim 600; head dims up to {widest} work" in limits(request(dim_v=600))


def test_a_wide_backward_in_fp32_needs_shared_memory(monkeypatch):
    q = torch.ones(1, 2, 2, 512, requires_grad=True)
    limits = VERSIONS["fa2"].unsupported
    for capability, memory, refused in (((12, 0), 101_376, True), ((9, 0), 232_448, False)):
        monkeypatch.setattr(devices, "assumed", Properties(capability, memory, 100))
        assert bool(limits(Request(q, q, q))) == refused
        for fits in (q[..., :256], q.half(), q.detach()):
            assert limits(Request(fits, fits, fits)) is None
        assert limits(Request(q, q, q[..., :256])) is None


# ---- check=True: the values themselves, read on the host ----

WRONG_VALUES = {
    "starts late": (packed(cu_seqlens_q=BOUNDS + 1), "cu_seqlens_q starts with 1"),
    "decreases": (packed(cu_seqlens_q=torch.tensor([0, 3, 2, 4])), r"\[0, 3, 2, 4\] must not decr"),
    "too many rows": (packed(cu_seqlens_q=BOUNDS + torch.tensor([0, 0, 1])), "has 4 rows"),
    "too many keys": (
        packed(cu_seqlens_q=BOUNDS, cu_seqlens_k=torch.tensor([0, 1, 5])), "k ends with 5"),
    "length": (arguments(kv_lengths=torch.tensor([5])), "sequence 0 has 5 keys.*0 to 4"),
    "length of packed keys": (
        packed(cu_seqlens_q=BOUNDS, kv_lengths=BOUNDS[1:]), "sequence 1 has 4 keys.*0 to 3"),
    "length below 0": (arguments(kv_lengths=torch.tensor([-1])), "sequence 0 has -1 keys"),
    "start": (arguments(kv_starts=torch.tensor([5])), r"kv_starts\[0\]=5 .* 0 to 4"),
    "start behind the end": (
        arguments(kv_starts=torch.tensor([3]), kv_lengths=torch.tensor([2])), "from 0 to 2, its e"),
    "interval": (arguments(query_ends=torch.tensor([0, 4, 4, 5])), "query_ends holds 5; .*0 to 4"),
    "interval before 0": (
        arguments(query_starts=torch.tensor([0, -1, 0, 0])), "query_starts holds -1"),
    "page": (arguments(block_table=PAGES + 1, kv_lengths=ONE), r"block_table\[0\] has page 1"),
    "room in the pages": (arguments(block_table=PAGES, kv_lengths=ONE * 9), "0 has 9 keys"),
    "scale 0": (eight_bits(k_descale=torch.zeros(1)), "k_descale holds 0.0; .*positive and finite"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_check_reads_the_values(name):
    given, sentence = WRONG_VALUES[name]
    with pytest.raises(ValueError, match=sentence):
        attention(**given, check=True)


def test_check_lets_right_values_pass():
    given = packed(cu_seqlens_q=BOUNDS[[0, 0, 1, 2, 2]])  # empty sequences, too
    assert torch.equal(attention(**given, check=True), attention(**given))
    padded = packed(cu_seqlens_q=BOUNDS, **dict.fromkeys("qkv", ones(6, 2, 64)))
    o = attention(**padded, check=True)  # the last two rows belong to no sequence
    assert o[:4].all() and not o[4:].any()
    unused = torch.tensor([[0, 99]])  # of the second page no key is used
    paged = arguments(block_table=unused, kv_lengths=ONE * 4)
    assert torch.equal(
        attention(**paged, check=True), attention(**arguments(**{k: paged[k] for k in "qkv"}))
    )


def test_the_finest_scale_is_the_precision():
    q = ones(1, 4, 4, 64).to(torch.float8_e4m3fn)
    given = eight_bits(q=q, q_descale=ones(1, 4, 1), k_descale=ones(1, 2), v_descale=ones(1))
    assert make_request(**given).precision == "fp8:block:e4m3"


def test_numpy_numbers_are_numbers():
    given = arguments()
    o = attention(**given, window=(np.int64(1), np.int32(0)), num_splits=np.int64(1))
    assert torch.equal(o, attention(**given, window=(1, 0), num_splits=1))
