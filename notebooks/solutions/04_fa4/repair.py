"""The bug of the correction: products may go on before O is rescaled."""

from lessons.practice.planted import ARRIVED, RESCALED, SPACE


def repair(text: str) -> str:
    """The text with the two lines in their order: first rescale O, then let P V begin."""
    lines = [f"{SPACE}{ARRIVED}", f"{SPACE}{RESCALED}"]
    return text.replace("\n".join(lines), "\n".join(reversed(lines)))


def wrong_no_signal(text):
    """Nobody tells the products that they may go on."""
    return text.replace(f"{SPACE}{ARRIVED}\n", "")


def wrong_no_rescale(text):
    """No race any more, and a wrong O."""
    return text.replace(f"{SPACE}{RESCALED}\n", "")


def wrong_nothing_replaced(text):
    """The line is not in the text like that."""
    return text.replace("buffers.p_full.arrive(t)", "")


def wrong_wait_twice(text):
    """The second wait is for a phase that never ends."""
    wait = f"{SPACE}mbarrier.wait(buffers.alpha_full.index(t), (step + 1) & 1)"
    return text.replace(f"{SPACE}{ARRIVED}", f"{wait}\n{SPACE}{ARRIVED}")
