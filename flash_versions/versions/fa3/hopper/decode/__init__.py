"""FA3's forward of few queries, on Hopper: what is computed, the kernel, its launch."""
