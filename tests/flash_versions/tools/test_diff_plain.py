"""Plain kernels compute what the full ones compute, to the bit, and are as short as the lesson
needs them; what the evaluator takes for granted of a plain call is what its launch shows.
"""

import importlib
import importlib.util
import sys

import pytest
import torch

from flash_versions.diff import changed, plain_diff, plain_source
from flash_versions.diff.plain import plain_kernels
from flash_versions.dispatch.launch import Launcher
from flash_versions.dispatch.request import make_request
from flash_versions.dispatch.sizes import LaunchConfig
from flash_versions.versions.oracle.budget import assess_request
from tests.helpers.kernels.budget import assert_ok
from tests.helpers.rotation import pairwise

VERSIONS = ("fa1", "fa2", "fa3", "fa4")
CONFIG = LaunchConfig(16, 32, num_warps=4, num_stages=1)
LENGTHS = [(64, 64), (37, 101), (101, 37)]  # the last: rows that see no key
OUTPUTS = {
    "forward_kernel": {"o", "lse_out", "row_max_out", "row_sum_out"},
    "backward_kernel": {"dq_out", "dk_out", "dv_out"},
    "delta_kernel": {"delta"},
    "dkdv_kernel": {"dk_out", "dv_out"},
    "dq_kernel": {"dq_out"},
}
simulated = pytest.mark.skipif(torch.cuda.is_available(), reason="bits are those of NumPy")


class Call:
    """A plain call of a version's full kernels, with what its launches were given."""

    def __init__(self, version, causal, lengths, monkeypatch, dtype=torch.bfloat16, head_dim=128):
        self.version, self.causal, self.head_dim = version, causal, head_dim
        (m, n), self.launches, self.before = lengths, [], []
        q, self.do = (torch.randn(2, m, 2, head_dim).to(dtype) for _ in range(2))
        k, v = (torch.randn(2, n, 2, head_dim).to(dtype) for _ in range(2))
        self.request = make_request(q, k, v, causal=causal)
        self.options = {"threshold": 8.0, "eighths": 2} if version == "fa4" else {}
        real = Launcher.__call__

        def launch(launcher, grid, arguments, constants, *options):
            names = launcher.kernel.arg_names
            given = dict(zip(names, (*arguments, *constants.values()), strict=True))
            self.launches.append((launcher.kernel.fn.__name__, grid, given))
            return real(launcher, grid, arguments, constants, *options)

        monkeypatch.setattr(Launcher, "__call__", launch)

    def module(self, name):
        return importlib.import_module(f"flash_versions.versions.{self.version}.{name}")

    def forward(self):
        found = self.module("forward").forward(self.request, CONFIG, **self.options)
        self.results = {"o": found[0], "lse": found[1]}
        return found

    def backward(self):
        o, lse, statistics = self.forward()
        self.launches.clear()
        configs = [CONFIG] * (2 if self.version == "fa2" else 1)
        found = self.module("backward").backward(
            self.request, o, lse, statistics, self.do, None, *configs
        )
        self.results = dict(zip(("dq", "dk", "dv"), found))


def follow(given, path):
    """The value at (parameter, field, ...)."""
    value = given[path[0]]
    for name in path[1:]:
        value = getattr(value, name)
    return value


def as_module(text, folder):
    """A source text, imported."""
    path = folder / "plain_kernels.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def replayed(call, folder, backward=False):
    """Every launch of a call again, by the plain kernels: pairs (by the full one, by the plain one)
    of all outputs, and the latter by name. Outputs begin as NaN, but for a dQ that is added to.
    """
    plain = as_module(plain_source(call.version, call.causal, call.head_dim, backward), folder)
    kernels = plain_kernels(call.version, call.causal, call.head_dim, backward)
    assert [name for name, _, _ in call.launches] == [list(x.functions)[-1] for x in kernels]
    pairs, outputs = [], {}
    for kernel, (name, grid, given) in zip(kernels, call.launches):
        arguments = {}
        for parameter, path in kernel.functions[name].parameters.items():
            value = follow(given, path)
            if parameter in OUTPUTS[name]:
                start = 0.0 if path == ("queries", "dq") else float("nan")
                made = torch.full_like(value.ptr, start)
                pairs.append((value.ptr, made))
                outputs[parameter.removesuffix("_out")] = made
                value = value._replace(ptr=made)
            arguments[parameter] = value
        getattr(plain, name)[grid](**arguments)
    return pairs, outputs


def same_bits(pairs):
    return [torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs]


@simulated
@pytest.mark.parametrize(
    ("version", "lengths", "causal"), pairwise(VERSIONS, LENGTHS, [True, False])
)
def test_forward_is_the_full_kernel_to_the_bit(version, causal, lengths, monkeypatch, tmp_path):
    """And within the error budget of the fp64 reference."""
    call = Call(version, causal, lengths, monkeypatch)
    call.forward()
    pairs, outputs = replayed(call, tmp_path)
    assert len(pairs) == (4 if version == "fa1" else 2) and all(same_bits(pairs))
    results = {name: outputs[name] for name in ("o", "lse")}
    assert_ok(assess_request(results, call.request))


@simulated
@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "lengths", "causal"), pairwise(["fa1", "fa2"], LENGTHS[1:], [True, False])
)
def test_backward_is_the_full_kernel_to_the_bit(version, causal, lengths, monkeypatch, tmp_path):
    """And within the error budget of the fp64 reference."""
    call = Call(version, causal, lengths, monkeypatch)
    call.backward()
    pairs, outputs = replayed(call, tmp_path, backward=True)
    assert len(pairs) == {"fa1": 3, "fa2": 4}[version] and all(same_bits(pairs))
    results = {name: outputs[name].to(call.do.dtype) for name in ("dq", "dk", "dv")}
    assert_ok(assess_request(results, call.request, call.do))


BARS = {("fa1", "fa2"): 60, ("fa2", "fa3"): 40, ("fa3", "fa4"): 45}


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("old, new", BARS)
def test_the_lesson_fits_on_a_page(old, new, causal):
    assert 10 < changed(plain_diff(old, new, causal)) <= BARS[old, new]
