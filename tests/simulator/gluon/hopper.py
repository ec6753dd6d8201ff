"""The kernels for Hopper on the CPU, called as `attention` calls them."""

import math

import torch

from flash_versions.dispatch.autograd.compute import in_vectors, narrowed, widened
from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.request import make_request
from flash_versions.simulator.checking import Watch
from flash_versions.versions.fa3.hopper import config as fa3_config
from flash_versions.versions.fa3.hopper import host as fa3_host
from flash_versions.versions.fa3.hopper.backward import kernel as BACKWARD
from flash_versions.versions.fa4.hopper import config as fa4_config
from flash_versions.versions.fa4.hopper import host as fa4_host
from flash_versions.versions.oracle.budget import assess_request
from flash_versions.versions.oracle.reference import forward as exact_forward
from flash_versions.versions.oracle.suite import CASES
from tests.helpers.kernels.budget import assert_ok
from tests.simulator.gluon.orders import in_every_order

VERSIONS = ["fa3", "fa4"]
HOSTS = {"fa3": fa3_host, "fa4": fa4_host}
CONFIGS = {"fa3": fa3_config, "fa4": fa4_config}


def gpu(num_sms, capability=(9, 0)):
    """A GPU that is simulated."""
    return Properties(capability=capability, num_sms=num_sms)


HOPPER = gpu(2)


def taken(left_to_portable, of=HOPPER, **more):
    """The cases whose tensors TMA can address, and that no other kernel computes."""
    found = []
    for case in CASES:
        inputs, options = case.inputs(torch.float16, "cpu"), case.all_options("cpu") | more
        with devices.assume(of):
            if all(x.numel() for x in inputs):
                left = left_to_portable(make_request(*inputs, **options))
                found += [case] if left is None else []
    return found


def qkv(M, N, heads, D, kv_heads=None, batch=1, dtype=torch.bfloat16, D_v=None):
    q = torch.randn(batch, M, heads, D, dtype=dtype)
    k = torch.randn(batch, N, kv_heads or heads, D, dtype=dtype)
    v = torch.randn(batch, N, kv_heads or heads, D_v or D, dtype=dtype)
    return q, k, v


def requested(*inputs, **options):
    """A request; with bounds of packed sequences, of the rows of one sequence."""
    if "cu_seqlens_q" in options and inputs[0].dim() == 4:
        inputs = [x[0] for x in inputs]
    return make_request(*inputs, **options)


def growing(M, N, block, growth):
    """q, k and v whose scores grow by `growth` or more, in log2 units, from block to block of keys
    as kernels visit them, the last one first.
    """
    q, k, v = torch.zeros(1, M, 2, 64), torch.zeros(1, N, 2, 64), torch.randn(1, N, 2, 64)
    q[..., 0] = 1 + torch.rand(1, M, 2)
    k[..., 0] = growth * math.log(2) * 8 * ((N - 1 - torch.arange(N)) // block)[None, :, None]
    return q.bfloat16(), k.bfloat16(), v.bfloat16()


def beside_others(request, width):
    """A request whose heads have so many dims in memory: behind its own are another head's, NaN."""
    wide = [torch.full((*x.shape[:3], width), torch.nan, dtype=x.dtype) for x in request[:3]]
    q, k, v = (place[..., : x.shape[3]].copy_(x) for place, x in zip(wide, request[:3]))
    return request._replace(q=q, k=k, v=v)


def of_dims(place, head_dims, options):
    """A call of these head dims, of q and k and of v: (inputs, options), which come round."""
    (D, D_v), given = head_dims[place], options[place % len(options)]
    dtype = torch.float16 if place % 2 else torch.bfloat16
    return qkv(150, 150, 2, D, kv_heads=1, D_v=D_v, dtype=dtype), given


def small(version, **switches):
    """A configuration with blocks of 64 keys, of which there are more."""
    of = {"fa3": "HopperConfig", "fa4": "RolesConfig"}[version]
    return getattr(CONFIGS[version], of)(**{"block_kv": 64, **switches})


def attend(version, request, config=None):
    """{name: result} of a simulated forward, in which no access is out of order."""
    aligned = in_vectors(request)
    assert HOSTS["fa3"].left_to_portable(aligned) is None
    with Watch({}).watching():
        o, lse, _ = HOSTS[version].forward(aligned, config)
    return {"o": narrowed(o, request.v), "lse": lse}


def check(version, config, *inputs, **options):
    """A simulated forward is within the error budget."""
    request = requested(*inputs, **options)
    assert_ok(assess_request(attend(version, request, config), request))


def check_every_order(version, config, *inputs, **options):
    """It is, and has the same bits in every order."""
    request = requested(*inputs, **options)
    assert_ok(assess_request(in_every_order(lambda: attend(version, request, config)), request))


def differentiate(request, config=None, do=None, dlse=None):
    """({name: gradient}, do) of a simulated backward."""
    assert BACKWARD.left_to_portable(in_vectors(request)) is None
    q, k, v = (x.double() for x in request[:3])
    o, lse, _ = exact_forward(request._replace(q=q, k=k, v=v))
    o = o.to(request.q.dtype)
    do = torch.randn(o.shape).to(o.dtype) if do is None else do
    given = in_vectors(request), widened(o), lse.float(), None, widened(do), dlse, config
    *found, dsink = BACKWARD.backward(*given)
    named = zip(("dq", "dk", "dv"), found, request[:3])
    gradients = {name: narrowed(x, like) for name, x, like in named}
    assert (dsink is None) == (request.sink is None)
    return gradients if dsink is None else gradients | {"dsink": dsink}, do


def check_gradients(config, *inputs, do=None, dlse=None, **options):
    """Simulated gradients are within the error budget: they are returned."""
    request = requested(*inputs, **options)
    gradients, do = differentiate(request, config, do, dlse)
    assert_ok(assess_request(gradients, request, do, dlse))
    return gradients


def assert_right(request, exact, do, version="fa3"):
    """Results and gradients of simulated kernels are within the budget of an exact request; of FA4,
    whose backward is FA3's kernel, the results.
    """
    found = attend(version, request)
    if version == "fa4":
        assert_ok(assess_request(found, exact))
        return
    dlse = torch.randn_like(found["lse"])
    dq, dk, dv, dsink = BACKWARD.backward(request, found["o"], found["lse"], None, do, dlse)
    found |= {"dq": dq, "dk": dk, "dv": dv}
    if request.sink is not None:
        found["dsink"] = dsink
    assert_ok(assess_request(found, exact, do, dlse))


def padded(lengths, starts=None, q_length=70, head_dim=64, heads=(4, 2), **options):
    """A request of rows whose keys begin and end where they like, NaN before and behind them, the
    same without NaN, and what o's gradient is.
    """
    q, k, v = qkv(q_length, max(lengths) + 9, heads[0], head_dim, heads[1], len(lengths))
    do = torch.randn_like(q)
    return *poisoned(q, k, v, lengths, starts, num_splits=1, **options), do


def poisoned(q, k, v, lengths, starts=None, **options):
    """A request with NaN where no row has a key, and the same without."""
    options = {"kv_lengths": torch.tensor(lengths)} | options
    if starts:
        options["kv_starts"] = torch.tensor(starts)
    exact = make_request(q, k, v, **options)
    k, v = k.clone(), v.clone()
    for b, (begin, end) in enumerate(zip(starts or [0] * len(lengths), lengths)):
        for x in (k, v):
            x[b, :begin], x[b, max(begin, end) :] = math.nan, math.nan
    return exact._replace(k=k, v=v), exact
