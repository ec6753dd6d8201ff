"""Kernels for Hopper in Gluon, checked in the emulator: rings, products in flight, a small FA3."""
