"""The parts of a GPU, and the bytes that attention moves through its memory."""
