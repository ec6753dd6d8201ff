"""What a reader does: predictions, exercises, puzzles. Answers are folded away."""
