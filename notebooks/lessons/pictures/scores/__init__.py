"""The score matrix S in tiles: their order, their masks, the state of the softmax, splits."""
