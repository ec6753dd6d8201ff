"""Which rows of a causal FA1 change if the mask is left out and the loop stays as it is."""


def rows_that_change(length, block_q, block_kv):
    """The loop of a tile ends with the block that holds the last key of its last row."""
    changed = []
    for i in range(length):
        last = min(i // block_q * block_q + block_q, length) - 1
        seen = (last // block_kv + 1) * block_kv  # keys, without a mask
        if seen > i + 1:
            changed.append(i)
    return changed


def wrong_all_but_the_last(length, block_q, block_kv):
    """As if the loop went over all keys."""
    return list(range(length - 1))


def wrong_only_the_tile(length, block_q, block_kv):
    """As if a block of keys were as long as a tile of queries."""
    return [i for i in range(length) if i % block_q != block_q - 1]


def wrong_only_the_block(length, block_q, block_kv):
    """As if each row had a loop of its own."""
    return [i for i in range(length) if i % block_kv != block_kv - 1]
