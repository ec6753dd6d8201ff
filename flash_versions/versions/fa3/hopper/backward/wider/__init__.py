"""FA3's backward for Hopper above head_dim 128: three other ways to divide a program's work."""
