"""The order of causal tiles: the heaviest of all heads first."""

Tile = tuple[int, int]  # head, tile of that head


def causal_order(heads: int, tiles: int) -> list[Tile]:
    """All (head, tile) in the order in which they begin; tile t sees t + 1 blocks of keys."""
    return [(head, tile) for tile in reversed(range(tiles)) for head in range(heads)]


def wrong_light_first(heads: int, tiles: int) -> list[Tile]:
    """The order of the numbers: the heaviest tiles begin last, on a GPU that is almost empty."""
    return [(head, tile) for tile in range(tiles) for head in range(heads)]


def wrong_head_by_head(heads: int, tiles: int) -> list[Tile]:
    """Heaviest first, but one head after the other: the last head's first tile is heavy."""
    return [(head, tile) for head in range(heads) for tile in reversed(range(tiles))]


def wrong_without_the_first_tile(heads: int, tiles: int) -> list[Tile]:
    """A range that ends one too early."""
    return [(head, tile) for tile in range(tiles - 1, 0, -1) for head in range(heads)]
