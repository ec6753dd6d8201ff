"""Triton's interpreter without work that it repeats: the same numbers, six times as fast.

Most of its time goes into names and types, and not into numbers (in Triton 3.6 to 3.9):

* each call of a device function lists all of `triton.language` for what to replace, though its
  launch has done so: here once for a launch;
* each tensor describes its shape anew, size by size, and each pair of operands is compared,
  promoted and broadcast: here what follows from types is worked out once, by Triton;
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
    _keep_shapes()
    _keep_promotions()
    _skip_what_is_dropped()


def _patch_modules_once(interpreter: Any) -> None:
    """Look a package through once, and patch it once for a launch, whatever its kernel calls."""
    import triton.language as tl

    patch_lang = interpreter._patch_lang
    launch, rewrite = interpreter.GridExecutor.__call__, interpreter.InterpretedFunction.rewrite
    patched: list[set] = []  # of each launch that runs, the modules

    @cache
    def builtins(package):
        return [name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)]

    for package in (tl, tl.core, tl.tensor, tl.math, tl.core.tensor_descriptor_base):
        builtins(package)  # before a launch has replaced any

    @cache
    def interpreted(member):
        function = getattr(member, "__wrapped__", member)  # without the check of `_semantic`

        def call(*arguments, **named):
            named["_semantic"] = interpreter.interpreter_semantic
            return function(*arguments, **named)

        return call

    def patch_builtin(package, builder, scope):
        for name in builtins(package):
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                scope.set_attr(package, name, interpreted(member))

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
    """NumPy's type for one of Triton, by its name; and two types of Triton, by theirs."""
    from triton.language import core

    original, found = interpreter._get_np_dtype, {}
    unwrap, equal = core._unwrap_if_constexpr, core.dtype.__eq__

    def numpy_type(dtype):
        scalar = dtype.scalar
        if scalar.name not in found:
            found[scalar.name] = original(scalar)
        return found[scalar.name]

    def same_type(self, other):
        if type(other) is core.dtype:
            return self.name == other.name
        return equal(self, other)

    def unwrap_quickly(x):
        return x if type(x) in plain else unwrap(x)

    plain = int, core.dtype, core.tensor
    interpreter._get_np_dtype = numpy_type
    core.dtype.__eq__ = same_type
    core._unwrap_if_constexpr = unwrap_quickly


def _keep_shapes() -> None:
    """Work out once what types of blocks, and the tensors of a type, say about their shape."""
    from triton.language import core

    describe_block, describe = core.block_type.__init__, core.tensor.__init__
    blocks: dict[tuple, Any] = {}  # the first of those that are equal

    def block_type(self, element, shape):
        sizes = tuple([x.value if type(x) is core.constexpr else x for x in shape])
        key = key_of(element), sizes
        if key in blocks:
            self.__dict__ = blocks[key].__dict__
        else:
            describe_block(self, element, shape)
            self.sizes = sizes
            blocks[key] = self

    def with_element_ty(self, element):
        return blocks.get((key_of(element), self.sizes)) or core.block_type(element, self.shape)

    def tensor(self, handle, type):
        if not hasattr(type, "of_tensors"):
            describe(self, handle, type)
            type.of_tensors = self.shape, self.numel, self.dtype, key_of(type)
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype, self.kind = type.of_tensors

    core.block_type.__init__ = block_type
    core.block_type.with_element_ty = with_element_ty
    core.tensor.__init__ = tensor


def key_of(type: Any) -> Any:
    """What types that are equal have alike, and others have not."""
    found = vars(type).get("key")
    if found is None:
        found = type.name, getattr(type, "address_space", None)
        if type.is_block():
            found = key_of(type.element_ty), type.sizes
        type.key = found
    return found


def _keep_promotions() -> None:
    """Work out once what two types of operands become.

    NumPy broadcasts by itself, so what is not as large as the other operand is left as it is.
    """
    from triton.language import core
    from triton.language.semantic import TritonSemantic

    promote, broadcast = (
        getattr(TritonSemantic, name)
        for name in ("binary_op_type_checking_impl", "broadcast_impl_value")
    )
    become: dict[tuple, tuple] = {}
    limits = {"int32": 2**31, "int64": 2**63}

    def constant(semantic, x, beside):
        """A number beside a tensor whose type it takes; any other is left as it is."""
        dtype = getattr(beside, "dtype", core.void)
        fits = type(x) is int and -limits.get(dtype.name, 0) <= x < limits.get(dtype.name, 0)
        if fits or type(x) in (int, float) and dtype.name == "fp32":
            return semantic.scalar_constant(x, dtype)
        return x

    def promoted(self, x, y, *options, **named):
        if not named and options[2:] in ((), (True, True)):
            if type(x) is not core.tensor:
                x = constant(self, x, y)
            elif type(y) is not core.tensor:
                y = constant(self, y, x)
        if not type(x) is type(y) is core.tensor:
            return promote(self, x, y, *options, **named)
        key = x.kind, y.kind, options, *named.items()
        if key not in become:
            x, y = promote(self, x, y, *options, **named)
            become[key] = x.type, y.type
            return x, y
        x_type, y_type = become[key]
        return typed(self, x, x_type), typed(self, y, y_type)

    def typed(semantic, x, type):
        if x.type is type:
            return x
        if x.dtype.name != type.scalar.name:
            x = semantic.cast(x, type.scalar)
        return core.tensor(x.handle, type)

    def broadcasted(self, x, y):
        return (x, y) if x.kind == y.kind else broadcast(self, x, y)

    TritonSemantic.binary_op_type_checking_impl = promoted
    TritonSemantic.broadcast_impl_value = broadcasted


def _skip_what_is_dropped() -> None:
    """Check for an overflow only where the outcome is looked at."""
    from triton.language.semantic import TritonSemantic

    original = TritonSemantic.binary_op_sanitize_overflow_impl

    def check(self, left, right, operation):
        if self.builder.options.debug:
            original(self, left, right, operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = check
