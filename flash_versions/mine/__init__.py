"""A version of yours in one file: write it, check it, rank it, time it."""
