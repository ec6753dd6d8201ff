"""Each version's quick cases of the equivalence suite with its kernels watched: no access outside
of a tensor, of memory that nothing wrote, or that two programs race for; and the results are right
with NaN where a mask hides what is loaded.
"""

import pytest
import torch

from flash_versions import VERSIONS, attention
from flash_versions.dispatch.request import make_request
from flash_versions.simulator.checking import Watch
from flash_versions.versions.oracle.budget import assess_request
from tests.flash_versions.versions.test_attention import EVERYTHING
from tests.helpers.kernels.budget import assert_ok

QUICK = [x for x in EVERYTHING if not x.marks]


@pytest.mark.parametrize(("version", "dtype", "case"), QUICK)
def test_watched(version, dtype, case):
    leaves = [x.detach().requires_grad_() for x in case.inputs(dtype, "cpu")]
    options = case.all_options("cpu")
    torch.manual_seed(1)  # the same dropout in both
    request = make_request(*leaves, **options)
    if reason := VERSIONS[version].unsupported(request):
        pytest.skip(reason)
    given = {name: x for name, x in request._asdict().items() if torch.is_tensor(x)}
    watch = Watch({name: x.detach() for name, x in given.items()})
    torch.manual_seed(1)
    with watch.watching():
        o, lse = attention(*leaves, version=version, return_lse=True, **options)
        do = torch.randn(o.shape).to(o.dtype)
        leaves += [x for x in (options.get("sink"),) if x is not None]
        gradients = torch.autograd.grad(o, leaves, do)
    results = {"o": o.detach(), "lse": lse.detach()}
    results |= dict(zip(("dq", "dk", "dv", "dsink"), gradients))
    assert_ok(assess_request(results, request, do))
    assert watch.seen or 0 in (case.M, case.N, case.batch)
