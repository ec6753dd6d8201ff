"""What stands in the place of Triton's modules."""

import types
from typing import Any

from flash_versions.simulator import language
from flash_versions.simulator.errors import CompileError
from flash_versions.simulator.gluon import language as gluon


class Language:
    """One of Triton's modules: what there is of it."""

    def __init__(self, name: str, **members: Any) -> None:
        self._name = name
        vars(self).update(members)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        known = ", ".join(sorted(x for x in vars(self) if not x.startswith("_")))
        raise CompileError(
            f"the simulator has no {self._name}.{name}; of this module it has {known}"
        )


TL: Any = Language("triton.language", **language.FUNCTIONS)
TL.math = TL.core = TL.standard = TL.random = TL
CUDA = Language("triton.language.extra.cuda", **gluon.CUDA_EXTRA)
TL.extra = Language("triton.language.extra", cuda=CUDA, libdevice=TL)
HOPPER = Language("gluon.language.nvidia.hopper", **gluon.HOPPER)
BLACKWELL = Language("gluon.language.nvidia.blackwell", **gluon.BLACKWELL)
NVIDIA = Language("gluon.language.nvidia", hopper=HOPPER, blackwell=BLACKWELL, ampere=HOPPER)
GL = Language("gluon.language", **language.FUNCTIONS | gluon.GLUON, nvidia=NVIDIA)
GLUON = Language("triton.experimental.gluon", language=GL)
TRITON = Language(
    "triton",
    language=TL,
    cdiv=language.FUNCTIONS["cdiv"],
    next_power_of_2=lambda n: 1 << (n - 1).bit_length() if n > 1 else n,
    experimental=Language("triton.experimental", gluon=GLUON),
)


def module_of(name: str) -> Any:
    """What stands in the place of a module of Triton, or in that of the one around it."""
    found: Any = TRITON
    for part in name.split(".")[1:]:
        inner = vars(found).get(part)
        if not isinstance(inner, Language | types.ModuleType):
            break
        found = inner
    return found
