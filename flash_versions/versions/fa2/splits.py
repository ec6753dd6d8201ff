"""Split-KV: into how many ranges the keys are split, so that few queries fill the GPU, too."""

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import Request
from flash_versions.versions.tiles.rows import cdiv

MAX_SPLITS = 65_535  # the second axis of a CUDA grid
WORTH_SPLITTING = 4  # KV blocks; a reduction takes as long as a few of them
FULL = 0.8  # programs for each multiprocessor, from which on the GPU counts as full


def choose_num_splits(programs: int, n_blocks: int, num_sms: int) -> int:
    """How many KV splits fill the GPU: 1 if it is full, else two programs per multiprocessor.

    Args:
        programs: programs of the unsplit kernel.
        n_blocks: KV blocks that there are to share out; a split gets at least four, or the
            reduction costs more.
        num_sms: of the device; 1 on the CPU, where splitting gains nothing.
    """
    if programs == 0 or programs >= FULL * num_sms:
        return 1
    return max(1, min(2 * num_sms // programs, n_blocks // 4))


def splits_of(request: Request, programs: int, block_kv: int, at_once: int = 1) -> int:
    """How many KV splits a request gets, if so many programs do the work of one split.

    Args:
        request: its num_splits, if it has one, is what it gets.
        programs: see `choose_num_splits`.
        block_kv: keys of a block.
        at_once: so many cost the reduction no more than two do, so a split may be a single block,
            as far as the GPU is not full.
    """
    n_blocks = max(1, cdiv(request.max_kv_length, block_kv))
    if request.window_left is not None and request.window_right is not None:
        seen = request.window_left + request.window_right + request.q.shape[1]
        n_blocks = min(n_blocks, cdiv(max(seen, 0), block_kv) + 1)
    num_splits = request.num_splits
    if num_splits is None:
        num_sms = devices[request.q.device].num_sms
        num_splits = choose_num_splits(programs, n_blocks, num_sms)
        if n_blocks >= WORTH_SPLITTING and 0 < programs < FULL * num_sms:
            num_splits = max(num_splits, min(at_once, 2 * num_sms // programs))
    return min(num_splits, n_blocks, MAX_SPLITS)
