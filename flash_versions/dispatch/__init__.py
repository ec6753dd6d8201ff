"""A call on its way to a kernel: its arguments in one form, a version's contract, the launch."""
