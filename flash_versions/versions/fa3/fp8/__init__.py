"""FA3 on 8-bit tensors: a portable kernel, what Hopper's changes, the scales of its tiles."""
