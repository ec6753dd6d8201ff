"""Puzzles of their own: a file is a solution, with the task, the hints and the cases beside it."""
