"""A small transformer around the attention kernels: load, generate, chat, train."""
