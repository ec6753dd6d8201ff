"""Questions with answers that can be checked."""
