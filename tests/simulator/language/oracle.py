"""Compute each case of kernels.py with Triton's own interpreter: python oracle.py RESULTS.

It saves what each case returns, or the text of its exception. TRITON_INTERPRET=1 has to be set.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from triton.runtime import interpreter


def repair_loop_bounds() -> None:
    """Triton 3.6 calls int() on an array of one element, which NumPy 2.4 refuses."""
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(np.ravel(self.handle.data)[0]))

    interpreter._patch_lang_tensor = patched


def main(results: str) -> None:
    """Run all cases."""
    file = Path(__file__).with_name("kernels.py")
    spec = importlib.util.spec_from_file_location("kernels", file)
    kernels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kernels)
    found = {}
    for name, case in kernels.CASES.items():
        try:
            found[name] = case.run()
        except Exception as error:  # each case is a test of its own
            found[name] = f"{type(error).__name__}: {error}"
    torch.save(found, results)


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of overflows and NaN, which the cases hold on purpose
    repair_loop_bounds()
    main(sys.argv[1])
