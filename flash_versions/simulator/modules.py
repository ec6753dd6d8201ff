"""What stands in the place of Triton's modules, by their names."""

from typing import Any

from flash_versions.simulator import dtypes, language
from flash_versions.simulator.gluon import language as gluon
from flash_versions.simulator.loops import static_range
from flash_versions.simulator.rebind import BUILTINS, MODULES, Language
from flash_versions.simulator.values import Tile


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is not smaller."""
    return 1 << (n - 1).bit_length() if n > 1 else n


# What there is of triton.language, beside its types and what follows.
NAMES = """
    PropagateNan abs add advance arange argmax argmin associative_scan assume atomic_add atomic_and
    atomic_cas atomic_max atomic_min atomic_or atomic_xchg atomic_xor broadcast broadcast_to cast
    cat cdiv ceil clamp cos cumprod cumsum debug_barrier device_assert device_print div_rn dot erf
    exp exp2 expand_dims fdiv flip floor fma full gather histogram interleave item join load
    load_tensor_descriptor log log2 make_block_ptr make_tensor_descriptor max max_constancy
    max_contiguous maximum min minimum mul multiple_of num_programs pair_uniform_to_normal permute
    philox philox_impl pointer_type program_id rand rand4x randint randint4x randn randn4x range
    ravel reduce reduce_or reshape rint rsqrt sigmoid sin softmax sort split sqrt sqrt_rn squeeze
    static_assert static_print store store_tensor_descriptor sub sum swizzle2d to_tensor topk trans
    uint_to_uniform_float umulhi unsqueeze view where xor_sum zeros zeros_like
"""
FUNCTIONS: dict[str, Any] = {
    **{name: getattr(language, name) for name in NAMES.split()},
    **dtypes.NAMED,
    "static_range": static_range,
    "constexpr": lambda value: value,  # which has no wrapping in a kernel
    "tensor": Tile,
    "dtype": dtypes.dtype,
}
MATH = Language("triton.language.math", **FUNCTIONS)
CUDA = Language("triton.language.extra.cuda", **gluon.CUDA_EXTRA)
TL = Language("triton.language", **FUNCTIONS)
TL.math = TL.core = TL.standard = TL.random = MATH  # type: ignore[attr-defined]
TL.extra = Language("triton.language.extra", cuda=CUDA, libdevice=MATH)  # type: ignore[attr-defined]
HOPPER = Language("gluon.language.nvidia.hopper", **gluon.HOPPER)
BLACKWELL = Language("gluon.language.nvidia.blackwell", **gluon.BLACKWELL)
NVIDIA = Language("gluon.language.nvidia", hopper=HOPPER, blackwell=BLACKWELL, ampere=HOPPER)
GL = Language("gluon.language", **FUNCTIONS | gluon.GLUON, nvidia=NVIDIA)
GLUON = Language("triton.experimental.gluon", language=GL)
TRITON = Language(
    "triton", language=TL, cdiv=language.cdiv, next_power_of_2=next_power_of_2,
    experimental=Language("triton.experimental", gluon=GLUON),
)  # fmt: skip
_GL = "triton.experimental.gluon.language"
MODULES |= {
    "triton": TRITON,
    "triton.language": TL,
    "triton.language.extra": TL.extra,
    "triton.language.extra.cuda": CUDA,
    "triton.language.extra.libdevice": MATH,
    "triton.experimental": TRITON.experimental,
    "triton.experimental.gluon": GLUON,
    _GL: GL,
    f"{_GL}.nvidia": NVIDIA,
    f"{_GL}.nvidia.ampere": HOPPER,
    f"{_GL}.nvidia.hopper": HOPPER,
    f"{_GL}.nvidia.hopper.tma": HOPPER.tma,
    f"{_GL}.nvidia.hopper.mbarrier": HOPPER.mbarrier,
    f"{_GL}.nvidia.ampere.mbarrier": HOPPER.mbarrier,
    f"{_GL}.nvidia.blackwell": BLACKWELL,
    f"{_GL}.nvidia.blackwell.tma": BLACKWELL.tma,
}
BUILTINS["_semantic"] = gluon.Semantic
