"""The peers of the versions: functions of q, k, v (batch, length, heads, head_dim) that return o.
They come from torch, from flash-attn-4 and cuDNN's front end where these are installed, and from
plain PyTorch.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

Function = Callable[..., torch.Tensor]

# What cuDNN's FP8 graph writes beside o, in the order of trying: nothing, as the benchmarks of
# Dao-AILab/flash-attention have it; the largest P and |o|, as NVIDIA's samples do.
FP8_OUTPUTS = ((), ("amax_s", "amax_o"))
# Per-tensor factors of that graph. P, at most 1, is multiplied by 2^8 so that little of it is lost
# below e4m3's smallest number, and the product with V divided by it.
FP8_FACTORS = {
    "descale_q": 1.0,
    "descale_k": 1.0,
    "descale_v": 1.0,
    "descale_s": 2.0**-8,
    "scale_s": 2.0**8,
    "scale_o": 1.0,
}

# Score matrices that plain PyTorch holds at once: scores and P; with a gradient dP and dS, too.
MATRICES, MATRICES_WITH_GRADIENT = 3, 5


@dataclass(frozen=True)
class Peer:
    """Another implementation.

    Attributes:
        label: what tables and figures call it.
        function: `function(q, k, v, causal=...)` returns o.
        installed: whether it can be called here.
        precision: "bf16", or "fp8": then q, k and v are e4m3.
    """

    label: str
    function: Function
    installed: Callable[[], bool] = lambda: True
    precision: str = "bf16"


def torch_backend(backend: SDPBackend, q, k, v, causal: bool) -> torch.Tensor:
    """torch's SDPA with one backend only."""
    with sdpa_kernel(backend):
        o = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=causal,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    return o.transpose(1, 2)


def flash_attn_4(q, k, v, causal: bool, bounds=None, longest: int = 0, **options) -> torch.Tensor:
    """flash-attn-4's CuTe kernels, compiled on the first call; its cache on disk is turned on.
    Packed sequences have bounds, the longest and no dimension for the batch.
    """
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # read when imported
    from flash_attn import cute  # type: ignore[import-not-found,unused-ignore]

    if bounds is None:
        result = cute.flash_attn_func(q, k, v, causal=causal, **options)
    else:
        given = {"cu_seqlens_q": bounds, "max_seqlen_q": longest, "causal": causal}
        given |= {"cu_seqlens_k": bounds, "max_seqlen_k": longest}
        result = cute.flash_attn_varlen_func(q, k, v, **given, **options)
    return result[0] if isinstance(result, tuple) else result


def cudnn_fp8(q, k, v, causal: bool) -> torch.Tensor:
    """cuDNN's FP8 forward through its front end: e4m3 in and, as Hopper has no other, e4m3 out.

    Raises:
        RuntimeError: the library refuses the shape.
    """
    plan = cudnn_fp8_plan(*((tuple(x.shape), x.stride()) for x in (q, k, v)), causal, q.device)
    return plan(q, k, v)


@cache
def cudnn_fp8_plan(q, k, v, causal: bool, device: torch.device) -> Function:
    """A function of q, k, v that launches cuDNN's FP8 kernel for tensors of these (shape, strides).

    The plan, its handle and its workspace live as long as the process: a CUDA graph may use them.
    """
    import cudnn  # type: ignore[import-not-found,unused-ignore]

    handle = cudnn_handle(device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    refusals = []
    for wanted in FP8_OUTPUTS:
        try:
            graph, inputs, outputs = cudnn_fp8_graph(q, k, v, causal, wanted, handle)
            break
        except Exception as error:  # the library has several classes of them
            refusals.append(str(error))
    else:
        raise RuntimeError(f"cuDNN's FP8 kernel: {refusals[0]}")
    make = partial(torch.empty, device=device)
    workspace = make(max(graph.get_workspace_size(), 1), dtype=torch.uint8)
    fixed = {name: make(1).fill_(factor) for name, factor in FP8_FACTORS.items()}
    fixed |= {name: make(1) for name in outputs if name != "o"}
    batch, length, heads, _ = q[0]

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        o = torch.empty(batch, length, heads, v[0][3], dtype=tensors[0].dtype, device=device)
        given = {**dict(zip("qkv", tensors)), **fixed, "o": o}
        pack = {tensor: given[name] for name, tensor in (inputs | outputs).items()}
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
        graph.execute(pack, workspace, handle=handle)
        return o

    return run


def cudnn_fp8_graph(q, k, v, causal: bool, wanted: tuple[str, ...], handle: Any):
    """A compiled graph of the front end, and its tensors by name: inputs and outputs. The mask is
    aligned top-left, which for as many queries as keys is the same.
    """
    import cudnn  # type: ignore[import-not-found,unused-ignore]

    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(
        io_data_type=e4m3, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle
    )
    inputs = {}
    for name, (shape, strides) in zip("qkv", (q, k, v)):  # to cuDNN: (batch, heads, length, dim)
        dim, stride = ([x[i] for i in (0, 2, 1, 3)] for x in (shape, strides))
        inputs[name] = graph.tensor(name=name, dim=dim, stride=stride, data_type=e4m3)
    for name in FP8_FACTORS:
        inputs[name] = graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=fp32)
    (batch, length, heads, head_dim), head_dim_v = q[0], v[0][3]
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        **inputs, attn_scale=head_dim**-0.5, is_inference=True, use_causal_mask=causal
    )
    dim = [batch, heads, length, head_dim_v]
    stride = [length * heads * head_dim_v, head_dim_v, heads * head_dim_v, 1]
    o.set_output(True).set_dim(dim).set_stride(stride).set_data_type(e4m3)
    outputs = {"o": o}
    for name, tensor in (("amax_s", amax_s), ("amax_o", amax_o)):
        tensor.set_output(name in wanted).set_dim([1] * 4).set_stride([1] * 4)
        tensor.set_data_type(fp32)
        if name in wanted:
            outputs[name] = tensor
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, inputs, outputs


@cache
def cudnn_handle(device: torch.device) -> Any:
    """cuDNN's handle for a GPU, one for the process."""
    import cudnn  # type: ignore[import-not-found,unused-ignore]

    with torch.cuda.device(device):
        return cudnn.create_handle()


def installed(module: str) -> bool:
    """Whether a module is installed. It is not imported, because that can take seconds."""
    try:
        return find_spec(module) is not None
    except ImportError:  # of its parent, which may be another one's, and broken
        return False


def installed_version(module: str, distribution: str) -> str:
    """Its version, "unknown" if it was unpacked without its metadata, "not installed"."""
    if not installed(module):
        return "not installed"
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def plain(q, k, v, causal: bool) -> torch.Tensor:
    """Attention as three lines of PyTorch, in the tensors' dtype, every score in memory.

    Raises:
        MemoryError: the score matrix would not fit.
    """
    (batch, m, heads, head_dim), n = q.shape, k.shape[1]
    matrices = MATRICES_WITH_GRADIENT if q.requires_grad else MATRICES
    needed = matrices * batch * heads * m * n * q.element_size()
    # While a graph is captured: it has been called before, and it fits.
    capturing = q.is_cuda and torch.cuda.is_current_stream_capturing()
    if not capturing and needed > (free := free_memory(q.device)):
        raise MemoryError(
            f"{matrices} score matrices take {needed / 2**30:.0f} GiB and {free / 2**30:.0f} GiB "
            "are free; a smaller batch or length works."
        )
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != heads:
        k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = (q * head_dim**-0.5) @ k.mT
    if causal:
        hidden = torch.ones(m, n, dtype=torch.bool, device=q.device).triu(1 + n - m)
        s.masked_fill_(hidden, -torch.inf)
    return (torch.softmax(s, -1) @ v).transpose(1, 2)


def free_memory(device: torch.device) -> int:
    """Bytes that a tensor could still take: free on the device, or reserved by torch but unused."""
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + held


PEERS = {
    "torch fa2": Peer("torch FA2", partial(torch_backend, SDPBackend.FLASH_ATTENTION)),
    "cudnn": Peer("cuDNN", partial(torch_backend, SDPBackend.CUDNN_ATTENTION)),
    "flash-attn-4": Peer("flash-attn-4", flash_attn_4, partial(installed, "flash_attn.cute")),
    "plain": Peer("plain PyTorch", plain),
    "cudnn fp8": Peer("cuDNN FP8", cudnn_fp8, partial(installed, "cudnn"), precision="fp8"),
}
# Libraries whose versions a measurement notes: name -> module, distribution.
LIBRARIES = {
    "flash-attn-4": ("flash_attn.cute", "flash-attn-4"),
    "cudnn-frontend": ("cudnn", "nvidia-cudnn-frontend"),
}
