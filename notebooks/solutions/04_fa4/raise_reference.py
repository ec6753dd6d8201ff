"""When to rescale: only where a block exceeds a row's reference by more than a threshold."""

import torch


def raise_reference(
    block_max: torch.Tensor, reference: torch.Tensor, threshold: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(reference, alpha) of each row after a block whose maxima are block_max; log2 units."""
    raised = block_max > reference + threshold
    new = torch.where(raised, block_max, reference)
    alpha = torch.where(raised & (reference > -torch.inf), torch.exp2(reference - new), 1.0)
    return new, alpha


def wrong_always(block_max, reference, threshold):
    """The running maximum of FA1 to FA3."""
    return raise_reference(block_max, reference, 0.0)


def wrong_at_the_threshold(block_max, reference, threshold):
    """Raised already where the maximum has grown by the threshold itself."""
    raised = block_max >= reference + threshold
    new = torch.where(raised, block_max, reference)
    return new, torch.where(raised & (reference > -torch.inf), torch.exp2(reference - new), 1.0)


def wrong_all_rows_together(block_max, reference, threshold):
    """One row that is raised takes all others with it."""
    if not (block_max > reference + threshold).any():
        return reference, torch.ones_like(reference)
    return raise_reference(block_max, reference, 0.0)


def wrong_only_up_to_the_threshold(block_max, reference, threshold):
    """Raised just so far that the maximum is within the threshold again."""
    new = torch.where(block_max > reference + threshold, block_max - threshold, reference)
    return new, torch.where(reference > -torch.inf, torch.exp2(reference - new), 1.0)


def right_first_block_counts(block_max, reference, threshold):
    """A row's first key multiplies what is 0 anyway by 2^-inf = 0: for nothing, but right."""
    new = torch.where(block_max > reference + threshold, block_max, reference)
    return new, torch.exp2(reference - torch.where(new > -torch.inf, new, 0.0))


def wrong_no_guard(block_max, reference, threshold):
    """A row that has seen no key yet computes inf - inf."""
    new = torch.where(block_max > reference + threshold, block_max, reference)
    return new, torch.exp2(reference - new)
