"""Triton's interpreter without work that it repeats: the same numbers, twice as fast.

Three things cost it half of its time (in Triton 3.6 to 3.9):

* each call of a device function lists all of `triton.language` for what to replace, though its
  launch has done so: here once for a launch;
* each operation makes a table of NumPy's types: here there is one;
* each sum and product of integers is computed once more in 64 bits and compared with the limits of
  its type by seven operations, and the outcome is dropped unless the launch is debugged: here
  nothing is computed that is dropped.

It replaces private functions of `triton.runtime.interpreter`, as `faithful.py` does, and imports
triton when it is asked to, which is after the environment said whether kernels are interpreted;
tests/flash_versions/dispatch/test_interpreter.py holds what they must still do.
"""

import inspect
from functools import cache
from typing import Any


def make_quick(interpreter: Any) -> None:
    """Install the replacements into `triton.runtime.interpreter`; to be called once."""
    _patch_modules_once(interpreter)
    _keep_types(interpreter)
    _skip_what_is_dropped()


def _patch_modules_once(interpreter: Any) -> None:
    """Look a package through once, and patch it once for a launch, whatever its kernel calls."""
    import triton.language as tl

    patch_lang, patch_attr = interpreter._patch_lang, interpreter._patch_attr
    launch, rewrite = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.rewrite
    patched: list[set] = []  # of each launch that runs, the modules

    @cache
    def builtins(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins(package)  # before a launch has replaced any

    def patch_builtin(package, builder, scope):
        for name in builtins(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                patch_attr(package, name, member, builder, scope)

    @cache
    def languages(fn):
        modules = (x for x in fn.__globals__.values() if inspect.ismodule(x))
        return frozenset(x.__name__ for x in modules if x in (tl, tl.core))

    def run(self, *arguments, **named):
        patched.append(set())
        try:
            launch(self, *arguments, **named)
        finally:
            patched.pop()

    def call(self, *arguments, **named):
        if not patched or not languages(self.fn) <= patched[-1]:
            patch_lang(self.fn)
            if patched:
                patched[-1].update(languages(self.fn))
        try:
            return rewrite(self)(*arguments, **named)
        except Exception as error:
            raise interpreter.InterpreterError(repr(error)) from error

    interpreter._patch_builtin = patch_builtin
    interpreter.GridExecutor.__call__ = run
    interpreter.InterpretedFunction.__call__ = call


def _keep_types(interpreter: Any) -> None:
    """NumPy's type for one of Triton, by its name."""
    original, found = interpreter._get_np_dtype, {}

    def numpy_type(dtype):
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = original(scalar)
        return found[scalar.name]

    interpreter._get_np_dtype = numpy_type


def _skip_what_is_dropped() -> None:
    """Check for an overflow only where the outcome is looked at."""
    from triton.language.semantic import TritonSemantic

    original = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self, left, right, operation):
        if self.builder.options.debug:
            original(self, left, right, operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = check
