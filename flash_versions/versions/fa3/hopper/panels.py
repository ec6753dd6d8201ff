"""Head dims between the powers of two: a head dim as one panel of columns or as two.

Gluon's tiles are powers of two wide, and the tensor cores multiply what a tile pads, too: 192 dims
in tiles of 256 cost a third more products and a third more shared memory. As two panels, one of 128
dims and one of 64, they cost what they are (`sizes.panel_widths`):

    S = Q0 K0^T + Q1 K1^T      a sum over dims: one accumulator, the products one after the other
    O = [P V0 | P V1]          an accumulator for each panel

In the backward, S^T and dP^T are such sums, and dK and dV have an accumulator for each panel. Its
second panel has at least half as many dims up to head_dim 128 (`backward/config.py`).

Each panel has boxes and tiles of its own. A slot of a pipeline has a tile for each, and one barrier
that counts the bytes of both. With one panel nothing is left of all this in the compiled kernel.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from flash_versions.versions.fa3.hopper import operands
from flash_versions.versions.tiles.algebra import finalize
from flash_versions.versions.tiles.pipeline import (
    Pipeline,
    as_matrix,
    make_pipeline,
    make_pipeline_beside,
    make_slots,
)
from flash_versions.versions.tiles.triton_compat import aggregate, load_tile
from flash_versions.versions.tiles.wgmma import WARPGROUP_ROWS, accumulator_layout, operand_layout


@aggregate
class Boxes:
    """A tensor for TMA: a descriptor for each panel, of the same tensor with another box."""

    first: tma.tensor_descriptor
    second: tma.tensor_descriptor  # the first again if there is one panel
    PANELS: gl.constexpr

    @gluon.jit
    def beside(self, coordinates):
        """The coordinates of the second panel's box beside a box of the first."""
        return moved(coordinates, self.first.block_type.shape[-1])

    @gluon.jit
    def panel(self, PANEL: gl.constexpr):
        """The boxes, the tile or the slots of a panel."""
        return self.second if PANEL == 1 else self.first

    @gluon.constexpr_function
    def width(self):
        """The columns of a row of boxes, of all panels."""
        second = self.second.block_type.shape[-1] if self.PANELS == 2 else 0
        return self.first.block_type.shape[-1] + second


@gluon.jit
def moved(coordinates, COLUMNS: gl.constexpr):
    """The coordinates of a box that begins so many columns later than one at column 0."""
    return coordinates[:-1] + (gl.to_tensor(COLUMNS),)


@gluon.jit
def make_boxes(first, second, PANELS: gl.constexpr):
    """The boxes of a kernel's two arguments; `second` is anything if there is one panel."""
    if PANELS == 1:
        second = first
    return Boxes(first, second, PANELS)


@aggregate
class Tiles:
    """Shared memory for boxes: a tile for each panel, or a row of slots for such tiles."""

    first: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor  # the first again if there is one panel
    PANELS: gl.constexpr

    panel = Boxes.panel

    @gluon.jit
    def index(self, slot):
        """The tiles of a slot."""
        return Tiles(self.first.index(slot), self.second.index(slot), self.PANELS)

    @gluon.jit
    def as_matrices(self):
        """Tiles of any rank as their rows and dims."""
        return Tiles(as_matrix(self.first), as_matrix(self.second), self.PANELS)

    @gluon.jit
    def rows(self, start, ROWS: gl.constexpr):
        """So many rows of matrices."""
        first = self.first.slice(start, ROWS, dim=0)
        return Tiles(first, self.second.slice(start, ROWS, dim=0), self.PANELS)

    @gluon.jit
    def pair(self):
        """The tiles as the left operand of `multiply_qk`."""
        return self.first, self.second

    @gluon.constexpr_function
    def width(self):
        """The columns of matrices, of all panels."""
        return self.first.shape[1] + (self.second.shape[1] if self.PANELS == 2 else 0)


@gluon.jit
def make_tiles(boxes, SLOTS: gl.constexpr):
    """Allocate slots for boxes."""
    first = make_slots(boxes.first, SLOTS)
    return Tiles(first, make_second(first, boxes, SLOTS), boxes.PANELS)


@gluon.jit
def make_second(first, boxes, SLOTS: gl.constexpr):
    """Allocate slots for the boxes of the second panel; `first` if there is none."""
    if boxes.PANELS == 2:
        return make_slots(boxes.second, SLOTS)
    else:
        return first


@aggregate
class PanelPipeline:
    """A `Pipeline` whose slots have a tile for each panel."""

    tiles: gl.shared_memory_descriptor  # slots of the first panel
    full: gl.shared_memory_descriptor  # of both panels
    empty: gl.shared_memory_descriptor
    second: gl.shared_memory_descriptor  # slots of the second panel
    STAGES: gl.constexpr
    PANELS: gl.constexpr

    at, wait, wait_empty = Pipeline.at, Pipeline.wait, Pipeline.wait_empty
    release, release_loaded = Pipeline.release, Pipeline.release_loaded
    fill_first, load_first_with = Pipeline.fill, Pipeline.load_with

    @gluon.jit
    def fill(self, stage, boxes, coordinates):
        """Producer: when the slot is empty, start to load the boxes at these coordinates."""
        if boxes.PANELS == 2:
            self.wait_empty(stage)
            beside = boxes.beside(coordinates)
            self.load_first_with(stage, boxes.first, coordinates, self.second, boxes.second, beside)
        else:
            self.fill_first(stage, boxes.first, coordinates)

    @gluon.jit
    def load_with(self, stage, boxes, coordinates, values, values_desc, values_coordinates):
        """`Pipeline.load_with`."""
        if boxes.PANELS == 2:
            full = self.full.index(stage.slot)
            nbytes: gl.constexpr = boxes.first.block_type.nbytes + boxes.second.block_type.nbytes
            mbarrier.expect(full, nbytes + values_desc.block_type.nbytes)
            tiles = self.slots(2).index(stage.slot)
            load_tile(boxes.first, coordinates, full, tiles.first)
            load_tile(boxes.second, boxes.beside(coordinates), full, tiles.second)
            load_tile(values_desc, values_coordinates, full, values.index(stage.slot))
        else:
            self.load_first_with(
                stage, boxes.first, coordinates, values, values_desc, values_coordinates
            )

    @gluon.jit
    def slots(self, PANELS: gl.constexpr):
        """All slots, of one panel or of both."""
        return Tiles(self.tiles, self.second, PANELS)

    @gluon.jit
    def tile(self, stage):
        """The slot as matrices of rows and dims."""
        return self.slots(self.PANELS).index(stage.slot).as_matrices()


@gluon.jit
def make_panel_pipeline(boxes, STAGES: gl.constexpr, CONSUMERS: gl.constexpr):
    """Allocate a pipeline of tiles for boxes."""
    return with_second(make_pipeline(boxes.first, STAGES, CONSUMERS), boxes, STAGES)


@gluon.jit
def make_panel_pipeline_beside(boxes, STAGES: gl.constexpr, pipeline):
    """Allocate a pipeline that shares the `empty` barriers of another one."""
    return with_second(make_pipeline_beside(boxes.first, STAGES, pipeline.empty), boxes, STAGES)


@gluon.jit
def with_second(first, boxes, STAGES: gl.constexpr):
    """A pipeline of the first panel with tiles for the second, if there is one."""
    second = make_second(first.tiles, boxes, STAGES)
    return PanelPipeline(first.tiles, first.full, first.empty, second, STAGES, boxes.PANELS)


@gluon.jit
def multiply_qk(q, k_tile, DTYPE: gl.constexpr = gl.float32):
    """Issue S = Q K^T, of a Q from `Tiles.pair`, summed up in a type: a token to wait for."""
    s_token = operands.multiply_qk(q[0], k_tile.first, DTYPE)
    if k_tile.PANELS == 2:
        k_second = k_tile.second.permute((1, 0))
        s_token = warpgroup_mma(q[1], k_second, s_token, is_async=True)
    return s_token


@gluon.jit
def multiply_pv(p, v_tile, acc):
    """Issue acc + P V, of a P from `rounded`: what `Output.wait` waits for."""
    first = operands.multiply_pv(p, v_tile.first, acc.first)
    if acc.PANELS == 2:
        operand: gl.constexpr = operand_layout(acc.second.type.layout)
        p = gl.convert_layout(p, operand, assert_trivial=True)
        return first, operands.multiply_pv(p, v_tile.second, acc.second)
    else:
        return first, first


@gluon.jit
def rounded(p, v_tile, acc):
    """P, rounded to V's type, in the registers that `multiply_pv` takes it from."""
    return operands.rounded(p, v_tile.first, acc.first)


@gluon.jit
def per_row(x, acc):
    """A number for each row of S as one for each row of an accumulator."""
    return gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)


@aggregate
class Output:
    """A consumer's rows of O, of dK or of dV in registers, an accumulator for each panel."""

    first: gl.tensor
    second: gl.tensor  # anything if there is one panel
    PANELS: gl.constexpr  # as many products of P and V are in flight together

    width = Tiles.width

    @gluon.jit
    def wait(self, tokens, IN_FLIGHT: gl.constexpr = 0):
        """The sums that `multiply_pv` issued; so many later products may still be in flight."""
        if self.PANELS == 2:
            first, second = warpgroup_mma_wait(IN_FLIGHT, deps=[tokens[0], tokens[1]])
            return Output(first, second, self.PANELS)
        else:
            first = warpgroup_mma_wait(IN_FLIGHT, deps=[tokens[0]])
            return Output(first, self.second, self.PANELS)

    @gluon.jit
    def rescaled(self, alpha):
        """Each row times its alpha."""
        first = self.first * per_row(alpha, self.first)[:, None]
        second = self.second
        if self.PANELS == 2:
            second = second * per_row(alpha, second)[:, None]
        return Output(first, second, self.PANELS)

    @gluon.jit
    def finalized(self, row_max, row_sum):
        """See `algebra.finalize`: (O, LSE)."""
        first, second = self.first, self.second
        first, lse = finalize(first, per_row(row_max, first), per_row(row_sum, first))
        if self.PANELS == 2:
            second, _ = finalize(second, per_row(row_max, second), per_row(row_sum, second))
        return Output(first, second, self.PANELS), lse

    @gluon.jit
    def scaled(self, factor):
        """All numbers times one."""
        return Output(self.first * factor, self.second * factor, self.PANELS)

    @gluon.jit
    def parts(self, COLUMNS: gl.constexpr):
        """Tiles of so many columns: those of the first panel, then those of the second."""
        parts = parts_of(self.first, COLUMNS)
        if self.PANELS == 2:
            parts = parts + parts_of(self.second, COLUMNS)
        return parts


@gluon.jit
def parts_of(x, COLUMNS: gl.constexpr):
    """A warpgroup's rows of an accumulator or of P as tiles of so many columns; what is missing of
    the only one is 0. That names registers and leaves no instruction.
    """
    N: gl.constexpr = x.shape[1]
    if N > COLUMNS:
        first, second = gl.split(x.reshape([WARPGROUP_ROWS, 2, N // 2]).permute((0, 2, 1)))
        return parts_of(first, COLUMNS) + parts_of(second, COLUMNS)
    else:
        x = joined((x,), COLUMNS // N)
        return (gl.convert_layout(x, accumulator_layout(COLUMNS), assert_trivial=True),)


@gluon.jit
def joined(parts, NUMBER: gl.constexpr):
    """The inverse of `parts_of`: NUMBER parts as one tile, 0 where there are fewer."""
    if len(parts) < NUMBER:
        zero = gl.full(parts[0].shape, 0.0, parts[0].dtype, parts[0].type.layout)
        return joined(parts + (zero,), NUMBER)
    elif NUMBER == 1:
        return parts[0]
    else:
        first = joined(parts[: NUMBER // 2], NUMBER // 2)
        second = joined(parts[NUMBER // 2 :], NUMBER // 2)
        halves = gl.join(first, second).permute((0, 2, 1))
        return halves.reshape([WARPGROUP_ROWS, 2 * first.shape[1]])


@gluon.constexpr_function
def number_of_parts(v, COLUMNS, FP8):
    """How many `Output.parts` there are, by the boxes of V, which is stored transposed in FP8."""
    dims = v.first.block_type.shape[-2 if FP8 else -1]
    return max(dims // COLUMNS, 1) + v.PANELS - 1


@gluon.jit
def zero_output(v_tiles, FP8: gl.constexpr):
    """O of rows that have seen no key, as wide as tiles of V."""
    second = gl.to_tensor(0)
    if v_tiles.PANELS == 2:
        second = zeros(v_tiles.second.shape[-1], FP8)
    return Output(zeros(v_tiles.first.shape[-2 if FP8 else -1], FP8), second, v_tiles.PANELS)


@gluon.jit
def zeros(DIMS: gl.constexpr, FP8: gl.constexpr):
    """An accumulator of a warpgroup's rows."""
    return gl.zeros([WARPGROUP_ROWS, DIMS], gl.float32, accumulator_layout(DIMS, FP8))
