"""Kernels for Hopper in Gluon, checked in the simulator: rings, products in flight, a small FA3."""
