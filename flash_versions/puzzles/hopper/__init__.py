"""Kernels for Hopper in Gluon, checked in the emulator: rings, products in flight, a small FA3.

May import: torch, triton, and parts of the versions' kernels, as the learner's file does.
"""
