"""What four numbers say about a tile: the first and the last start and end of its keys."""


def tile_kind(
    first_start: int, last_start: int, first_end: int, last_end: int, low: int, high: int
) -> str:
    """The kind of a tile of queries low to high, inclusive: "skipped", "masked" or "full"."""
    if first_start > high or last_end <= low:
        return "skipped"
    if last_start <= low and first_end > high:
        return "full"
    return "masked"


def wrong_one_tile(first_start, last_start, first_end, last_end, low, high):
    """As if all tiles had the queries 4 to 7."""
    return tile_kind(first_start, last_start, first_end, last_end, 4, 7)


def wrong_never_skips(first_start, last_start, first_end, last_end, low, high):
    """Right results, and all the work."""
    return "full" if last_start <= low and first_end > high else "masked"


def wrong_end_is_inside(first_start, last_start, first_end, last_end, low, high):
    """Takes the end of an interval for its last query."""
    if first_start > high or last_end < low:
        return "skipped"
    return "full" if last_start <= low and first_end >= high else "masked"


def wrong_skips_what_one_key_leaves(first_start, last_start, first_end, last_end, low, high):
    """Skips a block because one of its keys is not seen."""
    if last_start > high or first_end <= low:
        return "skipped"
    return "full" if last_start <= low and first_end > high else "masked"
