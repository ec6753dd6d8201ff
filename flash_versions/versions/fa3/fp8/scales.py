"""What the numbers of FP8 tensors count, in FA3's kernel for Hopper."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.dispatch.precision import BLOCK_KEYS
from flash_versions.versions.fa3.fp8.pairs import MOST, scale_of_pairs
from flash_versions.versions.tiles.triton_compat import aggregate, replaced
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS

KEYS_OF_SCALE = gl.constexpr(BLOCK_KEYS)
TINY = gl.constexpr(2.0**-126)  # of the scale of scores: with 0, a masked score would be NaN
# Least shares of the largest scale: P rounds to 0 long before; row sums in fp16 need its bits.
SMALLEST = gl.constexpr(2.0**-64)
SMALLEST_IN_FP16 = gl.constexpr(2.0**-19)


@gluon.jit
def log2_approx(x):
    """log2 by the special function unit; `gl.log2` takes a polynomial of twelve products."""
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@aggregate
class Scales:
    """The scales of FP8 tensors, see `quantize.Quantized`; without FP8, pointers to anything.
    `of_tile` gives those of a consumer's queries and of the keys that they see.
    """

    q: gl.tensor  # pointers to fp32, contiguous
    k: gl.tensor  # of a tile: of its head's blocks of keys, and so is v
    v: gl.tensor
    v_reference: gl.tensor
    score: gl.tensor  # of a tile's scores, to log2 units; this and the next two are of tiles only
    value: gl.tensor  # of acc
    per_value: gl.tensor  # 1 / value
    FP8: gl.constexpr
    SCORES: gl.constexpr  # what the tensor cores add up scores in, see `pairs.py`
    PER_BLOCK: gl.constexpr  # a scale for 64 queries, for 128 keys; otherwise for each key head
    SHIFT: gl.constexpr  # P and its row sum count 2^SHIFT times

    @gluon.jit
    def of_tile(self, problem, query, head, sequence):
        """The scales that matter to a consumer's 64 queries of a head."""
        key_head = sequence * (problem.heads // problem.GROUP) + head // problem.GROUP
        if not self.FP8:
            score = problem.scale_log2
            return replaced(self, score=score, value=score, per_value=score)
        elif self.PER_BLOCK:
            rows = gl.cdiv(problem.q_length, WARPGROUP_ROWS)
            row = gl.minimum(query // WARPGROUP_ROWS, rows - 1)  # a tile may end past the last one
            q_scale = gl.load(self.q + (sequence * problem.heads + head) * rows + row)
            first = key_head * gl.cdiv(problem.kv_length, KEYS_OF_SCALE)
            value = gl.load(self.v_reference + key_head)
            return replaced(
                self, score=problem.scale_log2 * q_scale, value=value, per_value=1.0 / value,
                k=self.k + first, v=self.v + first
            )  # fmt: skip
        else:
            scale = gl.load(self.q + key_head) * gl.load(self.k + key_head)
            score = problem.scale_log2 * scale
            value = gl.load(self.v_reference + key_head)
            return replaced(self, score=score, value=value, per_value=value)

    @gluon.jit
    def largest_score(self):
        """What no score in 16 bits exceeds, in log2 units, where all keys have one scale."""
        return self.score * MOST

    @gluon.jit
    def of_block(self, problem, block):
        """(scale of the scores in log2 units, log2 of what P is multiplied by, what the row sum of
        P then counts) for a block of keys.

        P is as large as V's type holds well, 2^8 at most. Scaled by the block's share of the head's
        largest scale, blocks of V add up in one unit.
        """
        if self.PER_BLOCK:
            last = gl.cdiv(problem.kv_length, KEYS_OF_SCALE) - 1
            index = gl.minimum(block * problem.BLOCK_KV // KEYS_OF_SCALE, last)
            # Out of bounds: a block of zeros, which has any scale.
            in_fp16: gl.constexpr = self.SCORES == gl.float16  # noqa: SIM300
            least: gl.constexpr = SMALLEST_IN_FP16 if in_fp16 else SMALLEST
            share = gl.minimum(gl.maximum(gl.load(self.v + index) * self.per_value, least), 1.0)
            shift = log2_approx(share)
            score = self.of_scores(self.score * gl.load(self.k + index))
            return score, self.SHIFT + shift, gl.exp2(-shift)
        else:
            return self.of_scores(self.score), self.SHIFT, 1.0

    @gluon.jit
    def of_scores(self, score):
        """A scale of scores as they can be multiplied by it."""
        if self.SCORES == gl.float16:  # noqa: SIM300
            return scale_of_pairs(score)
        elif self.FP8:
            return gl.maximum(score, TINY)
        else:
            return score


@gluon.jit
def make_scales(
    q, k, v, v_reference, FP8: gl.constexpr, FP16_SCORES: gl.constexpr, PER_BLOCK: gl.constexpr,
    SHIFT: gl.constexpr
):  # fmt: skip
    """Those of no tile yet."""
    SCORES: gl.constexpr = gl.float16 if FP16_SCORES else gl.float32
    none = gl.to_tensor(0.0)
    return Scales(q, k, v, v_reference, none, none, none, FP8, SCORES, PER_BLOCK, SHIFT)
