"""Gluon kernels for Hopper and Blackwell on the CPU: torch computes their text.

Each partition of warps is a thread.
"""
