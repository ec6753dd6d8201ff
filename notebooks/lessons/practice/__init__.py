"""What a reader does: predictions, exercises, puzzles, a bug to find. Answers are folded away."""
