"""Matrix products with what follows them, portable and for Hopper."""
