"""What FA3's kernels for Hopper know of a head beside its vectors: an ALiBi slope and a sink."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from flash_versions.versions.tiles.algebra import LOG2E
from flash_versions.versions.tiles.triton_compat import aggregate, replaced


@gluon.jit
def in_log2(sink):
    """A sink in log2 units. As an explicit fma it is rounded before a maximum is subtracted: a
    compiler may contract a product with that, and need not choose alike in two kernels.
    """
    return gl.fma(sink.to(gl.float32), LOG2E, 0.0)


@aggregate
class HeadMods:
    """The slope and the sink of a head, once `of_head` has loaded them, before that anything;
    `ScoreMods` in Gluon.

    Without ALIBI and SINK no field is read, and no instruction is left of it.
    """

    slopes: gl.tensor  # pointer to ALiBi slopes (batch, heads); else anything, as all that follows
    sinks: gl.tensor  # pointer to one logit for each head, from this head on
    batch_stride: gl.tensor
    head_stride: gl.tensor
    slope: gl.tensor  # in the units of the scores
    sink: gl.tensor  # in log2 units
    ALIBI: gl.constexpr
    SINK: gl.constexpr

    @gluon.jit
    def of_head(self, sequence, head, scale_log2):
        """The same with the numbers of a head."""
        slope, sink = self.slope, self.sink
        if self.ALIBI:
            at = sequence.to(gl.int64) * self.batch_stride + head * self.head_stride
            slope = gl.load(self.slopes + at).to(gl.float32) * (LOG2E / scale_log2)
        if self.SINK:
            sink = in_log2(gl.load(self.sinks + head))
        return replaced(self, sinks=self.sinks + head, slope=slope, sink=sink)

    @gluon.jit
    def biased(self, s, distance):
        """ALiBi: scores less the slope for every position between a query's own place and a key."""
        return s - self.slope * gl.abs(distance).to(gl.float32) if self.ALIBI else s
