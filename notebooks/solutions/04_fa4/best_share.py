"""The share of polynomial exponentials with which the busiest unit of the softmax is least busy."""


def best_share(counts, rates) -> int:
    """Eighths of the exponentials; counts are instructions of a warp, by eighths."""

    def cycles(eighths: int) -> float:
        made = counts[eighths]
        return max(
            128 * made.exponentials / rates.exponentials,
            128 * made.arithmetic / rates.arithmetic,
            made.issued,
        )

    return min(counts, key=cycles)


def wrong_all_of_it(counts, rates):
    """As many polynomials as there are."""
    return max(counts)


def wrong_other_gpu(counts, rates):
    """Right for one GPU only."""
    return 2


def wrong_sum(counts, rates):
    """The units work one after the other."""
    return min(
        counts,
        key=lambda x: (
            counts[x].exponentials / rates.exponentials + counts[x].arithmetic / rates.arithmetic
        ),
    )


def wrong_two_units(counts, rates):
    """Forgets that each instruction has to be issued."""
    return min(
        counts,
        key=lambda x: max(
            counts[x].exponentials / rates.exponentials, counts[x].arithmetic / rates.arithmetic
        ),
    )


def wrong_instructions(counts, rates):
    """Counts instructions, whatever the rates of the units."""
    return min(counts, key=lambda x: counts[x].issued)
