"""The benchmark: the shapes that it times, the peers that take part, and the committed results."""
