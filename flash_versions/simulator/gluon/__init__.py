"""Gluon's half of the simulator: partitions of warps, barriers, shared and tensor memory, TMA."""
