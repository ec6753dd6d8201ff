"""The exercise of 03_fa3: the order of causal tiles."""

import itertools
from collections.abc import Callable

from lessons.pictures.scores.schedule import finish_time
from lessons.practice.exercises import exercise


@exercise(
    "causal_order",
    "Tile t sees t + 1 blocks of keys. Which tiles have most work, and of which heads are they?",
    "Begin with the last tile of every head; then take the tile before it of every head.",
    "Two loops: the outer one over reversed(range(tiles)), the inner one over range(heads).",
)
def check_order(function: Callable[[int, int], list[tuple[int, int]]]) -> None:
    """function(heads, tiles) -> (head, tile) in the order in which they begin."""
    for heads, tiles, processors in ((1, 4, 2), (6, 8, 12), (5, 16, 16)):
        found = [(int(head), int(tile)) for head, tile in function(heads, tiles)]
        every = list(itertools.product(range(heads), range(tiles)))
        assert sorted(found) == every, (
            f"with {heads} heads of {tiles} tiles there are {len(every)} tiles, each to be visited "
            f"once; you returned {len(found)}, of them {len({*every} & {*found})} right and "
            f"different ones."
        )
        late = finish_time(found, processors)
        best = finish_time(sorted(every, key=lambda place: -place[1]), processors)
        for number, ((_, tile), (_, following)) in enumerate(itertools.pairwise(found)):
            assert tile >= following, (
                f"with {heads} heads of {tiles} tiles, the tile at place {number} of your order "
                f"sees {tile + 1} blocks of keys and the next one {following + 1}, so a heavier "
                f"tile comes after a lighter one. {processors} SMs then finish after {late} "
                f"blocks; with the heaviest tiles first they finish after {best}."
            )
