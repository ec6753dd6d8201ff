"""Conditional rescaling on Hopper: O is multiplied by alpha where a reference was raised.

A warp decides for all of its 16 rows: if none was raised, all of its alphas are 1, and it jumps
over its products. The decision and the jump are PTX, because a branch in Gluon is taken by all
warps of a partition together. `softmax.py` says when a reference is raised.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.fa3.hopper.panels import Output, per_row


@gluon.jit
def corrected(acc, alpha):
    """`Output.rescaled`, for the warps in which a row was raised; the others have nothing to do."""
    first = correct(acc.first, per_row(alpha, acc.first))
    second = acc.second
    if acc.PANELS == 2:
        second = correct(second, per_row(alpha, second))
    return Output(first, second, acc.PANELS)


@gluon.jit
def correct(acc, alpha):
    """acc * alpha of one accumulator."""
    N: gl.constexpr = acc.shape[1] // 2  # numbers of a thread
    PTX: gl.constexpr = correction_ptx(N)
    CONSTRAINTS: gl.constexpr = correction_constraints(N)
    raised = gl.inline_asm_elementwise(
        "{ .reg .pred mine, any; setp.ne.f32 mine, $2, 0f3F800000;"
        " setp.ne.or.f32 mine, $3, 0f3F800000, mine; vote.sync.any.pred any, mine, 0xffffffff;"
        " selp.b32 $0, 1, 0, any; mov.b32 $1, $0; }",
        "=r,=r,f,f", [alpha], dtype=gl.int32, is_pure=False, pack=2,
    )  # fmt: skip
    alpha, _ = gl.broadcast(alpha[:, None], acc)
    raised, _ = gl.broadcast(raised[:, None], acc)
    return gl.inline_asm_elementwise(
        PTX, CONSTRAINTS, [acc, alpha, raised], dtype=gl.float32, is_pure=True, pack=N
    )


@gluon.constexpr_function
def correction_ptx(n):
    """PTX that multiplies n numbers by n others, unless the flag that follows them is 0."""
    lines = [f"{{ .reg .pred raised; setp.ne.b32 raised, ${3 * n}, 0; @!raised bra kept;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return " ".join(lines) + " kept: }"


@gluon.constexpr_function
def correction_constraints(n):
    """n results, in the registers of the first n of 3 n arguments."""
    return ",".join(["=f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)
