"""The causal mask, aligned at the end of queries and keys."""


def last_key(i, m, n):
    """Query m - 1 sees key n - 1, and each one before it a key less."""
    return max(i + n - m, -1)


def wrong_top_left(i, m, n):
    """Aligned at the beginning: a single query over a long cache would see one key."""
    return i


def wrong_without_end(i, m, n):
    """The first queries see keys with negative numbers where there are more queries than keys."""
    return i + n - m


def wrong_by_one(i, m, n):
    """Query i does not see its own key."""
    return max(i + n - m - 1, -1)
