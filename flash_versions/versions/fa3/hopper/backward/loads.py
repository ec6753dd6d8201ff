"""What FA3's backward for Hopper loads of each block of queries."""

from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import tma

from flash_versions.versions.fa3.hopper.panels import Boxes
from flash_versions.versions.tiles.triton_compat import aggregate


@aggregate
class Inputs:
    """The tensors that a program loads from."""

    q: Boxes
    k: Boxes
    v: Boxes
    do: Boxes
    values: tma.tensor_descriptor  # rows of LSE and of delta, see `rows.Workspace`


@gluon.jit
def load_q(buffers, q, values, stage, where):
    """Start to load a block of Q, and with it its LSE, into an empty slot; where: see
    `KeyProblem.block_at`.
    """
    box, sequence, head, column = where
    buffers.q.load_with(stage, q, box, buffers.lse, values, [sequence, head, 0, column])


@gluon.jit
def load_do(buffers, do, values, stage, where):
    """`load_q` of dO and delta."""
    box, sequence, head, column = where
    buffers.do.load_with(stage, do, box, buffers.delta, values, [sequence, head, 1, column])
