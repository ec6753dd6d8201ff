"""Gluon kernels for Hopper and Blackwell on the CPU: torch computes their text.

Each partition of warps is a thread.

May import: torch, triton; nothing of this package. It loads a kernel's module anew by its name.
"""
