"""Any shape, strides, type, mask and feature, drawn by hypothesis: forward and backward within the
error budget.

The quick profile is part of every run; `make fuzz` draws 600 cases for each version. On a GPU they
are longer.
"""

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, assume, given, note, settings
from hypothesis import strategies as st

from flash_versions import VERSIONS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.forward import FEW_ROWS
from flash_versions.versions.oracle.suite import Case
from tests.flash_versions.versions.test_attention import DTYPES, LATER, LAYOUTS, by_version, check

pytestmark = pytest.mark.slow
settings.register_profile("quick", max_examples=15)
settings.register_profile("long", max_examples=600)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

MOST = 3000 if torch.cuda.is_available() else 140
PAGE = 16  # rows
FEW_BLOCKS = 140  # keys
LENGTHS = st.one_of(
    st.integers(0, 4), st.sampled_from([31, 32, 33, 63, 64, 65, 128]), st.integers(5, MOST)
)
SIDES = st.one_of(st.none(), st.integers(0, 150))


@st.composite
def calls(draw):
    """(case, how its sequences are given, layout, dtype) of a call."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 2))
    M, N, heads = draw(LENGTHS), draw(LENGTHS), kv_heads * draw(st.integers(1, 3))
    options = {}
    if draw(st.booleans()):
        options["window"] = (draw(SIDES), draw(SIDES))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.05, 0.3, 1.0]))
    features = draw(st.sets(st.sampled_from(["softcap", "alibi", "sink", "dropout"])))
    options |= {"softcap": 2.0} if "softcap" in features else {}
    options |= {"dropout_p": 0.2} if "dropout" in features else {}
    kinds = ["alike", "alike", "lengths", "padded", "packed", "used", "intervals", "pages"]
    kind = draw(st.sampled_from(kinds))
    lengths, starts = (st.tuples(*[st.integers(*x)] * batch) for x in ((0, N), (-1, N + 1)))
    dims = st.sampled_from([(), (batch,), (batch, kv_heads)])
    case = Case(
        "", M, N, heads, kv_heads, draw(st.sampled_from([2, 16, 24, 32, 64, 80])),
        draw(st.sampled_from([2, 16, 32, 40, 64])), draw(st.booleans()), batch,
        kv_lengths=draw(lengths) if kind in ("lengths", "padded", "used", "pages") else None,
        kv_starts=draw(starts) if kind == "padded" else None,
        alibi=(heads,) if "alibi" in features else (),
        starts=draw(dims) if kind == "intervals" else None,
        ends=draw(dims) if kind == "intervals" else None,
        sink="sink" in features, options=options,
    )  # fmt: skip
    return case, kind, draw(st.sampled_from(list(LAYOUTS))), draw(st.sampled_from(DTYPES))


def ends(total, parts):
    """A packing of `total` rows into `parts` sequences, some of them empty."""
    inner = torch.randint(0, total + 1, (parts - 1,)).sort().values
    return torch.tensor([0, *inner.tolist(), total])


@by_version
@given(call=calls(), seed=st.integers(0, 2**16))
@settings(
    deadline=None, derandomize=settings.default.max_examples < 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_any_call(version, device, call, seed):
    case, kind, layout, dtype = call
    torch.manual_seed(seed)
    if version == "fa1" and dtype == torch.float32:  # its o is rounded once more in every block
        assume(case.N <= FEW_BLOCKS)
    own = version in LATER and device == "cpu"  # of their kernels, not FA2's again
    if own or version == "fa1":  # what it does not offer would be refused
        kept = ("scale",) if own else ("scale", "window")
        options = {name: x for name, x in case.options.items() if name in kept}
        case = replace(case, alibi=(), sink=False, starts=None, ends=None, options=options)
        kind = "alike"
    if own:
        case = replace(case, M=case.M + FEW_ROWS, kv_lengths=None, kv_starts=None)
    options = case.all_options(device)
    if kind == "pages" and case.sink:  # pages are for inference
        options["sink"] = options["sink"].detach()
    q, k, v = case.inputs(dtype, device)
    if kind in ("packed", "used"):
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        for name, x in (("cu_seqlens_q", q), ("cu_seqlens_k", k)):
            options[name] = ends(len(x), case.batch).to(device)
    elif kind == "pages":  # of rows that have more room than they use, in any order
        rows = case.batch * (-(-case.N // PAGE) + 1)
        options["block_table"] = torch.randperm(rows, device=device).view(case.batch, -1)
        k, v = (torch.randn(rows, PAGE, *x.shape[2:], device=device).to(dtype) for x in (k, v))
    else:
        q, k, v = (LAYOUTS[layout](x) for x in (q, k, v))
    note(f"{case} {layout} {dtype} {options}")
    assert VERSIONS[version].unsupported(make_request(q, k, v, **options)) is None
    check(version, q, k, v, backward=not own and kind != "pages", **options)
