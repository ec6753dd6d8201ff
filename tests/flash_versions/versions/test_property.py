"""Any shape, strides, type, mask and feature, drawn by hypothesis: forward and backward within the
error budget.

The quick profile is part of every run; `make fuzz` draws 600 cases for each version. On a GPU they
are longer.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from flash_versions import VERSIONS
from flash_versions.dispatch.request import make_request
from flash_versions.versions.fa3.forward import FEW_ROWS
from tests.flash_versions.versions.test_attention import DTYPES, LATER, LAYOUTS, by_version, check

pytestmark = pytest.mark.slow
settings.register_profile("quick", max_examples=15)
settings.register_profile("long", max_examples=600)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))

MOST = 3000 if torch.cuda.is_available() else 140
PAGE = 16  # rows
LENGTHS = st.one_of(
    st.integers(0, 4), st.sampled_from([31, 32, 33, 63, 64, 65, 128]), st.integers(5, MOST)
)
SIDES = st.one_of(st.none(), st.integers(0, 150))


@st.composite
def calls(draw):
    """(shape, layout, dtype, options) of a call; tensors are described, not drawn."""
    shape = {
        "batch": draw(st.integers(1, 3)),
        "M": draw(LENGTHS),
        "N": draw(LENGTHS),
        "kv_heads": draw(st.integers(1, 2)),
        "group": draw(st.integers(1, 3)),
        "head_dim": draw(st.sampled_from([2, 16, 24, 32, 64, 80])),
        "head_dim_v": draw(st.sampled_from([2, 16, 32, 40, 64])),
    }
    options = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        options["window"] = (draw(SIDES), draw(SIDES))
    if draw(st.booleans()):
        options["scale"] = draw(st.sampled_from([0.05, 0.3, 1.0]))
    for feature in draw(st.sets(st.sampled_from(["softcap", "alibi", "sink", "dropout"]))):
        options[feature] = True
    options["sequences"] = draw(
        st.sampled_from(
            ["alike", "alike", "lengths", "padded", "packed", "used", "intervals", "pages"]
        )
    )
    return shape, draw(st.sampled_from(list(LAYOUTS))), draw(st.sampled_from(DTYPES)), options


def tensors(shape, dtype, device):
    heads = shape["kv_heads"] * shape["group"]
    q = torch.randn(shape["batch"], shape["M"], heads, shape["head_dim"], device=device)
    k, v = (
        torch.randn(shape["batch"], shape["N"], shape["kv_heads"], shape[dim], device=device)
        for dim in ("head_dim", "head_dim_v")
    )
    return [x.to(dtype) for x in (q, k, v)]


def ends(total, parts):
    """A packing of `total` rows into `parts` sequences, some of them empty."""
    inner = torch.randint(0, total + 1, (parts - 1,)).sort().values
    return torch.tensor([0, *inner.tolist(), total])


def full_options(shape, options, device):
    """What `attention` takes, of what was drawn."""
    options = dict(options)
    heads, batch = shape["kv_heads"] * shape["group"], shape["batch"]
    if options.pop("softcap", False):
        options["softcap"] = 2.0
    if options.pop("alibi", False):
        options["alibi_slopes"] = torch.rand(heads, device=device)
    if options.pop("sink", False):
        learned = options["sequences"] != "pages"  # which are for inference
        options["sink"] = torch.randn(heads, device=device, requires_grad=learned)
    if options.pop("dropout", False):
        options["dropout_p"] = 0.2
    sequences = options.pop("sequences")
    if sequences == "pages":  # of a row that has more room than it uses, in any order
        rows = -(-shape["N"] // PAGE) + 1
        options["block_table"] = torch.randperm(batch * rows, device=device).view(batch, rows)
    if sequences in ("lengths", "padded", "used", "pages"):
        options["kv_lengths"] = torch.randint(0, shape["N"] + 1, (batch,), device=device)
    if sequences == "padded":
        options["kv_starts"] = torch.randint(-1, shape["N"] + 2, (batch,), device=device)
    if sequences == "intervals":
        shapes = [(shape["N"],), (batch, shape["N"]), (batch, shape["kv_heads"], shape["N"])]
        for name in ("query_starts", "query_ends"):
            of = shapes[int(torch.randint(len(shapes), ()))]
            options[name] = torch.randint(shape["M"] + 1, of, device=device)
    if sequences in ("packed", "used"):
        options["cu_seqlens_q"] = ends(batch * shape["M"], batch).to(device)
        options["cu_seqlens_k"] = ends(batch * shape["N"], batch).to(device)
    return options


@by_version
@given(call=calls(), seed=st.integers(0, 2**16))
@settings(
    deadline=None, derandomize=settings.default.max_examples < 100,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
def test_any_call(version, device, call, seed):
    shape, layout, dtype, drawn = call
    torch.manual_seed(seed)
    if version == "fa1":  # what it does not offer would be refused
        drawn = {k: v for k, v in drawn.items() if k in ("causal", "window", "scale")}
        drawn["sequences"] = ("alike", "lengths", "padded")[seed % 3]
    own = version in LATER and device == "cpu"  # of their kernels, not FA2's again
    if own:
        drawn = {k: v for k, v in drawn.items() if k in ("causal", "scale")} | {
            "sequences": "alike"
        }
        shape = shape | {"M": shape["M"] + FEW_ROWS}
    options = full_options(shape, drawn, device)
    q, k, v = tensors(shape, dtype, device)
    if "cu_seqlens_q" in options:
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    elif "block_table" in options:
        pages = options["block_table"].numel(), PAGE
        k, v = (torch.randn(*pages, *x.shape[2:], device=device).to(dtype) for x in (k, v))
    else:
        q, k, v = (LAYOUTS[layout](x) for x in (q, k, v))
    note(f"{shape} {layout} {dtype} {options}")
    assert VERSIONS[version].unsupported(make_request(q, k, v, **options)) is None
    backward = not own and "block_table" not in options
    check(version, q, k, v, backward=backward, **options)
