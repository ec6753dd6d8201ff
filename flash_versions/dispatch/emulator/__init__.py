"""Gluon kernels for Hopper on the CPU: their text computes with torch, a thread for each partition.

May import: torch, triton; nothing of this package. It loads a kernel's module anew by its name.
"""
